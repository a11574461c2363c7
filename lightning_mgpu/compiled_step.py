"""For the engine in strategies/ alone, which asks; it goes with that engine. The code is in callbacks/compiled_step.py.

A copy of an optimizer has the compiled class, too, so there is nothing for that engine to do.
"""

from typing import Any

from torch.optim import Optimizer


def is_compiled(optimizer: Optimizer) -> bool:
    return False


def plan_of(optimizer: Optimizer) -> Any:
    return None


def compile_step(optimizer: Optimizer, like: Optimizer) -> None:
    raise NotImplementedError  # is_compiled says no
