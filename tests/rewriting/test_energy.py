"""`energy`: every head keeps the share that was asked for, in every writing and by every criterion."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import D_MODEL, NUM_HEADS, make_layer, turned_by, with_semantics
from triptych.core.algebra.function import channels
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.attention.projections import PARAMETERISATIONS
from triptych.core.attention.steps import for_heads
from triptych.rewriting.functions import LayerToRewrite, Truncate
from triptych.rewriting.functions.moments import MomentsGatherer

ROTATION = RotaryEmbedding(torch.tensor([1.0, 0.3, 0.001], dtype=torch.float64), "halves")
LONGEST = 40


def uneven(weights: AttentionWeights) -> AttentionWeights:
    """Heads of very different sizes: those of one group need different channels."""
    sizes = torch.logspace(-2, 0, NUM_HEADS, dtype=torch.float64)[:, None, None]
    if not weights.q or weights.tied("q", "k") or weights.q[-1].diagonal:
        return weights
    (*first, q), (o, *rest) = weights.q, weights.o
    if q.copies != NUM_HEADS or o.copies != NUM_HEADS or o.diagonal:
        return weights
    return replace(
        weights,
        q=(*first, replace(q, weight=q.weight * sizes)),
        o=(replace(o, weight=o.weight * sizes.flip(0)), *rest),
    )


def cut(
    weights: AttentionWeights, energy: float, **how: Any
) -> tuple[LayerToRewrite, AttentionWeights, Truncate]:
    layer = LayerToRewrite("layer", weights, **how.pop("layer", {}))
    step = Truncate(energy=energy, **how).prepare([layer])
    return layer, step.apply(layer).weights, step


def kept(before: Tensor, after: Tensor) -> Tensor:
    """Of the squares of every head."""
    return 1 - (after - before).flatten(1).square().sum(1) / before.flatten(1).square().sum(1)


def turned(weights: AttentionWeights, distances: range, weigh: bool) -> Tensor:
    """W_Q R(m) W_Kᵀ of every head at distances, weighted by how often these come."""
    found = []
    rows = [
        torch.cat(
            [link.weight, torch.zeros_like(link.weight[:, :1]) if link.bias is None else link.bias[:, None]],
            1,
        )
        for link in (weights.multiplied(side).repeat(NUM_HEADS) for side in ("q", "k"))  # type: ignore[arg-type]
    ]
    for m in distances:
        q, k = turned_by(ROTATION, rows[0], m), turned_by(ROTATION, rows[1], 0)
        found.append(q @ k.mT * (LONGEST - m if weigh else 1) ** 0.5)
    return torch.stack(found, dim=1)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("energy", [0.5, 0.9, 1.0])
@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_every_form_keeps_its_share(name: str, energy: float) -> None:
    weights = uneven(make_layer(name, biased=True).weights("self"))
    for form in ("qk", "ov"):
        try:
            _, after, step = cut(weights, energy, forms=(form,))
        except RewriteRefusedError:
            assert form == "qk"
            continue
        one, other = (getattr(each, form).dense() for each in (weights, after))
        assert float(kept(one, other).min()) >= energy - 1e-9
        ranks = step.ranks["layer"][form]  # type: ignore[index]
        for group, rank in enumerate(ranks):
            if rank > 1:  # one less is too few
                fewer = tuple(r - (place == group) for place, r in enumerate(ranks))
                less = step.model_copy(update={"ranks": {"layer": {form: fewer}}})
                found = getattr(less.apply(LayerToRewrite("layer", weights)).weights, form).dense()
                assert float(kept(one, found).min()) < energy


SAMPLED = [("factored", "maps", "self"), ("grouped", "pairs", "causal"), ("symmetric", "maps", "causal")]
ROTARY_HEADS = [
    pytest.param(name, rotary, kind, marks=() if (name, rotary, kind) in SAMPLED else pytest.mark.slow)
    for name in ("factored", "grouped", "symmetric")
    for rotary in ("maps", "pairs")
    for kind in ("self", "causal")
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "rotary", "kind"), ROTARY_HEADS)
def test_rotary_heads_keep_their_share_at_near_and_far_distances(name: str, rotary: str, kind: Any) -> None:
    weights = uneven(make_layer(name, biased=True, d_k=6).weights(kind))
    weights = with_semantics(weights, rotary=ROTATION)
    about = {"longest_text": LONGEST}
    for energy in (0.4, 0.8):
        _, after, step = cut(weights, energy, forms=("qk",), rotary=rotary, layer=about)
        near = [turned(each, range(LONGEST), weigh=True) for each in (weights, after)]
        far = [turned(each, range(0, 60000, 37), weigh=False) for each in (weights, after)]
        assert float(kept(*near).min()) >= energy - 1e-3
        assert float(kept(*far).min()) >= energy - 2e-2  # a mean over some of endlessly many distances
        most = 3 if rotary == "pairs" else 6
        assert energy > 0.5 or min(step.ranks["layer"]["qk"]) < most


@pytest.mark.parametrize("criterion", ["uncentred", "centred"])
@pytest.mark.parametrize("name", ["factored", "grouped"])
def test_what_heads_do_on_a_text_keeps_its_share(name: str, criterion: str) -> None:
    weights = uneven(make_layer(name, biased=True).weights("self"))
    x = torch.randn(3, 50, D_MODEL, dtype=torch.float64) * torch.logspace(-1, 0, D_MODEL, dtype=torch.float64)
    gatherer = MomentsGatherer()
    gatherer.add(weights, x)
    layer = {"moments": gatherer.result()}
    _, after, _ = cut(weights, 0.9, forms=("qk",), criterion=criterion, layer=layer)
    found = []
    for each in (weights, after):
        q, k, _ = (t.transpose(0, 1).flatten(1, 2) for t in channels(each, x))
        k = for_heads(k[None], NUM_HEADS)[0]
        if criterion == "centred":
            k = k - k.mean(dim=1, keepdim=True)
        found.append(q @ k.mT)
    assert float(kept(*found).min()) >= 0.9 - 1e-6
