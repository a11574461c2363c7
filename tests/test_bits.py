"""The trained weights are the same bits for the same number of replicas, however they talk.

Also after a machine is lost. tests/lab/network has emulated machines.
"""

import hashlib
import os
import random
import socket
import sys
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import LearningRateFinder
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_mgpu import allreduce
from lightning_mgpu.data import batch_loader
from lightning_mgpu.strategies import ManualAllreduceStrategy
from tests.cases import Manual
from tests.runs.conftest import OWN
from tests.strategies.conftest import Net, new_trainer, no_shared_memory, run_in_processes, samples


class Random(Net):
    """BatchNorm, dropout, AdamW, a scheduler, and a buffer of random numbers."""

    def __init__(self):
        layers = [nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3)]
        super().__init__(nn.Sequential(*layers, nn.Linear(16, 3)))
        self.register_buffer("drawn", torch.zeros(1))
        self.numbers = []

    def loss(self, batch):
        self.drawn.copy_(torch.rand(1))
        self.numbers.append(float(self.drawn))
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Noise(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, index):
        drawn = random.random() + np.random.rand()  # noqa: NPY002
        return drawn + torch.rand(8, dtype=torch.float64)


class Evaluates(Random):
    def validation_step(self, X, batch_idx):
        self.net(X + torch.rand_like(X) + random.random() + np.random.rand())  # noqa: NPY002


class Looks(Evaluates):
    def on_train_batch_start(self, *args):
        if self.trainer.is_global_zero:
            for loader in (self.trainer.val_dataloaders, self.trainer.train_dataloader):
                next(iter(loader))

    def on_validation_epoch_end(self):
        self.on_train_batch_start()


class ByHand(Manual, Random):
    def on_train_epoch_end(self):
        self.lr_schedulers().step()


class FindsRate(Random):
    def __init__(self):
        super().__init__()
        self.lr = 0.01

    def configure_callbacks(self):
        return LearningRateFinder(num_training_steps=20, early_stop_threshold=None)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), self.lr)

    def on_train_start(self):
        self.numbers.clear()  # the finder's steps are taken back

    def teardown(self, stage):
        assert self.lr != 0.01


class Sometimes(Random):
    """Some shards have a gradient that is not finite, and some have one of the first layer only."""

    def loss(self, batch):
        loss, total = super().loss(batch), float(batch[0].sum())
        if abs(total) < 4:
            return loss
        return loss * torch.inf if total > 0 else self.net[0].weight.square().sum()

    def on_before_optimizer_step(self, optimizer):
        for parameter in self.parameters():
            parameter.grad.nan_to_num_(0, 0, 0)


def train(strategy, make=Random, data=None, resume=None, **kwargs):
    """Shuffled by its `batch_loader`, unless there are data."""
    seed_everything(0, verbose=False)
    trainer, module = new_trainer(strategy=strategy, **kwargs), make().double()
    val = DataLoader(Noise(), 9, shuffle=True) if issubclass(make, Evaluates) else None
    data = data or batch_loader(samples(58), 10, trainer, shuffle=True, seed=1)
    trainer.fit(module, data, val, ckpt_path=resume, weights_only=False)
    return trainer


def digest(trainer):
    tensors = trainer.lightning_module.state_dict().values()
    vector = torch.cat([tensor.double().reshape(-1) for tensor in tensors])
    return hashlib.sha256(vector.numpy().tobytes()).hexdigest()[:8]


MANUAL = ManualAllreduceStrategy
RUNS = {
    "textbook": (MANUAL, Random, {"max_epochs": 3}),
    "plain loader": (MANUAL, Random, {}),
    "ring": (partial(MANUAL, allreduce.ring_allreduce), Random, {}),
    "accumulated": (MANUAL, Random, {"accumulate_grad_batches": 4}),
    "evaluates": (MANUAL, Evaluates, {"max_epochs": 3}),
    "looks": (MANUAL, Looks, {"max_epochs": 3}),
    # a validation in the middle of a window
    "window": (MANUAL, Evaluates, {"accumulate_grad_batches": 4, "val_check_interval": 3}),
    "finds a rate": (MANUAL, FindsRate, {"max_epochs": 4}),
    "sync_batchnorm": (MANUAL, Random, {"sync_batchnorm": True}),
    "manual": (MANUAL, ByHand, {}),
}
SHUFFLED_BY_TORCH = [*RUNS][1:]
if find_spec("lightning_mgpu.exchanges"):  # which can be deleted
    exchanges = import_module("lightning_mgpu.exchanges")
    for name in ("exact", "top_k", "power_sgd", "ef_sign"):
        exchange = partial(exchanges.ExchangeStrategy, getattr(exchanges, name))
        RUNS[name] = exchange, Random, {"max_epochs": 3}
    by_top_k = RUNS["top_k"][0]
    RUNS["top_k, accumulated"] = by_top_k, Random, {"accumulate_grad_batches": 4}
    RUNS["top_k, uneven"] = by_top_k, Sometimes, {}
    RUNS["top_k, flat"] = partial(by_top_k, flat=True), Random, {}
RESUMED = {"textbook", "top_k", "power_sgd"} & RUNS.keys()
BY_MESSAGES = {"window", "ring", "manual", "top_k, flat", "power_sgd", "top_k, uneven"}
BY_MESSAGES &= RUNS.keys()


def run(name, **kwargs):
    """Four replicas. Batches are cut to 3, 3, 2, 2 and 2, 2, 2, 2."""
    strategy, make, options = RUNS[name]
    data = DataLoader(samples(58), 10, shuffle=True) if name in SHUFFLED_BY_TORCH else None
    trainer = train(strategy(), make, data, **{**options, **kwargs})
    numbers = trainer.lightning_module.numbers
    assert len(set(numbers)) == len(numbers)  # of each replica and batch
    return trainer


def train_all(directory):
    digests = {name: digest(run(name)) for name in RUNS}
    for name in sorted(BY_MESSAGES):
        for is_one_machine in (True, False):
            with no_shared_memory(is_one_machine):
                assert digest(run(name)) == digests[name], name
    for name in sorted(RESUMED):
        path = directory / f"{name}.ckpt" / "last.ckpt"
        for epochs in (1, 2, 3):
            resume = path if path.exists() else None
            trainer = run(name, resume=resume, max_epochs=epochs)
            trainer.save_checkpoint(path)
        assert digest(trainer) == digests[name], name
    return digests


def test_the_same_bits_in_memory_by_messages_and_resumed(tmp_path):
    digests, *others = run_in_processes(4, train_all, tmp_path)
    assert isinstance(digests, dict), digests
    assert others == [digests] * 3
    assert digests.pop("looks") == digests["evaluates"]  # a look moves nothing
    assert digests.pop("manual") == digests["plain loader"]
    assert digests.pop("exact", digests["textbook"]) == digests["textbook"]
    assert len(set(digests.values())) == len(digests)  # `ring` adds in another order


def draw_in_fits(has_generator, directory):
    """The numbers of two fits, of the second one resumed, and of both after another seeding."""

    def draw(max_epochs=1, ckpt_path=None):
        with torch.random.fork_rng():  # the weights take no numbers from the fits
            module = Random()
        trainer = new_trainer(precision="64-true", max_epochs=max_epochs)
        generator = torch.Generator() if has_generator else None
        loader = DataLoader(samples(), 10, generator=generator)
        trainer.fit(module, loader, ckpt_path=ckpt_path, weights_only=False)
        trainer.save_checkpoint(directory / "last.ckpt")
        return module.numbers

    seed_everything(0)
    first, second = draw(), draw()
    resumed = draw(2, directory / "last.ckpt")
    seed_everything(0)
    return first, second, resumed, draw(), draw(2)


@pytest.mark.parametrize("has_generator", [False, True])
def test_two_fits_of_a_script_draw_other_numbers(has_generator, tmp_path, in_two_processes):
    """Unless it is seeded again. A checkpoint keeps the seed of its fit."""
    results = in_two_processes(draw_in_fits, has_generator, tmp_path)
    for first, second, resumed, again, both in results:
        assert first == again != second and both == second + resumed
    assert not {*results[0][0]} & {*results[1][0]}, "replicas draw different numbers"


SCRIPT = Path(__file__).parents[1] / "scripts" / "elastic.sh"
LOST = """

class Lost(Net):
    '''Ends its machine, torchrun's agent and its process, in the second epoch.'''

    def on_train_batch_start(self, batch, batch_idx):
        is_lost = os.environ.get("IS_LOST") and self.trainer.local_rank == 0
        if is_lost and (self.current_epoch, batch_idx) == (1, 2):
            os.kill(os.getppid(), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
"""
RUN = (
    *("--model=own_run.Lost", "--data=own_run.Shuffled", "--trainer.max_epochs=3"),
    *("--trainer.accelerator=cpu", "--output.curve=false"),
)
REPLICAS = ("--trainer.strategy=manual_allreduce", "--trainer.strategy.replicas=4")


def fingerprint(out):
    (line,) = (line for line in out.splitlines() if line.startswith("fingerprint: "))
    return line


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_lost_machine_changes_no_bit(command, tmp_path, main, capfd):
    (tmp_path / "own_run.py").write_text(OWN + LOST)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    def start(is_host, **env):
        machines = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3")
        env = {**env, "PATH": path, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        meeting = ("--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}")
        conf = f"--rdzv-conf=is_host={int(is_host)},last_call_timeout=2,keep_alive_interval=1"
        launcher = ("-m", "torch.distributed.run", *machines, *meeting, conf)
        script = ("--no-python", "bash", str(SCRIPT), "run")
        return command.start(*script, *RUN, *REPLICAS, launcher=launcher, **env)

    kept, lost = start(True), start(False, IS_LOST="1")
    assert command.finish(lost, timeout=120)[0] == -9
    code, out, err = command.finish(kept, timeout=120)
    assert code == 0, err
    # both machines trained the first epoch, and one machine the others
    both, _, one = out.partition("4 replicas on 1 x cpu")
    assert "4 replicas on 2 machines" in both and "epoch 2/3" not in both and "epoch 2/3" in one

    assert main("fit", *RUN, *REPLICAS, "--trainer.devices=2", "--run_dir=whole") == 0
    assert fingerprint(out) == fingerprint(capfd.readouterr().out)
