"""An optimizer's update compiled: fewer kernels than an operation for every tensor and every formula.

    python -m lightning_mgpu fit --fast.compile_optimizer=true

After PyTorch's recipes on compiling the optimizer, and on doing so with a learning rate scheduler.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import LBFGS, Optimizer

from lightning_mgpu.runs.errors import UsageError


def compile_step(optimizer: Optimizer) -> None:
    """Compile what an optimizer of torch's or timm's does in `step`. Hooks, closure and schedulers are not compiled.

    The optimizer gets a class of its own, a subclass with another `step`. So whoever calls the step of the class, for
    the parameters of another replica, calls the compiled one, too.

    Raises:
        UsageError: If there is nothing to compile, or the optimizer may do more with its closure than call it first.
    """
    cls = type(optimizer)
    if "compiled_from" in vars(cls):
        return
    takes_one_step = cls is not LBFGS and cls.__name__ != "Lookahead"
    joins_tensors = any(group.get("fused") or group.get("foreach") for group in optimizer.param_groups)
    if not cls.__module__.startswith(("torch.optim.", "timm.optim.")) or not takes_one_step or joins_tensors:
        raise UsageError(
            f"--fast.compile_optimizer=true is for the optimizers of torch and timm with one update a step, without "
            f"fused and foreach: leave it out for this {cls.__name__}"
        )
    compiled = torch.compile(cls.step.__wrapped__)  # type: ignore[attr-defined]  # without torch's hooks

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
    """Within, learning rates are tensors: of numbers every change would be compiled anew.

    Afterwards they are numbers again, for schedulers, loggers and checkpoints.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        parameter = group["params"][0]
        dtype = torch.promote_types(parameter.dtype, torch.float32)
        group["lr"] = torch.full((), group["lr"], dtype=dtype, device=parameter.device)  # copies wait for the device
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates):
            group["lr"] = rate
