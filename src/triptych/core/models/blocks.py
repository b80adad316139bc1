"""The blocks of every model: attention and feed-forward layers in residual frames."""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeVar, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from triptych.core.attention.layer import (
    Kept,
    MultiHeadAttention,
)
from triptych.core.attention.layer_cache import AttentionCache
from triptych.core.attention.position_modules import PositionIds
from triptych.core.models.architecture import (
    BlockConfig,
    BlockInputConfig,
    BlockInputsConfig,
    NormConfig,
    SublayerConfig,
)
from triptych.core.models.experts import make_feed_forward
from triptych.core.models.feed_forward import ACTIVATIONS, Dropout
from triptych.core.models.streams import BlockStreams

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class NewTokens(NamedTuple):
    """New tokens of a decoding step, with positions or masks other than the default."""

    positions: PositionIds  # positions of the tokens
    # values added to the scores of new tokens and all cached tokens, `[batch, 1, new, cached]`; None for no
    # mask
    mask: Tensor | None


@final
class OffsetNorm(nn.Module):
    """A norm with weights stored relative to an offset: `normal(x) ⊙ (offset + weight) + bias`."""

    def __init__(self, config: NormConfig, d_model: int) -> None:
        super().__init__()
        self.kind = config.kind
        self.eps = config.eps
        self.offset = config.offset
        self.weight = nn.Parameter(torch.full((d_model,), 1 - config.offset))
        has_bias = config.bias and config.kind == "layer"
        self.bias = nn.Parameter(torch.zeros(d_model)) if has_bias else None

    def forward(
        self, x: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows d_model"]:
        # Half precision would round small stored weights away when the offset is added.
        shape = x.shape[-1:]
        wide = torch.promote_types(x.dtype, torch.float32)
        weight = self.offset + self.weight.to(wide)
        if self.kind == "layer":
            bias = None if self.bias is None else self.bias.to(wide)
            return F.layer_norm(x.to(wide), shape, weight, bias, self.eps).to(x.dtype)
        return F.rms_norm(x.to(wide), shape, weight, self.eps).to(x.dtype)


def make_norm(config: NormConfig | None, d_model: int) -> nn.Module:
    """Build a norm with weights initialised to the identity; `nn.Identity` for None."""
    if config is None:
        return nn.Identity()
    if config.offset:
        return OffsetNorm(config, d_model)
    if config.kind == "rms":
        return nn.RMSNorm(d_model, config.eps, elementwise_affine=config.weight)
    return nn.LayerNorm(
        d_model, config.eps, elementwise_affine=config.weight, bias=config.bias
    )


def norm_of_part(
    norm: nn.Module,
    part: Float[Tensor, "*rows d_model"],
    total: Float[Tensor, "*rows d_model"],
) -> Float[Tensor, "*rows d_model"]:
    """Apply a norm to a part of its input `total`, without the bias of the norm.

    The size of the total is kept fixed, so that the norm is linear: results for parts of a total sum to the
    result for the total.
    """
    if isinstance(norm, nn.Identity):
        return part
    if isinstance(norm, nn.LayerNorm) or (
        isinstance(norm, OffsetNorm) and norm.kind == "layer"
    ):
        part = part - part.mean(dim=-1, keepdim=True)
        total = total - total.mean(dim=-1, keepdim=True)
    eps = float(norm.eps or torch.finfo(total.dtype).eps)  # type: ignore[arg-type]
    part = part / (total.square().mean(dim=-1, keepdim=True) + eps).sqrt()
    weight = getattr(norm, "weight", None)
    if not isinstance(weight, Tensor):
        return part
    # Half precision would round small stored weights away when the offset is added.
    gain = weight.to(torch.promote_types(part.dtype, torch.float32))
    gain = gain + norm.offset if isinstance(norm, OffsetNorm) else gain
    return (part * gain).to(part.dtype)


@final
class Residual(nn.Module):
    """The residual frame around a sub-layer: norms, dropout and the sum.

    Post-norm, as in the paper: `norm(x + dropout(f(x)))`. Pre-norm: `x + dropout(f(norm(x)))`.
    Call the sub-layer between `enter` and `leave`.
    """

    def __init__(self, config: SublayerConfig, d_model: int) -> None:
        super().__init__()
        self.norm = make_norm(config.norm, d_model)
        self.out_norm = (
            None if config.out_norm is None else make_norm(config.out_norm, d_model)
        )
        self.dropout = Dropout(config.dropout)
        self.pre = config.place == "pre"
        self.scale = config.scale
        self.from_norm = config.from_norm

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of the sub-layer."""
        return self.norm(x) if self.pre else x

    def leave(self, x: Tensor, change: Tensor) -> Tensor:
        """Return the stream after the sub-layer, from the stream before and the sub-layer's output."""
        total = (self.norm(x) if self.from_norm else x) + self.added(change)
        return total if self.pre else self.norm(total)

    def added(self, change: Tensor) -> Tensor:
        """Return the summand of the stream: norm, scale and dropout of the sub-layer's output."""
        if self.out_norm is not None:
            change = self.out_norm(change)
        if self.scale != 1.0:
            change = change * self.scale
        return self.dropout(change) if self.training else change

    def part_added(
        self,
        part: Float[Tensor, "*rows d_model"],
        total: Float[Tensor, "*rows d_model"],
    ) -> Float[Tensor, "*rows d_model"]:
        """Compute the contribution of a part of a sub-layer's output to the stream.

        A norm after the sub-layer divides by the size of the whole output. If parts sum to the total, their
        contributions sum to that of the total, without the bias of such a norm.
        """
        if self.out_norm is not None:
            part = norm_of_part(self.out_norm, part, total)
        return part * self.scale


@final
class BlockInputs(nn.Module):
    """The inputs of all blocks; see `BlockInputsConfig`."""

    def __init__(
        self, config: BlockInputsConfig, d_model: int, num_blocks: int
    ) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.table = nn.Embedding(config.vocab_size, num_blocks * config.width)
        nn.init.normal_(self.table.weight, std=0.02)
        self.map = nn.Linear(d_model, num_blocks * config.width, bias=False)
        self.norm = make_norm(config.norm, config.width)

    def forward(
        self, ids: Int[Tensor, "batch length"], x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length blocks width"]:
        width = self.config.width
        # Tokens of pictures and sounds may lie outside the table.
        rows = self.table(ids.where(ids < self.config.vocab_size, 0)) * width**0.5
        mapped = self.map(x) * self.d_model**-0.5
        added: Tensor = self.norm(mapped.unflatten(-1, (-1, width))) + rows.unflatten(
            -1, (-1, width)
        )
        return added * 2**-0.5


@final
class BlockInput(nn.Module):
    """The additional input of a block; see `BlockInputConfig`."""

    def __init__(self, config: BlockInputConfig, d_model: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, config.width, bias=False)
        self.outer = nn.Linear(config.width, d_model, bias=False)
        self.norm = make_norm(config.norm, d_model)
        self.activation = ACTIVATIONS[config.activation]

    def forward(
        self,
        x: Float[Tensor, "batch length d_model"],
        given: Float[Tensor, "batch length width"],
    ) -> Float[Tensor, "batch length d_model"]:
        """Return the summand of the stream."""
        return self.norm(self.outer(self.activation(self.gate(x)) * given))  # type: ignore[no-any-return]


@final
class Block(nn.Module):
    """A Transformer block: self-attention, optional cross-attention, feed-forward layer, optional input."""

    scale: Tensor | None

    def __init__(
        self,
        config: BlockConfig,
        d_model: int,
        self_attention: MultiHeadAttention,
        cross_attention: MultiHeadAttention | None = None,
    ) -> None:
        super().__init__()
        self.added_before: Tensor | None = None
        self.added_after: Tensor | None = None
        self.self_attention = self_attention
        self.self_residual = Residual(config.attention, d_model)
        if cross_attention is not None and config.cross is not None:
            self.cross_attention = cross_attention
            self.cross_residual = Residual(config.cross, d_model)
        self.has_cross = cross_attention is not None
        self.feed_forward = make_feed_forward(config.feed_forward, d_model)
        self.feed_forward_residual = Residual(config.feed_forward_frame, d_model)
        self.input = None if config.input is None else BlockInput(config.input, d_model)
        self.streams = (
            None if config.streams is None else BlockStreams(config.streams, d_model)
        )
        self.register_buffer("scale", torch.ones(1) if config.scaled else None)
        self.keys = config.keys
        self.borrows = self_attention.borrows
        self.parallel = config.parallel
        self.shares_norm = config.parallel and config.feed_forward_frame.norm is None
        self.recompute = False

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        *,
        cache: AttentionCache | None = None,
        memory_cache: AttentionCache | None = None,
        **options: Any,
    ) -> Float[Tensor, "batch length *streams d_model"]:
        """Apply the block to the stream, or to several streams; `options` are passed to `_computed`.

        In decoding, several hypotheses may share the memory of a sentence: the rows of `x` are then a
        multiple of the rows of the memory, with rows of a sentence next to each other, and the hypotheses of
        a sentence attend as one longer row of queries. If `memory` is None, `memory_cache` replaces it.

        `lent` collects shared keys and values by block (`BlockConfig.keys`); `given` is the additional input
        of the block.
        """
        # A recomputed forward pass would append its tokens to the cache a second time.
        if (
            self.recompute
            and self.training
            and torch.is_grad_enabled()
            and cache is memory_cache is None
        ):
            found: Tensor = checkpoint(
                self._computed, x, mask, use_reentrant=False, **options
            )
            return found
        return self._computed(
            x, mask, cache=cache, memory_cache=memory_cache, **options
        )

    def _computed(
        self,
        x: Tensor,
        mask: Tensor | None,
        *,
        causal: bool = False,
        memory: Tensor | None = None,
        memory_mask: Tensor | None = None,
        cache: AttentionCache | None = None,
        memory_cache: AttentionCache | None = None,
        positions: PositionIds | None = None,
        lent: dict[int, Kept] | None = None,
        given: Float[Tensor, "batch length width"] | None = None,
    ) -> Tensor:
        # The sub-layers run on one stream; other streams are predicted here and corrected at the end.
        predicted = None
        if self.streams is not None:
            predicted = self.streams.predict(x)
            x = predicted[:, :, self.streams.active]
        if self.added_before is not None:
            x = x + self.added_before.to(x)
        read = self.self_residual.enter(x)
        borrowed = (
            lent[self.keys]
            if self.borrows and lent is not None and self.keys is not None
            else None
        )
        options: dict[str, Any] = {
            "causal": causal,
            "cache": cache,
            "positions": positions,
            "lent": borrowed,
        }
        own, _, kept = self.self_attention(read, mask=mask, **options)
        if self.keys is not None and lent is not None and not self.borrows:
            lent[self.keys] = kept
        del kept  # frees its memory before the feed-forward layer
        if self.parallel:
            fed = self.feed_forward(
                read if self.shares_norm else self.feed_forward_residual.enter(x)
            )
            x = self.self_residual.leave(x, own) + self.feed_forward_residual.added(fed)
            return self._steered(x)
        x = self.self_residual.leave(x, own)
        if self.streams is not None:
            x = self.streams.join(x, read)
        if self.has_cross:
            queries = self.cross_residual.enter(x)
            if memory is not None:
                queries = queries.reshape(memory.shape[0], -1, queries.shape[-1])
            cross = self.cross_attention(
                queries, memory=memory, mask=memory_mask, cache=memory_cache
            ).output
            x = self.cross_residual.leave(
                x, cross if memory is None else cross.view(x.shape)
            )
        x = self.feed_forward_residual.leave(
            x, self.feed_forward(self.feed_forward_residual.enter(x))
        )
        if self.streams is not None and predicted is not None:
            x = self.streams.correct(predicted, x)
            if self.input is not None and given is not None:
                x = self.streams.add(x, self.input(self.streams.scaled(x), given))
            return x
        if self.input is not None and given is not None:
            x = x + self.input(x, given)
        return self._steered(x if self.scale is None else x * self.scale)

    # The vector of `steer` after this block; `added_before` is that before the first block.
    def _steered(self, x: Tensor) -> Tensor:
        return x if self.added_after is None else x + self.added_after.to(x)


def sharing_copy(module: ModuleT) -> ModuleT:
    """Copy a module with all submodules; parameters and buffers are shared, not copied."""
    held = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, held)


def each_once(
    layers: Iterable[MultiHeadAttention], seen: dict[int, MultiHeadAttention]
) -> Iterator[MultiHeadAttention]:
    """Yield layers, and enter them in `seen`; a layer seen before is copied, with shared parameters."""
    for layer in layers:
        yield sharing_copy(layer) if id(layer) in seen else layer
        seen[id(layer)] = layer


def recompute_activations(blocks: Iterable[nn.Module]) -> None:
    """Set blocks to recompute activations in the backward pass instead of storing them."""
    for block in blocks:
        assert isinstance(block, Block), type(block)
        block.recompute = True
