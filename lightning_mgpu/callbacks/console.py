"""What a run prints: what will run, in a few lines, and one line an epoch. A terminal has a progress bar below them."""

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

from lightning_mgpu.callbacks.epoch_metrics import epoch_metrics, quantity
from lightning_mgpu.data.batches import GlobalBatches
from lightning_mgpu.runs.devices import devices, in_words
from lightning_mgpu.runs.directory import run_directory


class RunHeader(Callback):
    """Prints model, strategy, devices, batch, data and run directory at the start of the first stage, once.

    `notes` are further lines by their label, which others may add until then.
    """

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.is_global = True  # the data module's batch size
        self._printed = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.is_global = has_global_batches(trainer, stage)  # in all processes: a loader may make them meet

    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._printed or not trainer.is_global_zero:
            return
        self._printed = True
        for label, text in {**self.lines(trainer, pl_module), **self.notes}.items():
            print(f"{label + ':':<10}{text}", flush=True)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def lines(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, str]:
        """The header's lines by label."""
        facts = run_facts(trainer, pl_module, self.is_global)
        size = f"{facts['num_parameters']:,} parameters"
        lines = {"model": f"{facts['model_class']}, {size}, precision {trainer.precision}"}
        lines["strategy"] = f"{facts['strategy']} on {facts['devices']}"
        if "global_batch_size" in facts:
            lines["batch"] = f"{facts['global_batch_size']} global, {facts['per_device_batch_size']} per device"
        if (data := trainer.datamodule) is not None:  # type: ignore[attr-defined]
            sizes = {stage: getattr(data, f"{stage}_indices", None) for stage in ("train", "val", "test")}
            shown = ", ".join(f"{len(indices):,} {stage}" for stage, indices in sizes.items() if indices is not None)
            origin = getattr(data, "origin", "")
            lines["data"] = f"{type(data).__name__} {shown}".strip() + (f"; {origin}" if origin else "")
        if directory := run_directory(trainer):
            lines["run"] = str(directory)
        return lines


class EpochLines(ProgressBar):
    """One line an epoch: the progress bar of logs and files."""

    def __init__(self) -> None:
        super().__init__()
        self.is_enabled = True

    @override
    def disable(self) -> None:  # in other processes than the first, and while Lightning searches
        self.is_enabled = False

    @override
    def enable(self) -> None:
        self.is_enabled = True

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        line = epoch_line(trainer)  # in all processes, which meet to reduce the metrics
        if self.is_enabled:
            print(line, flush=True)


class LossBar(RichProgressBar):
    """Lightning's bar with the `loss` last logged, so no step waits for it; the epochs' lines stay above the bar."""

    def __init__(self) -> None:
        super().__init__()
        self._loss: dict[str, float] = {}

    @override
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *args: Any) -> None:  # type: ignore[override]
        if trainer.global_step % trainer.log_every_n_steps == 0 and "loss" in (logged := trainer.logged_metrics):  # type: ignore[attr-defined]
            self._loss = {"loss": float(logged["loss"])}
        super().on_train_batch_end(trainer, pl_module, *args)

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        line = epoch_line(trainer)  # in all processes, which meet to reduce the metrics
        if self.progress is not None and self.is_enabled:
            self.progress.console.print(line, markup=False, highlight=False, soft_wrap=True)

    @override
    def get_metrics(self, trainer: Trainer, pl_module: LightningModule) -> dict[str, Any]:
        return self._loss  # all others stand in the epochs' lines

    @override
    def _get_train_description(self, current_epoch: int) -> str:
        return f"{epoch_number(self.trainer):{len(self.validation_description)}}"  # Lightning counts from 0


def epoch_number(trainer: Trainer) -> str:
    """`epoch 3/10`; `epoch 3` where steps or time end the run."""
    return f"epoch {trainer.current_epoch + 1}" + (f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else "")


def epoch_line(trainer: Trainer) -> str:
    """`epoch 3/10  val_loss 0.5012  train_loss 0.4823  10.5 s`.

    Shown are the metrics of training and validation by their names, and those logged with `prog_bar=True`; else all.
    """
    metrics = epoch_metrics(trainer)
    seconds = [f"{metrics.pop('epoch_seconds'):.1f} s"] if "epoch_seconds" in metrics else []
    asked = [name for name in metrics if quantity(name)]
    asked += [name for name in metrics if name in trainer.progress_bar_metrics and name not in asked]
    values = [f"{name} {metrics[name]:.4f}" for name in asked or metrics]
    return "  ".join([epoch_number(trainer), *values, *seconds])


def run_facts(trainer: Trainer, pl_module: LightningModule, is_global: bool = True) -> dict[str, Any]:
    """What runs, and the batch where the data module has one: `is_global`, or every process has batches of its own."""
    facts: dict[str, Any] = {
        "model_class": type(pl_module).__name__,
        "num_parameters": sum(p.numel() for p in pl_module.parameters() if not is_lazy(p)),
        "strategy": type(trainer.strategy).__name__,
        "devices": in_words(devices(trainer)),
    }
    batch_size = getattr(trainer.datamodule, "batch_size", None)  # type: ignore[attr-defined]
    if batch_size is not None:
        facts["global_batch_size"] = batch_size if is_global else batch_size * trainer.world_size
        shares = getattr(trainer.strategy, "shares", [1.0] * len(devices(trainer)))
        facts["per_device_batch_size"] = per_device(facts["global_batch_size"], shares)
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


def per_device(batch_size: int, shares: Sequence[float]) -> str:
    """The samples of a global batch each device gets: '128', '85 to 86', or '179 and 77' for uneven shares."""
    if len(set(shares)) > 1:
        return " and ".join(str(round(batch_size * share / sum(shares))) for share in shares)
    least, rest = divmod(batch_size, len(shares))
    return f"{least} to {least + 1}" if rest else str(least)


def model_table(pl_module: LightningModule) -> str:
    """Lightning's summary: layers with parameters, shapes and, given an `example_input_array`, FLOPs."""
    return str(ModelSummary(pl_module, max_depth=2))
