"""Rewrites of weights, layers and whole models in memory.

Weights are read, rewritten in float64, cast back once, and put into a new layer or model in the
parameterisation that they call for. What was passed in is never changed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import singledispatch, update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, final

import torch
from torch import nn

from triptych.algebra import rewrites
from triptych.algebra.rewrites import (
    Layer,
    LayerRewrite,
    Rewrite,
    RewriteRecord,
    RewriteRefusedError,
    Rewritten,
    read_rewrite,
)
from triptych.algebra.rewrites.legality import require_finite
from triptych.algebra.weights import AttentionWeights
from triptych.attention import MultiHeadAttention
from triptych.models import (
    EncoderDecoder,
    LanguageModel,
    attention_sites,
    attention_weights,
    with_attention,
)
from triptych.models.sites import AnyModel, ModelT

Target = TypeVar(
    "Target",
    AttentionWeights,
    MultiHeadAttention,
    EncoderDecoder,
    LanguageModel,
    EncoderDecoder | LanguageModel,
)
Options = ParamSpec("Options")
WeightsRewrite = Callable[[AttentionWeights], Rewritten]
AnyRewrite = Rewrite | str | WeightsRewrite
_Records = tuple[RewriteRecord, ...]


@final
@dataclass(frozen=True)
class RewriteResult(Generic[Target]):
    """The result of a rewrite, and its records."""

    result: Target  # weights, a layer or a model, as passed in
    records: dict[str, _Records]  # the records of the rewrites, by the layer's site ("encoder.0")


def rewrite(
    target: Target, *steps: AnyRewrite, sites: Collection[str] | None = None
) -> RewriteResult[Target]:
    """Apply rewrites one after the other, to weights, to a layer, or to the layers of a model.

        rewrite(model, "drop_key_bias", "truncate(rank=6)")            # as recipes and the command have them
        rewrite(model, DropKeyBias(), Truncate(rank=6))                # the same, as records
        rewrite(model, drop_key_bias, partial(fold, keep="folded"))    # functions of weights

    Args:
        target: weights, a layer or a model. It is not changed.
        steps: calls, records, or functions of `AttentionWeights`; the latter may separate shared maps.
        sites: the attention layers of a model to rewrite ("encoder.0", "decoder.2", "cross.1"); all if None.

    Raises:
        RewriteRefusedError: a rewrite would change a layer's function (the message gives the reason and the
            site), changes more than attention, or needs a text.
        UsageError: an unknown rewrite.
        ValueError: an unknown site.
    """
    read = [read_rewrite(step) if isinstance(step, str | Rewrite) else step for step in steps]
    found: RewriteResult[Target] = _rewrite(target, read, sites)
    return found


@singledispatch
def _rewrite(target: object, steps: Sequence[AnyRewrite], sites: Collection[str] | None) -> Any:
    raise TypeError(
        f"a {type(target).__name__} has no attention to rewrite: pass weights, a layer or a model"
    )


@_rewrite.register
def _of_weights(
    target: AttentionWeights, steps: Sequence[AnyRewrite], sites: Collection[str] | None
) -> RewriteResult[AttentionWeights]:
    _require_no_sites(sites)
    changed, records = _run({"layer": Layer("", target)}, steps)
    return RewriteResult(changed["layer"], records)


@_rewrite.register
def _of_layer(
    target: MultiHeadAttention, steps: Sequence[AnyRewrite], sites: Collection[str] | None
) -> RewriteResult[MultiHeadAttention]:
    _require_no_sites(sites)
    changed, records = _run({"layer": Layer("", target.weights())}, steps)
    layer = MultiHeadAttention.from_weights(changed["layer"], target.dropout)
    layer.requires_grad_(any(parameter.requires_grad for parameter in target.parameters()))
    return RewriteResult(layer.train(target.training), records)


@_rewrite.register(EncoderDecoder)
@_rewrite.register(LanguageModel)
def _of_model(
    target: ModelT, steps: Sequence[AnyRewrite], sites: Collection[str] | None
) -> RewriteResult[ModelT]:
    before = attention_weights(target)
    if unknown := [name for name in sites or () if name not in before]:
        raise ValueError(f"there is no attention site {unknown[0]}: there are {', '.join(before)}")
    layers = {
        site.name: Layer(site.name, before[site.name])
        for site in attention_sites(target)
        if sites is None or site.name in sites
    }
    changed, records = _run(layers, steps)
    return RewriteResult(with_rewritten(target, changed), records)


def with_rewritten(model: ModelT, changed: Mapping[str, AttentionWeights]) -> ModelT:
    """Make a new model with rewritten weights at some sites. Norms that were folded become neutral."""
    before = attention_weights(model)
    new = with_attention(model, changed)
    _neutralise_folded_norms(new, before, {**before, **changed})
    return new


def _require_no_sites(sites: Collection[str] | None) -> None:
    if sites is not None:
        raise ValueError("sites name the layers of a model: leave them out for a single layer")


def _run(
    layers: Mapping[str, Layer], steps: Sequence[AnyRewrite]
) -> tuple[dict[str, AttentionWeights], dict[str, _Records]]:
    """Apply the rewrites in float64, and cast the result back once."""
    now: dict[str, Layer] = {}
    for site, layer in layers.items():
        with _named(layer):
            require_finite("rewrite", layer.weights)
        now[site] = replace(layer, weights=layer.weights.to(torch.float64))
    records: dict[str, _Records] = dict.fromkeys(layers, ())
    for step in steps:
        chosen = list(now)
        if isinstance(step, Rewrite):
            if not isinstance(step, LayerRewrite) or step.needs_text:
                what = "looks at a text" if step.needs_text else "is of more than attention layers"
                raise RewriteRefusedError(step.name, f"it {what}", "rewrite a checkpoint")
            chosen = [site for site in now if step.layers is None or _number(site) in step.layers]
            step = step.prepare([now[site] for site in chosen])
        for site in chosen:
            with _named(now[site]):
                now[site], record = _stepped(now[site], step)
            records[site] = (*records[site], record)
    changed = {site: now[site].weights.to(layer.weights.dtype) for site, layer in layers.items()}
    return changed, records


def _number(site: str) -> int:
    """The number of a layer within its stack."""
    return int(site.rpartition(".")[2]) if "." in site else 0


def _stepped(layer: Layer, step: AnyRewrite) -> tuple[Layer, RewriteRecord]:
    if isinstance(step, LayerRewrite):
        done = step.apply(layer)
    else:
        assert callable(step)
        done = step(layer.weights)
    return replace(layer, weights=done.weights), done.record


@contextmanager
def _named(layer: Layer) -> Iterator[None]:
    """Add the name of a model's layer to a refusal."""
    try:
        yield
    except RewriteRefusedError as refused:
        raise (refused.at(layer.name) if layer.name else refused) from None


def _neutralise_folded_norms(
    model: AnyModel, before: Mapping[str, AttentionWeights], after: Mapping[str, AttentionWeights]
) -> None:
    """Set to gain 1 and shift 0 the norms of a new model that its attention layers have taken up."""
    cross = [name for name, weights in before.items() if weights.memory_norm is not None]
    folded = [name for name in cross if after[name].memory_norm is None]
    if folded and len(folded) < len(cross):
        others = ", ".join(name for name in cross if name not in folded)
        raise RewriteRefusedError(
            f"fold_norm at {folded[0]}", f"{others} read the encoder's last norm too", "fold all of them"
        )
    norms = [
        site.residual.norm
        for site in attention_sites(model)
        if before[site.name].norm is not None and after[site.name].norm is None
    ]
    if folded and isinstance(model, EncoderDecoder):
        norms.append(model.encoder.final_norm)
    _neutralise(norms)


@torch.no_grad()
def _neutralise(norms: Sequence[nn.Module]) -> None:
    for norm in norms:
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)  # those that recipes have
        norm.weight.fill_(1.0)
        if isinstance(norm, nn.LayerNorm) and norm.bias is not None:
            norm.bias.zero_()


@final
class OfAnything(Generic[Options]):
    """A rewrite of weights that takes a layer or a model as well, and gives back the same kind."""

    def __init__(self, function: Callable[Concatenate[AttentionWeights, Options], Rewritten]) -> None:
        self._function = function
        update_wrapper(self, function)  # type: ignore[arg-type]  # this takes a layer or a model too

    def __call__(self, target: Target, *args: Options.args, **options: Options.kwargs) -> Target:
        return rewrite(target, lambda weights: self._function(weights, *args, **options)).result


fold = OfAnything(rewrites.fold)
factor = OfAnything(rewrites.factor)
expand = OfAnything(rewrites.expand)
gauge_fix = OfAnything(rewrites.gauge_fix)
drop_key_bias = OfAnything(rewrites.drop_key_bias)
fold_value_bias = OfAnything(rewrites.fold_value_bias)
fold_norm = OfAnything(rewrites.fold_norm)
truncate = OfAnything(rewrites.truncate)
permute_heads = OfAnything(rewrites.permute_heads)
prune_heads = OfAnything(rewrites.prune_heads)
repeat_kv_heads = OfAnything(rewrites.repeat_kv_heads)
merge_kv_heads = OfAnything(rewrites.merge_kv_heads)
to_latent = OfAnything(rewrites.to_latent)
