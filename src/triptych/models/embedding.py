"""What both kinds of models do with the tables of tokens and positions."""

from collections.abc import Callable

from jaxtyping import Float, Int
from torch import Tensor, nn

from triptych.attention import LearnedPositions, NoPositions, PositionIds, SinusoidalPositions
from triptych.models.architecture import EmbeddingsConfig, MaskedTokens


def make_positions(config: EmbeddingsConfig, width: int) -> nn.Module:
    """The module that adds positions to embeddings of that width."""
    match config.positions:
        case "learned":
            return LearnedPositions(config.num_positions + config.position_offset, width)
        case "sinusoidal":
            return SinusoidalPositions(width, config.sinusoidal_layout)
        case _:
            return NoPositions()


def embed(
    config: EmbeddingsConfig,
    ids: Int[Tensor, "batch length"],
    start: int | PositionIds,
    *,
    table: Callable[[Tensor], Tensor],
    positions: Callable[[Tensor, int | PositionIds], Tensor],
    norm: Callable[[Tensor], Tensor],
    segments: Float[Tensor, "batch length width"] | None = None,
) -> Float[Tensor, "batch length width"]:
    """Rows of tokens, scaled, with what is added for positions and segments, normalised."""
    x = table(ids)
    if config.scale != 1.0:
        x = x * config.scale
    if config.masked is not None:
        x = _without_masked(config.masked, x, ids)
    rows = _rows_of_positions(config, ids, start)
    if config.norm_first:
        return positions(norm(x if segments is None else x + segments), rows)
    x = positions(x, rows)
    return norm(x if segments is None else x + segments)


def _rows_of_positions(
    config: EmbeddingsConfig, ids: Int[Tensor, "batch length"], start: int | PositionIds
) -> int | PositionIds:
    """The rows of the table of positions for tokens that begin at `start`, or stand where it says."""
    offset = config.position_offset
    if config.padding_id is not None and not isinstance(start, PositionIds):
        start = _counted(ids, config.padding_id, start)
    if not offset:
        return start
    if isinstance(start, PositionIds):
        return start._replace(ids=start.ids + offset, end=start.end + offset)
    return start + offset


def _counted(ids: Tensor, padding_id: int, start: int) -> PositionIds:
    """Positions that count the tokens but for the padding; see `EmbeddingsConfig.padding_id`."""
    tokens = (ids != padding_id).long()
    return PositionIds((tokens.cumsum(dim=1) + start) * tokens - 1, start + ids.shape[1])


def _without_masked(
    config: MaskedTokens, x: Float[Tensor, "batch length width"], ids: Int[Tensor, "batch length"]
) -> Float[Tensor, "batch length width"]:
    """Rows of embeddings with those of masked tokens at 0; see `MaskedTokens`."""
    masked = ids == config.token
    share = masked.sum(dim=1).to(x.dtype) / (ids != config.padding).sum(dim=1)
    factor = (1 - config.trained) / (1 - share)
    return x.masked_fill(masked[..., None], 0.0) * factor[:, None, None]
