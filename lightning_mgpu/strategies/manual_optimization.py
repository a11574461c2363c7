"""Manual optimization: replicas meet in `manual_backward`, where an optimizer or a scheduler steps.

Between two meetings a replica works on its own parameters and gradients: in its turn the optimizers
have these. What replicas meet for is done once, by the first replica's optimizer, and the others
follow.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from lightning_mgpu.strategies.combining import gather
from lightning_mgpu.strategies.records import attributes

Strategy = Any  # a TrainBatchStrategy, which imports this file


@contextmanager
def meetings(strategy: Strategy, optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Inside the block replicas meet where they step an optimizer, its wrapper or a scheduler."""
    steps = {each: partial(strategy.step_and_follow, each, each.step) for each in optimizers}
    # Lightning's wrappers call `optimizer_step`
    steps |= {wrapper: wrapper.step for wrapper in strategy._lightning_optimizers}
    met = [(each, "step", _met_step(strategy, each, step)) for each, step in steps.items()]
    schedulers = [config.scheduler for config in strategy.lr_scheduler_configs]
    met += [(each, "step", _met_schedule(strategy, each)) for each in schedulers]
    with attributes(met):
        yield


@contextmanager
def only_known_optimizers(strategy: Strategy) -> Iterator[None]:
    """Refuse an optimizer that is not among those of `configure_optimizers`.

    Every replica would step the first one's parameters.
    """

    def check(optimizer: Optimizer, *_: Any) -> None:
        params = (param for group in optimizer.param_groups for param in group["params"])
        is_firsts = any(id(param) in strategy.replicas.set_of for param in params)
        if strategy.replicas.current and is_firsts:
            raise RuntimeError(
                f"{type(optimizer).__name__} steps in training_step, but configure_optimizers has "
                "not returned it: let it."
            )

    handle = register_optimizer_step_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


def _met_step(
    strategy: Strategy, optimizer: Any, step_and_follow: Callable[..., Any]
) -> Callable[..., Any]:
    """The `step` of an optimizer for replicas.

    Each evaluates its closure; the whole batch's loss is returned.
    """
    step = optimizer.step

    @wraps(step)
    def met_step(closure: Any = None, **kwargs: Any) -> Any:
        if not strategy.lockstep.running:
            return step(closure=closure, **kwargs)
        loss = None if closure is None else apply_to_collection(closure(), Tensor, Tensor.detach)
        return strategy.lockstep.meet(("step", id(optimizer)), loss, partial(step_once, **kwargs))

    def step_once(losses: dict[int, Any], **kwargs: Any) -> Any:
        strategy.gradients.check_manual(list(losses))
        sizes = [strategy.sizes[i] for i in losses]
        whole = [gather(list(losses.values()), sizes, strategy.devices[0])]

        def evaluated() -> Any:
            if not whole:
                raise RuntimeError(
                    f"{type(optimizer).__name__} evaluates its closure several times, which "
                    "replicas cannot follow in manual optimization: optimize automatically, or on "
                    "one device."
                )
            return whole.pop()

        return step_and_follow(evaluated, **kwargs)

    return met_step


def _met_schedule(strategy: Strategy, scheduler: Any) -> Callable[..., Any]:
    """The `step` of a scheduler for replicas. A loss that it is given is the whole batch's."""
    step = getattr(scheduler, "step", None)

    def whole(parts: tuple[Any, ...], sizes: list[int]) -> Any:
        has_tensors = any(isinstance(part, Tensor) for part in parts)
        if not has_tensors and all(part == parts[0] for part in parts):
            return parts[0]
        return gather(parts, sizes, strategy.devices[0])

    def once(given: dict[int, tuple[Any, ...]]) -> Any:
        sizes = [strategy.sizes[i] for i in given]
        *args, kwargs = (whole(parts, sizes) for parts in zip(*given.values()))
        return step(*args, **kwargs)  # type: ignore[misc]

    where = "a scheduler", id(scheduler)
    return lambda *args, **kwargs: strategy.lockstep.meet(where, (*args, kwargs), once)
