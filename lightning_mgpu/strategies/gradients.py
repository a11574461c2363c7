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
    """The gradients of k replicas.

    Args:
        replicas: Whose they are.
        exchange: Adds gradients up: it gets, for every parameter by its name, the k tensors to leave the sum in.
        on_all: Whether the sum is left in all replicas, or in the first alone.
    """

    def __init__(self, replicas: Replicas, exchange: Callable[[dict[str, list[Tensor]]], None], on_all: bool) -> None:
        self.replicas, self.exchange, self.on_all = replicas, exchange, on_all
        self.have_met = False  # since somebody has set it to False
        self.are_owned = False  # replicas clear and edit their gradients themselves, in manual optimization
        self.is_edited = False  # hooks of the user's may edit gradients without a mark
        self._left: dict[int, tuple[Tensor, int]] = {}  # what the last exchange has left, by tensor: gradient, version

    def join(
        self,
        losses: Mapping[int, Tensor],
        sizes: Mapping[int, int],
        turn: Turn,
        is_one_graph: bool = False,
        inputs: Mapping[int, Any] | None = None,
    ) -> Tensor:
        """The loss of the whole batch, whose backward pass computes and exchanges the replicas' gradients.

        Args:
            losses: A replica's loss is the mean over its shard.
            sizes: The samples of the shards.
            turn: Enters a replica's turn.
            is_one_graph: Whether the replicas' graphs are connected, by synchronised BatchNorm. One pass runs for all.
            inputs: What each replica wants gradients of; all parameters if left out.
        """
        device = self.replicas.devices[0]
        weights = [sizes[i] for i in losses]
        value = weighted_mean([loss.detach().to(device) for loss in losses.values()], weights)
        if not any(loss.requires_grad for loss in losses.values()):
            return value

        def backward(gradient: Tensor, keep_graph: bool) -> None:
            parts = {
                i: (gradient * (sizes[i] / sum(weights))).to(loss.device)
                for i, loss in losses.items()
                if loss.requires_grad
            }
            if is_one_graph:
                every = [losses[i] for i in parts]
                wanted = None if inputs is None else [each for i in parts for each in _as_list(inputs[i])]
                torch.autograd.backward(every, list(parts.values()), keep_graph, inputs=wanted)
                return
            for i, part in parts.items():
                wanted = None if inputs is None else _as_list(inputs[i])
                with turn(i):
                    torch.autograd.backward(losses[i], part, keep_graph, inputs=wanted)

        anchor = torch.zeros_like(value, requires_grad=True)
        return _Junction.apply(anchor, value, lambda *args: self._meet(backward, *args))  # type: ignore[no-any-return]

    def _meet(self, backward: Callable[[Tensor, bool], None], gradient: Tensor, keep_graph: bool) -> None:
        """Compute the replicas' gradients, exchange them, and add them to what was there before."""
        if not self.are_owned:
            if self.is_edited:
                self.replicas.copy_parameters()
            self.follow()
        parameters = self.replicas.parameters
        hooks = [[_take_hooks(param) for param in copies] for copies in parameters]
        before = [[param.grad for param in copies] for copies in parameters]
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
        for first, *others in gradients.values() if self.are_owned and not self.on_all else ():
            for other in others:
                other.copy_(first)

    def _accumulate(self, copies: Sequence[Tensor], before: list[Tensor | None], hooks: list[Any]) -> None:
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
            for other in others:
                other.grad = original.grad.to(other.device, copy=True)  # type: ignore[union-attr]
        for param, old in zip(copies, before):
            if not (self.on_all or self.are_owned or param is original):
                param.grad = None
            elif old is not None:
                param.grad = old if param.grad is None else old.add_(param.grad)
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


def _as_list(inputs: Any) -> list[Tensor]:
    return [inputs] if isinstance(inputs, Tensor) else list(inputs)


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
