"""`gather`, the inverse of `split_batch`: what replicas return of shards becomes the whole batch's.

| every replica has | the whole batch has |
| --- | --- |
| a float, or a 0-d floating tensor: a mean over the shard | the mean, weighted by the samples |
| an integer, or a 0-d integer tensor: a count | the sum |
| a boolean, or a 0-d boolean tensor | whether any is true |
| a tensor or an array with dimensions | all rows, joined along dimension 0 |
| ... with its samples along a later dimension | joined along that |
| ... which differ in other dimensions | the list of them, with a warning |
| a list with an item per sample, of texts, or of unequal lengths | all items, in order |
| any other list, a tuple, a dict, a dataclass | the same, of whole items |
| a text that is the same everywhere | that text |
| anything else | the list of them |
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_mgpu.allreduce.messages import add_all
from lightning_mgpu.strategies.devices_and_attributes import weighted_mean
from lightning_mgpu.strategies.equality import Notes
from lightning_mgpu.strategies.split_batch import bring_home, hold_samples, is_list, items_of, like


def gather(
    outputs: Sequence[Any],
    sizes: Sequence[int],
    device: torch.device,
    notes: Notes | None = None,
    name: str = "",
) -> Any:
    """Put together what replicas made of shards, as if one device had had the whole batch.

    Args:
        outputs: One per replica; `None` is left out.
        sizes: Samples of the shards.
        device: Where tensors go. What all replicas have on the CPU stays there.
        notes: Takes warnings.
        name: What this is, for a warning.
    """
    present = [(output, size) for output, size in zip(outputs, sizes) if output is not None]
    if notes and 0 < len(present) < len(outputs):
        notes.warn(
            f"{name} is None in {len(outputs) - len(present)} of {len(outputs)} replicas: their "
            "samples do not count, in the loss or in what else is made of it. A step must not "
            "decide by its shard."
        )
    outputs, sizes = [output for output, _ in present], [size for _, size in present]
    if len(outputs) < 2:
        return bring_home(outputs[0], device) if outputs else None
    first = outputs[0]
    if all(isinstance(output, Tensor) for output in outputs):
        if not all(output.is_cpu for output in outputs):
            outputs = [output.to(device) for output in outputs]
        return _gather_tensors(outputs, sizes, notes, name)
    if isinstance(first, np.ndarray):
        if first.dtype.kind not in "biufc":  # of texts, not of numbers
            return np.concatenate(outputs)
        tensors = [torch.as_tensor(output) for output in outputs]
        whole = _gather_tensors(tensors, sizes, notes, name)
        return apply_to_collection(whole, Tensor, Tensor.numpy)
    if isinstance(first, (bool, np.bool_)):
        return any(outputs)
    if isinstance(first, (int, float, np.number)):
        is_mean = any(isinstance(output, (float, np.inexact)) for output in outputs)
        return weighted_mean(outputs, sizes) if is_mean else sum(outputs)
    if isinstance(first, str) and set(outputs) == {first}:
        return first
    if is_list(first) and _are_joined(outputs, sizes):
        return type(first)(item for output in outputs for item in bring_home(output, device))
    if isinstance(first, Mapping) and any(output.keys() != first.keys() for output in outputs):
        names = dict.fromkeys(key for output in outputs for key in output)
        columns = {key: [output.get(key) for output in outputs] for key in names}
        return {
            key: gather(column, sizes, device, notes, f"{name}[{key!r}]")
            for key, column in columns.items()
        }
    items = [items_of(output) or [] for output in outputs]
    if items_of(first) is not None and len({len(each) for each in items}) == 1:
        if notes and type(first) is list and any(type(item) in (int, float) for item in first):
            notes.warn(
                f"{name}: lists of numbers from replicas are put together item by item, and not "
                "joined. Return a tensor to join them, or a tuple."
            )
        keys = list(first) if isinstance(first, Mapping) else range(len(items[0]))
        parts = [
            gather(part, sizes, device, notes, f"{name}[{key!r}]")
            for key, part in zip(keys, zip(*items))
        ]
        return like(first, parts)
    return [bring_home(output, device) for output in outputs]


def _gather_tensors(
    tensors: Sequence[Tensor], sizes: Sequence[int], notes: Notes | None, name: str
) -> Any:
    first = tensors[0]
    if not any(tensor.ndim for tensor in tensors):
        if first.is_floating_point() or first.is_complex():
            return weighted_mean(tensors, sizes)
        stacked = torch.stack(list(tensors))
        return stacked.any(0) if first.dtype == torch.bool else stacked.sum(0)
    # 0-d ones were squeezed, from a shard of one sample
    tensors = [tensor if tensor.ndim else tensor.reshape(1) for tensor in tensors]
    has_rows = not any(len(tensor) % size for tensor, size in zip(tensors, sizes))
    for dim in range(1, first.ndim if not has_rows else 0):
        if all(tensor.shape[dim : dim + 1] == (size,) for tensor, size in zip(tensors, sizes)):
            return torch.cat(list(tensors), dim)
    if len({tensor.shape[1:] for tensor in tensors}) > 1:  # padded to different lengths
        if notes:
            notes.warn(
                f"{name}: replicas return tensors of different shapes, which cannot be joined. The "
                "list of them is returned."
            )
        return list(tensors)
    if notes and not has_rows and len({len(tensor) for tensor in tensors}) == 1:
        notes.warn(
            f"{name}: every replica returns a tensor of {len(tensors[0])} rows, which are not its "
            f"samples. They are joined to {sum(map(len, tensors))} rows, not added or averaged."
        )
    return torch.cat(list(tensors))


def _are_joined(outputs: Sequence[Any], sizes: Sequence[int]) -> bool:
    """Whether lists are joined: they hold an item per sample, or results of each shard."""
    if any(len(output) != size for output, size in zip(outputs, sizes)):
        are_texts = all(isinstance(item, str) for output in outputs for item in output)
        lengths = {len(output) for output in outputs}
        return len(lengths) > 1 or (are_texts and any(output != outputs[0] for output in outputs))
    return hold_samples(outputs, sizes)


@torch.no_grad()
def average_statistics(
    targets: Sequence[Tensor], statistics: Mapping[int, Sequence[Tensor]], sizes: Mapping[int, int]
) -> None:
    """Average what BatchNorm has tracked into the user's tensors, weighted by samples.

    A moving average is linear. It is written by `.data`, because the backward pass may have saved
    the tensor, and refuses one that was edited. Counts of batches are replica 0's.
    """
    places = [n for n, target in enumerate(targets) if target.is_floating_point()]
    values = [*statistics[0]]
    for n in places:
        values[n] = torch.zeros_like(values[n])
    for i, size in sizes.items() if places else ():
        means, parts = ([each[n] for n in places] for each in (values, statistics[i]))
        add_all(means, parts, alpha=size / sum(sizes.values()))
    if targets:
        torch._foreach_copy_([target.data for target in targets], values)


def reduce_logged(values: Sequence[Tensor], weights: Sequence[float], reduce_fx: Any) -> Tensor:
    """Reduce one logged value per shard to the whole batch's, by `self.log(reduce_fx=...)`."""
    reduce_fx = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
    name, stacked = reduce_fx.lower(), torch.stack(list(values))
    if name in ("mean", "avg"):  # half precision would round a mean, and integers have none
        wide = stacked.to(torch.promote_types(stacked.dtype, torch.float32))
        counted = [(value, n) for value, n in zip(wide, weights) if n]  # over nothing it is NaN
        return weighted_mean(*zip(*counted))
    if name == "sum":
        return stacked.sum(0)
    if name in ("max", "amax", "min", "amin"):
        return stacked.amax(0) if "max" in name else stacked.amin(0)
    return values[0]  # for Lightning to refuse
