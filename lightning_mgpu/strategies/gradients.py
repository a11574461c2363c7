"""From the losses of k replicas to one gradient: the backward pass, and where the gradients meet.

The Trainer gets one loss, the mean over the whole batch. Its backward pass runs the replicas' own, one after the other,
each in its turn. When all are done their gradients meet. Whoever looks at a gradient afterwards, a callback or the
module's own `backward`, sees the whole batch's.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from lightning_mgpu.strategies.gather import weighted_mean
from lightning_mgpu.strategies.replicas import Replicas

Turn = Callable[[int], AbstractContextManager]


class Gradients:
    """The gradients of k replicas. `exchange` leaves their sum in all replicas, or in the first alone."""

    def __init__(self, replicas: Replicas, exchange: Callable[[dict[str, list[Tensor]]], None], on_all: bool) -> None:
        self.replicas, self.exchange, self.on_all = replicas, exchange, on_all
        self.have_met = False  # since somebody has set it to False
        self.are_owned = False  # replicas clear and edit their gradients themselves, in manual optimization
        self.is_edited = False  # hooks of the user's may edit gradients without a mark
        self._left: dict[int, tuple[Tensor, int]] = {}  # what the last exchange has left, by tensor: gradient, version

    def join(
        self, losses: Mapping[int, Tensor], sizes: Mapping[int, int], turn: Turn, is_one_graph: bool = False
    ) -> Tensor:
        """The loss of the whole batch, whose backward pass computes and exchanges the replicas' gradients.

        A replica's loss is the mean over its shard, which has so many samples. Where the replicas' graphs are one, by
        synchronised BatchNorm, one pass runs for all.
        """
        weights = [sizes[i] for i in losses]
        value = weighted_mean([loss.detach().to(self.replicas.devices[0]) for loss in losses.values()], weights)
        connected = {i: loss for i, loss in losses.items() if loss.requires_grad}
        if not connected:
            return value

        def backward(gradient: Tensor, keep_graph: bool) -> None:
            parts = {i: (gradient * (sizes[i] / sum(weights))).to(loss.device) for i, loss in connected.items()}
            if is_one_graph:
                torch.autograd.backward(list(connected.values()), list(parts.values()), keep_graph)
                return
            for i, loss in connected.items():
                with turn(i):
                    torch.autograd.backward(loss, parts[i], keep_graph)

        anchor = torch.zeros_like(value, requires_grad=True)
        return _Junction.apply(anchor, value, lambda *args: self._meet(backward, *args))  # type: ignore[no-any-return]

    def _meet(self, backward: Callable[[Tensor, bool], None], gradient: Tensor, keep_graph: bool) -> None:
        """Compute the replicas' gradients, exchange them, and add them to what was there before."""
        if self.is_edited and not self.are_owned:
            self.replicas.copy_parameters()
        parameters = self.replicas.parameters
        hooks = [[_take_hooks(param) for param in copies] for copies in parameters]
        before = [copies[0].grad for copies in parameters]
        try:
            for copies in parameters:
                for param in copies:
                    param.grad = None
            backward(gradient, keep_graph)
        finally:
            for copies, taken in zip(parameters, hooks):
                for param, own in zip(copies, taken):
                    _put_hooks(param, own)
        with torch.no_grad():
            self._add_up()
            for copies, old, taken in zip(parameters, before, hooks):
                self._accumulate(copies, old, taken)
        self.have_met = True

    def _add_up(self) -> None:
        """Exchange the gradients. Where a replica has none it counts as zero; sparse ones are added up by torch."""
        gradients: dict[str, list[Tensor]] = {}
        for name, copies in self.replicas.copies.items():
            parts = [param.grad for param in copies.tensors if param.grad is not None]
            if any(part.is_sparse for part in parts):
                home = [part.to(self.replicas.devices[0]) for part in parts]
                total = reduce(torch.add, sorted(home, key=lambda part: part.is_sparse))  # a dense one first
                total = total.coalesce() if total.is_sparse else total
                for param in copies.tensors:
                    param.grad = total.to(param.device, copy=True)
            elif parts:
                for param in copies.tensors:
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
                # one element for a 0-d tensor: the book's `data[0][:] += ...` takes no 0-d one
                every: list[Any] = [param.grad for param in copies.tensors]
                gradients[name] = [gradient if gradient.ndim else gradient.view(1) for gradient in every]
        self.exchange(gradients)

    def _accumulate(self, copies: Sequence[Tensor], before: Tensor | None, hooks: list[Any]) -> None:
        """Run the user's hooks on the reduced gradient, and add it to the one of the batches before."""
        original, *others = copies
        on_gradient, after_accumulation = hooks[0]
        if any(any(own) for own in hooks[1:]):
            raise RuntimeError(
                "A step has put a hook on a weight: it would see one shard's gradient. Register it before training."
            )
        for hook in on_gradient.values() if original.grad is not None else ():
            changed = hook(original.grad)
            original.grad = original.grad if changed is None else changed
        if before is not None:
            original.grad = before if original.grad is None else before.add_(original.grad)
        is_own = self.on_all and before is None and not on_gradient
        for other in others:
            if original.grad is None or not (self.on_all or self.are_owned):
                other.grad = None
            elif not is_own:
                other.grad = original.grad.to(other.device, copy=True)
        if original.grad is not None:
            for post_hook in after_accumulation.values():
                post_hook(original)
        self._mark(copies)

    def follow(self) -> None:
        """Give the replicas the first one's gradients, where these are others than the last exchange has left.

        Clipping, `zero_grad`, or a hook has changed them.
        """
        for original, *others in self.replicas.parameters:
            gradient = original.grad
            is_changed = self.is_edited or self._is_changed(original)
            for other in others:
                if gradient is None:
                    other.grad = None
                elif is_changed or other.grad is None:
                    other.grad = gradient.to(other.device, copy=True)
                    self._mark((original, *others))

    def check_owned(self, active: Sequence[int]) -> None:
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

    def _mark(self, copies: Sequence[Tensor]) -> None:
        for param in copies:
            self._left.pop(id(param), None)
            if param.grad is not None:
                self._left[id(param)] = param.grad, param.grad._version

    def _is_changed(self, param: Tensor) -> bool:
        left = self._left.get(id(param))
        if param.grad is None or left is None:
            return param.grad is not None
        return left[0] is not param.grad or left[1] != param.grad._version


class _Junction(torch.autograd.Function):
    """The whole batch's loss; its backward pass calls a function with the gradient, and whether to keep the graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, backward: Callable[[Tensor, bool], None]) -> Tensor:
        ctx.run = backward
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for gradients of gradients, which several replicas do not have. Compute them "
                "in training_step by torch.autograd.grad, or use one device."
            )
        ctx.run(gradient, torch._C._autograd._get_current_graph_task_keep_graph())  # whether retain_graph=True
        return torch.zeros_like(gradient), None, None


def are_equal(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same numbers, NaN too, on whatever devices."""
    if tensor.is_sparse or other.is_sparse:
        return True  # torch has added them up
    other = other.to(tensor.device)
    return torch.equal(tensor, other) or torch.allclose(tensor, other, rtol=0, atol=0, equal_nan=True)


def _take_hooks(param: Tensor) -> tuple[dict, dict]:
    """Take off what `register_hook` and `register_post_accumulate_grad_hook` have put on a parameter."""
    both = param._backward_hooks, param._post_accumulate_grad_hooks  # private names of torch
    taken = tuple({} if hooks is None else dict(hooks) for hooks in both)
    for hooks in both:
        if hooks is not None:
            hooks.clear()  # autograd goes on with the dict that it knows
    return taken  # type: ignore[return-value]


def _put_hooks(param: Tensor, taken: tuple[dict, dict]) -> None:
    for hooks, own in zip((param._backward_hooks, param._post_accumulate_grad_hooks), taken):
        if hooks is not None:
            hooks.update(own)
