"""Records a run: its directory and configuration, how it began and ended, its loggers."""

import contextlib
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.nn.parameter import is_lazy
from typing_extensions import override

from lightning_mgpu.devices import describe_devices, devices
from lightning_mgpu.runs.checkpoints import BestCheckpoint
from lightning_mgpu.runs.directory import CONFIG, RUN_JSON, flatten, lock_run_dir, read_run_json
from lightning_mgpu.runs.metrics import MetricsFile, summarize
from lightning_mgpu.runs.wandb_run import WandbOptions, finish, start_run
from lightning_mgpu.tools import PACKAGE, UsageError, replacing

GIT = ("git", "describe", "--always", "--dirty")


class RunRecord(Callback):
    """Makes the run directory and the loggers when the data are there: earlier mistakes leave none.

    `close` must be called when the run ends, however it does.

    Args:
        run_dir: The directory.
        config: The text of `config.yaml`.
        wandb_options: `None` if nothing is logged.
        facts: What `run.json` gets when the run begins.
        num_steps: How many steps a resumed run has done, whose rows of `metrics.csv` stay.
    """

    def __init__(
        self,
        run_dir: Path,
        config: str,
        wandb_options: WandbOptions | None,
        facts: dict[str, Any],
        num_steps: int | None,
    ) -> None:
        self.run_dir, self.config = run_dir, config
        self.wandb_options, self.num_steps = wandb_options, num_steps
        self.content: dict[str, Any] = {"begin": now(), "num_resumes": 0, **facts}
        self.results: dict[str, Any] = {}  # what `run.json` gets when the run ends
        self.notes: dict[str, str] = {}  # lines of the run's header: this one adds `wandb`
        self.lock: int | None = None  # once the directory is there, in the first process

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self.content.get("strategy"):  # in the test after `fit`
            return
        self.content["strategy"] = type(trainer.strategy).__name__
        if trainer.is_global_zero:
            self.lock = lock_run_dir(self.run_dir)
        if self.wandb_options is not None:
            trainer.loggers = [MetricsFile(self.run_dir, self.num_steps), *trainer.loggers]
        if not trainer.is_global_zero:
            return
        if before := read_run_json(self.run_dir):
            self.content["num_resumes"] = before["num_resumes"] + 1
        else:
            self.write_config()
        if any(isinstance(logger, WandbLogger) for logger in trainer.loggers):
            self.notes["wandb"] = "by --trainer.logger; --wandb.* does not count"
        elif self.wandb_options is not None:
            run_id = before.get("wandb_id")
            config = flatten(yaml.safe_load(self.config))
            logger, self.notes["wandb"] = start_run(
                self.wandb_options, self.run_dir, run_id, config
            )
            if logger is not None:
                self.content["wandb_id"] = logger.experiment.id
                trainer.loggers = [*trainer.loggers, logger]
        self.content["devices"] = describe_devices(devices(trainer))
        self.content |= {"git": find_commit(), "versions": find_versions()}
        self.write(num_parameters=None, end=None)

    def begin(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Where nothing is refused any more, and weights are on their device."""
        stop_on_signals()  # once more: Lightning has put its own handler in place
        is_first = self.lock is not None and self.content["num_parameters"] is None
        if is_first and not trainer.sanity_checking:
            self.write_config()  # a resumed run may be a longer one
            (self.run_dir / "model.txt").write_text(f"{pl_module}\n")
            self.write(num_parameters=count_parameters(pl_module))

    on_train_start = on_validation_start = on_test_start = on_predict_start = begin

    def write_config(self) -> None:
        with replacing(self.run_dir / CONFIG) as part:
            part.write_text(self.config, encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Write `run.json` with these values, too."""
        self.content |= values
        with replacing(self.run_dir / RUN_JSON) as part:
            part.write_text(json.dumps(self.content, indent=2, default=str) + "\n")

    def close(self, trainer: Trainer, error: BaseException | None, why_stopped: str) -> None:
        """Write how the run ended, close the W&B run and free the directory."""
        if self.lock is None:
            return
        state, why = ("stopped", why_stopped) if why_stopped else ("finished", None)
        if isinstance(error, Exception):
            state, why = "failed", f"{type(error).__name__}: {error}"
        elif error is not None:
            state, why = "interrupted", "Ctrl-C, SIGTERM or SIGHUP"
        # the disk may be full, metrics.csv broken, the directory deleted: the run's own error counts
        with contextlib.suppress(OSError, UsageError):
            if state == "failed":
                path = self.run_dir / "error.log"
                with replacing(path) as part:
                    part.write_text("".join(traceback.format_exception(error)))
                error.add_note(f"{path} shows where")
            best = find_best(trainer)
            self.results |= {"best": best, "metrics": summarize(self.run_dir, best.get("epoch"))}
            end = {"time": now(), "state": state, "why": why, "epochs": trainer.current_epoch}
            self.write(end={**end, **self.results})
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                finish(logger)
        os.close(self.lock)


def stop_on_signals() -> None:
    """End the first process by Ctrl-C, SIGTERM or SIGHUP, once; it ends those it has started."""

    def stop(*_: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    is_first = rank_zero_only.rank == 0  # type: ignore[attr-defined]
    for number in (signal.SIGINT, signal.SIGHUP):  # these reach all processes of a terminal
        signal.signal(number, stop if is_first else signal.SIG_IGN)
    signal.signal(signal.SIGTERM, stop if is_first else signal.SIG_DFL)


def find_best(trainer: Trainer) -> dict[str, Any]:
    """The epoch of the best checkpoint, counted from 1, its metric and value; empty without one."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, BestCheckpoint) and callback.best:
            return callback.best[1]
    return {}


def count_parameters(module: LightningModule) -> int:
    return sum(p.numel() for p in module.parameters() if not is_lazy(p))


def find_commit() -> str | None:
    """The git commit of the working directory, with `-dirty` if tracked files differ from it."""
    try:
        return subprocess.run(
            GIT, capture_output=True, text=True, timeout=2, check=True
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):  # no git, no repository, or a huge one
        return None


def find_versions() -> dict[str, str]:
    """Versions of this package and of those that compute."""
    names = [
        name for name in (PACKAGE, "torch", "lightning", "torchmetrics") if name in sys.modules
    ]
    versions = {name: str(sys.modules[name].__version__) for name in names}
    return {"python": platform.python_version(), **versions}


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def fingerprint(parameters: Iterable[Tensor]) -> str:
    """12 hex digits of a SHA-256 over the bytes of all parameters in order; buffers are left out.

    Two runs with the same fingerprint have trained the same bits.
    """
    digest = hashlib.sha256()
    for parameter in parameters:
        flat = parameter.detach().cpu().contiguous().flatten()
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()[:12]
