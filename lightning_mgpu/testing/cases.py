"""The promises, and the small runs of a Trainer that show them."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
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

from lightning_mgpu.cli.strategy_names import make_strategy
from lightning_mgpu.strategies.train_batch import TrainBatchStrategy
from lightning_mgpu.testing.probe import (
    Data,
    Fails,
    Logs,
    Masked,
    Probe,
    RunObserver,
    StrategySpec,
    TwoOptimizers,
)

EVEN = (48, 12)  # samples, batch size
UNEVEN = (47, 11)  # 11, 11, 11, 11, 3
SMALL = (25, 12)  # 12, 12, 1
FLOAT32 = 1e-5  # tolerance of what is logged
ADAMW, NORMED = partial(Probe, adamw=True), partial(Probe, batchnorm=True)
NO_OPTION = "it has no option `replicas`"

Case = Callable[[StrategySpec, Path], Any]
"""Trains, or evaluates, under a strategy, in all of its processes. Checkpoints go to the path."""


@dataclass(frozen=True)
class Promise:
    """A row of the table.

    Args:
        case: Runs a Trainer and returns what it saw: nested dicts, lists of tensors and numbers.
        tolerance: The largest difference, absolute or relative, from what one device has seen. The
            default is for float64 and sums in another order. None: the case returns what is wrong.
        reference: The case for one device, if it is another one.
        error: The message of the error that the case must end with. Left out, there must be none.
    """

    statement: str
    case: Case
    tolerance: float | None = 1e-10
    reference: Case | None = None
    error: str = ""

    def judge(self, observed: Any, expected: Any) -> str:
        """Describe the difference; empty if there is none."""
        if self.tolerance is None:
            return str(observed)
        try:
            torch.testing.assert_close(observed, expected, rtol=self.tolerance, atol=self.tolerance)
        except (AssertionError, TypeError) as error:
            return " ".join(str(error).split())
        return ""


def train_module(
    spec: StrategySpec,
    make_module: Callable[[], LightningModule] = Probe,
    data: tuple[int, int] = EVEN,
    **kwargs: Any,
) -> LightningModule:
    """A module made from a fixed seed, and trained on data of this size and batch size."""
    seed_everything(1, verbose=False)
    module = make_module()
    spec.trainer(**kwargs).fit(module, datamodule=Data(*data))
    return module


def state(module: nn.Module) -> dict[str, Any]:
    return {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}


def training(make_module: Callable[[], LightningModule] = Probe, **kwargs: Any) -> Case:
    """A case that returns all parameters after training."""
    return lambda spec, directory: state(train_module(spec, make_module, **kwargs))


@cache
def observe_run(spec: StrategySpec, data: tuple[int, int]) -> dict[str, Any]:
    """All that one run shows. Several promises are judged by it."""
    module = train_module(spec, Logs, data, callbacks=[observer := RunObserver()])
    names, logged = ("loss_step", "loss_epoch"), observer.logged
    num_different = observer.num_different
    return {
        "parameters": state(module),
        "gradients": observer.gradients,
        "losses": [{name: row[name] for name in names if name in row} for row in logged],
        "metrics": [row["error"] for row in logged if "error" in row],
        "replicas": f"they differ after {num_different} steps" if num_different else "",
    }


def observing(what: str, data: tuple[int, int] = EVEN) -> Case:
    """A case that returns one part of what a run shows."""
    return lambda spec, directory: observe_run(spec, data)[what]


def clipping(spec: StrategySpec, directory: Path) -> Any:
    by_norm = train_module(spec, gradient_clip_val=0.1)
    by_value = train_module(spec, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    return [state(by_norm), state(by_value)]


def bf16(spec: StrategySpec, directory: Path) -> Any:
    observer, precision = RunObserver(), "bf16-mixed"
    module = train_module(spec, lambda: Logs().float(), precision=precision, callbacks=[observer])
    return {"parameters": state(module), "in_bf16": [row["in_bf16"] for row in observer.logged]}


def evaluation(spec: StrategySpec, directory: Path) -> Any:
    seed_everything(1, verbose=False)
    trainer = spec.trainer()
    trainer.test(Logs(), datamodule=Data(10_007, 256), verbose=False)
    return {name: float(trainer.callback_metrics[name]) for name in ("samples", "indices", "error")}


def predictions(spec: StrategySpec, directory: Path) -> Any:
    batches = spec.trainer().predict(Probe(), datamodule=Data(107))
    return torch.cat([batch.cpu() for batch in batches])  # type: ignore[union-attr]


@cache
def saved(spec: StrategySpec, directory: Path, resume_from: Path | None = None) -> dict[str, Any]:
    """Three epochs with a GradScaler, and a checkpoint in the middle of the second one."""
    seed_everything(2 if resume_from else 1, verbose=False)  # what is not restored will differ
    saving = ModelCheckpoint(
        directory, spec.strategy + "-{step}", save_top_k=-1, every_n_train_steps=6
    )
    # float64 stays float64 under autocast. Only scaling is left: by powers of two, which is exact.
    device = spec.trainer().strategy.root_device.type
    scaling = MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, growth_interval=2))
    trainer = spec.trainer(
        max_epochs=3, plugins=[scaling], callbacks=[saving], enable_checkpointing=True
    )
    module = ADAMW()
    loading = {"ckpt_path": resume_from, "weights_only": False} if resume_from else {}
    trainer.fit(module, datamodule=Data(), **loading)  # type: ignore[arg-type]
    path = resume_from or directory / f"{spec.strategy}-step=6.ckpt"
    checkpoint = torch.load(path, map_location="cpu", weights_only=False)
    [scheduler] = checkpoint["lr_schedulers"]
    return {
        "scaled": [state(module), scaling.state_dict(), checkpoint["optimizer_states"]],
        "checkpoint": [checkpoint[name] for name in ("state_dict", "optimizer_states")],
        "scheduler": [scheduler[name] for name in ("last_epoch", "_last_lr")],
    }


def scaler(spec: StrategySpec, directory: Path) -> Any:
    return saved(spec, directory)["scaled"]


def resume(spec: StrategySpec, directory: Path) -> Any:
    """Goes on from one device's checkpoint."""
    return saved(spec, directory, directory / "auto-step=6.ckpt")


def reproducible(spec: StrategySpec, directory: Path) -> str:
    make_module = partial(Probe, dropout=0.3)
    return _same_bits([state(train_module(spec, make_module)) for _ in range(2)])


def any_devices(spec: StrategySpec, directory: Path) -> str:
    """Runs with dropout, BatchNorm and a scheduler."""
    if not isinstance(make_strategy(spec.strategy), TrainBatchStrategy):
        return NO_OPTION
    num_devices = 4 if spec.accelerator == "cpu" else torch.accelerator.device_count()
    make_module = partial(Probe, batchnorm=True, dropout=0.3, adamw=True)
    states = []
    for k in (1, 2, 4):
        if k <= num_devices:
            on_k = replace(spec, devices=k)
            strategy = make_strategy(spec.strategy, replicas=4)
            states.append(state(train_module(on_k, make_module, strategy=strategy)))
    return _same_bits(states)


def _same_bits(states: list[dict[str, Any]]) -> str:
    same = all(
        torch.equal(value, other[name]) for other in states for name, value in states[0].items()
    )
    return "" if same else "the runs differ"


def error(spec: StrategySpec, directory: Path) -> str:
    train_module(spec, Fails)
    return "ended with no error at all"


def cleanup(spec: StrategySpec, directory: Path) -> str:
    """Threads, settings and functions of torch and Lightning that a run has left or changed."""
    threads, settings = threading.enumerate(), _settings()
    train_module(spec)
    new_threads = [thread.name for thread in threading.enumerate() if thread not in threads]
    torchs = ("pin_memory", "Dummy", "Thread-autograd")
    left = [f"the thread {name}" for name in new_threads if not name.startswith(torchs)]
    for name, value in _settings().items():
        if value != settings.get(name, value):
            left.append(f"another {name}")
    return f"left behind: {', '.join(left)}" if left else ""


def _settings() -> dict[str, Any]:
    settings: dict[str, Any] = {
        "default dtype": torch.get_default_dtype(),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
    }
    owners = (torch, torch.random, torch.autograd, F, Tensor, nn.Module, torch.optim.Optimizer)
    for owner in (*owners, LightningModule, Trainer, Metric):
        for name, value in vars(owner).items():
            if callable(value):
                settings[f"{owner.__name__}.{name}"] = value
    return settings


PROMISES = {
    "parameters": Promise(
        "parameters after training are those of one device", observing("parameters")
    ),
    "uneven": Promise(
        "... with batches that do not divide evenly", observing("parameters", UNEVEN)
    ),
    "small": Promise("... with a batch smaller than the number of devices", training(data=SMALL)),
    "clipping": Promise("... with gradients clipped, by norm and by value", clipping),
    "accumulation": Promise(
        "... with gradients accumulated over batches", training(accumulate_grad_batches=3)
    ),
    "weights": Promise(
        "a loss per token is weighed by tokens, across devices and accumulated batches",
        training(Masked, accumulate_grad_batches=4),
        reference=training(Masked, data=(48, 48)),
    ),
    "schedulers": Promise("... with AdamW and a scheduler stepped every batch", training(ADAMW)),
    "manual": Promise("... with two optimizers in manual optimization", training(TwoOptimizers)),
    "scaler": Promise("... with a GradScaler", scaler),
    "sync_batchnorm": Promise(
        "... with BatchNorm and `sync_batchnorm=True`", training(NORMED, sync_batchnorm=True)
    ),
    "batchnorm": Promise("... with BatchNorm as it is", training(NORMED)),
    "bf16": Promise("bf16 autocast reaches every replica", bf16, 0.02),
    "replicas": Promise(
        "replicas are bit-identical after every step", observing("replicas", UNEVEN), None
    ),
    "gradients": Promise("callbacks see the reduced gradient", observing("gradients")),
    "logging": Promise(
        "logged values are those of one device, in every step", observing("losses"), FLOAT32
    ),
    "logging_uneven": Promise(
        "... with batches that do not divide evenly", observing("losses", UNEVEN), FLOAT32
    ),
    "metrics": Promise(
        "torchmetrics objects have the value of one device", observing("metrics"), FLOAT32
    ),
    "evaluation": Promise("every test sample counts once (10,007)", evaluation),
    "predictions": Promise("`predict` returns all samples in dataset order", predictions),
    "save": Promise("checkpoints have the module's own keys", saved),
    "resume": Promise(
        "a run goes on from one device's checkpoint, in mid-epoch", resume, reference=saved
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

LIGHTNING_DIVIDES = "Lightning divides by the number of batches, whatever they count"
CANNOT = {
    "auto": {"weights": LIGHTNING_DIVIDES},
    "ddp": {
        "weights": LIGHTNING_DIVIDES,
        "uneven": "the means of the processes are averaged with equal weights",
        "small": "a process cannot go without samples: a clear error",
        "manual": "parameters outside a loss need `ddp_find_unused_parameters_true`",
        "sync_batchnorm": "torch's SyncBatchNorm needs GPUs",
        "logging_uneven": "logged values are averaged so as well",
        "predictions": "every process returns its share; the `predict` subcommand puts them "
        "together",
        "cleanup": "Lightning's launcher watches its processes from a thread until the script ends",
    },
    "*": {"batchnorm": "BatchNorm normalises each device's shard by itself"},
}
"""By strategy, `*` for all, and promise: why several devices break it. If kept, the suite fails."""
