"""`--malloc=keep`: how glibc treats memory that training frees on a CPU."""

import ctypes

from lightning_mgpu.tools import UsageError

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # parameters of mallopt(3)


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one: memory grows to its peak and stays."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        raise UsageError("--malloc=keep: this system has another allocator than glibc's")
    libc.mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap as well
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # whose end is never given back
    libc.mallopt(M_TOP_PAD, 64 * 2**20)  # and which grows in large steps
