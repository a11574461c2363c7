"""From the losses of k replicas to one gradient.

The Trainer gets one loss, the mean over the whole batch. Its backward pass runs the replicas' own,
one after the other, each in its turn. Then the gradients are reduced. Callbacks, and
the module's own `backward` after that, see the gradient of the whole batch.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from lightning_mgpu.allreduce.messages import copy_all
from lightning_mgpu.strategies.devices_and_attributes import (
    current_device,
    device_module,
    gpus_first,
    weighted_mean,
)
from lightning_mgpu.strategies.equality import differences, digest_of_all
from lightning_mgpu.strategies.hooks import NOT_BEFORE_BACKWARD, has_hooks
from lightning_mgpu.strategies.lockstep import Lockstep, refuse_again
from lightning_mgpu.strategies.reducing import Reducer
from lightning_mgpu.strategies.replicas import Replicas

Losses = Mapping[int, tuple[Tensor, float]]  # by replica: its loss, and its share of the batch
Graph = Sequence[tuple[Tensor, Tensor]]  # tensors of a batch that have one, and the leaves cut off


class Gradients:
    """The gradients of k replicas: their backward passes, and whether they are equal."""

    def __init__(
        self,
        replicas: Replicas,
        lockstep: Lockstep,
        reducer: Reducer,
    ) -> None:
        self.replicas, self.lockstep, self.reducer = replicas, lockstep, reducer
        self.processes = reducer.processes
        self.is_manual_check_due = True  # before an update in manual optimization
        self.are_reduced = False  # by the backward pass that runs
        # all gradients, and their versions, when the replicas' were equal
        self._equal: list[tuple[Tensor | None, int]] = []

    def join(
        self,
        losses: Mapping[int, Tensor],
        sizes: Mapping[int, float],
        batch_graph: Graph,
    ) -> Tensor:
        """The loss of the whole batch, whose backward pass computes and reduces the gradients.

        Args:
            losses: By replica, the mean over its shard.
            sizes: By replica, the samples of its shard, or what else its loss is a mean over.
            batch_graph: Tensors of the whole batch that have graphs, and the leaves that the shards
                are cut from.
        """
        counted = [i for i in losses if sizes[i]]  # a mean over nothing is NaN
        total = sum(sizes[i] for i in counted)
        home = [losses[i].detach().to(self.replicas.devices[0]) for i in counted or losses]
        value = (
            weighted_mean(home, [sizes[i] for i in counted])
            if counted
            else torch.zeros_like(home[0] + 0.0)
        )
        connected = {i: (losses[i], sizes[i] / total) for i in counted if losses[i].requires_grad}
        if counted and not connected:
            return value
        is_one_graph = self.lockstep.is_one_graph  # one pass is for all
        if is_one_graph and self.processes.num > 1 and len(connected) < len(losses):
            raise RuntimeError(
                "Replicas have exchanged tensors with gradients between processes, but not all of "
                "them have a loss that counts: no backward pass comes to what they gave."
            )
        numbers = self.replicas.numbers
        connected = {i: loss for i, loss in connected.items() if i in numbers}
        anchor = torch.zeros_like(value, requires_grad=True)
        anchor.register_hook(
            lambda grad: self._backward_and_reduce(grad, connected, is_one_graph, batch_graph)
        )
        return value + anchor  # whose backward pass comes to the anchor

    def _backward_and_reduce(
        self, gradient: Tensor, losses: Losses, is_one_graph: bool, batch_graph: Graph
    ) -> None:
        """Compute the gradients, reduce them, and add them to those of the batches before."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for gradients of gradients, which several replicas do not "
                "have. Compute them in training_step by torch.autograd.grad, or use one device."
            )
        if self.replicas.unknown_code.difference(NOT_BEFORE_BACKWARD):
            self.replicas.distrust()
        if self.replicas.is_distrusted:
            self.replicas.push_weights()
        sets = list(self.replicas.parameter_sets.values())
        before = [params[0].grad for params in sets]
        self._equal.clear()  # so that nothing holds the old ones
        for param in (every := [param for params in sets for param in params]):
            param.grad = None
        attributes = _attributes(every)
        with _no_hooks(sets), self.lockstep.backward_pass():
            self._backward(gradient, losses, is_one_graph, batch_graph)
        if {*map(id, _attributes(every))} - {*map(id, attributes)}:
            raise RuntimeError(
                "The backward pass has put an attribute on a weight (a single sample's gradient?): "
                "replicas have one each, of their shards. Use one device."
            )
        with torch.no_grad():
            self.reducer.reduce()
            self._accumulate(before)
        self.are_reduced = True

    def _backward(
        self, gradient: Tensor, losses: Losses, is_one_graph: bool, batch_graph: Graph
    ) -> None:
        # private: whether retain_graph=True
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        parts = {i: (gradient * weight).to(loss.device) for i, (loss, weight) in losses.items()}
        if is_one_graph and losses:
            with _no_layers_read(self.replicas.state.owners), self._no_random_numbers():
                every = [loss for loss, _ in losses.values()]
                torch.autograd.backward(every, list(parts.values()), keep_graph)
        else:
            first, devices = self.replicas.first, self.replicas.devices
            for i in gpus_first([i - first for i in losses], devices):
                loss, part = losses[first + i][0], parts[first + i]
                with self.lockstep.turn(first + i):
                    torch.autograd.backward(loss, part, keep_graph)
        used = [(tensor, leaf) for tensor, leaf in batch_graph if leaf.grad is not None]
        if used:
            tensors, leaves = zip(*used)
            torch.autograd.backward(tensors, [leaf.grad for leaf in leaves], keep_graph)
            for leaf in leaves:
                leaf.grad = None

    @contextmanager
    def _no_random_numbers(self) -> Iterator[None]:
        """Refuse a pass that draws some: replicas of different processes would get the same."""
        before = self._random_states()
        yield
        if not all(map(torch.equal, before, self._random_states())):
            raise RuntimeError(
                "The backward pass draws random numbers (in a hook on a tensor, a Function) where "
                "replicas have exchanged tensors (sync_batchnorm, all_gather), and replicas of "
                "different processes would get the same: draw them in training_step, or use one "
                "process."
            )

    def _random_states(self) -> list[Tensor]:
        """Of the generators of all devices here; none in one process."""
        if self.processes.num == 1:
            return []
        states = [torch.get_rng_state()]
        for device in dict.fromkeys(self.replicas.devices):
            if module := device_module(device):
                with current_device(device):
                    states.append(module.get_rng_state())
        return states

    def _accumulate(self, before: Sequence[Tensor | None]) -> None:
        """Add the reduced gradients to those of the batches before, by autograd.

        It calls the user's hooks.
        """
        added: list[tuple[Tensor, Tensor]] = []
        sets = list(self.replicas.parameter_sets.values())
        for (original, *_), old in zip(sets, before):
            if original.grad is not None and (old is not None or has_hooks(original)):
                added.append((original, original.grad))
                original.grad = None
            if old is not None:
                original.grad = old
        if added:
            torch.autograd.backward([each for each, _ in added], [grad for _, grad in added])
        if self.reducer.sums_everywhere and not added and all(old is None for old in before):
            self._equal = self._versions()  # what the allreduce has left in them
        elif not self.replicas.module.automatic_optimization:
            self.push()  # replicas go on with them
        else:  # they follow when an update or a step needs them; until then their memory is free
            for other in (other for params in sets for other in params[1:]):
                other.grad = None

    def push(self, *_: Any) -> None:
        """Give the replicas the first one's gradients if one may have been edited."""
        if self.replicas.unknown_code or not self._are_equal():
            self._push(list(self.replicas.parameter_sets.values()))
            self._equal = self._versions()

    def _push(self, sets: Sequence[Sequence[Tensor]]) -> None:
        for others in list(zip(*sets))[1:]:
            sources, targets = [], []
            for (original, *_), other in zip(sets, others):
                gradient = original.grad
                if gradient is None or gradient.layout != torch.strided:
                    other.grad = None if gradient is None else gradient.to(other.device, copy=True)
                else:
                    other.grad = torch.empty_like(gradient, device=other.device)
                    sources.append(gradient)
                    targets.append(other.grad)
            copy_all(targets, sources)

    def forget(self) -> None:
        """Forget that gradients were equal: an edit may have happened that torch does not count."""
        self._equal = []

    def _are_equal(self) -> bool:
        """Whether all gradients are as they were when the replicas' were equal.

        An edit of `.data` is not seen.
        """
        equal, now = self._equal, self._versions()
        are_same = all(a is b and n == m for (a, n), (b, m) in zip(equal, now))
        return are_same and len(equal) == len(now)

    def _versions(self) -> list[tuple[Tensor | None, int]]:
        sets = self.replicas.parameter_sets.values()
        gradients = [param.grad for params in sets for param in params]
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]

    def check_manual(self, active: Sequence[int]) -> None:
        """Refuse gradients that differ: replicas may have edited or computed them themselves.

        They are compared in an epoch's first step, and where torch has counted an edit. The host
        waits once.
        """
        is_due = self.is_manual_check_due or not self._are_equal()
        if not any(self.processes.share("an update", is_due)):
            return
        self.is_manual_check_due = False
        first, sets = self.replicas.first, self.replicas.parameter_sets.values()
        here = [i - first for i in active if i in self.replicas.numbers]
        by_set = [[params[i].grad for i in here] for params in sets]
        present = [[grad for grad in grads if grad is not None] for grads in by_set]
        dense = [grads for grads in present if grads and not grads[0].is_sparse]
        is_missing = any(0 < len(grads) < len(here) for grads in present)
        are_different = bool(dense and differences(dense).any())
        if self.processes.num > 1:
            digest = digest_of_all(grads[0] for grads in dense)
            are_different |= len({*self.processes.share("gradients of an update", digest)}) > 1
        if is_missing or are_different:
            raise RuntimeError(
                "training_step must call self.manual_backward(loss), not loss.backward(), and edit "
                "gradients in the same way for every shard: the replicas' gradients differ before "
                "an update."
            )


@contextmanager
def _no_layers_read(layers: Iterable[Any]) -> Iterator[None]:
    """Refuse a backward pass that looks at layers. It would find the first replica's state."""
    numbers = {id(layer) for layer in layers}

    def refuse(layer: nn.Module, name: str) -> Any:
        if id(layer) in numbers and not name.startswith("__"):  # its class
            refuse_again(type(layer).__name__)
        return object.__getattribute__(layer, name)

    with patch.object(nn.Module, "__getattribute__", refuse):
        yield


def _attributes(params: Sequence[Tensor]) -> list[Any]:
    return [each for attributes in map(vars, params) for each in attributes.values()]


def _hooks(param: Tensor) -> list[dict]:
    """What `register_hook` and `register_post_accumulate_grad_hook` have put on a parameter."""
    both = (param._backward_hooks, param._post_accumulate_grad_hooks)  # private
    return [hooks for hooks in both if hooks]


@contextmanager
def _no_hooks(sets: Sequence[Sequence[Tensor]]) -> Iterator[None]:
    """Take the hooks off the parameters inside the block: they are for the whole gradient.

    Raises:
        RuntimeError: If a step has put hooks on a replica's.
    """
    if any(has_hooks(other) for params in sets for other in params[1:]):
        raise RuntimeError(
            "A step has put a hook on a weight: it would see one shard's gradient. Register it "
            "before training."
        )
    taken = [(hooks, dict(hooks)) for original, *_ in sets for hooks in _hooks(original)]
    for hooks, _ in taken:
        hooks.clear()  # autograd goes on with the dict that it knows
    try:
        yield
    finally:
        for hooks, its_own in taken:
            hooks.update(its_own)
