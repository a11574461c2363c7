"""Runs of a small model with dropout, momentum and a scheduler, which a test can stop."""

import csv
import shutil

import pytest
import torch

OWN = '''
import os
import signal
from typing import Literal

import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning_mgpu.models.classifier import Classifier
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader, TensorDataset


class Net(Classifier):
    """Draws random numbers in its steps, and logs values of its own beside torchmetrics objects."""

    def __init__(
        self,
        lr: float = 0.1,
        schedule: Literal["step", "plateau", "cycle"] = "step",
        width: int = 16,
    ) -> None:
        super().__init__()
        self.rate, self.schedule = lr, schedule
        first, last = nn.Linear(784, width), nn.Linear(width, 10)
        self.net = nn.Sequential(nn.Flatten(), first, nn.ReLU(), nn.Dropout(0.5), last)

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("mean_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        falling = 1 - self.current_epoch / 10
        values = {"val_mine": 1.0, "val_f1": falling, "val_error": falling}
        for name, value in values.items():
            self.log(name, value, batch_size=len(batch[1]), sync_dist=True)

    def test_step(self, batch, batch_idx):
        self.log("test_drawn", torch.rand(()), batch_size=len(batch[1]), sync_dist=True)
        return super().test_step(batch, batch_idx)

    def configure_optimizers(self):
        optimizer = SGD(self.parameters(), self.rate, momentum=0.9)
        if self.schedule == "plateau":
            scheduler = ReduceLROnPlateau(optimizer, patience=0)
            config = {"scheduler": scheduler, "monitor": "val_mine", "strict": False}
        elif self.schedule == "cycle":
            steps = self.trainer.estimated_stepping_batches
            config = {"scheduler": OneCycleLR(optimizer, 0.1, steps), "interval": "step"}
        else:
            config = {"scheduler": StepLR(optimizer, 1, 0.7)}
        return {"optimizer": optimizer, "lr_scheduler": config}


class Lambda(Net):
    def __init__(self, tag: str = "", act=lambda x: x, dtype=torch.float32) -> None:
        super().__init__()


class Shuffled(LightningDataModule):
    """A plain DataLoader, whose order is drawn from torch's generator."""

    def train_dataloader(self):
        X = torch.arange(40.0).reshape(40, 1, 1, 1).expand(40, 1, 28, 28) / 40
        return DataLoader(TensorDataset(X, torch.arange(40) % 10), 8, shuffle=True)


class Stop(Callback):
    """Sends a signal where the environment says: `2,1` in a batch, `save,2`, `test`, `sanity`."""

    def stop(self, *where):
        if os.environ.get("STOP") == ",".join(map(str, where)):
            os.kill(os.getpid(), signal.Signals[os.environ["SIGNAL"]])

    def on_sanity_check_start(self, *args):
        self.stop("sanity")

    def on_fit_start(self, *args):
        self.stop("setup")

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.stop(trainer.current_epoch, batch_idx)

    def on_save_checkpoint(self, trainer, pl_module, checkpoint):
        self.stop("save", trainer.current_epoch)

    def on_test_batch_start(self, *args):
        self.stop("test")
'''
RUN = (
    *("--model=own_run.Net", "--trainer.callbacks=own_run.Stop", "--trainer.log_every_n_steps=2"),
    *("--trainer.accelerator=cpu", "--trainer.max_epochs=4", "--trainer.devices=1"),
)
DATA = ("--data.val_size=101", "--data.batch_size=64", "--data.augment=true")


def metrics(run):
    """The rows of `metrics.csv`, without the times."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = [*csv.DictReader(file)]
    times = {"epoch_seconds", "seconds"}
    seconds = [float(row["seconds"]) for row in rows if row.get("seconds")]
    assert seconds == sorted(seconds), "a resumed run goes on from its last row"
    return [{key: row[key] for key in row if key not in times} for row in rows]


def last(run):
    return torch.load(run / "checkpoints" / "last.ckpt", weights_only=True, map_location="cpu")


def equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[key], b[key]) for key in a)
    return len(a) == len(b) and all(map(equal, a, b)) if isinstance(a, (list, tuple)) else a == b


def assert_same(whole, resumed):
    """The same weights, optimizer, schedulers, progress, metrics and files."""
    a, b = last(whole), last(resumed)
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step"):
        assert equal(a[key], b[key]), key
    assert a["loops"]["fit_loop"]["epoch_progress"] == b["loops"]["fit_loop"]["epoch_progress"]
    assert metrics(whole) == metrics(resumed)
    names = [{str(path.relative_to(run)) for path in run.rglob("*")} for run in (whole, resumed)]
    assert names[0] == names[1]


@pytest.fixture
def own(tmp_path):
    (tmp_path / "own_run.py").write_text(OWN)
    return tmp_path


@pytest.fixture
def fit(own, main, root, monkeypatch):
    """`fit` in this process; `stop` says where a signal comes, see `Stop`."""

    def fit(*args, stop="", number="SIGINT"):
        monkeypatch.setenv("STOP", stop)
        monkeypatch.setenv("SIGNAL", number)
        is_new = not any(arg.startswith("--resume") for arg in args)
        data = () if "--data=own_run.Shuffled" in args else (f"--data.root={root}", *DATA)
        return main("fit", *((*RUN, *data) if is_new else ()), *args)

    return fit


@pytest.fixture(scope="session")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("trained") / "run"


@pytest.fixture
def run(kept, fit, own, capfd):
    """A run of two epochs in the working directory; trained for the first test, then copied."""
    if not kept.exists():
        assert fit("--trainer.max_epochs=2", "--run_dir=run") == 0
        capfd.readouterr()
        (own / "run").rename(kept)
    shutil.copytree(kept, own / "run")
    return own / "run"
