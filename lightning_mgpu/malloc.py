"""`--malloc=keep`: how glibc treats memory that training frees on a CPU."""

import ctypes

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # parameters of mallopt(3)


def keep_freed_memory() -> None:
    """Let glibc keep what a step frees for the next one: memory grows to its peak and stays there.

    By default freed activations go back to the kernel, which zeroes them: a fault for every 4 KiB.

    Raises:
        OSError: If the C library is not glibc.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "gnu_get_libc_version"):
        raise OSError(
            "malloc=keep sets glibc's allocator, and this system has another: leave it at "
            "malloc=default"
        )
    libc.mallopt(M_MMAP_MAX, 0)  # large blocks come from the heap as well
    libc.mallopt(M_TRIM_THRESHOLD, -1)  # whose end is never given back
    libc.mallopt(M_TOP_PAD, 64 * 2**20)  # and which grows in large steps
