"""Runs of a small model with dropout, momentum and a scheduler, which a test can stop."""

import csv
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

OWN = '''
import os
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning_mgpu.models.classifier import Classifier, OptimizerCallable
from torch import nn
from lightning_mgpu.data import batch_loader
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric


class Net(Classifier):
    """Draws random numbers in a step, and logs a value of its own beside torchmetrics objects."""

    def __init__(
        self,
        optimizer: OptimizerCallable = lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        **kwargs,
    ):
        super().__init__(optimizer, **kwargs)
        self.example_input_array = torch.zeros(1, 1, 28, 28)
        layers = nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10)
        self.net = nn.Sequential(*layers)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        mean = {"on_step": False, "on_epoch": True, "sync_dist": True}
        self.log("mean_loss", loss, **mean, batch_size=len(batch[1]))
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.log("val_mine", 1.0, batch_size=len(batch[1]), sync_dist=True)


class Larger(MeanMetric):
    higher_is_better = True


class Falls(Net):
    """Logs 1.0, 0.9, 0.8, ... under a name, as a number or as an object of torchmetrics."""

    def __init__(self, name: str, as_object: bool = False):
        super().__init__()
        self.name, self.metric = name, Larger() if as_object else None

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        value = 1 - self.current_epoch / 10
        if self.metric is not None:
            self.metric.update(value)
        self.log(self.name, self.metric or value, batch_size=len(batch[1]), sync_dist=True)


class Ends(Net):
    """Sets weights when training ends."""

    def on_train_end(self):
        self.net[1].bias.data.fill_(7)

    def on_fit_end(self):
        self.net[4].bias.data.fill_(7)


class Tuned(Net):
    """Its backbone, the first layer, is frozen and thawed by a callback."""

    def __init__(self):
        super().__init__(lambda ps: torch.optim.SGD([p for p in ps if p.requires_grad], lr=0.1))
        self.backbone = self.net[1]


class Stop(Callback):
    """Ctrl-C before a batch, `STOP=epoch,batch` in the environment."""

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if os.environ.get("STOP") == f"{trainer.current_epoch},{batch_idx}":
            raise KeyboardInterrupt


class Shuffled(LightningDataModule):
    """A plain DataLoader, which has no state."""

    make = DataLoader

    def __init__(self, num_workers: int = 0):
        super().__init__()
        self.num_workers = num_workers

    def train_dataloader(self):
        X = torch.arange(40.0).reshape(40, 1, 1, 1).expand(40, 1, 28, 28) / 40
        samples = Noisy(X, torch.arange(40) % 10)
        return type(self).make(samples, 8, shuffle=True, num_workers=self.num_workers)


class Noisy(TensorDataset):
    def __getitem__(self, index):
        X, y = super().__getitem__(index)
        return X + torch.randn(X.shape), y


class InBatches(Shuffled):
    make = batch_loader


class SeedsByRank(Callback):
    def on_fit_start(self, trainer, pl_module):
        torch.manual_seed(100 + int(os.environ["RANK_OF_TEST"]))
'''
RUN = (
    *("--model=own_run.Net", "--model.lr_scheduler=StepLR", "--model.lr_scheduler.step_size=1"),
    *(
        "--model.lr_scheduler.gamma=0.7",
        "--trainer.callbacks=own_run.Stop",
        "--trainer.log_every_n_steps=2",
    ),
    *("--trainer.accelerator=cpu", "--trainer.max_epochs=4"),
)
DATA = ("--data.val_size=101", "--data.batch_size=64", "--data.augment=true")
STRATEGIES = {
    "one_device": ("--trainer.devices=1",),
    "manual_allreduce": ("--trainer.devices=2", "--trainer.strategy=manual_allreduce"),
    "ddp": ("--trainer.devices=2", "--trainer.strategy=ddp"),
}


def metrics(run: Path) -> list[dict[str, str]]:
    """The rows of `metrics.csv`, without the times."""
    with (run / "metrics.csv").open(newline="") as file:
        return [
            {key: value for key, value in row.items() if key != "epoch_seconds"}
            for row in csv.DictReader(file)
        ]


def last(run: Path) -> dict[str, Any]:
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, (list, tuple)) else a == b


def assert_same(whole: Path, resumed: Path) -> None:
    """The same weights, optimizer, schedulers, metrics and files."""
    a, b = last(whole), last(resumed)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert equal(a[key], b[key]), key
    # else a later resume goes on at another place
    for key in ("epoch_progress", "epoch_loop.batch_progress"):
        assert a["loops"]["fit_loop"][key] == b["loops"]["fit_loop"][key], key
    assert a["callbacks"]["LearningCurve"] == b["callbacks"]["LearningCurve"]
    assert metrics(whole) == metrics(resumed)
    names = [
        sorted(str(path.relative_to(run)) for path in run.rglob("*")) for run in (whole, resumed)
    ]
    assert names[0] == names[1]


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, where `own_run.py` is."""
    (tmp_path / "own_run.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_run", raising=False)
    return tmp_path


@pytest.fixture
def fit(
    own: Path, main: Callable[..., int], root: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., int]:
    """`fit` in this process, in `own_run.py`'s directory; `stop="epoch,batch"` is Ctrl-C there."""

    def fit(*args: str, stop: str = "") -> int:
        monkeypatch.setenv("STOP", stop)
        is_new = not any(arg.startswith(("--resume", "--data=")) for arg in args)
        return main("fit", *((*RUN, f"--data.root={root}", *DATA) if is_new else ()), *args)

    return fit


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def run(kept: Path, fit: Callable[..., int], own: Path, capfd: pytest.CaptureFixture) -> Path:
    """A run of two epochs in the working directory; trained for the first test, then copied."""
    if kept.exists():
        shutil.copytree(kept, own / "run")
    else:
        assert fit("--trainer.devices=1", "--trainer.max_epochs=2", "--run_dir=run") == 0
        capfd.readouterr()
        shutil.copytree(own / "run", kept)
    return own / "run"
