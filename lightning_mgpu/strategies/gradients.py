"""From the losses of k replicas to one gradient.

The Trainer gets one loss, the mean over the whole batch. Its backward pass runs the replicas' own, one after the other,
each in its turn. Then the gradients are reduced. Whoever looks at a gradient afterwards, a callback or the module's own
`backward`, sees the whole batch's.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu.allreduce.messages import copy_all
from lightning_mgpu.strategies.one_process import gpus_first
from lightning_mgpu.strategies.replicas import BEFORE_BACKWARD, Replicas, differ, to_bools
from lightning_mgpu.strategies.split_batch import weighted_mean

Losses = Mapping[int, tuple[Tensor, float]]  # by replica: its loss, and its share of the batch


class Gradients:
    """The gradients of k replicas. `reduce_gradients` leaves sums in each of them if `sums_everywhere`."""

    def __init__(
        self,
        replicas: Replicas,
        turn: Callable[[int], AbstractContextManager],
        reduce_gradients: Callable[[dict[str, list[Tensor]]], None],
        sums_everywhere: bool,
    ) -> None:
        self.replicas, self.turn = replicas, turn
        self.reduce_gradients, self.sums_everywhere = reduce_gradients, sums_everywhere
        self.is_checked = False  # that replicas' gradients are equal, in this epoch
        self.is_compared = False  # the same before an update in manual optimization
        self.are_reduced = False  # by the backward pass that runs
        self._known: list[
            tuple[Tensor | None, int]
        ] = []  # all gradients, and versions, when the replicas' were equal

    def join(
        self, losses: Mapping[int, Tensor], sizes: Mapping[int, int], is_one_graph: bool
    ) -> Tensor:
        """The loss of the whole batch, whose backward pass computes and reduces the replicas' gradients.

        A replica's loss is the mean over its shard, which has so many samples. Where the replicas' graphs are one, by
        synchronised BatchNorm, one pass runs for all.
        """
        total = sum(sizes[i] for i in losses)
        home = [loss.detach().to(self.replicas.devices[0]) for loss in losses.values()]
        value = weighted_mean(home, [sizes[i] for i in losses])
        connected = {
            i: (loss, sizes[i] / total) for i, loss in losses.items() if loss.requires_grad
        }
        if not connected:
            return value
        anchor = torch.zeros_like(value, requires_grad=True)
        anchor.register_hook(
            lambda gradient: self._backward_and_reduce(gradient, connected, is_one_graph)
        )
        return value + anchor  # whose backward pass comes to the anchor

    def _backward_and_reduce(self, gradient: Tensor, losses: Losses, is_one_graph: bool) -> None:
        """Compute the replicas' gradients, reduce them, and add them to those of the batches before."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for gradients of gradients, which several replicas do not have. Compute them "
                "in training_step by torch.autograd.grad, or use one device."
            )
        self.replicas.copy_edited(self.replicas.hooks.intersection(BEFORE_BACKWARD))
        parameters = self.replicas.parameters
        before = [copies[0].grad for copies in parameters]
        self._known.clear()  # nothing holds the old ones
        for param in (every := [param for copies in parameters for param in copies]):
            param.grad = None
        attributes = [dict(vars(param)) for param in every]
        with _no_hooks(parameters):
            self._backward(gradient, losses, is_one_graph)
        after = [
            (old.get(name), new)
            for old, param in zip(attributes, every)
            for name, new in vars(param).items()
        ]
        if any(old is not new for old, new in after):
            raise RuntimeError(
                "The backward pass has put an attribute on a weight (per-sample gradients, say): replicas have one "
                "each, of their shards. Use one device."
            )
        with torch.no_grad():
            self._reduce()
            self._accumulate(before)
        self.are_reduced = True

    def _backward(self, gradient: Tensor, losses: Losses, is_one_graph: bool) -> None:
        keep_graph = (
            torch._C._autograd._get_current_graph_task_keep_graph()
        )  # private: whether retain_graph=True
        parts = {i: (gradient * weight).to(loss.device) for i, (loss, weight) in losses.items()}
        if is_one_graph:
            torch.autograd.backward(
                [loss for loss, _ in losses.values()], list(parts.values()), keep_graph
            )
            return
        for i in gpus_first(losses, self.replicas.devices):
            with self.turn(i):
                torch.autograd.backward(losses[i][0], parts[i], keep_graph)

    def _reduce(self) -> None:
        """Reduce the gradients. Where a replica has none it counts as zero; sparse ones are added up by torch."""
        gradients: dict[str, list[Tensor]] = {}
        places: set[int] = set()
        for name, copies in self.replicas.copies.items():
            parts = [param.grad for param in copies if param.grad is not None]
            if any(part.is_sparse for part in parts):
                copies[0].grad = reduce(torch.add, [part.to(copies[0].device) for part in parts])
                self._copy([copies])
            elif parts:
                for param in copies:
                    param.grad = (
                        torch.zeros_like(param)
                        if param.grad is None
                        else _unshared(param.grad, places)
                    )
                every = [param.grad for param in copies if param.grad is not None]
                # one element for a 0-d tensor: the book's `data[0][:] += ...` takes no 0-d one
                gradients[name] = [
                    gradient if gradient.ndim else gradient.view(1) for gradient in every
                ]
        self.reduce_gradients(gradients)
        if self.sums_everywhere and not self.is_checked:
            self._check_sums(gradients)
            self.is_checked = True

    def _check_sums(self, gradients: dict[str, list[Tensor]]) -> None:
        """Raise a ValueError if replicas have other sums than the first one: they would drift apart."""
        pairs = [
            (name, i, tensors[0], other)
            for name, tensors in gradients.items()
            for i, other in enumerate(tensors)
        ]
        are_wrong = to_bools(differ(first, other) for _, _, first, other in pairs)
        for (name, i, first, other), is_wrong in zip(pairs, are_wrong):
            if is_wrong:
                raise ValueError(
                    f"The allreduce left replica {i} ({other.device}) with another sum than replica 0 for the "
                    f"gradient of {name}, of shape {tuple(first.shape)}: replicas must be bit-identical."
                )

    def _accumulate(self, before: Sequence[Tensor | None]) -> None:
        """Add the reduced gradients to those of the batches before. Autograd does, which calls the user's hooks."""
        added: list[tuple[Tensor, Tensor]] = []
        parameters = self.replicas.parameters
        for (original, *_), old in zip(parameters, before):
            if original.grad is not None and (old is not None or _hooks(original)):
                added.append((original, original.grad))
                original.grad = None
            if old is not None:
                original.grad = old
        if added:
            torch.autograd.backward(
                [original for original, _ in added], [gradient for _, gradient in added]
            )
        if self.sums_everywhere and not added and all(old is None for old in before):
            self._known = self._versions()  # what the allreduce has left in them
        elif not self.replicas.module.automatic_optimization:
            self.copy_changed()  # replicas go on with them
        else:  # they follow when an update or a step needs them; until then their memory is free
            for other in (other for copies in parameters for other in copies[1:]):
                other.grad = None

    def copy_changed(self) -> None:
        """Give the replicas the first one's gradients if somebody has changed one: clipping, `zero_grad` or a hook."""
        if self.replicas.hooks or not self._are_known():
            self._copy(self.replicas.parameters)
            self._known = self._versions()

    @contextmanager
    def copied_on_demand(self) -> Iterator[None]:
        """Inside the block the first look at any `.grad` gives the replicas the first one's gradients.

        A step may look at those of the step before; hardly any does, and copies would cost every step.
        """
        grad: Any = torch._C.TensorBase.grad  # private: what `Tensor.grad` is

        def look(tensor: Tensor) -> Tensor | None:
            restore()
            self.copy_changed()
            return grad.__get__(tensor)  # type: ignore[no-any-return]

        def restore() -> None:
            if "grad" in vars(Tensor):
                del Tensor.grad

        Tensor.grad = property(look, grad.__set__, grad.__delete__)  # type: ignore[assignment]
        try:
            yield
        finally:
            restore()

    def _copy(self, parameters: Sequence[Sequence[Tensor]]) -> None:
        for others in list(zip(*parameters))[1:]:
            sources, targets = [], []
            for (original, *_), other in zip(parameters, others):
                gradient = original.grad
                if gradient is None or gradient.layout != torch.strided:
                    other.grad = None if gradient is None else gradient.to(other.device, copy=True)
                else:
                    other.grad = torch.empty_like(gradient, device=other.device)
                    sources.append(gradient)
                    targets.append(other.grad)
            copy_all(targets, sources)

    def forget(self) -> None:
        """The first replica's gradients may have been edited in a way that torch does not count."""
        self._known = []

    def _are_known(self) -> bool:
        """Whether all gradients are as they were when the replicas' were equal. An edit of `.data` is not seen."""
        known, now = self._known, self._versions()
        return len(known) == len(now) and all(
            a is b and n == m for (a, n), (b, m) in zip(known, now)
        )

    def _versions(self) -> list[tuple[Tensor | None, int]]:
        gradients = [param.grad for copies in self.replicas.parameters for param in copies]
        return [(gradient, 0 if gradient is None else gradient._version) for gradient in gradients]

    def check_manual(self, active: Sequence[int]) -> None:
        """Refuse gradients that differ: replicas may have edited them, or computed them, themselves.

        They are compared in an epoch's first step, and where torch has counted an edit. The host waits once.
        """
        if self.is_compared and self._are_known():
            return
        self.is_compared = True
        gradients = [[copies[i].grad for i in active] for copies in self.replicas.parameters]
        pairs = [(first, other) for first, *others in gradients for other in others]
        dense = [(a, b) for a, b in pairs if a is not None and b is not None and not a.is_sparse]
        if any((a is None) != (b is None) for a, b in pairs) or any(
            to_bools(differ(a, b) for a, b in dense)
        ):
            raise RuntimeError(
                "training_step must call self.manual_backward(loss), not loss.backward(), and edit gradients "
                "in the same way for every shard: the replicas' gradients differ before an update."
            )


def _unshared(gradient: Tensor, places: set[int]) -> Tensor:
    """Autograd gives two parameters views of one tensor where their gradients are equal. These are summed in place."""
    place = gradient.untyped_storage().data_ptr()
    gradient = gradient.clone() if place in places else gradient
    places.add(place)
    return gradient


def _hooks(param: Tensor) -> list[dict]:
    """What `register_hook` and `register_post_accumulate_grad_hook` have put on a parameter."""
    return [
        hooks for hooks in (param._backward_hooks, param._post_accumulate_grad_hooks) if hooks
    ]  # private


@contextmanager
def _no_hooks(parameters: Sequence[Sequence[Tensor]]) -> Iterator[None]:
    """Take the hooks off the parameters inside the block: they are for the whole gradient. Copies must have none."""
    if any(_hooks(other) for copies in parameters for other in copies[1:]):
        raise RuntimeError(
            "A step has put a hook on a weight: it would see one shard's gradient. Register it before training."
        )
    taken = [(hooks, dict(hooks)) for original, *_ in parameters for hooks in _hooks(original)]
    for hooks, _ in taken:
        hooks.clear()  # autograd goes on with the dict that it knows
    try:
        yield
    finally:
        for hooks, its_own in taken:
            hooks.update(its_own)
