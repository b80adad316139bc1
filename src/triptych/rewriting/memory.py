"""Memory that is free goes back to the system.

The C library of Linux seldom uses a freed piece again for an aligned one as large, which torch asks for:
a layer of 411 MB whose heads are treated one by one grew the process to 4 GB (docs/log.md).
"""

import ctypes
import sys
from collections.abc import Iterator
from functools import cache
from itertools import count
from typing import final

import torch
from torch import Tensor

from triptych.algebra.weights import AttentionWeights

# So much may lie free: to give it back after every head took 10 s longer for 2.5 GB of attention.
_MOST_FREE = 16 << 20


def give_back_memory() -> None:
    """Give back what is free once it is much, with glibc; elsewhere nothing happens."""
    library = _glibc()
    if library is not None and library.mallinfo2().fordblks > _MOST_FREE:
        library.malloc_trim(0)


class _MallocInfo(ctypes.Structure):
    """What glibc says of its memory: `fordblks` are the bytes that lie free."""

    _fields_ = (
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


@final
class Workspace:
    """Memory for the maps of a few heads in another dtype, used again for the next few.

    A layer's heads one after the other would else take, and give back, as much memory as the whole layer does
    in that dtype; pages that are fresh cost more than the numbers written into them.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []

    def cast(self, weights: AttentionWeights, dtype: torch.dtype) -> AttentionWeights:
        """The same numbers in a dtype; what the last call gave is overwritten.

        Biases, and all that is no map, are in memory of their own.
        """
        places = count()
        return weights.mapped(lambda numbers: self._cast(numbers, dtype, places))

    def _cast(self, numbers: Tensor, dtype: torch.dtype, places: Iterator[int]) -> Tensor:
        if numbers.ndim < 3 or numbers.dtype == dtype:
            return numbers.to(dtype)
        place = next(places)
        if place == len(self._buffers):
            self._buffers.append(torch.empty_like(numbers, dtype=dtype))
        buffer = self._buffers[place]
        if buffer.shape != numbers.shape or buffer.dtype != dtype or buffer.device != numbers.device:
            buffer = self._buffers[place] = torch.empty_like(numbers, dtype=dtype)
        return buffer.copy_(numbers)


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is one that can give back what is free (glibc 2.33 or later)."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    if library is None or not hasattr(library, "malloc_trim") or not hasattr(library, "mallinfo2"):
        return None
    library.mallinfo2.restype = _MallocInfo
    return library
