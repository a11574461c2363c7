"""What a run prints: what will run in a few lines, one line an epoch where there is no terminal for a progress bar."""

import re
import sys
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning.pytorch.utilities.seed import isolate_rng
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_mgpu.data.batches import GlobalBatches
from lightning_mgpu.runs.devices import devices
from lightning_mgpu.runs.directory import run_directory

OF_TRAINING, OF_VALIDATION = r"train(ing)?(?![a-z])", r"val(id(ation)?)?(?![a-z])"  # names of metrics
TIMES = ("epoch_seconds", "samples_per_sec")


class RunHeader(Callback):
    """Prints model, strategy, devices, batch, data and run directory at the start of the first stage, once.

    `notes` are further lines by their label, which others may add until then.

    Args:
        scaled: What `--scale_by_devices` multiplied, by name.
    """

    def __init__(self, scaled: dict[str, Any] | None = None) -> None:
        self.scaled = scaled or {}
        self.notes: dict[str, str] = {"scaled": scaled_line(self.scaled)} if self.scaled else {}
        self.is_global = True  # the data module's batch size
        self._printed = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.is_global = has_global_batches(trainer, stage)  # in all processes: a loader may make them meet

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._print(trainer, pl_module)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def _print(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._printed or not trainer.is_global_zero:
            return
        self._printed = True
        for label, text in {**self.lines(trainer, pl_module), **self.notes}.items():
            print(f"{label + ':':<10}{text}", flush=True)

    def lines(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:
        """The header's lines by label."""
        facts = run_facts(trainer, pl_module, self.is_global)
        lines = {
            "model": f"{facts['model_class']}, {parameters(pl_module)}, precision {trainer.precision}",
            "strategy": f"{facts['strategy']} on {facts['devices']}",
        }
        if "global_batch_size" in facts:
            lines["batch"] = f"{facts['global_batch_size']} global, {facts['per_device_batch_size']} per device"
        data = trainer.datamodule  # type: ignore[attr-defined]
        if data is not None:
            sizes = ", ".join(
                f"{len(getattr(data, f'{stage}_indices')):,} {stage}"
                for stage in ("train", "val", "test")
                if hasattr(data, f"{stage}_indices")
            )
            origin = getattr(data, "origin", "")
            lines["data"] = "; ".join(part for part in (f"{type(data).__name__} {sizes}".strip(), origin) if part)
        if directory := run_directory(trainer):
            lines["run"] = str(directory)
        return lines


class EpochLines(ProgressBar):
    """One line an epoch with its metrics: the progress bar of logs and files.

    Shown are those of training and validation, by their names, and those logged with `prog_bar=True`; else all.
    """

    def __init__(self) -> None:
        super().__init__()
        self._enabled = True
        self._validated: int | None = None  # the last epoch that was

    @override
    def disable(self) -> None:
        self._enabled = False

    @override
    def enable(self) -> None:
        self._enabled = True

    @override
    def print(self, *args: Any, **kwargs: Any) -> None:
        if self._enabled:
            print(*args, **kwargs, flush=True)

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._validated = trainer.current_epoch

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        metrics = dict(trainer.callback_metrics)
        seconds = [f"{float(metrics['epoch_seconds']):.1f} s"] if "epoch_seconds" in metrics else []
        for name in TIMES:
            metrics.pop(name, None)
        if self._validated != trainer.current_epoch:  # those of an epoch before
            metrics = {name: value for name, value in metrics.items() if not re.match(OF_VALIDATION, name)}
        asked = [name for name in metrics if re.match(f"{OF_TRAINING}|{OF_VALIDATION}", name)]
        asked += [name for name in metrics if name in trainer.progress_bar_metrics and name not in asked]
        values = [f"{name} {float(metrics[name]):.4f}" for name in asked or metrics]
        last = "" if trainer.max_epochs in (None, -1) else f"/{trainer.max_epochs}"  # bounded by steps, or time
        self.print("  ".join([f"epoch {trainer.current_epoch + 1}{last}", *values, *seconds]), file=sys.stdout)


class LossBar(RichProgressBar):
    """Lightning's, with the `loss` last logged: `self.log(prog_bar=True)` has every step wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self._loss: dict[str, float] = {}

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:  # type: ignore[override]
        if trainer.global_step % trainer.log_every_n_steps == 0 and "loss" in (logged := trainer.logged_metrics):  # type: ignore[attr-defined]
            self._loss = {"loss": float(logged["loss"])}
        super().on_train_batch_end(trainer, pl_module, *args)

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return {**self._loss, **super().get_metrics(trainer, pl_module)}


def run_facts(trainer: Trainer, pl_module: LightningModule, is_global: bool = True) -> dict[str, Any]:
    """What runs: model, number of parameters, strategy, devices, and the batch where the data module has one.

    Args:
        is_global: Whether the data module's batch size is that of global batches, or of every process's own.
    """
    facts = {
        "model_class": type(pl_module).__name__,
        "num_parameters": sum(p.numel() for p in pl_module.parameters() if not is_lazy(p)),
        "strategy": type(trainer.strategy).__name__,
        "devices": str(devices(trainer)),
    }
    batch_size = getattr(trainer.datamodule, "batch_size", None)  # type: ignore[attr-defined]
    if batch_size is not None:
        batch_size = batch_size if is_global else batch_size * trainer.world_size
        facts["global_batch_size"] = batch_size
        shares = getattr(trainer.strategy, "shares", [1.0] * len(devices(trainer)))
        facts["per_device_batch_size"] = per_device(batch_size, shares)
    return facts


def has_global_batches(trainer: Trainer, stage: str) -> bool:
    """Whether processes share the batches of a stage; of a plain `DataLoader` everyone gets batches of its own."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    name = {"fit": "train", "validate": "val"}.get(stage, stage) + "_dataloader"
    if trainer.world_size == 1 or not hasattr(data, "batch_size") or not is_overridden(name, data):
        return True
    with isolate_rng():  # the loader that trains comes later, and draws the same
        loaders = CombinedLoader(getattr(data, name)()).flattened
    return all(isinstance(getattr(loader, "sampler", None), GlobalBatches) for loader in loaders)


def parameters(pl_module: LightningModule) -> str:
    """'129,068 parameters', and how many tensors get their shape, and so their size, from the first batch."""
    text = f"{sum(p.numel() for p in pl_module.parameters() if not is_lazy(p)):,} parameters"
    num_lazy = sum(map(is_lazy, pl_module.parameters()))
    return f"{text} and {num_lazy} lazy ones of unknown size" if num_lazy else text


def scaled_line(scaled: dict[str, Any]) -> str:
    """'x 2, the number of devices: batch_size 256 -> 512, lr 0.2 -> 0.4'."""
    k = scaled["scaled_by"]
    values = [f"{name} {value / k:g} -> {value:g}" for name, value in scaled.items() if name != "scaled_by"]
    return f"x {k}, the number of devices: {', '.join(values)}"


def per_device(batch_size: int, shares: Sequence[float]) -> str:
    """The samples of a global batch each device gets: '128', '85 to 86', or '179 and 77' for uneven shares."""
    if len(set(shares)) > 1:
        return " and ".join(str(round(batch_size * share / sum(shares))) for share in shares)
    least, rest = divmod(batch_size, len(shares))
    return f"{least} to {least + 1}" if rest else str(least)


def model_table(pl_module: LightningModule) -> str:
    """Lightning's summary: layers with parameters, shapes and, given an `example_input_array`, FLOPs."""
    return str(ModelSummary(pl_module, max_depth=2))
