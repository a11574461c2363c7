"""The inverse of `split_batch`: what replicas return, log and keep, put together on the first device."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Tensor

from lightning_mgpu.strategies.batch.nesting import (
    is_dataclass_instance,
    is_tensordict,
    leaves,
    like,
    map_items,
    with_fields,
    with_items,
)
from lightning_mgpu.strategies.batch.shards import Array


def gather(outputs: Sequence[Any], sizes: Sequence[int], device: torch.device) -> Any:
    """Put together what replicas made of shards of the given sizes, as if one device had had the whole batch.

    Tensors and lists as long as their shard, or a multiple of it (tokens of all its samples), are joined in order.
    Other floating values are taken as means over the shard and averaged with the sizes as weights; integers are counts
    and add up; booleans are true if any is. What nothing of this fits comes back as the list of what replicas returned.
    """
    present = [(output, size) for output, size in zip(outputs, sizes) if output is not None]
    outputs, sizes = [output for output, _ in present], [size for _, size in present]
    device = place_of(outputs, device)
    if len(outputs) <= 1:
        return _home(outputs[0], device) if outputs else None
    first = outputs[0]
    if all(isinstance(output, Tensor) for output in outputs):
        return _gather_tensors([output.to(device) for output in outputs], sizes)
    if all(isinstance(output, np.ndarray) and output.ndim for output in outputs):
        return np.concatenate(outputs)
    if is_tensordict(first):
        return torch.cat([output.to(device) for output in outputs])
    if isinstance(first, Mapping):
        keys = dict.fromkeys(key for output in outputs for key in output.keys())  # noqa: SIM118 (of a TensorDict: rows)
        return with_items(first, {key: gather([output.get(key) for output in outputs], sizes, device) for key in keys})
    if isinstance(first, (bool, np.bool_)):
        return any(outputs)
    if isinstance(first, (int, float, np.number)):
        is_mean = any(isinstance(output, (float, np.inexact)) for output in outputs)
        return weighted_mean(outputs, sizes) if is_mean else sum(outputs)
    if isinstance(first, (list, tuple)):
        if are_samples(outputs, sizes):
            return type(first)(item for output in outputs for item in _home(output, device))
        return like(first, [gather(items, sizes, device) for items in zip(*outputs)])
    if is_dataclass_instance(first):
        names = [field.name for field in fields(first)]
        values = {name: gather([getattr(output, name) for output in outputs], sizes, device) for name in names}
        return with_fields(first, values)
    return (
        first if isinstance(first, str) and set(outputs) == {first} else [_home(output, device) for output in outputs]
    )


def part_of(gathered: Any, own: Any) -> Any:
    """What a replica sees of the whole batch's: means, sums and what somebody has added; but its own of samples."""
    if is_tensordict(own):
        return own
    if isinstance(own, Mapping) and isinstance(gathered, Mapping):
        parts = {key: part_of(whole, own[key]) if key in own else whole for key, whole in gathered.items()}
        return with_items(gathered, parts)
    if isinstance(own, (list, tuple)) and isinstance(gathered, (list, tuple)):
        if len(gathered) != len(own):
            return own  # an item a sample
        return like(own, [part_of(whole, item) for whole, item in zip(gathered, own)])
    if is_dataclass_instance(own) and type(gathered) is type(own):
        names = [field.name for field in fields(own)]
        return with_fields(gathered, {name: part_of(getattr(gathered, name), getattr(own, name)) for name in names})
    if isinstance(own, Tensor):
        return gathered if isinstance(gathered, Tensor) and gathered.shape == own.shape else own
    is_part = own is None or isinstance(own, (int, float, np.number, np.bool_, Mapping, list, tuple))
    return gathered if is_part or is_dataclass_instance(own) else own


def bring_home(data: Any, home: torch.device, away: torch.device) -> Any:
    """What a replica on device `away` has made, on device `home`; what it has put on the CPU beside a GPU stays there.

    Objects that hold tensors are copied.
    """
    if home == away or isinstance(data, type):
        return data
    if isinstance(data, Tensor):
        return data if data.is_cpu and away.type != "cpu" else data.to(home)
    if hasattr(data, "to"):
        return move_data_to_device(data, home)
    bring = partial(bring_home, home=home, away=away)
    if isinstance(data, (Mapping, list, tuple)) or is_dataclass_instance(data):
        return map_items(data, bring)
    held = {name: value for name, value in getattr(data, "__dict__", {}).items() if isinstance(value, Tensor)}
    if all(tensor.device != away for tensor in held.values()):
        return data
    brought = copy.copy(data)
    vars(brought).update({name: bring(tensor) for name, tensor in held.items()})
    return brought


def place_of(values: Any, device: torch.device) -> torch.device:
    """`device`; or the CPU, where all replicas have put their tensors."""
    tensors = [leaf for leaf in leaves(values) if isinstance(leaf, Tensor)]
    return tensors[0].device if tensors and all(tensor.is_cpu for tensor in tensors) else device


def are_samples(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether lists hold one item a sample, not a few results for the whole shard."""
    if hasattr(outputs[0], "_fields"):
        return False
    if any(len(output) != size for output, size in zip(outputs, sizes)):
        return len({len(output) for output in outputs}) > 1  # as many as were found in each shard
    items = [(item, size) for output, size in zip(outputs, sizes) for item in output]
    if all(isinstance(item, Array) and item.ndim and len(item) == size for item, size in items):
        return False  # [logits, features], as many as there are samples by chance
    return isinstance(outputs[0], list) or not any(isinstance(item, (Tensor, int, float)) for item, _ in items)


def weighted_mean(values: Sequence[Any], weights: Sequence[float]) -> Any:
    """Sum of weight times value over the sum of weights; for one value, or equal numbers, the value itself."""
    if len(values) == 1 or (not isinstance(values[0], Tensor) and len(set(values)) == 1):
        return values[0]
    total = sum(weights)
    return sum(value * (weight / total) for value, weight in zip(values, weights))


def _home(output: Any, device: torch.device) -> Any:
    """One replica's output, whose device one sees by what is not on the CPU."""
    far = (leaf.device for leaf in leaves(output) if isinstance(leaf, Tensor) and not leaf.is_cpu)
    return bring_home(output, device, next(far, torch.device("cpu")))


def _gather_tensors(tensors: list[Tensor], sizes: Sequence[int]) -> Any:
    first = tensors[0]
    if not any(tensor.ndim for tensor in tensors):
        if first.dtype == torch.bool:
            return torch.stack(tensors).any()
        return weighted_mean(tensors, sizes) if _is_inexact(first) else torch.stack(tensors).sum(0)
    tensors = [tensor if tensor.ndim else tensor.reshape(1) for tensor in tensors]  # squeezed from a shard of one
    if len({(tensor.ndim, tensor.shape[1:]) for tensor in tensors}) > 1:
        return [row for tensor in tensors for row in tensor]  # padded to different lengths, say
    multiples = {tensor.size(0) / size for tensor, size in zip(tensors, sizes)}
    if len({tensor.shape for tensor in tensors}) > 1 or (len(multiples) == 1 and multiples.pop().is_integer()):
        return torch.cat(tensors)
    if first.dtype == torch.bool:
        return torch.stack(tensors).any(0)
    return weighted_mean(tensors, sizes) if _is_inexact(first) else torch.stack(tensors).sum(0)


def _is_inexact(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
