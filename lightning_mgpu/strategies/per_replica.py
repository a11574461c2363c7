"""What a module finds in its trainer in a step of manual optimization: what belongs to the replica the thread runs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.strategies.lockstep import Lockstep
from lightning_mgpu.strategies.optimizers import SchedulerView
from lightning_mgpu.strategies.replicas import Replicas
from lightning_mgpu.strategies.team import Team


class PerReplica(ParallelStrategy):
    """The module, its optimizers and schedulers, by the thread that asks."""

    team: Team
    _replicas: Replicas
    _lockstep: Lockstep | None  # in a step of manual optimization

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._wrapped: list[list[LightningOptimizer]] = [[]]  # [replica][optimizer]
        self._views: dict[int, SchedulerView] = {}  # by the scheduler's id
        super().__init__(*args, **kwargs)

    def _wrap_copies(self, copies: Sequence[Sequence[Optimizer]]) -> None:
        """Set the optimizers of the replicas above 0; they are also what they see where the module keeps its own."""
        self._wrapped[1:] = [[LightningOptimizer._to_lightning_optimizer(opt, self) for opt in own] for own in copies]
        self._views = {id(config.scheduler): SchedulerView(config.scheduler) for config in self._schedulers}
        for attributes, wrappers in zip(self._replicas.attributes, self._wrapped[1:]):
            attributes.twins.of |= self._views
            for original, wrapper in zip(self._wrapped[0], wrappers):
                attributes.twins.of |= {id(original): wrapper, id(original._optimizer): wrapper._optimizer}

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Without threads and wrappers, which cannot be pickled: users save the Trainer."""
        state = super().__getstate__() | {"_wrapped": [[]]}
        state.pop("team", None)
        return state

    @property
    def original(self) -> LightningModule:
        assert self._lightning_module is not None
        return self._lightning_module

    @property
    def _index(self) -> int:
        return self.team.index if hasattr(self, "team") else 0

    @property
    @override
    def lightning_module(self) -> LightningModule | None:
        return self._replicas.modules[self._index] if self._index else self._lightning_module

    @property
    def _whose(self) -> int:
        """Whose optimizers the thread sees: its replica's own in a step of manual optimization, else the original's."""
        return self._index if self._lockstep is not None else 0

    @property  # type: ignore[override]
    def optimizers(self) -> list[Optimizer]:
        return [wrapper._optimizer for wrapper in self._wrapped[self._whose]] if self._whose else self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        Strategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    @property
    def _lightning_optimizers(self) -> list[LightningOptimizer]:
        return self._wrapped[self._whose]

    @_lightning_optimizers.setter
    def _lightning_optimizers(self, optimizers: list[LightningOptimizer]) -> None:
        self._wrapped[0] = optimizers

    @property
    def lr_scheduler_configs(self) -> list[LRSchedulerConfig]:
        if not self._whose:
            return self._schedulers
        return [replace(config, scheduler=self._views[id(config.scheduler)]) for config in self._schedulers]  # type: ignore[arg-type]

    @lr_scheduler_configs.setter
    def lr_scheduler_configs(self, configs: list[LRSchedulerConfig]) -> None:
        self._schedulers = configs


@contextlib.contextmanager
def profiled_once(profiler: Profiler, team: Team) -> Iterator[None]:
    """Let actions that users profile in a step count in the first replica alone: an action cannot begin twice."""
    if isinstance(profiler, PassThroughProfiler):
        yield
        return

    def in_first(function: Callable[[str], None]) -> Callable[[str], None]:
        return lambda name: function(name) if team.index == 0 else None

    before: dict[str, Any] = {name: vars(profiler)[name] for name in ("start", "stop") if name in vars(profiler)}
    vars(profiler).update(start=in_first(profiler.start), stop=in_first(profiler.stop))
    try:
        yield
    finally:
        del vars(profiler)["start"], vars(profiler)["stop"]
        vars(profiler).update(before)
