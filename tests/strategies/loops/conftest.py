"""A regression that is fitted on one device and on several, and its data: what comes of it is the same."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric


@pytest.fixture
def trainer_on(trainer_on: Any) -> Any:
    return partial(trainer_on, max_epochs=2, num_sanity_val_steps=2)


class _Regression(LightningModule):
    """`unpack` finds (X, y) in a batch."""

    def __init__(self, unpack: Callable[[Any], tuple[Tensor, Tensor]] = lambda batch: batch) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double()
        self.unpack = unpack
        self.num_samples = SumMetric().set_dtype(torch.float64)

    def loss(self, batch: Any) -> Tensor:
        X, y = self.unpack(batch)
        return F.mse_loss(self.net(X)[:, 0], y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self.log("val_loss", loss := self.loss(batch))
        self.num_samples.update(torch.tensor(float(len(self.unpack(batch)[0]))))
        self.log("num_samples", self.num_samples)
        return loss

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.net(self.unpack(batch)[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)


@pytest.fixture
def Regression() -> type[_Regression]:
    return _Regression


@pytest.fixture
def data() -> Callable[..., TensorDataset]:
    def make(num_samples: int = 11, seed: int = 1) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        X = torch.randn(num_samples, 4, generator=generator, dtype=torch.float64)
        return TensorDataset(X, X.sum(1).sin())

    return make


@pytest.fixture
def loader(data: Callable[..., TensorDataset]) -> Callable[..., DataLoader]:
    def make(num_samples: int = 11, batch_size: int = 4, **kwargs: Any) -> DataLoader:
        """Batches of 4, 4 and 3 samples."""
        return DataLoader(data(num_samples), batch_size, **kwargs)

    return make


@pytest.fixture
def collated(loader: Callable[..., DataLoader]) -> Callable[..., Callable[[], DataLoader]]:
    """`collated(make)()`: its batches are `make(X, y)`."""

    def collated_by(make: Callable[[Tensor, Tensor], Any]) -> Callable[[], DataLoader]:
        def collate(samples: list[tuple[Tensor, Tensor]]) -> Any:
            X, y = zip(*samples)
            return make(torch.stack(X), torch.stack(y))

        return lambda: loader(collate_fn=collate)

    return collated_by


def _assert_equal(a: Any, b: Any) -> None:
    """Of one type and shape, with numbers equal up to the order of summation."""
    if isinstance(a, Tensor):
        assert isinstance(b, Tensor) and a.dtype == b.dtype and a.shape == b.shape
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            _assert_equal(a[key], b[key])
    elif isinstance(a, (list, tuple)):
        assert type(a) is type(b) and len(a) == len(b)
        for item, other in zip(a, b):
            _assert_equal(item, other)
    elif isinstance(a, float):
        assert a == pytest.approx(b, rel=1e-10)
    else:
        assert type(a) is type(b) and (np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b)


@pytest.fixture
def assert_equal() -> Callable[[Any, Any], None]:
    return _assert_equal


def _fitted(
    trainer_on: Any,
    k: int,
    make: Callable[[], LightningModule],
    loaders: Callable[[], Any],
    *callbacks: Callback,
    **kw: Any,
) -> Any:
    seed_everything(0, verbose=False)
    trainer, module = trainer_on(k, callbacks=list(callbacks), **kw), make()
    made = loaders()
    if isinstance(made, LightningDataModule):
        trainer.fit(module, datamodule=made)
    else:
        trainer.fit(module, made, loaders())
    return module.state_dict(), {name: float(value) for name, value in trainer.callback_metrics.items()}, trainer


@pytest.fixture
def fitted() -> Callable[..., Any]:
    """`fitted(trainer_on, k, make, loaders, *callbacks)`: the state dict, the metrics and the trainer."""
    return _fitted


@pytest.fixture
def assert_fits_alike() -> Callable[..., None]:
    """`assert_fits_alike(trainer_on, make, loaders)`: two and three replicas end where one device does."""

    def check(trainer_on: Any, make: Callable[[], LightningModule], loaders: Callable[[], Any], **kwargs: Any) -> None:
        expected = _fitted(trainer_on, 1, make, loaders, **kwargs)
        for k in (2, 3):
            found = _fitted(trainer_on, k, make, loaders, **kwargs)
            _assert_equal(found[0], expected[0])
            assert found[1] == pytest.approx(expected[1], rel=1e-6)

    return check
