"""Another orthogonal basis of the residual stream, found from the embeddings (QuaRot, SpinQuant).

An RMSNorm without a gain commutes with an orthogonal matrix R: folding its transpose into the maps that read
the stream, and R into the maps that write to the stream, keeps the function.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from triptych.core.models import (
    BlockConfig,
    LanguageModelArchitecture,
    NormConfig,
    SublayerConfig,
)
from triptych.rewriting.differences.rounded import Rounded, excess, finer

# Least entry of R − 1 for another basis.
_LEAST_TURN = 0.01
# Sampled rows of embeddings, in widths of the stream.
_SAMPLED = 4
_ROWS_AT_A_TIME = 4096
# Largest error of R, in units of the rounding of the embeddings, with which other maps are still compared.
_MOST_UNCERTAIN = 16


@final
@dataclass(frozen=True, eq=False)
class Turn:
    """An orthogonal matrix R from the stream of A to that of B.

    Rounding of the embeddings left errors in R. R stays orthogonal, so an error is a small rotation in the
    planes of two axes of the embeddings.

    Attributes:
        matrix: R, `[d_model, d_model]`.
        axes: principal axes of the embeddings of A as columns, `[d_model, d_model]`.
        errors: squares of the errors of the angle between each two axes, `[d_model, d_model]`.
    """

    matrix: Tensor
    axes: Tensor
    errors: Tensor

    def read(self, weight: Rounded) -> Rounded:
        """Return maps `[maps, d_model, width]` in the basis of the stream of B."""
        squares = self.matrix.square().mT @ weight.squares
        along = (self.axes.mT @ weight.numbers).square()
        squares = squares + (self.axes.mT @ self.matrix).square().mT @ (
            self.errors @ along
        )
        return Rounded(self.matrix.mT @ weight.numbers, squares)

    def written(self, numbers: Rounded) -> Rounded:
        """Return an output to the stream, `[..., d_model]`, in the basis of the stream of B."""
        squares = numbers.squares @ self.matrix.square()
        along = (numbers.numbers @ self.axes).square()
        squares = squares + along @ self.errors @ (self.axes.mT @ self.matrix).square()
        return Rounded(numbers.numbers @ self.matrix, squares)


def find_turn(one: Tensor, other: Tensor) -> Turn | None:
    """Return the orthogonal matrix between two tables of embeddings; None if they differ otherwise."""
    if one.shape != other.shape or one.shape[0] < one.shape[1]:
        return None
    # Most other tables differ by training: some of the rows show it.
    every = len(one) // (_SAMPLED * one.shape[1])
    if (
        every > 1
        and _departure(_rotation(one[::every], other[::every])) < _LEAST_TURN / 2
    ):
        return None
    matrix = _rotation(one, other)
    # Nearly the same tables are not tables in another basis.
    if _departure(matrix) < _LEAST_TURN:
        return None
    dtype = finer(one.dtype, other.dtype)
    sizes, axes = torch.linalg.eigh(_products(one, one))
    sizes = sizes.clamp(min=torch.finfo(torch.float64).tiny)
    # Least squares of a rotation: the longer of two axes determines the angle.
    errors = _mean_rounding(one, other, dtype) / (sizes[:, None] + sizes)
    errors.fill_diagonal_(0)
    if float(errors.max()) > (_MOST_UNCERTAIN * torch.finfo(dtype).eps / 2) ** 2:
        return None
    turn = Turn(matrix, axes, errors)
    return turn if _leads(turn, one, other, dtype) else None


def _rotation(one: Tensor, other: Tensor) -> Tensor:
    """Return the best orthogonal matrix from the rows of one table to the rows of another."""
    left, _, right = torch.linalg.svd(_products(one, other))
    found: Tensor = left @ right
    return found


def _departure(matrix: Tensor) -> float:
    """Return the largest entry of R − 1."""
    return float((matrix - torch.eye(len(matrix), dtype=matrix.dtype)).abs().max())


def _products(one: Tensor, other: Tensor) -> Tensor:
    """Return oneᵀ other in float64, with some rows at a time."""
    found = torch.zeros(one.shape[1], other.shape[1], dtype=torch.float64)
    for mine, theirs in _in_parts(one, other):
        found.addmm_(mine.double().mT, theirs.double())
    return found


def _in_parts(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(
        torch.split(one, _ROWS_AT_A_TIME),
        torch.split(other, _ROWS_AT_A_TIME),
        strict=True,
    )


def _mean_rounding(one: Tensor, other: Tensor, dtype: torch.dtype) -> float:
    """Return the mean of the squared rounding errors of two tables together."""
    total = 0.0
    for pair in _in_parts(one, other):
        total += sum(float(Rounded.stored(part, dtype).squares.sum()) for part in pair)
    return total / one.numel()


def _leads(turn: Turn, one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Return True if rounding explains all differences between two tables after a rotation."""
    for mine, theirs in _in_parts(one, other):
        turned = turn.written(Rounded.stored(mine, dtype))
        # The arithmetic counts relative to the entries of these rows, never larger than all.
        if not float(excess(turned, Rounded.stored(theirs, dtype)).max()) <= 1:
            return False
    return True


def allows_turn(made: LanguageModelArchitecture) -> bool:
    """Return True if all readers and writers of the stream of a model are maps or plain RMSNorms."""
    own = made.embeddings
    head = made.head
    embeds = (
        own.width is None
        and own.norm is None
        and own.positions == "none"
        and not own.num_types
    )
    ends = head is not None and made.task is None and made.second is None
    return bool(
        embeds
        and own.masked is None
        and ends
        and made.inputs is None
        and _is_plain(made.final_norm)
        and all(map(_block_allows_turn, made.blocks))
    )


def _block_allows_turn(block: BlockConfig) -> bool:
    frames = [block.attention, block.feed_forward_frame]
    beside = (
        block.cross is not None or block.input is not None or block.streams is not None
    )
    return not beside and all(map(_frame_allows_turn, frames))


def _frame_allows_turn(frame: SublayerConfig) -> bool:
    is_pre = frame.place == "pre" and not frame.from_norm and frame.out_norm is None
    return is_pre and (frame.norm is None or _is_plain(frame.norm))


def _is_plain(norm: NormConfig | None) -> bool:
    return norm is not None and norm.kind == "rms"
