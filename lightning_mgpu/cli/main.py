"""From arguments to a subcommand."""

import importlib
import os
import signal
import sys

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.cli.arguments import prepare, split_subcommand
from lightning_mgpu.cli.console import quieten
from lightning_mgpu.cli.errors import SWITCH, UsageError, one_line_errors
from lightning_mgpu.cli.lightning import CLI
from lightning_mgpu.cli.subcommands import RUNS, subcommands, tools
from lightning_mgpu.cli.suggest import did_you_mean
from lightning_mgpu.runs.launchers import set_rank
from lightning_mgpu.runs.processes import exit_on_sigterm, leave_group


def run(args: list[str]) -> None:
    """Run a command line."""
    quieten()
    sys.path.insert(0, os.getcwd())  # models of one's own are found here; `python -m` does the same
    with one_line_errors(SWITCH in args):
        set_rank()
        if args[0] in tools():
            exit_on_sigterm()
            tool = importlib.import_module(tools()[args[0]])
            tool.main([argument for argument in args[1:] if argument != SWITCH])
            return
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the first one ends the others
        subcommand, others = split_subcommand(args)
        if subcommand not in RUNS:
            near = f"no subcommand {subcommand!r}: {did_you_mean(subcommand, subcommands())}" if subcommand else ""
            raise UsageError(f"{near or 'name a subcommand first.'} There are {', '.join(subcommands())}")
        sys.argv[1:] = [subcommand, *prepare(subcommand, others)]  # also for the processes that `ddp` starts
        CLI(sys.argv[1:])
        leave_group()
