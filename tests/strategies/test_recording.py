"""Logged values and torchmetrics objects: over replicas equal to one device, every step and epoch."""

import math
from collections import namedtuple
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torchmetrics as tm
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import classification as tc

import lightning_mgpu.strategies  # noqa: F401 (registers them)

pytestmark = pytest.mark.slow

NUM_CLASSES = 4


ENGINE = "manual_allreduce"  # or what the fixture says


@pytest.fixture(autouse=True)
def _engine(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "ENGINE", engine)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Written(DummyLogger):
    """Keeps what the Trainer writes, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.rows.append((step, metrics))


def loader(num_samples: int = 23, batch_size: int = 7, seed: int = 1) -> DataLoader:
    """Batches of 7, 7, 7 and 2 samples: uneven shards, and fewer samples than three devices."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.randn(num_samples, 5, generator=generator, dtype=torch.float64)
    y = (X[:, :NUM_CLASSES].argmax(1) + torch.randint(0, 2, (num_samples,), generator=generator)) % NUM_CLASSES
    return DataLoader(TensorDataset(X, y), batch_size)


Step = Callable[["Probe", str, Tensor, Tensor, int], Any]


class Probe(LightningModule):
    """Calls `step(self, stage, X, y, batch_idx)` in every hook; `at_end(self, stage)` when an epoch ends."""

    def __init__(self, step: Step, make: Callable[[], Any], at_end: Callable[["Probe", str], None] | None) -> None:
        super().__init__()
        self.net = nn.Linear(5, NUM_CLASSES).double()
        self.step, self.at_end = step, at_end
        self.metric = make()

    def probabilities(self, X: Tensor) -> Tensor:
        return self.net(X).softmax(1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.step(self, "train", *batch, batch_idx)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.step(self, "val", *batch, batch_idx)

    def test_step(self, batch: list[Tensor], batch_idx: int, dataloader_idx: int = 0) -> None:
        self.step(self, "test", *batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.at_end:
            self.at_end(self, "train")

    def on_validation_epoch_end(self) -> None:
        if self.at_end:
            self.at_end(self, "val")

    def on_test_epoch_end(self) -> None:
        if self.at_end:
            self.at_end(self, "test")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def written(k: int, step: Step, make: Callable[[], Any], at_end: Any = None, num_loaders: int = 1) -> list[Any]:
    seed_everything(0, verbose=False)
    logger = Written()
    kind = {"strategy": "auto", "devices": 1} if k == 1 else {"strategy": ENGINE, "devices": k}
    trainer = Trainer(
        accelerator="cpu", max_epochs=2, logger=logger, log_every_n_steps=1, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, **kind,
    )  # fmt: skip
    module = Probe(step, make, at_end)
    trainer.fit(module, loader(), [loader(11, 4, seed) for seed in range(num_loaders)])
    fitted = {name: float(value) for name, value in trainer.callback_metrics.items()}
    trainer.test(module, [loader(10, 4, seed) for seed in range(2, 2 + num_loaders)], verbose=False)
    return [*logger.rows, (None, fitted), (None, {k: float(v) for k, v in trainer.callback_metrics.items()})]


def assert_same(step: Step, make: Callable[[], Any] = lambda: None, at_end: Any = None, num_loaders: int = 1) -> None:
    expected = written(1, step, make, at_end, num_loaders)
    assert sum(len(metrics) for _, metrics in expected) > 8
    for k in (2, 3):
        found = written(k, step, make, at_end, num_loaders)
        assert len(found) == len(expected)
        for (step_found, ours), (step_expected, theirs) in zip(found, expected):
            assert step_found == step_expected
            assert list(ours) == list(theirs)
            for name in theirs:  # aggregates are kept in float32
                assert math.isclose(ours[name], theirs[name], rel_tol=2e-6, abs_tol=1e-7), (k, step_found, name)


# self.log


@pytest.mark.parametrize(
    "when", [{"on_step": True, "on_epoch": False}, {"on_epoch": True}, {"on_step": True, "on_epoch": True}]
)
def test_means(when: dict[str, bool]) -> None:
    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.log(f"{stage}_tensor", X.mean(), prog_bar=True, **when)
        module.log(f"{stage}_float", X.mean().item(), **when)
        module.log(f"{stage}_number", 3, **when)
        module.log(f"{stage}_tenth", 0.1, **when)
        module.log(f"{stage}_one", X.mean().reshape(1), **when)
        module.log(f"{stage}_given", X.mean(), batch_size=len(X), **when)
        module.log(f"{stage}_constant", X.mean(), batch_size=7, **when)
        module.log_dict({f"{stage}_a": X.mean(), f"{stage}_b": X.std() * 0 + batch_idx}, **when)

    assert_same(step)


@pytest.mark.parametrize("names", [("sum", "max", "min"), (torch.sum, torch.max, torch.min), (sum, max, min)])
def test_other_reductions(names: tuple[Any, Any, Any]) -> None:
    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        values = {"sum": (y == 0).sum(), "max": X.max(), "min": X.min()}
        for (name, value), reduce_fx in zip(values.items(), names):
            module.log(f"{stage}_{name}", value, on_step=True, on_epoch=True, reduce_fx=reduce_fx)
            module.log(f"{stage}_{name}_number", value.item(), False, True, False, True, reduce_fx)

    assert_same(step)


def test_unknown_reductions_are_lightnings_affair() -> None:
    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.log("median", X.median(), reduce_fx=torch.median)

    with pytest.raises(Exception, match="reduce_fx=") as expected:
        written(1, step, lambda: None)
    with pytest.raises(type(expected.value), match="reduce_fx="):
        written(2, step, lambda: None)


def test_values_changed_in_place_after_logging() -> None:
    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        value, row = X.mean(), X.mean().reshape(1)
        module.log(f"{stage}_value", value, on_epoch=True)
        module.log(f"{stage}_row", row, on_epoch=True)
        scores = module.probabilities(X).detach()
        module.metric.update(scores, y)
        module.log(f"{stage}_metric", module.metric, on_epoch=True)
        value += 1
        row += 1
        scores.zero_()

    assert_same(step, lambda: tc.MulticlassAccuracy(NUM_CLASSES))


def test_same_key_in_several_hooks() -> None:
    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.log("loss", X.mean(), on_step=stage == "train", on_epoch=True)

    assert_same(step, at_end=lambda module, stage: module.log(f"{stage}_end", 1.5))


def test_logged_by_some_replicas_only() -> None:
    """One device, too, logs such a value only for the batches that have it."""

    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        if (rows := X[y == 0]).numel():
            module.log(f"{stage}_rare", rows.mean(), batch_size=len(rows), on_epoch=True)

    assert_same(step)


def test_several_dataloaders() -> None:
    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.log(f"{stage}_each", X.mean(), on_epoch=True)

    assert_same(step, num_loaders=2)
    assert any("dataloader_idx_1" in name for _, row in written(2, step, lambda: None, num_loaders=2) for name in row)


# torchmetrics

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


def update(module: Probe, name: str, metric: Any, *args: Any) -> None:
    metric.update(*args)
    module.log(name, metric, on_epoch=True)


def forward(module: Probe, name: str, metric: Any, *args: Any) -> None:
    metric(*args)
    module.log(name, metric, on_step=True, on_epoch=True)


def returned(module: Probe, name: str, metric: Any, *args: Any) -> None:
    module.log(name, metric(*args), on_step=True, on_epoch=True)


def computed(module: Probe, name: str, metric: Any, *args: Any) -> None:
    metric.update(*args)
    module.log(name, metric.compute(), on_step=True, on_epoch=False)
    if name.startswith("val"):
        metric.reset()


@pytest.mark.parametrize("way", [update, forward, returned, computed])
def test_ways_to_log_a_metric(way: Callable[..., None]) -> None:
    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        for name, metric in module.metric[f"on_{stage}"].items():
            way(module, f"{stage}_{name}", metric, module.probabilities(X), y)

    assert_same(step, lambda: for_stages(lambda: nn.ModuleDict({name: make() for name, make in METRICS.items()})))


def test_a_returned_value_that_is_computed_with_is_the_shards() -> None:
    """Exact, then, where the metric is a mean over samples."""

    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.log(f"{stage}_percent", 100 * module.metric(module.probabilities(X), y), on_step=True, on_epoch=True)

    assert_same(step, METRICS["accuracy"])


def test_metrics_of_other_shapes() -> None:
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

    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
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

    def at_end(module: Probe, stage: str) -> None:
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
def test_aggregators(way: Callable[..., None]) -> None:
    makers = {
        "mean": tm.MeanMetric,
        "sum": tm.SumMetric,
        "max": tm.MaxMetric,
        "min": tm.MinMetric,
        "rows": tm.MeanMetric,
        "weighted": tm.MeanMetric,
        "weighted_rows": tm.MeanMetric,
        "running_mean": lambda: tm.RunningMean(window=2),
        "running_sum": lambda: tm.RunningSum(window=2),
    }

    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        x = X[:, 0].float()
        arguments = {
            "mean": (x.mean(),), "sum": (x.sum(),), "max": (x.max().item(),), "min": (x.min(),), "rows": (x,),
            "weighted": (x.mean(), len(x)), "weighted_rows": (x, 2.0), "running_mean": (x.mean(),),
            "running_sum": (x.sum(),),
        }  # fmt: skip
        for name, args in arguments.items():
            way(module, f"{stage}_{name}", module.metric[f"on_{stage}"][name], *args)

    assert_same(step, lambda: for_stages(lambda: nn.ModuleDict({name: make() for name, make in makers.items()})))


def collection(**kwargs: Any) -> tm.MetricCollection:
    """Top-1 and top-3 accuracy begin with equal states: compute groups must not take them for one."""
    return tm.MetricCollection(
        {
            "top1": tc.MulticlassAccuracy(NUM_CLASSES, top_k=1),
            "top3": tc.MulticlassAccuracy(NUM_CLASSES, top_k=3),
            "f1": tc.MulticlassF1Score(NUM_CLASSES),
            "recall": tc.MulticlassRecall(NUM_CLASSES),
            "auroc": tc.MulticlassAUROC(NUM_CLASSES),
        },
        **kwargs,
    )


@pytest.mark.parametrize("compute_groups", [True, False])
@pytest.mark.parametrize("way", ["update", "forward", "returned", "member", "by_hand"])
def test_collections(way: str, compute_groups: bool) -> None:
    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        metrics, args = module.metric[f"on_{stage}"], (module.probabilities(X), y)
        if way == "returned":
            module.log_dict(
                {f"{stage}_{key}": value for key, value in metrics(*args).items()}, on_step=True, on_epoch=True
            )
        elif way == "member":
            for name, metric in metrics.items():
                metric.update(*args)
                module.log(f"{stage}_{name}", metric)
        else:
            (metrics if way == "forward" else metrics.update)(*args)
            if way != "by_hand":
                module.log_dict(metrics, on_step=stage == "train", on_epoch=True)

    def at_end(module: Probe, stage: str) -> None:
        if way == "by_hand":
            module.log_dict(module.metric[f"on_{stage}"].compute())
            module.metric[f"on_{stage}"].reset()

    def make() -> nn.ModuleDict:
        stages = ("train", "val", "test")
        return nn.ModuleDict(
            {f"on_{stage}": collection(prefix=f"{stage}_", compute_groups=compute_groups) for stage in stages}
        )

    assert_same(step, make, at_end)


def test_wrappers() -> None:
    """A tracker's newest metric does not exist when replicas are made."""

    def make() -> nn.ModuleDict:
        return nn.ModuleDict(
            {
                "minmax": tm.MinMaxMetric(tc.MulticlassAccuracy(NUM_CLASSES)),
                "tracker": tm.MetricTracker(tc.MulticlassAccuracy(NUM_CLASSES), maximize=True),
                "running": tm.wrappers.Running(tc.MulticlassAccuracy(NUM_CLASSES), window=3),
                "classwise": tm.ClasswiseWrapper(tc.MulticlassAccuracy(NUM_CLASSES, average=None)),
            }
        )

    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        if stage != "train":
            return
        args = module.probabilities(X), y
        if batch_idx == 0:
            module.num_epochs = getattr(module, "num_epochs", 0) + 1
        module.log_dict({f"minmax_{key}": value for key, value in module.metric["minmax"](*args).items()})
        module.log("tracked", module.metric["tracker"](*args))
        module.metric["running"](*args)
        module.log("running", module.metric["running"])
        module.log_dict(module.metric["classwise"](*args), on_epoch=True)

    def at_end(module: Probe, stage: str) -> None:
        if stage == "train":
            module.log("best", module.metric["tracker"].best_metric())
            module.log("tracker", module.metric["tracker"].compute())

    Probe.on_train_epoch_start = lambda self: self.metric["tracker"].increment()  # type: ignore[method-assign]
    try:
        assert_same(step, make, at_end)
    finally:
        del Probe.on_train_epoch_start


def test_metrics_shared_between_hooks_and_in_plain_lists() -> None:
    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.metric[0].update(X[:, 0].mean())  # for all stages
        module.metric[1][1].update(module.probabilities(X), y)

    def at_end(module: Probe, stage: str) -> None:
        module.log(f"{stage}_mean", module.metric[0].compute())
        if stage == "train":
            module.log("accuracy", module.metric[1][1].compute())
            module.metric[1][1].reset()

    def make() -> list[Any]:
        return [tm.MeanMetric(), ("named", tc.MulticlassAccuracy(NUM_CLASSES))]

    assert_same(step, make, at_end)


def test_metrics_of_a_nested_module() -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = tc.MulticlassAccuracy(NUM_CLASSES)

        def forward(self, scores: Tensor, y: Tensor) -> None:
            self.accuracy(scores, y)

    def step(module: Probe, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.metric(module.probabilities(X), y)
        module.log(f"{stage}_nested", module.metric.accuracy)

    assert_same(step, Head)


def test_a_single_sample_is_logged_at_once(Regression: Any, train: Callable, make_loader: Callable) -> None:
    """One replica has the whole batch, nothing has to be put together: a step may look at what it has logged."""

    class Module(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("index", float(batch_idx), on_step=False, on_epoch=True)
            assert self.trainer._results["training_step.index"].value == sum(range(batch_idx + 1))  # type: ignore[index]
            return super().training_step(batch, batch_idx)

    train(Module, 2, loader=make_loader(1, 3), max_epochs=1)


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


def test_a_log_of_ones_own(Regression: Any, train: Callable, make_loader: Callable) -> None:
    """It runs in every replica, and calls Lightning's."""

    class Module(Regression):
        def log(self, name: str, value: Any, *, prefix: str = "own", **kwargs: Any) -> None:
            super().log(f"{prefix}/{name}", value * 2, **kwargs)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.loss(batch)
            self.log("loss", loss, on_step=False, on_epoch=True)
            self.log("loss", loss, prefix="other", on_step=False, on_epoch=True)
            self.log_dict({"a": loss, "b": loss + 1}, on_step=False, on_epoch=True)
            return loss

        def on_train_epoch_end(self) -> None:
            self.log("end", 1.0)

    one, *others = (dict(train(Module, k).trainer.callback_metrics) for k in (1, 2, 3))
    assert set(one) == {"own/loss", "other/loss", "own/a", "own/b", "own/end"}
    for other in others:
        assert other.keys() == one.keys()
        assert all(math.isclose(other[name], one[name], rel_tol=1e-6) for name in one)
