"""Weights & Biases that never asks and never holds up training.

    --wandb.project=fashion --wandb.name=first-try
    --wandb.mode=offline                 # record on disk; `wandb sync` later
    --wandb.mode=disabled

`auto`, the default, goes online if there is a login and the server answers, else offline. W&B reads
other settings from its own variables: `WANDB_ENTITY`, `WANDB_RUN_GROUP`, `WANDB_TAGS`,
`WANDB_NOTES`.
"""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger

from lightning_mgpu.tools import program

INIT_SECONDS = 8.0  # how long the server may take to make a run; then it goes offline
FINISH_SECONDS = 30.0  # how long the end of a run waits for uploads


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
    options: WandbOptions, run_dir: Path, run_id: str | None, config: dict[str, Any]
) -> tuple[WandbLogger | None, str]:
    """Start the one W&B run of a job, in its first process, or go on with that of `run_id`.

    Returns its logger, `None` where there is no run, and a line that says where it records and why.
    """
    mode, reason = options.mode, f"--wandb.mode={options.mode}"
    if mode == "auto" and (from_environment := os.environ.get("WANDB_MODE")):
        mode, reason = from_environment, f"WANDB_MODE={from_environment}"  # type: ignore[assignment]
    if mode == "disabled":
        return None, f"off ({reason})"
    try:
        import wandb  # takes half a second

        # W&B reports on itself to the same server, and a process that ends waits for that
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        wandb.setup(wandb.Settings(silent=True))
        if mode in ("auto", "online") and not wandb.login(prompt=False, verify=False):
            mode, reason = "offline", "no login"
        if mode != "offline":
            try:
                logger = _init("online", options, run_dir, run_id, config)
                return logger, f"online, {logger.experiment.url}"
            except Exception as error:  # a refused login, a dead server, a wrong WANDB_BASE_URL
                reason = _in_a_line(error)
        logger = _init("offline", options, run_dir, run_id, config)
        parts = f"{shlex.quote(f'{run_dir}/wandb')}/offline-run-*"  # a resumed run has several
        return logger, f"offline ({reason}); upload it with: wandb sync {parts}"
    except Exception as error:  # whatever it is, it must not end the run
        return None, f"off ({_in_a_line(error)})"


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _init(
    mode: str, options: WandbOptions, run_dir: Path, run_id: str | None, config: dict[str, Any]
) -> WandbLogger:
    import wandb

    # with resume="allow": the first process with this id makes the run, later ones go on with it
    logger = WandbLogger(
        project=options.project or os.environ.get("WANDB_PROJECT") or program().replace("_", "-"),
        name=options.name or os.environ.get("WANDB_NAME") or run_dir.name,
        id=run_id,
        save_dir=run_dir,
        mode=mode,
        log_model=options.log_model,
        config=config,
        settings=wandb.Settings(
            silent=True,
            console="off",
            init_timeout=INIT_SECONDS,
            finish_timeout=FINISH_SECONDS,
            finish_timeout_raises=True,
        ),
    )
    _ = logger.experiment  # this starts it
    return logger


def finish(logger: WandbLogger) -> None:
    """End a run; if an upload takes too long, print the command that uploads the rest."""
    try:
        logger.experiment.finish()
    except TimeoutError:
        path = shlex.quote(str(Path(logger.experiment.settings.sync_dir)))
        print(f"wandb:    not all is uploaded; the rest: wandb sync --include-online {path}")
