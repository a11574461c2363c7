"""Calls into W&B that may wait for ever for its server (artifacts, and tables, which are some) or its service."""

import queue
import threading
from collections.abc import Callable

SECONDS = 10.0


def in_time(what: str, call: Callable[[], object], seconds: float = SECONDS) -> None:
    """Make a call that uploads something, within this time; a failure is one line, and ends nothing."""
    if problem := wait_for(call, seconds):
        print(f"wandb:    {what} was not uploaded: {problem}", flush=True)


def wait_for(call: Callable[[], object], seconds: float) -> str | None:
    """Make a call in a thread that nothing waits for longer than this; returns what went wrong in one line."""
    answer: queue.Queue[str | None] = queue.Queue()

    def work() -> None:
        try:
            call()
            answer.put(None)
        except (Exception, SystemExit) as error:  # whatever a server can do wrong must not end a run that is trained
            answer.put(f"{type(error).__name__}: {error}".splitlines()[0])

    threading.Thread(target=work, daemon=True).start()
    try:
        return answer.get(timeout=seconds)
    except queue.Empty:
        return f"the server does not answer within {seconds:g} s"
