"""`fit`, `validate`, `test` and `predict`: from the command line to the last line printed."""

import os
import shlex
import sys
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_mgpu.callbacks import EpochTimer, is_search
from lightning_mgpu.cli.checks import check_options
from lightning_mgpu.cli.options import read_options
from lightning_mgpu.cli.training_cli import TrainingCLI
from lightning_mgpu.devices import devices, is_sharded
from lightning_mgpu.malloc import keep_freed_memory
from lightning_mgpu.processes import leave_group
from lightning_mgpu.project import command
from lightning_mgpu.runs.best_checkpoint import RunCheckpoint
from lightning_mgpu.runs.directory import RUN_DIR_ENV, name_run_dir
from lightning_mgpu.runs.last_checkpoint import LastCheckpoint
from lightning_mgpu.runs.record import RunRecord, closing_line, fingerprint
from lightning_mgpu.runs.resume import RESUME_FLAG, check_can_resume, choose_checkpoint


def run_trainer(subcommand: str, args: list[str]) -> None:
    """Run a method of the Trainer with the options of a command line."""
    # The options: flags and files over a resumed run's or a checkpoint's, over the defaults.
    options = read_options(subcommand, args)
    cli = TrainingCLI(subcommand, options)  # parses
    config, saved_config = cli.config, cli.saved_config
    check_options(config, saved_config, options.pinned, options.source)

    # The run directory: named here, made by RunRecord when the data are there.
    notes: dict[str, str] = {}  # further lines of the run's header
    if (run_dir := options.resumed_run_dir) is None:
        run_dir = name_run_dir(config)
    else:
        # the processes that `ddp` starts get these arguments, and must not choose another run
        sys.argv[1:] = [subcommand, *args, f"{RESUME_FLAG}={run_dir}"]
        saved = choose_checkpoint(run_dir, options.base_config, config.trainer.max_epochs)
        config.ckpt_path = saved or config.ckpt_path
        if config.ckpt_path is None:
            notes["ckpt"] = "none: no epoch was over, training starts again"
    os.environ[RUN_DIR_ENV] = str(run_dir.absolute())  # for the same processes

    # The model, the data module and the Trainer.
    if config.malloc == "keep":
        keep_freed_memory()
    cli.build(run_dir)
    trainer, model, data, best = cli.trainer, cli.model, cli.datamodule, cli.run_checkpoint
    last = LastCheckpoint(best, config.seed_everything, saved_config)
    trainer.callbacks.insert(0, last)  # type: ignore[attr-defined]
    arguments = {name: config[name] for name in cli.method_options}

    with ExitStack() as cleanup:
        wandb_options = None if config.trainer.logger is False else config.wandb
        facts = {
            "command": f"{command()} {shlex.join([subcommand, *args])}",
            "options": options.given,
        }
        record = RunRecord(run_dir, saved_config, notes, wandb_options, cleanup, facts)
        if not config.trainer.fast_dev_run:  # which leaves nothing behind
            # before those that look for loggers when they are set up, as DeviceStatsMonitor
            trainer.callbacks.insert(1, record)  # type: ignore[attr-defined]
        if header := cli.callbacks["header"]:
            header.notes = notes

        # Evaluate; or train, test the best checkpoint and report.
        if subcommand != "fit":
            if config.ckpt_path is None:
                rank_zero_warn(f"{subcommand} without --ckpt_path: the weights are untrained.")
            getattr(trainer, subcommand)(model, datamodule=data, **arguments)
        else:
            check_can_resume(trainer.strategy, config.ckpt_path)
            train(trainer, model, data, best, arguments)
            if not is_search(trainer.callbacks):  # type: ignore[attr-defined]
                summary = summarize_training(trainer, model, last.why_stopped, record.results)
                metrics = record.results["test"] = test_best(trainer, model, data, best)
                report(trainer, summary, metrics, cli.callbacks["timer"])
    leave_group()


def train(
    trainer: Trainer,
    model: LightningModule,
    data: LightningDataModule,
    best: RunCheckpoint,
    arguments: dict[str, Any],
) -> None:
    """Fit; a run that is stopped prints the command that resumes it."""
    try:
        trainer.fit(model, datamodule=data, **arguments)
    except SystemExit:  # what Lightning makes of Ctrl-C, and of SIGTERM
        run_dir = shlex.quote(trainer.default_root_dir)
        way_on = f"go on with: {command()} fit {RESUME_FLAG}={run_dir}"
        print_once(trainer, f"stopped; {way_on if best.saves_last else 'it saves no last.ckpt'}")
        raise


def summarize_training(
    trainer: Trainer, model: LightningModule, why_stopped: str, results: dict[str, Any]
) -> list[str]:
    """The weights' fingerprint, and losses that are not finite: the test will load other weights.

    Prints why a run has stopped by itself.
    """
    if why_stopped:
        print_once(trainer, f"stopped early: {why_stopped}")
    weights = "none, as parameters are sharded"
    if not is_sharded(trainer):
        weights = results["fingerprint"] = fingerprint(model.parameters())
    for logger in trainer.loggers:
        if isinstance(logger, WandbLogger) and trainer.is_global_zero:
            logger.experiment.summary["fingerprint"] = weights
    broken = [
        f"{name} is {value.item()}"
        for name, value in trainer.callback_metrics.items()
        if "loss" in name and not value.isfinite()
    ]
    diverged = f"warning: {', '.join(broken)}: the training has diverged, see metrics.csv"
    return [f"fingerprint: {weights}", *([diverged] if broken else [])]


def test_best(
    trainer: Trainer, model: LightningModule, data: LightningDataModule, best: RunCheckpoint
) -> dict[str, float]:
    """Test the best checkpoint, or the last weights if no metric says which one is the best.

    Returns the metrics by name: none without a test, or with `--trainer.limit_test_batches=0`.
    """
    if not (is_overridden("test_step", model) and is_overridden("test_dataloader", data)):
        return {}
    if is_sharded(trainer):  # FSDP would split the module's shards once more
        path = shlex.quote(best.best_path or best.last_model_path or "FILE")
        line = f"{command()} test --ckpt_path={path}"
        print_once(trainer, f"not tested, as parameters are sharded; test with: {line}")
        return {}
    print_once(trainer, f"testing {best.describe()}")
    tested = trainer.test(model, data, ckpt_path=best.best_path, verbose=False, weights_only=True)
    return dict(tested[0]) if tested else {}


def report(
    trainer: Trainer, summary: list[str], metrics: dict[str, float], timer: EpochTimer | bool
) -> None:
    """Print the last lines of a run, the book's as the very last one."""
    seconds = timer.seconds_per_epoch if isinstance(timer, EpochTimer) else None
    lines = [*summary, closing_line(metrics, seconds, str(devices(trainer)))]
    print_once(trainer, "\n".join(lines))


def print_once(trainer: Trainer, text: str) -> None:
    """Print in the first process."""
    if trainer.is_global_zero:
        print(text, flush=True)
