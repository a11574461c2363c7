"""Where the first process of a run writes its files."""

import os
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

from lightning_mgpu.run_dir import RUN_DIR


def run_directory(trainer: Trainer) -> Path | None:
    """The run directory, created; `None` in other processes than the first and in a `fast_dev_run`.

    That of the command line, whatever the logger; a Trainer made in Python has its first logger's. `trainer.log_dir`,
    which says the same of the latter, is a broadcast: asked in the first process alone, it would wait for ever.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    path = None
    if trainer.loggers and not is_run_dir(trainer.default_root_dir):
        logger = trainer.loggers[0]
        path = logger.log_dir if isinstance(logger, (CSVLogger, TensorBoardLogger)) else logger.save_dir
    directory = Path(path or trainer.default_root_dir)
    directory.mkdir(parents=True, exist_ok=True)
    return directory


def is_run_dir(path: str) -> bool:
    """Whether this is the directory that the command line has chosen for its run."""
    run_dir = os.environ.get(RUN_DIR)
    return run_dir is not None and os.path.abspath(path) == os.path.abspath(run_dir)
