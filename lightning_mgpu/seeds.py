"""Random numbers of a run: a stream of its own for every seed, purpose and epoch.

With `seed + epoch`, seed 1 would draw in epoch e what seed 0 draws in epoch e + 1.
"""

import random
from hashlib import blake2b
from struct import unpack

import numpy as np
import torch

# in every last.ckpt: a run must not go on with other numbers than those it began with
VERSION = 7


def stream(seed: int, purpose: str, *numbers: int) -> tuple[int, int, int]:
    """Three seeds of 64 bits for one purpose; the numbers are those of an epoch, of a sample."""
    digest = blake2b(repr((seed, purpose, *numbers)).encode(), digest_size=24).digest()
    return unpack("<3Q", digest)


def new_generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """A generator on the CPU, so that it draws the same for every device."""
    return torch.Generator().manual_seed(stream(seed, purpose, *numbers)[0])


def seed_generators(seed: int, purpose: str, *numbers: int, devices: bool = True) -> None:
    """Seed Python's, numpy's and torch's global generators, those of all `devices` or the CPU's.

    Unlike `seed_everything`, this keeps `PL_GLOBAL_SEED`, from which data modules take their seed.
    """
    seeds = stream(seed, purpose, *numbers)
    random.seed(seeds[0])
    np.random.seed(seeds[1] % 2**32)  # noqa: NPY002 - the global one, which others draw from
    (torch if devices else torch.default_generator).manual_seed(seeds[2])
