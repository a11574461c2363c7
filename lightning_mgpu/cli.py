"""The command line: Lightning's own LightningCLI with this package's defaults.

    python -m lightning_mgpu fit --trainer.devices=2
    python -m lightning_mgpu fit --config model/resnet18.yaml --trainer.limit_train_batches=10
    python -m lightning_mgpu fit --resume=last
    python -m lightning_mgpu test --ckpt_path runs/NAME/checkpoints/last.ckpt
    python -m lightning_mgpu export --ckpt_path runs/NAME/checkpoints/last.ckpt --output model.onnx
    python -m lightning_mgpu sweep --config sweep/lenet_lr.yaml
    python -m lightning_mgpu benchmark --quick

Every argument can stand in a YAML file: later `--config` files and flags win over earlier ones, and all of them over
`configs/default.yaml`. A relative `--config` that does not exist here is looked up in `configs/`. It may hold options
of several subcommands, each under the subcommand's name.
"""

import importlib
import os
import sys
from argparse import SUPPRESS, ArgumentError
from pathlib import Path
from typing import Any, Literal

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from typing_extensions import override

import lightning_mgpu.data
import lightning_mgpu.strategies  # noqa: F401 - registers --trainer.strategy=manual_allreduce
from lightning_mgpu import __version__
from lightning_mgpu.arguments import CONFIGS
from lightning_mgpu.callbacks import (
    ConfusionMatrix,
    EpochLines,
    EpochTimer,
    FastModel,
    LearningCurve,
    LossBar,
    PredictionGrid,
    PredictionWriter,
    RunCheckpoint,
    RunHeader,
    Watch,
    is_search,
)
from lightning_mgpu.callbacks.malloc import keep_freed_memory
from lightning_mgpu.checkpoint_io import best_there_is
from lightning_mgpu.checks import (
    check_checkpoint,
    check_classes,
    check_devices,
    check_given,
    check_numbers,
    check_saving,
    check_secrets,
    check_shares,
    find_strategy,
    only_weights,
)
from lightning_mgpu.closing_line import closing_line
from lightning_mgpu.clusters import follow_launcher
from lightning_mgpu.config_file import SUBCOMMANDS
from lightning_mgpu.devices import devices
from lightning_mgpu.errors import SWITCH, UsageError, is_mistake, mistakes
from lightning_mgpu.explain import explain, parameters
from lightning_mgpu.from_checkpoint import SECTIONS, disagreements
from lightning_mgpu.models import Classifier
from lightning_mgpu.parser import HelpFormatter, Parser
from lightning_mgpu.redact import redact, redact_values
from lightning_mgpu.resume import changes, choose_checkpoint, claim, how_to_resume
from lightning_mgpu.run_dir import RunDir, expand_home
from lightning_mgpu.run_record import RunRecord
from lightning_mgpu.scale_k import check_scale, scaled_by_devices
from lightning_mgpu.slurm import requeue
from lightning_mgpu.tracking import Tracking
from lightning_mgpu.tracking.csv_logger import RunCSVLogger

PROG = "python -m lightning_mgpu"
BLANK_LINE = "\n\n"
RESUME_HELP = "Go on with this run in its directory, as if it had never stopped; last: the newest in runs/."
MALLOC_HELP = "keep: glibc keeps freed memory instead of giving it back after every step; faster on CPUs."
SCALE_HELP = "Multiply global batch and learning rate by the number of devices."
VALIDATION = ("validation_step", "on_validation_epoch_end")  # where a Classifier logs val_acc


class CLI(LightningCLI):
    """`fit`, `validate`, `test` and `predict` for any LightningModule and LightningDataModule."""

    trainer: Trainer
    model: LightningModule
    datamodule: LightningDataModule
    run_dir: RunDir | None = None  # none in a fast_dev_run, which leaves nothing behind
    saving: RunCheckpoint
    lock: int | None = None  # on the run directory, while this runs
    resumed: Path | None = None  # the run directory of --resume
    changes: list[str] = []  # what flags change of the resumed run, or of the checkpoint's  # noqa: RUF012

    def __init__(self, args: list[str] | None = None) -> None:
        self.given = list(sys.argv[1:] if args is None else args)
        shared = {"exit_on_error": False, "allow_abbrev": False, "formatter_class": HelpFormatter}
        one = {**shared, "default_config_files": [str(CONFIGS / "default.yaml")]}
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
                    "description": f"Train on several devices.\n\n{(__doc__ or '').partition(BLANK_LINE)[2]}",
                    "version": __version__,
                    **shared,
                    **{name: {**one, "usage": f"{PROG} {name} [--config FILE] [options]"} for name in SUBCOMMANDS},
                },
                args=args,
                parser_class=Parser,
            )
        except Exception as error:
            if self.run_dir is not None and is_mistake(error):
                self.run_dir.discard()
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
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            super().parse_arguments(parser, args)
        except ArgumentError as error:
            raise UsageError(explain(str(error), self.options())) from error
        config = self.config[self.config.subcommand]
        check_numbers(config)
        expand_home(config)
        check_given(self.given[1:], config)
        check_secrets(config)
        only_weights(config)
        if config.get("resume"):
            self._resume(Path(config.resume), config)
            return  # the checkpoint the run began with need not be there any more
        check_saving(config, self.config.subcommand)
        asked = config.model.class_path if any(arg.startswith("--model=") for arg in self.given) else None
        check_checkpoint(config.ckpt_path, asked)
        if config.ckpt_path and Path(config.ckpt_path).is_file():
            self.changes = disagreements(config.ckpt_path, as_saved(self._parser(self.config.subcommand), config))

    def _resume(self, run_dir: Path, config: Namespace) -> None:
        """Find the checkpoint to go on from; the configuration is that of the run, `--resume` no part of it."""
        del config["resume"]
        parser = self._parser("fit")
        saved = parser.parse_path(str(run_dir / "config.yaml"))  # with the defaults of options that came after it
        expand_home(saved)
        self.changes = changes(run_dir, as_saved(parser, saved), as_saved(parser, config))
        if rank_zero_only.rank == 0:  # type: ignore[attr-defined]
            self.lock = claim(run_dir)
        self.checkpoint = choose_checkpoint(run_dir, config.checkpoint.dirpath, config.trainer.max_epochs)
        self.resumed = run_dir

    @override
    def _prepare_subcommand_parser(self, klass: type, subcommand: str, **kwargs: Any) -> LightningArgumentParser:
        parser = super()._prepare_subcommand_parser(klass, subcommand, **kwargs)
        assert isinstance(parser, Parser)
        parser.subcommand = subcommand
        if subcommand == "fit":
            parser.add_argument("--resume", type=str, default=SUPPRESS, help=RESUME_HELP)
        return parser

    @override
    def _prepare_subcommand_kwargs(self, subcommand: str) -> dict[str, Any]:
        kwargs = super()._prepare_subcommand_kwargs(subcommand)
        return kwargs if self.resumed is None else {**kwargs, "ckpt_path": str(self.checkpoint)}

    @override
    def _parse_ckpt_path(self) -> None:
        """Nothing: Lightning would let the checkpoint's hyperparameters win in silence (see from_checkpoint.py)."""

    def options(self) -> dict[str, list[str]]:
        """The names of all options by subcommand, those of the default model, its optimizer and the data by ''."""
        names = {
            subcommand: sorted(name.lstrip("-") for name in parser._option_string_actions)
            for subcommand, parser in self._subcommand_parsers.items()
        }
        names[""] = []
        for key, class_path in (
            ("model", "lightning_mgpu.models.LeNet"),
            ("model.optimizer", "torch.optim.SGD"),
            ("data", "lightning_mgpu.data.FashionMNIST"),
        ):
            names[""] += [f"{key}.{name}" for name in parameters(class_path)]
        return names

    @override
    def before_instantiate_classes(self) -> None:
        """The best checkpoint is the one of highest validation accuracy, where there is one and nothing else is said.

        Validating on the test set must not choose the model: the last one is tested then, as in the book.
        """
        config = self.config[self.subcommand]
        follow_launcher(config.trainer)
        if config.malloc == "keep":
            keep_freed_memory()
        if config.checkpoint.monitor is None and _logs_val_acc(config):
            config.checkpoint.update(Namespace(monitor="val_acc", mode="max"))

    @override
    def instantiate_classes(self) -> None:
        self._dump_config()  # for checkpoints, which hold what was given
        config = self.config[self.subcommand]
        with mistakes(), scaled_by_devices(config) as self.scaled:
            if self.subcommand == "fit" and self.resumed is None:
                check_scale(config.ckpt_path, self.scaled)
            super().instantiate_classes()
        check_shares(self.trainer, self.datamodule)
        check_classes(self.model, self.datamodule)
        self.saving = next(c for c in self.trainer.callbacks if isinstance(c, RunCheckpoint))  # type: ignore[attr-defined]
        self.saving.scaled_by = self.scaled.get("scaled_by", 1)
        self.saving.config = redact_values({name: self.config_dump.get(name) for name in SECTIONS})

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        """The Trainer with this package's callbacks beside the user's, writing to the run directory."""
        config, objects = self.config[self.subcommand].trainer, self.config_init[self.subcommand].trainer
        check_devices(config)
        if isinstance(config.strategy, str) and not isinstance(found := find_strategy(config.strategy), str):
            kwargs["strategy"] = found()
        self.timer = EpochTimer(of_one_run=self.resumed is None)
        header = RunHeader(self.scaled)
        callbacks = [header, self.timer, LearningCurve(), PredictionGrid(), ConfusionMatrix()]
        if self.subcommand == "predict":
            callbacks.append(PredictionWriter())
        if (tracking := self.config[self.subcommand].wandb).watch:
            callbacks.append(Watch(tracking.watch, tracking.watch_freq))
        given = objects.callbacks if isinstance(objects.callbacks, list) else [objects.callbacks]
        has_progress_bar = any(isinstance(callback, ProgressBar) for callback in given)
        if config.enable_progress_bar is not False and not has_progress_bar:
            callbacks.append(LossBar() if sys.stdout.isatty() else EpochLines())
        self.trainer_defaults["callbacks"] = callbacks
        if path := self.checkpoint if self.resumed else self.config[self.subcommand].ckpt_path:
            header.notes["ckpt"] = "; ".join([str(path), *self.changes])
        if config.fast_dev_run:
            kwargs["logger"] = False
        else:
            self.run_dir = RunDir(self.config[self.subcommand], self.resumed)
            if rank_zero_only.rank == 0 and not self.resumed:  # type: ignore[attr-defined]
                self.lock = claim(self.run_dir.path)
            kwargs["default_root_dir"] = str(self.run_dir.path)
            if config.logger in (None, True):
                kwargs["logger"] = RunCSVLogger(self.run_dir.path)
        return super().instantiate_trainer(**kwargs)

    def before_predict(self) -> None:
        if self.config[self.subcommand].ckpt_path is None:
            rank_zero_warn(f"{self.subcommand} without --ckpt_path: the weights are untrained.")

    before_test = before_validate = before_predict

    def fit(self, **kwargs: Any) -> None:
        try:
            self.trainer.fit(**kwargs)
        finally:
            stopped = self.trainer.interrupted and self.trainer.is_global_zero
            if self.run_dir and self.saving.last_model_path and stopped:
                answer = requeue() if self.saving.time_is_up else "stopped"
                print(f"{answer}; go on with: {how_to_resume(self.run_dir.path)}", flush=True)

    def after_fit(self) -> None:
        """Test the best checkpoint and print the book's closing line."""
        if is_search(self.trainer.callbacks):  # type: ignore[attr-defined]
            return
        metrics: dict[str, Any] = {}
        seconds = self.timer.seconds_per_epoch  # now: `test` restores callbacks, to when the best epoch ended
        if is_overridden("test_step", self.model) and is_overridden("test_dataloader", self.datamodule):
            path = best_there_is(self.saving)
            tested = self.trainer.test(self.model, self.datamodule, ckpt_path=path, verbose=False)
            metrics = dict(tested[0]) if tested else {}  # nothing with `--trainer.limit_test_batches=0`
        if self.trainer.is_global_zero:
            print(closing_line(metrics, seconds, str(devices(self.trainer))), flush=True)


def as_saved(parser: LightningArgumentParser, config: Namespace) -> dict[str, Any]:
    """A configuration as `config.yaml` has it: plain values, secrets left out."""
    return yaml.safe_load(redact(parser.dump(config, skip_none=False)))


def _logs_val_acc(config: Namespace) -> bool:
    module, _, name = config.model.class_path.rpartition(".")
    model = getattr(importlib.import_module(module), name)
    on_test_set = config.data.get("init_args", Namespace()).get("val_size") == 0
    if not issubclass(model, Classifier) or on_test_set or config.trainer.limit_val_batches == 0:
        return False
    # a subclass with a validation of its own may log something else
    return all(getattr(model, name) is getattr(Classifier, name) for name in VALIDATION)
