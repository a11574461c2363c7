"""Train the same small module in float64 on one device and on several, and compare."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lightning_mgpu.strategies  # noqa: F401 (registers them)
from lightning_mgpu.testing.cases import functions

NUM_SAMPLES, BATCH_SIZE = 25, 8  # the last batch has one sample: fewer than devices

Make = Callable[[], LightningModule]


class _Regression(LightningModule):
    """An MLP, or the net given, fitted to a function of its input; `optimizer` is what `configure_optimizers` does."""

    def __init__(self, net: nn.Module | None = None, optimizer: Callable[[Any], Any] | None = None) -> None:
        super().__init__()
        self.net = net or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.optimizer = optimizer or (lambda module: torch.optim.SGD(module.parameters(), 0.1, momentum=0.9))
        self.double()

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        X, y = batch
        return F.mse_loss(self.net(X).flatten(1)[:, :3], y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return self.optimizer(self)


class _EqualReplicas(Callback):
    """After every step all replicas hold the same bits in storage of their own; under `dp` the original alone counts.

    With `own_updates` each of them has updated itself, and nobody had to copy the result.
    """

    __module__ = "lightning.checks"  # else the strategy takes it for one that may edit weights, and takes care

    def __init__(self, own_updates: bool = False) -> None:
        self.num_steps, self.own_updates = 0, own_updates

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        strategy: Any = trainer.strategy
        for first, *others in strategy._replicas.parameters:
            assert len({parameter.data_ptr() for parameter in (first, *others)}) == 1 + len(others)
            if strategy.replicas_update:
                assert all(torch.equal(first.cpu(), other.cpu()) for other in others)
            elif module.automatic_optimization and strategy.gradients.are_reduced:
                assert all(other.grad is None for other in others)
        self.num_steps += 1
        if self.own_updates and strategy.replicas_update:
            assert False not in strategy._own.repeats


@pytest.fixture
def Regression() -> type[_Regression]:
    return _Regression


@pytest.fixture
def EqualReplicas() -> type[_EqualReplicas]:
    return _EqualReplicas


@pytest.fixture
def make_loader() -> Callable[..., DataLoader]:
    def make(
        batch_size: int = BATCH_SIZE, num_samples: int = NUM_SAMPLES, shape: tuple[int, ...] = (6,), **kwargs: Any
    ) -> DataLoader:
        generator = torch.Generator().manual_seed(7)
        X = torch.randn(num_samples, *shape, generator=generator, dtype=torch.float64)
        y = torch.stack([X.flatten(1).sum(1).sin(), X.flatten(1)[:, 0], X.flatten(1)[:, 1] ** 2], 1)
        return DataLoader(TensorDataset(X, y), batch_size, **kwargs)

    return make


def relative_error(module: nn.Module, expected: nn.Module) -> float:
    """The largest over all tensors of the state dict, each by its norm."""
    state, expected_state = module.state_dict(), expected.state_dict()
    assert state.keys() == expected_state.keys()
    return max(
        float((state[key].cpu().double() - value.double()).norm() / value.double().norm().clamp(min=1e-30))
        for key, value in ((key, value.cpu()) for key, value in expected_state.items())
    )


@pytest.fixture(params=["manual_allreduce", "dp"])
def engine(request: pytest.FixtureRequest) -> str:
    """The strategy under test: both make the same training run."""
    return request.param


@pytest.fixture
def trainer_on(make_trainer: Callable[..., Trainer], engine: str) -> Callable[..., Trainer]:
    """A Trainer on k devices: several run the strategy under test, unless another is named."""
    return lambda k=2, **kwargs: make_trainer(**{"devices": k, "strategy": engine if k > 1 else "auto", **kwargs})


@pytest.fixture
def train(
    make_trainer: Callable[..., Trainer], make_loader: Callable[..., DataLoader], engine: str
) -> Callable[..., LightningModule]:
    """Build a module from the seed and fit it; functions of torch and Lightning are their own again afterwards."""

    def train(
        make: Make,
        k: int = 1,
        strategy: Any = None,
        callbacks: Callable[[], list[Callback]] = list,
        shape: tuple[int, ...] = (6,),
        check: bool = True,
        own_updates: bool = False,
        loader: DataLoader | None = None,
        val: bool = False,
        **kwargs: Any,
    ) -> LightningModule:
        seed_everything(1, verbose=False)
        module = make()
        strategy = strategy or (engine if k > 1 else "auto")
        checks: list[Callback] = [_EqualReplicas(own_updates)] if k > 1 and check else []
        plugins = kwargs.pop("plugins", lambda: None)()
        settings = {"max_epochs": 2, "limit_val_batches": 1.0 if val else 0, **kwargs}
        trainer = make_trainer(
            devices=k, strategy=strategy, callbacks=[*checks, *callbacks()], plugins=plugins, **settings
        )
        before = functions()
        trainer.fit(module, loader or make_loader(shape=shape), make_loader(shape=shape) if val else None)
        changed = [name for name, function in functions().items() if function != before.get(name, function)]
        assert set(changed) <= {"Module.__init__", "Module.__setstate__"}  # torch.compile's affair
        assert all(check.num_steps > 0 for check in checks)
        return module

    return train


@pytest.fixture
def assert_parity(train: Callable[..., LightningModule]) -> Callable[..., list[LightningModule]]:
    """Training on `num_devices` ends where training on one device does; returns the modules, one device's first."""

    def check(make: Make, num_devices: Iterable[int] = (2, 3), tolerance: float = 1e-10, **kwargs: Any) -> Any:
        strategy = kwargs.pop("strategy", None)
        modules = [train(make, **kwargs)]
        seed_everything(1, verbose=False)
        assert relative_error(modules[0], make()) > 1e-4, "nothing was trained"
        for k in num_devices:
            modules.append(train(make, k, strategy=strategy() if strategy else None, **kwargs))
            error = relative_error(modules[-1], modules[0])
            assert error < tolerance, f"{k} devices: relative error {error}"
        return modules

    return check


@pytest.fixture
def assert_same_when_validated(trainer_on: Callable[..., Trainer]) -> Callable[..., None]:
    """A logged value is one device's on two and three."""

    def check(make: Make, name: str, loaders: list[DataLoader]) -> None:
        values = []
        for k in (1, 2, 3):
            torch.manual_seed(1)
            trainer = trainer_on(k)
            trainer.validate(make(), loaders, verbose=False)
            values.append(float(trainer.callback_metrics[name]))
        assert values[1:] == pytest.approx([values[0]] * 2, rel=1e-10)

    return check


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Replicas are threads themselves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def four_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def quiet_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


@pytest.fixture
def Manual() -> type[_Regression]:
    """Optimizes by hand: one step a batch."""

    class Module(_Regression):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    return Module
