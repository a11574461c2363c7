"""From arguments to a subcommand, without other packages' messages that say nothing to a user."""

import importlib
import logging
import os
import re
import signal
import sys
import warnings

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.cli.arguments import given_options, join, prepare, take_resume, with_defaults
from lightning_mgpu.cli.error_messages import SWITCH, UsageError, did_you_mean, one_line_errors
from lightning_mgpu.cli.help import RUNS, TOOLS, subcommands
from lightning_mgpu.cli.training_cli import CLI
from lightning_mgpu.cli.yaml_files import read_config
from lightning_mgpu.processes import leave_group
from lightning_mgpu.runs.checkpoint_file import flatten, read_checkpoint, saved_config
from lightning_mgpu.runs.resume import FLAG, what_stays

# Deprecations in torch and Lightning, advice that does not fit data in memory: nothing to act on.
WARNINGS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning 2.6 on torch 2.15
    r"The '\w+_dataloader' does not have many workers",  # they are slower for batches from memory
    r"The number of training batches \(\d+\) is smaller than the logging interval",  # epochs are
    r"(Checkpoint|Experiment logs) directory .* exists and is not empty",  # of a resumed run
    r"Couldn't infer the batch indices fetched from your dataloader",  # they are in its order
    r"GPU available but not used",  # of a run on the CPU that was asked for
    r"\s*Unable to serialize instance",  # see parser.py
)
# How the lines begin that say what the run header says better, or praise other products.
INFO = (
    *("GPU available: ", "TPU available: ", "💡 Tip: ", "Seed set to "),
    *(
        "Initializing distributed: ",
        "----------",
        "distributed_backend=",
        "All distributed processes registered",
    ),
    *("`Trainer.fit` stopped: `max_", "`Trainer(limit_", "Loading `train_dataloader` to estimate"),
    *("Restoring states from", "Restored all states from", "Loaded model weights from"),
    "LOCAL_RANK: ",
    "You are using a CUDA device (",  # with Tensor Cores: docs/measurements.md says what uses them
    "Finished batch size finder, will continue with full run",  # which it does not
    "`weights_only` was not set, defaulting to `False`.",  # Lightning's searches, of their own file
)


def run(args: list[str]) -> None:
    """Run a command line."""
    quieten()
    sys.path.insert(0, os.getcwd())  # models of one's own are found here; `python -m` does the same
    with one_line_errors(SWITCH in args):
        subcommand, others = args[0], args[1:]
        if subcommand not in subcommands():
            told = f"no subcommand {subcommand!r}. {did_you_mean(subcommand, subcommands())}"
            raise UsageError(f"{told} There are {', '.join(subcommands())}")
        if subcommand in RUNS:
            _run(subcommand, join(others))
            return
        # as Ctrl-C, which leaves no process behind
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        importlib.import_module(TOOLS[subcommand]).main(
            [argument for argument in others if argument != SWITCH]
        )


def _run(subcommand: str, args: list[str]) -> None:
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        # Ctrl-C reaches all processes: the first one ends the others
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    others, run_dir = take_resume(args) if subcommand == "fit" else (args, None)
    given, saved = given_options(others), {}
    if run_dir:
        # the processes that `ddp` starts get these arguments, and must not choose another run
        sys.argv[1:] = [subcommand, *others, f"{FLAG}={run_dir}"]
        first = read_config(str(run_dir / "config.yaml"))
        before = what_stays(first)
    else:
        if path := given.get("ckpt_path"):
            saved = saved_config(read_checkpoint(path, to_train_on=subcommand == "fit"), path)
        first = with_defaults(given, saved)
        if (model := saved.get("model")) and subcommand != "fit":
            # its arguments, such as flip_tta, may be others in a test
            model = {"class_path": model["class_path"]}
        before = flatten({"model": model}) if model else {}
    CLI([subcommand, *prepare(others, given, first)], run_dir, before)
    leave_group()


def quieten() -> None:
    """Filter the messages above, and no others."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(
                lambda record: (
                    not re.sub(r"^(\[rank: \d+\] |\s)*", "", record.getMessage()).startswith(INFO)
                )
            )
