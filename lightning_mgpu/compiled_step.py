"""An optimizer's update compiled: fewer kernels than an operation for every tensor and every formula.

    python -m lightning_mgpu fit --fast.compile_optimizer=true

After PyTorch's recipes on compiling the optimizer, and on doing so with a learning rate scheduler.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters
from torch.optim import LBFGS, Optimizer

from lightning_mgpu.runs.errors import UsageError

OPTION = "--fast.compile_optimizer=true"
MOST_COMPILATIONS = 5  # a setting may change now and then, and layers may be unfrozen
HOOKED = Optimizer.profile_hook_step(lambda: None).__code__
"""Of torch's wrapper of every class's `step`, which calls the hooks."""


class CompiledStep:
    """How an optimizer and its copies are stepped: both compiled, or neither, or they would be rounded differently.

    Attributes:
        is_on: Whether the last step was compiled. The first with a closure is not: it finds out what the optimizer does
            with it.
        is_new: Whether something was compiled in it.
    """

    def __init__(self) -> None:
        self.is_on = self.is_new = self.is_probed = False
        self.num_compilations = 0

    def choose(self, has_closure: bool) -> None:
        self.is_on = (self.is_probed or not has_closure) and self.num_compilations < MOST_COMPILATIONS

    def count(self, name: str, is_new: bool) -> None:
        self.is_new = is_new
        self.num_compilations += is_new
        if is_new and self.num_compilations == MOST_COMPILATIONS:
            rank_zero_warn(
                f"{OPTION}: {name} was compiled {MOST_COMPILATIONS} times, for something in its settings or states "
                "keeps changing: TORCH_LOGS=recompiles says what (a momentum that OneCycleLR cycles, say: "
                "cycle_momentum: false). It goes on without being compiled."
            )


def compile_step(optimizer: Optimizer, like: Optimizer | None = None) -> None:
    """Compile what an optimizer does in `step`, in place. Its hooks, its closure and its schedulers are not compiled.

    The update gets the learning rate as a tensor, for numbers are compiled in; everybody else keeps seeing a number.

    Args:
        optimizer: Any of torch's, timm's or one's own that has its gradients before it does anything.
        like: The compiled one it is a copy of, which is stepped first.

    Raises:
        UsageError: If there is nothing to compile; from `step`, if it does more with its closure than call it first, or
            the compiler fails.
    """
    if is_compiled(optimizer):
        return
    name = type(optimizer).__name__
    _check(optimizer, name)
    plan = (plan_of(like) if like is not None else None) or CompiledStep()
    update = type(optimizer).step.__wrapped__  # type: ignore[attr-defined]

    def call(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
        update(optimizer, *args, **kwargs)

    compiled = torch.compile(call)

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        def with_closure(closure: Callable[[], Any] | None) -> tuple[Any, ...]:
            return () if closure is None and not args else (closure, *args)  # an update may take none at all

        if like is None:
            plan.choose(closure is not None)
        if not plan.is_on:
            plan.is_new = False
            if closure is None or plan.is_probed:
                return update(optimizer, *with_closure(closure), **kwargs)
            loss = update(optimizer, *with_closure(_called_first(closure, optimizer, name)), **kwargs)
            plan.is_probed = True
            return loss
        with torch.enable_grad():
            loss = None if closure is None else closure()
        known = None if closure is None else _called_once(loss, name)
        before = counters["stats"]["unique_graphs"]
        _move_counters(optimizer)
        try:
            # the function above is one for all optimizers, and the plan is what limits how often it is compiled
            with _rates_as_tensors(optimizer), dynamo.patch(recompile_limit=1000, accumulated_recompile_limit=1000):
                compiled(optimizer, *with_closure(known), **kwargs)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split("\n")[:2]).strip()  # by whom, and what
            raise UsageError(f"{OPTION}: {name} fails while it is compiled ({reason}): leave the option out") from error
        if like is None:
            plan.count(name, counters["stats"]["unique_graphs"] > before)
        return loss

    step_with_hooks = Optimizer.profile_hook_step(step)

    @functools.wraps(optimizer.step)  # with what a scheduler has noted on it
    def hooked_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's own would tell it
        return step_with_hooks(optimizer, *args, **kwargs)

    hooked_step.plan = plan  # type: ignore[attr-defined]
    optimizer.step = MethodType(hooked_step, optimizer)  # type: ignore[method-assign]


def plan_of(optimizer: Optimizer) -> CompiledStep | None:
    plan = getattr(optimizer.step, "plan", None)
    return plan if isinstance(plan, CompiledStep) else None  # a mocked step has every attribute


def is_compiled(optimizer: Optimizer) -> bool:
    return plan_of(optimizer) is not None


def _check(optimizer: Optimizer, name: str) -> None:
    leave = "leave the option out"
    if not isinstance(optimizer, Optimizer):
        raise UsageError(f"{OPTION}: {name} is no torch.optim.Optimizer: {leave}")
    if isinstance(optimizer, LBFGS):
        raise UsageError(f"{OPTION}: {name} evaluates the loss several times in a step: {leave}")
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError(f"{OPTION}: {name} with fused=true is one kernel already: leave one of the two out")
    if any(group.get("foreach") and not group.get("capturable") for group in optimizer.param_groups):
        raise UsageError(f"{OPTION} joins the tensors of {name} by itself: leave foreach=true out")
    own = vars(optimizer).get("step")
    is_replaced = own is not None and getattr(own, "__wrapped__", None) is not type(optimizer).step  # not a scheduler's
    if is_replaced or getattr(type(optimizer).step, "__code__", None) is not HOOKED:
        raise UsageError(f"{OPTION}: the step of {name} was replaced by another, or torch has no hooks in it: {leave}")


def _called_first(closure: Callable[[], Any], optimizer: Optimizer, name: str) -> Callable[[], Any]:
    """A closure that an update has to call before it changes a parameter, and once."""
    begun, calls = _seen(optimizer), 0

    def watched() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1 or _seen(optimizer) != begun:
            raise UsageError(f"{OPTION}: {name} evaluates the loss within its update: leave the option out")
        return closure()

    return watched


def _called_once(loss: Any, name: str) -> Callable[[], Any]:
    """A closure for an update whose gradients are there."""
    value, calls = loss.detach() if isinstance(loss, Tensor) else loss, 0

    def known() -> Any:
        nonlocal calls
        calls += 1
        if calls > 1:
            raise UsageError(f"{OPTION}: {name} evaluates the loss within its update: leave the option out")
        return value

    return known


def _seen(optimizer: Optimizer) -> list[tuple[int, str]]:
    """Every parameter's count of changes, and its norm, for changes of `.data` are not counted; NaN is equal to NaN."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(parameter._version, str(parameter.detach().norm().item())) for parameter in parameters]


def _move_counters(optimizer: Optimizer) -> None:
    """Step counters of updates that were not compiled lie on the CPU; with them there, kernels are made for it, too."""
    for parameter, state in optimizer.state.items():
        count = state.get("step") if isinstance(state, dict) else None
        if isinstance(count, Tensor) and count.is_cpu and not parameter.is_cpu:
            state["step"] = count.to(parameter.device)


@contextmanager
def _rates_as_tensors(optimizer: Optimizer) -> Iterator[None]:
    """Within, rates that are numbers are tensors; afterwards, none of an optimizer's numbers has become one."""
    groups = optimizer.param_groups
    numbers = [{key for key, value in group.items() if isinstance(value, (int, float))} for group in groups]
    given: dict[int, tuple[Tensor, int, float]] = {}
    for group in groups:
        if isinstance(rate := group.get("lr"), (int, float)):
            group["lr"] = tensor = _filled(rate, group["params"])
            given[id(tensor)] = (tensor, tensor._version, rate)
    try:
        yield
    finally:
        for group, keys in zip(optimizer.param_groups, [*numbers, *[set()] * len(optimizer.param_groups)]):
            for key, value in group.items():
                if id(value) in given:
                    tensor, version, rate = given[id(value)]
                    group[key] = rate if tensor._version == version else tensor.item()  # which waits for the device
                elif key in keys and isinstance(value, Tensor):
                    group[key] = value.item()


def _filled(rate: float, parameters: list[Tensor]) -> Tensor:
    """A rate on the parameters' device, filled in there: a copy from the host would wait for the device."""
    devices = {parameter.device for parameter in parameters}
    is_double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters)
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return torch.full((), rate, dtype=torch.float64 if is_double else torch.float32, device=device)
