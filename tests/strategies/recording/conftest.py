"""A model that calls a test's step in every hook, trained on one device and on several: what is logged is the same."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_mgpu.strategies  # noqa: F401 (registers them)
from lightning_mgpu.strategies.recording.recording import find_metrics

NUM_CLASSES = 4


class Written(DummyLogger):
    """Keeps what the Trainer writes, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))


def loader(num_samples: int = 23, batch_size: int = 7, seed: int = 1) -> DataLoader:
    """Batches of 7, 7, 7 and 2 samples: uneven shards, and fewer samples than three devices."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
    y = (X[:, :NUM_CLASSES].argmax(1) + torch.randint(0, 2, (num_samples,), generator=generator)) % NUM_CLASSES
    return DataLoader(TensorDataset(X, y), batch_size)


Step = Callable[["Probe", str, Tensor, Tensor, int], Any]


class Probe(LightningModule):
    """Calls `step(self, stage, X, y, batch_idx)` in every hook; `at_end(self, stage)` when an epoch ends."""

    def __init__(self, step: Step, make: Callable[[], Any], at_end: Callable[["Probe", str], None] | None) -> None:
        super().__init__()
        self.net = nn.Linear(5, NUM_CLASSES).double()
        self.step, self.at_end = step, at_end
        self.metric = make()

    def on_fit_start(self) -> None:
        for metric in find_metrics(self).values():  # those in plain lists are moved by nobody else
            metric.to(self.device)

    on_test_start = on_fit_start

    def probabilities(self, X: Tensor) -> Tensor:
        return self.net(X).softmax(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.step(self, "train", *batch, batch_idx)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.step(self, "val", *batch, batch_idx)

    def test_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.step(self, "test", *batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.at_end:
            self.at_end(self, "train")

    def on_validation_epoch_end(self) -> None:
        if self.at_end:
            self.at_end(self, "val")

    def on_test_epoch_end(self) -> None:
        if self.at_end:
            self.at_end(self, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def run(
    engine: str, k: int, step: Step, make: Callable[[], Any] = lambda: None, at_end: Any = None, num_loaders: int = 1
) -> list[Any]:
    """What the logger was given, then `callback_metrics` after fit and after test."""
    seed_everything(0, verbose=False)
    logger = Written()
    kind = {"strategy": "auto", "devices": 1} if k == 1 else {"strategy": engine, "devices": k}
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=logger, log_every_n_steps=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **kind,
    )  # fmt: skip
    module = Probe(step, make, at_end)
    trainer.fit(module, loader(), [loader(11, 4, seed) for seed in range(num_loaders)])
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.test(module, [loader(10, 4, seed) for seed in range(2, 2 + num_loaders)], verbose=False)
    return [*logger.rows, (None, fitted), (None, {k: float(v) for k, v in trainer.callback_metrics.items()})]


@pytest.fixture
def written(engine: str, one_thread: None) -> Callable[..., list[Any]]:
    """`written(k, step, make, at_end)`: what a run with k replicas logs; k = 1 is one device."""
    return partial(run, engine)


@pytest.fixture
def assert_same(written: Callable[..., list[Any]]) -> Callable[..., None]:
    """`assert_same(step, make, at_end)`: two and three replicas log what one device does."""

    def check(*args: Any, **kwargs: Any) -> None:
        expected = written(1, *args, **kwargs)
        assert sum(len(metrics) for _, metrics in expected) > 8
        for k in (2, 3):
            found = written(k, *args, **kwargs)
            assert len(found) == len(expected)
            for (step_found, ours), (step_expected, theirs) in zip(found, expected):
                assert step_found == step_expected
                assert list(ours) == list(theirs)
                for name in theirs:  # aggregates are kept in float32
                    assert math.isclose(ours[name], theirs[name], rel_tol=2e-6, abs_tol=1e-7), (k, step_found, name)

    return check


@pytest.fixture
def probe() -> type[LightningModule]:
    return Probe
