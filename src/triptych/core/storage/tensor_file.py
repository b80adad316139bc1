"""The interface of files with named tensors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from triptych.errors import DataError
from triptych.untrusted import shown

# Limits below torch's limits, and above the sizes in checkpoints.
_MOST_DIMENSIONS = 16
_LONGEST_SIDE = 1 << 48


@final
@dataclass(frozen=True)
class TensorInfo:
    """A tensor's entry in the header of a file."""

    dtype: torch.dtype  # dtype of the entries
    shape: tuple[int, ...]
    num_bytes: int  # bytes in the file


def is_possible_shape(shape: Sequence[int]) -> bool:
    """Return True if a tensor can have a shape given in a file."""
    return len(shape) <= _MOST_DIMENSIONS and all(
        0 <= size <= _LONGEST_SIDE for size in shape
    )


def info_of(tensor: Tensor) -> TensorInfo:
    return TensorInfo(tensor.dtype, tuple(tensor.shape), tensor.nbytes)


class TensorFile(ABC):
    """One file with named tensors."""

    name: str  # name of the file, for messages
    infos: dict[str, TensorInfo]  # the entry of every tensor, by name

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Read a tensor in its stored dtype and shape."""

    def read_rows(self, name: str, start: int, stop: int) -> Tensor:
        """Read the rows from `start` to before `stop` of a tensor."""
        return self.read(name)[start:stop]

    def packed_as(self, name: str) -> str:
        """Return the quantisation format of a tensor, or "" for a plain tensor."""
        return ""


def require_printable_name(name: str, where: str) -> None:
    """Check that a name can be printed in reports and on terminals."""
    if not name.isprintable():
        raise DataError(
            f"{where}: a tensor is named {shown(name)}, with unprintable characters"
        )
