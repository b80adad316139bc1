"""The memory of weights: mapped files, and the release of memory to the system."""

import ctypes
import math
import mmap
import os
import re
import sys
from bisect import bisect_right
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import final

import torch
from torch import Tensor, nn

from triptych import thresholds

# MADV_DONTNEED of Linux's <sys/mman.h>: pages are read from the file again at their next use.
_DONTNEED = 4
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ (\d+)")


def has_room_for_another(model: nn.Module) -> bool:
    """Return True if a copy of a model's weights would be a small part of the machine's memory."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    return size <= thresholds.SHARE_PACKED * os.sysconf("SC_PAGE_SIZE") * os.sysconf(
        "SC_PHYS_PAGES"
    )


@final
class MappedFiles:
    """File mappings of this process."""

    def __init__(self) -> None:
        """Record the current mappings; their pages must not be written to afterwards."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._is_clean: list[
            bool
        ] = []  # True if no page was written to: releasing would discard changes
        self._library = ctypes.CDLL(None) if sys.platform == "linux" else None
        if self._library is not None:
            self._library.madvise.argtypes = (
                ctypes.c_void_p,
                ctypes.c_size_t,
                ctypes.c_int,
            )
            self._note()

    def hold(self, tensor: Tensor) -> bool:
        """Return True if a tensor's data lies in a mapped file."""
        return (
            tensor.device.type == "cpu"
            and self._place(tensor.data_ptr(), tensor.nbytes) is not None
        )

    def let_go(self, tensors: Iterable[Tensor]) -> None:
        """Release the pages that lie wholly within tensors, if they belong to unmodified file mappings."""
        for tensor in tensors:
            if (
                self._library is None
                or tensor.device.type != "cpu"
                or not tensor.is_contiguous()
            ):
                continue
            page = mmap.PAGESIZE
            start = tensor.data_ptr()
            first = -(-start // page) * page
            end = (start + tensor.nbytes) // page * page
            place = self._place(first, end - first)
            if place is not None and self._is_clean[place]:
                self._library.madvise(first, end - first, _DONTNEED)

    def _place(self, start: int, length: int) -> int | None:
        """Return the index of the mapping with these bytes, or None."""
        place = bisect_right(self._starts, start) - 1
        return (
            place
            if length > 0 and place >= 0 and start + length <= self._ends[place]
            else None
        )

    def _note(self) -> None:
        try:
            lines = (
                Path("/proc/self/smaps")
                .read_text(encoding="utf-8", errors="replace")
                .splitlines()
            )
        except OSError:
            return
        # Each mapping has a header line, then its properties; "Anonymous" counts modified pages.
        found: tuple[int, int] | None = None
        for line in lines:
            if header := _MAPPING.match(line):
                start, end, rights, inode = header.groups()
                is_file = (
                    inode != "0" and rights.startswith("r") and rights.endswith("p")
                )
                found = (int(start, 16), int(end, 16)) if is_file else None
            elif found is not None and line.startswith("Anonymous:"):
                self._starts.append(found[0])
                self._ends.append(found[1])
                self._is_clean.append(line.split()[1] == "0")


# Share of the available memory reserved for other needs.
_LEFT_FREE = 0.1


def own_memory(modules: Iterable[nn.Module]) -> None:
    """Copy parameters and buffers of modules from mapped files to memory.

    Otherwise, overwriting or truncating the file would change them or crash the process. Tensors with shared
    memory still share it afterwards. If the available memory is too small for all tensors, they stay in the
    files.
    """
    files = MappedFiles()
    held = [
        tensor
        for tensor in chain.from_iterable(
            (*module.parameters(), *module.buffers()) for module in modules
        )
        if not tensor.is_meta and tensor.layout == torch.strided and files.hold(tensor)
    ]
    if (
        sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
        > _free_memory()
    ):
        return
    # File pages are released after each copy, so that the peak grows by a single tensor.
    copies = dict[tuple[object, ...], Tensor]()
    for tensor in held:
        old = tensor.data
        key = (old.data_ptr(), old.dtype, old.shape, old.stride())
        if key not in copies:
            copies[key] = old.clone()
        tensor.data = copies[key]
        files.let_go([old])


def give_memory_back() -> None:
    """Let glibc return freed memory to the system."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):
        library.malloc_trim(0)


def _free_memory() -> float:
    """Return the available memory in bytes, including releasable file pages, less the reserved share."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return math.inf
    free = next(
        (
            int(line.split()[1]) << 10
            for line in lines
            if line.startswith("MemAvailable")
        ),
        None,
    )
    return math.inf if free is None else (1 - _LEFT_FREE) * free
