"""torchmetrics objects in a step: over replicas equal to one device, every step and epoch."""

import threading
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics as tm
from lightning.pytorch.profilers import PyTorchProfiler
from torch import Tensor, nn
from torchmetrics import classification as tc

pytestmark = pytest.mark.slow

NUM_CLASSES = 4


METRICS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: tc.MulticlassAccuracy(NUM_CLASSES, average="micro"),
    "macro": lambda: tc.MulticlassAccuracy(NUM_CLASSES, average="macro"),
    "f1": lambda: tc.MulticlassF1Score(NUM_CLASSES),
    "auroc": lambda: tc.MulticlassAUROC(NUM_CLASSES),
    "binned": lambda: tc.MulticlassAUROC(NUM_CLASSES, thresholds=5),
    "calibration": lambda: tc.MulticlassCalibrationError(NUM_CLASSES),
}


def for_stages(make: Callable[[], Any]) -> nn.ModuleDict:
    return nn.ModuleDict({f"on_{stage}": make() for stage in ("train", "val", "test")})


def update(module: Any, name: str, metric: Any, *args: Any) -> None:
    metric.update(*args)
    module.log(name, metric, on_epoch=True)


def forward(module: Any, name: str, metric: Any, *args: Any) -> None:
    metric(*args)
    module.log(name, metric, on_step=True, on_epoch=True)


def returned(module: Any, name: str, metric: Any, *args: Any) -> None:
    module.log(name, metric(*args), on_step=True, on_epoch=True)


def computed(module: Any, name: str, metric: Any, *args: Any) -> None:
    metric.update(*args)
    module.log(name, metric.compute(), on_step=True, on_epoch=False)
    if name.startswith("val"):
        metric.reset()


@pytest.mark.parametrize("way", [update, forward, returned, computed])
def test_ways_to_log_a_metric(way: Callable[..., None], assert_same: Callable[..., None]) -> None:
    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        for name, metric in module.metric[f"on_{stage}"].items():
            way(module, f"{stage}_{name}", metric, module.probabilities(X), y)

    assert_same(step, lambda: for_stages(lambda: nn.ModuleDict({name: make() for name, make in METRICS.items()})))


def test_a_returned_value_that_is_computed_with_is_the_shards(assert_same: Callable[..., None]) -> None:
    """Exact, then, where the metric is a mean over samples."""

    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.log(f"{stage}_percent", 100 * module.metric(module.probabilities(X), y), on_step=True, on_epoch=True)

    assert_same(step, METRICS["accuracy"])


def test_metrics_of_other_shapes(assert_same: Callable[..., None]) -> None:
    """Regression, retrieval, tokens (not one row a sample), a masked part of the batch, texts, confusion matrices."""
    makers = {
        "pearson": lambda: tm.PearsonCorrCoef(),
        "spearman": lambda: tm.SpearmanCorrCoef(),
        "r2": lambda: tm.R2Score(),
        "mse": lambda: tm.MeanSquaredError(),
        "map": lambda: tm.RetrievalMAP(),
        "tokens": lambda: tc.MulticlassAccuracy(5, average="macro"),
        "masked": lambda: tc.MulticlassAccuracy(NUM_CLASSES, average="micro"),
        "wer": lambda: tm.text.WordErrorRate(),
        "confusion": lambda: tc.MulticlassConfusionMatrix(NUM_CLASSES),
        "sums": lambda: Ratio(),
        "pairs": lambda: WeightedError(),
        "unweighted": lambda: WeightedError(),
    }

    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        metric = module.metric[f"on_{stage}"]
        for name in ("pearson", "spearman", "r2", "mse"):
            metric[name](X[:, 0], X[:, 1] + X[:, 0])
        metric["map"].update(X[:, 0], X[:, 1] > 0, indexes=y)
        metric["tokens"].update(X.reshape(-1).softmax(0)[:, None].repeat(1, 5), y.repeat_interleave(5) % 5)
        if len(kept := y > 0):
            metric["masked"].update(module.probabilities(X)[kept], y[kept])
        metric["wer"].update([f"a {label}" for label in y.tolist()], ["a 1"] * len(y))
        metric["confusion"].update(module.probabilities(X), y)
        metric["sums"].update(X.sum(), len(X))
        metric["pairs"].update(X[:, 0], ([X[:, 1], X[:, 2:]], X[:, 1].abs()))
        metric["unweighted"].update(X[:, 0], Target([X[:, 1]], None))
        for name in metric:
            if name != "confusion":
                module.log(f"{stage}_{name}", metric[name], on_epoch=True, on_step=False)

    def at_end(module: Any, stage: str) -> None:
        matrix = module.metric[f"on_{stage}"]["confusion"].compute()
        module.log(f"{stage}_diagonal", matrix.diagonal().sum().double())
        module.log(f"{stage}_samples", matrix.sum().double())
        module.metric[f"on_{stage}"]["confusion"].reset()

    assert_same(
        step, lambda: for_stages(lambda: nn.ModuleDict({name: make() for name, make in makers.items()})), at_end
    )


class Ratio(tm.Metric):
    """A user's own metric, fed with sums and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: int) -> None:
        self.total += total
        self.count += count

    def compute(self) -> Tensor:
        return self.total / self.count


Target = namedtuple("Target", "values weights")


class WeightedError(tm.Metric):
    """A user's own metric, whose target is ([values, and others], weights or None)."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, target: Any) -> None:
        [y, *_], weights = target
        weights = torch.ones_like(y) if weights is None else weights
        self.total += (weights * (predicted - y) ** 2).sum()
        self.count += weights.sum()

    def compute(self) -> Tensor:
        return self.total / self.count


@pytest.mark.parametrize("way", [update, forward, returned])
def test_aggregators(way: Callable[..., None], assert_same: Callable[..., None]) -> None:
    makers = {
        "mean": tm.MeanMetric,
        "sum": tm.SumMetric,
        "max": tm.MaxMetric,
        "min": tm.MinMetric,
        "rows": tm.MeanMetric,
        "weighted": tm.MeanMetric,
        "weighted_rows": tm.MeanMetric,
        "ones": tm.MeanMetric,
        "running_mean": lambda: tm.RunningMean(window=2),
        "running_sum": lambda: tm.RunningSum(window=2),
    }

    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        x = X[:, 0].float()
        arguments = {
            "mean": (x.mean(),), "sum": (x.sum(),), "max": (x.max().item(),), "min": (x.min(),), "rows": (x,),
            "weighted": (x.mean(), len(x)), "weighted_rows": (x, 2.0), "ones": (x, 1.0), "running_mean": (x.mean(),),
            "running_sum": (x.sum(),),
        }  # fmt: skip
        for name, args in arguments.items():
            way(module, f"{stage}_{name}", module.metric[f"on_{stage}"][name], *args)

    assert_same(step, lambda: for_stages(lambda: nn.ModuleDict({name: make() for name, make in makers.items()})))


@pytest.mark.parametrize("in_collection", [False, True])
def test_sums_and_counts_of_a_step(in_collection: bool, assert_same: Callable[..., None]) -> None:
    """What is logged of the step is the whole batch's, where the arguments of the shards cannot be joined."""

    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        metric = module.metric[f"on_{stage}"]
        hits = (module.probabilities(X).argmax(1) == y)[y > 0]
        value = metric(hits.sum().double(), len(hits))
        if in_collection:
            module.log_dict(metric, on_step=True, on_epoch=True)
            value = value["ratio"]
        else:
            module.log(f"{stage}_metric", metric, on_step=True, on_epoch=True)
        module.log(f"{stage}_returned", value, on_step=True)

    make = (lambda: tm.MetricCollection({"ratio": Ratio()})) if in_collection else Ratio
    assert_same(step, lambda: for_stages(make))


class Alike(Ratio):
    """Equal to others of its kind while it is empty, as torchmetrics' ROUGEScore."""

    def __hash__(self) -> int:
        return 0


def test_metrics_that_are_equal(assert_same: Callable[..., None]) -> None:
    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.metric[f"on_{stage}"].update(X.sum(), len(X))

    def at_end(module: Any, stage: str) -> None:
        metric = module.metric[f"on_{stage}"]
        module.log_dict({f"{stage}_ratio": metric.compute(), f"{stage}_count": metric.count.double()})
        metric.reset()

    assert_same(step, lambda: for_stages(Alike), at_end)


class Holds:
    """A hook with something `copy.deepcopy` refuses."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __call__(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize("what", ["lock", "hook", "profiler"])
def test_metrics_with_hooks_and_locks(Regression: Any, train: Callable, tmp_path: Path, what: str) -> None:
    class Module(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.mean = tm.MeanMetric()
            if what == "lock":
                self.mean.lock = threading.Lock()
            if what == "hook":
                self.mean.register_forward_hook(Holds())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            assert float(self.mean(loss.detach())) == pytest.approx(float(loss.detach()))
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return loss

    def logged(k: int) -> float:
        profiler = PyTorchProfiler(dirpath=tmp_path, filename=str(k), schedule=None) if what == "profiler" else None
        return float(train(Module, k, profiler=profiler).trainer.callback_metrics["mean"])

    one = logged(1)
    assert [logged(2), logged(3)] == pytest.approx([one, one], rel=1e-6)


def test_an_error_in_a_copy_is_shown(Regression: Any, train: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    class Module(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.mean = tm.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch) + 0 * self.mean(self.loss(batch))

    def refuse(*args: Any) -> None:
        raise LookupError("no copy")

    monkeypatch.setattr("lightning_mgpu.strategies.recording.recording.copy_with_care", refuse)
    with pytest.raises(LookupError, match="no copy"):
        train(Module, 2)


def test_a_mean_with_the_default_weight(Regression: Any, train: Callable, make_loader: Callable) -> None:
    """It weighs every batch alike, also where it is given; a count of samples adds up."""

    class Module(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.alike, self.given, self.counted = tm.MeanMetric(), tm.MeanMetric(), tm.MeanMetric()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.alike.update(loss.detach())
            self.given.update(loss.detach(), weight=1.0)
            self.counted.update(loss.detach(), len(batch[0]))
            names = ("alike", "given", "counted")
            self.log_dict({name: getattr(self, name) for name in names}, on_step=False, on_epoch=True)
            return loss

    one, *others = (dict(train(Module, k, loader=make_loader(3, 13)).trainer.callback_metrics) for k in (1, 2, 3))
    assert one["alike"] == one["given"] != one["counted"]
    for other in others:
        torch.testing.assert_close(other, one, rtol=1e-6, atol=0)


def test_a_reset_that_is_watched(assert_same: Callable[..., None]) -> None:
    """Copies compute what a metric returns in the middle of a step; their `reset` is not the original's."""

    def make() -> Any:
        def watched(metric: tm.Metric) -> tm.Metric:
            reset = metric.reset
            metric.reset = lambda: reset()  # type: ignore[method-assign]
            return metric

        return nn.ModuleDict({f"of_{stage}": watched(tm.MeanMetric()) for stage in ("train", "val", "test")})

    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        metric = module.metric[f"of_{stage}"]
        metric(X.sum(1))
        module.log(f"{stage}_mean", metric, on_step=False, on_epoch=True)
        module.log(f"{stage}_loss", X.mean())

    assert_same(step, make)
