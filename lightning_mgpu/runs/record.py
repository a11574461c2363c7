"""What a run leaves of itself: configuration, model and loggers before it trains, its last two lines at the end."""

import hashlib
import math
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.model_summary import ModelSummary
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.callbacks import RunHeader
from lightning_mgpu.runs.csv_logger import RunCSVLogger
from lightning_mgpu.runs.directory import claim
from lightning_mgpu.runs.files import replace_text
from lightning_mgpu.runs.wandb_run import Tracking, finish, start_run


@dataclass(eq=False)
class RunRecord(Callback):
    """Makes the run directory and starts the loggers once the data are there: a mistake before leaves nothing."""

    run_dir: Path
    config: dict[str, Any]  # as `config.yaml` is to have it
    header: RunHeader  # gets a line of what W&B does
    tracking: Tracking | None  # none where nothing is logged
    opened: ExitStack  # what is closed when the run ends: the directory's lock, the W&B run
    is_done: bool = False

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.is_done:  # `fit` tests
            return
        self.is_done = True
        if self.tracking is not None:
            trainer.loggers = [RunCSVLogger(self.run_dir), *trainer.loggers]
        if not trainer.is_global_zero:
            return
        self.opened.callback(os.close, claim(self.run_dir))
        replace_text(self.run_dir / "config.yaml", yaml.safe_dump(self.config, sort_keys=False))
        replace_text(self.run_dir / "model.txt", f"{ModelSummary(pl_module, max_depth=2)}\n")
        if any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
            self.header.notes["wandb"] = "by --trainer.logger; --wandb.* does not count"
        elif self.tracking is not None:
            logger, self.header.notes["wandb"] = start_run(self.tracking, self.run_dir, self.config)
            if logger is not None:
                trainer.loggers = [*trainer.loggers, logger]
                self.opened.callback(finish, logger.experiment)


def fingerprint(parameters: Iterable[Tensor]) -> str:
    """The first 12 hex digits of a SHA-256 over the bytes of all parameters in order; buffers are left out.

    Two runs with the same fingerprint have trained the same bits.
    """
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]


def closing_line(metrics: dict[str, Any], seconds_per_epoch: float, devices: str) -> str:
    """`test acc: 0.83, 3.1 sec/epoch on [device(type='cpu')]`; the seconds are NaN where no epoch was trained."""
    shown = {"test_acc": metrics["test_acc"]} if "test_acc" in metrics else metrics
    results = [f"{name.replace('_', ' ')}: {value:.2f}" for name, value in shown.items()]
    time = "no epoch trained" if math.isnan(seconds_per_epoch) else f"{seconds_per_epoch:.1f} sec/epoch"
    return ", ".join([*results, f"{time} on {devices}"])
