"""`fit`, `validate`, `test` and `predict`: Lightning's LightningCLI, and what runs with it.

Every option can stand in a YAML file: later `--config` files and flags win over earlier ones, and
all over `configs/default.yaml`. A relative `--config` that is not here is looked up in `configs/`.
"""

import errno
import math
import os
import shlex
import sys
from argparse import ArgumentError
from statistics import mean
from typing import Any, Literal

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor, ProgressBar, RichProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.distributed import destroy_process_group, is_initialized
from typing_extensions import override

import lightning_mgpu.data
import lightning_mgpu.models  # noqa: F401 - --model=ResNet18 is found among imported classes
from lightning_mgpu.callbacks import PredictionWriter, RunOutput, TestPictures
from lightning_mgpu.cli.errors import TRACEBACK_FLAG, constructor_errors, explain, last_part
from lightning_mgpu.cli.help import OPTIONS
from lightning_mgpu.cli.options import Options, read_options
from lightning_mgpu.devices import devices
from lightning_mgpu.malloc import keep_freed_memory
from lightning_mgpu.runs.checkpoints import (
    BestCheckpoint,
    LastCheckpoint,
    WholeFiles,
    read_checkpoint,
)
from lightning_mgpu.runs.directory import CONFIG, RUN_DIR_ENV, name_run_dir
from lightning_mgpu.runs.record import RunRecord, fingerprint
from lightning_mgpu.runs.resume import choose_checkpoint, refuse_changes
from lightning_mgpu.runs.wandb_run import WandbOptions
from lightning_mgpu.seeds import draw_seed, seed_generators
from lightning_mgpu.tools import UsageError, command

TEXTS = {  # options beside those of model, data, Trainer and callbacks
    "run_dir": (str | None, None, "Where the run's files go; must be new."),
    "weights": (str | None, None, "fit: a checkpoint, whose weights are the first ones."),
    "malloc": (Literal["default", "keep"], "default", "keep: glibc keeps memory; faster on CPUs."),
}


def run_trainer(subcommand: str, args: list[str]) -> None:
    """Run a method of the Trainer with the options of a command line."""
    options = read_options(subcommand, args)
    cli = TrainingCLI(subcommand, options)  # parses
    if options.run_dir:  # the processes that `ddp` starts must not choose another run
        sys.argv[1:] = [subcommand, *args, f"--resume={options.run_dir}"]
    cli.build(f"{command()} {shlex.join([subcommand, *args])}")
    way_on = f"go on with: {command()} fit --resume={shlex.quote(str(cli.run_dir))}"
    ending: BaseException | None = None
    try:
        cli.run()
    except (KeyboardInterrupt, SystemExit) as error:  # Lightning makes one of the other
        ending = error
        if cli.record.lock is not None and subcommand == "fit":
            print(f"stopped; {way_on if cli.last.saves else 'it saves no last.ckpt'}", flush=True)
        sys.exit(1)
    except OSError as error:
        ending = error
        if cli.record.lock is not None and not (cli.run_dir / CONFIG).is_file():
            raise UsageError(cli.is_deleted) from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            ending = UsageError(f"{cli.run_dir}: {error.strerror}; once there is room, {way_on}")
            raise ending from error
        raise
    except BaseException as error:
        ending = error
        raise
    finally:
        cli.record.close(cli.trainer, ending, cli.last.why_stopped)
        # Lightning does so for NCCL alone. Gloo's threads may still hold tensors while Python ends,
        # which at times ends a finished process with SIGABRT (pytorch/pytorch#179291).
        if is_initialized() and ending is None:
            destroy_process_group()


class TrainingCLI(LightningCLI):
    """The options of `fit`, `validate`, `test` or `predict`, and what is built from them.

    Made, it has parsed the options. `build` makes the objects, `run` runs them.
    """

    def __init__(self, subcommand: str, options: Options) -> None:
        """Parse.

        Raises:
            UsageError: If an option is unknown, its value is of a wrong type, or may not change.
        """
        self.method, self.options = subcommand, options
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            run=False,
            auto_configure_optimizers=False,  # the model does
            save_config_callback=None,  # RunRecord writes config.yaml
            parser_kwargs={
                "exit_on_error": False,
                "allow_abbrev": False,
                "prog": command(),
                "usage": f"{command()} {subcommand} [options]",
            },
        )

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        for name, (kind, default, text) in TEXTS.items():
            parser.add_argument(f"--{name}", type=kind, default=default, help=text)
        parser.add_argument(TRACEBACK_FLAG, action="store_true", help="Show where an error is.")
        parser.add_class_arguments(WandbOptions, "wandb")
        parser.add_class_arguments(BestCheckpoint, "checkpoint")
        parser.add_class_arguments(RunOutput, "output")
        skip = {*self.subcommands()[self.method], "weights_only"}
        self.method_options = parser.add_method_arguments(Trainer, self.method, skip=skip)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = self.parse(self.options.args, self.options.given)
        if self.options.run_dir:
            base = parser.dump(self.parse([], {CONFIG: self.options.run_dir}), format="yaml")
            now = parser.dump(self.config, format="yaml")
            refuse_changes(self.options.run_dir, yaml.safe_load(base), yaml.safe_load(now))
        if isinstance(self.config.seed_everything, bool):  # so that config.yaml says which it is
            self.config.seed_everything = draw_seed()
        self.config_text = parser.dump(self.config, skip_unset=False, format="yaml")
        self.config_dump = yaml.safe_load(self.config_text)  # for the model's hyperparameters

    def parse(self, args: list[str], given: dict[str, Any]) -> Namespace:
        """Parse options over the base configuration.

        That is a first --config, not an object: jsonargparse would check that alone, and refuse a
        class whose required arguments come from the command line.
        """
        base = yaml.safe_dump(self.options.base, default_flow_style=True, width=math.inf)
        try:
            return self.parser.parse_args([f"--config={base}", *args])
        except ArgumentError as error:
            known = [*self.parser._option_string_actions, *(name.split()[0] for name in OPTIONS)]
            raise UsageError(explain(str(error), given, known)) from error

    @override
    def instantiate_classes(self) -> None:
        """Nothing: LightningCLI calls it when the options are parsed; `build` comes later."""

    def build(self, command_line: str) -> None:
        """Make the model, the data, the callbacks and the Trainer.

        Raises:
            UsageError: If a constructor refuses an argument, or the run directory is taken.
        """
        config, given, num_steps = self.config, self.options.given, None
        self.ckpt_path = config.get("ckpt_path")
        if config.malloc == "keep":
            keep_freed_memory()
        if self.options.run_dir is None:
            words = [given.get(f"trainer.{name}", "auto") for name in ("strategy", "devices")]
            parts = map(last_part, (config.model.class_path, *words))
            self.run_dir = name_run_dir(config.run_dir, config.trainer.default_root_dir, *parts)
        else:
            self.run_dir, num_steps, length = self.options.run_dir, 0, config.trainer.max_epochs
            if path := choose_checkpoint(self.run_dir, self.options.base, length):
                loops = read_checkpoint(path)["loops"]["fit_loop"]
                num_steps = loops["epoch_loop.state_dict"]["_batches_that_stepped"]
                self.ckpt_path = path
        os.environ[RUN_DIR_ENV] = str(self.run_dir.absolute())  # for the processes of `ddp`
        with constructor_errors():
            objects = self.parser.instantiate(config)
        self.model, self.datamodule, self.output = objects.model, objects.data, objects.output
        if config.weights and not self.ckpt_path:
            self.model.load_state_dict(read_checkpoint(config.weights)["state_dict"])
        arguments, is_dev_run = objects.trainer, objects.trainer.fast_dev_run
        users = [each for each in as_list(arguments.callbacks) if each is not None]
        saves = arguments.enable_checkpointing is not False
        wandb_options = None if arguments.logger is False else config.wandb
        facts = {"command": command_line, "options": given, "seed": config.seed_everything}
        self.best = objects.checkpoint
        self.last = LastCheckpoint(config.seed_everything, saves and self.best.keeps_last)
        self.record = RunRecord(self.run_dir, self.config_text, wandb_options, facts, num_steps)
        self.record.notes = self.output.notes  # lines of the header
        if num_steps == 0:
            self.output.notes["ckpt"] = "none: no epoch was over, training starts again"
        has_bar = any(isinstance(each, ProgressBar) for each in users)
        draws_bar = sys.stdout.isatty() and arguments.enable_progress_bar is not False
        arguments.enable_progress_bar = draws_bar or has_bar
        in_use = {
            RichProgressBar(1): draws_bar and not has_bar,
            LearningRateMonitor(): wandb_options and self.method == "fit" and not is_dev_run,
            TestPictures(): self.output.pictures,
            PredictionWriter(): self.output.predictions and self.method == "predict",
            self.best: saves,
        }
        first = [self.last] if is_dev_run else [self.last, self.record]
        ours = [callback for callback, is_used in in_use.items() if is_used]
        with constructor_errors(TypeError):
            self.trainer = Trainer(
                **{
                    **arguments,
                    "callbacks": [*first, *users, *ours, self.output],
                    "default_root_dir": str(self.run_dir),
                    "enable_checkpointing": True,  # as RunOutput is a Checkpoint
                    "logger": [x for x in as_list(arguments.logger) if isinstance(x, Logger)],
                    "plugins": [*as_list(arguments.plugins), WholeFiles()],
                }
            )
        started = int(os.environ.get("WORLD_SIZE", 1))  # by torchrun
        if SLURMEnvironment.detect():
            started = int(os.environ["SLURM_NTASKS"])
        if started > 1 and self.trainer.world_size == 1:
            raise UsageError(
                f"{started} processes were started, and each would train a model of its own: "
                "--trainer.strategy=ddp with --trainer.devices joins them"
            )

    def run(self) -> None:
        """Evaluate; or train, test the best checkpoint and report."""
        trainer = self.trainer
        arguments = {"model": self.model, "datamodule": self.datamodule, "weights_only": True}
        if self.method == "fit":
            trainer.fit(**arguments, ckpt_path=self.ckpt_path)
            self.report()
        else:
            if self.ckpt_path is None and not self.config.weights:
                rank_zero_warn(f"{self.method} without --ckpt_path: the weights are untrained.")
            seed_generators(self.config.seed_everything, "test")
            getattr(trainer, self.method)(
                **arguments, **{name: self.config[name] for name in self.method_options}
            )

    def report(self) -> None:
        """Test the best checkpoint, or the last weights; print the last lines, the book's last."""
        trainer, results = self.trainer, self.record.results
        results["fingerprint"] = fingerprint(self.model.parameters())
        lines = [f"fingerprint: {results['fingerprint']}"]
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.summary["fingerprint"] = results["fingerprint"]
        for name, value in trainer.callback_metrics.items():
            if "loss" in name and not value.isfinite():
                lines.append(f"warning: {name} is {value.item()}: the training has diverged")
        if self.last.why_stopped:
            self.print_once(f"stopped early: {self.last.why_stopped}")
        metrics = self.test_best()
        shown = {"test_acc": metrics["test_acc"]} if "test_acc" in metrics else metrics
        texts = [f"{name.replace('_', ' ')}: {value:.2f}" for name, value in shown.items()]
        seconds = self.output.seconds
        time = f"{mean(seconds):.1f} sec/epoch" if seconds else "no epoch trained"
        if not trainer.fast_dev_run and not (self.run_dir / CONFIG).is_file():
            raise UsageError(f"{self.run_dir} was deleted while it was on: its weights are gone")
        self.print_once("\n".join([*lines, ", ".join([*texts, f"{time} on {devices(trainer)}"])]))

    def test_best(self) -> dict[str, float]:
        """The metrics of the test; none where there is no test."""
        trainer, has_test = self.trainer, is_overridden("test_step", self.model)
        if not self.output.test and getattr(self.datamodule, "validates_on_test_set", False):
            raise UsageError("--output.test=false: and yet the data validate on the test set")
        if not (
            has_test and is_overridden("test_dataloader", self.datamodule) and self.output.test
        ):
            return {}
        path, which = None, "the last epoch: no metric says which one is the best"
        if best := self.best.best:
            path, facts = best
            which = f"epoch {facts['epoch']}: the last one saved by --checkpoint"
            if facts["value"] is not None:
                extreme = "smallest" if self.best.mode == "min" else "largest"
                which = "epoch {epoch}: {monitor} {value:.4f} ".format(**facts) + f"({extreme})"
        self.print_once(f"testing {which}")
        seed_generators(self.config.seed_everything, "test")
        tested = trainer.test(self.model, self.datamodule, ckpt_path=path, verbose=False, weights_only=True)
        return dict(tested[0]) if tested else {}

    def print_once(self, text: str) -> None:
        """Print in the first process."""
        if self.trainer.is_global_zero:
            print(text, flush=True)


def as_list(value: Any) -> list[Any]:
    """A list of one callback or logger, of several, of none."""
    return value if isinstance(value, list) else [value] if value else []
