"""Processes that this package starts in a group of their own, so that they end together."""

import os
import signal
import subprocess


def kill_group(process: subprocess.Popen) -> None:
    """Kill a process started with `start_new_session`, and those it has started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
