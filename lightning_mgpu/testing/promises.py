"""What a strategy promises: a statement, the case that shows it, and how what was seen is judged.

Where a strategy cannot keep one by its nature, `BY_NATURE` says why; the suite fails where it is out of date.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

Judge = Callable[[Any, Any], str]
"""Of what was seen under the strategy and on one device; returns what is wrong, or nothing."""


@dataclass(frozen=True)
class Promise:
    """A row of the table.

    Args:
        case: Of `cases.py`.
        judge: Compares what was seen with what one device saw.
    """

    statement: str
    case: str
    judge: Judge


def close(tolerance: float) -> Judge:
    """The same numbers, each tensor up to this error relative to its norm; everything else equal."""

    def judge(found: Any, expected: Any) -> str:
        leaves, structure = tree_flatten(found)
        expected_leaves, expected_structure = tree_flatten(expected)
        if structure != expected_structure:
            return f"{len(leaves)} values instead of {len(expected_leaves)}, or under other names"
        errors = [_relative_error(a, b) for a, b in zip(leaves, expected_leaves)]
        worst = max(errors, default=0.0)
        return "" if worst <= tolerance else f"relative error {worst:.1e}"

    return judge


def _relative_error(found: Any, expected: Any) -> float:
    if not isinstance(expected, (Tensor, float)):
        return 0.0 if type(found) is type(expected) and found == expected else float("inf")
    found, expected = torch.as_tensor(found).double(), torch.as_tensor(expected).double()
    if found.shape != expected.shape:
        return float("inf")
    error = float((found - expected).norm() / expected.norm().clamp(min=1e-30))
    return error if error == error else float("inf")  # NaN


def counts(found: Any, expected: Any) -> str:
    samples, indices = int(found["samples"]), int(found["indices"])
    if samples != 10_007:
        return f"{samples:,} samples were counted instead of 10,007"
    return "others count twice" if indices != 10_007 * 10_006 // 2 else close(1e-5)(found, expected)


def in_order(found: Any, expected: Any) -> str:
    if found.shape != expected.shape:
        return f"{len(found)} of {len(expected)} predictions"
    return "" if torch.equal(found, expected) else "another order"


def all_true(found: Any, expected: Any) -> str:
    return "" if found and all(found) else f"not after {found.count(False)} of {len(found)} steps"


def is_true(found: Any, expected: Any) -> str:
    return "" if found is True else "two runs differ"


def reaches(found: Any, expected: Any) -> str:
    missing = float(expected["samples"] - found["samples"])
    return f"{missing:.0f} samples in another type" if missing else close(0.02)(found, expected)


def nothing_left(found: Any, expected: Any) -> str:
    return ", ".join(f"{name}: {', '.join(values)}" for name, values in found.items() if values)


def ended(found: Any, expected: Any) -> str:
    return "" if "sample 47 cannot be used" in str(found) else f"ended with {found}"


PROMISES: dict[str, Promise] = {
    "parameters": Promise("parameters after training are those of one device", "parameters", close(1e-10)),
    "uneven": Promise("... with batches that do not divide evenly", "uneven", close(1e-10)),
    "small": Promise("... with a batch smaller than the number of devices", "small", close(1e-10)),
    "clipping": Promise("... with gradients clipped, by norm and by value", "clipping", close(1e-10)),
    "accumulation": Promise("... with gradients accumulated over batches", "accumulation", close(1e-10)),
    "schedulers": Promise("... with AdamW and a scheduler stepped every batch", "schedulers", close(1e-10)),
    "manual": Promise("... with two optimizers in manual optimization", "manual", close(1e-10)),
    "scaler": Promise("... with a GradScaler", "scaler", close(1e-10)),
    "sync_batchnorm": Promise("... with BatchNorm and `sync_batchnorm=True`", "sync_batchnorm", close(1e-10)),
    "batchnorm": Promise("... with BatchNorm as it is", "batchnorm", close(1e-10)),
    "bf16": Promise("bf16 autocast reaches every replica", "bf16", reaches),
    "replicas": Promise("replicas are bit-identical after every step", "replicas", all_true),
    "gradients": Promise("callbacks see the reduced gradient", "gradients", close(1e-10)),
    "logging": Promise("logged values are those of one device, in every step", "logging", close(1e-5)),
    "logging_uneven": Promise("... with batches that do not divide evenly", "logging_uneven", close(1e-5)),
    "metrics": Promise("torchmetrics objects have the value of one device", "metrics", close(1e-5)),
    "evaluation": Promise("every test sample counts once (10,007)", "evaluation", counts),
    "predictions": Promise("`predict` returns all samples in dataset order", "predictions", in_order),
    "save": Promise("checkpoints have the module's own keys", "save", close(1e-10)),
    "resume": Promise("a run goes on from one device's checkpoint, in mid-epoch", "resume", close(1e-10)),
    "reproducible": Promise("the same seed gives the same bits, dropout included", "reproducible", is_true),
    "error": Promise("an error in one replica ends the run with it", "error", ended),
    "cleanup": Promise("nothing is left behind: threads, processes, settings", "cleanup", nothing_left),
}

BY_NATURE: dict[tuple[str, str], str] = {
    ("ddp", "uneven"): "the means of the processes are averaged with equal weights",
    ("ddp", "logging_uneven"): "logged values are averaged so as well",
    ("ddp", "small"): "a process cannot go without samples: a clear error",
    ("ddp", "manual"): "parameters outside a loss need `ddp_find_unused_parameters_true`",
    ("ddp", "cleanup"): "Lightning's launcher watches its processes from a thread until the script ends",
    ("ddp", "sync_batchnorm"): "torch's SyncBatchNorm needs GPUs",
    ("ddp", "predictions"): "every process returns its share; the `predict` subcommand puts them together",
    ("dp", "replicas"): "one set of parameters is updated, and copied when the next step begins",
}
"""Promises a strategy cannot keep on several devices, and why: by strategy and promise."""

BY_NATURE_OF_ALL = {"batchnorm": "BatchNorm normalises each device's shard by itself"}
"""Promises no strategy has to keep."""


def reason(strategy: str, promise: str) -> str:
    """Why a strategy cannot keep a promise on several devices; nothing if it should."""
    return BY_NATURE.get((strategy, promise), BY_NATURE_OF_ALL.get(promise, ""))
