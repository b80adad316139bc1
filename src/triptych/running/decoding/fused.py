"""Fused models for decoding: the same blocks with fewer and faster maps.

The layers of `attention` serve training, inspection and rewriting; decoding token by token, they spend most
of the time in overhead between operations. `fuse` replaces the layers of a copied model: every attention
layer, in any parameterisation, by a `FusedAttention` with multiplied and joined maps
(`AttentionWeights.multiplied`), and every linear map by a map of the requested precision.
"""

import copy
import math
from dataclasses import replace
from typing import Any, TypeVar, cast, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from triptych import thresholds
from triptych.core.algebra.cost import cached_numbers
from triptych.core.algebra.legality import (
    CHANNELS_FREE,
    KEY_BIAS_BLIND,
    VALUE_BIAS_PASSES,
)
from triptych.core.algebra.semantics import HeadGate, HeadNorm, Semantics
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention import (
    AFTER_SCALE,
    LOCATE,
    ROTATE,
    SIDE_STEPS,
    TO_WEIGHTS,
    AttentionCache,
    Inputs,
    Kept,
    LayerOutput,
    LearnedPositions,
    MultiHeadAttention,
    PositionIds,
    TokenPositions,
    beyond_kernels,
    compares_positions,
    prepare,
    slice_broadcast,
    steps_on,
    walk,
)
from triptych.core.models import (
    Block,
    EncoderDecoder,
    Experts,
    FeedForward,
    LanguageModel,
    OffsetNorm,
)
from triptych.running.decoding.cache import (
    EVEN_KEYS,
    EVEN_ROWS,
    SlotCache,
    even_length,
    hidden_score,
)
from triptych.running.decoding.linear_maps import ACTIVATIONS, Maps, constant
from triptych.running.memory import MappedFiles

ModuleT = TypeVar("ModuleT", bound=nn.Module)
ModelT = TypeVar(
    "ModelT", EncoderDecoder, LanguageModel, EncoderDecoder | LanguageModel
)

# A product with fewer multiplications uses another algorithm of torch; in bfloat16, the multiplications of
# all heads of a batch count together.
_SMALL_PRODUCT = {torch.bfloat16: 16**3 + 1}
_SMALL_PRODUCT_OTHERWISE = 400
# With fewer rows, the product of attention weights and values in bfloat16 depends on the number of keys, even
# if the additional keys have weight 0.
_FEWEST_ROWS = {torch.bfloat16: 4}
# Fields of `Semantics` of a fused layer. Cross-attention lacks steps before the products.
_OF_CROSS = frozenset({"scale", "kind", "dropout", "gate"})
_WALKED = (*SIDE_STEPS, LOCATE, *AFTER_SCALE, *TO_WEIGHTS)
_OF_ONE_SEQUENCE = _OF_CROSS.union(*(step.fields for step in _WALKED))


@final
class FusedAttention(nn.Module):
    """An attention layer with one input map and one output map; a drop-in for `MultiHeadAttention`.

    Keys and values have `groups` heads, each shared by `num_heads / groups` query heads. All heads have the
    same width; narrower heads are padded with zeros. Self-attention projects to queries, keys and values in
    one product; cross-attention projects to queries and reads keys and values from its cache. With `once`,
    keys and values that differ only by the rotation of keys are computed and cached once. A KV-sharing layer
    (`borrows`) projects to queries only.
    """

    def __init__(
        self,
        weights: AttentionWeights,
        maps: Maps,
        is_cross: bool,
        once: bool = False,
        borrows: bool = False,
    ) -> None:
        super().__init__()
        if foreign := beyond_fusing(weights, is_cross):
            raise ValueError(f"a layer with {', '.join(foreign)} cannot be fused")
        self.num_heads = weights.num_heads
        self.is_cross = is_cross
        self.groups = math.lcm(weights.num_key_heads, weights.num_value_heads)
        q, k, v = (weights.multiplied(side) for side in ("q", "k", "v"))
        self.width = max(q.d_out, v.d_out)
        self.d_k = q.d_out
        self.same = once and not is_cross and _keeps_once(weights)
        kept = [self.groups] if self.same else [self.groups, self.groups]
        self._parts = [self.num_heads, *kept]
        self.semantics = semantics = _for_steps(weights, q.d_out, v.d_out)
        self._on_queries = steps_on("q", semantics)
        self._on_keys = steps_on("k", semantics)
        self._on_values = steps_on("v", semantics)
        # A rotary embedding directly after both maps rotates queries and keys in one operation.
        rotated_alone = self._on_queries[:1] == self._on_keys == (ROTATE,)
        self.rotates_together = rotated_alone and not self._on_values and not self.same
        self.positional = compares_positions(semantics)
        # The kernel supports neither soft caps nor sinks, and on CPUs it is slower than products.
        self.by_products = weights.W_O.is_cpu or beyond_kernels(semantics) is not None
        # The scale folds into W_Q, unless a norm or clipping follows the maps, or a content-dependent bias
        # reads the queries.
        read = semantics.bias is not None and semantics.bias.reads_content
        followed = (*self._on_queries, *self._on_keys, *self._on_values)
        folds = all(step.is_linear for step in followed) and not read
        self.scale = 1.0 if folds else semantics.scale
        scale = semantics.scale if folds else 1.0
        scaled = Link(q.weight * scale, None if q.bias is None else q.bias * scale)
        queries = _stacked_rows(scaled.repeat(self.num_heads), self.width)
        keys, values = (
            _stacked_rows(link.repeat(self.groups), self.width) for link in (k, v)
        )
        joined = (
            [queries]
            if is_cross or borrows
            else [queries, keys]
            if self.same
            else [queries, keys, values]
        )
        self.inward = maps.linear(
            *(torch.cat(parts) for parts in zip(*joined, strict=True))
        )
        per_head = F.pad(weights.W_O, (0, 0, 0, self.width - weights.W_O.shape[1]))
        self.outward = maps.linear(per_head.flatten(0, 1).mT, weights.o_bias)
        self.gate = (
            None
            if semantics.gate is None
            else _FusedGate(_widened(semantics.gate, self.width), maps)
        )
        if is_cross:
            self.memory_rows = (
                torch.cat([keys[0], values[0]]),
                torch.cat([keys[1], values[1]]),
            )

    def forward(
        self,
        x: Float[Tensor, "batch query_len d_model"],
        *,
        memory: None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: AttentionCache | None = None,
        need_weights: bool = False,
        positions: PositionIds | None = None,
        lent: Kept | None = None,
    ) -> LayerOutput:
        """See `MultiHeadAttention`; the mask may also be additive. Attention weights are not returned."""
        batch, length, _ = x.shape
        if length == 1:
            heads = self.inward(x).view(batch, -1, 1, self.width)
        else:
            heads = self.inward(x).view(batch, length, -1, self.width).transpose(1, 2)
        if self.is_cross:
            assert cache is not None
            token_positions, (k, v) = TokenPositions(0), cache.entries
        else:
            heads, k, v, token_positions = self._of_one_sequence(
                heads, cache, positions, lent
            )
        kept = Kept(token_positions, (v,) if self.same else (k, v))
        first = (
            k.shape[2] - length
        )  # unused if positions are given: then empty slots follow the tokens
        # This test comes first because lengths of a traced model are symbolic.
        if torch.compiler.is_compiling():
            mixed = self._mixed(
                heads, k, v, token_positions, first, mask, causal, is_even=False
            )
            return self._output(mixed, x, kept)
        is_even = isinstance(cache, SlotCache) or self.is_cross or cache is None
        causal = causal and length > 1
        at_a_time = thresholds.SCORES_AT_A_TIME // (batch * self.num_heads * k.shape[2])
        at_a_time = max(EVEN_ROWS, at_a_time // EVEN_ROWS * EVEN_ROWS)
        if length <= at_a_time:
            return self._output(
                self._mixed(heads, k, v, token_positions, first, mask, causal, is_even),
                x,
                kept,
            )
        mixed = torch.empty_like(heads)
        key_len = k.shape[2]
        for start in range(0, length, at_a_time):
            rows = slice(start, min(start + at_a_time, length))
            seen = slice(
                0, min(even_length(first + rows.stop), key_len) if causal else key_len
            )
            own = (
                None
                if mask is None
                else slice_broadcast(mask, (slice(None), slice(None), rows, seen))
            )
            part = (
                heads[:, :, rows],
                k[:, :, seen],
                v[:, :, seen],
                token_positions.piece(rows, seen),
            )
            found = self._mixed(*part, first + start, own, causal, is_even)
            mixed[:, :, rows] = found.reshape(batch, self.num_heads, -1, self.width)
        return self._output(mixed, x, kept)

    def _mixed(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        token_positions: TokenPositions,
        first: Any,
        mask: Tensor | None,
        causal: bool,
        is_even: bool,
    ) -> Tensor:
        """Compute the heads' outputs, in any shape; `first` is the key index of the first query."""
        bias = None
        if self.positional:
            mask, bias = self._compared(mask, q, k, token_positions, first)
        if causal:
            keys = torch.arange(k.shape[2], device=k.device)
            mask = _both(mask, keys <= keys[first : first + q.shape[2], None], k)
        if mask is not None and mask.dtype == torch.bool:
            mask = numbers_of(mask, k)
        if self.scale != 1.0:
            q = q * self.scale
        rows = q.reshape(q.shape[0] * self.groups, -1, self.width)
        if self.by_products:
            # A step has one query for each row, at a given position, whatever the batch.
            varies = not self.is_cross and token_positions.given is None
            return self._by_products(rows, k, v, mask, bias, is_even, varies)
        added = mask if bias is None else bias if mask is None else mask + bias
        return self._by_kernel(rows, k, v, added)

    def _output(self, mixed: Tensor, x: Tensor, kept: Kept) -> LayerOutput:
        """Gate the heads' outputs, given in any shape, and apply the output map (`gate`, `output`)."""
        batch, length, _ = x.shape
        if self.gate is not None:
            mixed = mixed.reshape(
                batch, self.num_heads, length, self.width
            ) * self.gate(x)
        if length == 1:
            return LayerOutput(self.outward(mixed.reshape(batch, 1, -1)), None, kept)
        joined = mixed.reshape(batch, self.num_heads, length, self.width).transpose(
            1, 2
        )
        return LayerOutput(self.outward(joined.reshape(batch, length, -1)), None, kept)

    def _of_one_sequence(
        self,
        heads: Tensor,
        cache: AttentionCache | None,
        positions: PositionIds | None,
        lent: Kept | None,
    ) -> tuple[Tensor, Tensor, Tensor, TokenPositions]:
        """Return queries, keys, values and positions: walk the steps before and after the cache."""
        token_positions = TokenPositions.after(cache, positions)
        semantics = self.semantics
        if lent is not None:
            token_positions = lent.token_positions
            q = prepare(heads, "q", semantics, token_positions, self._on_queries)
            return q, *self._read(lent.entries, token_positions), token_positions
        q, *kept = torch.split_with_sizes(heads, self._parts, 1)
        on_queries = self._on_queries
        if self.rotates_together:
            queries_and_keys = heads.narrow(1, 0, self.num_heads + self.groups)
            rotated = ROTATE.run(queries_and_keys, "q", semantics, token_positions)
            q, kept[0] = rotated.split_with_sizes(self._parts[:2], 1)
            on_queries = on_queries[1:]
        elif not self.same:
            kept = [
                prepare(kept[0], "k", semantics, token_positions, self._on_keys),
                prepare(kept[1], "v", semantics, token_positions, self._on_values),
            ]
        q = prepare(q, "q", semantics, token_positions, on_queries)
        # Keys are cached with their positions if they are rotated at reading.
        if cache is not None and (self.positional or (self.same and self._on_keys)):
            token_positions, entries = token_positions.add(cache, tuple(kept))
        else:
            entries = tuple(kept) if cache is None else cache.append(tuple(kept))
        return q, *self._read(entries, token_positions), token_positions

    def _read(
        self, entries: tuple[Tensor, ...], token_positions: TokenPositions
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values from cached entries."""
        if not self.same:
            return entries[0], entries[1]
        (v,) = entries
        return prepare(
            v, "k", self.semantics, token_positions.of_keys(v), self._on_keys
        ) if self._on_keys else v, v

    def _compared(
        self,
        mask: Tensor | None,
        q: Tensor,
        k: Tensor,
        token_positions: TokenPositions,
        first: Any,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return the mask with local windows applied, and the positional bias of scores."""
        keys = token_positions.key_positions(k)
        queries = (
            keys[first : first + q.shape[2]]
            if token_positions.given is None
            else token_positions.given.ids
        )
        near, bias = LOCATE.run(
            q[..., : self.d_k], k[..., : self.d_k], self.semantics, queries, keys
        )
        return mask if near is None else _both(mask, near, k), bias

    def _by_products(
        self,
        rows: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        is_even: bool,
        varies: bool,
    ) -> Tensor:
        """Compute attention with matrix products; the query heads of a group are stacked as rows.

        If `is_even`, products are padded to shapes for which the bits of a text do not depend on its batch;
        `varies` is whether the number of rows depends on the batch.
        """
        batch = k.shape[0]
        groups = rows.shape[0]
        count = rows.shape[1]
        missing = 0
        if is_even:
            missing = even_length(k.shape[2]) - k.shape[2]
            if missing:
                k, v = (F.pad(t, (0, 0, 0, missing)) for t in (k, v))
                if mask is None:
                    mask = rows.new_zeros(k.shape[2] - missing)
                mask = F.pad(mask, (0, missing), value=hidden_score(mask.dtype))
                bias = None if bias is None else F.pad(bias, (0, missing))
            more = -count % EVEN_ROWS if varies else 0
            small = _SMALL_PRODUCT.get(k.dtype, _SMALL_PRODUCT_OTHERWISE)
            fewest = max(
                -(-small // (EVEN_ROWS * self.width)), _FEWEST_ROWS.get(k.dtype, 1)
            )
            missing = max(more, fewest - count)
            rows = F.pad(rows, (0, 0, 0, missing)) if missing > 0 else rows
        k = k.reshape(groups, -1, self.width)
        v = v.reshape(groups, -1, self.width)
        if k.dtype == torch.bfloat16:
            k, v = (
                k.contiguous(),
                v.contiguous(),
            )  # otherwise the product copies cache slices slowly
        scores = torch.bmm(rows, k.mT)
        key_len = k.shape[1]
        scores = scores[:, :count].reshape(batch, self.num_heads, -1, key_len)
        # Products and mixing in even shapes replace those steps; the scale is in the queries, and the mask
        # is additive. The steps between are walked.
        given = Inputs(rows, k, v, None, bias, False, self.semantics, 0.0)
        scores = walk(AFTER_SCALE, scores, given)
        weights = walk(TO_WEIGHTS, scores if mask is None else scores + mask, given)
        weights = weights.reshape(groups, count, key_len)
        if missing > 0:
            weights = F.pad(weights, (0, 0, 0, missing))
        if not is_even or key_len <= EVEN_KEYS:
            return torch.bmm(weights, v)[:, :count]
        # Sum over blocks of keys: torch splits a long sum depending on its length, and so changes its bits.
        parts = key_len // EVEN_KEYS
        apart = (
            weights.view(groups, -1, parts, EVEN_KEYS)
            .transpose(1, 2)
            .reshape(groups * parts, -1, EVEN_KEYS)
        )
        found = torch.bmm(apart, v.reshape(groups * parts, EVEN_KEYS, self.width))
        return found.view(groups, parts, -1, self.width).sum(dim=1)[:, :count]

    def gathered(
        self,
        q: Float[Tensor, "batch heads query_len width"],
        k: Float[Tensor, "batch groups key_len width"],
        v: Float[Tensor, "batch groups key_len width"],
        mask: Tensor,
        *,
        varies: bool,
    ) -> Float[Tensor, "batch heads query_len width"]:
        """Compute the heads' outputs with products in even shapes, an additive mask and no bias.

        `varies` is whether the number of queries depends on the batch.
        """
        rows = q.reshape(q.shape[0] * self.groups, -1, self.width)
        return self._by_products(rows, k, v, mask, None, True, varies).reshape(q.shape)

    def _by_kernel(
        self, rows: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
    ) -> Tensor:
        q = rows.view(k.shape[0], self.groups, -1, self.width)
        if mask is not None and self.groups < self.num_heads:
            mask = mask[(None,) * (4 - mask.dim())]
            if max(mask.shape[1:3]) > 1:
                query_len = q.shape[2] * self.groups // self.num_heads
                mask = mask.expand(-1, self.num_heads, query_len, -1)
                mask = mask.reshape(len(mask), self.groups, -1, k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)


@final
class _FusedGate(nn.Module):
    """The step `gate` with a packed map."""

    def __init__(self, gate: HeadGate, maps: Maps) -> None:
        super().__init__()
        self._gate, self._used = gate, gate.weight[..., 0].numel()
        # Sigmoids are computed in vectors, but a remainder in scalars with different bits: padding avoids a
        # remainder.
        missing = -self._used % ACTIVATIONS if maps.packed else 0
        weight = gate.weight.flatten(0, -2)
        bias = None if gate.bias is None else gate.bias.flatten()
        bias = None if bias is None else F.pad(bias, (0, missing))
        self.map = maps.floating(F.pad(weight, (0, 0, 0, missing)), bias)

    def forward(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch heads length channels"]:
        return self._gate.of_shares(self.map(x).sigmoid()[..., : self._used])


def _widened(gate: HeadGate, width: int) -> HeadGate:
    """Widen gates of channels to padded values; the gates of the padding have no effect."""
    if not gate.per_channel:
        return gate
    missing = width - gate.weight.shape[1]
    weight = F.pad(gate.weight, (0, 0, 0, missing))
    return replace(
        gate,
        weight=weight,
        bias=None if gate.bias is None else F.pad(gate.bias, (0, missing)),
    )


def _keeps_once(weights: AttentionWeights) -> bool:
    """Return True if keys and values differ only by the rotation of keys."""
    semantics = weights.semantics
    if semantics.rotary is not None and semantics.rotary.long is not None:
        return False  # keys are cached rotated
    rotated = steps_on("k", semantics) in ((), (ROTATE,))
    return weights.tied("k", "v") and rotated and not steps_on("v", semantics)


def _as_cached(weights: AttentionWeights) -> AttentionWeights:
    """Absorb the up-projections of keys and values into queries and output, as `Latent` does.

    If keys are `c U^K` and values `c U^V`, only c is cached: U^K is absorbed into W_Q, U^V into W_O. A key
    bias adds the same value to all scores of a query and is dropped. A layer stays unchanged if keys and
    values share no map, if channels between W_Q and W_K or between W_V and W_O cannot be mixed, or if moving
    a bias would change the output. These are the requirements of the exact rewrites.
    """
    common = [link for link in weights.k if any(link is other for other in weights.v)]
    rest_k = weights.k[len(common) :]
    rest_v = weights.v[len(common) :]
    ordered = weights.k[: len(common)] == tuple(common) == weights.v[: len(common)]
    if weights.tied("k", "v") or not (common and ordered and rest_k and rest_v):
        return weights
    if any(need.why_not(weights) for need in CHANNELS_FREE.values()):
        return weights
    if any(link.norm is not None for link in common):
        return weights
    # U^K and U^V for every query head; the shared maps before them become the only cached projection.
    up_k, up_v = (
        replace(weights, k=chain).multiplied("k").repeat(weights.num_heads)
        for chain in (rest_k, rest_v)
    )
    if up_k.bias is not None and KEY_BIAS_BLIND.why_not(weights):
        return weights
    if up_v.bias is not None and VALUE_BIAS_PASSES.why_not(weights):
        return weights
    queries = (
        weights.multiplied("q").repeat(weights.num_heads).then(Link(up_k.weight.mT))
    )
    per_head = weights.W_O
    o_bias = weights.o_bias
    if up_v.bias is not None:
        added = torch.einsum("hv,hvd->d", up_v.bias, per_head)
        o_bias = added if o_bias is None else o_bias + added
    memory = tuple(common)
    return replace(
        weights,
        q=(queries,),
        k=memory,
        v=memory,
        o=(Link(up_v.weight @ per_head),),
        o_bias=o_bias,
    )


def _keeps_more(weights: AttentionWeights) -> bool:
    """Return True if a `FusedAttention` would cache more values of a token than `cost` counts."""
    groups = math.lcm(weights.num_key_heads, weights.num_value_heads)
    chains = (weights.k,) if _keeps_once(weights) else (weights.k, weights.v)
    return cached_numbers(weights) < groups * sum(
        c[-1].d_out if c else weights.d_model for c in chains
    )


def beyond_fusing(weights: AttentionWeights, is_cross: bool) -> list[str]:
    """Return the features of a layer that `FusedAttention` lacks."""
    found = weights.semantics.beyond(_OF_CROSS if is_cross else _OF_ONE_SEQUENCE)
    if weights.norms_within:
        found.append("a norm between two maps")
    return found


def evaluating_copy(model: ModelT) -> ModelT:
    """Copy a model's modules, in evaluation mode, with the model's own parameters.

    All uses of one block become one module, so that its fused maps are stored once.
    """
    copied = copy.deepcopy(
        model, {id(parameter): parameter for parameter in model.parameters()}
    ).eval()
    for stack in copied.stacks.values():
        first: dict[tuple[int, ...], nn.Module] = {}
        for number, block in enumerate(stack.blocks):
            if not _is_changed_on_the_way(cast(Block, block)):
                parameters = tuple(id(parameter) for parameter in block.parameters())
                stack.blocks[number] = first.setdefault(parameters, block)
    return copied


def _is_changed_on_the_way(block: Block) -> bool:
    layers = [
        module for module in block.modules() if isinstance(module, MultiHeadAttention)
    ]
    steered = block.added_before is not None or block.added_after is not None
    return steered or any(layer.tap is not None for layer in layers)


def fuse(
    copied: ModuleT,
    maps: Maps,
    *,
    small_cache: bool = False,
    files: MappedFiles | None = None,
) -> ModuleT:
    """Replace the layers of a copied model; tables and maps around the blocks are left to the caller."""
    for parent in list(copied.modules()):
        if isinstance(parent, FeedForward):
            given = list(parent.parameters())
            maps.feed_forward(parent)
            if files is not None:
                files.let_go(given)
        elif isinstance(parent, Experts):
            maps.experts(parent)
        for name, layer in parent.named_children():
            if isinstance(layer, MultiHeadAttention) and layer.tap is None:
                is_cross = name == "cross_attention"
                weights = layer.weights()
                # If the cache must be small, a layer is fused only if fusing does not enlarge its cache.
                if small_cache:
                    weights = _as_cached(weights)
                    if beyond_fusing(weights, is_cross) or _keeps_more(weights):
                        continue
                fused_layer = FusedAttention(
                    weights, maps, is_cross, small_cache, layer.borrows
                )
                setattr(parent, name, fused_layer)
                if files is not None:
                    files.let_go(layer.parameters())
            elif isinstance(
                layer, nn.LayerNorm | nn.RMSNorm | OffsetNorm | LearnedPositions
            ):
                cast_parameters(layer, maps.dtype)
    return copied


def call_directly(model: nn.Module) -> None:
    """Bypass `Module.__call__` between the modules of a model.

    Checks for hooks and look-ups of submodules and parameters would cost a tenth of a decoding step.
    """
    for parent in model.modules():
        direct = parent.__dict__
        direct.update(parent._parameters)
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList):
                direct[name] = [each.forward for each in child]
            else:
                direct[name] = (
                    child.forward
                    if type(child).forward is not nn.Module.forward
                    else child
                )


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the direct parameters of a module to a dtype, as constants."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = constant(parameter, dtype)


def _both(mask: Tensor | None, allowed: Tensor, like: Tensor) -> Tensor:
    """Combine a boolean or additive mask with a boolean mask."""
    if mask is None or mask.dtype == torch.bool:
        return allowed if mask is None else mask & allowed
    return mask + numbers_of(allowed, like)


def numbers_of(allowed: Tensor, like: Tensor) -> Tensor:
    """Convert a boolean mask to an additive mask: 0 where attention is allowed, else `hidden_score`."""
    numbers = torch.zeros(allowed.shape, dtype=like.dtype, device=like.device)
    return numbers.masked_fill_(~allowed, hidden_score(like.dtype))


def _for_steps(weights: AttentionWeights, d_k: int, d_v: int) -> Semantics:
    """Return the semantics of a layer with padded heads, and with all tensors on the layer's device."""
    semantics = weights.semantics
    if semantics.bias is not None:  # a CUDA graph must not copy between devices
        parts = {
            name: part.to(weights.device)
            for name, part in semantics.bias.tensors().items()
        }
        semantics = replace(semantics, bias=replace(semantics.bias, **parts))  # type: ignore[type-var]
    return replace(
        semantics,
        q_norm=_without_padding(semantics.q_norm, d_k),
        k_norm=_without_padding(semantics.k_norm, d_k),
        v_norm=_without_padding(semantics.v_norm, d_v),
    )


def _without_padding(norm: HeadNorm | None, width: int) -> HeadNorm | None:
    """Restrict a norm to the unpadded channels."""
    if norm is None:
        return None
    return replace(
        norm, channels=width if norm.channels is None else min(norm.channels, width)
    )


def _stacked_rows(link: Link, width: int) -> tuple[Tensor, Tensor]:
    """Stack a link's heads, padded to `width`; return weight `[heads · width, d_in]` and bias."""
    missing = width - link.d_out
    weight = F.pad(link.weight.mT, (0, 0, 0, missing)).flatten(0, 1)
    bias = (
        link.weight.new_zeros(link.copies, link.d_out)
        if link.bias is None
        else link.bias
    )
    return weight, F.pad(bias, (0, missing)).flatten()
