"""Dispatches the command line to a subcommand, and filters messages that need no action."""

import logging
import os
import pkgutil
import re
import sys
import warnings
from typing import Any

from lightning_mgpu.cli.help import TOOLS, TRAINER_SUBCOMMANDS, short_help, subcommands
from lightning_mgpu.tools import PACKAGE, UsageError, command, program, renamed

# Deprecations in torch and Lightning, and advice that does not apply to data in memory.
WARNINGS = (
    r"`isinstance\(treespec, LeafSpec\)` is deprecated",  # Lightning 2.6 on torch 2.15
    r"The '\w+_dataloader' does not have many workers",  # they are slower for batches from memory
    r"The number of training batches \(\d+\) is smaller than the logging interval",  # epochs are
    r"Checkpoint directory .* exists and is not empty",  # of a resumed run
    r"Couldn't infer the batch indices fetched from your dataloader",  # they are in its order
    r"GPU available but not used",  # the CPU was requested
    r"Be aware that when using `ckpt_path`, callbacks used to create the checkpoint",
    r"\s*Unable to serialize instance",  # of a default, in config.yaml
)
# Beginnings of lines that repeat the run header or advertise other products. After Ctrl-C our own
# line shows how to resume; docs/measurements.md covers Tensor Cores.
INFO = re.compile(
    r"(\[rank: \d+\] |\s)*("
    r"GPU available|TPU available|💡 Tip|Seed set to|Using (bfloat16|16bit)|-----|LOCAL_RANK: |"
    r"distributed_backend=|All distributed proc|`Trainer.fit` stopped: `max_|"
    r"`Trainer\(limit_\w+=1\.0|"
    r"Initializing distributed|Loading `train_dataloader` to|"
    r"Restor|Loaded model weights|Found current_model_state|"
    r"`weights_only` was not set|You are using a CUDA device \(|Detected KeyboardInterrupt)"
)


def main(cli: Any = None) -> None:
    """Run the command line in `sys.argv`, optionally with a subclass `cli` of `TrainingCLI`."""
    args = sys.argv[1:]
    if text := short_help(args):
        print(text, end="")
        return
    # these import torch, which takes seconds
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from lightning_mgpu.cli.errors import TRACEBACK_FLAG, one_line_errors
    from lightning_mgpu.cli.training_cli import TrainingCLI, run_trainer
    from lightning_mgpu.runs.record import stop_on_signals

    if getattr(rank_zero_only, "rank", 0) == 0:  # provisional: Lightning sets it later
        rank_zero_only.rank = int(os.environ.get("NODE_RANK", 0))  # type: ignore[attr-defined]
    with one_line_errors(TRACEBACK_FLAG in args):
        hide_messages()
        sys.path.insert(0, os.getcwd())  # finds your models, like `python -m`
        stop_on_signals()
        if cli is not None and not (isinstance(cli, type) and issubclass(cli, TrainingCLI)):
            raise UsageError(f"main(cli={cli!r}): must be a subclass of TrainingCLI")
        if "\0" in (text := " ".join(args)):
            raise UsageError(f"{text!r}: an argument contains a NUL character")
        subcommand, *others = [arg for arg in args if arg != TRACEBACK_FLAG]
        if subcommand not in subcommands():
            hint = renamed(subcommand) or f"use {', '.join(subcommands())}"
            raise UsageError(f"no subcommand {subcommand!r}: {hint}")
        if subcommand in TRAINER_SUBCOMMANDS:
            run_trainer(subcommand, others, cli)
        elif cli and program() == PACKAGE and subcommand in ("benchmark", "network", "sweep"):
            fix = "call main(cli=...) in a package's __main__.py"
            raise UsageError(f"{subcommand} would start {command()}, without your cli: {fix}")
        else:
            pkgutil.resolve_name(TOOLS[subcommand])(others)


def hide_messages() -> None:
    """Filter only the messages above."""
    logging.raiseExceptions = False  # on a full disk, each of W&B's lines would be a traceback
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message=message)
    for name in ("lightning.pytorch", "lightning.fabric"):
        for handler in logging.getLogger(name).handlers:
            handler.addFilter(lambda record: not INFO.match(record.getMessage()))
