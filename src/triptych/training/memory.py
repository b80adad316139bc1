"""The process's memory allocator, set up for training on a CPU."""

import ctypes
import sys

# From <malloc.h>.
_M_TRIM_THRESHOLD = -1
_M_TOP_PAD = -2
_M_MMAP_MAX = -4
_LARGEST_INT = 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask the C library to keep freed memory for the next step.

    By default glibc hands large blocks back to the system at once and has every page of the next
    one zeroed and mapped anew: up to 40 % of a training step of a small model on a CPU
    (docs/log.md). Process-wide; changes no result.

    Returns:
        Whether the C library took the settings; on others than glibc it does nothing.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:
        return False
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _LARGEST_INT), (_M_TOP_PAD, 64 * 2**20))
    taken = [mallopt(name, value) == 1 for name, value in settings]
    return all(taken)
