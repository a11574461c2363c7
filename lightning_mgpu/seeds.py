"""Random numbers of a run: a separate stream per seed, purpose and epoch.

With `seed + epoch`, seed 1 would draw the same numbers in epoch e as seed 0 in epoch e + 1.
"""

import random
from hashlib import blake2b
from struct import unpack

import numpy as np
import torch

# stored in last.ckpt: a run must not resume with a different version
VERSION = 7


def stream(seed: int, purpose: str, *numbers: int) -> tuple[int, int, int]:
    """Three 64-bit seeds for one purpose; `numbers` are for example an epoch and a sample index."""
    digest = blake2b(repr((seed, purpose, *numbers)).encode(), digest_size=24).digest()
    return unpack("<3Q", digest)


def new_generator(seed: int, purpose: str, *numbers: int) -> torch.Generator:
    """A CPU generator, so that its numbers do not depend on the device."""
    return torch.Generator().manual_seed(stream(seed, purpose, *numbers)[0])


def seed_generators(seed: int, purpose: str, *numbers: int, devices: bool = True) -> None:
    """Seed the global generators of Python, NumPy and torch (on all `devices`, or only the CPU).

    Unlike `seed_everything`, this keeps `PL_GLOBAL_SEED`, the seed of data modules.
    """
    seeds = stream(seed, purpose, *numbers)
    random.seed(seeds[0])
    np.random.seed(seeds[1] % 2**32)  # noqa: NPY002 - the global one, used by other packages
    (torch if devices else torch.default_generator).manual_seed(seeds[2])
