"""What a module finds in its trainer in a step of manual optimization: what belongs to the replica the thread runs."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from lightning.pytorch.strategies import ParallelStrategy, Strategy
from torch.optim import Optimizer
from typing_extensions import override

from lightning_mgpu.strategies.optimizers.lockstep import Lockstep
from lightning_mgpu.strategies.optimizers.optimizer_copies import Settings, settings_of, view_of
from lightning_mgpu.strategies.replicas.replicas import Replicas
from lightning_mgpu.strategies.threads.team import Team


class PerReplica(ParallelStrategy):
    """The module, its optimizers and schedulers, by the thread that asks."""

    team: Team
    _replicas: Replicas
    _lockstep: Lockstep | None  # in a step of manual optimization

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._wrapped: list[list[LightningOptimizer]] = [[]]  # [replica][optimizer]
        self._seen_by: dict[int, list[LightningOptimizer]] = {}  # by the replica's number, in this step
        self._settings: list[Settings] = []  # of the optimizers, when this step of training began
        super().__init__(*args, **kwargs)

    def _wrap_copies(self, copies: Sequence[Sequence[Optimizer]]) -> None:
        """Set the optimizers of the replicas above 0; they are also what they see where the module keeps its own."""
        self._wrapped[1:] = [[LightningOptimizer._to_lightning_optimizer(opt, self) for opt in own] for own in copies]
        # all replicas have the same
        schedulers: dict[int, Any] = {id(config.scheduler): config.scheduler for config in self.lr_scheduler_configs}
        for attributes, wrappers in zip(self._replicas.attributes, self._wrapped[1:]):
            attributes.twins.of |= schedulers
            for original, wrapper in zip(self._wrapped[0], wrappers):
                attributes.twins.of |= {id(original): wrapper, id(original._optimizer): wrapper._optimizer}

    @override
    def __getstate__(self) -> dict[str, Any]:
        """Without threads and wrappers, which cannot be pickled: users save the Trainer."""
        state = super().__getstate__() | {"_wrapped": [[]], "_seen_by": {}}
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
    @override
    def model(self) -> Any:
        return self._replicas.modules[self._index] if self._index else Strategy.model.fget(self)  # type: ignore[attr-defined]

    @model.setter
    def model(self, model: Any) -> None:
        Strategy.model.fset(self, model)  # type: ignore[attr-defined]

    @property
    def _whose(self) -> int:
        """Whose optimizers the thread sees: its replica's own in a step of manual optimization, else the original's."""
        return self._index if self._lockstep is not None else 0

    @property  # type: ignore[override]
    def optimizers(self) -> list[Optimizer]:
        if not self._index:
            return self._optimizers
        own: list[Any] = [
            wrapper if isinstance(original, LightningOptimizer) else wrapper._optimizer
            for original, wrapper in zip(self._optimizers, self._lightning_optimizers)
        ]
        return own

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        Strategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    @property
    def _stepped_optimizers(self) -> list[Optimizer]:
        """What is stepped: by the Trainer, the ones it was given; by the module, those it finds in the list.

        They differ where somebody has edited the list, and where the module has wrapped its optimizers itself.
        """
        given: Sequence[Any] = self._wrapped[0] if self.original.automatic_optimization else self._optimizers
        return [each._optimizer if isinstance(each, LightningOptimizer) else each for each in given]

    @property
    def _lightning_optimizers(self) -> list[LightningOptimizer]:
        if self._index and not self._whose:
            return self._views()
        return self._wrapped[self._whose]

    @_lightning_optimizers.setter
    def _lightning_optimizers(self, optimizers: list[LightningOptimizer]) -> None:
        self._wrapped[0] = optimizers

    def _views(self) -> list[LightningOptimizer]:
        """What a replica above 0 sees of the optimizers that update the original: what it changes of them is lost."""
        if self._index not in self._seen_by:
            originals, copies = (list(self._replicas.modules[i].parameters()) for i in (0, self._index))
            optimizers = self._stepped_optimizers
            settings = self._settings or map(settings_of, optimizers)
            views = [view_of(opt, then, originals, copies) for opt, then in zip(optimizers, settings)]
            self._seen_by[self._index] = [LightningOptimizer._to_lightning_optimizer(view, self) for view in views]
        return self._seen_by[self._index]

    @contextlib.contextmanager
    def _stepped_together(self, lockstep: Lockstep, follow: Callable[[], Any]) -> Iterator[None]:
        """Let replicas meet where they step a learning-rate scheduler, which they have in common."""
        own: list[tuple[dict[str, Any], dict[str, Any]]] = []  # attributes; `step`, if it is one
        for scheduler in (config.scheduler for config in self.lr_scheduler_configs):
            if not callable(getattr(scheduler, "step", None)):
                continue  # an object of the user's, who steps it by another name
            attributes: dict[str, Any] = vars(scheduler)
            own.append((attributes, {"step": attributes["step"]} if "step" in attributes else {}))
            attributes["step"] = partial(lockstep.schedule, type(scheduler).__name__, scheduler.step, follow)
        try:
            yield
        finally:
            for attributes, before in own:
                del attributes["step"]
                attributes.update(before)


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
