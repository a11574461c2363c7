"""`metrics.csv`, which a resumed run goes on writing: no row is lost, and none stands there twice."""

import csv
import os
from pathlib import Path

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.csv_logs import ExperimentWriter
from lightning.pytorch.loggers.logger import rank_zero_experiment
from typing_extensions import override

from lightning_mgpu.runs.files import replacing

Rows = list[dict[str, str]]


class MetricsWriter(ExperimentWriter):
    """Lightning's writer, which would delete the file that it finds. This one goes on behind its rows."""

    def __init__(self, log_dir: str) -> None:
        super().__init__(log_dir)
        self.path = Path(self.metrics_file_path)
        self.metrics_keys = list(self._read()[0])

    @override
    def _check_log_dir_exists(self) -> None:
        """Deletes nothing."""

    def sync(self) -> int:
        """Bring all rows to the disk; returns how many there are."""
        self.save()
        if not self.path.exists():
            return 0
        with self.path.open() as file:
            os.fsync(file.fileno())
        return len(self._read()[1])

    def keep(self, num_rows: int) -> None:
        """Drop all rows after the first `num_rows`: the resumed run will write them again."""
        keys, rows = self._read()
        if rows:
            self._write(keys, rows[:num_rows])

    @override
    def _rewrite_with_new_header(self, fieldnames: list[str]) -> None:
        self._write(fieldnames, self._read()[1])  # Lightning's would leave half a file to a process that is killed

    def _read(self) -> tuple[list[str], Rows]:
        if not self.path.exists():
            return [], []
        with self.path.open(newline="") as file:
            reader = csv.DictReader(file, restval="")  # a kill may have torn the last row
            return list(reader.fieldnames or []), list(reader)

    def _write(self, keys: list[str], rows: Rows) -> None:
        with replacing(self.path) as part, part.open("w", newline="") as file:
            writer = csv.DictWriter(file, keys, restval="")
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
