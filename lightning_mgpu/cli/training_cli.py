"""Lightning's LightningCLI, in two steps: made, it has parsed the options; `build` makes objects.

Every option can stand in a YAML file: later `--config` files and flags win over earlier ones, and
all over `configs/default.yaml`. A relative `--config` that is not here is looked up in `configs/`.
"""

from argparse import ArgumentError
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from typing_extensions import override

import lightning_mgpu.data
import lightning_mgpu.models  # --model=ResNet18 is found among the classes that are imported
import lightning_mgpu.strategies  # noqa: F401 - registers --trainer.strategy=manual_allreduce
from lightning_mgpu import callbacks
from lightning_mgpu.cli.checks import check_trainer, resolve_options
from lightning_mgpu.cli.error_messages import TRACEBACK_FLAG, constructor_errors, explain
from lightning_mgpu.cli.help import OPTIONS
from lightning_mgpu.cli.options import Options
from lightning_mgpu.cli.parser import Parser, restorable
from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import to_yaml
from lightning_mgpu.project import command
from lightning_mgpu.runs.best_checkpoint import RunCheckpoint
from lightning_mgpu.runs.wandb_run import WandbOptions
from lightning_mgpu.seeds import draw_seed

MALLOC_HELP = "keep: glibc keeps freed memory; faster on CPUs."
# Callbacks that every run has, by their option: `--curve.max_panels=2` sets an argument,
# `--curve=my_package.MyCurve` takes another class, `--curve=false` leaves it out.
CALLBACKS: dict[str, type[Callback]] = {
    "header": callbacks.RunHeader,
    "timer": callbacks.EpochTimer,
    "lines": callbacks.EpochLines,
    "curve": callbacks.LearningCurve,
    "learning_rates": callbacks.LearningRates,
    "pictures": callbacks.TestPictures,
    "predictions": callbacks.PredictionWriter,
}


class TrainingCLI(LightningCLI):
    """The options of `fit`, `validate`, `test` or `predict`, and what is built from them.

    Attributes:
        config: The options, parsed; what is changed in it before `build` counts.
        saved_config: The same as plain values, from which `--config` makes the same run again.
        model, datamodule, trainer: Set by `build`.
        run_checkpoint: The checkpoint of the best epoch; set by `build`.
        callbacks: The callbacks of `CALLBACKS`, by option; False where left out; set by `build`.
    """

    trainer: Trainer
    model: LightningModule
    datamodule: LightningDataModule
    run_checkpoint: RunCheckpoint
    callbacks: dict[str, Any]

    def __init__(self, subcommand: str, options: Options) -> None:
        """Parse.

        Raises:
            UsageError: If an option is unknown, its value is of a wrong type, or has no text.
        """
        self.method = subcommand  # of the Trainer
        self.options = options
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            run=False,
            auto_configure_optimizers=False,  # --model.optimizer and --model.lr_scheduler do
            save_config_callback=None,  # RunRecord writes config.yaml
            parser_class=Parser,
            parser_kwargs={
                "exit_on_error": False,
                "allow_abbrev": False,
                "usage": f"{command()} {subcommand} [options]",
            },
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument(
            "--run_dir",
            type=str | None,
            default=None,
            help="Where the run's files go; must be new.",
        )
        parser.add_argument(TRACEBACK_FLAG, action="store_true", help="Show where an error is.")
        parser.add_argument(
            "--malloc", type=Literal["default", "keep"], default="default", help=MALLOC_HELP
        )
        parser.add_argument(
            "--no-wandb", action="store_true", help="The same as --wandb.mode=disabled."
        )
        parser.add_class_arguments(WandbOptions, "wandb")
        parser.add_lightning_class_args(RunCheckpoint, "checkpoint")
        parser.add_lightning_class_args(callbacks.FastModel, "fast")
        for name, callback in CALLBACKS.items():
            parser.add_argument(
                f"--{name}",
                type=callback | Literal[False] | None,
                default={"class_path": f"{callback.__module__}.{callback.__qualname__}"},
                help=f"{(callback.__doc__ or '').splitlines()[0]} false: without it.",
            )
        skip = self.subcommands()[self.method]  # model and data
        self.method_options = parser.add_method_arguments(Trainer, self.method, skip=set(skip))

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        # A first --config, not an object: jsonargparse would check that alone, and refuse a class
        # whose required arguments come from the command line.
        base = f"--config={to_yaml(self.options.base_config, in_a_line=True)}"
        try:
            self.config = parser.parse_args([base, *self.options.args])
        except ArgumentError as error:
            known = [*parser._option_string_actions, *(name.split()[0] for name in OPTIONS)]
            raise UsageError(explain(str(error), self.options.given, known)) from error
        if isinstance(self.config.seed_everything, bool):  # so that config.yaml says which it is
            self.config.seed_everything = draw_seed()
        resolve_options(self.config, self.options.given)
        dumped = yaml.safe_load(parser.dump(self.config, skip_unset=False, format="yaml"))
        self.saved_config: dict[str, Any] = restorable(dumped, self.config, self.options.given)
        self.config_dump = self.saved_config  # LightningCLI takes the hyperparameters from it

    @override
    def instantiate_classes(self) -> None:
        """Nothing: LightningCLI calls it when the options are parsed; `build` comes later."""

    def build(self, run_dir: Path) -> None:
        """Make the model, the data, the callbacks and the Trainer, whose files go to `run_dir`.

        Raises:
            UsageError: If a constructor refuses an argument, or the Trainer cannot work.
        """
        for logger in as_list(self.config.trainer.logger):
            if isinstance(logger, Namespace) and logger.get("init_args.save_dir") == "":
                logger.init_args.save_dir = str(run_dir)
        with constructor_errors():
            objects = self.parser.instantiate(self.config)
        self.model, self.datamodule = objects.model, objects.data
        self.run_checkpoint = objects.checkpoint
        self.callbacks = {name: objects[name] for name in CALLBACKS}
        users = [each for each in as_list(objects.trainer.callbacks) if each is not None]
        ours = [objects.fast, callbacks.IgnoredWeight(), *self._callbacks_in_use(objects, users)]
        if objects.trainer.enable_checkpointing is not False:  # Lightning refuses it otherwise
            ours.append(objects.checkpoint)
        if not self.callbacks["lines"] and not has_progress_bar(users):
            objects.trainer.enable_progress_bar = False  # else Lightning adds one of its own
        loggers = [each for each in as_list(objects.trainer.logger) if isinstance(each, Logger)]
        with constructor_errors(TypeError):
            self.trainer = Trainer(
                **{
                    **objects.trainer,
                    "callbacks": [*users, *ours],
                    "logger": loggers,
                    "default_root_dir": str(run_dir),
                }
            )
        check_trainer(self.trainer)

    def _callbacks_in_use(self, objects: Namespace, users: list[Callback]) -> list[Callback]:
        """Those of `self.callbacks` that are switched on and have something to do in this run."""
        options, used = objects.trainer, dict(self.callbacks)
        if self.method != "fit" or options.logger is False or options.fast_dev_run:
            del used["learning_rates"]  # Lightning's monitor refuses a Trainer without logger
        if self.method != "predict":
            del used["predictions"]  # which would make Lightning keep every prediction
        if has_progress_bar(users) or options.enable_progress_bar is False:
            del used["lines"]
        return [callback for callback in used.values() if callback]


def has_progress_bar(users: list[Callback]) -> bool:
    return any(isinstance(callback, ProgressBar) for callback in users)


def as_list(value: Any) -> list[Any]:
    """A list of one callback or logger, of several, of none."""
    return value if isinstance(value, list) else [value]
