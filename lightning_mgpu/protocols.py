"""Attributes that this package reads from data modules and strategies, if they are there."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, cast

import torch
from lightning.pytorch import Trainer


class DataFacts(Protocol):
    """Facts about its data that a data module may have as attributes, with the defaults."""

    classes: Sequence[str] = ()
    """Names of the labels 0 .. C-1, for pictures and predictions. The default is numbers."""

    summary: str = ""
    """A line for the run's header. It is read when training begins, after `setup`."""

    validates_on_test_set: bool = False
    """If True, the validation metrics choose no checkpoint, and a sweep refuses to run."""


class StrategyFacts(Protocol):
    """Facts about its replicas that a strategy may have as attributes, with the defaults."""

    allreduce: Callable | None = None
    """What sums the gradients; the run's header names it."""

    shares: Sequence[float] = ()
    """How a batch is shared out, a number for every replica. The default is equal shares."""

    given_devices: Sequence[torch.device] = ()
    """The devices, where several replicas may be on one. The default is one replica per device."""

    weighs_losses: bool = False
    """Whether a `"weight"` that `training_step` returns counts. If not, a run warns once."""

    replicas: Any = None
    """With `parameter_sets`, the parameters of all replicas by name, for lightning_mgpu.testing."""


def data_facts(trainer: Trainer) -> DataFacts:
    """The facts of the run's data module; the defaults if there is none."""
    return cast(DataFacts, _WithDefaults(trainer.datamodule, DataFacts))  # type: ignore[attr-defined]


def strategy_facts(strategy: Any) -> StrategyFacts:
    """The facts of a strategy."""
    return cast(StrategyFacts, _WithDefaults(strategy, StrategyFacts))


class _WithDefaults:
    """Looks an attribute up in an object, and then in a protocol, which has the default."""

    def __init__(self, owner: object, protocol: type) -> None:
        self._owner, self._protocol = owner, protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._owner, name, getattr(self._protocol, name))
