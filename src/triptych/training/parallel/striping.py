"""Which rows of a batch each process takes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import numpy as np
from jaxtyping import Int64

if TYPE_CHECKING:
    from triptych.training.objectives import TrainingBatch


@final
@dataclass(frozen=True, eq=False)
class NotCounted:
    """A batch whose loss counts as zero.

    A process that has no row of a batch computes one all the same, because the others wait for it.

    Attributes:
        batch: what is computed.
        num_target_tokens: always 0.
    """

    batch: "TrainingBatch"
    num_target_tokens: int = 0

    def pinned(self) -> "NotCounted":
        """A copy in page-locked memory."""
        return NotCounted(self.batch.pinned())


def rows_of_rank(
    indices: Int64[np.ndarray, "batch"], rank: int, size: int
) -> tuple[Int64[np.ndarray, "part"], bool]:
    """The rows of a batch that a process takes: every `size`-th one.

    The ranks' rows together are the batch, whatever the number of ranks.
    """
    if size == 1:
        return indices, True
    own = indices[rank::size]
    return (own, True) if len(own) else (indices[:1], False)
