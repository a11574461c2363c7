"""`fit`, `validate`, `test` and `predict`: Lightning's LightningCLI, and what runs with it."""

import ctypes
import errno
import os
import shlex
import signal
import sys
from argparse import ArgumentError
from functools import partial
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
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch.distributed import destroy_process_group, is_initialized

import lightning_mgpu.data
import lightning_mgpu.models  # noqa: F401 - --model=ResNet18 is found among imported classes
from lightning_mgpu.callbacks import PredictionWriter, RunOutput, TestPictures
from lightning_mgpu.cli.errors import constructor_errors, explain, last_part
from lightning_mgpu.cli.help import OPTIONS
from lightning_mgpu.cli.options import Options, read_options
from lightning_mgpu.devices import devices
from lightning_mgpu.runs import checkpoints
from lightning_mgpu.runs.directory import RUN_DIR_ENV, RUN_JSON, name_run_dir
from lightning_mgpu.runs.record import RunRecord, fingerprint
from lightning_mgpu.runs.resume import find_last, refuse_changes
from lightning_mgpu.runs.wandb_run import WandbOptions
from lightning_mgpu.seeds import seed_generators
from lightning_mgpu.tools import UsageError, command

# what a file system says that is full or must not be written
UNWRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EROFS, errno.ENOTDIR)


def run_trainer(subcommand: str, args: list[str]) -> None:
    """Run a method of the Trainer with the options of a command line."""
    options = read_options(subcommand, args)
    cli = TrainingCLI(subcommand, options)  # parses
    if options.run_dir:  # the processes that `ddp` starts must not choose another run
        sys.argv[1:] = [subcommand, *args, f"--resume={options.run_dir}"]
    cli.build(f"{command()} {shlex.join([subcommand, *args])}")
    way_on = f"go on with: {command()} fit --resume={shlex.quote(str(cli.run_dir))}"
    way_on = way_on if subcommand == "fit" else "try again"
    ending: BaseException | None = None
    try:
        cli.run()
    except BaseException as error:
        ending = error
        if launcher := cli.trainer.strategy.launcher:  # its processes would only say that we ended
            launcher.kill(signal.SIGKILL)
        if isinstance(error, OSError) and error.errno in UNWRITABLE:
            where = error.filename or cli.run_dir
            ending = UsageError(f"{where}: {error.strerror}; once that is mended, {way_on}")
        if isinstance(error, OSError) and cli.is_deleted():
            ending = UsageError(f"{cli.run_dir} was deleted while it was on: its weights are gone")
        if isinstance(error, (KeyboardInterrupt, SystemExit)):  # Lightning turns one into the other
            if cli.record.lock is not None and subcommand == "fit":
                print("stopped;", way_on if cli.last.saves else "it saves no last.ckpt", flush=True)
            sys.exit(1)
        if ending is error:
            raise
        raise ending from error
    finally:
        cli.record.close(cli.trainer, ending, cli.best)
    if is_initialized():
        # else Gloo's threads at times end a finished process (pytorch/pytorch#179291)
        destroy_process_group()


class TrainingCLI(LightningCLI):
    """Made, it has parsed the options. `build` makes the objects, `run` runs them."""

    def __init__(self, subcommand: str, options: Options) -> None:
        self.method, self.options = subcommand, options
        super().__init__(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            run=False,
            auto_configure_optimizers=False,  # the model does
            save_config_callback=None,  # RunRecord writes config.yaml
            parser_kwargs={"exit_on_error": False, "allow_abbrev": False, "prog": command()},
        )

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        parser.add_argument("--run_dir", type=str | None, default=None)
        parser.add_argument("--weights", type=str | None, default=None)
        parser.add_argument("--malloc", type=Literal["default", "keep"], default="default")
        parser.add_class_arguments(WandbOptions, "wandb")
        parser.add_class_arguments(checkpoints.BestCheckpoint, "checkpoint")
        parser.add_class_arguments(RunOutput, "output")
        skip = {*self.subcommands()[self.method], "weights_only"}
        self.method_options = parser.add_method_arguments(Trainer, self.method, skip=skip)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self.config = self.parse(self.options.args)
        # a repeated run gets a directory of its own
        self.named_run_dir, self.config.run_dir = self.config.run_dir, None
        if isinstance(self.config.seed_everything, bool):
            raise UsageError("--seed_everything: give a number, such as $RANDOM")
        self.config_text = parser.dump(self.config, skip_unset=False, format="yaml")
        self.config_dump = yaml.safe_load(self.config_text)  # for the model's hyperparameters
        if run_dir := self.options.run_dir:
            before = yaml.safe_load(parser.dump(self.parse([]), skip_unset=False, format="yaml"))
            refuse_changes(run_dir, before, self.config_dump)

    def parse(self, args: list[str]) -> Namespace:
        """Parse options over the base configuration."""
        # a first --config, as an object would be checked before the options complete it
        base = yaml.safe_dump(self.options.base, default_flow_style=True)
        try:
            return self.parser.parse_args([f"--config={base}", *args])
        except ArgumentError as error:
            known = [*self.parser._option_string_actions, *(name.split()[0] for name in OPTIONS)]
            raise UsageError(explain(str(error), self.options.given, known)) from error

    def instantiate_classes(self) -> None:
        """Nothing: LightningCLI calls it when the options are parsed; `build` comes later."""

    def build(self, command_line: str) -> None:
        """Make the model, the data, the callbacks and the Trainer."""
        config, given = self.config, self.options.given
        self.ckpt_path, num_steps, notes = config.get("ckpt_path"), None, {}
        if self.options.run_dir is None:
            words = [given.get(f"trainer.{name}", "auto") for name in ("strategy", "devices")]
            parts = map(last_part, (config.model.class_path, *words))
            self.run_dir = name_run_dir(self.named_run_dir, config.trainer.default_root_dir, *parts)
        else:
            self.run_dir, limit = self.options.run_dir, config.trainer.max_epochs
            self.ckpt_path, num_steps = find_last(self.run_dir, self.options.base, limit)
            if not self.ckpt_path:
                notes["ckpt"] = "none: no epoch was over, training starts again"
        os.environ[RUN_DIR_ENV] = str(self.run_dir.absolute())  # for the processes of `ddp`
        if config.malloc == "keep":
            keep_freed_memory()
        with constructor_errors():
            objects = self.parser.instantiate(config)
        self.model, self.datamodule, self.best = objects.model, objects.data, objects.checkpoint
        self.output, options = objects.output, objects.trainer
        self.output.notes = notes
        if not self.output.test and getattr(self.datamodule, "validates_on_test_set", False):
            raise UsageError("--output.test=false: but the data validate on the test set")
        if config.weights and not self.ckpt_path:
            self.model.load_state_dict(checkpoints.read_checkpoint(config.weights)["state_dict"])
        saves, seed = options.enable_checkpointing is not False, config.seed_everything
        self.last = checkpoints.LastCheckpoint(seed, saves)
        wandb = None if options.logger is False else config.wandb
        facts = {"command": command_line, "options": given, "seed": seed}
        self.record = RunRecord(self.run_dir, self.config_text, wandb, facts, notes, num_steps)
        users, is_dev_run = as_list(options.callbacks), bool(options.fast_dev_run)
        has_bar = any(isinstance(each, ProgressBar) for each in users)
        draws_bar = sys.stdout.isatty() and options.enable_progress_bar is not False
        ours = {
            RichProgressBar(1): draws_bar and not has_bar,
            LearningRateMonitor(): wandb and self.method == "fit" and not is_dev_run,
            TestPictures(): self.output.pictures,
            PredictionWriter(): self.method == "predict",
            self.best: saves,
            self.output: True,
        }
        first = [self.last] if is_dev_run else [self.last, self.record]
        with constructor_errors(TypeError):
            self.trainer = Trainer(
                **{
                    **options,
                    "callbacks": [*first, *users, *(each for each in ours if ours[each])],
                    "default_root_dir": str(self.run_dir),
                    "enable_checkpointing": True,  # as RunOutput is a Checkpoint
                    "enable_progress_bar": draws_bar or has_bar,
                    "logger": [x for x in as_list(options.logger) if isinstance(x, Logger)],
                    "plugins": [*as_list(options.plugins), checkpoints.WholeFiles()],
                }
            )
        started = os.environ.get("SLURM_NTASKS" if SLURMEnvironment.detect() else "WORLD_SIZE", "1")
        if int(started) > 1 and self.trainer.world_size == 1:
            way = "--trainer.strategy=ddp with --trainer.devices joins them"
            raise UsageError(f"{started} processes would train a model of their own each: {way}")

    def run(self) -> None:
        """Evaluate; or train, test the best checkpoint and report."""
        arguments = {"model": self.model, "datamodule": self.datamodule, "weights_only": True}
        if self.method == "fit":
            self.trainer.fit(**arguments, ckpt_path=self.ckpt_path)
            self.report()
            return
        if self.ckpt_path is None and not self.config.weights:
            rank_zero_warn(f"{self.method} without --ckpt_path: the weights are untrained.")
        arguments |= {name: self.config[name] for name in self.method_options}
        seed_generators(self.config.seed_everything, "test")
        getattr(self.trainer, self.method)(**arguments)

    def report(self) -> None:
        """Test the best checkpoint, or the last weights; print the last lines, the book's last."""
        trainer, results, why = self.trainer, self.record.results, self.last.why_stopped
        results |= {"fingerprint": fingerprint(self.model.parameters()), "why": why or None}
        lines = [f"fingerprint: {results['fingerprint']}"]
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                logger.experiment.summary["fingerprint"] = results["fingerprint"]
        for name, value in trainer.callback_metrics.items():
            if "loss" in name and not value.isfinite():
                lines.append(f"warning: {name} is {value.item()}: the training has diverged")
        if why:
            print_once(f"stopped early: {why}")
        metrics = self.test_best()
        shown = {"test_acc": metrics["test_acc"]} if "test_acc" in metrics else metrics
        texts = [f"{name.replace('_', ' ')}: {value:.2f}" for name, value in shown.items()]
        seconds = self.output.seconds
        time = f"{mean(seconds):.1f} sec/epoch" if seconds else "no epoch trained"
        if self.is_deleted():
            raise FileNotFoundError(self.run_dir)
        print_once("\n".join([*lines, ", ".join([*texts, f"{time} on {devices(trainer)}"])]))

    def test_best(self) -> dict[str, float]:
        """The metrics of the test; none where there is no test."""
        trainer, data, best = self.trainer, self.datamodule, self.best.best
        has_test = is_overridden("test_step", self.model) and is_overridden("test_dataloader", data)
        if not has_test or not self.output.test:
            return {}
        which = "the last epoch: no metric says which one is the best"
        if best:
            which = f"epoch {best['epoch']}: the last one saved by --checkpoint"
        if best and best["monitor"]:
            extreme = "smallest" if self.best.mode == "min" else "largest"
            which = "epoch {epoch}: {monitor} {value:.4f} ".format(**best) + f"({extreme})"
        print_once(f"testing {which}")
        seed_generators(self.config.seed_everything, "test")
        tested = trainer.test(self.model, data, best.get("path"), False, weights_only=True)
        return dict(tested[0]) if tested else {}

    def is_deleted(self) -> bool:
        """Whether the run directory that this process has made is gone."""
        return self.record.lock is not None and not (self.run_dir / RUN_JSON).is_file()


print_once = rank_zero_only(partial(print, flush=True))


def as_list(value: Any) -> list[Any]:
    """A list of one callback or logger, of several, of none."""
    return value if isinstance(value, list) else [] if value is None else [value]


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one: memory grows to its peak and stays."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        raise UsageError("--malloc=keep: this system has another allocator than glibc's")
    libc.mallopt(-4, 0)  # M_MMAP_MAX: large blocks come from the heap as well
    libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: whose end is never given back
    libc.mallopt(-2, 64 * 2**20)  # M_TOP_PAD: and which grows in large steps
