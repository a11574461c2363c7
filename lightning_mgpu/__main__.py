"""`python -m lightning_mgpu` and the console script `lightning-mgpu`: from arguments to `CLI`, or to a tool."""

import importlib
import os
import signal
import sys

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.arguments import (
    check_configs,
    check_values,
    with_shipped_configs,
    with_strategy_class,
    with_subcommand_first,
)
from lightning_mgpu.cli import CLI
from lightning_mgpu.clusters import set_rank
from lightning_mgpu.config_file import SUBCOMMANDS
from lightning_mgpu.console import quieten
from lightning_mgpu.errors import SWITCH, UsageError, one_line_errors
from lightning_mgpu.explain import TOOLS
from lightning_mgpu.from_checkpoint import with_checkpoint_config
from lightning_mgpu.processes import exit_on_sigterm, leave_group
from lightning_mgpu.resume import with_resumed_run
from lightning_mgpu.slurm import with_requeued_job


def main() -> None:
    quieten()
    sys.path.insert(0, os.getcwd())  # models of one's own are found here; `python -m` does the same
    with one_line_errors(SWITCH in sys.argv):
        set_rank()
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes: the first one ends the others
        if sys.argv[1:2] and sys.argv[1] in TOOLS:
            exit_on_sigterm()
            tool = importlib.import_module(TOOLS[sys.argv[1]])  # needs matplotlib, and more
            tool.main([argument for argument in sys.argv[2:] if argument != SWITCH])
            return
        sys.argv[1:] = with_subcommand_first(check_values(sys.argv[1:]))
        sys.argv[1:] = with_resumed_run(with_requeued_job(sys.argv[1:]))
        sys.argv[1:] = with_strategy_class(with_shipped_configs(sys.argv[1:])) or ["--help"]
        sys.argv[1:] = with_checkpoint_config(sys.argv[1:])
        if sys.argv[1] not in (*SUBCOMMANDS, "-h", "--help", "--version") and sys.argv[1][:1] == "-":
            raise UsageError(f"{sys.argv[1]}: name a subcommand first, one of {', '.join((*SUBCOMMANDS, *TOOLS))}")
        check_configs()
        CLI()
        leave_group()


if __name__ == "__main__":
    main()
