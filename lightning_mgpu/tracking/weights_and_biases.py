"""Weights & Biases that never asks, never waits and never stops a run.

    --wandb.project=fashion --wandb.name=first-try --wandb.tags='[lenet, book]'
    --wandb.mode=offline                 # record on disk; `wandb sync` later
    --no-wandb                           # or --wandb.mode=disabled

`auto`, the default, goes online where somebody is logged in and the server answers, else offline.
"""

import netrc
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from wandb import Run

REACH_SECONDS = 3.0  # how long the server may take to accept a connection before a run goes offline


@dataclass
class Tracking:
    """What Weights & Biases is told about a run.

    Args:
        mode: `auto` goes online with a login and a server that answers, else offline. `WANDB_MODE` goes before `auto`.
        project: The project; created if there is none of this name.
        name: Shown name of the run; the run directory's if left out.
        group: Runs of one group are shown together.
        tags: Labels to filter runs by.
        notes: A longer description.
        entity: Team or user the run belongs to.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str = "lightning-mgpu"
    name: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    notes: str | None = None
    entity: str | None = None


def start_run(tracking: Tracking, run_dir: Path, job_type: str, config: dict[str, Any]) -> tuple["Run | None", str]:
    """Start the one W&B run of a job, in its first process.

    Returns:
        The run, `None` where tracking is disabled, and a line that says where it is recorded and why.
    """
    mode, reason = choose_mode(tracking.mode)
    if mode == "disabled":
        return None, f"off ({reason})"
    import wandb  # takes half a second, and is not installed everywhere

    def init(mode: str) -> "Run":
        return wandb.init(
            mode=mode,  # type: ignore[arg-type]
            project=tracking.project,
            name=tracking.name or run_dir.name,
            group=tracking.group,
            tags=tracking.tags,
            notes=tracking.notes,
            entity=tracking.entity,
            job_type=job_type,
            dir=str(run_dir),
            config=config,
            settings=wandb.Settings(silent=True, console="off", init_timeout=20),
        )

    if mode == "online":
        try:
            run = init("online")
            return run, f"online, {run.url}"
        except wandb.errors.Error as error:  # refused login, dead server: the run goes on without it
            reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
    run = init("offline")
    return run, f"offline ({reason}); upload it with: wandb sync {Path(run.settings.sync_dir)}"


def choose_mode(mode: str) -> tuple[str, str]:
    """Resolve `auto` to online, offline or disabled, with the reason in words; asks nobody and waits three seconds."""
    if mode != "auto":
        return mode, f"--wandb.mode={mode}"
    if from_environment := {"dryrun": "offline"}.get(os.environ.get("WANDB_MODE", ""), os.environ.get("WANDB_MODE")):
        return from_environment, f"WANDB_MODE={from_environment}"
    import wandb

    server = urlsplit(wandb.setup().settings.base_url)
    if not _is_logged_in(str(server.hostname)):
        return "offline", "no login"
    try:
        port = server.port or (443 if server.scheme == "https" else 80)
        socket.create_connection((str(server.hostname), port), timeout=REACH_SECONDS).close()
    except OSError as error:
        return "offline", f"{server.hostname} cannot be reached: {error}"
    return "online", "logged in"


def _is_logged_in(host: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        hosts = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    return host in hosts or "api.wandb.ai" in hosts
