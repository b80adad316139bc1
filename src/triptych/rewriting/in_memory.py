"""Rewrites of weights, layers and whole models in memory.

Weights are read, rewritten in float64, cast back once, and put into a new layer or model of matching
parameterisation. Arguments are never changed.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar, final

import torch
from torch import nn

from triptych.core.algebra.legality import require_finite
from triptych.core.algebra.rewritten import (
    RewriteRecord,
    RewriteRefusedError,
    Rewritten,
)
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.attention import MultiHeadAttention
from triptych.core.checkpoints.module_layers import ModuleLayers
from triptych.core.models import (
    AnyModel,
    EncoderDecoder,
    LanguageModel,
    ModelT,
    OffsetNorm,
    attention_sites,
    attention_weights,
    require_held,
    with_attention,
)
from triptych.rewriting.driver import Driver
from triptych.rewriting.functions.registry import read_rewrite
from triptych.rewriting.functions.rewrite import (
    LayerRewrite,
    LayerToRewrite,
    Rewrite,
)

Target = TypeVar(
    "Target",
    AttentionWeights,
    MultiHeadAttention,
    EncoderDecoder,
    LanguageModel,
    EncoderDecoder | LanguageModel,
)
WeightsRewrite = Callable[[AttentionWeights], Rewritten]
AnyRewrite = Rewrite | str | WeightsRewrite
_Records = tuple[RewriteRecord, ...]


@final
@dataclass(frozen=True)
class RewriteResult(Generic[Target]):
    """The result of a rewrite, and its records."""

    result: Target  # weights, a layer or a model, like the argument
    records: dict[
        str, _Records
    ]  # records of the rewrites, by the layer's site ("encoder.0")


def rewrite(
    target: Target, *steps: AnyRewrite, sites: Collection[str] | None = None
) -> RewriteResult[Target]:
    """Apply rewrites in sequence to weights, to a layer, or to the layers of a model.

        rewrite(model, "drop_key_bias", "truncate(rank=6)")            # as in recipes and on the command line
        rewrite(model, DropKeyBias(), Truncate(rank=6))                # the same, as records
        rewrite(model, drop_key_bias, partial(fold, keep="folded"))    # functions of weights

    Args:
        target: weights, a layer or a model. It is not changed.
        steps: calls, records, or functions of `AttentionWeights`; functions may separate shared maps.
        sites: attention layers of a model to rewrite ("encoder.0", "decoder.2", "cross.1"); all if None.

    Raises:
        RewriteRefusedError: a rewrite would change a layer's function (the message gives the reason and the
            site), changes more than attention, or needs a text.
        UsageError: an unknown rewrite.
        ValueError: an unknown site.
    """
    read = [
        read_rewrite(step) if isinstance(step, str | Rewrite) else _Function(of=step)
        for step in steps
    ]
    if isinstance(target, EncoderDecoder | LanguageModel):
        return _rewrite_model(target, read, sites)
    if not isinstance(target, AttentionWeights | MultiHeadAttention):
        raise TypeError(
            f"a {type(target).__name__} has no attention to rewrite: pass weights, a layer or a model"
        )
    if sites is not None:
        raise ValueError(
            "sites name the layers of a model: leave them out for a single layer"
        )
    weights = target if isinstance(target, AttentionWeights) else target.weights()
    changed, records = _rewrite_layers({"layer": LayerToRewrite("", weights)}, read)
    if isinstance(target, AttentionWeights):
        return RewriteResult(changed["layer"], records)
    # The new layer keeps dropout, mode and trainability of the old layer.
    layer = MultiHeadAttention.from_weights(changed["layer"], target.dropout)
    layer.requires_grad_(
        any(parameter.requires_grad for parameter in target.parameters())
    )
    return RewriteResult(layer.train(target.training), records)


def _rewrite_model(
    target: ModelT, steps: Sequence[Rewrite], sites: Collection[str] | None
) -> RewriteResult[ModelT]:
    source = ModuleLayers(target, "the model")
    found = {site.module: site for site in source.sites}
    if unknown := [name for name in sites or () if name not in found]:
        raise ValueError(
            f"there is no attention site {unknown[0]}: there are {', '.join(found)}"
        )
    layers = {
        name: LayerToRewrite(
            name,
            source.read(site).weights,
            source.longest_text(site),
            numbers=site.numbers,
        )
        for name, site in found.items()
        if sites is None or name in sites
    }
    changed, records = _rewrite_layers(layers, steps)
    return RewriteResult(with_rewritten(target, changed), records)


def _rewrite_layers(
    layers: Mapping[str, LayerToRewrite], steps: Sequence[Rewrite]
) -> tuple[dict[str, AttentionWeights], dict[str, _Records]]:
    """Return the layers after the steps, cast back once, and the records."""
    for step in steps:
        if not isinstance(step, LayerRewrite):
            why = "it is of more than attention layers"
            raise RewriteRefusedError(step.name, why, "rewrite a checkpoint")
    for layer in layers.values():
        try:
            require_finite("rewrite", layer.weights)
        except RewriteRefusedError as refused:
            raise (refused.at(layer.name) if layer.name else refused) from None

    def read(layer: LayerToRewrite) -> LayerToRewrite:
        return replace(layer, weights=layer.weights.to(torch.float64))

    # The driver works in float64.
    driver = Driver(
        [(layer.numbers, partial(read, layer)) for layer in layers.values()], steps
    )
    changed = {}
    records = {}
    for name, layer in layers.items():
        done = driver.rewritten(read(layer))
        changed[name] = done.weights.to(layer.weights.dtype)
        records[name] = tuple(
            outcome.record for outcome in done.outcomes if outcome.record
        )
    return changed, records


@final
class _Function(LayerRewrite):
    """A function of weights as a step."""

    name = "function"
    tier = ""
    place = 0

    of: WeightsRewrite

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        return self.of(layer.weights)


def with_rewritten(model: ModelT, changed: Mapping[str, AttentionWeights]) -> ModelT:
    """Make a new model with rewritten weights at some sites. Folded norms become neutral."""
    for name, weights in changed.items():
        try:
            require_held(model, name, weights)
        except ValueError as error:
            raise RewriteRefusedError("write", str(error)) from None
    before = attention_weights(model)
    new = with_attention(model, changed)
    _neutralise_folded_norms(new, before, {**before, **changed})
    return new


def _neutralise_folded_norms(
    model: AnyModel,
    before: Mapping[str, AttentionWeights],
    after: Mapping[str, AttentionWeights],
) -> None:
    """Set folded norms of a new model to gain 1 and shift 0."""
    # All cross-attention layers read the encoder's last norm, so they fold it together or not at all.
    cross = [
        name for name, weights in before.items() if weights.memory_norm is not None
    ]
    folded = [name for name in cross if after[name].memory_norm is None]
    if folded and len(folded) < len(cross):
        others = ", ".join(name for name in cross if name not in folded)
        raise RewriteRefusedError(
            f"fold_norm at {folded[0]}",
            f"{others} read the encoder's last norm too",
            "fold all of them",
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
        assert isinstance(
            norm, nn.LayerNorm | nn.RMSNorm | OffsetNorm
        )  # norms with an absorbable weight
        if norm.weight is not None:
            norm.weight.fill_(
                1.0 - norm.offset if isinstance(norm, OffsetNorm) else 1.0
            )
        if not isinstance(norm, nn.RMSNorm) and norm.bias is not None:
            norm.bias.zero_()
