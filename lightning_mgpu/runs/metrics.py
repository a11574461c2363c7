"""`metrics.csv`: one row per call of the logger, one column per metric."""

import csv
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import mean
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers.logger import DummyExperiment, DummyLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from lightning_mgpu.tools import UsageError, atomic_write

FILE = "metrics.csv"
STAGE_AND_METRIC = re.compile(r"(train|val)(?:ing|id|idation)?[/_.](.+)")  # `train/loss`, `val_f1`
Points = dict[str, dict[int, float]]  # by the metric's name: epoch (from 1) -> value


class NoExperiment(DummyExperiment):
    """Accepts nested attributes, calls and items, like W&B's run; Lightning's dummy does not."""

    def __getattr__(self, _: Any) -> Any:
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:  # else iteration would not end
        return iter(())


class NoLogger(DummyLogger):
    def __init__(self) -> None:
        super().__init__()
        self._experiment = NoExperiment()


class MetricsFile(NoLogger):
    """Writes `metrics.csv`. A resumed run drops rows after `num_steps`: those steps are repeated.

    `step` and `epoch` are the Trainer's; a test has no epoch. Values logged under these names get
    the columns `logged_step` and `logged_epoch`. `seconds` is the time of training and validation,
    continued from the last row of a resumed run.
    """

    began: float | None = None  # when `fit` started

    def __init__(self, trainer: Trainer, num_steps: int | None) -> None:
        super().__init__()
        self.trainer = trainer
        self.run_dir = run_dir = Path(trainer.default_root_dir)
        self.columns: list[str] = []
        self.seconds = 0.0  # before resuming
        if num_steps is not None:
            rows = [row for row in read_rows(run_dir) if None not in {*row, *row.values()}]  # torn
            self.columns = sorted({name for row in rows for name in row})
            try:
                kept = [row for row in rows if int(row["step"] or num_steps) < num_steps]
                self.seconds = max((float(row.get("seconds") or 0) for row in kept), default=0.0)
            except (KeyError, ValueError) as error:
                reason = f"{run_dir / FILE}: step and seconds must be columns of numbers"
                raise UsageError(f"{reason} ({error}); move it away") from error
            self.rewrite(kept)

    @property
    def save_dir(self) -> str:
        return str(self.run_dir)

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        loop = self.trainer.fit_loop
        now = {"step": loop.epoch_loop._batches_that_stepped, "epoch": self.trainer.current_epoch}
        row = {"step": step, **metrics}  # Lightning passes a logged `step` as the argument
        for name, value in now.items():
            # users' values are floats, Lightning's own are integers
            if str(row.get(name, value)) not in (str(value), "None"):
                row[f"logged_{name}"] = row[name]
        row |= now
        if self.trainer.testing:
            row["epoch"] = None
        elif self.began is not None:
            row["seconds"] = round(self.seconds + time.monotonic() - self.began, 3)
        if not row.keys() <= {*self.columns}:
            self.columns = sorted({*self.columns, *row})
            self.rewrite(read_rows(self.run_dir))
        with (self.run_dir / FILE).open("a", newline="") as file:
            csv.DictWriter(file, self.columns).writerow(row)

    @rank_zero_only
    def rewrite(self, rows: Iterable[dict[str, str]]) -> None:
        with atomic_write(self.run_dir / FILE) as part, part.open("w", newline="") as file:
            writer = csv.DictWriter(file, self.columns)
            writer.writeheader()
            writer.writerows(rows)


def read_rows(run_dir: Path) -> list[dict[str, str]]:
    """The rows of `metrics.csv`; empty if it does not exist."""
    try:
        with (run_dir / FILE).open(newline="", encoding="utf-8") as file:
            return [*csv.DictReader(file)]
    except FileNotFoundError:
        return []
    except (UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{run_dir / FILE} is not a CSV file: {error}; move it away") from error


def read_values(run_dir: Path) -> Iterator[tuple[int, str, float]]:
    """Epoch (from 1; 0 if unknown), name and value of all logged numbers."""
    for row in read_rows(run_dir):
        for name, text in row.items():
            with suppress(KeyError, TypeError, ValueError):  # truncated rows, strings
                yield int(row["epoch"] or -1) + 1, name, float(text)


def read_points(run_dir: Path) -> Points:
    """The last value of each training and validation metric per epoch."""
    points: Points = {}
    for epoch, name, value in read_values(run_dir):
        if epoch and STAGE_AND_METRIC.fullmatch(name):
            points.setdefault(name, {})[epoch] = value
    return points


def summarize(run_dir: Path, epoch: int | None = None) -> dict[str, float]:
    """The last validation (of `epoch`, from 1), test and MB metrics, and mean seconds per epoch."""
    values: dict[str, float] = {}
    seconds: list[float] = []
    for at, name, value in read_values(run_dir):
        if name == "epoch_seconds":
            seconds.append(value)
        elif re.match("test|.*_mb$", name) or (at and epoch in (None, at) and name[:3] == "val"):
            values[name] = value
    return {**values, **({"seconds_per_epoch": mean(seconds)} if seconds else {})}
