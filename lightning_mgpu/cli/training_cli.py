"""The LightningCLI: `fit`, `validate`, `test` and `predict` for any LightningModule and DataModule.

Every argument can stand in a YAML file: later `--config` files and flags win over earlier ones, and
all over `configs/default.yaml`. A relative `--config` that is not here is looked up in `configs/`.
"""

import os
import shlex
from argparse import ArgumentError
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

import lightning_mgpu.data
import lightning_mgpu.models  # --model=ResNet18 is found among the classes that are imported
import lightning_mgpu.strategies  # noqa: F401 - registers --trainer.strategy=manual_allreduce
from lightning_mgpu import callbacks as ours
from lightning_mgpu.cli.arguments import given_options
from lightning_mgpu.cli.checks import (
    check_devices,
    check_processes,
    check_same,
    check_secrets,
    check_strategy,
    take_launchers_numbers,
)
from lightning_mgpu.cli.error_messages import SWITCH, UsageError, explain, mistakes
from lightning_mgpu.cli.help import OPTIONS, PROG, RUNS
from lightning_mgpu.cli.parser import Parser, restorable
from lightning_mgpu.devices import devices, is_sharded
from lightning_mgpu.malloc import keep_freed_memory
from lightning_mgpu.runs.best_checkpoint import RunCheckpoint
from lightning_mgpu.runs.checkpoint_file import SECTIONS
from lightning_mgpu.runs.checkpoints import LastCheckpoint
from lightning_mgpu.runs.directory import RUN_DIR, new_run_dir
from lightning_mgpu.runs.record import RunRecord, closing_line, fingerprint
from lightning_mgpu.runs.resume import FLAG, check_can_go_on, choose_checkpoint
from lightning_mgpu.runs.wandb_run import Tracking
from lightning_mgpu.seeds import draw_seed

MALLOC_HELP = "keep: glibc keeps freed memory; faster on CPUs."


class CLI(LightningCLI):
    """Lightning's command line, with our callbacks, one directory a run, and short errors."""

    trainer: Trainer
    model: LightningModule
    datamodule: LightningDataModule

    def __init__(self, args: list[str], resumed: Path | None, before: dict[str, Any]) -> None:
        self.args = args
        self.resumed = resumed  # the run directory to go on in
        self.before = before  # what must stay as it is in that run, or of the model in --ckpt_path
        shared = {"exit_on_error": False, "allow_abbrev": False}
        usage = {name: {**shared, "usage": f"{PROG} {name} [options]"} for name in RUNS}
        with ExitStack() as self.opened:
            super().__init__(
                LightningModule,
                LightningDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                auto_configure_optimizers=False,  # --model.optimizer and --model.lr_scheduler do
                save_config_callback=None,  # RunRecord's is it
                parser_kwargs={**shared, **usage},
                parser_class=Parser,
            )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Where the run's files go; must be new.",
        )
        parser.add_argument(SWITCH, action="store_true", help="Show where an error comes from.")
        parser.add_argument(
            "--malloc", type=Literal["default", "keep"], default="default", help=MALLOC_HELP
        )
        parser.add_argument(
            "--no-wandb", action="store_true", help="The same as --wandb.mode=disabled."
        )
        parser.add_class_arguments(Tracking, "wandb")
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.add_lightning_class_args(ours.FastModel, "fast")

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(self.args)
        except ArgumentError as error:
            options = [
                *self._parser(self.args[0])._option_string_actions,
                *(name.split()[0] for name in OPTIONS),
            ]
            raise UsageError(explain(str(error), given_options(self.args[1:]), options)) from error

    @override
    def _set_seed(self) -> None:
        config = self.config[self.subcommand]
        if isinstance(config.seed_everything, bool):  # then config.yaml says which it is
            config.seed_everything = draw_seed()
        super()._set_seed()

    @override
    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning lets a checkpoint's hyperparameters win in silence (arguments.py)."""

    @override
    def before_instantiate_classes(self) -> None:
        config = self.config[self.subcommand]
        if config.weights_only is False:
            raise UsageError("--weights_only=False: a checkpoint runs no code; leave this out")
        config.weights_only = True
        if config.no_wandb:  # config.yaml has the mode, which another one may replace
            config.no_wandb, config.wandb.mode = False, "disabled"
        given = given_options(self.args[1:])
        take_launchers_numbers(config.trainer, given)
        self._dump_config()
        self.config_dump = restorable(self.config_dump, config, given)
        check_secrets(config)
        check_devices(config.trainer)
        check_same(self.config_dump, self.before, self.resumed or config.ckpt_path)
        if self.resumed is not None:
            config.ckpt_path = (
                choose_checkpoint(self.resumed, config.trainer.max_epochs) or config.ckpt_path
            )
        if config.malloc == "keep":
            keep_freed_memory()
        self.run_dir = self.resumed or new_run_dir(config)
        os.environ[RUN_DIR] = str(self.run_dir.absolute())
        for logger in as_list(config.trainer.logger):
            if isinstance(logger, Namespace) and logger.get("init_args.save_dir") == "":
                logger.init_args.save_dir = str(self.run_dir)

    @override
    def instantiate_classes(self) -> None:
        with mistakes():
            super().instantiate_classes()

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer with our callbacks and loggers beside the user's, in the run directory."""
        config = self.config_init[self.subcommand]
        kwargs["logger"] = [
            each for each in as_list(config.trainer.logger) if isinstance(each, Logger)
        ]
        kwargs["default_root_dir"] = str(self.run_dir)
        self.trainer_defaults["callbacks"] = self._callbacks(
            config, has_logger=config.trainer.logger is not False
        )
        with mistakes(TypeError):
            trainer = super().instantiate_trainer(**kwargs)
        check_processes(trainer)
        check_strategy(trainer.strategy)
        self.best = config.checkpoint
        saved = {key: self.config_dump.get(key) for key in SECTIONS}
        self.last = LastCheckpoint(self.best, config.seed_everything, saved)
        trainer.callbacks.insert(0, self.last)  # type: ignore[attr-defined]
        return trainer

    def _callbacks(self, config: Namespace, has_logger: bool) -> list[Any]:
        header, self.timer = ours.RunHeader(), ours.EpochTimer()
        if config.ckpt_path or self.resumed:
            header.notes["ckpt"] = (
                config.ckpt_path or "none: no epoch was over, training begins anew"
            )
        added = [
            header,
            self.timer,
            ours.LearningCurve(),
            ours.TestPictures(),
            ours.IgnoredWeight(),
        ]
        if not config.trainer.fast_dev_run:  # which leaves nothing behind
            saved = {**self.config_dump, "run_dir": None}  # whoever repeats the run has another
            tracking = config.wandb if has_logger else None
            added.append(RunRecord(self.run_dir, saved, header, tracking, self.opened))
            if self.subcommand == "fit" and has_logger:
                added.append(ours.LearningRates())
        if self.subcommand == "predict":
            added.append(ours.PredictionWriter())
        has_bar = any(
            isinstance(callback, ProgressBar) for callback in as_list(config.trainer.callbacks)
        )
        if config.trainer.enable_progress_bar is not False and not has_bar:
            added.append(ours.EpochLines())
        return added

    def before_predict(self) -> None:
        if self.config_init[self.subcommand].ckpt_path is None:
            rank_zero_warn(f"{self.subcommand} without --ckpt_path: the weights are untrained.")

    before_test = before_validate = before_predict

    def fit(self, **kwargs: Any) -> None:
        check_can_go_on(self.trainer.strategy, kwargs.get("ckpt_path"))
        try:
            self.trainer.fit(**kwargs)
        except SystemExit:  # what Lightning makes of Ctrl-C, and of SIGTERM
            if self.trainer.is_global_zero:
                print(
                    f"stopped; go on with: {PROG} fit {FLAG}={shlex.quote(str(self.run_dir))}",
                    flush=True,
                )
            raise

    def after_fit(self) -> None:
        """Test the best checkpoint; print the weights' fingerprint and the book's closing line."""
        if ours.is_search(self.trainer.callbacks):  # type: ignore[attr-defined]
            return
        is_first, best = self.trainer.is_global_zero, self.best.best
        if is_first and self.last.why_stopped:
            print(f"stopped early: {self.last.why_stopped}", flush=True)
        sharded = is_sharded(self.trainer)
        trained = "none, as parameters are sharded"
        if not sharded:
            trained = fingerprint(self.model.parameters())
        seconds = self.timer.seconds_per_epoch
        for logger in self.trainer.loggers:
            if isinstance(logger, WandbLogger) and is_first:
                logger.experiment.summary["fingerprint"] = trained
        broken = [
            f"{name} is {value.item()}"
            for name, value in self.trainer.callback_metrics.items()
            if "loss" in name and not value.isfinite()
        ]
        metrics: dict[str, Any] = {}
        has_test = is_overridden("test_step", self.model)
        has_test = has_test and is_overridden("test_dataloader", self.datamodule)
        if has_test and sharded:  # FSDP would split the module's shards once more
            path = shlex.quote(best or self.best.last_model_path or "FILE")
            if is_first:
                told = "not tested, as parameters are sharded; test with"
                print(f"{told}: {PROG} test --ckpt_path={path}")
        elif has_test:
            if is_first:
                print(f"testing {self.best.in_words()}", flush=True)
            tested = self.trainer.test(
                self.model, self.datamodule, ckpt_path=best, verbose=False, weights_only=True
            )
            # nothing with `--trainer.limit_test_batches=0`
            metrics = dict(tested[0]) if tested else {}
        if is_first:
            print(f"fingerprint: {trained}")
            if broken:
                print(f"warning: {', '.join(broken)}: the training has diverged, see metrics.csv")
            print(closing_line(metrics, seconds, str(devices(self.trainer))), flush=True)


def as_list(given: Any) -> list[Any]:
    """Of one callback or logger, of several, of none."""
    return given if isinstance(given, list) else [given]
