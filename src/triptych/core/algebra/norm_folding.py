"""Folding the gain and shift of a norm into the maps reading the norm."""

from dataclasses import dataclass, replace
from typing import Literal, final

from torch import Tensor

from triptych.core.algebra.legality import (
    INPUT_READ_BY_MAPS,
    INPUT_SIDES,
    KEY_BIAS_BLIND,
    SCORES_ARE_THE_FORM,
    named,
    require_nothing_between,
    separate,
    sharing_sides,
    with_chains,
)
from triptych.core.algebra.rewritten import RewriteRefusedError, Rewritten, rewritten
from triptych.core.algebra.weights import AttentionWeights, Chain, Link, Norm, Side

NAME = "fold_norm"
NAME_OF_OTHERS = "fold_other_norms"


@final
@dataclass(frozen=True)
class OtherReaders:
    """Maps outside a layer reading the layer's norm, to absorb gain and shift along with the layer."""

    maps: tuple[str, ...]  # names of the maps
    refused: str = (
        ""  # reason against absorbing; "" if the maps can absorb gain and shift
    )


def fold_norm(
    weights: AttentionWeights, others: OtherReaders | None = None
) -> Rewritten:
    """Fold a norm's gain γ and shift β into the maps that read it: `b += β W`, then `W = diag(γ) W`.

    The maps to queries, keys and values absorb the norm. In cross-attention the maps to keys and values
    absorb the memory's norm instead. Where the input itself is the key (one matrix W per head),
    `W = diag(γ) W diag(γ)` and `b = (β W + b) ∘ γ`; the remaining `q · β` is the same for a whole row of
    scores. Gain and shift of a norm between two maps are folded into the second map.
    """
    cross = weights.semantics.kind == "cross"
    of_memory = weights.memory_norm if cross else weights.norm
    read: dict[Side, Norm | None] = {"q": weights.norm, "k": of_memory, "v": of_memory}
    checked = _require_foldable(weights, read, others)
    notes: list[str] = []
    source = weights
    # A map cannot absorb two norms: in cross-attention queries are separated from shared keys and values.
    sharing = sharing_sides(weights, "q")
    if sharing and read["q"] is not read["k"]:
        notes.append(
            f"q shared a map with {named(sharing)}, which read another norm: it has its own now"
        )
        source = with_chains(weights, {"q": separate(weights.q)})
    chains = _folded_chains(source, read)
    if of_memory is not None and not source.k:
        # The input is the key: the last map of queries absorbs the gain; the softmax ignores the shift.
        *before, last = chains.get("q", source.q)
        chains["q"] = (*before, last.then(replace(_as_map(of_memory), bias=None)))
        notes.append(
            "the keys are the input itself: the gain is on both sides of the form"
        )
    gone = {"norm": weights.norm, "memory norm": weights.memory_norm if cross else None}
    notes += [
        f"of the {name} a gain of 1 (stored as {1 - norm.offset:g}) and no shift are left"
        for name, norm in gone.items()
        if norm is not None
    ]
    result = _with_inner_norms_folded(with_chains(source, chains))
    if result.q is not chains.get("q", source.q) or result.v is not chains.get(
        "v", source.v
    ):
        notes.append("the maps that read a latent took up gain and shift of its norm")
    gate = weights.semantics.gate
    if gate is not None and weights.norm is not None:
        norm = _as_map(weights.norm)
        taken_up = gate.reading(
            norm.weight[0], None if norm.bias is None else norm.bias[0]
        )
        result = replace(result, semantics=replace(result.semantics, gate=taken_up))
        notes.append("the gates of the heads read the norm as well, and take it up")
    return rewritten(
        NAME,
        "rounding-exact",
        weights,
        replace(result, norm=None, memory_norm=None if cross else weights.memory_norm),
        checked=checked,
        notes=tuple(notes),
    )


def _as_map(norm: Norm) -> Link:
    """Return a norm's gain and shift as a map `x ↦ γ ∘ x + β`, without bias if β is zero."""
    shift = None if norm.bias is None or not bool(norm.bias.any()) else norm.bias[None]
    return Link((norm.offset + norm.weight)[None], shift)


def _folded_chains(
    weights: AttentionWeights, read: dict[Side, Norm | None]
) -> dict[Side, Chain]:
    """Fold norms into the first maps of chains. Shared maps stay shared."""
    links: dict[tuple[Link, Norm], Link] = {}
    chains: dict[tuple[Chain, Norm], Chain] = {}
    found: dict[Side, Chain] = {}
    for side, norm in read.items():
        chain = weights.chain(side)
        if norm is None or not chain:
            continue
        if (chain[0], norm) not in links:
            links[chain[0], norm] = _as_map(norm).then(chain[0])
        found[side] = chains.setdefault(
            (chain, norm), (links[chain[0], norm], *chain[1:])
        )
    return found


def _inner_norms(chain: Chain) -> list[Link]:
    return [found for link in chain[:-1] if (found := link.norm_map) is not None]


def _with_inner_norms_folded(weights: AttentionWeights) -> AttentionWeights:
    """Fold gain and shift of norms between maps into the maps after them. Shared maps stay shared."""
    # Keyed by the chain up to a map, whose norm the map absorbs, and True for the last map of a chain.
    links: dict[tuple[Chain, bool], Link] = {}
    chains: dict[Chain, Chain] = {}

    def folded(chain: Chain, index: int) -> Link:
        link = chain[index]
        is_last = index == len(chain) - 1
        norm_map = chain[index - 1].norm_map if index else None
        new = link if norm_map is None else norm_map.then(link)
        if is_last or link.norm is None or link.norm_map is None:
            return new
        return replace(new, norm=replace(link.norm, weight=None, bias=None))

    for chain in map(weights.chain, INPUT_SIDES):
        if _inner_norms(chain) and chain not in chains:
            keys = [
                (chain[: index + 1], index == len(chain) - 1)
                for index in range(len(chain))
            ]
            for index, key in enumerate(keys):
                if key not in links:
                    links[key] = folded(chain, index)
            chains[chain] = tuple(links[key] for key in keys)
    return with_chains(
        weights,
        {
            side: chains.get(weights.chain(side), weights.chain(side))
            for side in INPUT_SIDES
        },
    )


def require_readers_foldable(
    place: Literal["pre", "post", "sandwich"],
    norm: Norm | None,
    readers: dict[str, bool],
) -> tuple[str, ...]:
    """Refuse unless the maps outside the attention can absorb a norm; return the checks in words.

    `readers` maps the names of the maps to True if they have a bias slot, which a shift requires.
    """
    _require_pre_norm(NAME_OF_OTHERS, place)
    checked = [
        "pre-norm",
        "nothing else reads the norm",
        "every map that reads it is learned",
    ]
    if norm is not None and _as_map(norm).bias is not None:
        slotless = [name for name, has_slot in readers.items() if not has_slot]
        if slotless:
            reason = f"there is no bias slot on {', '.join(slotless)} for the shift β"
            raise RewriteRefusedError(NAME_OF_OTHERS, reason)
        checked.append("bias slots for the shift")
    return tuple(checked)


def fold_norm_into_map(
    norm: Norm, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Fold gain γ and shift β into a map `[d_out, d_in]` reading the norm: `b += W β`, `W = W diag(γ)`.

    Refuse a shift other than 0 for a map without a bias.
    """
    shift = None if norm.bias is None or not bool(norm.bias.any()) else norm.bias
    if shift is not None and bias is None:
        raise RewriteRefusedError(
            NAME_OF_OTHERS, "there is no bias slot for the shift β"
        )
    shifted = bias if shift is None or bias is None else bias + weight @ shift
    return weight * (norm.weight + norm.offset), shifted


def _require_pre_norm(name: str, place: str) -> None:
    if place == "post":
        raise RewriteRefusedError(
            name, "the norm is a post-norm: the residual carries its gain, too"
        )
    if place == "sandwich":
        raise RewriteRefusedError(
            name, "there are norms on both sides of the layer (sandwich)"
        )


def _require_foldable(
    weights: AttentionWeights,
    read: dict[Side, Norm | None],
    others: OtherReaders | None,
) -> tuple[str, ...]:
    """Refuse unless every reader of the norms can absorb them; return the checks in words."""
    # An empty chain of keys is allowed: the map of queries absorbs its gain.
    _require_pre_norm(NAME, weights.norm_place)
    INPUT_READ_BY_MAPS.require(NAME, weights)
    inner = {side: _inner_norms(weights.chain(side)) for side in INPUT_SIDES}
    if not any(read.values()) and not any(inner.values()):
        raise RewriteRefusedError(
            NAME, "there is nothing to fold: no norm of this layer's input is known"
        )
    if weights.other_norm_readers and (others is None or others.refused):
        reason = f"the norm is also read by {weights.other_norm_readers}, which "
        reason += (
            f"cannot take it up: {others.refused}" if others else "would miss its gain"
        )
        raise RewriteRefusedError(NAME, reason)
    for side in INPUT_SIDES:
        if read[side] is not None and not (side == "k" and not weights.k and weights.q):
            _require_learned_first_map(side, weights.chain(side))
    checked = [
        "pre-norm",
        "nothing else reads the norm",
        "every map that reads it is learned",
    ]
    if weights.other_norm_readers and others:
        checked[1] = (
            f"what else reads the norm takes it up as well: {', '.join(others.maps)}"
        )
    shifted = [
        side
        for side, norm in read.items()
        if norm is not None and _as_map(norm).bias is not None
    ]
    shifted += [
        side
        for side in INPUT_SIDES
        if any(norm_map.bias is not None for norm_map in inner[side])
    ]
    slotless = tuple(
        side
        for side in shifted
        if weights.chain(side) and side not in weights.bias_slots
    )
    if slotless:
        raise RewriteRefusedError(
            NAME, f"there is no bias slot on {named(slotless)} for the shift β"
        )
    if shifted:
        checked.append("bias slots for the shift")
    if read["k"] is not None and not weights.k:
        _require_gain_passes_to_queries(weights, shifted="k" in shifted)
        checked += SCORES_ARE_THE_FORM.checked
    return tuple(checked)


def _require_learned_first_map(side: Side, chain: Chain) -> None:
    if not chain:
        raise RewriteRefusedError(
            NAME,
            f"{side} is the norm's output itself: no map is there to take up the gain",
        )
    if not chain[0].learned:
        reason = (
            f"{side} reads the norm through a fixed map, which cannot take up a gain"
        )
        raise RewriteRefusedError(NAME, reason, "expand it first")


def _require_gain_passes_to_queries(
    weights: AttentionWeights, *, shifted: bool
) -> None:
    """Refuse unless `q · (γ ∘ y + β)`, where y itself is the key, equals `(q ∘ γ) · y` in the softmax."""
    SCORES_ARE_THE_FORM.require(
        NAME, weights, about="the keys are the input itself, and "
    )
    require_nothing_between(NAME, "q", weights.q[-1:])
    if not weights.q[-1].learned:
        raise RewriteRefusedError(
            NAME,
            "the keys are the input itself, and the last map of q is fixed",
            "expand it first",
        )
    if shifted:
        about = (
            "the keys are the input itself, so its shift β would be their bias, and "
        )
        KEY_BIAS_BLIND.require(NAME, weights, about=about)
