"""An optimizer's update compiled: some dozen kernels instead of an operation for every tensor and every formula.

    python -m lightning_mgpu fit --fast.compile_optimizer=true

After PyTorch's recipes on compiling the optimizer, and on doing so with a learning rate scheduler.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import config as dynamo
from torch._dynamo.exc import TorchDynamoException
from torch.optim import LBFGS, Optimizer

from lightning_mgpu.errors import UsageError

OPTION = "--fast.compile_optimizer=true"
MOST_SETTINGS = 4  # that are compiled: a weight decay that changes once or twice, say


def compile_step(optimizer: Optimizer) -> None:
    """Compile what an optimizer does in `step`, in place. Its hooks, its closure and its schedulers are not compiled.

    The update gets the learning rate as a tensor, for numbers are compiled in; everybody else keeps seeing a number.

    Args:
        optimizer: Any of torch's, timm's or one's own. Compiled in its first step, and once more with the state it has
            by then.

    Raises:
        UsageError: If there is nothing to compile; from `step`, if settings other than the rate keep changing, or the
            compiler fails.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise UsageError(f"{OPTION}: {name} evaluates the loss several times within an update: leave the option out")
    if any(group.get("fused") for group in optimizer.param_groups):
        raise UsageError(f"{OPTION}: {name} with fused=true is one kernel already: leave one of the two out")
    if any(group.get("foreach") and not group.get("capturable") for group in optimizer.param_groups):
        raise UsageError(f"{OPTION} joins the tensors of {name} by itself: leave foreach=true out")
    if is_compiled(optimizer):
        return
    update = _without_hooks(type(optimizer).step)
    compiled = torch.compile(lambda optimizer: update(optimizer))
    dynamo.recompile_limit += 2 * MOST_SETTINGS  # the function above is one for all optimizers
    seen: list[list[dict[str, Any]]] = []

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        if (settings := _settings(optimizer)) not in seen:
            seen.append(settings)
        if len(seen) > MOST_SETTINGS:
            changed = {key for old, new in zip(seen[-2], settings) for key in new if new[key] != old.get(key)}
            raise UsageError(
                f"{OPTION} compiles {name} anew for every value of {', '.join(sorted(changed))}, which keeps changing: "
                "leave the option out, or the change (cycle_momentum: false, say)"
            )
        try:
            with _rates_as_tensors(optimizer):
                compiled(optimizer)
        except TorchDynamoException as error:
            reason = " ".join(str(error).split("\n")[:2])  # by whom, and what
            raise UsageError(f"{OPTION}: torch.compile fails for {name} ({reason}): leave the option out") from error
        return loss

    step_with_hooks = Optimizer.profile_hook_step(step)

    @functools.wraps(optimizer.step)  # with what a scheduler has noted on it
    def hooked_step(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # as a scheduler's own would tell it
        return step_with_hooks(optimizer, *args, **kwargs)

    hooked_step.is_compiled = True  # type: ignore[attr-defined]
    optimizer.step = MethodType(hooked_step, optimizer)  # type: ignore[method-assign]


def is_compiled(optimizer: Optimizer) -> bool:
    return getattr(optimizer.step, "is_compiled", False) is True  # a mocked step has every attribute


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """A class's `step` as it was written: torch puts the hooks, and a mark for the profiler, around it."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


def _settings(optimizer: Optimizer) -> list[dict[str, Any]]:
    """What is compiled in: all that is neither a tensor nor the learning rate."""
    return [
        {key: value for key, value in group.items() if key not in ("params", "lr") and not isinstance(value, Tensor)}
        for group in optimizer.param_groups
    ]


@contextmanager
def _rates_as_tensors(optimizer: Optimizer) -> Iterator[None]:
    groups = [group for group in optimizer.param_groups if isinstance(group.get("lr"), (int, float))]
    rates = [group["lr"] for group in groups]
    tensors = [_filled(group["lr"], group["params"]) for group in groups]
    for group, tensor in zip(groups, tensors):
        group["lr"] = tensor
    try:
        yield
    finally:
        for group, tensor, rate in zip(groups, tensors, rates):
            if group["lr"] is tensor:  # else the update has set another
                group["lr"] = rate


def _filled(rate: float, parameters: list[Tensor]) -> Tensor:
    """A rate on the parameters' device, filled in there: a copy from the host would wait for the device."""
    devices = {parameter.device for parameter in parameters}
    is_double = any(parameter.dtype == torch.float64 for parameter in parameters)
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return torch.full((), rate, dtype=torch.float64 if is_double else torch.float32, device=device)
