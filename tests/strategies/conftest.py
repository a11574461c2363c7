"""Fixtures that run a test under both strategies, on one device and on several, and compare."""

import logging
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader
from torchmetrics import Metric

sys.path.insert(0, str(Path(__file__).parent))  # pytest's import mode leaves it out

from tiny_runs import (
    ENGINES,
    MANUAL,
    EqualReplicas,
    Logs,
    Make,
    Written,
    a_loader,
    assert_close,
    labelled,
    relative_error,
)


def functions() -> dict[str, Any]:
    """The functions that a strategy may replace during a step."""
    owners = (
        torch,
        torch.autograd,
        nn.functional,
        nn.Module,
        Tensor,
        Optimizer,
        LightningModule,
        Trainer,
        Metric,
    )
    return {
        f"{owner.__name__}.{name}": it
        for owner in owners
        for name, it in list(vars(owner).items())
        if callable(it)
    }


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> str:
    """The strategy under test: both make the same training run."""
    return request.param


@pytest.fixture(autouse=True)
def _quiet_lightning() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


@pytest.fixture
def trainer_on(make_trainer: Callable[..., Trainer], engine: str) -> Callable[..., Trainer]:
    """A Trainer on k devices: several run the strategy under test, unless another is given."""
    return lambda k=2, **kwargs: make_trainer(
        **{"devices": k, "strategy": engine if k > 1 else "auto", **kwargs}
    )


@pytest.fixture
def train(trainer_on: Callable[..., Trainer], engine: str) -> Callable[..., LightningModule]:
    """Build a module from the seed and fit it.

    `val` validates after every epoch. `check` compares replicas after every batch; `dp` has none.
    """

    def train(
        make: Make,
        k: int = 1,
        strategy: Any = None,
        callbacks: Callable[[], list[Callback]] = list,
        loader: Callable[[], DataLoader] = a_loader,
        val: bool = False,
        check: bool = True,
        own_updates: bool | None = None,
        plugins: Callable[[], Any] = lambda: None,
        ckpt_path: Path | None = None,
        **kwargs: Any,
    ) -> LightningModule:
        seed_everything(1, verbose=False)
        module = make()
        checks: list[Callback] = (
            [EqualReplicas(own_updates)] if k > 1 and check and engine == MANUAL else []
        )
        settings = {"max_epochs": 2, "limit_val_batches": 1.0 if val else 0, **kwargs}
        if strategy is not None:
            settings["strategy"] = strategy
        trainer = trainer_on(k, callbacks=[*checks, *callbacks()], plugins=plugins(), **settings)
        before = functions()
        trainer.fit(
            module, loader(), loader() if val else None, ckpt_path=ckpt_path, weights_only=False
        )
        changed = [
            name for name, function in functions().items() if function != before.get(name, function)
        ]
        assert set(changed) <= {"Module.__init__", "Module.__setstate__"}  # torch.compile's affair
        assert all(check.num_steps > 0 for check in checks)
        return module

    return train


@pytest.fixture
def assert_parity(train: Callable[..., LightningModule]) -> Callable[..., list[LightningModule]]:
    """Training on several devices ends as on one, logged values too; returns the modules."""

    def check(
        make: Make,
        num_devices: Iterable[int] = (3,),
        tolerance: float = 1e-10,
        strategy: Callable[[], Any] = lambda: None,
        **kwargs: Any,
    ) -> list[LightningModule]:
        one = train(make, **{**kwargs, "own_updates": None})
        seed_everything(1, verbose=False)
        assert relative_error(one, make()) > 1e-4, "nothing was trained"
        modules = [one]
        for k in num_devices:
            modules.append(train(make, k, strategy(), **kwargs))
            error = relative_error(modules[-1], one)
            assert error < tolerance, f"{k} devices: relative error {error}"
            metrics, expected = (
                dict(module.trainer.callback_metrics) for module in (modules[-1], one)
            )
            assert_close(metrics, expected, max(1e-6, tolerance), 1e-9)
        return modules

    return check


@pytest.fixture
def logged(trainer_on: Callable[..., Trainer]) -> Callable[..., list[Any]]:
    """What `Logs` on k devices writes: the logger's rows, `callback_metrics` after fit and test."""

    def logged(
        k: int,
        step: Callable[..., Any],
        make: Callable[[], Any] = lambda: None,
        at_end: Any = None,
        num_loaders: int = 1,
        **kwargs: Any,
    ) -> list[Any]:
        seed_everything(0, verbose=False)
        logger = Written()
        trainer = trainer_on(
            k, max_epochs=2, logger=logger, log_every_n_steps=1, num_sanity_val_steps=1, **kwargs
        )
        module = Logs(step, make, at_end)
        trainer.fit(module, labelled(), [labelled(11, 4, seed) for seed in range(num_loaders)])
        fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
        trainer.test(
            module, [labelled(10, 4, seed) for seed in range(2, 2 + num_loaders)], verbose=False
        )
        return [
            *logger.rows,
            fitted,
            {name: float(value) for name, value in trainer.callback_metrics.items()},
        ]

    return logged


@pytest.fixture
def assert_logs_alike(logged: Callable[..., list[Any]]) -> Callable[..., None]:
    """Three devices log what one does, in every step and epoch."""

    def check(*args: Any, strategy: Callable[[int], Any] | None = None, **kwargs: Any) -> None:
        expected = logged(1, *args, **kwargs)
        assert len(expected) > 2
        options = {"strategy": strategy(3)} if strategy else {}
        # aggregates are float32
        assert_close(logged(3, *args, **kwargs, **options), expected, 2e-6, 1e-7)

    return check
