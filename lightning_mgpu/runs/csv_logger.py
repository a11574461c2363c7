"""`metrics.csv`. Checkpoints hold the file as it was, so a run resumes behind the right row."""

import csv
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger

from lightning_mgpu.files import replace_text


class RunCSVLogger(CSVLogger):
    """Writes `metrics.csv` and `hparams.yaml` into the run directory, over earlier ones."""

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__(save_dir, name="", version="")
        self.path = Path(save_dir, "metrics.csv")

    def read_rows(self) -> str:
        """All rows so far."""
        self.save()
        return self.path.read_text() if self.path.exists() else ""

    def restore_rows(self, text: str) -> None:
        """Truncate `metrics.csv` to these rows: later ones are of an epoch trained again."""
        self.experiment.metrics_keys = list(csv.DictReader(text.splitlines()).fieldnames or [])
        if text:
            replace_text(self.path, text)


def find_csv_logger(trainer: Trainer) -> RunCSVLogger | None:
    """The logger of a run's first process."""
    loggers = trainer.loggers if trainer.is_global_zero else []
    return next((logger for logger in loggers if isinstance(logger, RunCSVLogger)), None)
