"""Output of a run: header, epoch lines, learning curve."""

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from lightning_mgpu.callbacks.curve import draw_curve
from lightning_mgpu.devices import describe_replicas, devices, process_devices, synchronize
from lightning_mgpu.runs.metrics import STAGE_AND_METRIC
from lightning_mgpu.runs.record import count_parameters


@dataclass(eq=False)
class RunOutput(Checkpoint):
    """Prints and draws. It is a `Checkpoint` because Lightning calls these last.

    Args:
        header: Print a few lines about the run at its start.
        lines: Print a line per epoch.
        curve: Draw `curve.png` after every epoch.
        pictures: Draw `confusion.png` and `predictions.png` in a test.
        test: Let `fit` test the best checkpoint; if false, it never reads the test set.
    """

    header: bool = True
    lines: bool = True
    curve: bool = True
    pictures: bool = True
    test: bool = True
    # attributes of every `Checkpoint`; this one saves nothing
    best_model_path: ClassVar[str] = ""
    last_model_path: ClassVar[str] = ""
    best_model_score: ClassVar[None] = None

    def __post_init__(self) -> None:
        self.notes: dict[str, str] = {}  # more lines of the header, label -> text
        self.seconds: list[float] = []  # of training, per epoch of this process
        self.metrics_before: dict[str, Tensor] = {}  # logged before the epoch
        self.started: float | None = None  # `None` while validation runs

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        batch = global_batch_size(trainer)  # warns
        logs = trainer.training and trainer.loggers and not trainer.fast_dev_run
        every = trainer.log_every_n_steps
        if logs and trainer.estimated_stepping_batches < every:
            rank_zero_warn(f"fewer steps than log_every_n_steps={every}: no step is logged")
        if not self.header or not trainer.is_global_zero:
            return
        self.header = False
        replicas = getattr(trainer.strategy, "num_replicas", None) or len(devices(trainer))
        strategy, data = trainer.strategy, trainer.datamodule
        how = f" ({strategy.description})" if hasattr(strategy, "description") else ""
        size = f"{count_parameters(pl_module):,} parameters"
        lines = {
            "model": f"{type(pl_module).__name__}, {size}, precision {trainer.precision}",
            "strategy": f"{type(strategy).__name__}{how} on {describe_replicas(trainer)}",
            "batch": f"{batch} global, {batch / replicas:g} per replica" if batch else "",
            "data": f"{type(data).__name__} {getattr(data, 'summary', '')}".strip() if data else "",
            "run": "" if trainer.fast_dev_run else trainer.default_root_dir,
            **self.notes,
        }
        for label, text in lines.items():
            if text:
                print(f"{label + ':':<10}{text}", flush=True)

    on_test_start = on_predict_start = on_train_start

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop_clock(trainer)
        if trainer.state.fn == "validate":
            self.on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.curve and self.seconds:
            draw_curve(trainer, upload=False)  # metrics.csv now contains the last epoch
        self.metrics_before = dict(trainer.callback_metrics)
        self.elapsed = 0.0  # in this epoch
        self.start_clock(trainer)

    def on_train_batch_start(self, trainer: Trainer, *args: Any) -> None:
        if self.started is None:  # first batch after a validation within the epoch
            self.start_clock(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.stop_clock(trainer)
        self.seconds.append(self.elapsed)
        pl_module.log("epoch_seconds", self.elapsed, sync_dist=True)  # the mean over processes
        values = epoch_values(trainer, self.metrics_before)  # all processes reduce them
        if self.lines and trainer.is_global_zero:
            end = f"/{trainer.max_epochs}" if (trainer.max_epochs or -1) > 0 else ""
            epoch = f"epoch {trainer.current_epoch + 1}{end}"
            print("  ".join([epoch, *values, f"{self.elapsed:.1f} s"]), flush=True)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.curve:
            draw_curve(trainer, upload=True)

    def start_clock(self, trainer: Trainer) -> None:
        synchronize(process_devices(trainer))
        self.started = time.perf_counter()

    def stop_clock(self, trainer: Trainer) -> None:
        if self.started is not None:
            synchronize(process_devices(trainer))
            self.elapsed += time.perf_counter() - self.started
            self.started = None


def global_batch_size(trainer: Trainer) -> int:
    """The global batch size. Warns if the processes train on separate batches."""
    loader = trainer.train_dataloader
    sampler: Any = getattr(loader, "sampler", None)
    if hasattr(sampler, "whole_batches"):  # of `batch_loader`
        return int(sampler.batch_size)
    # a strategy with replicas splits every batch
    processes = 1 if hasattr(trainer.strategy, "num_replicas") else trainer.world_size
    if trainer.training and processes > 1:
        rank_zero_warn(
            f"each of the {processes} processes loads separate batches: create the loader with "
            "lightning_mgpu.data.batch_loader(dataset, batch_size, self.trainer)"
        )
    return processes * (getattr(loader, "batch_size", None) or 0)


def epoch_values(trainer: Trainer, before: dict[str, Tensor]) -> list[str]:
    """['train_loss 0.4823', 'val_loss 0.5012'] of the epoch; all metrics if no name is known.

    Lightning keeps values of earlier epochs; a value logged again is a new tensor.
    """
    values = {k: v for k, v in trainer.callback_metrics.items() if v is not before.get(k)}
    # values logged by step and by epoch have three names
    twins = {f"{name}_{when}" for name in values for when in ("step", "epoch")}
    numbers = {k: float(v) for k, v in values.items() if k not in {*twins, "epoch_seconds"}}
    bar = trainer.progress_bar_metrics
    shown = [name for name in numbers if STAGE_AND_METRIC.fullmatch(name) or name in bar]
    return [f"{name} {numbers[name]:.4f}" for name in shown or numbers]
