"""Pairs of channels of rotary heads: what each carries, which are kept, what the others were worth."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from algebra.rewrites.rotary_layers import moments_of, rotation_of
from heads import NUM_HEADS, Untouched, make_layer, random_input, turned_by, with_semantics
from triptych.core.algebra.function import channels
from triptych.core.algebra.positions import OtherFrequencies, RotaryEmbedding
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.attention.steps import for_heads
from triptych.rewriting.functions.rank import measure_energies, truncate
from triptych.rewriting.functions.rotary_pairs import RotaryHeads, pair_scores
from triptych.seeing.layer_measures import RotaryPairs, measure_heads

PAIRINGS: tuple[Any, ...] = ("halves", "interleaved")
pairs_kept = partial(truncate, rotary="pairs")


def rotary(width: int = 6, kind: Any = "self", *, groups: int = 4, biased: bool = True) -> AttentionWeights:
    weights = make_layer("grouped", biased=biased, num_kv_heads=groups, d_k=width).weights(kind)
    return with_semantics(weights, positions="rotary")


def mean_square_scores(
    weights: AttentionWeights, x: Tensor, rotation: RotaryEmbedding, distances: range, only: list[int]
) -> Tensor:
    """Of all queries with all keys, in some pairs, over the distances in a text: turned one by one.

    Of L tokens, L − |m| pairs are m apart.
    """
    q, k, _ = channels(weights, x)
    q, k = (t.transpose(0, 1).flatten(1, 2) for t in (q, for_heads(k, weights.num_heads)))
    first, second = rotation.pairs
    kept = torch.zeros(q.shape[-1], dtype=torch.float64)
    kept[[channel for pair in only for channel in (first[pair], second[pair])]] = 1.0
    total = torch.zeros(NUM_HEADS, dtype=torch.float64)
    longest = max(distances) + 1
    for m in distances:
        found = turned_by(rotation, q * kept, m) @ turned_by(rotation, k * kept, 0).mT
        total += (longest - abs(m)) * found.square().mean((1, 2))
    return total / sum(longest - abs(m) for m in distances)


@pytest.mark.parametrize("kind", ["self", "causal"])
@pytest.mark.parametrize("pairing", PAIRINGS)
@pytest.mark.parametrize(("start", "factor", "longest"), [(0, 1.0, 1), (0, 1.0, 9), (1, 1.3, 50)])
def test_scores_of_pairs_are_means_over_tokens_and_distances(
    pairing: Any, start: int, factor: float, longest: int, kind: str
) -> None:
    weights, rotation, x = rotary(7, kind), rotation_of(pairing, start, factor), random_input(11) + 0.5
    found = pair_scores(RotaryHeads(weights, rotation, moments_of(weights, x), longest))
    distances = range(0 if kind == "causal" else 1 - longest, longest)
    for only in ([0], [2], [0, 1], [0, 1, 2]):
        expected = mean_square_scores(weights, x, rotation, distances, only)
        torch.testing.assert_close(found[:, only][:, :, only].sum((1, 2)), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found, found.mT, rtol=1e-12, atol=1e-12)


def test_in_long_texts_pairs_are_worth_their_energies() -> None:
    weights, x, rotation = rotary(), random_input(11), rotation_of()
    moments = moments_of(weights, x)
    without_end = pair_scores(RotaryHeads(weights, rotation, moments))
    torch.testing.assert_close(without_end, torch.diag_embed(without_end.diagonal(dim1=1, dim2=2)))
    long = pair_scores(RotaryHeads(weights, rotation, moments, 10_000_000))
    torch.testing.assert_close(long, without_end, rtol=0, atol=1e-4 * float(without_end.max()))


@pytest.mark.parametrize("pairing", PAIRINGS)
def test_energies_without_a_text_are_those_that_are_measured(pairing: Any) -> None:
    weights, rotation = rotary(biased=False), rotation_of(pairing, factor=1.2)
    measured = measure_heads(weights, RotaryPairs.from_rotation(rotation, 10**9)).qk.values.square()
    torch.testing.assert_close(
        measure_energies(with_semantics(weights, rotary=rotation), "qk", rotary="pairs"),
        measured,
        rtol=1e-10,
        atol=0,
    )


def test_a_pair_that_does_not_turn_has_the_singular_values_of_its_channels() -> None:
    weights = rotary(2, biased=False)
    still = RotaryEmbedding(torch.zeros(1, dtype=torch.float64))
    energy = pair_scores(RotaryHeads(weights, still))[:, 0, 0]
    torch.testing.assert_close(energy, weights.qk.norm().square(), rtol=1e-10, atol=0)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("pairing", "start"), [("halves", 0), ("interleaved", 1)])
def test_the_strongest_pairs_stay_and_the_others_are_zero(
    pairing: Any, start: int, groups: int, biased: bool
) -> None:
    weights, rotation = rotary(7, groups=groups, biased=biased), rotation_of(pairing, start)
    with Untouched(weights):
        result, record = pairs_kept(with_semantics(weights, rotary=rotation), qk_rank=2)
    assert record.tier == "bounded"
    assert record.error is None
    first, second = rotation.pairs
    energies = pair_scores(RotaryHeads(weights, rotation)).diagonal(dim1=1, dim2=2).view(groups, -1, 3).sum(1)
    weakest = energies.argmin(1).repeat_interleave(NUM_HEADS // groups)
    for head, pair in enumerate(weakest.tolist()):
        gone = [first[pair], second[pair]]
        kept = [channel for channel in range(7) if channel not in gone]
        for side in ("q", "k"):
            old, new = (one.multiplied(side).repeat(NUM_HEADS) for one in (weights, result))  # type: ignore[arg-type]
            assert torch.equal(new.weight[head][:, kept], old.weight[head][:, kept])
            assert not bool(new.weight[head][:, gone].any())
            if old.bias is not None and new.bias is not None:
                assert torch.equal(new.bias[head][kept], old.bias[head][kept])
                assert not bool(new.bias[head][gone].any())
    lost = pair_scores(RotaryHeads(weights, rotation))[torch.arange(NUM_HEADS), weakest, weakest]
    assert record.bound == pytest.approx(float(lost.max().sqrt()), rel=1e-10)
    assert result.num_key_heads == groups


def test_pairs_are_counted_as_they_turn_in_texts_of_the_length() -> None:
    weights = rotary()
    long = replace(rotation_of(), frequencies=rotation_of().frequencies / 7)
    both = replace(rotation_of(), long=OtherFrequencies(20, long.frequencies))
    for length, alone in ((20, rotation_of()), (21, long)):
        found, expected = (
            pairs_kept(with_semantics(weights, rotary=one), qk_rank=2, longest=length).record
            for one in (both, alone)
        )
        assert found.cuts == expected.cuts
        found, expected = (
            truncate(with_semantics(weights, rotary=one), qk_rank=2, rotary="maps", longest=length).record
            for one in (both, alone)
        )
        assert found.cuts == expected.cuts


@pytest.mark.parametrize("longest", [None, 6])
def test_the_error_on_a_text_is_what_the_pairs_left_out_were_worth(longest: int | None) -> None:
    weights, x, rotation = rotary(), random_input(11) * torch.logspace(0, -2, 24), rotation_of()
    moments = moments_of(weights, x)
    result, record = pairs_kept(
        with_semantics(weights, rotary=rotation), qk_rank=[1, 2, 3, 1], moments=moments, longest=longest
    )
    distances = range(-5, 6) if longest else range(-3000, 3000, 29)
    first, second = rotation.pairs
    shares = []
    for head in range(NUM_HEADS):
        gone = [f for f in range(3) if not bool(result.W_Q[head][:, [first[f], second[f]]].any())]
        lost, whole = (
            mean_square_scores(weights, x, rotation, distances, only)[head] for only in (gone, [0, 1, 2])
        )
        shares.append(float(lost / whole))
    assert record.error == pytest.approx(max(shares), rel=1e-9 if longest else 0.1)
    assert shares[2] == 0.0
    assert record.choice.startswith("1, 2, 3, 1 of 3 rotary pairs")


def test_rotary_pairs_that_carry_nothing_go_for_nothing() -> None:
    weights = rotary()
    (q,) = weights.q
    weight, bias = q.weight.clone(), q.bias
    assert bias is not None
    bias = bias.clone()
    weight[..., [1, 4]], bias[..., [1, 4]] = 0.0, 0.0
    weights = replace(weights, q=(replace(q, weight=weight, bias=bias),))
    record = pairs_kept(with_semantics(weights, rotary=rotation_of()), qk_rank=2).record
    assert (record.tier, record.bound) == ("rounding-exact", 0.0)


def test_more_pairs_than_there_are_are_refused() -> None:
    reason = "^truncate refused: qk_rank is 4: a head with 3 rotary pairs takes 1 to 3"
    with pytest.raises(RewriteRefusedError, match=reason):
        pairs_kept(with_semantics(rotary(), rotary=rotation_of()), qk_rank=4)


def test_the_spread_of_energies_is_by_group() -> None:
    weights = rotary(groups=2)
    energies = measure_energies(with_semantics(weights, rotary=rotation_of()), "qk", rotary="pairs")
    assert energies.shape == (2, 3)
    assert bool((energies.diff() <= 0).all())
    np.testing.assert_allclose(
        energies.sum(1),
        pair_scores(RotaryHeads(weights, rotation_of())).sum((1, 2)).view(2, 2).sum(1),
        rtol=1e-12,
    )
