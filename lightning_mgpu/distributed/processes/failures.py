"""Waiting for other processes, and the error if one of them has exited or does not respond.

A process waits in Python: C++ code would see neither Ctrl-C nor SIGTERM.
"""

import atexit
import ctypes
import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch.distributed as dist
from lightning.fabric.utilities.distributed import _destroy_dist_connection
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException

SHARES_CORES = "LIGHTNING_MGPU_SHARES_CORES"  # set if machines are emulated on this one
MAIN_PROCESS = "LIGHTNING_MGPU_MAIN_PROCESS"  # the process id of the launching process
SET_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of prctl
ENDED = "exited unexpectedly; see its output above (out of memory?)"
CAUSES = (
    "Common causes: a slow operation, such as a download; only one process saves a checkpoint, "
    "sets `should_stop`, freezes a parameter or logs with sync_dist=True; only some losses have a "
    "weight (all losses of an optimizer step need one, or none)"
)


class PeerFailure(RuntimeError):
    """Another process has exited, timed out, or is at a different synchronization point."""


def wait(control: Any, late: Callable[[], Sequence[int]], pause: Callable[[bool], None]) -> None:
    """Wait until no process is late.

    Args:
        late: Returns the late ranks, or all other ranks if these are unknown.
        pause: Waits for at most 20 ms. Its argument is whether the wait has just begun.

    Raises:
        PeerFailure: After the timeout, or when another process has exited.
    """
    timeout, cells = control.timeout, control.cells
    start = looked = time.monotonic()
    cpu_seconds = time.thread_time()
    while late():
        now = time.monotonic()
        pause(now < start + 0.05)
        if now < looked + 0.5:
            continue
        looked = now
        if control.trainer.received_sigterm:  # Lightning would stop only after this step
            raise SIGTERMException
        missing = late()
        for process in missing if cells else ():
            # an exited process has no program, even before its parent has reaped it
            if not os.path.exists(f"/proc/{cells.process_ids[process]}/exe"):
                raise PeerFailure(f"process {process} {ENDED}")
        if missing and now > start + timeout:
            who = " or ".join(map(str, missing))
            raise PeerFailure(f"waited {timeout:.0f} s (`timeout`) for process {who}. {CAUSES}")
    control.seconds_in_wait += time.monotonic() - start
    control.cpu_seconds_in_wait += time.thread_time() - cpu_seconds


def handle_signals(trainer: Any) -> None:
    """Replace Lightning's SIGTERM handler and its check before every batch, which broadcast.

    The main process forwards the signal to the processes that it launched. All stop after a batch.
    """
    environment = trainer.strategy.cluster_environment
    if trainer.world_size > 1 and getattr(environment, "auto_requeue", False):
        raise MisconfigurationException(
            "SLURM's auto_requeue is not supported: it saves a checkpoint within a step, which may "
            "deadlock. Use plugins=SLURMEnvironment(auto_requeue=False)."
        )
    connector, launcher = trainer._signal_connector, trainer.strategy.launcher

    def note(number: int, frame: Any) -> None:
        if not connector.received_sigterm and launcher is not None:
            launcher.kill(number)
        connector.received_sigterm = True

    connector._sigterm_notifier_fn = note
    trainer.fit_loop.epoch_loop._broadcast_sigterm_tensor = lambda: None


def end_with_main_process(is_on: bool = True) -> None:
    """Have the kernel kill this process when the main process exits."""
    if hasattr(os, "memfd_create"):  # on Linux
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL if is_on else 0)
        if is_on and str(os.getppid()) != os.environ[MAIN_PROCESS]:
            raise PeerFailure("the main process exited")


@cache
def host_group(world: Any, timeout: Any) -> Any:
    """A gloo group of all processes, shared by all Trainers of a script: it has threads."""
    atexit.register(_destroy_dist_connection)  # else gloo's threads might abort the exit
    return dist.new_group(backend="gloo", timeout=2 * timeout)  # `wait` times out first


def drop_group(group: Any, is_interrupted: bool) -> None:
    """Destroy the process group of one fit.

    After an exception, messages may be in flight. Then the group is never freed, because gloo's
    destructor would wait for them.
    """
    if is_interrupted:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    elif group is not None:
        dist.destroy_process_group(group)
