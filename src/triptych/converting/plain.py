"""Plain heads, for export to other libraries: single maps W_Q, W_K, W_V and W_O for each head.

Chains of maps are multiplied, bilinear forms factored and shared maps repeated, always exactly. Heads with
too high a rank or with unsupported features are refused. In an encoder-decoder, heads have
d_model / num_heads channels; in a language model, all heads are padded to the width of the widest head.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn

from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights, Link, standard_scale
from triptych.core.attention import LearnedPositions, sinusoidal
from triptych.core.models import (
    EncoderDecoder,
    FeedForwardConfig,
    LanguageModel,
    NormConfig,
    attention_sites,
    attention_weights,
    find_config,
    with_attention,
)
from triptych.errors import UsageError
from triptych.rewriting import (
    WeightsRewrite,
    rewrite,
)
from triptych.rewriting import functions as rewrites

# Constructor of a format's error from a description of the unsupported part.
Refused = Callable[[str], UsageError]
_ROUNDING = 8
_STACKS = {"encoder": ("encoder",), "decoder": ("decoder", "cross")}


@final
@dataclass(frozen=True)
class HeadSizes:
    """Number and width of heads, equal for all layers of the format."""

    num_heads: int
    num_kv_heads: int
    width: int  # number of channels of every head


def padded(weights: AttentionWeights, sizes: HeadSizes) -> AttentionWeights:
    """Pad a layer's heads with zeros to the given sizes, and add zero biases to maps without bias."""
    # The scale becomes 1 / √width by scaling W_Q, and additional heads are all zeros.
    pad = nn.functional.pad
    chains = dict[str, Any]()
    scaled = weights.with_scale(standard_scale(sizes.width))
    more_heads = sizes.num_heads - weights.num_heads
    for side, heads in (
        ("q", sizes.num_heads),
        ("k", sizes.num_kv_heads),
        ("v", sizes.num_kv_heads),
    ):
        link = scaled.multiplied(side).repeat(  # type: ignore[arg-type]
            weights.num_heads if more_heads else heads
        )
        bias = (
            link.weight.new_zeros(link.copies, link.d_out)
            if link.bias is None
            else link.bias
        )
        missing = sizes.width - link.d_out
        weight = pad(link.weight, (0, missing, 0, 0, 0, more_heads))
        chains[side] = (Link(weight, pad(bias, (0, missing, 0, more_heads))),)
    W_O = pad(scaled.W_O, (0, 0, 0, sizes.width - scaled.W_O.shape[1], 0, more_heads))
    o_bias = (
        W_O.new_zeros(weights.d_model) if weights.o_bias is None else weights.o_bias
    )
    return replace(
        scaled, num_heads=sizes.num_heads, o=(Link(W_O),), o_bias=o_bias, **chains
    )


@final
@dataclass(frozen=True, eq=False)
class PlainModel:
    """An equivalent model with plain heads."""

    model: EncoderDecoder  # equivalent model with the same dtype, in evaluation mode
    num_heads: dict[
        str, int
    ]  # number of heads by stack, "encoder" or "decoder" (with cross-attention)
    done: tuple[str, ...]  # descriptions of the changes, with their sites


def plain_model(model: EncoderDecoder, target: str) -> PlainModel:
    """Build an equivalent model with plain heads; the given model is unchanged."""
    scheme = find_config(model).positions.scheme
    if scheme in ("rotary", "alibi"):
        raise UsageError(
            f"positions.scheme is {scheme!r}, and {target} has no positions inside attention: a model "
            "trained with 'sinusoidal' fits"
        )
    before = attention_weights(model)
    plain: dict[str, AttentionWeights] = {}
    sites_of: dict[str, list[str]] = {}
    num_heads = {}
    # All sites of a stack, cross-attention included, get the same number of heads.
    for stack, kinds in _STACKS.items():
        sites = {
            name: found for name, found in before.items() if name.split(".")[0] in kinds
        }
        num_heads[stack] = _common_num_heads(find_config(model).d_model, sites, target)
        for name, weights in sites.items():
            plain[name], steps = _plain_site(name, weights, num_heads[stack], target)
            for step in steps:
                sites_of.setdefault(step, []).append(name)
    done = tuple(f"{step}: {', '.join(names)}" for step, names in sites_of.items())
    return PlainModel(with_attention(model, plain).eval(), num_heads, done)


def _common_num_heads(
    d_model: int, sites: Mapping[str, AttentionWeights], target: str
) -> int:
    """Return the smallest divisor of d_model with enough heads for every site, for the widest heads."""
    most = max(weights.num_heads for weights in sites.values())
    if most > d_model:
        raise UsageError(
            f"{most} heads are more than the {d_model} channels that {target} shares among them"
        )
    return next(number for number in range(most, d_model + 1) if d_model % number == 0)


def _plain_site(
    name: str, weights: AttentionWeights, num_heads: int, target: str
) -> tuple[AttentionWeights, list[str]]:
    if unfit := weights.semantics.beyond(("scale", "kind", "dropout")):
        raise UsageError(f"{target} cannot hold {name}: it has {unfit[0]}")
    width = weights.d_model // num_heads
    wide = weights.to(torch.float64)
    # A truncation error within the rounding of the stored weights counts as exact.
    size = max(float(form.norm().max()) for form in (wide.qk, wide.ov))
    rounding = _ROUNDING * torch.finfo(weights.dtype).eps * size
    plain = wide
    bound = 0.0
    done = list[str]()
    steps: tuple[tuple[WeightsRewrite, Callable[[AttentionWeights], bool]], ...] = (
        (rewrites.expand, lambda _: True),
        (rewrites.repeat_kv_heads, lambda _: True),
        (partial(rewrites.fold, keep="folded"), lambda _: True),
        (rewrites.factor, lambda now: not now.k),
        (
            partial(rewrites.truncate, qk_rank=width),
            lambda now: now.multiplied("q").d_out > width,
        ),
        (
            partial(rewrites.truncate, ov_rank=width),
            lambda now: now.multiplied("v").d_out > width,
        ),
    )
    try:
        for step, is_needed in steps:
            if is_needed(plain):
                outcome = rewrite(plain, step)
                (record,), plain = outcome.records["layer"], outcome.result
                bound = max(bound, record.bound)
                done += [record.name] if record.before != record.after else []
    except RewriteRefusedError as error:
        raise UsageError(f"{target} cannot hold {name}: {error.at(name)}") from None
    if bound > rounding:
        raise UsageError(_too_wide(name, weights, num_heads, target))
    if weights.num_heads < num_heads:
        done.append(f"{num_heads - weights.num_heads} heads of zeros added")
    return padded(plain, HeadSizes(num_heads, num_heads, width)).to(weights.dtype), done


def _too_wide(name: str, weights: AttentionWeights, num_heads: int, target: str) -> str:
    width = weights.d_model // num_heads
    ranks = {"qk": int(weights.qk.rank().max()), "ov": int(weights.ov.rank().max())}
    wide = {form: rank for form, rank in ranks.items() if rank > width}
    found = " and ".join(
        f"W_{form.upper()} of rank {rank}" for form, rank in wide.items()
    )
    step = f"truncate(rank={width}, forms={[*wide] or ['qk']})"
    return (
        f"{name} has heads with {found or 'biases that need more channels'}, and {target} has {num_heads} of "
        f"d_model / {num_heads} = {width} channels: lower the ranks first (triptych rewrite --do {step!r}, "
        "which is not exact), or train with heads of that width"
    )


def max_positions(model: EncoderDecoder, max_extra_tokens: int) -> int:
    """Return the number of positions: learned positions, or enough for the longest source and its output."""
    config = find_config(model)
    if config.positions.scheme == "learned":
        return config.positions.max_tokens
    return config.max_source_tokens + max_extra_tokens + 1


@torch.no_grad()
def position_table(stack: LanguageModel, length: int) -> Tensor:
    """Return the position embeddings of the first tokens, `[length, d_model]`; zeros without positions."""
    embeddings = stack.embeddings
    d_model = stack.architecture.d_model
    if isinstance(embeddings.positions, LearnedPositions):
        first = embeddings.config.position_offset
        return embeddings.positions.weight[first : first + length].detach()
    some = embeddings.table.weight
    if embeddings.config.positions == "none":
        return some.new_zeros(length, d_model)
    return sinusoidal(length, d_model, embeddings.config.sinusoidal_layout).to(some)


def require_plain(
    model: LanguageModel, refused: Refused
) -> tuple[NormConfig, FeedForwardConfig]:
    """Check that a model has only features of GPT-2 or Llama, apart from attention layers.

    Returns the common norm and feed-forward layer.
    """
    # `reasons` maps each unsupported feature to True if the model has it.
    made = model.architecture
    norm = made.final_norm
    embeddings = made.embeddings
    head = made.head
    if made.kind != "decoder":
        raise refused("it is an encoder")
    if norm is None:
        raise refused("there is no norm after the last block")
    reasons: dict[str, bool] = {
        "it has no output table": head is None,
        "blocks serve several times": bool(made.order)
        and made.order != tuple(range(len(made.blocks))),
        "embeddings have another width than the stream": embeddings.width
        not in (None, made.d_model),
        "token types": embeddings.num_types > 0,
        "a norm of the embeddings": embeddings.norm is not None,
    }
    if head is not None:
        reasons |= {
            "a map before the output table": head.transform
            or head.norm is not None
            or bool(head.activation),
            "the output table has another width than the stream": head.width
            not in (None, made.d_model),
            "a soft cap of the logits": head.soft_cap is not None,
        }
    found = []
    for number, block in enumerate(made.blocks):
        for frame in (block.attention, block.feed_forward_frame):
            own = frame.norm
            reasons |= {
                f"block {number} has no norm before a sub-layer": own is None
                or frame.place != "pre",
                f"block {number} has a norm after a sub-layer": frame.out_norm
                is not None,
                f"block {number} scales what a sub-layer adds": frame.scale != 1.0,
                f"block {number} adds to the normalised stream": frame.from_norm,
                f"block {number} has another norm than the last one": own is not None
                and (own.kind, own.eps) != (norm.kind, norm.eps),
            }
        reasons[f"block {number} reads more than one stream"] = bool(
            block.input or block.streams
        )
        reasons[
            f"block {number} computes attention and feed-forward layer side by side"
        ] = block.parallel
        if not isinstance(block.feed_forward, FeedForwardConfig):
            raise refused(f"block {number} has a mixture of experts")
        found.append(block.feed_forward)
        reasons[f"block {number} has another feed-forward layer than the first"] = (
            found[-1].activation,
            found[-1].gated,
        ) != (found[0].activation, found[0].gated)
    for reason, holds in reasons.items():
        if holds:
            raise refused(reason)
    return norm, found[0]


def plain_layers(model: LanguageModel, refused: Refused) -> list[AttentionWeights]:
    """Return the attention weights of every block with single maps for queries, keys, values and outputs."""
    # `expand` separates shared maps. A bilinear form, which has an empty chain of keys, is then factored.
    found = []
    for site in attention_sites(model):
        weights = site.layer.weights("causal")
        unfit = weights.semantics.beyond(("scale", "kind", "rotary", "dropout"))
        if weights.norms_within:
            unfit.append("norms between its maps")
        if unfit:
            raise refused(f"the attention of block {site.block} has {unfit[0]}")
        try:
            weights = rewrite(weights, rewrites.expand).result
            found.append(
                weights if weights.k else rewrite(weights, rewrites.factor).result
            )
        except RewriteRefusedError as error:
            raise refused(str(error.at(f"block {site.block}"))) from None
    return found


def head_sizes(layers: Sequence[AttentionWeights], refused: Refused) -> HeadSizes:
    """Return the smallest head sizes that fit all layers."""
    heads = {weights.num_heads for weights in layers}
    if len(heads) > 1:
        raise refused(f"its layers have {' and '.join(map(str, sorted(heads)))} heads")
    groups = (max(weights.num_key_heads, weights.num_value_heads) for weights in layers)
    width = max(
        max(weights.multiplied("q").d_out, weights.multiplied("v").d_out)
        for weights in layers
    )
    return HeadSizes(heads.pop(), math.lcm(*groups), width)


def rotary_base(rotary: RotaryEmbedding, refused: Refused) -> float:
    """Return the base b of rotary frequencies `b^(−i / n)` for channel pair i of n."""
    frequencies = rotary.frequencies.double()
    count = len(frequencies)
    if rotary.start or rotary.factor != 1.0 or rotary.places is not None:
        raise refused(
            "rotary positions of other channels than the first, or with a factor"
        )
    if rotary.long is not None:
        raise refused(
            f"rotary positions that change in texts of more than {rotary.limit:,} tokens"
        )
    base = float(frequencies[1]) ** -count if count > 1 else 10_000.0
    powers = base ** (-torch.arange(count, dtype=torch.float64) / count)
    if not torch.allclose(frequencies.cpu(), powers, rtol=1e-6, atol=0.0):
        raise refused("rotary positions whose frequencies are scaled")
    return base
