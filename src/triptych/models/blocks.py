"""The blocks of encoder and decoder: attention and feed-forward, each in a residual sub-layer."""

from collections.abc import Callable
from typing import NamedTuple, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.attention import AttentionCache, AttentionPositions, MultiHeadAttention, PositionIds
from triptych.models.configuration import AttentionConfig, ModelConfig
from triptych.models.dropout import Dropout

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": torch.relu, "gelu": F.gelu, "swish": F.silu}


class NewTokens(NamedTuple):
    """Tokens of a step of decoding that do not simply follow each other.

    Attributes:
        positions: where they stand.
        mask: what they see of the tokens held and of each other, numbers added to the scores,
            `[batch, 1, new, held]`; None for everything.
    """

    positions: PositionIds
    mask: Tensor | None


class BlockOutput(NamedTuple):
    """A block's output and the weights of its attention layers (None unless asked for)."""

    x: Float[Tensor, "batch length d_model"]
    self_weights: Tensor | None
    cross_weights: Tensor | None = None


@final
class FeedForward(nn.Module):
    """`f(x W_1 + b_1) W_2 + b_2`; the paper's equation 2 where f is "relu", `max(0, ·)`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_ff)
        self.outer = nn.Linear(config.d_ff, config.d_model)
        self.activation = _ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.activation_dropout)
        for linear in (self.inner, self.outer):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, x: Float[Tensor, "batch length d_model"]) -> Float[Tensor, "batch length d_model"]:
        """Apply to every position alike."""
        hidden = self.activation(self.inner(x))
        return self.outer(self.dropout(hidden) if self.training else hidden)  # type: ignore[no-any-return]


@final
class Residual(nn.Module):
    """The frame around a sub-layer: where its norm stands, its dropout, and the sum.

    Post-norm, the paper's: `norm(x + dropout(f(x)))`. Pre-norm: `x + dropout(f(norm(x)))`.
    A sub-layer is called between `enter` and `leave`.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.pre = config.norm == "pre"

    def enter(self, x: Tensor) -> Tensor:
        """What the sub-layer reads."""
        return self.norm(x) if self.pre else x

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        """The stream after the sub-layer, from the stream before it and its output."""
        total = x + (self.dropout(change) if self.training else change)
        return total if self.pre else self.norm(total)


def _attention(
    config: ModelConfig, site: AttentionConfig, positions: AttentionPositions | None
) -> MultiHeadAttention:
    return MultiHeadAttention(
        config.d_model,
        site.num_heads or config.num_heads,
        site.parameterisation(),
        dropout=site.dropout,
        positions=positions,
    )


@final
class EncoderBlock(nn.Module):
    """Self-attention, then feed-forward."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        site = config.encoder_sites()[layer]
        self.self_attention = _attention(config, site, config.positions.in_attention())
        self.self_residual = Residual(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None,
        need_weights: bool = False,
        positions: PositionIds | None = None,
    ) -> BlockOutput:
        """Read and write `[batch, src_len, d_model]`."""
        attended = self.self_attention(
            self.self_residual.enter(x), mask=mask, need_weights=need_weights, positions=positions
        )
        x = self.self_residual.leave(x, attended.output)
        x = self.feed_forward_residual.leave(x, self.feed_forward(self.feed_forward_residual.enter(x)))
        return BlockOutput(x, attended.weights)


@final
class DecoderBlock(nn.Module):
    """Causal self-attention, cross-attention to the memory, then feed-forward."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        own, cross = config.decoder_sites()[layer], config.cross_sites()[layer]
        self.self_attention = _attention(config, own, config.positions.in_attention())
        self.self_residual = Residual(config)
        self.cross_attention = _attention(config, cross, None)
        self.cross_residual = Residual(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_residual = Residual(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor | None,
        memory_mask: Tensor | None,
        cache: AttentionCache | None = None,
        memory_cache: AttentionCache | None = None,
        need_weights: bool = False,
        new: NewTokens | None = None,
    ) -> BlockOutput:
        """Read and write `[batch, tgt_len, d_model]`.

        While decoding, several hypotheses may share a sentence's memory: `x` then has a multiple of
        the memory's rows, those of one sentence side by side, and each sentence's hypotheses read
        the memory as one longer row of queries. Without a memory, `memory_cache` holds it.
        """
        read = self.self_residual.enter(x)
        if new is None:
            own = self.self_attention(read, causal=True, cache=cache, need_weights=need_weights)
        else:
            own = self.self_attention(read, mask=new.mask, cache=cache, positions=new.positions)
        x = self.self_residual.leave(x, own.output)
        queries = self.cross_residual.enter(x)
        if memory is not None:
            queries = queries.reshape(memory.shape[0], -1, queries.shape[-1])
        cross = self.cross_attention(
            queries, memory=memory, mask=memory_mask, cache=memory_cache, need_weights=need_weights
        )
        x = self.cross_residual.leave(x, cross.output if memory is None else cross.output.view(x.shape))
        x = self.feed_forward_residual.leave(x, self.feed_forward(self.feed_forward_residual.enter(x)))
        return BlockOutput(x, own.weights, cross.weights)
