"""torchmetrics objects in a step: on several devices the values of one, in every step and epoch."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
import torchmetrics as tm
from tiny_runs import (
    HOME,
    MANUAL,
    NUM_CLASSES,
    Manual,
    Regression,
    a_loader,
    make_strategy,
    refused,
)
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import classification as tc

# what both strategies share
pytestmark = pytest.mark.parametrize("engine", [MANUAL], indirect=True)


def for_stages(make):
    return lambda: nn.ModuleDict({f"on_{stage}": make() for stage in ("train", "val", "test")})


def update(module, name, metric, *args, **kwargs):
    metric.update(*args, **kwargs)
    module.log(name, metric, on_epoch=True)


def forward(module, name, metric, *args, **kwargs):
    metric(*args, **kwargs)
    module.log(name, metric, on_step=True, on_epoch=True)


def returned(module, name, metric, *args, **kwargs):
    module.log(name, metric(*args, **kwargs), on_step=True, on_epoch=True)


METRICS = {
    "accuracy": lambda: tc.MulticlassAccuracy(NUM_CLASSES, average="micro"),
    "f1": lambda: tc.MulticlassF1Score(NUM_CLASSES),
    "auroc": lambda: tc.MulticlassAUROC(NUM_CLASSES),
}


@pytest.mark.parametrize("is_locked", [False, True])
def test_computed_in_a_step(assert_logs_alike, logged, engine, is_locked):
    """All replicas must have updated the metric, so they have to meet: `lockstep=True`."""

    def step(module, stage, X, y, batch_idx):
        metric = module.metric[f"on_{stage}"]
        metric.update(module.probabilities(X), y)
        module.log(f"{stage}_f1", metric.compute(), on_step=True, on_epoch=False)
        if stage == "val":
            metric.reset()

    make = for_stages(METRICS["f1"])
    if is_locked:
        assert_logs_alike(step, make, strategy=lambda k: make_strategy(engine, lockstep=True))
    else:
        with refused("set lockstep=True"):
            logged(2, step, make)


def test_some_shards_have_nothing_for_a_metric(assert_logs_alike):
    def step(module, stage, X, y, batch_idx):
        metric = module.metric[f"on_{stage}"]
        if (kept := y == 0).any():
            metric(module.probabilities(X)[kept], y[kept])
        module.log(f"{stage}_accuracy", metric, on_step=True, on_epoch=True)

    assert_logs_alike(step, for_stages(METRICS["accuracy"]))


def test_a_returned_value_is_the_shards(assert_logs_alike):
    """A number computed with it is exact if the metric is a mean over samples."""

    def step(module, stage, X, y, batch_idx):
        module.log(
            f"{stage}_percent",
            100 * module.metric(module.probabilities(X), y),
            on_step=True,
            on_epoch=True,
        )

    assert_logs_alike(step, METRICS["accuracy"])


# the latter's are three
SMALL = {"r2": tm.R2Score, "extremes": lambda: tm.MinMaxMetric(tm.MeanSquaredError())}


@pytest.mark.parametrize(
    "make", [SMALL["r2"], lambda: tm.MetricCollection({name: SMALL[name]() for name in SMALL})]
)
def test_a_metric_that_needs_more_samples_than_a_shard_has(assert_logs_alike, make):
    """The last batch has two samples, of which three devices get one or none."""

    def step(module, stage, X, y, batch_idx):
        values = module.metric(X[:, 0], X[:, 1])
        module.log(
            "r2", values["r2"] if isinstance(values, dict) else values, on_step=True, on_epoch=False
        )

    assert_logs_alike(step, make)


@pytest.mark.filterwarnings("ignore:A batch")
def test_a_metric_that_holds_a_graph(assert_parity):
    """One device has the first batch alone."""

    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.mean = tm.MeanMetric()

        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.mean(loss)
            return loss

    assert_parity(
        Module, loader=lambda: DataLoader(a_loader().dataset, batch_sampler=[[0], [1, 2, 3, 4]])
    )


class Ratio(tm.Metric):
    """A user's own metric, fed with sums and counts."""

    def __init__(self):
        super().__init__()
        for name in ("total", "count"):
            self.add_state(name, torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, values, count):
        self.total += values.sum()
        self.count += count

    def compute(self):
        return self.total / self.count


class WeightedColumns(Ratio):
    """The weights are for all samples."""

    def update(self, values, weights):
        super().update(values * weights, len(values))


class WeightedError(Ratio):
    def update(self, predicted, target):
        [y, *_], weights = target
        weights = torch.ones_like(y) if weights is None else weights
        super().update(weights * (predicted - y) ** 2, weights.sum())


Target = namedtuple("Target", "values weights")
OF_OTHER_SHAPES = {  # the metric, and what a step gives to it
    # of one sample: 0-d
    "squeezed": (tm.MeanSquaredError, lambda X, y: (X[:, 0].squeeze(), X[:, 1].squeeze())),
    "pearson": (tm.PearsonCorrCoef, lambda X, y: (X[:, 0], X[:, 1] + X[:, 0])),
    "tokens": (lambda: tc.MulticlassAccuracy(5), lambda X, y: (X.repeat(5, 1), y.repeat(5) % 5)),
    "texts": (
        tm.text.WordErrorRate,
        lambda X, y: ([f"a {label}" for label in y.tolist()], ["a 1"] * len(y)),
    ),
    "retrieval": (
        tm.RetrievalMAP,
        lambda X, y: {"preds": X[:, 0], "target": X[:, 1] > 0, "indexes": y},
    ),
    "a part of the batch": (METRICS["accuracy"], lambda X, y: (X[y > 0, :NUM_CLASSES], y[y > 0])),
    "sums": (Ratio, lambda X, y: (X, len(X))),
    "weights": (
        WeightedColumns,
        lambda X, y: (X[:, :3], torch.tensor([1.0, 2.0, 3.0], device=X.device)),
    ),
    "nested": (WeightedError, lambda X, y: (X[:, 0], ([X[:, 1], X[:, 2:]], X[:, 1].abs()))),
    "named": (WeightedError, lambda X, y: (X[:, 0], Target([X[:, 1]], None))),
}
AGGREGATORS = {  # a float is the shard's mean, an integer a count: metrics get the whole batch's
    "mean": (tm.MeanMetric, lambda x, _: (x.mean(),)),
    "mean of a number": (tm.MeanMetric, lambda x, _: (x.mean().item(),)),
    "mean with samples as weight": (tm.MeanMetric, lambda x, _: (x.mean(), len(x))),
    "mean of some with their number as weight": (
        tm.MeanMetric,
        lambda x, _: (x[x > -1].mean(), (x > -1).sum()),
    ),
    "mean of rows": (tm.MeanMetric, lambda x, _: (x,)),
    "sum of rows": (tm.SumMetric, lambda x, _: (x,)),
    "count": (tm.SumMetric, lambda x, _: (len(x),)),
    "max of rows": (tm.MaxMetric, lambda x, _: (x,)),
    "min of rows": (tm.MinMetric, lambda x, _: (x,)),
    "running mean": (lambda: tm.RunningMean(window=2), lambda x, _: (x.mean(),)),
    "running sum": (lambda: tm.RunningSum(window=2), lambda x, _: (len(x),)),
}
TABLES = {
    "classification": {name: (make, lambda X, y: (X, y)) for name, make in METRICS.items()},
    "other shapes": OF_OTHER_SHAPES,
    "aggregators": AGGREGATORS,
}


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("way", [update, forward, returned])
def test_ways_to_log_a_metric(assert_logs_alike, way, table):
    """Arguments are the net's outputs and classes, samples and classes, or one value a sample."""

    def step(module, stage, X, y, batch_idx):
        X = {
            "classification": module.probabilities(X),
            "other shapes": X,
            "aggregators": X[:, 0].float(),
        }[table]
        for n, (_, arguments) in enumerate(TABLES[table].values()):
            given, metric = arguments(X, y), module.metric[f"on_{stage}"][n]
            args, kwargs = ((), given) if isinstance(given, dict) else (given, {})
            way(module, f"{stage}_{n}", metric, *args, **kwargs)

    assert_logs_alike(
        step, for_stages(lambda: nn.ModuleList(make() for make, _ in TABLES[table].values()))
    )


def collection(**kwargs):
    """Top-1 and top-3 accuracy begin equal: compute groups must not take them for one."""
    metrics = {f"top{k}": tc.MulticlassAccuracy(NUM_CLASSES, top_k=k) for k in (1, 3)}
    return tm.MetricCollection(
        {**metrics, "f1": METRICS["f1"](), "auroc": METRICS["auroc"]()}, **kwargs
    )


@pytest.mark.parametrize("compute_groups", [True, False])
@pytest.mark.parametrize("way", ["update", "forward", "returned"])
def test_collections(assert_logs_alike, way, compute_groups):
    def step(module, stage, X, y, batch_idx):
        metrics, args = module.metric[f"on_{stage}"], (module.probabilities(X), y)
        values = metrics.update(*args) if way == "update" else metrics(*args)
        values = values if way == "returned" else metrics
        module.log_dict({f"{stage}_{name}": value for name, value in values.items()}, on_epoch=True)

    assert_logs_alike(step, for_stages(lambda: collection(compute_groups=compute_groups)))


def test_what_wrappers_return(assert_logs_alike):
    """One tensor under two names, and dicts of dicts."""

    def make():
        return nn.ModuleList(
            [tm.MinMaxMetric(METRICS["f1"]()), tm.MultitaskWrapper({"task": collection()})]
        )

    def step(module, stage, X, y, batch_idx):
        extremes, tasks = module.metric[f"on_{stage}"]
        args = module.probabilities(X), y
        values = {**extremes(*args), **tasks({"task": args[0]}, {"task": args[1]})["task"]}
        module.log_dict(
            {f"{stage}_{name}": value for name, value in values.items()},
            on_step=True,
            on_epoch=True,
        )

    assert_logs_alike(step, for_stages(make))


@pytest.mark.parametrize("make", [collection, lambda: tm.MinMaxMetric(METRICS["accuracy"]())])
def test_computed_at_the_end_of_an_epoch(assert_logs_alike, make):
    """By hand; a wrapper, too."""

    def step(module, stage, X, y, batch_idx):
        module.metric[f"on_{stage}"].update(module.probabilities(X), y)

    def at_end(module, stage):
        metric = module.metric[f"on_{stage}"]
        module.log_dict({f"{stage}_{name}": value for name, value in metric.compute().items()})
        metric.reset()

    assert_logs_alike(step, for_stages(make), at_end)


def test_metrics_in_plain_containers(assert_logs_alike):
    """One for all stages; it is not logged before an epoch's end, or moved to a device."""

    def make():
        return {
            "means": [tm.MeanMetric().to(HOME)],
            "kept": SimpleNamespace(f1=METRICS["f1"]().to(HOME)),
        }

    def step(module, stage, X, y, batch_idx):
        module.metric["means"][0].update(X[:, 0].mean())
        module.metric["kept"].f1.update(module.probabilities(X), y)

    def at_end(module, stage):
        mean, f1 = module.metric["means"][0], module.metric["kept"].f1
        module.log_dict({f"{stage}_mean": mean.compute(), f"{stage}_f1": f1.compute()})
        f1.reset()

    assert_logs_alike(step, make, at_end)


@pytest.mark.parametrize("base", [Regression, Manual])
def test_a_metric_that_is_the_loss(assert_parity, base):
    """The value that a call returns has a graph, which leads to the weights."""

    class Module(base):
        def __init__(self):
            super().__init__()
            self.mse = tm.MeanSquaredError()
            self.both = tm.MetricCollection([tm.MeanSquaredError(), tm.MeanAbsoluteError()])
            self.double()

        def loss(self, batch):
            Z, y = self.net(batch[0]), batch[1]
            return self.mse(Z, y) + sum(self.both(Z, y).values())

    assert_parity(Module)


class Weighed(tm.Metric):
    """Takes rows of samples under one name, and one tensor for all samples under another."""

    def __init__(self):
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, y, rows=None, weights=None):
        self.count += len(y)
        self.total += y.sum() if rows is None else (y.repeat_interleave(2) * rows).sum()
        self.total += 0 if weights is None else weights.sum() * len(y)

    def compute(self):
        return self.total / self.count


def test_an_argument_for_all_samples_where_others_have_rows(assert_parity):
    class Module(Regression):
        def __init__(self):
            super().__init__()
            self.metric = Weighed()

        def training_step(self, batch, batch_idx):
            X, y = batch
            if batch_idx == 0:
                self.metric.update(y[:, 0], rows=(X[:, :2].flatten() > 0).double())
            else:
                weights = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, device=self.device)
                self.metric.update(y[:, 0], weights=weights)
            self.log("metric", self.metric, on_epoch=True, on_step=False)
            return self.loss(batch)

    assert_parity(Module, loader=lambda: a_loader(8, 24))
