"""Weights & Biases that never asks and never holds up training.

    --wandb.project=fashion --wandb.name=first-try
    --wandb.mode=offline                 # record on disk; `wandb sync` later
    --no-wandb                           # or --wandb.mode=disabled

`auto`, the default, goes online if there is a login and the server answers, else offline. W&B reads
other settings from its own variables: `WANDB_ENTITY`, `WANDB_RUN_GROUP`, `WANDB_TAGS`,
`WANDB_NOTES`.
"""

import os
import shlex
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger

from lightning_mgpu.files import replace_text
from lightning_mgpu.project import project_name
from lightning_mgpu.runs.checkpoint_file import flatten

REACH_SECONDS = 3.0  # how long the server may take to answer anything before a run goes offline
# a server that answered may still take that long to make a run; then the run goes offline
INIT_SECONDS = 8.0
FINISH_SECONDS = 30.0  # how long the end of a run waits for uploads
RUN_ID = "wandb/run_id"  # in the run directory: what a resumed run continues


@dataclass
class WandbOptions:
    """The options of Weights & Biases.

    Args:
        mode: `auto` goes online with a login and an answering server; `WANDB_MODE` goes before it.
        project: The project; `WANDB_PROJECT` or the program's name, `lightning-mgpu`, if left out.
        name: Shown name of the run; the run directory's if left out.
        log_model: Upload the best and the last epoch's checkpoints as artifacts after training.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str | None = None
    name: str | None = None
    log_model: bool = False


def start_run(
    tracking: WandbOptions, run_dir: Path, config: dict[str, Any]
) -> tuple[WandbLogger | None, str]:
    """Start the one W&B run of a job, in its first process, or continue the one `run_dir` had.

    Returns its logger, `None` where there is no run, and a line that says where it records and why.
    """
    reason = ""
    for attempt in (tracking.mode, "offline"):  # after a refused login, a dead server
        try:
            mode, reason = choose_mode(attempt, reason)
            if mode == "disabled":
                return None, f"off ({reason})"
            logger = _init(mode, tracking, run_dir, config)
            if mode == "online":
                return logger, f"online, {logger.experiment.url}"
            parts = f"{shlex.quote(f'{run_dir}/wandb')}/offline-run-*"  # a resumed run has several
            return logger, f"offline ({reason}); upload it with: wandb sync {parts}"
        except Exception as error:  # such as a wrong WANDB_BASE_URL: it must not end the run
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
    return None, f"off ({reason})"


def choose_mode(mode: str, reason: str = "") -> tuple[str, str]:
    """Resolve `auto` and `online` to online, offline or disabled, with the reason in words."""
    reason = reason or f"--wandb.mode={mode}"
    if mode == "auto" and (from_environment := os.environ.get("WANDB_MODE")):
        mode, reason = from_environment, f"WANDB_MODE={from_environment}"
    if mode not in ("auto", "online"):
        return mode, reason
    import wandb  # takes half a second

    url = wandb.setup(wandb.Settings(silent=True)).settings.base_url
    if not wandb.login(prompt=False, verify=False):
        return "offline", "no login"
    try:
        urllib.request.urlopen(url, timeout=REACH_SECONDS).close()
    except urllib.error.HTTPError:
        pass  # the server is there; W&B finds out what it is ready for
    except OSError as error:
        return "offline", f"{url} cannot be reached: {getattr(error, 'reason', error)}"
    return "online", "logged in"


def _init(mode: str, tracking: WandbOptions, run_dir: Path, config: dict[str, Any]) -> WandbLogger:
    import wandb

    # W&B reports on itself to the same server, and a process that ends waits ten seconds for that
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    # else W&B warns of an argument that Lightning's logger has
    wandb.setup(wandb.Settings(silent=True))
    saved = run_dir / RUN_ID
    # with resume="allow": the first process with this id creates the run, later ones go on
    logger = WandbLogger(
        project=tracking.project or os.environ.get("WANDB_PROJECT") or project_name(),
        name=tracking.name or os.environ.get("WANDB_NAME") or run_dir.name,
        id=saved.read_text() if saved.exists() else None,
        save_dir=run_dir,
        mode=mode,
        log_model=tracking.log_model,
        config=flatten(config),
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        ),
    )
    replace_text(saved, logger.experiment.id)
    return logger


def finish(run: Any) -> None:
    """End a run; if an upload takes too long, print the command that uploads the rest."""
    try:
        run.finish()
    except TimeoutError:
        path = shlex.quote(str(Path(run.settings.sync_dir)))
        print(
            f"wandb:    not everything was uploaded; the rest: wandb sync --include-online {path}",
            flush=True,
        )
