"""Calls into W&B that ask its server, and would wait for ever: artifacts, and tables, which are artifacts."""

import queue
import threading
from collections.abc import Callable

from lightning_mgpu.redact import redact

SECONDS = 10.0


def in_time(what: str, call: Callable[[], object], seconds: float = SECONDS) -> bool:
    """Make a call in a thread that nothing waits for longer than this; a failure is one line, and ends nothing."""
    answer: queue.Queue[str | None] = queue.Queue()

    def work() -> None:
        try:
            call()
            answer.put(None)
        except Exception as error:  # whatever a server can do wrong must not end a run that is trained
            answer.put(redact(f"{type(error).__name__}: {error}".splitlines()[0]))

    threading.Thread(target=work, daemon=True).start()
    try:
        problem = answer.get(timeout=seconds)
    except queue.Empty:
        problem = f"the server does not answer within {seconds:g} s"
    if problem:
        print(f"wandb:    {what} was not uploaded: {problem}", flush=True)
    return problem is None
