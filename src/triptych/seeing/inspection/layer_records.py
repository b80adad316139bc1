"""Measures of the heads of one attention layer."""

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from triptych.core.algebra.centring import centred, removed_directions
from triptych.core.algebra.pictures import (
    energies_of_forms,
    energies_of_map,
    levels_of,
)
from triptych.core.algebra.positions import DisentangledBias
from triptych.core.algebra.rewritten import RewriteRefusedError, Rewritten
from triptych.core.algebra.weights import SIDES, AttentionWeights
from triptych.core.checkpoints.stored_layers import AttentionLayer, AttentionSource
from triptych.rewriting.functions import drop_key_bias, fold, fold_value_bias
from triptych.seeing.inspection.measures import LOSSES, MORE_OF_TOP
from triptych.seeing.layer_measures import (
    COMPARED,
    HeadMeasures,
    RotaryPairs,
    measure_heads,
)

# A key of `InspectedLayer.foldable`.
FOLD = "fold stacked maps"


# Smaller shares of the largest singular value may be rounding of maps multiplied in float32.
_NO_RANK = 1e-6


@final
@dataclass(frozen=True)
class InspectedLayer:
    """The measured heads of one layer."""

    stack: (
        str  # "encoder", "decoder", …; with `layer`, `kind` and `module` as in `Site`
    )
    layer: int  # layer number within its stack
    kind: str  # "self", "causal" or "cross"
    module: str  # name in the checkpoint
    heads: tuple[int, ...]  # numbers of the measured heads
    num_heads: int  # number of query heads
    num_key_heads: int  # number of different key maps
    maps: dict[
        str, int
    ]  # number of different maps to "q", "k" and "v"; consecutive heads share them
    # number of different subspaces read by these maps; lower than the number of maps if heads only weight or
    # widen the output of a shared map.
    subspaces: dict[str, int]
    d_model: int  # width of the input
    d_k: int  # width of queries and keys
    d_v: int  # width of values
    positions: str  # the layer's position scheme
    turns: bool  # queries and keys are rotated by position
    # numbers of rotating pairs and of pairs too slow to rotate; None without a rotation, or if it was ignored
    rotary_pairs: tuple[int, int] | None
    caveats: tuple[str, ...]  # parts of the layer outside W_QK and W_OV
    # one value per head by measure; None if the measure does not apply. A condition number may be infinite.
    figures: dict[str, list[float | None]]
    spectra: dict[
        str, list[list[float]]
    ]  # singular values of "qk" and "ov", one list per head
    # principal angles in degrees of "qk", "qv" and "kv", one list per head
    angles: dict[str, list[list[float]]]
    # picture rows of "q", "k", "v", "qk" and "ov", one list per head; see `_pictures`
    pictures: dict[str, list[list[str]]]
    # parameters removable by truncation, by form ("qk", "ov"), for the losses per head of `LOSSES`. The "qk"
    # of rotary heads and heads with shared keys and values are excluded.
    cut: dict[str, list[int]]
    # parameters removable by exact rewrites, by rewrite, or the reason of a refusal
    foldable: dict[str, int | str]
    parameters: int  # number of parameters of the layer
    broken: dict[str, int]  # number of non-finite entries by tensor
    num_bytes: int  # bytes read for the layer
    # the direction removed by a LayerNorm was projected out of the maps before the measurement
    centred: bool

    def __repr__(self) -> str:
        measured = ", ".join([*self.figures][:8]) + (
            " …" if len(self.figures) > 8 else ""
        )
        return (
            f"InspectedLayer {self.name}: {self.kind} attention, {len(self.heads)} heads measured, d_model "
            f"{self.d_model}, d_k {self.d_k}, d_v {self.d_v}\n  figures: {measured}"
        )

    @property
    def name(self) -> str:
        return f"{self.stack} {self.layer}" + (" cross" if self.kind == "cross" else "")

    @property
    def qk_of(self) -> str:
        """Object described by figures of W_QK: the form, rotary pairs, or the form without the rotation."""
        if not self.turns:
            return "form"
        return "form, rotary ignored" if self.rotary_pairs is None else "rotary pairs"


def as_read(layer: AttentionLayer) -> AttentionWeights:
    """Return the maps without the directions removed by a LayerNorm before or after the layer."""
    return centred(
        layer.weights, layer.inputs.x, layer.inputs.memory, keys=layer.borrows is None
    )


def inspect_layer(
    checkpoint: AttentionSource,
    layer: AttentionLayer,
    maps: AttentionWeights,
    heads: Collection[int] | None,
    ignore_rotary: bool,
) -> InspectedLayer:
    """Measure a layer; `maps` has one map for each chain."""
    weights = layer.weights
    site = layer.site
    pairs = None
    semantics = weights.semantics
    if semantics.rotary is not None and not ignore_rotary:
        longest = checkpoint.longest_text(site)
        seen = min(longest, semantics.window or longest, semantics.chunk or longest)
        pairs = RotaryPairs.from_rotation(semantics.rotary.of_length(longest), seen)
    read = layer.inputs.memory if site.kind == "cross" else layer.inputs.x
    removed = None if read is None else removed_directions(read)
    measured = measure_heads(
        as_read(layer), pairs, 0 if removed is None else removed.shape[1]
    )
    chosen = [
        head for head in range(weights.num_heads) if heads is None or head in heads
    ]
    small = (
        *(tensor for tensor in weights.tensors() if tensor.ndim < 3),
        *semantics.tensors(),
    )
    finite = bool(measured.finite.all()) and all(
        bool(tensor.isfinite().all()) for tensor in small
    )
    return InspectedLayer(
        stack=site.stack,
        layer=site.layer,
        kind=site.kind,
        module=site.module,
        heads=tuple(chosen),
        num_heads=weights.num_heads,
        num_key_heads=weights.num_key_heads,
        maps={side: maps.chain(side)[0].copies for side in ("q", "k", "v")},
        # Only maps to a lower dimension select subspaces.
        subspaces={
            side: max(
                (link.copies for link in weights.chain(side) if link.d_out < link.d_in),
                default=1,
            )
            for side in ("q", "k", "v")
        },
        d_model=weights.d_model,
        d_k=maps.q[0].d_out,
        d_v=maps.v[0].d_out,
        positions=layer.embedded_positions
        if semantics.positions == "none"
        else semantics.positions,
        turns=semantics.rotary is not None,
        caveats=tuple(_caveats(layer)),
        rotary_pairs=None
        if pairs is None
        else (pairs.slow.count(False), pairs.slow.count(True)),
        figures={
            name: _per_head(values, chosen, weights.num_heads)
            for name, values in _measures(measured).items()
        },
        spectra={
            form: _lists(spectrum.values, chosen)
            for form, spectrum in (("qk", measured.qk), ("ov", measured.ov))
        },
        angles={
            pair: _lists(found.angles.rad2deg(), chosen)
            for pair, found in measured.similarity.items()
            if found is not None
        },
        pictures=_pictures(maps, chosen),
        cut=_spared(layer, measured, chosen),
        foldable=_foldable(layer),
        parameters=weights.num_parameters,
        broken={} if finite else dict(checkpoint.broken(layer)),
        num_bytes=checkpoint.bytes_of(site),
        centred=removed is not None,
    )


def _caveats(layer: AttentionLayer) -> Iterator[str]:
    """Yield the parts of a layer outside W_QK and W_OV."""
    semantics = layer.weights.semantics
    # Each caveat completes a sentence on the number of layers concerned.
    if layer.site.also:
        yield layer.site.shared
    if semantics.scores is not None:
        yield "queries and keys are not compared by a product, so W_QK does not describe the scores"
    if semantics.qk_norm:
        yield "queries and keys are normalised before they meet, so sizes of W_QK say nothing of the scores"
    if semantics.v_norm is not None:
        yield "the values of each head are normalised after their map, and W_OV is measured without that"
    if layer.weights.norms_within:
        yield "the norm within a map is left out of the figures"
    if isinstance(semantics.bias, DisentangledBias):
        yield "distances meet queries and keys, too, and W_QK is the share of the content alone"
    if semantics.clip is not None:
        yield f"queries, keys and values are clipped at ±{semantics.clip:g}, which the forms leave out"
    if semantics.temperature is not None:
        yield "later queries are scaled up, and W_QK is measured at the first position"
    if semantics.soft_cap is not None:
        yield f"scores are soft-capped at ±{semantics.soft_cap:g}"
    if semantics.sinks is not None:
        yield "a sink takes part in the softmax besides the keys"
    if semantics.gate is not None:
        gates = (
            "the channels of each head's values"
            if semantics.gate.per_channel
            else "the heads"
        )
        yield f"each token gates {gates}, and W_OV is what a head moves through an open gate"


def _measures(measured: HeadMeasures) -> dict[str, Tensor | None]:
    found: dict[str, Tensor | None] = {}
    for form, spectrum in (("qk", measured.qk), ("ov", measured.ov)):
        # Spectral measures of both forms, then measures of map pairs, then single values.
        found |= {
            f"{form}_effective_rank": spectrum.effective_rank,
            f"{form}_stable_rank": spectrum.stable_rank,
            f"{form}_participation": spectrum.participation_ratio,
            f"{form}_rank": (rank := spectrum.rank(_NO_RANK)),
            **{
                f"{form}_rank_{100 - round(100 * loss)}": spectrum.rank_within(loss)
                for loss in LOSSES
            },
            f"{form}_top": spectrum.kept[:, 0],
            **{
                f"{form}_top_{count}": spectrum.kept[
                    :, min(count, spectrum.kept.shape[1]) - 1
                ]
                for count in MORE_OF_TOP
            },
            f"{form}_spectral_norm": spectrum.spectral_norm,
            f"{form}_frobenius_norm": spectrum.frobenius_norm,
            f"{form}_condition": spectrum.condition.where(
                rank == spectrum.values.shape[-1], math.inf
            ),
        }
    for pair, similarity in measured.similarity.items():
        found |= {
            f"{pair}_{name}": None if similarity is None else getattr(similarity, name)
            for name in (
                "overlap",
                "times_chance",
                "excess",
                "p_value",
                "cosine",
                "procrustes",
                "cka",
            )
        }
    symmetry = measured.symmetry
    found |= {
        "qk_symmetric_share": None if symmetry is None else (1 + symmetry) / 2,
        "qk_symmetry": symmetry,
        "ov_copying": measured.copying,
        **{f"{side}_norm": norm for side, norm in measured.norms.items()},
        "qkv_apart": _distance_apart(measured, "cosine"),
        "qkv_apart_rotated": _distance_apart(measured, "procrustes"),
    }
    return {
        name: None if v is None else v.where(measured.finite, math.nan)
        for name, v in found.items()
    }


def _distance_apart(
    measured: HeadMeasures, closeness: Literal["cosine", "procrustes"]
) -> Tensor | None:
    """Compute 1 − 3 ‖mean‖² / Σ ‖W‖² of W_Q, W_K and W_V; a lower bound if pairs are rotated."""
    norms = measured.norms
    energies = norms["q"].square() + norms["k"].square() + norms["v"].square()
    inner = torch.zeros_like(energies)
    for pair, (one, other) in COMPARED.items():
        found = measured.similarity[pair]
        if found is None:
            return None
        close = getattr(found, closeness).where(
            found.cosine.isfinite(), math.nan
        )  # equal shapes only
        inner += close * norms[one] * norms[other]
    return (energies - inner) * (2 / 3) / energies


def _per_head(
    values: Tensor | None, chosen: Sequence[int], num_heads: int
) -> list[float | None]:
    numbers = [math.nan] * num_heads if values is None else values.double().tolist()
    return [None if math.isnan(numbers[head]) else numbers[head] for head in chosen]


def _lists(values: Tensor, chosen: Sequence[int]) -> list[list[float]]:
    rows = values.tolist()
    return [[value for value in rows[head] if math.isfinite(value)] for head in chosen]


def _pictures(
    maps: AttentionWeights, chosen: Sequence[int]
) -> dict[str, list[list[str]]]:
    """Draw root mean squares of blocks of entries as hexadecimal digits: f is the picture's largest."""
    q, k, v, o = (
        W[list(chosen)].float().cpu() for W in (maps.W_Q, maps.W_K, maps.W_V, maps.W_O)
    )
    energies = {
        **{name: [*energies_of_map(W)] for name, W in (("q", q), ("k", k), ("v", v))},
        "qk": [*energies_of_forms(q, k)],
        "ov": [*energies_of_forms(v, o.mT)],
    }
    return {
        name: [_digits(one) for one in of_heads] for name, of_heads in energies.items()
    }


def _digits(energies: Tensor) -> list[str]:
    levels = levels_of(energies)
    digits = levels.numpy().tobytes().hex()[1::2]
    width = levels.shape[1]
    return [digits[start : start + width] for start in range(0, len(digits), width)]


def _spared(
    layer: AttentionLayer, measured: HeadMeasures, chosen: Sequence[int]
) -> dict[str, list[int]]:
    """Count the parameters saved by the factors of truncated forms."""
    weights = layer.weights
    semantics = layer.weights.semantics
    # Other factors of W_Q W_Kᵀ cannot replace W_Q and W_K under a rotation or a norm.
    fixed = semantics.rotary is None and not semantics.qk_norm
    chains = [weights.chain(side) for side in SIDES]
    if any(len(chain) != 1 for chain in chains) or isinstance(
        semantics.bias, DisentangledBias
    ):
        return {}  # maps are products, or read outside the forms
    if semantics.clip is not None or layer.fixed:
        return {}  # channels are clipped separately, or the maps have other readers
    if len({id(chain[0]) for chain in chains}) < len(chains):
        return {}
    height = {side: weights.chain(side)[0].d_in for side in ("q", "k", "v")}
    width_out = weights.o[0].d_out
    if weights.num_key_heads != weights.num_heads:
        return {}
    found = {}
    for form, spectrum, numbers_a_direction in (
        ("qk", measured.qk, height["q"] + height["k"]),
        ("ov", measured.ov, height["v"] + width_out),
    ):
        if form == "ov" or fixed:
            full = spectrum.values.shape[-1]
            ranks = [spectrum.rank_within(loss) for loss in LOSSES]
            found[form] = [
                sum(
                    (full - int(rank[head])) * numbers_a_direction
                    for head in chosen
                    if measured.finite[head]
                )
                for rank in ranks
            ]
    return found


def _foldable(layer: AttentionLayer) -> dict[str, int | str]:
    """Return the parameters removable by each exact rewrite, or the reason of its refusal."""
    found: dict[str, int | str] = {}
    rewrites: list[tuple[str, Callable[[AttentionWeights], Rewritten]]] = [
        ("drop the key bias", drop_key_bias),
        ("fold the value bias", fold_value_bias),
    ]
    if (
        any(len(layer.weights.chain(side)) > 1 for side in SIDES)
        and not layer.weights.norms_within
    ):
        rewrites.append((FOLD, fold))
    for name, rewrite in rewrites:
        # Fixed layers refuse every rewrite.
        if layer.fixed:
            found[name] = layer.fixed
            continue
        try:
            left = rewrite(layer.weights).weights.num_parameters
        except RewriteRefusedError as refusal:
            found[name] = str(refusal)
        else:
            found[name] = layer.weights.num_parameters - left
    return found
