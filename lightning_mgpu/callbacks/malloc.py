"""What glibc does with freed memory: give it back to the kernel, or keep it for the next step.

The activations of a step are large and freed at its end. By default glibc returns them to the kernel, which hands out
zeroed pages again in the next step, a page fault for every 4 KiB: on a CPU a good part of the time of a step.

    python -m lightning_mgpu fit --malloc=keep
"""

import ctypes

# Parameters of mallopt(3)
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> None:
    """Let this process keep what it frees, from now on: memory grows to its peak and stays there.

    Raises:
        OSError: If the C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        raise OSError("malloc=keep sets glibc's allocator, and this system has another: leave it at malloc=default")
    libc.mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap as well
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # whose end is never given back
    libc.mallopt(M_TOP_PAD, 64 * 2**20)  # and which grows in large steps
