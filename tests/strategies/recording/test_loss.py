"""torchmetrics objects that are the loss, or a part of it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torchmetrics as tm
from torch import Tensor

pytestmark = pytest.mark.slow


class Several(tm.Metric):
    """A metric made of others, with a `forward` of its own, as pytorch-forecasting's MultiLoss."""

    def __init__(self, *metrics: tm.Metric) -> None:
        self.metrics = list(metrics)
        super().__init__()

    def forward(self, *args: Any) -> Tensor:
        return sum(metric(*args) for metric in self.metrics)  # type: ignore[return-value]

    def update(self, *args: Any) -> None:
        for metric in self.metrics:
            metric.update(*args)

    def compute(self) -> Tensor:
        return sum(metric.compute() for metric in self.metrics)  # type: ignore[return-value]

    def reset(self) -> None:
        for metric in self.metrics:
            metric.reset()


@pytest.mark.parametrize("kind", ["metric", "sum", "collection", "term", "several", "manual"])
def test_a_metric_that_is_the_loss(Regression: Any, assert_parity: Callable, kind: str) -> None:
    """What a call of it returns leads to the weights."""

    class Module(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.mse, self.mae = tm.MeanSquaredError(), tm.MeanAbsoluteError()
            self.both = tm.MetricCollection([tm.MeanSquaredError(), tm.MeanAbsoluteError()])
            self.sum = 0.5 * tm.MeanSquaredError()
            self.several = Several(tm.MeanSquaredError(), tm.MeanAbsoluteError())
            self.automatic_optimization = kind != "manual"
            self.double()
            for metric in (self.mse, self.mae, *self.both.values()):
                metric.set_dtype(torch.float64)

        def on_fit_start(self) -> None:
            for metric in self.several.metrics:  # nobody else moves what is in a plain list
                metric.to(self.device)

        def loss(self, batch: Any) -> Tensor:
            y_hat, y = self.net(batch[0]), batch[1]
            if kind == "collection":
                return sum(self.both(y_hat, y).values())  # type: ignore[return-value]
            if kind in ("sum", "several"):
                return getattr(self, kind)(y_hat, y)
            if kind == "term":
                return self.mse(y_hat, y) + 0.1 * self.net[0].weight.square().sum()  # type: ignore[index, operator]
            return self.mse(y_hat, y) + self.mae(y_hat, y)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", self.mse)
            if kind == "manual":
                self.optimizers().zero_grad()  # type: ignore[union-attr]
                self.manual_backward(loss)
                self.optimizers().step()  # type: ignore[union-attr]
            return loss

    assert_parity(Module)
