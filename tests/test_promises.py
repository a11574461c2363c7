"""What a strategy promises: training on several devices equals training on one, in float64.

pytest tests/test_promises.py --strategies ddp dp my_package.MyStrategy --devices 3

prints a table for a Markdown page. A promise is kept (yes), broken (no), refused by an error of one
line, or not applicable. Without `--strategies`, `manual_allreduce` must keep every promise. The
option `--timeout` of pytest-timeout limits the seconds per case.
"""

import pickle
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_mgpu.cli.errors import last_frame
from lightning_mgpu.cli.strategy_names import make_strategy
from lightning_mgpu.data import batch_loader
from tests.cases import Manual, Weighted
from tests.strategies.conftest import QUIET, Group, Net, assert_close, samples

EVEN, UNEVEN = (48, 12), (57, 10)  # samples, global batch size: the last batch of UNEVEN has 7


class Scheduled(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Normed(Net):
    def __init__(self, dropout=0.0):
        layers = (nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(dropout))
        super().__init__(nn.Sequential(nn.Linear(8, 16), *layers, nn.Linear(16, 3)))


class Random(Normed, Scheduled):
    def __init__(self):
        super().__init__(dropout=0.3)


class Evaluated(Net):
    def __init__(self):
        super().__init__()
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def validation_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.log("loss", loss)
        self.log("loss with sync_dist", loss, sync_dist=True)
        self.accuracy(self.net(batch[0]), batch[1])
        self.log("torchmetrics", self.accuracy)


class Run(NamedTuple):
    """A strategy in a Trainer, and a directory for its checkpoints. `auto` is Lightning's own."""

    directory: Path
    strategy: str
    devices: int
    accelerator: str
    options: dict[str, Any]

    def trainer(self, **kwargs):
        strategy = make_strategy(self.strategy, **self.options)
        where = {"accelerator": self.accelerator, "devices": self.devices}
        settings = {**QUIET, **where, "precision": "64-true", "max_epochs": 2, **kwargs}
        return Trainer(strategy=strategy, default_root_dir=self.directory, **settings)

    def checkpoint(self):
        return self.directory / f"{self.strategy}.ckpt"


def train(
    make,
    size,
    run,
    resume=None,
    **kwargs,
):
    """Train a module, and save it; returns its state."""
    seed_everything(0, verbose=False)
    trainer, module = run.trainer(**kwargs), make()
    loader = batch_loader(samples(size[0]), size[1], trainer, shuffle=True, seed=0)
    trainer.fit(module, loader, ckpt_path=resume, weights_only=False)
    if not resume:
        trainer.save_checkpoint(run.checkpoint())
    return {name: tensor.detach().cpu().clone() for name, tensor in module.state_dict().items()}


def evaluate(run):
    seed_everything(0, verbose=False)
    trainer, module = run.trainer(), Evaluated()
    return trainer.validate(module, batch_loader(samples(), 10, trainer), verbose=False)


def save_and_resume(run):
    """A checkpoint after an epoch, and a second epoch from the checkpoint of one device."""
    train(Scheduled, EVEN, run, max_epochs=1)
    saved = torch.load(run.checkpoint(), map_location="cpu", weights_only=False)
    resumed = train(Scheduled, EVEN, run, resume=run.directory / "auto.ckpt")
    return [dict(saved["state_dict"]), saved["optimizer_states"], resumed]


SAME_BITS = "bitwise identical with `replicas=4` on 1, 2 and 4 devices"
PROMISES = {
    "parameters": partial(train, Net, EVEN),
    "uneven batches": partial(train, Net, UNEVEN),
    "clipping": partial(train, Net, EVEN, gradient_clip_val=0.1),
    "accumulation": partial(train, Net, EVEN, accumulate_grad_batches=3),
    "schedulers": partial(train, Scheduled, EVEN),
    "manual optimization": partial(train, Manual, EVEN),
    "sync_batchnorm": partial(train, Normed, UNEVEN, sync_batchnorm=True),
    "weight of a loss": partial(train, Weighted, EVEN),
    "logging in evaluation": evaluate,
    "save and resume": save_and_resume,
    SAME_BITS: partial(train, Random, (48, 10)),  # shards of 3, 3, 2 and 2
}
"""What is trained or evaluated, in every process of a strategy, and compared with one device."""


class RefusedError(Exception):
    """The strategy raises an error of one line instead of training."""


@contextmanager
def refusals():
    """Turn the errors by which a strategy refuses a run into RefusedErrors."""
    try:
        yield
    except (ValueError, MisconfigurationException) as error:
        is_raised = "raise " in last_frame(error)[1]  # else Python raises it: a defect
        if is_raised and "\n" not in str(error).strip():
            raise RefusedError(str(error)) from error
        raise


def run_here(promise, run):
    """Run a case in this process of a strategy."""
    with refusals():
        return PROMISES[promise](run)


def run_in_all(promise, run):
    """The results of all processes of a strategy. The first error ends them."""
    with refusals():
        num_processes = run.trainer().world_size
    group, results = Group(num_processes), []
    waiting = dict(zip(group.connections, group.processes))
    try:
        group.send(__name__, run_here.__name__, (promise, run), {})
        while waiting:
            for connection in wait(waiting):
                result = receive(connection, waiting.pop(connection))
                if isinstance(result, str):
                    name, _, reason = result.partition(": ")
                    raise RefusedError(reason) if name == "RefusedError" else AssertionError(result)
                results.append(result)
        return results
    finally:
        if len(results) < num_processes:  # the others may wait for one with an error
            for process in group.processes:
                process.kill()
        group.end()


def receive(connection, process):
    """What a process returns, or an error as text."""
    try:
        return pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionResetError):
        process.join()
        return f"a process ended with status {process.exitcode}"


def check(promise, run):
    """Raise an AssertionError for a broken promise, or a RefusedError."""
    if promise == SAME_BITS:
        run = run._replace(options={**run.options, "replicas": 4})
        results = [each for k in (1, 2, 4) for each in run_in_all(promise, run._replace(devices=k))]
    else:
        expected = PROMISES[promise](run._replace(strategy="auto", devices=1, options={}))
        results = run_in_all(promise, run)
        assert_close(results[0], expected, atol=1e-10)
    for found in results:
        assert_close(found, results[0], rtol=0)


def pytest_generate_tests(metafunc):
    if metafunc.function is test_promise:
        strategies = metafunc.config.getoption("strategies") or ["manual_allreduce"]
        cases = [(strategy, promise) for strategy in strategies for promise in PROMISES]
        metafunc.parametrize(("strategy", "promise"), cases, ids=map(": ".join, cases))


def test_promise(strategy, promise, pytestconfig, tmp_path):
    devices, accelerator, options, is_asked = map(
        pytestconfig.getoption, ("devices", "accelerator", "options", "strategies")
    )
    run = Run(tmp_path, strategy, devices, accelerator, dict(options))
    if promise == SAME_BITS and not hasattr(make_strategy(strategy, **run.options), "replicas"):
        pytest.skip("not applicable: it has no option `replicas`")
    try:
        check(promise, run)
    except RefusedError as error:
        if not is_asked:  # a default strategy keeps its promises
            raise
        pytest.skip(f"refused: {error}")
