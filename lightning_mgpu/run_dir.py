"""One run, one directory: claimed before the run, given up if a mistake ends it before anything is trained."""

import contextlib
import os
import shutil
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.errors import UsageError
from lightning_mgpu.files import final_name
from lightning_mgpu.slurm import is_restart, job_name

if TYPE_CHECKING:
    from jsonargparse import Namespace

OURS = ("config.yaml", "model.txt", "hparams.yaml", "wandb")  # what a run leaves before it trains
RUN_DIR = "LIGHTNING_MGPU_RUN_DIR"  # tells the processes `ddp` starts where their run is
PLACES = ("run_dir", "ckpt_path", "checkpoint.dirpath", "trainer.default_root_dir")  # options that name one


def expand_home(config: "Namespace") -> None:
    """Write out `~` in the options that name places; a shell does so only where a word begins with it."""
    for key in PLACES:
        if isinstance(place := config.get(key), (str, Path)):
            config[key] = os.path.expanduser(place)


class RunDir:
    """The run's directory: that of a resumed run, `--run_dir`, or a new one in `--trainer.default_root_dir` or `runs`.

    A new one has the time or, on SLURM, the job in its name. Only the first process creates it; those that `ddp` starts
    find it in the environment.

    Raises:
        UsageError: If `--run_dir` exists and is not empty, or the directory cannot be created.
    """

    def __init__(self, config: "Namespace", resumed: Path | None = None) -> None:
        self._is_new = False
        self._made: list[Path] = []  # directories that `discard` may remove, innermost first
        if rank_zero_only.rank != 0:  # type: ignore[attr-defined]
            self.path = Path(os.environ.get(RUN_DIR, "runs"))
            return
        if resumed is not None:
            self.path = resumed
            os.environ[RUN_DIR] = str(self.path.absolute())
            return
        if config.run_dir is not None:
            self.path = Path(config.run_dir)
            if self.path.is_dir() and _is_left(self.path):
                (self.path / "metrics.csv").unlink(missing_ok=True)  # the rest is written anew
            elif self.path.is_file() or (self.path.is_dir() and any(self.path.iterdir())):
                raise UsageError(
                    f"--run_dir={self.path} exists and is not empty: name a new directory, one run has one"
                )
        else:
            self.path = Path(config.trainer.default_root_dir or "runs") / (job_name() or run_name(config))
        existed = [path for path in (self.path, *self.path.parents) if path.exists()]
        try:
            if config.run_dir is not None:
                self.path.mkdir(parents=True, exist_ok=True)
            else:
                self.path = make_new(self.path)
        except OSError as error:
            raise UsageError(
                f"the run directory {self.path} cannot be made: {error.strerror}; choose another with --run_dir"
            ) from error
        self._is_new = True
        self._made = [path for path in (self.path, *self.path.parents) if path not in existed]
        os.environ[RUN_DIR] = str(self.path.absolute())

    def discard(self) -> None:
        """Remove what this run has made, unless there are results in the directory, or files of the user's."""
        if not self._is_new:
            return
        with contextlib.suppress(OSError):  # another run has moved in, or the disk is read-only
            found = list(self.path.iterdir())
            if any(final_name(path) not in OURS for path in found):
                return
            for path in found:
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    path.unlink()
            for directory in self._made:
                directory.rmdir()


def _is_left(path: Path) -> bool:
    """Whether a directory is that of a job which SLURM starts again, and which had saved no checkpoint yet."""
    names = {final_name(file) for file in path.iterdir()}
    has_checkpoint = any(path.glob("checkpoints/*.ckpt"))
    return is_restart() and names <= {*OURS, "metrics.csv", "curve.png", "checkpoints"} and not has_checkpoint


def run_name(config: "Namespace") -> str:
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
