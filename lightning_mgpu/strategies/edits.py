"""Weights and buffers that a step edits, in place or by assigning others.

If the replicas' values differ afterwards, the first replica's value is kept, with a warning.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

from lightning_mgpu.strategies.devices_and_attributes import data_of
from lightning_mgpu.strategies.replicas import Marks, Replicas, TensorSet, marks


class Edits:
    """Finds the edits that steps of the replicas make, and puts them together."""

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas
        self.data_was_read = False  # of a weight or buffer by a step, which may have edited it
        self._buffer_marks: Marks = []  # when the step began

    def begin(self) -> None:
        """A step begins, and the replicas are equal."""
        self._buffer_marks, self.data_was_read = marks(self.replicas.buffer_sets.values()), False

    def find(self, active: Sequence[int]) -> list[dict[str, Any]]:
        """By replica of the step: the weights and buffers that may be edited, by their paths."""
        replicas, buffers = self.replicas, self.replicas.buffer_sets
        edited = self._edited(replicas.parameter_sets, replicas.equal_marks)
        held = {path: [replicas.parameter_sets[path][i] for i in active] for path in edited}
        edited = self._edited(buffers, self._buffer_marks)
        number = {id(owner): n for n, owner in enumerate(replicas.state.owners)} if buffers else {}
        for path, tensors in buffers.items():
            layer, name = replicas.place_of[id(tensors[0])][1:3]
            if not isinstance(layer, _NormBase):  # whose statistics are averaged
                namespaces = [replicas.state.stores[i][number[id(layer)]] for i in active]
                now = [namespace["_buffers"].get(name) for namespace in namespaces]
                if path in edited or any(tensors[i] is not each for i, each in zip(active, now)):
                    held[path] = now
        return [{path: each[n] for path, each in held.items()} for n in range(len(active))]

    def _edited(self, sets: Mapping[str, TensorSet], before: Marks) -> set[str]:
        """The paths of the sets that have an edited tensor, as far as torch knows."""
        if self.data_was_read:
            return set(sets)
        now, k = marks(sets.values()), len(self.replicas.devices)
        if now == before:
            return set()
        starts = range(0, len(now), k)
        return {path for path, n in zip(sets, starts) if before[n : n + k] != now[n : n + k]}

    def combine(self, edits: Mapping[int, Mapping[str, Any]]) -> None:
        """Give all replicas replica 0's values, and warn if the others' were different ones."""
        replicas = self.replicas
        for path in dict.fromkeys(path for each in edits.values() for path in each):
            original = (replicas.parameter_sets.get(path) or replicas.buffer_sets[path])[0]
            held = {i: each[path] for i, each in edits.items() if path in each}
            replicas.distrust()
            self._compare(original, [*held.values()])
            if replicas.first and 0 not in held:
                raise RuntimeError(
                    f"A step edits {path} by what is in its shard, and only in some processes: "
                    "edit it in a hook, for example `on_train_batch_start`."
                )
            if replicas.first:
                self._assign(original, held[0])

    def _compare(self, original: Tensor, held: list[Any]) -> None:
        """Warn if the tensors that the replicas hold after an edit differ."""
        _, layer, name, _ = self.replicas.place_of[id(original)]
        message = (
            f"A step edits {name} of {type(layer).__name__} by what is in its shard. The first "
            "replica's value is kept for all: edit it in a hook, for example "
            "`on_train_batch_start`."
        )
        if len({t if t is None else (t.shape, t.dtype, t.layout) for t in held}) > 1:
            self.replicas.notes.warn(message)
        elif held[0] is not None and held[0].layout == torch.strided:
            self.replicas.notes.compare(message, held)

    @torch.no_grad()
    def _assign(self, original: Tensor, value: Tensor | None) -> None:
        """Give a weight or a buffer the value that replica 0 has in its process."""
        if value is None:
            place = self.replicas.place_of[id(original)]
            place.layer._buffers[place.name] = None
        elif (value.shape, value.dtype) == (original.shape, original.dtype):
            data_of(original).copy_(value)
        else:
            original.data = value.detach()
