"""Checksums of batches, samples and weights, which processes compare."""

from collections.abc import Mapping
from typing import Any
from zlib import crc32

import numpy as np
import torch
from torch import Tensor


def checksum(part: Any, before: int = 0) -> int:
    """A checksum of all arrays, numbers and text in a batch, and of the type of anything else.

    `before` is the checksum of all preceding parts.
    """
    if isinstance(part, Tensor) and is_dense(part):
        part = to_bytes(part).cpu().numpy()
    if isinstance(part, np.ndarray):
        if not part.dtype.hasobject:
            return crc32(part.tobytes(), before)
        part = part.ravel().tolist()
    if isinstance(part, (Mapping, list, tuple)):
        for item in part.values() if isinstance(part, Mapping) else part:
            before = checksum(item, before)
        return before
    is_plain = isinstance(part, (np.generic, str, bytes, int, float, complex, type(None)))
    return crc32(repr(part if is_plain else type(part)).encode(), before)


def to_bytes(X: Tensor) -> Tensor:
    """The bytes (n,) of the elements, in order. Comparing bytes also works for NaN."""
    return X.detach().reshape(-1).contiguous().view(torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_nested
