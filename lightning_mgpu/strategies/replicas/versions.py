"""Whether a tensor was changed or replaced: torch counts the changes in place, but not those in inference mode."""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from lightning_mgpu.strategies.replicas.values import version_of

Version = tuple[Tensor | None, Any]  # a tensor, and how often it was changed in place, or else what was in it
NEVER: Version = (torch.empty(0), 0)  # no tensor of anybody's
COMPARED = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.complex128),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
)


def versions_in(module: nn.Module, are_watched: bool = False) -> dict[str, Version]:
    """Buffers, and tensors without a graph among a module's plain attributes: class weights, a temperature.

    If they are watched, the contents of those that count no changes.
    """
    attributes = [(name, v) for name, v in vars(module).items() if isinstance(v, Tensor) and v.is_leaf]
    # `_buffers` of TorchScript's is no dict
    return {
        name: (tensor, _Contents(tensor)) if are_watched and is_uncounted(tensor) else versioned(tensor)
        for name, tensor in (*module._buffers.items(), *attributes)
        if type(tensor) is not nn.Parameter
    }


def versioned(tensor: Tensor | None) -> Version:
    return tensor, version_of(tensor)


def is_uncounted(tensor: Tensor | None) -> TypeGuard[Tensor]:
    return tensor is not None and tensor.is_inference()


def is_same_version(now: Version, then: Version) -> bool:
    if now[0] is not then[0]:
        return False
    return then[1].are_in(now[0]) if isinstance(then[1], _Contents) else now[1] == then[1]


class _Contents:
    """What was in a tensor made in inference mode, whose changes in place torch does not count."""

    def __init__(self, tensor: Tensor) -> None:
        # else it is taken for unchanged: torch may not even know how to compare
        is_plain = type(tensor) is Tensor and not tensor.is_nested and tensor.layout is torch.strided
        self.is_known = is_plain and tensor.dtype in COMPARED
        self.tensor = tensor.clone() if self.is_known else tensor

    def are_in(self, tensor: Tensor | None) -> bool:
        assert tensor is not None
        if not self.is_known:
            return True
        return tensor.shape == self.tensor.shape and torch.allclose(tensor, self.tensor, rtol=0, atol=0, equal_nan=True)
