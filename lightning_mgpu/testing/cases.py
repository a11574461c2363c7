"""The promises, and the small runs of a Trainer that show them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import Metric

from lightning_mgpu.testing.probe import Data, Fails, Kind, Logs, Masked, Probe, Sees, TwoOptimizers

EVEN = (48, 12)  # samples, in batches of so many
UNEVEN = (47, 11)  # 11, 11, 11, 11, 3
SMALL = (25, 12)  # 12, 12, 1
LOOSE = 1e-5  # what is logged is float32
ADAMW, NORMED = partial(Probe, adamw=True), partial(Probe, batchnorm=True)
NO_OPTION = "it has no option `replicas`"

Case = Callable[[Kind, Path], Any]
"""Runs under a kind, in every process of its strategy. The directory is for checkpoints."""


@dataclass(frozen=True)
class Promise:
    """A row of the table.

    Args:
        case: Runs a Trainer, returns what it saw: nested dicts, lists of tensors and numbers.
        tolerance: Up to which this equals what one device has seen, absolutely or relatively. The
            default is for float64 and sums in another order. None: the case returns what is wrong.
        alone: What one device runs; left out, the same case.
        error: What the error says that the case must end with; left out, there must be none.
    """

    statement: str
    case: Case
    tolerance: float | None = 1e-10
    alone: Case | None = None
    error: str = ""

    def judge(self, found: Any, expected: Any) -> str:
        """What is wrong, or nothing."""
        if self.tolerance is None:
            return str(found)
        try:
            torch.testing.assert_close(found, expected, rtol=self.tolerance, atol=self.tolerance)
        except (AssertionError, TypeError) as error:
            return " ".join(str(error).split())
        return ""


def fitted(
    kind: Kind,
    make: Callable[[], LightningModule] = Probe,
    data: tuple[int, int] = EVEN,
    **kwargs: Any,
) -> LightningModule:
    """A module made from the seed, and trained on so many samples, in batches of so many."""
    seed_everything(1, verbose=False)
    module = make()
    kind.trainer(**kwargs).fit(module, datamodule=Data(*data))
    return module


def state(module: nn.Module) -> dict[str, Any]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def trains(make: Callable[[], LightningModule] = Probe, **kwargs: Any) -> Case:
    """A case that shows all parameters after training."""
    return lambda kind, directory: state(fitted(kind, make, **kwargs))


@cache
def watched(kind: Kind, data: tuple[int, int]) -> dict[str, Any]:
    """One run with all that it shows. Several promises are judged by it."""
    module = fitted(kind, Logs, data, callbacks=[sees := Sees()])
    names = "loss_step", "loss_epoch"
    return {
        "parameters": state(module),
        "gradients": sees.gradients,
        "losses": [{name: row[name] for name in names if name in row} for row in sees.logged],
        "metrics": [row["error"] for row in sees.logged if "error" in row],
        "replicas": f"they differ after {sees.num_different} steps" if sees.num_different else "",
    }


def shows(what: str, data: tuple[int, int] = EVEN) -> Case:
    return lambda kind, directory: watched(kind, data)[what]


def clipping(kind: Kind, directory: Path) -> Any:
    by_norm = fitted(kind, gradient_clip_val=0.1)
    by_value = fitted(kind, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    return [state(by_norm), state(by_value)]


def bf16(kind: Kind, directory: Path) -> Any:
    module = fitted(
        kind, lambda: Logs().float(), precision="bf16-mixed", callbacks=[sees := Sees()]
    )
    return {"parameters": state(module), "in_bf16": [row["in_bf16"] for row in sees.logged]}


def evaluation(kind: Kind, directory: Path) -> Any:
    seed_everything(1, verbose=False)
    trainer = kind.trainer()
    trainer.test(Logs(), datamodule=Data(10_007, 256), verbose=False)
    return {name: float(trainer.callback_metrics[name]) for name in ("samples", "indices", "error")}


def predictions(kind: Kind, directory: Path) -> Any:
    returned = kind.trainer().predict(Probe(), datamodule=Data(107))
    return torch.cat([part.cpu() for part in returned])  # type: ignore[union-attr]


@cache
def saved(kind: Kind, directory: Path, resume_from: Path | None = None) -> dict[str, Any]:
    """Three epochs with a GradScaler, and a checkpoint in the middle of the second one."""
    seed_everything(2 if resume_from else 1, verbose=False)  # what is not restored shows
    saving = ModelCheckpoint(
        directory, kind.strategy + "-{step}", save_top_k=-1, every_n_train_steps=6
    )
    # float64 stays float64 under autocast: only scaling is left, by powers of two: no digit changes
    device = kind.trainer().strategy.root_device.type
    scaling = MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, growth_interval=2))
    trainer = kind.trainer(
        max_epochs=3, plugins=[scaling], callbacks=[saving], enable_checkpointing=True
    )
    module = ADAMW()
    trainer.fit(
        module,
        datamodule=Data(),
        ckpt_path=resume_from,
        weights_only=False if resume_from else None,
    )
    path = resume_from or directory / f"{kind.strategy}-step=6.ckpt"
    content = torch.load(path, map_location="cpu", weights_only=False)
    [scheduler] = content["lr_schedulers"]
    return {
        "scaled": [state(module), scaling.state_dict(), content["optimizer_states"]],
        "checkpoint": [content[name] for name in ("state_dict", "optimizer_states")],
        "scheduler": [scheduler[name] for name in ("last_epoch", "_last_lr")],
    }


def scaler(kind: Kind, directory: Path) -> Any:
    return saved(kind, directory)["scaled"]


def resume(kind: Kind, directory: Path) -> Any:
    """Goes on from one device's checkpoint."""
    return saved(kind, directory, directory / "auto-step=6.ckpt")


def reproducible(kind: Kind, directory: Path) -> str:
    return _same_bits([state(fitted(kind, partial(Probe, dropout=0.3))) for _ in range(2)])


def any_devices(kind: Kind, directory: Path) -> str:
    """Runs with dropout, BatchNorm and a scheduler."""
    if not hasattr(kind.make_strategy(), "num_replicas"):
        return NO_OPTION
    num_devices = 4 if kind.accelerator == "cpu" else torch.accelerator.device_count()
    kinds = [Kind(kind.strategy, k, kind.accelerator) for k in (1, 2, 4) if k <= num_devices]
    make = partial(Probe, batchnorm=True, dropout=0.3, adamw=True)
    return _same_bits(
        [state(fitted(each, make, strategy=each.make_strategy(replicas=4))) for each in kinds]
    )


def _same_bits(states: list[dict[str, Any]]) -> str:
    same = all(
        torch.equal(value, other[name]) for other in states for name, value in states[0].items()
    )
    return "" if same else "the runs differ"


def error(kind: Kind, directory: Path) -> str:
    fitted(kind, Fails)
    return "ended with no error at all"


def cleanup(kind: Kind, directory: Path) -> str:
    """What is otherwise after a run: threads, settings and functions of torch and Lightning."""
    threads, before = threading.enumerate(), _settings()
    fitted(kind)
    torchs = ("pin_memory", "Dummy", "Thread-autograd")
    left = [
        f"the thread {t.name}"
        for t in threading.enumerate()
        if t not in threads and not t.name.startswith(torchs)
    ]
    left += [
        f"another {name}" for name, value in _settings().items() if value != before.get(name, value)
    ]
    return f"left behind: {', '.join(left)}" if left else ""


def _settings() -> dict[str, Any]:
    found: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
    }
    found |= {
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }
    owners = (torch, torch.random, torch.autograd, F, Tensor, nn.Module, torch.optim.Optimizer)
    for owner in (*owners, LightningModule, Trainer, Metric):
        found |= {
            f"{owner.__name__}.{name}": value
            for name, value in vars(owner).items()
            if callable(value)
        }
    return found


PROMISES = {
    "parameters": Promise("parameters after training are those of one device", shows("parameters")),
    "uneven": Promise("... with batches that do not divide evenly", shows("parameters", UNEVEN)),
    "small": Promise("... with a batch smaller than the number of devices", trains(data=SMALL)),
    "clipping": Promise("... with gradients clipped, by norm and by value", clipping),
    "accumulation": Promise(
        "... with gradients accumulated over batches", trains(accumulate_grad_batches=3)
    ),
    "weights": Promise(
        "a loss per token is weighed by tokens, across devices and accumulated batches",
        trains(Masked, accumulate_grad_batches=4),
        alone=trains(Masked, data=(48, 48)),
    ),
    "schedulers": Promise("... with AdamW and a scheduler stepped every batch", trains(ADAMW)),
    "manual": Promise("... with two optimizers in manual optimization", trains(TwoOptimizers)),
    "scaler": Promise("... with a GradScaler", scaler),
    "sync_batchnorm": Promise(
        "... with BatchNorm and `sync_batchnorm=True`", trains(NORMED, sync_batchnorm=True)
    ),
    "batchnorm": Promise("... with BatchNorm as it is", trains(NORMED)),
    "bf16": Promise("bf16 autocast reaches every replica", bf16, 0.02),
    "replicas": Promise(
        "replicas are bit-identical after every step", shows("replicas", UNEVEN), None
    ),
    "gradients": Promise("callbacks see the reduced gradient", shows("gradients")),
    "logging": Promise(
        "logged values are those of one device, in every step", shows("losses"), LOOSE
    ),
    "logging_uneven": Promise(
        "... with batches that do not divide evenly", shows("losses", UNEVEN), LOOSE
    ),
    "metrics": Promise(
        "torchmetrics objects have the value of one device", shows("metrics"), LOOSE
    ),
    "evaluation": Promise("every test sample counts once (10,007)", evaluation),
    "predictions": Promise("`predict` returns all samples in dataset order", predictions),
    "save": Promise("checkpoints have the module's own keys", saved),
    "resume": Promise(
        "a run goes on from one device's checkpoint, in mid-epoch", resume, alone=saved
    ),
    "reproducible": Promise(
        "the same seed gives the same bits, dropout included", reproducible, None
    ),
    "any_devices": Promise(
        "the same bits on any number of devices (`replicas=4`)", any_devices, None
    ),
    "error": Promise(
        "an error in one replica ends the run with it",
        error,
        None,
        error="sample 47 cannot be used",
    ),
    "cleanup": Promise("nothing is left behind: threads, processes, settings", cleanup, None),
}
"""By name, in the order of the table."""

CANNOT = {
    ("auto", "weights"): "Lightning divides by the number of batches, whatever they count",
    ("ddp", "weights"): "Lightning divides by the number of batches, whatever they count",
    ("ddp", "uneven"): "the means of the processes are averaged with equal weights",
    ("ddp", "small"): "a process cannot go without samples: a clear error",
    ("ddp", "manual"): "parameters outside a loss need `ddp_find_unused_parameters_true`",
    ("ddp", "sync_batchnorm"): "torch's SyncBatchNorm needs GPUs",
    ("ddp", "logging_uneven"): "logged values are averaged so as well",
    (
        "ddp",
        "predictions",
    ): "every process returns its share; the `predict` subcommand puts them together",
    (
        "ddp",
        "cleanup",
    ): "Lightning's launcher watches its processes from a thread until the script ends",
    ("*", "batchnorm"): "BatchNorm normalises each device's shard by itself",
}
"""By strategy, `*` for all, and promise: why several devices break it. If kept, the suite fails."""
