"""The layers of a module, and the parameters and buffers in them."""

from collections.abc import Iterable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torchmetrics import Metric, MetricCollection
from torchmetrics.wrappers import MetricTracker

# one for all replicas, states included
SHARED = (Metric, MetricCollection, MetricTracker, torch.jit.ScriptModule)
NamedLayer = tuple[str, nn.Module]


class TensorPlace(NamedTuple):
    """A parameter or a buffer, and where it is."""

    tensor: Tensor
    layer: nn.Module
    name: str  # in the layer
    path: str  # in the module


def find_layers(roots: Iterable[NamedLayer], known: Sequence[NamedLayer] = ()) -> list[NamedLayer]:
    """All layers from the roots on, each once, without the known ones.

    Roots that are metrics or scripted layers are left out, and so is all that those hold.
    """
    known_ids = {id(layer) for _, layer in known}
    layers: dict[int, NamedLayer] = {}  # by id: metrics are equal where states are

    def walk(layer: nn.Module, name: str) -> None:
        if id(layer) not in layers:
            layers[id(layer)] = name, layer
            for key, child in layer._modules.items() if not isinstance(layer, SHARED) else ():
                if child is not None:
                    walk(child, f"{name}.{key}" if name else key)

    for name, root in roots:
        if not isinstance(root, SHARED):
            walk(root, name)
    return [each for key, each in layers.items() if key not in known_ids]


def find_places(named: Sequence[NamedLayer], where: str) -> dict[int, TensorPlace]:
    """All parameters (`where="_parameters"`), or all buffers, by their ids."""
    places: dict[int, TensorPlace] = {}
    for prefix, layer in named:
        for name, tensor in vars(layer)[where].items() if not isinstance(layer, SHARED) else ():
            if tensor is not None:
                path = f"{prefix}.{name}".lstrip(".")
                places.setdefault(id(tensor), TensorPlace(tensor, layer, name, path))
    return places


def are_same(these: Sequence[Any], those: Sequence[Any]) -> bool:
    """Whether two lists hold the same objects."""
    return len(these) == len(those) and all(map(is_, these, those))


def check_layers(module: nn.Module, sync_batchnorm: bool) -> None:
    """Refuse layers that replicas would train wrongly, in one line with the fix."""
    for name, layer in module.named_modules():
        if isinstance(layer, (nn.Embedding, nn.EmbeddingBag)) and layer.max_norm is not None:
            raise MisconfigurationException(
                f"{name}: {type(layer).__name__}(max_norm=...) edits its weights in `forward`: "
                "each replica would edit others. Use one device, or shorten the rows in "
                "`on_train_batch_start`."
            )
        is_compiled = isinstance(layer, torch._dynamo.OptimizedModule) or layer._compiled_call_impl
        has_norm = any(isinstance(part, _BatchNorm) for part in layer.modules())
        if sync_batchnorm and is_compiled and has_norm:  # its graph does not call `F.batch_norm`
            raise MisconfigurationException(
                "sync_batchnorm=True does not reach BatchNorm in compiled layers: leave one of the "
                "two out."
            )
