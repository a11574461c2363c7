"""Weights & Biases without prompts and without blocking training."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger

from lightning_mgpu.tools import program

# After 8 s without an answer, a run is offline; at the end, uploads get 30 s.
SETTINGS: dict[str, Any] = {"console": "off", "init_timeout": 8.0, "finish_timeout": 30.0}


@dataclass
class WandbOptions:
    """Options of Weights & Biases. Set others by `WANDB_ENTITY`, `WANDB_TAGS`, ...

    Args:
        mode: `auto` is `WANDB_MODE`, or online with a login and a reachable server, else offline.
        project: Project. Default: `WANDB_PROJECT`, or the name of the program.
        name: Displayed name of the run. Default: `WANDB_NAME`, or the run directory's.
    """

    mode: Literal["auto", "online", "offline", "disabled"] = "auto"
    project: str | None = None
    name: str | None = None


def start_run(
    options: WandbOptions, run_dir: Path, run_id: str | None, config: dict[str, Any]
) -> tuple[WandbLogger | None, str]:
    """Start or resume (`run_id`) a W&B run; return its logger, if any, and a description."""
    mode, reason = str(options.mode), f"--wandb.mode={options.mode}"
    if mode == "auto" and (variable := os.environ.get("WANDB_MODE")):
        mode, reason = variable, f"WANDB_MODE={variable}"
    if mode not in ("auto", "online", "offline"):  # including unknown modes
        return None, f"off ({reason})"
    import wandb  # takes half a second

    # W&B also reports its own errors to the server, and the exit would wait for that
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
            url = logger.experiment.url  # starts the run
            offline = f"offline ({reason}); wandb sync {run_dir}/wandb/offline-run-*"
            return logger, offline if try_mode == "offline" else f"online, {url}"
        except Exception as error:  # failed login, unreachable server: training continues
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            wandb.teardown()  # else the run's ID is in use
    return None, f"off ({reason})"
