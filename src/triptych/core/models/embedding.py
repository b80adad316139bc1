"""Embeddings: from token ids to the stream."""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from triptych.core.attention.position_modules import (
    LearnedPositions,
    NoPositions,
    PositionIds,
    SinusoidalPositions,
)
from triptych.core.models.architecture import EmbeddingsConfig, MaskedTokens
from triptych.core.models.blocks import make_norm
from triptych.core.models.feed_forward import Dropout


@final
class Embeddings(nn.Module):
    """Table of embeddings with positions, segments, map, norm and dropout; see `EmbeddingsConfig`."""

    def __init__(
        self, config: EmbeddingsConfig, d_model: int, table: nn.Embedding | None = None
    ) -> None:
        """Use a given table, or draw table and learned positions with a small standard deviation."""
        super().__init__()
        width = config.width or d_model
        self.config = config
        self.table = (
            fresh_table(config.vocab_size, width, 0.02) if table is None else table
        )
        self.positions = _make_positions(config, d_model if config.map_first else width)
        if table is None and isinstance(self.positions, LearnedPositions):
            nn.init.normal_(self.positions.weight, std=0.02)
        self.types = nn.Embedding(config.num_types, width) if config.num_types else None
        self.norm = make_norm(config.norm, width)
        self.map = (
            None
            if config.width is None
            else nn.Linear(width, d_model, bias=config.map_bias)
        )
        self.dropout = Dropout(config.dropout)
        self.stream_dtype: torch.dtype | None = (
            None  # dtype of the blocks, if it differs from the table's
        )

    def forward(
        self,
        ids: Int[Tensor, "batch length"],
        start: int | PositionIds = 0,
        types: Int[Tensor, "batch length"] | None = None,
    ) -> Float[Tensor, "batch length d_model"]:
        """Embed tokens at positions from `start` on, or at given positions."""
        # Families differ in the order of map, norm and positions: `map_first` and `norm_first`.
        config = self.config
        x = self.table(ids)
        if self.map is not None and config.map_first:
            x = self.map(self._to_stream_dtype(x))
        if config.scale != 1.0:
            x = x * config.scale
        if config.masked is not None:
            x = _without_masked(config.masked, x, ids)
        segments = None
        if self.types is not None:
            segments = self.types(torch.zeros_like(ids) if types is None else types)
        rows = _rows_of_positions(config, ids, start)
        if config.norm_first:
            x = self.positions(self.norm(x if segments is None else x + segments), rows)
        else:
            x = self.positions(x, rows)
            x = self.norm(x if segments is None else x + segments)
        x = self._to_stream_dtype(x)
        x = self.dropout(x) if self.training else x
        return x if self.map is None or config.map_first else self.map(x)

    def _to_stream_dtype(self, x: Tensor) -> Tensor:
        return x if self.stream_dtype is None else x.to(self.stream_dtype)


def fresh_table(vocab_size: int, width: int, std: float) -> nn.Embedding:
    table = nn.Embedding(vocab_size, width)
    nn.init.normal_(table.weight, std=std)
    return table


def _make_positions(config: EmbeddingsConfig, width: int) -> nn.Module:
    match config.positions:
        case "learned":
            return LearnedPositions(
                config.num_positions + config.position_offset, width
            )
        case "sinusoidal":
            return SinusoidalPositions(width, config.sinusoidal_layout)
        case _:
            return NoPositions()


def _rows_of_positions(
    config: EmbeddingsConfig, ids: Int[Tensor, "batch length"], start: int | PositionIds
) -> int | PositionIds:
    """Return positions shifted to the rows of the table, which padding may also precede or not count."""
    offset = config.position_offset
    if config.padding_id is not None and not isinstance(start, PositionIds):
        start = _counted_positions(ids, config.padding_id, start)
    if not offset:
        return start
    if isinstance(start, PositionIds):
        return start._replace(ids=start.ids + offset, end=start.end + offset)
    return start + offset


def _counted_positions(ids: Tensor, padding_id: int, start: int) -> PositionIds:
    """Return positions that skip padding; see `EmbeddingsConfig.padding_id`."""
    tokens = (ids != padding_id).long()
    return PositionIds(
        (tokens.cumsum(dim=1) + start) * tokens - 1, start + ids.shape[1]
    )


def _without_masked(
    config: MaskedTokens,
    x: Float[Tensor, "batch length width"],
    ids: Int[Tensor, "batch length"],
) -> Float[Tensor, "batch length width"]:
    """Set rows of masked tokens to 0 and rescale all rows; see `MaskedTokens`."""
    masked = ids == config.token
    share = masked.sum(dim=1).to(x.dtype) / (ids != config.padding).sum(dim=1)
    factor = (1 - config.trained) / (1 - share)
    return x.masked_fill(masked[..., None], 0.0) * factor[:, None, None]
