"""One run, one directory: made before the run, given up if a mistake ends it before anything is trained."""

import contextlib
import fcntl
import os
import shutil
from datetime import datetime
from pathlib import Path

from jsonargparse import Namespace
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.runs.errors import UsageError
from lightning_mgpu.runs.launchers import is_restart, job_name

RUN_DIR = "LIGHTNING_MGPU_RUN_DIR"  # tells the processes that `ddp` starts where their run is
BEFORE_TRAINING = ("config.yaml", "model.txt", "hparams.yaml", "wandb")  # what a run writes before it trains
PLACES = ("run_dir", "ckpt_path", "checkpoint.dirpath", "trainer.default_root_dir")  # options that name one


def expand_home(config: Namespace) -> None:
    """Write out `~` in the options that name places; a shell does so only where a word begins with it."""
    for key in PLACES:
        if isinstance(place := config.get(key), (str, Path)):
            config[key] = os.path.expanduser(place)


def make_run_dir(config: Namespace) -> tuple[Path, list[Path]]:
    """A new directory: `--run_dir`, or one with time, model, strategy and devices in its name.

    Only the first process makes it. Those that `ddp` starts find it in the environment.

    Returns:
        The directory, and those that were made, innermost first.

    Raises:
        UsageError: If `--run_dir` holds files, or the directory cannot be made.
    """
    if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
        return Path(os.environ.get(RUN_DIR, "runs")), []
    path = Path(config.run_dir or Path(config.trainer.default_root_dir or "runs", job_name() or run_name(config)))
    missing = [place for place in (path, *path.parents) if not place.exists()]
    try:
        if config.run_dir is None and not is_restart():
            path = make_new(path)
        else:
            path.mkdir(parents=True, exist_ok=True)
            if any(path.iterdir()) and not is_restart():
                raise UsageError(f"--run_dir={path} exists and is not empty: name a new directory, one run has one")
    except OSError as error:
        raise UsageError(
            f"the run directory {path} cannot be made: {error.strerror}; choose another with --run_dir"
        ) from error
    os.environ[RUN_DIR] = str(path.absolute())
    return path, [path, *missing[1:]] if missing else []


def discard(path: Path, made: list[Path]) -> None:
    """Empty the directory of a run that a mistake has ended, unless it holds results, or files of the user's.

    The directories that were made for it go, too.
    """
    with contextlib.suppress(OSError):  # somebody else writes there, too
        found = list(path.iterdir())
        if any(file.name not in BEFORE_TRAINING for file in found):
            return
        for file in found:
            shutil.rmtree(file) if file.is_dir() else file.unlink()
        for directory in made:
            directory.rmdir()


def run_name(config: Namespace) -> str:
    """When, what and how, as a directory's name: `2026-11-21_09-30-00_LeNet_ddp_2`."""
    model = config.model.class_path.rpartition(".")[2]
    strategy = config.trainer.strategy
    strategy = (strategy if isinstance(strategy, str) else strategy.class_path).rpartition(".")[2]
    devices = str(config.trainer.devices).replace(" ", "")
    return f"{datetime.now():%Y-%m-%d_%H-%M-%S}_{model}_{strategy}_{devices}"


def make_new(path: Path) -> Path:
    """Make the directory, with a number after its name where another run has claimed it in the same second."""
    path.parent.mkdir(parents=True, exist_ok=True)
    number, new = 1, path
    while True:
        try:
            new.mkdir()
            return new
        except FileExistsError:
            number += 1
            new = path.with_name(f"{path.name}_{number}")


def claim(run_dir: Path) -> int | None:
    """Lock a run directory for as long as this process lives; returns the lock.

    Raises:
        UsageError: If another process writes there.
    """
    directory = os.open(run_dir, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(directory)
        raise UsageError(f"{run_dir} is still running in another process: stop that one first") from None
    except OSError:  # a network file system without locks
        os.close(directory)
        return None
    return directory


def run_directory(trainer: Trainer) -> Path | None:
    """Where callbacks write, created; `None` in other processes than the first and in a `fast_dev_run`.

    The directory is that of the command line, whatever the loggers. A Trainer made in Python has its first logger's.
    `trainer.log_dir` says the same of the latter, but is a broadcast: asked in one process alone, it waits for ever.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    path: str | None = trainer.default_root_dir
    if trainer.loggers and os.environ.get(RUN_DIR) != os.path.abspath(trainer.default_root_dir):
        logger = trainer.loggers[0]
        path = logger.log_dir if isinstance(logger, (CSVLogger, TensorBoardLogger)) else logger.save_dir
    directory = Path(path or trainer.default_root_dir)
    directory.mkdir(parents=True, exist_ok=True)
    return directory
