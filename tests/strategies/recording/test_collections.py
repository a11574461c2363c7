"""Collections, wrappers and other places of torchmetrics objects: over replicas equal to one device."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torchmetrics as tm
from torch import Tensor, nn
from torchmetrics import classification as tc

pytestmark = pytest.mark.slow

NUM_CLASSES = 4


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
def test_collections(way: str, compute_groups: bool, assert_same: Callable[..., None]) -> None:
    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
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

    def at_end(module: Any, stage: str) -> None:
        if way == "by_hand":
            module.log_dict(module.metric[f"on_{stage}"].compute())
            module.metric[f"on_{stage}"].reset()

    def make() -> nn.ModuleDict:
        stages = ("train", "val", "test")
        return nn.ModuleDict(
            {f"on_{stage}": collection(prefix=f"{stage}_", compute_groups=compute_groups) for stage in stages}
        )

    assert_same(step, make, at_end)


def test_wrappers(assert_same: Callable[..., None], probe: type, monkeypatch: pytest.MonkeyPatch) -> None:
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

    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
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

    def at_end(module: Any, stage: str) -> None:
        if stage == "train":
            module.log("best", module.metric["tracker"].best_metric())
            module.log("tracker", module.metric["tracker"].compute())

    def on_train_epoch_start(module: Any) -> None:
        module.metric["tracker"].increment()

    monkeypatch.setattr(probe, "on_train_epoch_start", on_train_epoch_start)
    assert_same(step, make, at_end)


def test_metrics_shared_between_hooks_and_in_plain_lists(assert_same: Callable[..., None]) -> None:
    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.metric[0].update(X[:, 0].mean())  # for all stages
        module.metric[1][1].update(module.probabilities(X), y)

    def at_end(module: Any, stage: str) -> None:
        module.log(f"{stage}_mean", module.metric[0].compute())
        if stage == "train":
            module.log("accuracy", module.metric[1][1].compute())
            module.metric[1][1].reset()

    def make() -> list[Any]:
        return [tm.MeanMetric(), ("named", tc.MulticlassAccuracy(NUM_CLASSES))]

    assert_same(step, make, at_end)


def test_metrics_of_a_nested_module(assert_same: Callable[..., None]) -> None:
    class Head(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.accuracy = tc.MulticlassAccuracy(NUM_CLASSES)

        def forward(self, scores: Tensor, y: Tensor) -> None:
            self.accuracy(scores, y)

    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        module.metric(module.probabilities(X), y)
        module.log(f"{stage}_nested", module.metric.accuracy)

    assert_same(step, Head)


class Tracker:
    """An object of the user's, with a metric in another object."""

    def __init__(self) -> None:
        self.inner = SimpleNamespace(by_name={"f1": tc.MulticlassF1Score(NUM_CLASSES)}, whole=self)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self._means = {"a": tm.MeanMetric()}
        self.tracker = Tracker()
        node = self.chain = SimpleNamespace()
        for _ in range(300):  # longer than functions can call themselves: shared, as it cannot be copied
            node.next = node = SimpleNamespace()


def test_metrics_in_private_containers_and_objects(assert_same: Callable[..., None]) -> None:
    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        hidden = module.metric[f"on_{stage}"]
        hidden._means["a"].update(X[:, 0].mean())
        hidden.tracker.inner.by_name["f1"].update(module.probabilities(X), y)

    def at_end(module: Any, stage: str) -> None:
        hidden = module.metric[f"on_{stage}"]
        for name, metric in {**hidden._means, **hidden.tracker.inner.by_name}.items():
            module.log(f"{stage}_{name}", metric.compute())
            metric.reset()

    assert_same(step, lambda: nn.ModuleDict({f"on_{stage}": Hidden() for stage in ("train", "val", "test")}), at_end)


def test_metrics_that_cannot_be_copied_are_shared(written: Callable[..., list[Any]]) -> None:
    """In an object with a lock: every replica's call counts, as calls of any shared object."""

    class Locked:
        def __init__(self) -> None:
            self.lock, self.total = threading.Lock(), tm.SumMetric()

    def step(module: Any, stage: str, X: Tensor, y: Tensor, batch_idx: int) -> None:
        with module.metric.lock:
            if stage == "train":
                module.metric.total.update(len(X))

    def at_end(module: Any, stage: str) -> None:
        if stage == "val":  # before the training epoch is over
            module.log("total", module.metric.total.compute())
            module.metric.total.reset()

    assert written(2, step, Locked, at_end)[-2][1]["total"] == 23
