"""The replicas' gradients over a step: parts of a sum, the sum, and what clipping and hooks make of it."""

from collections.abc import Callable, Sequence
from functools import reduce
from itertools import repeat

import torch
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_mgpu.strategies.gradients.flat_gradients import FlatGradients
from lightning_mgpu.strategies.gradients.gradient_hooks import has_gradient_hooks


class Gradients:
    """Gradients of `parameters`, the k copies of each, the original's first."""

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, ...]]) -> None:
        self.parameters = parameters
        self.flat: FlatGradients | None = None  # buffers to collect them in
        self.are_reduced = True  # else each replica holds its shard's part of the sum
        self._reduced: list[tuple[Tensor | None, int]] = []  # the original's gradients then, and their versions

    def begin(self) -> None:
        """Take what was reduced off the replicas: the original carries it on if it was not set to zero since."""
        if self.are_reduced or all(original.grad is None for original, *_ in self.parameters):
            self.drop_copies()
        self.are_reduced = False
        if self.flat is not None:
            self.flat.attach()

    @torch.no_grad()
    def reduce(self, add_up: Callable[[list[list[Tensor]]], None]) -> None:
        """Leave the sum of the gradients where `add_up` does, which is given, for every parameter, its k gradients.

        Slices of the flat buffers, where there are any. A parameter no replica used keeps no gradient; where some did
        not, theirs counts as zero. Sparse gradients are added up by torch, and left in every replica.
        """
        dense: list[list[Tensor]] = list(self.flat.buckets) if self.flat is not None else []
        for parameters in self.parameters if self.flat is None else self.flat.collect():
            parts = [parameter.grad for parameter in parameters if parameter.grad is not None]
            if any(part.is_sparse for part in parts):
                parts = [part.to(parameters[0].device) for part in parts]
                total = reduce(torch.add, sorted(parts, key=lambda part: part.is_sparse))  # a dense one first
                total = total.coalesce() if total.is_sparse else total
                for parameter in parameters:
                    parameter.grad = total.to(parameter.device, copy=True)
            elif parts:
                for parameter in parameters:
                    if parameter.grad is None:
                        parameter.grad = torch.zeros_like(parameter)
                parts = [parameter.grad for parameter in parameters]  # type: ignore[misc]
                # a view of one element for a 0-d one: the book's `data[0][:] += ...` takes no 0-d tensor
                dense.append([part if part.ndim else part.view(1) for part in parts])
        if any(part.requires_grad for parts in dense for part in parts):
            rank_zero_warn(
                "Gradients with a graph (create_graph=True): who differentiates them again, a Hessian-based optimizer "
                "say, finds the first replica's loss alone."
            )
        add_up(dense)
        self.are_reduced = True

    def drop_copies(self) -> None:
        """Leave gradients in the original alone."""
        for _, *copies in self.parameters:
            for parameter in copies:
                parameter.grad = None

    def mark(self) -> None:
        """Remember the reduced gradients, to tell later whether hooks and clipping have changed them."""
        self._reduced = [
            (original.grad, -1 if original.grad is None or has_gradient_hooks(original) else original.grad._version)
            for original, *_ in self.parameters
        ]

    @torch.no_grad()
    def give(self, everything: bool = False) -> None:
        """Give the replicas what hooks and clipping made of the reduced gradients, those who have none, or all."""
        for (original, *copies), (gradient, version) in zip(self.parameters, self._reduced):
            is_changed = original.grad is not gradient or (gradient is not None and gradient._version != version)
            if is_changed or everything or any(parameter.grad is None for parameter in copies):
                for parameter in copies:
                    parameter.grad = None if original.grad is None else original.grad.to(parameter.device, copy=True)

    def are_others(self) -> bool:
        """Whether the original has other gradients than those that were reduced."""
        known = self._reduced or repeat((None, -1))
        both = ((original.grad, gradient) for (original, *_), (gradient, _) in zip(self.parameters, known))
        return any(own is not None and own is not gradient for own, gradient in both)


def check_equal(parameters: Sequence[tuple[nn.Parameter, ...]], who: str) -> None:
    """Hold an exchange to its contract on a model's gradients, whose shapes and values may matter: all equal.

    Sparse ones are left out, torch has added them up.
    """
    for first, *others in parameters:
        for i, other in enumerate(others, start=1):
            if first.grad is None or other.grad is None or first.grad.is_sparse:
                continue
            if not torch.allclose(other.grad.to(first.device), first.grad, rtol=0, atol=0, equal_nan=True):
                raise ValueError(
                    f"{who} left device {i} ({other.device}) with another sum than device 0 for a gradient of shape "
                    f"{tuple(first.shape)}: replicas must be bit-identical"
                )
