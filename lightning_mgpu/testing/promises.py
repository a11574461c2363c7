"""What a promise is: a statement, the runs that show it, and how they are judged; and what it is tried under."""

import inspect
import pydoc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path

import lightning_mgpu.strategies  # noqa: F401 (registers them)

NO_OPTION = "it has no option `replicas`"


@dataclass(frozen=True)
class Kind:
    """What to run a case under: a strategy, by a name Lightning knows or a dotted path, and its devices."""

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
        """Whether the strategy's class or one that it inherits from has such an option."""
        bases = type(self.make_strategy()).__mro__
        return any(name in inspect.signature(base.__init__).parameters for base in bases)  # type: ignore[misc]

    def trainer(self, strategy: Any = None, **kwargs: Any) -> Trainer:
        """A quiet Trainer of two epochs; `kwargs` go before its settings."""
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        settings = {"max_epochs": 2, "limit_val_batches": 0, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
        where = {"strategy": strategy or self.make_strategy(), "devices": self.devices, "accelerator": self.accelerator}
        return Trainer(**{**quiet, **settings, **where, **kwargs})  # type: ignore[arg-type]


Case = Callable[[Kind, Path], Any]
"""Runs under a kind, in every process of its strategy. It returns what it sees: a nesting of dicts and lists of
tensors. The directory is for checkpoints."""

Judge = Callable[[Any, Any], str]
"""Of what was seen under the strategy and on one device; says what is wrong, or nothing."""


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


EXACT = close(1e-10)  # in float64: the order of sums


def same_bits(found: Any, expected: Any) -> str:
    """Of several runs: all have the bits of the first."""
    if found is None:
        return NO_OPTION
    first, *others = found
    same = all(torch.equal(first[name], other[name]) for other in others for name in first)
    return "" if same else "the runs differ"


def nothing(kind: Kind, directory: Path) -> None:
    """For promises that need no run on one device."""


@dataclass(frozen=True)
class Promise:
    """A row of the table.

    Args:
        case: Runs a Trainer, and returns what it has seen.
        judge: Compares what was seen with what one device saw.
        alone: What one device runs; left out, the same case.
        error: What the error says that the case must end with; left out, none.
    """

    statement: str
    case: Case
    judge: Judge = EXACT
    alone: Case | None = None
    error: str = ""
