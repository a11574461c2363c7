"""Records a run: its directory, configuration, model and loggers; the last line that it prints."""

import hashlib
import math
import os
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.model_summary import ModelSummary
from lightning.pytorch.utilities.seed import isolate_rng
from torch import Tensor
from typing_extensions import override

from lightning_mgpu.devices import is_sharded
from lightning_mgpu.files import replace_text, to_yaml
from lightning_mgpu.runs.csv_logger import RunCSVLogger
from lightning_mgpu.runs.directory import lock_run_dir, log_error
from lightning_mgpu.runs.run_json import (
    RunJson,
    count_parameters,
    describe_results,
    describe_run,
)
from lightning_mgpu.runs.wandb_run import WandbOptions, finish, start_run


@dataclass(eq=False)
class RunRecord(Callback):
    """Makes the run directory and the loggers when the data are there: earlier mistakes leave none.

    Args:
        run_dir: The directory.
        config: The options of the run; `config.yaml` gets them without `run_dir`, since a repeated
            run gets a directory of its own.
        notes: Lines of the run's header, label -> text; this one adds `wandb`.
        wandb_options: `None` if nothing is logged.
        cleanup: Closes the directory's lock and the W&B run when the run ends.
        facts: What `run.json` gets when the run begins.
        results: What it gets when the run ends, beside what the Trainer knows.
    """

    run_dir: Path
    config: dict[str, Any]
    notes: dict[str, str]
    wandb_options: WandbOptions | None
    cleanup: ExitStack
    facts: dict[str, Any]
    results: dict[str, Any] = field(default_factory=dict)
    _has_recorded: bool = False
    _has_model: bool = False  # whether `model.txt` is written

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._has_recorded:  # in the test after `fit`
            return
        self._has_recorded = True
        if self.wandb_options is not None:
            trainer.loggers = [RunCSVLogger(self.run_dir), *trainer.loggers]
        if not trainer.is_global_zero:
            return
        self.cleanup.callback(os.close, lock_run_dir(self.run_dir))
        self.cleanup.push(lambda kind, error, trace: log_error(self.run_dir, error))
        config = {**self.config, "run_dir": None}
        replace_text(self.run_dir / "config.yaml", f"{to_yaml(config)}\n")
        self.run_json = RunJson(self.run_dir, {**self.facts, **describe_run(trainer, self.config)})
        self.cleanup.push(
            lambda kind, error, trace: self.run_json.write_end(
                error, {**describe_results(trainer), **self.results}
            )
        )
        if is_sharded(trainer) and not is_overridden("configure_model", pl_module):
            self.on_fit_start(trainer, pl_module)  # later a process has only its shard
        if any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
            self.notes["wandb"] = "by --trainer.logger; --wandb.* does not count"
        elif self.wandb_options is not None:
            logger, self.notes["wandb"] = start_run(self.wandb_options, self.run_dir, config)
            if logger is not None:
                trainer.loggers = [*trainer.loggers, logger]
                self.cleanup.callback(finish, logger.experiment)

    # Where weights are on their device: in `setup` they are not, though `pl_module.device` says so.
    @override
    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero and not self._has_model:
            replace_text(self.run_dir / "model.txt", summary(pl_module))
            is_shard = is_sharded(trainer) and is_overridden("configure_model", pl_module)
            self.run_json.write(num_parameters=None if is_shard else count_parameters(pl_module))
        self._has_model = True

    on_validation_start = on_test_start = on_predict_start = on_fit_start


class LayerTable(ModelSummary):
    """Lightning's table of layers, to which `example_input_array` gives sizes only if asked for."""

    def __init__(self, module: LightningModule, has_sizes: bool) -> None:
        self.has_sizes = has_sizes
        super().__init__(module, max_depth=2)

    @override
    def _forward_example_input(self) -> None:
        if self.has_sizes:
            super()._forward_example_input()


def summary(module: LightningModule) -> str:
    """The text of `model.txt`. A model through which its example does not pass has no sizes in it.

    The model is left as it was: modes and random numbers. Where parameters are sharded (FSDP) no
    example passes: all processes would have to take part.
    """
    modes, note = [(layer, layer.training) for layer in module.modules()], ""
    with isolate_rng():  # which restores nothing after an exception
        try:
            return f"{LayerTable(module, has_sizes=not is_sharded(module.trainer))}\n"
        except Exception as error:  # of any model's `forward`: a table ends no run
            raised = f"{type(error).__name__}: {error}"
            note = f"no sizes: with example_input_array, forward raises {raised}"
        finally:
            for layer, mode in modes:
                layer.training = mode
    return f"{LayerTable(module, has_sizes=False)}\n{note}\n"


def fingerprint(parameters: Iterable[Tensor]) -> str:
    """12 hex digits of a SHA-256 over the bytes of all parameters in order; buffers are left out.

    Two runs with the same fingerprint have trained the same bits.
    """
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(
            parameter.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data
        )
    return digest.hexdigest()[:12]


def closing_line(metrics: dict[str, Any], seconds_per_epoch: float | None, devices: str) -> str:
    """`test acc: 0.83, 3.1 sec/epoch on [device(type='cpu')]`, as in the book.

    Args:
        metrics: The test's metrics; only `test_acc` is shown if it is among them.
        seconds_per_epoch: NaN if no epoch was trained, `None` if no time was taken.
        devices: The devices of the run.
    """
    shown = {"test_acc": metrics["test_acc"]} if "test_acc" in metrics else metrics
    results = [f"{name.replace('_', ' ')}: {value:.2f}" for name, value in shown.items()]
    if seconds_per_epoch is None:
        time = "trained"
    elif math.isnan(seconds_per_epoch):
        time = "no epoch trained"
    else:
        time = f"{seconds_per_epoch:.1f} sec/epoch"
    return ", ".join([*results, f"{time} on {devices}"])
