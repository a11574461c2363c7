"""`fit`, `validate`, `test` and `predict`: a LightningCLI that records runs."""

import os
import re
import shlex
import signal
import sys
from argparse import ArgumentError
from functools import partial
from types import SimpleNamespace
from typing import Any

import yaml
from jsonargparse import Namespace
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, callbacks
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch.distributed import DistError, destroy_process_group, is_initialized

import lightning_mgpu.data
import lightning_mgpu.models  # noqa: F401 - --model=ResNet18 is found among imported classes
from lightning_mgpu.callbacks import PredictionWriter, RunOutput, TestPictures
from lightning_mgpu.cli.check_config import check_class_paths, check_ranges, reject_code_of_runs
from lightning_mgpu.cli.errors import constructor_errors, explain
from lightning_mgpu.cli.help import OPTIONS
from lightning_mgpu.cli.options import PATHS, Options, read_options
from lightning_mgpu.cli.yaml_files import dump_config
from lightning_mgpu.devices import devices
from lightning_mgpu.distributed.processes import PeerFailure
from lightning_mgpu.runs import checkpoints
from lightning_mgpu.runs.directory import MODEL, RUN_DIR_ENV, flatten, name_run_dir
from lightning_mgpu.runs.metrics import NoLogger, summarize
from lightning_mgpu.runs.record import RunRecord, fingerprint
from lightning_mgpu.runs.resume import check_unchanged, find_last
from lightning_mgpu.runs.wandb_run import WandbOptions
from lightning_mgpu.seeds import seed_generators
from lightning_mgpu.tools import UsageError, command, last_part


def run_trainer(
    subcommand: str, args: list[str], cli_class: "type[TrainingCLI] | None" = None
) -> None:
    """Run a method of the Trainer with the options of a command line."""
    finder: Any = SimpleNamespace(find_spec=partial(reject_code_of_runs, args))
    sys.meta_path.insert(0, finder)
    options = read_options(subcommand, args)
    cli = (cli_class or TrainingCLI)(subcommand, options)  # parses
    if options.run_dir:  # the processes that `ddp` starts must not choose another run
        sys.argv[1:] = [subcommand, *args, f"--resume={options.run_dir}"]
    cli.build(f"{command()} {shlex.join([subcommand, *args])}")
    ending: BaseException | None = None
    try:
        cli.run()
    except BaseException as error:
        if launcher := cli.trainer.strategy.launcher:  # its processes would only report our exit
            launcher.kill(signal.SIGKILL)
        ending = cli.describe_end(error)
        if ending is error:
            raise
        raise ending from error
    finally:
        cli.record.close(cli.trainer, ending)
    if is_initialized():
        # else Gloo's threads may crash a finished process (pytorch/pytorch#179291)
        destroy_process_group()


class TrainingCLI(LightningCLI):
    """A LightningCLI in three steps: the constructor parses, `build` instantiates, `run` runs."""

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
        parser.add_class_arguments(WandbOptions, "wandb")
        parser.add_class_arguments(checkpoints.BestCheckpoint, "checkpoint")
        parser.add_class_arguments(RunOutput, "output")
        skip = {*self.subcommands()[self.method], "weights_only"}
        self.method_options = parser.add_method_arguments(Trainer, self.method, skip=skip)

    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        for name, value in self.options.cli_overrides.items():
            if str(value).startswith("pytorch_lightning."):
                raise UsageError(f"--{name}={value}: use lightning.pytorch instead")
        self.config = self.parse(self.options.args)
        num = self.config.trainer.devices
        if isinstance(num, str) and not re.fullmatch(r"auto|-?\d[\d, ]*", num):
            raise UsageError(f"--trainer.devices={num}: use a number, auto, or GPUs like '[0, 1]'")
        self.config_dump = self.dump(self.config)  # for the model's hyperparameters
        check_class_paths(self.config_dump)
        check_ranges(self.config_dump)
        written = {key: value for key, value in self.config_dump.items() if key not in PATHS}
        self.config_text = dump_config(written)
        if run_dir := self.options.run_dir:
            check_unchanged(run_dir, self.dump(self.parse([])), self.config_dump)

    def dump(self, config: Namespace) -> dict[str, Any]:
        return dict(yaml.safe_load(self.parser.dump(config, skip_unset=False, format="yaml")))

    def parse(self, args: list[str]) -> Namespace:
        """Parse options over the base configuration."""
        # as a first --config: an object would be validated before the options complete it
        base = dump_config(self.options.base, in_one_line=True)
        try:
            return self.parser.parse_args([f"--config={base}", *args])
        except ArgumentError as error:
            known = [*self.parser._option_string_actions, *(name.split()[0] for name in OPTIONS)]
            known += self.options_of_classes(base, args)
            raise UsageError(explain(str(error), self.options.cli_overrides, known)) from error

    def options_of_classes(self, base: str, args: list[str]) -> list[str]:
        """Options of the given classes, parsed without the other options: one of them is wrong."""
        is_class = re.compile("--(model|data|trainer.strategy|model.optimizer|model.lr_scheduler)=")
        try:
            config = self.parser.parse_args([f"--config={base}", *filter(is_class.match, args)])
        except ArgumentError:
            return []
        return [f"--{name}" for name in flatten(self.dump(config))]

    def instantiate_classes(self) -> None:
        """Do nothing: LightningCLI calls this after parsing, before `build`."""

    def build(self, command_line: str) -> None:
        """Create the model, the data, the callbacks and the Trainer."""
        self.choose_run_dir()
        with constructor_errors():
            objects = self.parser.instantiate(self.config)
        self.model, self.datamodule = objects.model, objects.data
        self.best, self.output = objects.checkpoint, objects.output
        is_new = not self.options.run_dir and not self.weights and not self.ckpt_path
        has_loader = is_overridden("train_dataloader", self.model)
        if is_new and has_loader and "data" not in self.options.cli_overrides:
            reason = "which --data would override; pass --data explicitly"
            raise UsageError(f"The model defines train_dataloader, {reason}")
        if not self.output.test and getattr(self.datamodule, "validates_on_test_set", False):
            raise UsageError("--output.test=false: the data module validates on the test set")
        self.output.notes, seed = self.notes, self.config.seed_everything
        saves = objects.trainer.enable_checkpointing is not False
        self.last = checkpoints.LastCheckpoint(seed, saves, self.weights)
        content = {"command": command_line, "options": self.options.cli_overrides, "seed": seed}
        self.record = RunRecord(
            self.run_dir,
            config=self.config_text,
            wandb_options=None if objects.trainer.logger is False else self.config.wandb,
            content={**content, "weights": self.config.weights},
            notes=self.notes,
            num_steps=self.num_steps,
        )
        self.trainer = self.make_trainer(objects.trainer)
        environment = self.trainer._accelerator_connector.cluster_environment
        is_slurm = isinstance(environment, SLURMEnvironment)
        started = os.environ.get("SLURM_NTASKS" if is_slurm else "WORLD_SIZE", "1")
        if int(started) > 1 and self.trainer.world_size == 1:
            raise UsageError(f"{started} processes train separately: use --trainer.strategy=ddp")

    def choose_run_dir(self) -> None:
        """Choose a new run directory, or find the run to resume and its last checkpoint."""
        overrides, trainer = self.options.cli_overrides, self.config.trainer
        self.ckpt_path: str | None = self.config.get("ckpt_path")
        self.num_steps: int | None = None
        if self.options.run_dir is None:
            words = [overrides.get(f"trainer.{name}", "auto") for name in ("strategy", "devices")]
            parts = map(last_part, (self.config.model.class_path, *words))
            self.run_dir = name_run_dir(self.config.run_dir, trainer.default_root_dir, *parts)
        else:
            self.run_dir, base = self.options.run_dir, self.options.base
            self.ckpt_path, self.num_steps = find_last(self.run_dir, base, trainer.max_epochs)
        self.weights = None if self.ckpt_path else self.config.weights
        run = "" if trainer.fast_dev_run else str(self.run_dir)
        self.notes = {"run": run, "ckpt": self.ckpt_path or "", "weights": self.weights or ""}
        self.run_dir = self.run_dir.absolute()  # a model's `setup` may change the working directory
        self.ckpt_path = self.ckpt_path and os.path.abspath(self.ckpt_path)
        os.environ[RUN_DIR_ENV] = str(self.run_dir)  # for the processes of `ddp`

    def make_trainer(self, options: Namespace) -> Trainer:
        """A Trainer with the user's callbacks and loggers, and with ours."""
        users, is_dev_run = as_list(options.callbacks), bool(options.fast_dev_run)
        loggers = [logger for logger in as_list(options.logger) if isinstance(logger, Logger)]
        for callback in users if self.ckpt_path and self.method == "fit" else ():
            if isinstance(callback, callbacks.LearningRateFinder | callbacks.BatchSizeFinder):
                reason = f"a {type(callback).__name__} would search again, with trained weights"
                fix = f"pass its result to a new run, with --weights={self.ckpt_path}"
                raise UsageError(f"--resume: {reason}: {fix}")
        bars = [sys.stdout.isatty(), *(isinstance(x, callbacks.ProgressBar) for x in users)]
        ours = {
            callbacks.LearningRateMonitor(): options.logger is not False and self.method == "fit",
            TestPictures(): self.output.pictures,
            PredictionWriter(): self.method == "predict",
            self.best: self.last.saves,
            self.output: True,
        }
        first = [self.last] if is_dev_run else [self.last, self.record]
        changes = {
            "callbacks": [*first, *users, *(x for x in ours if ours[x])],
            "default_root_dir": str(self.run_dir),
            "enable_checkpointing": True,  # as RunOutput is a Checkpoint
            "enable_progress_bar": options.enable_progress_bar is not False and any(bars),
            "logger": loggers,
            "plugins": [*as_list(options.plugins), checkpoints.AtomicCheckpointIO()],
        }
        with constructor_errors(TypeError):
            trainer = Trainer(**{**options, **changes})
        if is_dev_run:
            trainer.loggers = [NoLogger()]
        return trainer

    def run(self) -> None:
        """Evaluate, or train and report."""
        common = {"datamodule": self.datamodule, "ckpt_path": self.ckpt_path, "weights_only": True}
        if self.method == "fit":
            self.trainer.fit(self.model, **common)
            self.report()
            return
        if self.ckpt_path is None and not self.config.weights:
            rank_zero_warn(f"{self.method} without --ckpt_path: the weights are untrained")
        options = {name: self.config[name] for name in self.method_options}
        seed_generators(self.config.seed_everything, "test")
        getattr(self.trainer, self.method)(self.model, **{**options, **common})

    def report(self) -> None:
        """Test the best checkpoint, or the last weights, and print the summary as in the book."""
        printed, why = fingerprint(self.model.parameters()), self.last.why_stopped or None
        self.record.results |= {"fingerprint": printed, "why": why, "best": self.best.best}
        if why:
            print_once(f"stopped early: {why}")
        if best := self.record.results["best"]:
            print_once(f"best checkpoint: {os.path.relpath(best['path'])}")
        metrics = self.test_best()
        shown = {"test_acc": metrics["test_acc"]} if "test_acc" in metrics else metrics
        texts = [f"{name.replace('_', ' ')}: {value:.2f}" for name, value in shown.items()]
        seconds = summarize(self.run_dir).get("seconds_per_epoch")  # as in `runs`
        time = f"{seconds:.1f} sec/epoch" if seconds else "no epoch logged"
        print_once(f"fingerprint: {printed}")
        print_once(", ".join([*texts, f"{time} on {devices(self.trainer)}"]))

    def test_best(self) -> dict[str, float]:
        """The test metrics; empty if there is no test."""
        trainer, data, best = self.trainer, self.datamodule, self.record.results["best"]
        has_test = is_overridden("test_step", self.model) and is_overridden("test_dataloader", data)
        if not (has_test and self.output.test and trainer.limit_test_batches):
            return {}
        if not best:
            print_once(f"testing the last epoch: {self.why_no_best()}")
        elif not best["monitor"]:
            print_once(f"testing epoch {best['epoch']}: the last one saved by --checkpoint")
        else:
            extreme = "smallest" if self.best.mode == "min" else "largest"
            value = f"{best['monitor']} {best['value']:.4f} ({extreme})"
            print_once(f"testing epoch {best['epoch']}: {value}")
        seed_generators(self.config.seed_everything, "test")
        tested = trainer.test(self.model, data, best.get("path"), False, weights_only=True)
        return dict(tested[0]) if tested else {}

    def why_no_best(self) -> str:
        if self.trainer.fast_dev_run or not self.last.saves:  # type: ignore[attr-defined]
            return "no checkpoint is saved (fast_dev_run, enable_checkpointing)"
        if self.best.save_top_k == 0:
            return "no best checkpoint is kept: save_top_k=0, or validation on the test set"
        if path := self.best.best_model_path:
            return f"the best checkpoint {path} was deleted or is in a different directory"
        return self.best.describe_unlogged(self.trainer)

    def describe_end(self, error: BaseException) -> BaseException:
        """The final error, with the command that resumes the run."""
        way_on = "start again"  # a run without a batch leaves no directory
        if self.method == "fit" and (self.run_dir / MODEL).is_file() and self.last.saves:
            way_on = f"resume with: {command()} fit --resume={shlex.quote(self.notes['run'])}"
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            print_once(f"stopped; {way_on}")
            # Lightning exits with 1 in its handler of Ctrl-C
            is_ctrl_c = KeyboardInterrupt in (type(error), type(error.__context__))
            return SystemExit(130 if is_ctrl_c else getattr(error, "code", None) or 1)
        if isinstance(error, DistError) and not is_initialized():  # no process group yet
            strategy: Any = self.trainer.strategy
            who = "process 0" if strategy.global_rank else "another process"
            seconds = strategy._timeout.total_seconds()
            error = PeerFailure(f"waited {seconds:.0f} s (`timeout`) for {who}")
        if isinstance(error, PeerFailure) or "/gloo/transport/" in str(error):
            return PeerFailure(f"{str(error).partition('. This is ')[0]}; {way_on}")
        if isinstance(error, OSError):
            reason = "\n".join([str(error).strip(), *getattr(error, "__notes__", ())])
            return UsageError(f"{reason}; after fixing this, {way_on}")
        return error


print_once = rank_zero_only(partial(print, flush=True))


def as_list(value: Any) -> list[Any]:
    """A list of callbacks or loggers, from a list, a single object or None."""
    return value if isinstance(value, list) else [] if value is None else [value]
