"""From arguments to a subcommand."""

import importlib
import os
import signal
import sys

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.cli.arguments import join, prepare, take_resume
from lightning_mgpu.cli.console import quieten
from lightning_mgpu.cli.errors import SWITCH, UsageError, one_line_errors
from lightning_mgpu.cli.lightning import CLI
from lightning_mgpu.cli.subcommands import RUNS, subcommands, tools
from lightning_mgpu.cli.suggest import did_you_mean
from lightning_mgpu.runs.processes import leave_group
from lightning_mgpu.runs.resume import FLAG


def run(args: list[str]) -> None:
    """Run a command line."""
    quieten()
    sys.path.insert(0, os.getcwd())  # models of one's own are found here; `python -m` does the same
    with one_line_errors(SWITCH in args):
        subcommand, others = args[0], args[1:]
        if subcommand in tools():
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, which leaves no process behind
            tool = importlib.import_module(tools()[subcommand])
            tool.main([argument for argument in others if argument != SWITCH])
            return
        if subcommand not in RUNS:
            near = f"no subcommand {subcommand!r}: {did_you_mean(subcommand, subcommands())}"
            told = "name a subcommand first." if subcommand.startswith("-") else near
            raise UsageError(f"{told} There are {', '.join(subcommands())}")
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the first one ends the others
        others, run_dir = take_resume(subcommand, join(others))
        # the processes that `ddp` starts get these arguments, and must not choose another run
        sys.argv[1:] = [subcommand, *others, *([f"{FLAG}={run_dir}"] if run_dir else [])]
        CLI([subcommand, *prepare(subcommand, others, run_dir)], run_dir)
        leave_group()
