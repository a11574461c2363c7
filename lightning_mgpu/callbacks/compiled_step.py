"""An optimizer's update compiled: fewer kernels than an operation for every tensor and every formula.

    python -m lightning_mgpu fit --fast.compile_optimizer=true

After PyTorch's recipes on compiling the optimizer, and on doing so with a learning rate scheduler.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_mgpu.errors import UsageError

OPTION = "--fast.compile_optimizer=true"


def compile_step(optimizer: Optimizer) -> None:
    """Compile what an optimizer of torch's or timm's does in `step`. Hooks, closure and schedulers are not compiled.

    The optimizer gets a class of its own, a subclass of its class with another `step`. So whoever calls the step of its
    class, for another set of parameters, calls the compiled one, too.

    Raises:
        UsageError: If there is nothing to compile, or the optimizer may do more with its closure than call it first.
    """
    cls = type(optimizer)
    if "compiled_from" in vars(cls):
        return
    if not cls.__module__.startswith(("torch.optim.", "timm.optim.")) or cls is LBFGS or cls.__name__ == "Lookahead":
        raise UsageError(
            f"{OPTION} is for the optimizers of torch and timm with one update a step; leave it out for {cls.__name__}"
        )
    if any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups):
        raise UsageError(f"{OPTION} joins the tensors of {cls.__name__} by itself: leave fused and foreach out")
    update = cls.step.__wrapped__  # type: ignore[attr-defined]  # without torch's hooks, which go around it again below

    @torch.compile
    def compiled(optimizer: Optimizer) -> None:
        update(optimizer)

    def step(optimizer: Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        optimizer._opt_called = True  # type: ignore[attr-defined]  # a scheduler's wrapper would note it
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with rates_as_tensors(optimizer):
            compiled(optimizer)
        return loss

    hooked: Any = Optimizer.profile_hook_step(step)  # type: ignore[type-var]
    hooked.hooked = True  # torch adds no second time
    hooked._wrapped_by_lr_sched = True  # and a scheduler warns of a step that somebody has replaced
    names = {"step": hooked, "compiled_from": cls, "__module__": cls.__module__}
    optimizer.__class__ = type(cls.__name__, (cls,), names)
    vars(optimizer).pop("step", None)  # a scheduler's wrapper of the step there was


@contextmanager
def rates_as_tensors(optimizer: Optimizer) -> Iterator[None]:
    """Within, learning rates are tensors: numbers are compiled in, every change of one would be compiled anew.

    Afterwards they are numbers again, for schedulers, loggers and checkpoints.
    """
    given = [group["lr"] for group in optimizer.param_groups]
    tensors = [rate if isinstance(rate, Tensor) else _filled(rate, optimizer) for rate in given]
    for group, tensor in zip(optimizer.param_groups, tensors):
        group["lr"] = tensor
    try:
        yield
    finally:
        for group, tensor, rate in zip(optimizer.param_groups, tensors, given):
            group["lr"] = rate if group["lr"] is tensor else float(group["lr"])  # an update may set its own rate


def _filled(rate: float, optimizer: Optimizer) -> Tensor:
    """A rate on the parameters' device, filled in there: a copy from the host would wait for the device."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    devices = {parameter.device for parameter in parameters}
    is_double = any(parameter.dtype in (torch.float64, torch.complex128) for parameter in parameters)
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    return torch.full((), rate, dtype=torch.float64 if is_double else torch.float32, device=device)
