"""Gradients that are views of one flat buffer a device, so that an allreduce takes them all at once without a copy.

What `DistributedDataParallel(gradient_as_bucket_view=True)` does: autograd adds into the views in place, instead of
putting its own tensor into `parameter.grad`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lightning_mgpu.strategies.gradients.gradient_hooks import has_gradient_hooks


class FlatGradients:
    """A buffer for each replica, as long as its parameters together, and a view of it for every parameter.

    Args:
        parameters: For every parameter its k copies, one a device; of one dtype.
        bucket_bytes: Size of the slices to reduce; 0 is one for all.

    Raises:
        ValueError: If the parameters are of several dtypes.
    """

    def __init__(self, parameters: Sequence[tuple[nn.Parameter, ...]], bucket_bytes: int) -> None:
        dtypes = {parameter.dtype for parameter, *_ in parameters}
        if len(dtypes) > 1:
            raise ValueError(
                f"gradient_as_bucket_view=True needs parameters of one dtype, not {', '.join(map(str, dtypes))}: "
                "leave it out"
            )
        self.parameters = parameters
        size = sum(original.numel() for original, *_ in parameters)
        first = parameters[0] if parameters else ()
        self.buffers = [torch.empty(size, dtype=p.dtype, device=p.device) for p in first]
        bucket = max(bucket_bytes // first[0].element_size(), 1) if bucket_bytes and first else max(size, 1)
        self.buckets = [list(slices) for slices in zip(*(buffer.split(bucket) for buffer in self.buffers))]
        self._views: list[list[Tensor]] = []  # as `parameters`
        start = 0
        for copies in parameters:
            # The original's layout for all; `.data`: a version counter for each view, by which to see whether autograd
            # has added to it
            self._views.append([_like(copies[0], buffer.data, start) for buffer in self.buffers])
            start += copies[0].numel()
        self._versions: list[list[int]] = [[-1] * len(copies) for copies in parameters]

    @torch.no_grad()
    def attach(self) -> None:
        """Give every parameter without a gradient its view, set to zero; not where hooks will look at the gradient."""
        if all(parameter.grad is None for copies in self.parameters for parameter in copies):
            for buffer in self.buffers:
                buffer.zero_()
        else:
            for copies, views in zip(self.parameters, self._views):
                for parameter, view in zip(copies, views):
                    if parameter.grad is None:
                        view.zero_()
        for copies, views, versions in zip(self.parameters, self._views, self._versions):
            if has_gradient_hooks(copies[0]):
                continue
            for i, (parameter, view) in enumerate(zip(copies, views)):
                if parameter.grad is None and parameter.requires_grad:
                    parameter.grad = view
                    versions[i] = view._version

    @torch.no_grad()
    def collect(self) -> list[tuple[nn.Parameter, ...]]:
        """The parameters some of whose gradients are not in the buffers, because code put other tensors there.

        All gradients of such a parameter are taken out of the buffers. A parameter that autograd has not touched, in no
        replica, is left without a gradient.
        """
        elsewhere = []
        for copies, views, versions in zip(self.parameters, self._views, self._versions):
            are_here = [parameter.grad is view for parameter, view in zip(copies, views)]
            are_touched = [view._version != version for view, version in zip(views, versions)]
            if not all(are_here):
                elsewhere.append(copies)
                for parameter, view, is_here, is_touched in zip(copies, views, are_here, are_touched):
                    if is_here:
                        parameter.grad = view.clone() if is_touched else None
            elif not any(are_touched):
                for parameter in copies:
                    parameter.grad = None
        return elsewhere


def _like(parameter: nn.Parameter, buffer: Tensor, start: int) -> Tensor:
    """A view of the buffer from `start`, in the parameter's layout where that is dense."""
    size = parameter.size()
    order = sorted(range(parameter.ndim), key=parameter.stride, reverse=True)
    is_dense = parameter.permute(order).is_contiguous()
    return buffer.as_strided(size, parameter.stride() if is_dense else torch.empty(size, device="meta").stride(), start)
