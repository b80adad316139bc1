"""Rewrites of weights, layers and whole models.

`algebra.rewrites` has the mathematics, on `AttentionWeights`. Here each rewrite takes a layer or a model
as well: its weights are read, rewritten in float64, cast back once, and put into a new layer or model in
the parameterisation that they call for. What was passed in is never changed.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, singledispatch
from typing import Any, Generic, TypeVar, final

import torch
from torch import Tensor, nn

from triptych.algebra import rewrites
from triptych.algebra.rewrites import RewriteRecord, RewriteRefusedError, Rewritten
from triptych.algebra.rewrites.legality import require_finite
from triptych.algebra.weights import SIDES, AttentionWeights
from triptych.attention import MultiHeadAttention
from triptych.models import EncoderDecoder, attention_sites, attention_weights, with_attention

Target = TypeVar("Target", AttentionWeights, MultiHeadAttention, EncoderDecoder)
Step = Callable[[AttentionWeights], Rewritten]


@final
@dataclass(frozen=True)
class Outcome(Generic[Target]):
    """A rewritten thing, and what was done to it.

    Attributes:
        result: of the kind that was passed in.
        records: those of the steps, for every layer rewritten, by site ("encoder.0"); "layer" for a
            single one.
    """

    result: Target
    records: dict[str, tuple[RewriteRecord, ...]]


def rewrite(target: Target, *steps: Step, sites: Collection[str] | None = None) -> Outcome[Target]:
    """Apply rewrites of weights one after the other, to weights, to a layer, or to the layers of a model.

        rewrite(model, drop_key_bias, partial(fold, keep="folded"))    # those of algebra.rewrites

    Args:
        target: what to rewrite; left as it is.
        steps: rewrites of `AttentionWeights`.
        sites: of a model, the attention layers to rewrite ("encoder.0", "decoder.2", "cross.1"); all if
            None.

    Returns:
        The result, and the records of the steps.

    Raises:
        RewriteRefusedError: a step would change what a layer computes, with the reason and the site.
        ValueError: a site there is not.
    """
    outcome: Outcome[Target] = _rewrite(target, steps, sites)
    return outcome


@singledispatch
def _rewrite(target: object, steps: Sequence[Step], sites: Collection[str] | None) -> Any:
    raise TypeError(
        f"a {type(target).__name__} has no attention to rewrite: pass weights, a layer or a model"
    )


@_rewrite.register
def _of_weights(
    target: AttentionWeights, steps: Sequence[Step], sites: Collection[str] | None
) -> Outcome[AttentionWeights]:
    _require_no_sites(sites)
    rewritten, records = _run(target, steps)
    return Outcome(rewritten, {"layer": records})


@_rewrite.register
def _of_layer(
    target: MultiHeadAttention, steps: Sequence[Step], sites: Collection[str] | None
) -> Outcome[MultiHeadAttention]:
    _require_no_sites(sites)
    rewritten, records = _run(target.weights(), steps)
    layer = MultiHeadAttention.from_weights(rewritten, target.dropout, target.positions)
    layer.requires_grad_(any(parameter.requires_grad for parameter in target.parameters()))
    return Outcome(layer.train(target.training), {"layer": records})


@_rewrite.register
def _of_model(
    target: EncoderDecoder, steps: Sequence[Step], sites: Collection[str] | None
) -> Outcome[EncoderDecoder]:
    before = attention_weights(target)
    chosen = list(before) if sites is None else list(sites)
    if unknown := [name for name in chosen if name not in before]:
        raise ValueError(f"there is no attention site {unknown[0]}: there are {', '.join(before)}")
    changed: dict[str, AttentionWeights] = {}
    records: dict[str, tuple[RewriteRecord, ...]] = {}
    for name in chosen:
        try:
            changed[name], records[name] = _run(before[name], steps)
        except RewriteRefusedError as error:
            raise error.at(name) from None
    return Outcome(with_rewritten(target, changed), records)


def with_rewritten(model: EncoderDecoder, changed: Mapping[str, AttentionWeights]) -> EncoderDecoder:
    """A new model with rewritten weights at some sites; norms that they took up are left neutral.

    Raises:
        RewriteRefusedError: some of the layers that read a norm took it up, and others still read it.
        ValueError: as `with_attention`.
    """
    before = attention_weights(model)
    new = with_attention(model, changed)
    _neutralise_folded_norms(new, before, {**before, **changed})
    return new


def _tensors(target: AttentionWeights | nn.Module) -> Iterator[Tensor]:
    return target.tensors() if isinstance(target, AttentionWeights) else iter(target.parameters())


def _require_no_sites(sites: Collection[str] | None) -> None:
    if sites is not None:
        raise ValueError("sites name the layers of a model: leave them out for a single layer")


def _run(
    weights: AttentionWeights, steps: Sequence[Step]
) -> tuple[AttentionWeights, tuple[RewriteRecord, ...]]:
    """The steps in float64, and one cast back."""
    require_finite("rewrite", weights)
    current, records = weights.to(torch.float64), []
    for step in steps:
        current, record = step(current)
        records.append(record)
    return current.to(weights.dtype), tuple(records)


def _neutralise_folded_norms(
    model: EncoderDecoder, before: Mapping[str, AttentionWeights], after: Mapping[str, AttentionWeights]
) -> None:
    """Set to gain 1 and shift 0 the norms of a new model that its attention layers have taken up.

    Raises:
        RewriteRefusedError: some cross-attention layers took up the encoder's last norm, and others
            still read it.
    """
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
    _neutralise(norms if not folded else [*norms, model.encoder_norm])


@torch.no_grad()
def _neutralise(norms: Sequence[nn.Module]) -> None:
    for norm in norms:
        assert isinstance(norm, nn.LayerNorm)  # the only norm there is
        norm.weight.fill_(1.0)
        norm.bias.zero_()


def fold(
    target: Target,
    *,
    sides: Sequence[rewrites.FoldedSide] = SIDES,
    keep: rewrites.Keep = "cheaper",
    by: rewrites.Measure = "parameters",
    tokens: int = 1,
    sites: Collection[str] | None = None,
) -> Target:
    """Replace products of maps by one map where that is cheaper; see `algebra.rewrites.fold`."""
    number_bytes = next(_tensors(target)).dtype.itemsize
    step = partial(rewrites.fold, sides=sides, keep=keep, by=by, tokens=tokens, number_bytes=number_bytes)
    return rewrite(target, step, sites=sites).result


def factor(
    target: Target, *, d_k: int | None = None, bounded: bool = False, sites: Collection[str] | None = None
) -> Target:
    """Take one-matrix forms apart into two thin maps; see `algebra.rewrites.factor`."""
    return rewrite(target, partial(rewrites.factor, d_k=d_k, bounded=bounded), sites=sites).result


def expand(target: Target, *, sites: Collection[str] | None = None) -> Target:
    """Give maps that are shared a copy each; see `algebra.rewrites.expand`."""
    return rewrite(target, rewrites.expand, sites=sites).result


def gauge_fix(
    target: Target,
    *,
    forms: Sequence[rewrites.Form] = rewrites.FORMS,
    sites: Collection[str] | None = None,
) -> Target:
    """Bring heads into their canonical basis; see `algebra.rewrites.gauge_fix`."""
    return rewrite(target, partial(rewrites.gauge_fix, forms=forms), sites=sites).result


def drop_key_bias(target: Target, *, sites: Collection[str] | None = None) -> Target:
    """Remove the key bias, to which the softmax is blind; see `algebra.rewrites.drop_key_bias`."""
    return rewrite(target, rewrites.drop_key_bias, sites=sites).result


def fold_value_bias(target: Target, *, sites: Collection[str] | None = None) -> Target:
    """Move the value bias into the output bias; see `algebra.rewrites.fold_value_bias`.

    Exact for queries that may see some key. One that may see none gets zeros from our layers, and then
    the bias after folding: where that can happen, rewrite weights with the trait `blind_rows`, which
    refuses.
    """
    return rewrite(target, rewrites.fold_value_bias, sites=sites).result


def fold_norm(target: Target, *, sites: Collection[str] | None = None) -> Target:
    """Fold gains and shifts of norms into the maps that read them; see `algebra.rewrites.fold_norm`.

    In a model the norms stay in their places with gain 1 and shift 0. Those before feed-forward
    layers and the decoder's last one are left alone: no attention reads them.
    """
    return rewrite(target, rewrites.fold_norm, sites=sites).result


def truncate(
    target: Target,
    *,
    qk_rank: int | None = None,
    ov_rank: int | None = None,
    sites: Collection[str] | None = None,
) -> Target:
    """Nearest forms of a given rank; see `algebra.rewrites.truncate`."""
    return rewrite(target, partial(rewrites.truncate, qk_rank=qk_rank, ov_rank=ov_rank), sites=sites).result


def permute_heads(target: Target, order: Sequence[int], *, sites: Collection[str] | None = None) -> Target:
    """Put heads in another order; see `algebra.rewrites.permute_heads`."""
    return rewrite(target, partial(rewrites.permute_heads, order=order), sites=sites).result


def prune_heads(
    target: Target,
    heads: Sequence[int],
    *,
    bounded: bool = False,
    sites: Collection[str] | None = None,
) -> Target:
    """Remove heads; see `algebra.rewrites.prune_heads`."""
    return rewrite(target, partial(rewrites.prune_heads, heads=heads, bounded=bounded), sites=sites).result


def repeat_kv_heads(target: Target, *, sites: Collection[str] | None = None) -> Target:
    """Give every query head a key-value head of its own; see `algebra.rewrites.repeat_kv_heads`."""
    return rewrite(target, rewrites.repeat_kv_heads, sites=sites).result


def merge_kv_heads(
    target: Target, num_kv_heads: int, *, bounded: bool = False, sites: Collection[str] | None = None
) -> Target:
    """Let several query heads share a key-value head; see `algebra.rewrites.merge_kv_heads`."""
    step = partial(rewrites.merge_kv_heads, num_kv_heads=num_kv_heads, bounded=bounded)
    return rewrite(target, step, sites=sites).result


def to_latent(target: Target, *, rank: int | None = None, sites: Collection[str] | None = None) -> Target:
    """Make keys and values from one latent; see `algebra.rewrites.to_latent`."""
    return rewrite(target, partial(rewrites.to_latent, rank=rank), sites=sites).result
