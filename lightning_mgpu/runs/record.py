"""Records a run: its directory, configuration, loggers, start and end."""

import contextlib
import hashlib
import json
import os
import shutil
import signal
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.fabric.loggers import logger as fabric_logger
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn.parameter import is_lazy

from lightning_mgpu.devices import describe_devices, devices
from lightning_mgpu.runs.checkpoints import BestCheckpoint
from lightning_mgpu.runs.directory import (
    CONFIG,
    MODEL,
    OWN_CHECKPOINTS,
    RUN_JSON,
    flatten,
    lock_run_dir,
    read_run_json,
)
from lightning_mgpu.runs.metrics import MetricsFile, NoExperiment, summarize
from lightning_mgpu.runs.wandb_run import WandbOptions, start_run
from lightning_mgpu.tools import atomic_write


@dataclass(eq=False)
class RunRecord(Callback):
    """Callback that creates the run directory and the loggers once the data are set up.

    A new run that fails or is stopped before its first batch leaves no directory.
    """

    run_dir: Path  # absolute
    config: str  # the text of `config.yaml`
    wandb_options: WandbOptions | None  # `None` if nothing is logged
    content: dict[str, Any]  # of `run.json` at the start
    notes: dict[str, str]  # lines of the header; a line about W&B is added
    num_steps: int | None  # so far, if resumed
    results: dict[str, Any] = field(default_factory=dict)  # of `run.json` at the end
    lock: int | None = None  # file descriptor, in process 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if "strategy" in self.content:  # the test after `fit`
            return
        self.content["strategy"] = type(trainer.strategy).__name__
        self.lock = lock_run_dir(self.run_dir) if trainer.is_global_zero else None
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):  # its default is the first logger's directory
                # separate, else two callbacks would overwrite and delete each other's files
                name = "checkpoints" if isinstance(callback, BestCheckpoint) else OWN_CHECKPOINTS
                callback.dirpath = callback.dirpath or str(self.run_dir / name)
        run_id = self.begin_files(trainer) if self.lock is not None else None
        if self.wandb_options is not None:
            self.add_loggers(trainer, self.wandb_options, run_id)

    def begin_files(self, trainer: Trainer) -> str | None:
        """Write `config.yaml` and `run.json`; return the W&B run ID of a resumed run."""
        if not (before := read_run_json(self.run_dir)):  # of a resumed run
            self.write_text(CONFIG, self.config)  # the first file: resuming needs it
        run_id: str | None = before.get("wandb_id")
        self.content["options"] = {**before.get("options", {}), **self.content["options"]}
        versions = {name: version(name) for name in ("torch", "lightning", "torchmetrics")}
        used = describe_devices(devices(trainer))
        self.content |= {"begin": str(datetime.now(UTC)), "devices": used, "versions": versions}
        self.write(end=None, wandb_id=run_id)
        return run_id

    def add_loggers(self, trainer: Trainer, options: WandbOptions, run_id: str | None) -> None:
        """Add W&B and `metrics.csv` to the user's loggers, in every process."""
        # for ranks above 0: Lightning's dummy fails for `experiment.config.update()`
        fabric_logger._DummyExperiment = NoExperiment  # type: ignore[misc]
        added: list[Logger] = [MetricsFile(trainer, self.num_steps)]
        if any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
            self.notes["wandb"] = "set by --trainer.logger; --wandb.* is ignored"
        else:
            started = self.start_wandb(options, run_id) if self.lock is not None else None
            started = trainer.strategy.broadcast(started)  # without its experiment
            added = [*filter(None, [started]), *added]
        trainer.loggers = [*trainer.loggers, *added]

    def start_wandb(self, options: WandbOptions, run_id: str | None) -> WandbLogger | None:
        """Start the W&B run, in process 0."""
        config = flatten(yaml.safe_load(self.config))
        logger, where = start_run(options, self.run_dir, run_id, config)
        self.notes["wandb"] = where.replace(str(self.run_dir), self.notes["run"])
        if logger is not None:
            self.write(wandb_id=logger.experiment.id)
        return logger

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called when all checks have passed and weights are on their device."""
        stop_on_signals()  # again: Lightning has installed its own handlers
        is_first = self.lock is not None and "num_parameters" not in self.content
        if is_first and not trainer.sanity_checking:
            self.write_text(CONFIG, self.config)  # again: a resumed run may have more epochs
            self.write_text(MODEL, f"{pl_module}\n")
            self.write(num_parameters=count_parameters(pl_module))

    on_validation_start = on_test_start = on_predict_start = begin

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.begin(trainer, pl_module)
        for logger in trainer.loggers:
            if isinstance(logger, MetricsFile):
                logger.began = time.monotonic()

    def write_text(self, name: str, text: str) -> None:
        with atomic_write(self.run_dir / name) as part:
            part.write_text(text, encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Add values to `run.json`."""
        self.content |= values
        self.write_text(RUN_JSON, json.dumps(self.content, indent=2, default=str) + "\n")

    def close(self, trainer: Trainer, error: BaseException | None) -> None:
        """Write the end of the run, finish the W&B run and unlock the directory."""
        if self.lock is None:
            return
        state = "stopped" if self.results.get("why") else "finished"
        end: dict[str, Any] = {"state": state, "best": {}, **self.results}
        # full disk, broken metrics.csv, deleted directory: report only the first error
        with contextlib.suppress(*(Exception,) if error else ()):
            if isinstance(error, Exception):
                end |= {"state": "failed", "why": f"{type(error).__name__}: {error}"}
                self.write_text("error.log", "".join(traceback.format_exception(error)))
            elif error is not None:
                end |= {"state": "interrupted", "why": "Ctrl-C, SIGTERM or SIGHUP"}
            metrics = summarize(self.run_dir, (best := end["best"]).get("epoch"))
            if best.get("monitor"):  # of the best validation: an epoch may have several
                metrics[best["monitor"]] = best["value"]
            self.write(end=end | {"epochs": trainer.current_epoch, "metrics": metrics})
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.finish()
        if error and self.num_steps is None and not (self.run_dir / MODEL).exists():
            shutil.rmtree(self.run_dir, ignore_errors=True)
            with contextlib.suppress(OSError):  # not empty
                Path("runs").rmdir()
        os.close(self.lock)


def stop_on_signals() -> None:
    """Raise KeyboardInterrupt in process 0 on Ctrl-C, SIGTERM or SIGHUP; it ends the others."""

    def stop(*_: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    is_first = rank_zero_only.rank == 0  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGHUP):  # sent to all processes of a terminal
        signal.signal(number, stop if is_first else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop if is_first else signal.SIG_DFL)


def count_parameters(module: LightningModule) -> int:
    return sum(p.numel() for p in module.parameters() if not is_lazy(p))


def fingerprint(parameters: Iterable[Tensor]) -> str:
    """12 hex digits of a SHA-256 over the bytes of all parameters in order, without buffers."""
    digest = hashlib.sha256()
    for p in parameters:
        digest.update(p.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]
