"""Processes that this package starts in a group of their own, so that they end together."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from typing import IO, NoReturn

STOP_SECONDS = 30.0  # what a process may take to stop by itself on Ctrl-C


def run_in_group(command: Sequence[str], output: IO[str] | None = None) -> int:
    """Run a command to its end, with its output in a file if one is given; returns its status.

    On Ctrl-C, or any other exception, it is stopped with the processes it has started: killed after `STOP_SECONDS`.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=output, stderr=output and subprocess.STDOUT, start_new_session=True
    )
    try:
        process.wait()
    except BaseException:
        os.killpg(process.pid, signal.SIGINT)
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):  # then it is killed
                process.wait(STOP_SECONDS)
        finally:
            kill_group(process)
        raise
    kill_group(process)
    return process.returncode


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process started with `start_new_session`, and those it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def exit_on_sigterm() -> None:
    """SIGTERM, and a closed terminal's SIGHUP, end this process by an exception, so that it leaves none behind."""
    signal.signal(signal.SIGTERM, _exit)
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which nohup asks for
        signal.signal(signal.SIGHUP, _exit)


def _exit(signum: int, frame: object) -> NoReturn:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # of a terminal and of its shell: the second must not disturb the end
    sys.exit(128 + signum)
