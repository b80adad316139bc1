"""Another orthogonal basis of the residual stream, found from the embeddings (QuaRot, SpinQuant).

An RMSNorm without a gain commutes with an orthogonal matrix R: folding its transpose into the maps that read
the stream, and R into the maps that write to the stream, keeps the function.
"""

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
    dtype = finer(one.dtype, other.dtype)
    rows = Rounded.stored(one, dtype), Rounded.stored(other, dtype)
    left, _, right = torch.linalg.svd(rows[0].numbers.mT @ rows[1].numbers)
    matrix = left @ right
    # Nearly the same tables are not tables in another basis.
    if (
        float((matrix - torch.eye(len(matrix), dtype=matrix.dtype)).abs().max())
        < _LEAST_TURN
    ):
        return None
    sizes, axes = torch.linalg.eigh(rows[0].numbers.mT @ rows[0].numbers)
    sizes = sizes.clamp(min=torch.finfo(torch.float64).tiny)
    mean = float((rows[0].squares + rows[1].squares).mean())
    # Least squares of a rotation: the longer of two axes determines the angle.
    errors = mean / (sizes[:, None] + sizes)
    errors.fill_diagonal_(0)
    if float(errors.max()) > (_MOST_UNCERTAIN * torch.finfo(dtype).eps / 2) ** 2:
        return None
    turn = Turn(matrix, axes, errors)
    is_led = float(excess(turn.written(rows[0]), rows[1]).max()) <= 1
    return turn if is_led else None


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
    ends = head is not None and made.task is None and made.inputs is None
    return bool(
        embeds
        and own.masked is None
        and ends
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
