"""Memory that weights take as parts of mapped files, given back once they have been copied."""

import ctypes
import mmap
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable
from pathlib import Path
from typing import final

from torch import Tensor

# Of Linux's <sys/mman.h>: the pages are read from the file again at their next use.
_DONTNEED = 4
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)")


@final
class MappedFiles:
    """The mappings of files in this process whose pages nobody has written to.

    Written pages would lose what was written: such a mapping is left alone.
    """

    def __init__(self) -> None:
        """Take note of the mappings there are now; nothing may write to them afterwards."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._library = ctypes.CDLL(None) if sys.platform == "linux" else None
        if self._library is not None:
            self._library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
            self._note()

    def let_go(self, tensors: Iterable[Tensor]) -> None:
        """Give back the pages that lie within tensors, as far as they are parts of files."""
        for tensor in tensors:
            if self._library is None or tensor.device.type != "cpu" or not tensor.is_contiguous():
                continue
            page, start = mmap.PAGESIZE, tensor.data_ptr()
            first, end = -(-start // page) * page, (start + tensor.nbytes) // page * page
            place = bisect_right(self._starts, first) - 1
            if first < end and place >= 0 and end <= self._ends[place]:
                self._library.madvise(first, end - first, _DONTNEED)

    def _note(self) -> None:
        try:
            lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return
        found: tuple[int, int] | None = None
        for line in lines:
            if header := _MAPPING.match(line):
                start, end, rights, inode = header.groups()
                is_file = inode != "0" and rights.startswith("r") and rights.endswith("p")
                found = (int(start, 16), int(end, 16)) if is_file else None
            elif found is not None and line.startswith("Anonymous:") and line.split()[1] == "0":
                self._starts.append(found[0])
                self._ends.append(found[1])
