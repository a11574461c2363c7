"""The command line: Lightning's own LightningCLI with this package's defaults.

    python -m lightning_mgpu fit --trainer.devices=2
    python -m lightning_mgpu fit --config model/resnet18.yaml --trainer.limit_train_batches=10
    python -m lightning_mgpu test --ckpt_path runs/NAME/checkpoints/last.ckpt
    python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml
    python -m lightning_mgpu benchmark --quick

Every argument can stand in a YAML file: later `--config` files and flags win over earlier ones, and all of them over
`configs/default.yaml`. A relative `--config` that does not exist here is looked up in `configs/`.
"""

import importlib
import shutil
import signal
import sys
from argparse import ArgumentError, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from jsonargparse import DefaultHelpFormatter, Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ProgressBar, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from typing_extensions import override

import lightning_mgpu.data
import lightning_mgpu.strategies  # noqa: F401 - registers --trainer.strategy=manual_allreduce
from lightning_mgpu import __version__
from lightning_mgpu.arguments import CONFIGS, with_shipped_configs, with_strategy_class
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
from lightning_mgpu.checks import check_checkpoint, check_devices, check_shares, find_strategy
from lightning_mgpu.console import quieten
from lightning_mgpu.errors import SWITCH, UsageError, is_mistake, mistakes, one_line_errors
from lightning_mgpu.explain import TOOLS, explain, parameters
from lightning_mgpu.malloc import keep_freed_memory
from lightning_mgpu.models import Classifier
from lightning_mgpu.run_dir import RunDir
from lightning_mgpu.tracking import Tracking, start_run

PROG = "python -m lightning_mgpu"
BLANK_LINE = "\n\n"
MALLOC_HELP = "keep: glibc keeps freed memory instead of giving it back after every step; faster on CPUs."
SUBCOMMANDS = ("fit", "validate", "test", "predict")


class HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the examples' lines."""


class CLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` for any LightningModule and LightningDataModule."""

    trainer: Trainer
    model: LightningModule
    datamodule: LightningDataModule
    run_dir: RunDir | None = None  # none in a fast_dev_run, which leaves nothing behind

    def __init__(self, args: list[str] | None = None) -> None:
        self.given = list(sys.argv[1:] if args is None else args)
        shared = {"exit_on_error": False, "formatter_class": HelpFormatter}
        one = {**shared, "default_config_files": [str(CONFIGS / "default.yaml")]}
        try:
            super().__init__(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,  # the model's own --model.optimizer and --model.lr_scheduler
                save_config_callback=RunRecord,
                parser_kwargs={
                    "prog": PROG,
                    "description": f"Train on several devices.\n\n{(__doc__ or '').partition(BLANK_LINE)[2]}",
                    "version": __version__,
                    **shared,
                    **{name: {**one, "usage": f"{PROG} {name} [--config FILE] [options]"} for name in SUBCOMMANDS},
                },
                args=args,
            )
        except Exception as error:
            if self.run_dir is not None and is_mistake(error):
                self.run_dir.discard()
            raise

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_dir", type=str | None, default=None, help="Where the run's files go; must be new.")
        parser.add_argument(SWITCH, action="store_true", help="Show where an error comes from.")
        parser.add_argument("--malloc", type=Literal["default", "keep"], default="default", help=MALLOC_HELP)
        parser.add_argument("--no-wandb", action="store_true", help="The same as --wandb.mode=disabled.")
        parser.add_class_arguments(Tracking, "wandb")
        parser.add_lightning_class_args(ModelCheckpoint, "checkpoint")
        parser.set_defaults({"checkpoint.save_last": True})

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            raise UsageError(explain(str(error), self.options())) from error
        config = self.config[self.config.subcommand]
        asked = config.model.class_path if any(arg.startswith("--model=") for arg in self.given) else None
        check_checkpoint(config.ckpt_path, asked)

    @override
    def _parse_ckpt_path(self) -> None:
        """A model built in Python, not by this class, left no class path to parse: the one asked for is taken."""
        path = self.config[self.config.subcommand].ckpt_path
        if path and Path(path).is_file():
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
            if "_class_path" not in checkpoint.get("hyper_parameters", {}):
                return
        super()._parse_ckpt_path()

    def options(self) -> list[str]:
        """The names of all options, for 'did you mean': also those of the default model, its optimizer and the data."""
        names = {
            name.lstrip("-") for parser in self._subcommand_parsers.values() for name in parser._option_string_actions
        }
        for key, class_path in (
            ("model", "lightning_mgpu.models.LeNet"),
            ("model.optimizer", "torch.optim.SGD"),
            ("data", "lightning_mgpu.data.FashionMNIST"),
        ):
            names.update(f"{key}.{name}" for name in parameters(class_path))
        return sorted(names)

    @override
    def before_instantiate_classes(self) -> None:
        """The best checkpoint is the one of highest validation accuracy, where there is one and nothing else is said.

        Validating on the test set must not choose the model: the last one is tested then, as in the book.
        """
        config = self.config[self.subcommand]
        if config.malloc == "keep":
            keep_freed_memory()
        if config.checkpoint.monitor is None and _logs_val_acc(config):
            config.checkpoint.update(Namespace(monitor="val_acc", mode="max"))
        if config.trainer.fast_dev_run:
            config.checkpoint.save_last = False  # Lightning 2.6 would save it all the same

    @override
    def instantiate_classes(self) -> None:
        with mistakes():
            super().instantiate_classes()
        check_shares(self.trainer, self.datamodule)

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer with this package's callbacks beside the user's, writing to the run directory."""
        config, objects = self.config[self.subcommand].trainer, self.config_init[self.subcommand].trainer
        check_devices(config)
        if isinstance(config.strategy, str) and not isinstance(found := find_strategy(config.strategy), str):
            kwargs["strategy"] = found()
        self.timer = EpochTimer()
        callbacks = [RunHeader(), self.timer, LearningCurve(), PredictionGrid()]
        if self.subcommand == "predict":
            callbacks.append(PredictionWriter())
        has_progress_bar = any(isinstance(callback, ProgressBar) for callback in objects.callbacks or [])
        if config.enable_progress_bar is not False and not has_progress_bar:
            callbacks.append(RichProgressBar() if sys.stdout.isatty() else EpochLines())
        self.trainer_defaults["callbacks"] = callbacks
        if config.fast_dev_run:
            kwargs["logger"] = False
        else:
            self.run_dir = RunDir(self.config[self.subcommand])
            kwargs["default_root_dir"] = str(self.run_dir.path)
            if config.logger in (None, True):
                kwargs["logger"] = CSVLogger(self.run_dir.path, name="", version="")
        return super().instantiate_trainer(**kwargs)

    def before_predict(self) -> None:
        if self.config[self.subcommand].ckpt_path is None:
            rank_zero_warn(f"{self.subcommand} without --ckpt_path: the weights are untrained.")

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


def closing_line(metrics: dict[str, Any], seconds_per_epoch: float, devices: str) -> str:
    """The line both chapters of the book end with: `test acc: 0.83, 3.1 sec/epoch on [device(type='cpu')]`."""
    shown = {"test_acc": metrics["test_acc"]} if "test_acc" in metrics else metrics
    results = [f"{name.replace('_', ' ')}: {value:.2f}" for name, value in shown.items()]
    return ", ".join([*results, f"{seconds_per_epoch:.1f} sec/epoch on {devices}"])


def main() -> None:
    """Entry point of `python -m lightning_mgpu` and `lightning-mgpu`."""
    quieten()
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the first one ends the others
    with one_line_errors(SWITCH in sys.argv):
        if sys.argv[1:2] == ["benchmark"]:
            from lightning_mgpu.benchmark.cli import main as benchmark  # needs matplotlib, and more

            benchmark([argument for argument in sys.argv[2:] if argument != SWITCH])
            return
        if sys.argv[1:2] == ["sweep"]:
            from lightning_mgpu.sweep.cli import main as sweep

            sweep([argument for argument in sys.argv[2:] if argument != SWITCH])
            return
        sys.argv[1:] = with_strategy_class(with_shipped_configs(sys.argv[1:])) or ["--help"]
        if sys.argv[1] not in (*SUBCOMMANDS, "-h", "--help", "--version", "--config", "-c") and sys.argv[1][:1] == "-":
            raise UsageError(f"{sys.argv[1]}: name a subcommand first, one of {', '.join((*SUBCOMMANDS, *TOOLS))}")
        CLI()


def _logs_val_acc(config: Namespace) -> bool:
    module, _, name = config.model.class_path.rpartition(".")
    model = getattr(importlib.import_module(module), name)
    on_test_set = config.data.get("init_args", Namespace()).get("val_size") == 0
    return issubclass(model, Classifier) and not on_test_set and config.trainer.limit_val_batches != 0
