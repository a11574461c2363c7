"""The gradients of k replicas become k sums, in one process or in many.

With several processes the parameters are dealt out. Each process gets all replicas' gradients of
its parameters, adds them up, and gives the sums to the others. So `reduce_gradients` always sees
k whole tensors. If few bytes travel, every process adds up all gradients instead, which saves a
round of messages.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu.strategies.equality import EqualityCheck
from lightning_mgpu.strategies.processes import Memory, Processes
from lightning_mgpu.strategies.replicas import Replicas

SMALL = 2**20  # bytes: if a process sends fewer to all others, all reduce, and save a round


@dataclass
class Reducer:
    """Reduces the gradients of all replicas."""

    replicas: Replicas
    processes: Processes
    reduce_gradients: Callable[[dict[str, list[Tensor]]], None]
    sums_everywhere: bool  # whether `reduce_gradients` leaves sums in all, not only the first
    reduces_all: bool  # whether every process always reduces every gradient
    is_check_due: bool = True
    check: EqualityCheck = field(default_factory=EqualityCheck)  # of the sums
    memory: Memory = field(default_factory=Memory)  # of what comes from other processes

    def reduce(self) -> None:
        """Reduce the gradients, and leave the sums in all replicas of this process."""
        rank, sets = self.processes.rank, self.replicas.parameter_sets
        reduces_all = self.reduces_all or self._num_bytes_to_all() <= SMALL
        _separate([param for params in sets.values() for param in params])
        grads = {name: [param.grad for param in params] for name, params in sets.items()}
        self.memory.begin()
        if reduces_all:
            received = self.processes.share("gradients", grads, memory=self.memory)
        else:
            parts: list[dict[str, Any]] = [{} for _ in range(self.processes.num)]
            for name, owner in self._deal_out().items():
                parts[owner][name] = grads[name]
            received = self.processes.exchange("gradients", parts, self.memory)
        sums = self._add_up(
            {name: [grad for part in received for grad in part[name]] for name in received[rank]}
        )
        if not reduces_all:
            shared = self.processes.share("sums of gradients", sums, memory=self.memory)
            for owner, part in enumerate(shared):
                for name, total in part.items() if owner != rank else ():
                    _give_sum(sets[name], total)

    def _num_bytes_to_all(self) -> int:
        """How much this process would send, if every process got all of its gradients."""
        num_others, sets = self.processes.num - 1, self.replicas.parameter_sets.values()
        if num_others == 0:
            return 0
        return num_others * sum(p.nbytes for params in sets for p in params if p.requires_grad)

    def _deal_out(self) -> dict[str, int]:
        """Which process reduces the gradient of each parameter: even shares of the bytes."""
        num_bytes = [0] * self.processes.num
        owner_of: dict[str, int] = {}
        firsts = {name: params[0] for name, params in self.replicas.parameter_sets.items()}
        sizes = {name: each.nbytes if each.requires_grad else 0 for name, each in firsts.items()}
        for name in sorted(sizes, key=sizes.__getitem__, reverse=True):
            owner_of[name] = num_bytes.index(min(num_bytes))
            num_bytes[owner_of[name]] += sizes[name]
        return owner_of

    def _add_up(self, grads_by_name: Mapping[str, Sequence[Tensor | None]]) -> dict[str, Tensor]:
        """Reduce gradients of all replicas. Returns the sums, which replicas here have, too.

        A missing gradient counts as zero. torch adds up sparse ones.
        """
        sums: dict[str, Tensor] = {}
        gradients: dict[str, list[Tensor]] = {}
        for name, grads in grads_by_name.items():
            params = self.replicas.parameter_sets[name]
            param_of = dict(zip(self.replicas.numbers, params))
            parts = [grad for grad in grads if grad is not None]
            if any(part.is_sparse for part in parts):
                home = params[0].device
                sums[name] = reduce(torch.add, [part.to(home) for part in parts])
                _give_sum(params, sums[name])
            elif parts:
                gradients[name] = []
                for i, grad in enumerate(grads):
                    param = param_of.get(i, params[0])  # another process has replica i's
                    dense = torch.zeros_like(param) if grad is None else grad
                    if i in param_of:
                        param.grad = dense
                    # one element for a 0-d tensor: the book's `data[0][:] += ...` takes no 0-d one
                    gradients[name].append(dense if dense.ndim else dense.view(1))
        self.reduce_gradients(gradients)
        if self.sums_everywhere and self.is_check_due:
            self._check_sums(gradients)
        return sums | {name: grads[0] for name, grads in gradients.items()}

    def _check_sums(self, gradients: dict[str, list[Tensor]]) -> None:
        """Raise a ValueError if replicas have other sums than the first: they would drift apart."""
        step = self.replicas.module.global_step
        if difference := self.check.find(gradients, step):
            name, i, when = difference
            wrong = gradients[name][i]
            raise ValueError(
                f"The allreduce left replica {i} ({wrong.device}) with another sum than replica 0 "
                f"for the gradient of {name}, of shape {tuple(wrong.shape)} ({when}): replicas "
                "must be bit-identical."
            )


def _separate(params: Sequence[Tensor]) -> None:
    """Copy where autograd has given two parameters views of one tensor: sums are in place."""
    places: set[int] = set()
    for param in params:
        if param.grad is not None and not param.grad.is_sparse:
            place = param.grad.untyped_storage().data_ptr()
            if place in places:
                param.grad = param.grad.clone()
            places.add(place)


def _give_sum(params: Sequence[Tensor], total: Tensor) -> None:
    """Give every replica of this process the sum. The first takes the tensor itself."""
    for i, param in enumerate(params):
        grad = total.to(param.device, copy=i > 0)
        param.grad = grad if grad.is_sparse else grad.view_as(param)
