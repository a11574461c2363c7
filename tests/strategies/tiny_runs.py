"""A small float64 module, its data, how two trained ones compare; for conftest.py's fixtures."""

import math
import re
from collections import namedtuple
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partialmethod
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_mgpu  # noqa: F401  registers the strategies

MANUAL, DP = ENGINES = ("manual_allreduce", "dp")
# devices that differ: see tests/simulated
IS_SIMULATED = torch._C._get_privateuse1_backend_name() == "sim"
HOME = torch.device("sim:0" if IS_SIMULATED else "cpu")  # a Trainer's first device

NUM_SAMPLES, BATCH_SIZE = 25, 8  # the last batch has one sample, so most devices have none

Make = Callable[[], LightningModule]
Pair = namedtuple("Pair", "X y")


@dataclass
class Sample:
    X: Any
    y: Any


def make_strategy(engine: str, **options: Any) -> Any:
    """The strategy of that name, with options."""
    known = StrategyRegistry[engine]
    return known["strategy"](**{**known["init_params"], **options})


def a_loader(
    batch_size: int = BATCH_SIZE,
    num_samples: int = NUM_SAMPLES,
    shape: tuple[int, ...] = (6,),
    **kwargs: Any,
) -> DataLoader:
    """X (N, *shape) and y (N, 3), a smooth function of X."""
    generator = torch.Generator().manual_seed(7)
    X = torch.randn(num_samples, *shape, generator=generator, dtype=torch.float64)
    y = torch.stack([X.flatten(1).sum(1).sin(), X.flatten(1)[:, 0], X.flatten(1)[:, 1] ** 2], 1)
    return DataLoader(TensorDataset(X, y), batch_size, **kwargs)


def collated(make: Callable[[Tensor, Tensor], Any], *args: Any, **kwargs: Any) -> DataLoader:
    """A loader whose batches are `make(X, y)`."""
    return a_loader(
        *args, collate_fn=lambda samples: make(*map(torch.stack, zip(*samples))), **kwargs
    )


def ordered_loader() -> DataLoader:
    """Two batches of four samples, 0 to 3 in every row. The second device's samples are 2 and 3."""
    X = torch.arange(4, dtype=torch.float64)[:, None].repeat(2, 6)
    return DataLoader(TensorDataset(X, X[:, :3] / 10), 4)


def is_second_shard(batch: Any) -> bool:
    """Whether these are samples 2 and 3 of `ordered_loader`, which one device never sees alone."""
    return bool(batch[0][0, 0] == 2)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)


def one_cycle(module: nn.Module) -> dict[str, Any]:
    """Twelve steps of a rate and a momentum that change."""
    optimizer = sgd(module)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=12)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Regression(LightningModule):
    """An MLP, or the net given, fitted to y; `optimizer` is what `configure_optimizers` does."""

    def __init__(self, net: nn.Module | None = None, optimizer: Callable[[Any], Any] = sgd) -> None:
        super().__init__()
        self.net: Any = net or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = optimizer
        self.double()

    def loss(self, batch: Any) -> Tensor:
        X, y = batch
        return F.mse_loss(self.net(X).flatten(1)[:, :3], y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self)


class Manual(Regression):
    """Optimizes by hand, with one step a batch."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def update(self, loss: Tensor) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.update(self.loss(batch))


def batch_norm_net(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, **options), nn.Tanh(), nn.Linear(8, 3))


class EqualReplicas(Callback):
    """After every batch all replicas hold the same bits, in storage of their own.

    Args:
        own_updates: Whether every replica must have made its own update. None: either way is right.
    """

    edits_nothing = True  # else the strategy takes it for one that may edit weights

    def __init__(self, own_updates: bool | None = None) -> None:
        self.num_steps, self.own_updates = 0, own_updates

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        strategy: Any = trainer.strategy
        for first, *others in strategy.replicas.parameter_sets.values():
            copies = (first, *others)
            assert len({copy.data_ptr() for copy in copies}) == len(copies) or first.numel() == 0
            assert all(torch.equal(first.cpu(), other.cpu()) for other in others)
        self.num_steps += 1
        if self.own_updates is not None:
            assert strategy.own_updates == self.own_updates


def assert_close(found: Any, expected: Any, rtol: float = 1e-10, atol: float = 1e-13) -> None:
    """Nested values of the same types and shapes, numbers up to sums' order, on any device."""
    if isinstance(expected, Tensor):
        assert isinstance(found, Tensor)
        torch.testing.assert_close(
            found.detach().cpu(), expected.detach().cpu(), rtol=rtol, atol=atol, equal_nan=True
        )
    elif isinstance(expected, dict):
        assert_close(list(found.items()), list(expected.items()), rtol, atol)
    elif isinstance(expected, (list, tuple)):
        assert type(found) is type(expected) and len(found) == len(expected)
        for item, other in zip(found, expected):
            assert_close(item, other, rtol, atol)
    elif isinstance(expected, float):
        assert math.isclose(found, expected, rel_tol=rtol, abs_tol=atol), (found, expected)
    elif hasattr(expected, "dtype"):  # an array
        assert_close(torch.from_numpy(found), torch.from_numpy(expected), rtol, atol)
    elif hasattr(expected, "__dataclass_fields__"):
        assert type(found) is type(expected)
        assert_close(vars(found), vars(expected), rtol, atol)
    else:
        assert type(found) is type(expected) and found == expected


def relative_error(module: nn.Module, expected: nn.Module) -> float:
    """The largest over all tensors of the state dict, each by its norm."""
    state, expected_state = module.state_dict(), expected.state_dict()
    assert state.keys() == expected_state.keys()
    return max(
        float(
            (state[key].cpu().double() - value.double()).norm()
            / value.double().norm().clamp(min=1e-30)
        )
        for key, value in ((key, value.cpu()) for key, value in expected_state.items())
    )


def same_bits(module: nn.Module, other: nn.Module) -> bool:
    pairs = zip(module.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


@contextmanager
def refused(said: str) -> Iterator[None]:
    """The block ends in an error of one line, which says so."""
    with pytest.raises(Exception, match=re.escape(said)) as raised:
        yield
    text = str(raised.value)
    assert "\n" not in text and len(text) <= 250, text  # it fits a terminal, or two


class Written(DummyLogger):
    """Keeps what the Trainer writes, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))


NUM_CLASSES = 4


def labelled(num_samples: int = 23, batch_size: int = 7, seed: int = 1) -> DataLoader:
    """X (N, 5), classes (N,) in batches of 7, 7, 7, 2: uneven shards, a batch of few samples."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
    y = (
        X[:, :NUM_CLASSES].argmax(1) + torch.randint(0, 2, (num_samples,), generator=generator)
    ) % NUM_CLASSES
    return DataLoader(TensorDataset(X, y), batch_size)


class Logs(LightningModule):
    """Calls `step(self, stage, X, y, batch_idx)` in steps, `at_end(self, stage)` after epochs."""

    def __init__(self, step: Callable[..., Any], make: Callable[[], Any], at_end: Any) -> None:
        super().__init__()
        self.net = nn.Linear(5, NUM_CLASSES).double()
        self.step, self.at_end = step, at_end or (lambda module, stage: None)
        self.metric = make()

    def probabilities(self, X: Tensor) -> Tensor:
        return self.net(X).softmax(1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.step(self, "train", *batch, batch_idx)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.step(self, "val", *batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.step(self, "test", *batch, batch_idx)

    def _end(self, stage: str) -> None:
        self.at_end(self, stage)

    on_train_epoch_end = partialmethod(_end, "train")
    on_validation_epoch_end = partialmethod(_end, "val")
    on_test_epoch_end = partialmethod(_end, "test")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)
