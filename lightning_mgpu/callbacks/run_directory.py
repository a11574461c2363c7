"""Where the first process of a run writes its files."""

from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger


def run_directory(trainer: Trainer) -> Path | None:
    """The run directory, created; `None` in other processes than the first and in a `fast_dev_run`.

    `trainer.log_dir` says the same, but is a broadcast: asked in the first process alone, it would wait for ever.
    """
    if not trainer.is_global_zero or trainer.fast_dev_run:  # type: ignore[attr-defined]
        return None
    logger = trainer.loggers[0] if trainer.loggers else None
    path = logger.log_dir if isinstance(logger, (CSVLogger, TensorBoardLogger)) else getattr(logger, "save_dir", None)
    directory = Path(path or trainer.default_root_dir)
    directory.mkdir(parents=True, exist_ok=True)
    return directory
