"""From the losses of k replicas to one gradient.

The Trainer gets one loss, the mean over the whole batch. Its backward pass runs the replicas' own, one after the other,
each in its turn. Then the gradients are reduced. Whoever looks at a gradient afterwards, a callback or the module's own
`backward`, sees the whole batch's.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu.strategies.gather import weighted_mean
from lightning_mgpu.strategies.replicas import Replicas


class Gradients:
    """The gradients of k replicas.

    Args:
        replicas: Whose they are. `turn` enters the turn of one.
        reduce_gradients: Gets, for every parameter by its name, k tensors, and leaves their sum in them.
        sums_everywhere: Whether it leaves the sum in each of them, or in the first alone.
    """

    def __init__(
        self,
        replicas: Replicas,
        turn: Callable[[int], AbstractContextManager],
        reduce_gradients: Callable[[dict[str, list[Tensor]]], None],
        sums_everywhere: bool,
    ) -> None:
        self.replicas, self.turn = replicas, turn
        self.reduce_gradients, self.sums_everywhere = reduce_gradients, sums_everywhere
        self.is_checked = False  # that the sums are equal, in this epoch
        self.are_reduced = False  # by the backward pass that runs
        self.is_manual = False  # in manual optimization replicas clear and edit their gradients themselves
        self.may_be_edited = False  # by hooks of the user's, in ways that torch does not count
        self._known: dict[int, tuple[Tensor, int]] = {}  # by a parameter's id: its gradient, and its version, then

    def join(self, losses: Mapping[int, Tensor], sizes: Mapping[int, int], is_one_graph: bool = False) -> Tensor:
        """The loss of the whole batch, whose backward pass computes and reduces the replicas' gradients.

        A replica's loss is the mean over its shard, which has so many samples. Where the replicas' graphs are one, by
        synchronised BatchNorm, one pass runs for all.
        """
        total = sum(sizes[i] for i in losses)
        home = [loss.detach().to(self.replicas.devices[0]) for loss in losses.values()]
        value = weighted_mean(home, [sizes[i] for i in losses])
        connected = {i: (loss, sizes[i] / total) for i, loss in losses.items() if loss.requires_grad}
        if not connected:
            return value
        anchor = torch.zeros_like(value, requires_grad=True)
        anchor.register_hook(lambda gradient: self._backward_and_reduce(gradient, connected, is_one_graph))
        return value + anchor  # whose backward pass comes to the anchor

    def _backward_and_reduce(
        self, gradient: Tensor, losses: Mapping[int, tuple[Tensor, float]], is_one_graph: bool
    ) -> None:
        """Compute the replicas' gradients, reduce them, and add them to what was there before."""
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for gradients of gradients, which several replicas do not have. Compute them "
                "in training_step by torch.autograd.grad, or use one device."
            )
        if self.may_be_edited:
            self.replicas.copy_parameters()  # `on_before_backward` may have edited the first one's weights
        parameters = self.replicas.parameters
        before, hooks = [copies[0].grad for copies in parameters], list[list[dict]]()
        try:
            for copies in parameters:
                hooks.append(_take_hooks(copies))
                for param in copies:
                    param.grad = None
            self._backward(gradient, losses, is_one_graph)
        finally:
            for copies, its_hooks in zip(parameters, hooks):
                _put_hooks(copies[0], its_hooks)
        with torch.no_grad():
            self._reduce()
            self._accumulate(before, [any(its_hooks) for its_hooks in hooks])
        self.are_reduced = True

    def _backward(self, gradient: Tensor, losses: Mapping[int, tuple[Tensor, float]], is_one_graph: bool) -> None:
        keep_graph = torch._C._autograd._get_current_graph_task_keep_graph()  # private: whether retain_graph=True
        parts = {i: (gradient * weight).to(loss.device) for i, (loss, weight) in losses.items()}
        if is_one_graph:
            torch.autograd.backward([loss for loss, _ in losses.values()], list(parts.values()), keep_graph)
            return
        for i, (loss, _) in losses.items():
            with self.turn(i):
                torch.autograd.backward(loss, parts[i], keep_graph)

    def _reduce(self) -> None:
        """Reduce the gradients. Where a replica has none it counts as zero; sparse ones are added up by torch."""
        gradients: dict[str, list[Tensor]] = {}
        for name, copies in self.replicas.copies.items():
            parts = [param.grad for param in copies if param.grad is not None]
            if any(part.is_sparse for part in parts):
                home = [part.to(self.replicas.devices[0]) for part in parts]
                total = reduce(torch.add, home)
                for param in copies:
                    param.grad = total.to(param.device, copy=True)
            elif parts:
                for param in copies:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                # one element for a 0-d tensor: the book's `data[0][:] += ...` takes no 0-d one
                every: list[Any] = [param.grad for param in copies]
                gradients[name] = [gradient if gradient.ndim else gradient.view(1) for gradient in every]
        self.reduce_gradients(gradients)
        if self.sums_everywhere and not self.is_checked:
            self._check_sums(gradients)
            self.is_checked = True

    def _check_sums(self, gradients: dict[str, list[Tensor]]) -> None:
        """Raise a ValueError if replicas have other sums than the first one: they would drift apart."""
        for name, (first, *others) in gradients.items():
            for i, other in enumerate(others, start=1):
                if not are_equal(first, other):
                    raise ValueError(
                        f"The allreduce left replica {i} ({other.device}) with another sum than replica 0 for the "
                        f"gradient of {name}, of shape {tuple(first.shape)}: replicas must be bit-identical."
                    )

    def _accumulate(self, before: Sequence[Tensor | None], have_hooks: Sequence[bool]) -> None:
        """Add the reduced gradients to those of the batches before. Autograd does, which calls the user's hooks."""
        reduced: list[tuple[Tensor, Tensor]] = []
        for (original, *_), old, has_hooks in zip(self.replicas.parameters, before, have_hooks):
            if original.grad is not None and (old is not None or has_hooks):
                reduced.append((original, original.grad))
            if old is not None or has_hooks:
                original.grad = old
        if reduced:
            torch.autograd.backward([weight for weight, _ in reduced], [gradient for _, gradient in reduced])
        for copies, old, has_hooks in zip(self.replicas.parameters, before, have_hooks):
            if not (self.sums_everywhere or self.is_manual):
                for other in copies[1:]:
                    other.grad = None  # nobody needs it
            elif not self.sums_everywhere or old is not None or has_hooks:
                self._copy(copies)
            self._remember(copies)

    def _copy(self, copies: Sequence[Tensor]) -> None:
        """Give the replicas the first one's gradient of a parameter."""
        original, *others = copies
        for other in others:
            other.grad = None if original.grad is None else original.grad.to(other.device, copy=True)
        self._remember(copies)

    def copy_changed(self) -> None:
        """Give the replicas the first one's gradients that clipping, `zero_grad` or a hook has changed since then."""
        for copies in self.replicas.parameters:
            are_there = {param.grad is not None for param in copies}
            if self.may_be_edited or len(are_there) > 1 or self._is_changed(copies[0]):
                self._copy(copies)

    def check_manual(self, active: Sequence[int]) -> None:
        """Compare the gradients that active replicas have edited themselves, or computed.

        Raises:
            RuntimeError: If they differ.
        """
        for copies in self.replicas.parameters:
            first, *others = (copies[i] for i in active)
            for other in others:
                if not (self._is_changed(first) or self._is_changed(other)):
                    continue
                if (first.grad is None) != (other.grad is None) or (
                    first.grad is not None and not are_equal(first.grad, other.grad)  # type: ignore[arg-type]
                ):
                    raise RuntimeError(
                        "training_step must call self.manual_backward(loss), not loss.backward(), and edit gradients "
                        "in the same way for every shard: the replicas' gradients differ before an update."
                    )

    def _remember(self, copies: Sequence[Tensor]) -> None:
        for param in copies:
            self._known.pop(id(param), None)
            if param.grad is not None:
                self._known[id(param)] = param.grad, param.grad._version

    def _is_changed(self, param: Tensor) -> bool:
        known = self._known.get(id(param))
        if param.grad is None or known is None:
            return param.grad is not None
        return known[0] is not param.grad or known[1] != param.grad._version


def are_equal(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers, NaN too, on whatever devices."""
    if tensor.is_sparse or other.is_sparse:
        return True  # torch has added them up
    other = other.to(tensor.device)
    return torch.equal(tensor, other) or torch.allclose(tensor, other, rtol=0, atol=0, equal_nan=True)


def _take_hooks(copies: Sequence[Tensor]) -> list[dict]:
    """Take off what `register_hook` and `register_post_accumulate_grad_hook` have put on a parameter.

    Raises:
        RuntimeError: If the copies have hooks, too.
    """
    original, *others = ((param._backward_hooks, param._post_accumulate_grad_hooks) for param in copies)  # private
    if any(any(hooks) for hooks in others):
        raise RuntimeError(
            "A step has put a hook on a weight: it would see one shard's gradient. Register it before training."
        )
    taken = [dict(hooks or {}) for hooks in original]
    for hooks in original:
        if hooks is not None:
            hooks.clear()  # autograd goes on with the dict that it knows
    return taken


def _put_hooks(param: Tensor, taken: list[dict]) -> None:
    for hooks, its_hooks in zip((param._backward_hooks, param._post_accumulate_grad_hooks), taken):
        if hooks is not None:
            hooks.update(its_hooks)
