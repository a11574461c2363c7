"""Whether to go online: somebody is logged in, and the W&B server answers now. Asks nobody and waits three seconds."""

import netrc
import os
import queue
import threading
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from lightning_mgpu.redact import redact

REACH_SECONDS = 3.0  # how long the server may take to answer anything before a run goes offline


def choose_mode(mode: str) -> tuple[str, str]:
    """Resolve `auto` and `online` to online, offline or disabled, with the reason in words."""
    reason = f"--wandb.mode={mode}"
    if mode == "auto" and (from_environment := os.environ.get("WANDB_MODE")):
        mode = {"dryrun": "offline"}.get(from_environment, from_environment)
        reason = f"WANDB_MODE={mode}"
    if mode not in ("auto", "online"):
        return mode, reason
    import wandb

    url = wandb.setup(wandb.Settings(silent=True)).settings.base_url
    host = str(urlsplit(url).hostname)
    if not _is_logged_in(host):
        return "offline", "no login"
    if problem := _problem(url):
        return "offline", f"{host} {redact(problem)}"
    return "online", "logged in"


def _is_logged_in(host: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return host in hosts or "api.wandb.ai" in hosts


def _problem(url: str) -> str | None:
    """Why the server cannot be used, `None` if it answers; through the proxies of the environment, as W&B does.

    In a thread, because looking up a name has no timeout, nor has a server that sends a byte a second.
    """
    answer: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=lambda: answer.put(_ask(url)), daemon=True).start()
    try:
        return answer.get(timeout=REACH_SECONDS)
    except queue.Empty:
        return _too_slow()


def _ask(url: str) -> str | None:
    query = urllib.request.Request(
        f"{url}/graphql", b'{"query": "query Viewer { viewer { id } }"}', {"Content-Type": "application/json"}
    )
    try:
        urllib.request.urlopen(query, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError as error:  # it is there; whether it takes the login, W&B finds out
        return f"answers with HTTP {error.code}" if error.code >= 500 else None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            return _too_slow()
        return None if "CERTIFICATE" in str(reason) else f"cannot be reached: {reason}"
    return None


def _too_slow() -> str:
    return f"does not answer within {REACH_SECONDS:g} s"
