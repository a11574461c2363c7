"""`metrics.csv`, which a resumed run goes on writing: no row is lost, and none stands there twice."""

import csv
import os
from collections.abc import Sequence
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from typing_extensions import override

from lightning_mgpu.files import replacing


class MetricsWriter(ExperimentWriter):
    """Lightning's writer, which would begin anew where there is a file; replaces a file in one step.

    What stands in the file counts, whoever wrote it: a process of `ddp_spawn` that is over, or another logger.
    """

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        path = Path(self.metrics_file_path)
        self.num_rows = len(_read(path)[1]) if path.exists() else 0

    @override
    def _check_log_dir_exists(self) -> None:
        """Nothing to delete: a new run's directory is new."""

    @override
    def save(self) -> None:
        self.num_rows += len(self.metrics)
        path = Path(self.metrics_file_path)
        if self.metrics and path.exists():
            self.metrics_keys = _columns(path)
        super().save()

    @override
    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self._replace(fieldnames, _read(Path(self.metrics_file_path))[1])

    def flush(self) -> int:
        """Bring all rows to disk; returns how many there are."""
        self.save()
        if os.path.exists(self.metrics_file_path):
            with open(self.metrics_file_path) as file:
                os.fsync(file.fileno())
        return self.num_rows

    def go_on_after(self, num_rows: int) -> None:
        """Drop what was written after the first rows, if there is a file: it will be written again."""
        path = Path(self.metrics_file_path)
        if path.exists():
            self.metrics_keys, rows = _read(path)
            rows = rows[:num_rows]
            self.num_rows = len(rows)
            self._replace(self.metrics_keys, rows)

    def _replace(self, fieldnames: Sequence[str], rows: list[dict[str, str]]) -> None:
        path = Path(self.metrics_file_path)
        with replacing(path, sync=True) as part, part.open("w", newline="") as file:
            writer = csv.DictWriter(file, fieldnames)
            writer.writeheader()
            writer.writerows(rows)


class RunCSVLogger(CSVLogger):
    """Writes `metrics.csv` and `hparams.yaml` right into the run directory."""

    def __init__(self, save_dir: str | Path) -> None:
        super().__init__(save_dir, name="", version="")

    @property
    @override
    @rank_zero_experiment
    def experiment(self) -> MetricsWriter:
        if self._experiment is None:
            self._experiment = MetricsWriter(self.log_dir)
        return self._experiment  # type: ignore[return-value]


def _columns(path: Path) -> list[str]:
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    with path.open(newline="") as file:
        reader = csv.DictReader(file, restkey="", restval="")
        return list(reader.fieldnames or []), list(reader)
