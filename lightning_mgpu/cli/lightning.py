"""The LightningCLI: `fit`, `validate`, `test` and `predict` for any LightningModule and LightningDataModule.

Every argument can stand in a YAML file: later `--config` files and flags win over earlier ones, and all of them over
`configs/default.yaml`. A relative `--config` that does not exist here is looked up in `configs/`.
"""

import os
import sys
from argparse import SUPPRESS, ArgumentError, RawDescriptionHelpFormatter
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import DefaultHelpFormatter, Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from typing_extensions import override

import lightning_mgpu.data
import lightning_mgpu.models  # --model=ResNet18 is found among the classes that are imported
import lightning_mgpu.strategies  # noqa: F401 - registers --trainer.strategy=manual_allreduce
from lightning_mgpu.callbacks import (
    ConfusionMatrix,
    EpochLines,
    EpochTimer,
    FastModel,
    LearningCurve,
    LossBar,
    PredictionGrid,
    PredictionWriter,
    RunHeader,
    is_search,
)
from lightning_mgpu.callbacks.malloc import keep_freed_memory
from lightning_mgpu.cli.arguments import given_options
from lightning_mgpu.cli.checks import check_devices, check_dirpath, check_secrets, find_strategy
from lightning_mgpu.cli.errors import SWITCH, UsageError, is_mistake, mistakes
from lightning_mgpu.cli.parser import Parser
from lightning_mgpu.cli.subcommands import RUNS
from lightning_mgpu.cli.suggest import explain
from lightning_mgpu.runs import resume
from lightning_mgpu.runs.best_checkpoint import RunCheckpoint
from lightning_mgpu.runs.checkpoint_file import SECTIONS, read_checkpoint, saved_config
from lightning_mgpu.runs.closing_line import closing_line, fingerprint
from lightning_mgpu.runs.csv_logger import RunCSVLogger
from lightning_mgpu.runs.devices import devices
from lightning_mgpu.runs.directory import claim, discard, expand_home, make_run_dir
from lightning_mgpu.runs.flatten import flatten
from lightning_mgpu.runs.global_batch import GlobalBatchCheck
from lightning_mgpu.runs.last_checkpoint import LastCheckpoint
from lightning_mgpu.runs.launchers import follow_launcher
from lightning_mgpu.runs.record import RunRecord
from lightning_mgpu.runs.redact import redact_values
from lightning_mgpu.runs.scale import check_scale, scaled_by_devices
from lightning_mgpu.runs.wandb_run import Tracking, finish, upload_model
from lightning_mgpu.runs.watch import Watch

PROG = "python -m lightning_mgpu"
RESUME_HELP = "Go on with this run in its directory, as if it had never stopped; last: the newest in runs/."
MALLOC_HELP = "keep: glibc keeps freed memory instead of giving it back after every step; faster on CPUs."
SCALE_HELP = "Multiply global batch and learning rate by the number of devices."


class HelpFormatter(DefaultHelpFormatter, RawDescriptionHelpFormatter):
    """Keeps the lines of descriptions."""


class CLI(LightningCLI):
    """Lightning's command line, with this package's callbacks, one directory a run, and errors of a few lines."""

    trainer: Trainer
    model: LightningModule
    datamodule: LightningDataModule
    run_dir: Path | None = None  # none in a fast_dev_run, which leaves nothing behind
    resumed: Path | None = None  # the run directory of --resume
    ckpt_path: str | None = None  # what training or evaluation starts from
    changes: list[str] = []  # what flags change of the resumed run, or of the checkpoint's  # noqa: RUF012
    lock: int | None = None  # on the run directory, while this runs

    def __init__(self, args: list[str]) -> None:
        self.args = args
        self.made: list[Path] = []  # directories, for this run
        shared = {"exit_on_error": False, "allow_abbrev": False, "formatter_class": HelpFormatter}
        try:
            super().__init__(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,  # the model's own --model.optimizer and --model.lr_scheduler
                save_config_callback=RunRecord,
                save_config_kwargs={"save_to_log_dir": False},  # RunRecord leaves secrets out
                parser_kwargs={
                    "prog": PROG,
                    **shared,
                    **{name: {**shared, "usage": f"{PROG} {name} [options]"} for name in RUNS},
                },
                parser_class=Parser,
            )
        except Exception as error:
            if self.run_dir is not None and self.resumed is None and is_mistake(error):
                discard(self.run_dir, self.made)
            raise
        finally:
            if self.lock is not None:
                os.close(self.lock)

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_dir", type=str | None, default=None, help="Where the run's files go; must be new.")
        parser.add_argument(SWITCH, action="store_true", help="Show where an error comes from.")
        parser.add_argument("--malloc", type=Literal["default", "keep"], default="default", help=MALLOC_HELP)
        parser.add_argument("--no-wandb", action="store_true", help="The same as --wandb.mode=disabled.")
        parser.add_argument("--scale_by_devices", type=bool, default=False, help=SCALE_HELP)
        parser.add_class_arguments(Tracking, "wandb")
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.add_lightning_class_args(FastModel, "fast")

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        if subcommand == "fit":
            parser.add_argument("--resume", type=str, default=SUPPRESS, help=RESUME_HELP)
        return parser

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        subcommand, others = self.args[0], self.args[1:]
        try:
            self.config = parser.parse_args(self.args)
        except ArgumentError as error:
            options = [name.lstrip("-") for name in self._parser(subcommand)._option_string_actions]
            told = explain(str(error), given_options(subcommand, others), options)
            raise UsageError(told) from error
        config = self.config[self.config.subcommand]
        expand_home(config)
        check_secrets(config)
        if "weights_only" in config:
            config.weights_only = True  # a checkpoint runs no code
        if config.get("resume"):
            self._resume(Path(config.resume), config)
        elif config.ckpt_path:
            self.ckpt_path = config.ckpt_path
            if Path(config.ckpt_path).is_file():
                self._compare(config)

    def _resume(self, run_dir: Path, config: Namespace) -> None:
        """Find the checkpoint to go on from; the configuration is that of the run, `--resume` no part of it."""
        del config["resume"]
        parser = self._parser("fit")
        saved = parser.parse_path(str(run_dir / "config.yaml"))  # with the defaults of options that came after it
        expand_home(saved)
        self.changes = resume.changes(run_dir, as_saved(parser, saved), as_saved(parser, config))
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            self.lock = claim(run_dir)
        path = resume.choose_checkpoint(run_dir, config.checkpoint.dirpath, config.trainer.max_epochs)
        self.ckpt_path = str(path) if path else config.ckpt_path
        self.resumed = run_dir

    def _compare(self, config: Namespace) -> None:
        """Note what flags change of a checkpoint's data.

        Raises:
            UsageError: If a flag changes the model that trains on, whose optimizer the checkpoint would win over.
        """
        before = flatten(saved_config(read_checkpoint(config.ckpt_path)))
        after = flatten({name: as_saved(self._parser(self.config.subcommand), config).get(name) for name in SECTIONS})
        for key in [key for key, value in after.items() if key in before and before[key] != value]:
            change = f"{key} {resume.shown(before[key])} -> {resume.shown(after[key])}"
            if key.startswith("model") and self.config.subcommand == "fit":
                raise UsageError(
                    f"{change} disagrees with --ckpt_path={config.ckpt_path}, whose optimizer goes on as it was: leave "
                    f"--{key} out"
                )
            self.changes = [*self.changes, change]

    @override
    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would let the checkpoint's hyperparameters win in silence (see arguments.py)."""

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        follow_launcher(config.trainer)
        check_devices(config.trainer)
        if config.malloc == "keep":
            keep_freed_memory()
        if config.trainer.fast_dev_run:
            return
        if self.subcommand == "fit" and self.resumed is None:
            check_dirpath(config.checkpoint)
        if self.resumed is None:
            self.run_dir, self.made = make_run_dir(config)
            if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
                self.lock = claim(self.run_dir)
        else:
            self.run_dir = self.resumed
        given = config.trainer.logger
        for logger in given if isinstance(given, list) else [given]:
            if isinstance(logger, Namespace) and logger.get("init_args.save_dir") == "":
                logger.init_args.save_dir = str(self.run_dir)

    @override
    def instantiate_classes(self) -> None:
        self._dump_config()  # for checkpoints, which hold what was given
        with mistakes(), scaled_by_devices(self.config[self.subcommand]) as self.scaled:
            super().instantiate_classes()

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer with this package's callbacks and loggers beside the user's, writing to the run directory."""
        config = self.config[self.subcommand].trainer
        if isinstance(config.strategy, str) and not isinstance(found := find_strategy(config.strategy), str):
            kwargs["strategy"] = found()
        self.header = RunHeader(self.scaled)
        if self.ckpt_path:
            self.header.notes["ckpt"] = "; ".join([str(self.ckpt_path), *self.changes])
        elif self.resumed:
            self.header.notes["ckpt"] = "none: no epoch was over, training begins anew"
        given = self.config_init[self.subcommand].trainer.logger
        if self.run_dir is None:
            kwargs["logger"] = False
        else:
            kwargs["default_root_dir"] = str(self.run_dir)
            theirs = [each for each in (given if isinstance(given, list) else [given]) if isinstance(each, Logger)]
            kwargs["logger"] = False if given is False else [RunCSVLogger(self.run_dir), *theirs]
        self.trainer_defaults["callbacks"] = self._callbacks(bool(kwargs["logger"]))
        with mistakes(TypeError):
            trainer = super().instantiate_trainer(**kwargs)
        self.best = next(c for c in trainer.callbacks if isinstance(c, RunCheckpoint))  # type: ignore[attr-defined]
        k = self.scaled.get("scaled_by", 1)
        saved = {"config": redact_values({key: self.config_dump.get(key) for key in SECTIONS}), "scaled_by": k}
        last = LastCheckpoint(self.best, self.config[self.subcommand].seed_everything, saved)
        trainer.callbacks.insert(0, last)  # type: ignore[attr-defined]
        if self.subcommand == "fit" and self.ckpt_path and Path(self.ckpt_path).is_file():
            check_scale(self.ckpt_path, k)
        return trainer

    def _callbacks(self, has_logger: bool) -> list[Any]:
        config, objects = self.config[self.subcommand], self.config_init[self.subcommand].trainer.callbacks
        self.timer = EpochTimer()
        callbacks = [self.header, self.timer, LearningCurve(), PredictionGrid(), ConfusionMatrix(), GlobalBatchCheck()]
        if self.subcommand == "predict":
            callbacks.append(PredictionWriter())
        if self.subcommand == "fit" and has_logger:
            callbacks.append(LearningRateMonitor())
        if config.wandb.watch:
            callbacks.append(Watch(config.wandb.watch, config.wandb.watch_freq))
        given = objects if isinstance(objects, list) else [objects]
        if config.trainer.enable_progress_bar is not False and not any(isinstance(c, ProgressBar) for c in given):
            callbacks.append(LossBar() if sys.stdout.isatty() else EpochLines())
        return callbacks

    @override
    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        return {**super()._prepare_subcommand_kwargs(subcommand), "ckpt_path": self.ckpt_path}

    @override
    def _run_subcommand(self, subcommand: str) -> None:
        try:
            super()._run_subcommand(subcommand)
        finally:
            if run := self._wandb():
                finish(run)

    def _wandb(self) -> Any:
        """The run of W&B, in the first process; none where there is none."""
        logger = next((logger for logger in self.trainer.loggers if isinstance(logger, WandbLogger)), None)
        return logger.experiment if logger is not None and self.trainer.is_global_zero else None

    def before_predict(self) -> None:
        if self.ckpt_path is None:
            rank_zero_warn(f"{self.subcommand} without --ckpt_path: the weights are untrained.")

    before_test = before_validate = before_predict

    def fit(self, **kwargs: Any) -> None:
        try:
            self.trainer.fit(**kwargs)
        except SystemExit:  # what Lightning makes of Ctrl-C, and of SIGTERM
            if self.trainer.is_global_zero and self.run_dir:
                print(f"stopped; go on with: {resume.how_to_resume(self.run_dir)}", flush=True)
            raise

    def after_fit(self) -> None:
        """Test the best checkpoint, and print the fingerprint of the trained weights and the book's closing line."""
        if is_search(self.trainer.callbacks):  # type: ignore[attr-defined]
            return
        trained = fingerprint(self.model.parameters())
        seconds = self.timer.seconds_per_epoch
        best, run = self.best.best, self._wandb()
        tracking = self.config_init[self.subcommand].wandb
        if run is not None:
            run.summary["fingerprint"] = trained
            if tracking.log_model and not run.offline and (path := best or self.best.last_model_path):
                upload_model(run, path, {"monitor": self.best.monitor if best else None}, tracking.finish_timeout)
        metrics: dict[str, Any] = {}
        if is_overridden("test_step", self.model) and is_overridden("test_dataloader", self.datamodule):
            if best is None and self.trainer.is_global_zero:
                print("testing the last epoch: no metric says which one is the best", flush=True)
            tested = self.trainer.test(self.model, self.datamodule, ckpt_path=best, verbose=False, weights_only=True)
            metrics = dict(tested[0]) if tested else {}  # nothing with `--trainer.limit_test_batches=0`
        if self.trainer.is_global_zero:
            print(f"fingerprint: {trained}")
            print(closing_line(metrics, seconds, str(devices(self.trainer))), flush=True)


def as_saved(parser: LightningArgumentParser, config: Namespace) -> dict[str, Any]:
    """A configuration as `config.yaml` has it: plain values, secrets left out."""
    return redact_values(yaml.safe_load(parser.dump(config, skip_unset=False)))
