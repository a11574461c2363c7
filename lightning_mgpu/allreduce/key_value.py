"""The book's parameter server: workers push gradients into a key-value store and pull the sum."""

from collections import defaultdict
from collections.abc import Hashable

import torch
from torch import Tensor


class KeyValueStore:
    """Gradients by key, on one device; a key is for example the name of a parameter."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._pushed: dict[Hashable, dict[int, Tensor]] = defaultdict(dict)

    def push(self, key: Hashable, worker: int, gradient: Tensor) -> None:
        """Send a worker's gradient to the store, which keeps a copy of it."""
        self._pushed[key][worker] = torch.empty_like(gradient, device=self.device).copy_(gradient)

    def pull(self, key: Hashable, out: Tensor) -> None:
        """Write the sum of all gradients of `key` into `out`.

        Terms are added in the order of the workers' ranks, so results are bitwise identical for
        any order of pushes. The first `pull` computes the sum, which later ones reuse.
        """
        first, *others = sorted(pushed := self._pushed[key])
        for worker in others:
            pushed[first].add_(pushed.pop(worker))
        out.copy_(pushed[first])


@torch.no_grad()
def key_value_allreduce(tensors: list[Tensor]) -> None:
    """Every device pushes its tensor to a store, then pulls the sum, in place.

    The store is on device 0 and needs memory for k n bytes. All 2(k-1) messages of n bytes have the
    store at one end. In a cluster the store is a separate machine (2k messages), and the keys are
    distributed over several of them.

    Source: d2l.ai, 'Parameter Servers', 'Key--Value Stores'; Li et al., 'Scaling Distributed
    Machine Learning with the Parameter Server' (2014).
    """
    store = KeyValueStore(tensors[0].device)
    for worker, gradient in enumerate(tensors):
        store.push("gradient", worker, gradient)
    for out in tensors:
        store.pull("gradient", out)


key_value_allreduce.elementwise = True  # type: ignore[attr-defined]
