"""No row of `metrics.csv` is lost, whoever writes beside one, or after one."""

import csv
from pathlib import Path

from lightning_mgpu.tracking.csv_logger import RunCSVLogger


def test_two_loggers_share_a_file(tmp_path: Path) -> None:
    """As a process that `ddp_spawn` started to train, and the one that tests; or one after the other, and back."""
    first, second = RunCSVLogger(tmp_path), RunCSVLogger(tmp_path)
    for logger, metrics in ((first, {"b": 1}), (second, {"a": 2}), (first, {"b": 3}), (second, {"c": 4, "a": 5})):
        logger.log_metrics(metrics, step=0)
        logger.save()
    with (tmp_path / "metrics.csv").open(newline="") as file:
        rows = [
            {name: value for name, value in row.items() if value and name != "step"} for row in csv.DictReader(file)
        ]
    assert rows == [{"b": "1"}, {"a": "2"}, {"b": "3"}, {"a": "5", "c": "4"}]
    third = RunCSVLogger(tmp_path)
    third.log_metrics({"b": 6}, step=1)
    assert third.experiment.flush() == 5  # what a checkpoint remembers: all rows up to it
