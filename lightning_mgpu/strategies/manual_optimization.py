"""Manual optimization: replicas meet in `manual_backward`, where an optimizer or a scheduler steps.

Between two meetings a replica works on its own parameters and gradients, which the optimizers have
in its turn. At a meeting the first replica's optimizer steps, once, and the others follow.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_mgpu.strategies.combining import gather
from lightning_mgpu.strategies.devices_and_attributes import replace_attributes
from lightning_mgpu.strategies.gradients import Gradients
from lightning_mgpu.strategies.lockstep import Lockstep


class Meetings:
    """Lets replicas meet where they step an optimizer, its wrapper or a scheduler."""

    def __init__(self, lockstep: Lockstep, gradients: Gradients, sizes: Mapping[int, int]) -> None:
        self.lockstep, self.gradients = lockstep, gradients
        self.sizes = sizes  # samples, by replica

    @contextmanager
    def at_steps(
        self, step_by_optimizer: Mapping[Any, Callable[..., Any]], schedulers: Sequence[Any]
    ) -> Iterator[None]:
        """Inside the block replicas meet at every `step`.

        Args:
            step_by_optimizer: Called once, when all have met at an optimizer or a wrapper.
            schedulers: They step once, by themselves.
        """
        met = [
            (each, "step", self._met_step(each, number, f))
            for number, (each, f) in enumerate(step_by_optimizer.items())
        ]
        met += [(each, "step", self._met_schedule(each, n)) for n, each in enumerate(schedulers)]
        with replace_attributes(met):
            yield

    def _met_step(
        self, optimizer: Any, number: int, step_and_follow: Callable[..., Any]
    ) -> Callable[..., Any]:
        """The `step` of an optimizer for replicas, which returns the whole batch's loss."""
        step = optimizer.step

        @wraps(step)
        def met_step(closure: Any = None, **kwargs: Any) -> Any:
            if not self.lockstep.running:
                return step(closure=closure, **kwargs)
            loss = (
                None if closure is None else apply_to_collection(closure(), Tensor, Tensor.detach)
            )
            return self.lockstep.meet(("step", number), loss, partial(step_once, **kwargs))

        def step_once(losses: dict[int, Any], **kwargs: Any) -> Any:
            self.gradients.check_manual(list(losses))
            whole = [self._gather(losses, list(losses.values()))]

            def evaluated() -> Any:
                if not whole:
                    raise RuntimeError(
                        f"{type(optimizer).__name__} evaluates its closure several times, which "
                        "replicas cannot follow in manual optimization: optimize automatically, or "
                        "on one device."
                    )
                return whole.pop()

            return step_and_follow(evaluated, **kwargs)

        return met_step

    def _met_schedule(self, scheduler: Any, number: int) -> Callable[..., Any]:
        """The `step` of a scheduler for replicas. A loss that it is given is the whole batch's."""
        step = getattr(scheduler, "step", None)

        def whole(active: dict[int, Any], parts: tuple[Any, ...]) -> Any:
            has_tensors = any(isinstance(part, Tensor) for part in parts)
            if not has_tensors and all(part == parts[0] for part in parts):
                return parts[0]
            return self._gather(active, parts)

        def step_once(given: dict[int, tuple[Any, ...]]) -> Any:
            *args, kwargs = (whole(given, parts) for parts in zip(*given.values()))
            return step(*args, **kwargs)  # type: ignore[misc]

        where = "a scheduler", number
        return lambda *args, **kwargs: self.lockstep.meet(where, (*args, kwargs), step_once)

    def _gather(self, active: Mapping[int, Any], parts: Sequence[Any]) -> Any:
        """The whole batch's value, of one per active replica."""
        return gather(parts, [self.sizes[i] for i in active], self.lockstep.devices[0])
