"""The torchmetrics objects of a module: layers, and those in plain lists, dicts and objects."""

from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

MAX_ITEMS, MAX_DEPTH = 100, 3
BUILT_IN = frozenset(vars(LightningModule()))
OTHERS = ("torch", "torchmetrics", "lightning", "lightning_fabric", "pytorch_lightning", "numpy", "builtins")


def find_metrics(module: nn.Module) -> list[Any]:
    """Every metric and collection, also those inside one another, once."""
    found: dict[int, Any] = {}
    for owner in module.modules():
        if isinstance(owner, (Metric, MetricCollection)):
            found[id(owner)] = owner
        elif not type(owner).__module__.startswith("torch."):
            for name, value in vars(owner).items():
                if name not in BUILT_IN:
                    found.update({id(metric): metric for metric in _inside(value, MAX_DEPTH)})
    return list(found.values())


def _inside(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, (Metric, MetricCollection)):
        yield from (part for part in value.modules() if isinstance(part, (Metric, MetricCollection)))
    elif depth and (isinstance(value, (list, tuple, Mapping))):
        items = list(value.values() if isinstance(value, Mapping) else value) if len(value) <= MAX_ITEMS else []
        for item in items:
            yield from _inside(item, depth - 1)
    elif (
        depth
        and not isinstance(value, (nn.Module, Tensor, type))
        and type(value).__module__.split(".")[0] not in OTHERS
    ):
        for item in list(getattr(value, "__dict__", {}).values())[:MAX_ITEMS]:
            yield from _inside(item, depth - 1)
