"""Memory that is free goes back to the system.

The C library of Linux seldom uses a freed piece again for an aligned one as large, which torch asks for:
a layer of 411 MB whose heads are treated one by one grew the process to 4 GB, and to 1.3 GB with this.
"""

import ctypes
import sys
from functools import cache
from itertools import count

# Fresh memory costs time: giving it back after every head took 10 s longer for 2.5 GB of attention than this.
_EVERY = 8
_calls = count(1)


def give_back_memory() -> None:
    """Give back what is free, with glibc, every few times that this is called; elsewhere nothing happens."""
    if next(_calls) % _EVERY == 0 and (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> "ctypes._NamedFuncPointer | None":
    if sys.platform != "linux":
        return None
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
