"""A model with its heads as other libraries write them: one map each for queries, keys, values and outputs.

Every head of a stack has the same width, d_model over their number, every map a bias, and sinusoidal
positions have their sines before their cosines. What a parameterisation writes in another way is multiplied
out, taken apart or repeated, always exactly; a head that would not fit is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from triptych.algebra import rewrites
from triptych.algebra.rewrites import RewriteRefusedError
from triptych.algebra.weights import AttentionWeights, Link, standard_scale
from triptych.errors import UsageError
from triptych.models import EncoderDecoder, ModelConfig, attention_weights, with_attention
from triptych.rewriting.models import WeightsRewrite, rewrite

_STEPS: tuple[WeightsRewrite, ...] = (
    rewrites.expand,
    rewrites.repeat_kv_heads,
    partial(rewrites.fold, keep="folded"),
)
_ROUNDING = 8
_STACKS = {"encoder": ("encoder",), "decoder": ("decoder", "cross")}


@final
@dataclass(frozen=True, eq=False)
class PlainModel:
    """A model written plainly, and what that took.

    Attributes:
        model: computes the same; of the same dtype, in evaluation mode.
        num_heads: of every site of "encoder" and of "decoder", cross-attention included.
        done: what was done to which sites, in words.
    """

    model: EncoderDecoder
    num_heads: dict[str, int]
    done: tuple[str, ...]


def plain_model(model: EncoderDecoder, target: str) -> PlainModel:
    """Write the heads of a model plainly; the model given is left as it is."""
    scheme = model.config.positions.scheme
    if scheme in ("rotary", "alibi"):
        raise UsageError(
            f"positions.scheme is {scheme!r}, and {target} has no positions inside attention: a model "
            "trained with 'sinusoidal' fits"
        )
    before = attention_weights(model)
    plain: dict[str, AttentionWeights] = {}
    steps: dict[str, list[str]] = {}
    num_heads = {}
    for stack, kinds in _STACKS.items():
        sites = {name: found for name, found in before.items() if name.split(".")[0] in kinds}
        num_heads[stack] = _number_of_heads(model.config.d_model, sites, target)
        for name, weights in sites.items():
            plain[name], steps[name] = _plain_site(name, weights, num_heads[stack], target)
    done = _in_words(steps)
    result = with_attention(model, plain)
    positions = model.config.positions
    if scheme == "sinusoidal" and positions.sinusoidal_layout == "interleaved":
        result = _sines_first(result)
        done = (*done, "channels of the whole model reordered: sines before cosines")
    return PlainModel(result.eval(), num_heads, done)


def _number_of_heads(d_model: int, sites: Mapping[str, AttentionWeights], target: str) -> int:
    """The least that divides d_model and is enough for every site: so heads are as wide as can be."""
    most = max(weights.num_heads for weights in sites.values())
    if most > d_model:
        raise UsageError(f"{most} heads are more than the {d_model} channels that {target} shares among them")
    return next(number for number in range(most, d_model + 1) if d_model % number == 0)


def _plain_site(
    name: str, weights: AttentionWeights, num_heads: int, target: str
) -> tuple[AttentionWeights, list[str]]:
    width = weights.d_model // num_heads
    wide = weights.to(torch.float64)
    # What is no more than the rounding of the numbers as they are stored is none.
    size = max(float(form.norm().max()) for form in (wide.qk, wide.ov))
    rounding = _ROUNDING * torch.finfo(weights.dtype).eps * size
    site = _Site(wide)
    try:
        for step in _STEPS:
            site.take(step)
        if not site.weights.k:
            site.take(rewrites.factor)
        if site.weights.multiplied("q").d_out > width:
            site.take(partial(rewrites.truncate, qk_rank=width))
        if site.weights.multiplied("v").d_out > width:
            site.take(partial(rewrites.truncate, ov_rank=width))
    except RewriteRefusedError as error:
        raise UsageError(f"{target} cannot hold {name}: {error.at(name)}") from None
    if site.bound > rounding:
        raise UsageError(_too_wide(name, weights, num_heads, target))
    if weights.num_heads < num_heads:
        site.steps.append(f"{num_heads - weights.num_heads} heads of zeros added")
    return _padded(site.weights, num_heads, width).to(weights.dtype), site.steps


@final
class _Site:
    """The weights of a layer on their way, what was done to them, and how far it moved a form."""

    def __init__(self, weights: AttentionWeights) -> None:
        self.weights = weights
        self.steps: list[str] = []
        self.bound = 0.0

    def take(self, step: WeightsRewrite) -> None:
        outcome = rewrite(self.weights, step)
        for record in outcome.records["layer"]:
            self.bound = max(self.bound, record.bound)
            if record.before != record.after:
                self.steps.append(record.name)
        self.weights = outcome.result


def _too_wide(name: str, weights: AttentionWeights, num_heads: int, target: str) -> str:
    width = weights.d_model // num_heads
    ranks = {"qk": int(weights.qk.rank().max()), "ov": int(weights.ov.rank().max())}
    found = " and ".join(f"W_{form.upper()} of rank {rank}" for form, rank in ranks.items() if rank > width)
    advice = ", ".join(f"{form}_rank={width}" for form, rank in ranks.items() if rank > width)
    return (
        f"{name} has heads with {found or 'biases that need more channels'}, and {target} has {num_heads} of "
        f"d_model / {num_heads} = {width} channels: lower the ranks first (triptych.truncate(model, "
        f"{advice or f'qk_rank={width}'}), which is not exact), or train with heads of that width"
    )


def _padded(weights: AttentionWeights, num_heads: int, width: int) -> AttentionWeights:
    """One link a side, `num_heads` copies of `width` channels, each with a bias; zeros fill up."""

    def filled(tensor: Tensor, *shape: int) -> Tensor:
        result = tensor.new_zeros(shape)
        result[tuple(slice(size) for size in tensor.shape)] = tensor
        return result

    d_model = weights.d_model
    chains: dict[str, Any] = {}
    for side in ("q", "k", "v"):
        link = weights.multiplied(side).of_heads(weights.num_heads)
        bias = link.weight.new_zeros(weights.num_heads, link.d_out) if link.bias is None else link.bias
        chains[side] = (Link(filled(link.weight, num_heads, d_model, width), filled(bias, num_heads, width)),)
    W_O = weights.multiplied("o").of_heads(weights.num_heads).weight
    chains["o"] = (Link(filled(W_O, num_heads, width, d_model)),)
    o_bias = W_O.new_zeros(d_model) if weights.o_bias is None else weights.o_bias
    return replace(weights, num_heads=num_heads, o_bias=o_bias, **chains).with_scale(standard_scale(width))


def _in_words(steps: Mapping[str, list[str]]) -> tuple[str, ...]:
    sites: dict[str, list[str]] = {}
    for name, done in steps.items():
        for step in done:
            sites.setdefault(step, []).append(name)
    return tuple(f"{step}: {', '.join(names)}" for step, names in sites.items())


# On which dimensions of a parameter the channels of the stream lie, by the end of its name.
_STREAM = {
    "embedding.weight": (1,),
    "output.weight": (1,),
    "output.bias": (),
    "q_proj.weight": (1,),
    "k_proj.weight": (1,),
    "v_proj.weight": (1,),
    "q_proj.bias": (),
    "k_proj.bias": (),
    "v_proj.bias": (),
    "o_proj.weight": (0,),
    "o_proj.bias": (0,),
    "inner.weight": (1,),
    "inner.bias": (),
    "outer.weight": (0,),
    "outer.bias": (0,),
    "norm.weight": (0,),
    "norm.bias": (0,),
}


@torch.no_grad()
def _sines_first(model: EncoderDecoder) -> EncoderDecoder:
    """The same model with the channels of its stream in the order that "halves" positions have."""
    d_model, positions = model.config.d_model, model.config.positions
    order = torch.cat([torch.arange(0, d_model, 2), torch.arange(1, d_model, 2)])
    config = ModelConfig.model_validate(
        {
            **model.config.model_dump(),
            "positions": {**positions.model_dump(), "sinusoidal_layout": "halves"},
        }
    )
    some = next(model.parameters())
    with torch.random.fork_rng(devices=[]):  # fresh weights are drawn only to be overwritten
        new = EncoderDecoder.of(config, model.src_vocab_size, model.tgt_vocab_size, model.pad_id)
    new = new.to(device=some.device, dtype=some.dtype)
    old = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name, parameter in new.named_parameters():
        (dimensions,) = (where for end, where in _STREAM.items() if name.endswith(end))
        tensor = old[name]
        for dimension in dimensions:
            tensor = tensor.index_select(dimension, order.to(some.device))
        parameter.copy_(tensor)
    return new
