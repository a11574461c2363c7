"""The book's allreduce: device 0 reduces and broadcasts."""

import torch
from torch import Tensor


@torch.no_grad()
def textbook_allreduce(tensors: list[Tensor]) -> None:
    """Sum on device 0, then copy the sum back to every other device, in place.

    2(k-1) messages of n bytes, all to or from device 0, which receives and sends (k-1) n bytes
    while the others wait.

    Source: d2l.ai, 'Training on Multiple GPUs', `allreduce`. In 2021 it had
    `data[i] = data[0].to(...)`, which rebinds the list's slot and does not change the gradient of
    device i. `copy_` writes into the gradient.
    """
    total = tensors[0]
    for other in tensors[1:]:
        total.add_(other.to(total.device))
    for other in tensors[1:]:
        other.copy_(total)


textbook_allreduce.elementwise = True  # type: ignore[attr-defined]
