"""The command line: Lightning's own LightningCLI with this package's defaults.

    python -m lightning_mgpu fit --trainer.devices=2
    python -m lightning_mgpu fit --config model/resnet18.yaml --trainer.limit_train_batches=10
    python -m lightning_mgpu test --ckpt_path runs/NAME/checkpoints/last.ckpt

Every argument can stand in a YAML file: later `--config` files and flags win over earlier ones, and all of them over
`configs/default.yaml`. A relative `--config` that does not exist here is looked up in `configs/`.
"""

import contextlib
import importlib
import os
import shutil
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from typing_extensions import override

import lightning_mgpu.data  # noqa: F401 - so that --data=FashionMNIST finds the class by its name
from lightning_mgpu.callbacks import (
    EpochLines,
    EpochTimer,
    LearningCurve,
    PredictionGrid,
    PredictionWriter,
    RunHeader,
    run_directory,
)
from lightning_mgpu.callbacks.console import model_table, run_facts
from lightning_mgpu.callbacks.epoch_timer import devices
from lightning_mgpu.console import quieten
from lightning_mgpu.errors import SWITCH, UsageError, mistakes, one_line_errors
from lightning_mgpu.models import Classifier
from lightning_mgpu.tracking import Tracking, start_run

PACKAGE = Path(__file__).parent
CONFIGS = next(path for path in (PACKAGE / "configs", PACKAGE.parent / "configs") if path.is_dir())  # wheel, checkout
RUN_DIR = "LIGHTNING_MGPU_RUN_DIR"  # tells the processes `ddp` starts where their run is
SUBCOMMANDS = ("fit", "validate", "test", "predict")


class CLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` for any LightningModule and LightningDataModule."""

    trainer: Trainer
    model: LightningModule
    datamodule: LightningDataModule
    run_dir: Path | None = None  # none in a fast_dev_run, which leaves nothing behind

    def __init__(self, args: list[str] | None = None) -> None:
        one = {"default_config_files": [str(CONFIGS / "default.yaml")], "exit_on_error": False}
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            auto_configure_optimizers=False,  # the model's own --model.optimizer and --model.lr_scheduler
            save_config_callback=RunRecord,
            parser_kwargs={"description": __doc__, "exit_on_error": False, **dict.fromkeys(SUBCOMMANDS, one)},
            args=args,
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_dir", type=str | None, default=None, help="Where the run's files go; must be new.")
        parser.add_argument(SWITCH, action="store_true", help="Show where an error comes from.")
        parser.add_argument("--no-wandb", action="store_true", help="The same as --wandb.mode=disabled.")
        parser.add_class_arguments(Tracking, "wandb")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.save_last": True})

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        with mistakes():
            super().parse_arguments(parser, args)

    @override
    def before_instantiate_classes(self) -> None:
        """The best checkpoint is the one of highest validation accuracy, where there is one and nothing else is said.

        Validating on the test set must not choose the model: the last one is tested then, as in the book.
        """
        config = self.config[self.subcommand]
        if config.checkpoint.monitor is None and _logs_val_acc(config):
            config.checkpoint.update(Namespace(monitor="val_acc", mode="max"))

    @override
    def instantiate_classes(self) -> None:
        try:
            with mistakes():
                super().instantiate_classes()
        except UsageError:
            self.discard_empty_run_dir()
            raise

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer with this package's callbacks beside the user's, writing to the run directory."""
        config, objects = self.config[self.subcommand].trainer, self.config_init[self.subcommand].trainer
        self.timer = EpochTimer()
        callbacks = [RunHeader(), self.timer, LearningCurve(), PredictionGrid()]
        if self.subcommand == "predict":
            callbacks.append(PredictionWriter())
        has_progress_bar = any(isinstance(callback, ProgressBar) for callback in objects.callbacks or [])
        if config.enable_progress_bar is not False and not has_progress_bar:
            callbacks.append(RichProgressBar() if sys.stdout.isatty() else EpochLines())
        self.trainer_defaults["callbacks"] = callbacks
        if not config.fast_dev_run:
            self.run_dir = claim_run_dir(self.config[self.subcommand])
            kwargs["default_root_dir"] = str(self.run_dir)
            if config.logger in (None, True):
                kwargs["logger"] = CSVLogger(self.run_dir, name="", version="")
        return super().instantiate_trainer(**kwargs)

    def before_predict(self) -> None:
        if self.config.predict.ckpt_path is None:
            rank_zero_warn("predict without --ckpt_path: the weights are untrained.")

    before_test = before_validate = before_predict

    def after_fit(self) -> None:
        """Test the best checkpoint and print the book's closing line."""
        metrics: dict[str, Any] = {}
        if is_overridden("test_step", self.model) and is_overridden("test_dataloader", self.datamodule):
            checkpoint = self.trainer.checkpoint_callback
            path = isinstance(checkpoint, ModelCheckpoint) and (
                checkpoint.best_model_path or checkpoint.last_model_path
            )
            metrics = dict(self.trainer.test(self.model, self.datamodule, ckpt_path=path or None, verbose=False)[0])
        if self.trainer.is_global_zero:
            print(closing_line(metrics, self.timer.seconds_per_epoch, str(devices(self.trainer))), flush=True)

    def discard_empty_run_dir(self) -> None:
        if self.run_dir is not None:
            with contextlib.suppress(OSError):  # not empty: keep what was written
                self.run_dir.rmdir()


class RunRecord(SaveConfigCallback):
    """Saves the resolved configuration, starts W&B and records what runs, once the data are there and before training.

    Raises (through Lightning) if the run directory already holds a configuration.
    """

    @override
    def save_config(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Called in the first process only, with the configuration just saved to the run directory."""
        facts = run_facts(trainer, pl_module)
        run_dir = run_directory(trainer)
        if run_dir and any(isinstance(logger, CSVLogger) for logger in trainer.loggers):
            (run_dir / "model.txt").write_text(model_table(pl_module) + "\n")
            config = yaml.safe_load(self.parser.dump(self.config, skip_none=False))
            tracking = Tracking(**{**self.config.wandb, **({"mode": "disabled"} if self.config.no_wandb else {})})
            run, where = start_run(tracking, run_dir, stage, config)
            if run is not None:
                trainer.loggers = [*trainer.loggers, WandbLogger(experiment=run)]
                for name in ("config.yaml", "model.txt"):  # what lies in a run's directory is uploaded with it
                    shutil.copy(run_dir / name, Path(run.dir, f"resolved_{name}"))
            header = next(c for c in trainer.callbacks if isinstance(c, RunHeader))  # type: ignore[attr-defined]
            header.notes["wandb"] = where
        for logger in trainer.loggers:
            logger.log_hyperparams(facts)


def run_name(config: Namespace) -> str:
    """When, what and how, as a directory's name: `2026-11-21_09-30-00_LeNet_ddp_2`."""
    model = config.model.class_path.rpartition(".")[2]
    strategy = config.trainer.strategy
    strategy = strategy if isinstance(strategy, str) else strategy.class_path.rpartition(".")[2]
    devices = str(config.trainer.devices).replace(" ", "")
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{model}_{strategy}_{devices}"


def claim_run_dir(config: Namespace) -> Path:
    """Create the run's directory: `--run_dir`, else a new one below `--trainer.default_root_dir` or `runs`.

    Only the first process creates it; those that `ddp` starts find it in the environment.

    Raises:
        UsageError: If `--run_dir` exists and is not empty.
    """
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return Path(os.environ.get(RUN_DIR, "runs"))
    if config.run_dir is not None:
        path = Path(config.run_dir)
        if path.is_file() or (path.is_dir() and any(path.iterdir())):
            raise UsageError(f"--run_dir={path} exists and is not empty: choose a new directory, one run has one.")
        path.mkdir(parents=True, exist_ok=True)
    else:
        parent, name, number = Path(config.trainer.default_root_dir or "runs"), run_name(config), 1
        parent.mkdir(parents=True, exist_ok=True)
        path = parent / name
        while True:
            try:
                path.mkdir()
                break
            except FileExistsError:  # another run of the same second
                number += 1
                path = parent / f"{name}_{number}"
    os.environ[RUN_DIR] = str(path.absolute())
    return path


def closing_line(metrics: dict[str, Any], seconds_per_epoch: float, devices: str) -> str:
    """The line both chapters of the book end with: `test acc: 0.83, 3.1 sec/epoch on [device(type='cpu')]`."""
    shown = {"test_acc": metrics["test_acc"]} if "test_acc" in metrics else metrics
    results = [f"{name.replace('_', ' ')}: {value:.2f}" for name, value in shown.items()]
    return ", ".join([*results, f"{seconds_per_epoch:.1f} sec/epoch on {devices}"])


def with_shipped_configs(args: list[str]) -> list[str]:
    """The arguments with every `--config` that names no file here, but one in `configs/`, replaced by that path."""

    def find(name: str) -> str:
        return str(CONFIGS / name) if not Path(name).exists() and (CONFIGS / name).is_file() else name

    found = list(args)
    for i, arg in enumerate(args):
        if arg in ("--config", "-c") and i + 1 < len(args):
            found[i + 1] = find(args[i + 1])
        elif arg.startswith("--config="):
            found[i] = "--config=" + find(arg.removeprefix("--config="))
    return found


def main() -> None:
    """Entry point of `python -m lightning_mgpu` and `lightning-mgpu`."""
    quieten()
    sys.argv[1:] = with_shipped_configs(sys.argv[1:]) or ["--help"]
    with one_line_errors(SWITCH in sys.argv):
        CLI()


def _logs_val_acc(config: Namespace) -> bool:
    module, _, name = config.model.class_path.rpartition(".")
    model = getattr(importlib.import_module(module), name)
    on_test_set = config.data.get("init_args", Namespace()).get("val_size") == 0
    return issubclass(model, Classifier) and not on_test_set and config.trainer.limit_val_batches != 0
