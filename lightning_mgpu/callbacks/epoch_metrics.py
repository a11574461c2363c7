"""The values that were logged in one epoch, and what their names say.

Lightning calls `on_train_epoch_end` of callbacks before that of the module, which may log more. So
an epoch's values are complete when the next epoch starts, or training ends.
"""

import re
from typing import NamedTuple

from lightning.pytorch import Trainer
from torch import Tensor

# `train/loss`, `validation_f1`
STAGE_AND_METRIC = re.compile(r"(train|training|val|valid|validation)[/_.](.+)")
# what Lightning adds to the name of a value logged by step and by epoch
FORKED = re.compile(r"_(step|epoch)(?=$|/dataloader_idx_)")


class MetricName(NamedTuple):
    metric: str
    is_validation: bool


def split_metric_name(name: str) -> MetricName | None:
    """`val/mae` -> ('mae', True), `train_loss` -> ('loss', False); `None` for any other name."""
    match = STAGE_AND_METRIC.fullmatch(name)
    return MetricName(match[2], match[1].startswith("val")) if match else None


def metrics_so_far(trainer: Trainer) -> dict[str, Tensor]:
    """The values logged so far. Nothing is computed or reduced, unlike by `callback_metrics`."""
    return dict(trainer._logger_connector._callback_metrics)


def epoch_metrics(trainer: Trainer, before: dict[str, Tensor]) -> dict[str, float]:
    """The values logged since `before`, which are the `metrics_so_far` when the epoch started.

    Lightning keeps values of earlier epochs, such as those of the last validation. A value that was
    logged again is another tensor. For a value logged by step and by epoch, Lightning has `x_step`,
    `x_epoch` and `x`; only `x` is returned.
    """
    metrics = metrics_so_far(trainer)
    logged = {name: value for name, value in metrics.items() if value is not before.get(name)}
    duplicates = {
        name for name in logged if (short := FORKED.sub("", name)) != name and short in logged
    }
    return {name: float(value) for name, value in logged.items() if name not in duplicates}
