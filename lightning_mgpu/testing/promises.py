"""What a promise is: a statement, the runs that show it, and how they are judged; and what it is tried under."""

import inspect
import pydoc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

import lightning_mgpu.strategies  # noqa: F401 (registers them)

Judge = Callable[[Any, Any], str]
"""Of what was seen under the strategy and on one device; says what is wrong, or nothing."""

Case = Callable[..., Any]
"""Takes a `Kind` and a directory that all strategies share."""

NO_OPTION = "it has no option `replicas`"


@dataclass(frozen=True)
class Kind:
    """What to run a case under.

    Args:
        strategy: A name Lightning knows, or the dotted path of a Strategy class, or of a function that returns one.
    """

    strategy: str = "auto"
    devices: int = 1
    accelerator: str = "cpu"

    def make_strategy(self, **options: Any) -> Strategy | str:
        """A new one for every Trainer.

        Raises:
            ValueError: If there is no such strategy.
        """
        if self.strategy == "auto":
            return "auto"
        if self.strategy in StrategyRegistry:
            entry = StrategyRegistry[self.strategy]
            return entry["strategy"](**entry["init_params"], **options)
        if make := pydoc.locate(self.strategy):
            return make(**options)  # type: ignore[operator, no-any-return]
        known = ", ".join(["auto", *sorted(StrategyRegistry)])
        raise ValueError(f"strategy {self.strategy!r}: give the dotted path of a Strategy, or one of {known}")

    def has_option(self, name: str) -> bool:
        """Whether the strategy's class has an option, its own or one that it hands on by `**kwargs`."""
        for base in type(self.make_strategy()).__mro__:
            if "__init__" in vars(base):
                taken = inspect.signature(vars(base)["__init__"]).parameters
                if name in taken or not any(option.kind is option.VAR_KEYWORD for option in taken.values()):
                    return name in taken
        return False


def close(tolerance: float) -> Judge:
    """The same numbers, each tensor and float up to this error relative to its norm; everything else equal."""

    def judge(found: Any, expected: Any) -> str:
        leaves, structure = tree_flatten_with_path(found)
        expected_leaves, expected_structure = tree_flatten_with_path(expected)
        if structure != expected_structure:
            return f"{len(leaves)} values instead of {len(expected_leaves)}, or under other names"
        worst = 0.0
        for (_, own), (path, other) in zip(leaves, expected_leaves):
            if not isinstance(other, (Tensor, float)):
                if own != other:
                    return f"{keystr(path)}: {own!r} instead of {other!r}"
                continue
            own, other = torch.as_tensor(own).double(), torch.as_tensor(other).double()
            if own.shape != other.shape:
                return f"{keystr(path)}: shape {tuple(own.shape)} instead of {tuple(other.shape)}"
            error = float((own - other).norm() / other.norm().clamp(min=1e-30))
            worst = max(worst, error if error == error else float("inf"))  # NaN
        return "" if worst <= tolerance else f"relative error {worst:.1e}"

    return judge


def same_bits(found: Any, expected: Any) -> str:
    """Of several runs: all have the bits of the first."""
    if found is None:
        return NO_OPTION
    first, *others = found
    same = all(torch.equal(first[name], other[name]) for other in others for name in first)
    return "" if same else "the runs differ"


def ended(found: Any, expected: Any) -> str:
    return "" if "sample 47 cannot be used" in str(found) else f"ended with {found}"


EXACT = close(1e-10)  # in float64: the order of sums


@dataclass(frozen=True)
class Promise:
    """A row of the table.

    Args:
        case: Runs a Trainer, and returns what it has seen.
        judge: Compares what was seen with what one device saw.
    """

    statement: str
    case: Case
    judge: Judge = EXACT
