"""Return free memory to the system.

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

# Bytes of maps that a workspace sees before memory is given back: to do so after every head of 29 MB took a
# tenth of the time, and what lies free until then adds to the peak (docs/log.md).
_MOST_PASSED = 1 << 28


def give_back_memory() -> None:
    """Return free memory to the system with glibc; do nothing elsewhere."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


@final
class Workspace:
    """Memory for the maps of a few heads in another dtype, used again for the next few.

    A layer's heads one after the other would else take, and give back, as much memory as the whole layer does
    in that dtype; pages that are fresh cost more than the numbers written into them. What else is taken for a
    few heads is given back after so many of them.
    """

    def __init__(self) -> None:
        self._buffers: list[Tensor] = []
        self._passed = 0

    def cast(self, weights: AttentionWeights, dtype: torch.dtype) -> AttentionWeights:
        """Cast weights to a dtype. The result of the last call is overwritten.

        Biases, and all that is no map, are in memory of their own.
        """
        self._passed += sum(link.weight.numel() for link in weights.links()) * dtype.itemsize
        if self._passed > _MOST_PASSED:
            self._passed = 0
            give_back_memory()
        places = count()
        return weights.mapped(lambda numbers: self._cast(numbers, dtype, places))

    def _cast(self, numbers: Tensor, dtype: torch.dtype, places: Iterator[int]) -> Tensor:
        if numbers.ndim < 3 or numbers.dtype == dtype:
            return numbers.to(dtype)
        if numbers.dtype == torch.float16 and dtype == torch.float64:  # in two steps: a quarter of the time
            numbers = self._buffer(next(places), numbers, torch.float32).copy_(numbers)
        return self._buffer(next(places), numbers, dtype).copy_(numbers)

    def _buffer(self, place: int, like: Tensor, dtype: torch.dtype) -> Tensor:
        if place == len(self._buffers):
            self._buffers.append(torch.empty_like(like, dtype=dtype))
        buffer = self._buffers[place]
        if buffer.shape != like.shape or buffer.dtype != dtype or buffer.device != like.device:
            buffer = self._buffers[place] = torch.empty_like(like, dtype=dtype)
        return buffer


@cache
def _glibc() -> ctypes.CDLL | None:
    """The C library, if it can return free memory."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    return library if hasattr(library, "malloc_trim") else None
