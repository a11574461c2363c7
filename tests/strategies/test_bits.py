"""The trained weights are the same bits for the same number of replicas, in any processes."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_mgpu import allreduce
from lightning_mgpu.data import batch_loader
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.strategies.conftest import Net, new_trainer, run_in_processes, samples, world_size


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


RUNS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "textbook": (ManualAllreduceStrategy, {}),
    "ring": (ManualAllreduceStrategy, {"allreduce": allreduce.ring_allreduce}),
}


def train(name: str, save: Path | None = None, resume: Path | None = None, **kwargs: Any) -> str:
    """A digest of the state of four replicas. Batches are cut to 3, 3, 2, 2 and 2, 2, 2, 2."""
    seed_everything(0, verbose=False)
    new_strategy, options = RUNS[name]
    strategy, epochs = new_strategy(replicas=4, **options), 1 if save else 2
    trainer = new_trainer(strategy=strategy, max_epochs=epochs, **kwargs)
    module = Random().double()
    data: Any = DataLoader(samples(58), 10, shuffle=True)
    if save or resume:
        data = batch_loader(samples(58), 10, trainer, shuffle=True)
    trainer.fit(module, data, ckpt_path=resume, weights_only=False)
    assert len(set(module.numbers)) == len(module.numbers)  # of each replica and batch
    if save:
        trainer.save_checkpoint(save)
    tensors = [tensor.double().reshape(-1) for tensor in module.state_dict().values()]
    return hashlib.sha256(torch.cat(tensors).numpy().tobytes()).hexdigest()[:8]


def train_all(directory: Path) -> dict[str, str]:
    """The last run goes on where fewer processes have stopped."""
    digests = {name: train(name) for name in RUNS}
    digests["accumulated"] = train("textbook", accumulate_grad_batches=4)
    train("textbook", save=directory / f"{world_size()}.ckpt")
    saved = directory / f"{max(1, world_size() // 2)}.ckpt"
    return {**digests, "resumed": train("textbook", resume=saved)}


def test_the_same_bits_in_1_2_and_4_processes(tmp_path: Path) -> None:
    one, two, four = (run_in_processes(k, train_all, tmp_path) for k in (1, 2, 4))
    assert isinstance(one[0], dict), one
    assert two == one * 2 and four == one * 4
    digests = one[0]
    # `ring` adds in another order, and a run that goes on draws as one that was not stopped
    assert len(set(digests.values())) == len(digests)
