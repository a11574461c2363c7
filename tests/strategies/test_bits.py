"""The trained weights are the same bits for the same number of replicas, in any processes."""

import hashlib
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LearningRateFinder
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_mgpu import allreduce
from lightning_mgpu.data import batch_loader
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.strategies.conftest import (
    Net,
    new_trainer,
    no_shared_memory,
    run_in_processes,
    samples,
    world_size,
)


class Random(Net):
    """BatchNorm, dropout, AdamW, a scheduler, and a buffer of random numbers."""

    def __init__(self) -> None:
        layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3)]
        super().__init__(nn.Sequential(*layers, nn.Linear(16, 3)))
        self.register_buffer("drawn", torch.zeros(1))
        self.numbers: list[float] = []

    def loss(self, batch: Any) -> Tensor:
        self.drawn.copy_(torch.rand(1))  # type: ignore[operator]
        self.numbers.append(float(self.drawn))
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Noise(Dataset):
    """Draws from the three global generators."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> Tensor:
        drawn = random.random() + np.random.rand()  # noqa: NPY002
        return drawn + torch.rand(8, dtype=torch.float64)


class Evaluates(Random):
    """Its `validation_step` draws for each sample."""

    def validation_step(self, X: Tensor, batch_idx: int) -> None:
        self.net(X + torch.rand_like(X) + random.random() + np.random.rand())  # noqa: NPY002


class Looks(Evaluates):
    """The first process looks at batches, in hooks of training and of validation."""

    def on_train_batch_start(self, *args: Any) -> None:
        if self.trainer.is_global_zero:
            for loader in (self.trainer.val_dataloaders, self.trainer.train_dataloader):
                next(iter(loader))

    def on_validation_epoch_end(self) -> None:
        self.on_train_batch_start()


class FindsRate(Random):
    """Takes the rate that a finder suggests, by the losses of all replicas."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_callbacks(self) -> Any:
        return LearningRateFinder(num_training_steps=20)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), self.lr)


RUNS: dict[str, tuple[type[Random], Any, dict[str, Any]]] = {
    "textbook": (Random, {}, {}),
    "ring": (Random, {"allreduce": allreduce.ring_allreduce}, {}),
    "accumulated": (Random, {}, {"accumulate_grad_batches": 4}),
    "evaluates": (Evaluates, {}, {"max_epochs": 3}),
    "looks": (Looks, {}, {"max_epochs": 3}),
    # a validation in the middle of a window
    "window": (Evaluates, {}, {"accumulate_grad_batches": 4, "val_check_interval": 3}),
    "finds a rate": (FindsRate, {}, {}),
    "two replicas": (Random, {"replicas": 2}, {}),
}


def train(name: str, save: Path | None = None, resume: Path | None = None) -> str:
    """A digest of the state of four replicas. Batches are cut to 3, 3, 2, 2 and 2, 2, 2, 2."""
    seed_everything(0, verbose=False)
    make, options, kwargs = RUNS[name]
    strategy = ManualAllreduceStrategy(**{"replicas": 4, **options})
    trainer = new_trainer(strategy=strategy, **{"max_epochs": 1 if save else 2, **kwargs})
    module = make().double()
    data: Any = DataLoader(samples(58), 10, shuffle=True)
    if save or resume:
        data = batch_loader(samples(58), 10, trainer, shuffle=True)
    val = DataLoader(Noise(), 9, shuffle=True) if issubclass(make, Evaluates) else None
    trainer.fit(module, data, val, ckpt_path=resume, weights_only=False)
    if make is not FindsRate:  # whose steps are taken back
        assert len(set(module.numbers)) == len(module.numbers)  # of each replica and batch
    if save:
        trainer.save_checkpoint(save)
    tensors = [tensor.double().reshape(-1) for tensor in module.state_dict().values()]
    return hashlib.sha256(torch.cat(tensors).numpy().tobytes()).hexdigest()[:8]


def train_all(directory: Path) -> dict[str, str]:
    """The last run goes on where fewer processes have stopped."""
    names = [name for name in RUNS if name != "two replicas" or world_size() < 4]
    digests = {name: train(name) for name in names}
    for name in ["window", *names[6:]] if world_size() > 1 else []:
        for is_one_machine in (True, False):
            with no_shared_memory(is_one_machine):
                assert train(name) == digests[name]
    train("textbook", save=directory / f"{world_size()}.ckpt")
    saved = directory / f"{max(1, world_size() // 2)}.ckpt"
    return {**digests, "resumed": train("textbook", resume=saved)}


def test_the_same_bits_in_1_2_and_4_processes(tmp_path: Path) -> None:
    one, two, four = (run_in_processes(k, train_all, tmp_path) for k in (1, 2, 4))
    assert isinstance(one[0], dict), one
    assert two == one * 2
    digests = one[0]
    assert digests.pop("looks") == digests["evaluates"]  # a look moves nothing
    # `ring` adds in another order, and a run that goes on draws as one that was not stopped
    assert len(set(digests.values())) == len(digests)
    digests.pop("two replicas")
    for each in four:
        each.pop("looks")
        assert each == digests


@pytest.mark.parametrize("new_generator", [lambda: None, torch.Generator])
def test_two_fits_of_a_script_draw_other_numbers(new_generator: Any, tmp_path: Path) -> None:
    """Unless it is seeded again. A checkpoint keeps the seed of its fit."""

    def draw(max_epochs: int = 1, ckpt_path: Path | None = None) -> list[float]:
        with torch.random.fork_rng():  # the weights take no numbers from the fits
            module = Random()
        trainer = new_trainer(2, precision="64-true", max_epochs=max_epochs)
        loader = DataLoader(samples(), 10, generator=new_generator())
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=False)
        trainer.save_checkpoint(tmp_path / "last.ckpt")
        return module.numbers

    seed_everything(0)
    first, second = draw(), draw()
    resumed = draw(2, tmp_path / "last.ckpt")
    seed_everything(0)
    assert draw() == first != second
    assert draw(2) == second + resumed
