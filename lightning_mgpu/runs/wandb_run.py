"""Weights & Biases that never asks and never holds up training."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger

from lightning_mgpu.tools import program

# A server may take 8 s to make a run, which then goes offline; the end waits 30 s for uploads.
SETTINGS: dict[str, Any] = {"console": "off", "init_timeout": 8.0, "finish_timeout": 30.0}


@dataclass
class WandbOptions:
    """The options of Weights & Biases; it reads others from `WANDB_ENTITY`, `WANDB_TAGS`, ...

    Args:
        mode: `WANDB_MODE`, or `auto`: online with a login and an answering server, else offline.
        project: `WANDB_PROJECT` or the program's name if left out.
        name: Shown name of the run; the run directory's if left out.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str | None = None
    name: str | None = None


def start_run(
    options: WandbOptions, run_dir: Path, run_id: str | None, config: dict[str, Any]
) -> tuple[WandbLogger | None, str]:
    """Start a job's one W&B run, or go on with `run_id`: its logger, if any, and where it is."""
    mode, reason = str(options.mode), f"--wandb.mode={options.mode}"
    if mode == "auto" and (variable := os.environ.get("WANDB_MODE")):
        mode, reason = variable, f"WANDB_MODE={variable}"
    if mode not in ("auto", "online", "offline"):  # such as a word that W&B does not know
        return None, f"off ({reason})"
    import wandb  # takes half a second

    # W&B reports on itself to the same server, and a process that ends waits for that
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    os.environ.setdefault("WANDB_SILENT", "true")
    default = program().replace("_", "-")
    for try_mode in ("online", "offline")[mode == "offline" :]:
        try:
            if try_mode == "online" and not wandb.login(prompt=False, verify=False):
                reason = "no login"
                continue
            logger = WandbLogger(
                project=options.project or os.environ.get("WANDB_PROJECT", default),
                name=options.name or os.environ.get("WANDB_NAME", run_dir.name),
                id=run_id,
                save_dir=run_dir,
                mode=try_mode,
                config=config,
                settings=wandb.Settings(**SETTINGS),
            )
            logger._wandb_init.pop("anonymous", None)  # wandb warns of any value
            url = logger.experiment.url  # this starts it
            offline = f"offline ({reason}); wandb sync {run_dir}/wandb/offline-run-*"
            return logger, offline if try_mode == "offline" else f"online, {url}"
        except Exception as error:  # a refused login, a dead server: it must not end the run
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            wandb.teardown()  # else the run's id is in use
    return None, f"off ({reason})"
