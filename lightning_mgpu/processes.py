"""Processes end together: those started here in a group of their own, those that train together."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from typing import IO, Any

import torch.distributed as dist


def run_in_group(command: Sequence[str], output: IO[str] | None = None) -> int:
    """Run a command to its end, with its output in a file if one is given; returns its status.

    On Ctrl-C, or any other exception, the command is killed with the processes it has started.
    """
    with process_group(command, stdout=output, stderr=output and subprocess.STDOUT) as process:
        return int(process.wait())


@contextlib.contextmanager
def process_group(command: Sequence[str], **kwargs: Any) -> Iterator[subprocess.Popen]:
    """Start a command, as `subprocess.Popen`; the block's end kills it and those it has started."""
    process = subprocess.Popen(
        command, start_new_session=True, **{"stdin": subprocess.DEVNULL, **kwargs}
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def leave_group() -> None:
    """Leave the group of processes at the end of a run.

    Lightning does so for NCCL alone. Gloo's threads may still hold tensors of the last exchange
    while Python ends, which at times ends a finished process with SIGABRT (pytorch/pytorch#179291).
    """
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
