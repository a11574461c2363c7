"""Weights & Biases that never asks, never holds up training and never ends a run.

    --wandb.project=fashion --wandb.name=first-try --wandb.tags='[lenet, book]'
    --wandb.mode=offline                 # record on disk; `wandb sync` later
    --no-wandb                           # or --wandb.mode=disabled

`auto`, the default, goes online where somebody is logged in and the server answers, else offline. Uploads happen in a
process of W&B's own; training hands it records and never waits for them.
"""

import contextlib
import netrc
import os
import secrets
import shlex
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from lightning.pytorch.loggers import WandbLogger

from lightning_mgpu.runs.files import replace_text
from lightning_mgpu.runs.flatten import flatten

if TYPE_CHECKING:
    from wandb import Run

PROJECT = "lightning-mgpu"
REACH_SECONDS = 3.0  # how long the server may take to answer anything before a run goes offline
INIT_SECONDS = 8.0  # a server that answered may still take that long to make a run; then the run goes offline
RUN_ID = "wandb/run_id"  # in the run directory: what a resumed run continues


@dataclass
class Tracking:
    """What Weights & Biases is told about a run. What is left out may stand in its own variables, as `WANDB_NOTES`.

    Args:
        mode: `auto` goes online with a login and a server that answers, else offline. `WANDB_MODE` goes before `auto`.
        project: The project; created if there is none of this name. Left out: `lightning-mgpu`.
        name: Shown name of the run; the run directory's if left out.
        group: Runs of one group are shown together.
        tags: Labels to filter runs by.
        entity: Team or user the run belongs to.
        log_model: Upload the best checkpoint as an artifact when `fit` ends; needs to be online.
        finish_timeout: Seconds that the end of a run may wait for uploads; `wandb sync` uploads what is left.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str | None = None
    name: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    entity: str | None = None
    log_model: bool = False
    finish_timeout: float = 30.0


def start_run(tracking: Tracking, run_dir: Path, config: dict[str, Any]) -> tuple[WandbLogger | None, str]:
    """Start the one W&B run of a job, in its first process, or continue the one that `run_dir` had before.

    Returns its logger, `None` where there is no run, and a line that says where it records and why.
    """
    try:
        mode, reason = choose_mode(tracking.mode)
        if mode == "disabled":
            return None, f"off ({reason})"
        if mode == "online":
            try:
                logger = _init(mode, tracking, run_dir, config)
                return logger, f"online, {logger.experiment.url}"
            except Exception as error:  # refused login, dead server: the run goes on without it
                reason = _in_one_line(error)
                import wandb

                in_time(wandb.teardown, REACH_SECONDS)  # its service still holds the run's id
        logger = _init("offline", tracking, run_dir, config)
        parts = f"{shlex.quote(f'{run_dir}/wandb')}/offline-run-*"  # a resumed run has several
        nothing = "; --wandb.log_model uploads nothing" if tracking.log_model else ""
        return logger, f"offline ({reason}){nothing}; upload it with: wandb sync {parts}"
    except Exception as error:  # a WANDB_BASE_URL that is none, say: whatever it is, it ends nothing
        return None, f"off ({_in_one_line(error)})"


def choose_mode(mode: str) -> tuple[str, str]:
    """Resolve `auto` and `online` to online, offline or disabled, with the reason in words."""
    reason = f"--wandb.mode={mode}"
    if mode == "auto" and (from_environment := os.environ.get("WANDB_MODE")):
        mode, reason = from_environment, f"WANDB_MODE={from_environment}"
    if mode not in ("auto", "online"):
        return {"dryrun": "offline"}.get(mode, mode), reason
    import wandb  # takes half a second

    url = wandb.setup(wandb.Settings(silent=True)).settings.base_url
    host = str(urlsplit(url).hostname)
    if not _is_logged_in(host):
        return "offline", "no login"
    try:
        urllib.request.urlopen(url, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # the server is there; W&B finds out what it is ready for
    except (OSError, ValueError) as error:
        return "offline", f"{host} cannot be reached: {getattr(error, 'reason', error)}"
    return "online", "logged in"


def upload_model(run: "Run", path: str, seconds: float) -> None:
    """The checkpoint as an artifact of an online run; a failure is one line, and ends nothing."""
    problem = in_time(lambda: run.log_model(path, f"model-{run.id}", aliases=["best"]), seconds)
    if problem:
        print(f"wandb:    the best checkpoint, {path}, was not uploaded: {problem}", flush=True)


def finish(run: "Run") -> None:
    """End a run; if an online one could not upload everything in time, say how to do so later."""
    try:
        run.finish()
    except TimeoutError:
        path = shlex.quote(str(Path(run.settings.sync_dir)))
        print(f"wandb:    not everything was uploaded; the rest: wandb sync --include-online {path}", flush=True)


def in_time(call: Callable[[], object], seconds: float) -> str:
    """Make a call that might wait for a server for ever; returns what went wrong, '' if nothing did."""
    problem = f"the server does not answer within {seconds:g} s"

    def work() -> None:
        nonlocal problem
        try:
            call()
            problem = ""
        except (Exception, SystemExit) as error:
            problem = _in_one_line(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return problem


def _init(mode: str, tracking: Tracking, run_dir: Path, config: dict[str, Any]) -> WandbLogger:
    import wandb

    # W&B reports on itself to the same server, and a process that ends waits ten seconds for that
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    wandb.setup(wandb.Settings(silent=True))  # else W&B warns of an argument that Lightning's logger has
    environment = os.environ.get  # W&B's own variables, which `wandb agent` sets too, where nothing else is said
    saved = run_dir / RUN_ID
    logger = WandbLogger(  # with resume="allow": the first process with this id creates the run, later ones go on
        project=tracking.project or environment("WANDB_PROJECT") or PROJECT,
        name=tracking.name or environment("WANDB_NAME") or run_dir.name,
        id=saved.read_text().strip() if saved.exists() else environment("WANDB_RUN_ID") or secrets.token_hex(4),
        save_dir=run_dir,
        mode=mode,
        group=tracking.group,
        tags=tracking.tags or None,
        entity=tracking.entity,
        config=flatten(config),
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_SECONDS,
            finish_timeout=tracking.finish_timeout,
            finish_timeout_raises=True,
        ),
    )
    replace_text(saved, f"{logger.experiment.id}\n")
    return logger


def _is_logged_in(host: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    with contextlib.suppress(OSError, netrc.NetrcParseError):
        return not {host, "api.wandb.ai"}.isdisjoint(netrc.netrc(os.environ.get("NETRC")).hosts)
    return False


def _in_one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]
