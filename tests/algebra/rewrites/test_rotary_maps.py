"""Rotary maps of a lower rank: the least error of scores that turn, as much as said, in every gauge."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from algebra.rewrites.rotary_layers import moments_of, rotation_of
from heads import D_MODEL, NUM_HEADS, Untouched, make_layer, turned_by, with_semantics
from triptych.core.algebra.function import channels
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention.steps import for_heads
from triptych.rewriting.functions.moves import measure_move
from triptych.rewriting.functions.rank import measure_energies, truncate

TOKENS = 9
maps_of_rank = partial(truncate, rotary="maps")


def rotary(width: int = 6, kind: Any = "causal", *, groups: int = 2, biased: bool = True) -> AttentionWeights:
    weights = make_layer("grouped", biased=biased, num_kv_heads=groups, d_k=width).weights(kind)
    return with_semantics(weights, positions="rotary")


def some_text() -> Tensor:
    """Some directions much more than others, and not about zero."""
    scales = torch.logspace(0.5, -1.0, D_MODEL, dtype=torch.float64)
    return torch.randn(2, TOKENS, D_MODEL, dtype=torch.float64) * scales + 0.3


def turned_scores(weights: AttentionWeights, x: Tensor, rotation: RotaryEmbedding, m: int) -> Tensor:
    """Of all queries with all keys, as if each were m tokens behind: `[heads, queries, keys]`."""
    q, k, _ = channels(weights, x)
    q, k = (t.transpose(0, 1).flatten(1, 2) for t in (q, for_heads(k, weights.num_heads)))
    return turned_by(rotation, q, m) @ turned_by(rotation, k, 0).mT


def measured(
    before: AttentionWeights,
    after: AttentionWeights | None,
    x: Tensor,
    rotation: RotaryEmbedding,
    longest: int,
) -> Tensor:
    """Mean square of what the scores of each head lose; of the scores themselves without `after`."""
    total, pairs = torch.zeros(NUM_HEADS, dtype=torch.float64), 0
    for m in range(0 if before.semantics.kind == "causal" else 1 - longest, longest):
        lost = turned_scores(before, x, rotation, m)
        if after is not None:
            lost = lost - turned_scores(after, x, rotation, m)
        total += (longest - abs(m)) * lost.square().mean((1, 2))
        pairs += longest - abs(m)
    return total / pairs


def of_groups(errors: Tensor, groups: int) -> Tensor:
    return errors.view(groups, -1).sum(1)


def each_by_itself(weights: AttentionWeights, rank: int, sides: str = "qk") -> AttentionWeights:
    """W_Q and W_K at the rank by an SVD of each, biases as they are."""

    def cut(link: Link) -> Link:
        U, S, Vh = torch.linalg.svd(link.weight, full_matrices=False)
        return replace(link, weight=(U[..., :rank] * S[..., None, :rank]) @ Vh[..., :rank, :])

    new = {side: tuple(cut(link) for link in weights.chain(side)) for side in sides}  # type: ignore[arg-type]
    return replace(weights, **new)  # type: ignore[arg-type]


def ranks_of(weights: AttentionWeights, side: Any) -> list[int]:
    return torch.linalg.matrix_rank(weights.multiplied(side).weight, rtol=1e-9).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", ["self", "causal"])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("pairing", "start", "factor"), [("halves", 0, 1.0), ("interleaved", 1, 1.3)])
def test_the_error_on_a_text_is_the_measured_one(
    pairing: Any, start: int, factor: float, groups: int, biased: bool, kind: str
) -> None:
    weights = rotary(7, kind, groups=groups, biased=biased)
    rotation, x = rotation_of(pairing, start, factor), some_text()
    moments = moments_of(weights, x)
    with Untouched(weights):
        result, record = maps_of_rank(
            with_semantics(weights, rotary=rotation), qk_rank=3, moments=moments, longest=TOKENS
        )
    lost, whole = (measured(weights, after, x, rotation, TOKENS) for after in (result, None))
    assert record.error == pytest.approx(float((lost / whole).max()), rel=1e-9)
    assert record.tier == "bounded"
    assert record.bound == pytest.approx(
        float(
            measure_move(
                with_semantics(weights, rotary=rotation), with_semantics(result, rotary=rotation), "qk"
            ).whole.max()
        ),
        rel=1e-10,
    )
    assert any(note.startswith("no mean was taken off: under rotary positions") for note in record.notes)
    assert "rank 3 of 7, written back into 7 channels" in record.choice
    assert set(ranks_of(result, "q") + ranks_of(result, "k")) == {3}
    assert result.num_key_heads == groups
    assert [link.weight.shape[-1] for link in (*result.q, *result.k)] == [7, 7]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_what_keys_of_a_rank_lose_is_what_the_energies_left_out_say(groups: int, biased: bool) -> None:
    # Fitted once and queries put back, keys are the best of their rank: no other projection loses less.
    weights, rotation, x = rotary(groups=groups, biased=biased), rotation_of(), some_text()
    energies = measure_energies(
        with_semantics(weights, rotary=rotation), "qk", moments_of(weights, x), rotary="maps", longest=TOKENS
    )
    assert energies.shape == (groups, 6)
    assert bool((energies.diff() <= 0).all())
    if not biased:
        whole = of_groups(measured(weights, None, x, rotation, TOKENS), groups)
        torch.testing.assert_close(energies.sum(1), whole, rtol=1e-9, atol=0)
    for rank in range(1, 7):
        least = energies[:, rank:].sum(1)
        for keys in (each_by_itself(weights, rank, "k"), random_keys(weights, rank)):
            lost = of_groups(measured(weights, keys, x, rotation, TOKENS), groups)
            assert bool((least <= lost + 1e-9 * energies.sum(1)).all())


def random_keys(weights: AttentionWeights, rank: int) -> AttentionWeights:
    (link,) = weights.k
    one, other = (torch.randn(link.copies, 6, rank, dtype=torch.float64) for _ in range(2))
    if rank == 6:
        one, other = torch.eye(6).double().expand(link.copies, 6, 6), torch.eye(6).double()
    return replace(weights, k=(link.then(Link(one @ (other if rank == 6 else other.mT))),))


def test_keys_alone_lose_no_more_than_their_energies_when_queries_cannot_be_cut() -> None:
    # Queries that have the rank already: what is lost is of the keys alone.
    weights, rotation, x = rotary(biased=False, groups=4), rotation_of(), some_text()
    weights = each_by_itself(weights, 2, "q")
    moments = moments_of(weights, x)
    result = maps_of_rank(
        with_semantics(weights, rotary=rotation), qk_rank=2, moments=moments, longest=TOKENS
    ).weights
    lost = measured(weights, result, x, rotation, TOKENS)
    energies = measure_energies(
        with_semantics(weights, rotary=rotation), "qk", moments, rotary="maps", longest=TOKENS
    )
    torch.testing.assert_close(lost, energies[:, 2:].sum(1), rtol=1e-9, atol=0)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("on_text", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_no_more_is_lost_than_by_each_matrix_or_by_pairs(groups: int, on_text: bool, biased: bool) -> None:
    weights, rotation = rotary(groups=groups, biased=biased), rotation_of()
    # Without a text, inputs have no direction, and √d times the rows of an orthogonal matrix are such a text.
    both_signs = torch.cat([torch.eye(D_MODEL), -torch.eye(D_MODEL)]).double() * D_MODEL**0.5
    x = some_text() if on_text else both_signs[None]
    moments = moments_of(weights, x) if on_text else None
    for rank in (2, 4):
        ours, others = (
            maps_of_rank(
                with_semantics(weights, rotary=rotation), qk_rank=rank, moments=moments, longest=TOKENS
            ).weights,
            (
                each_by_itself(weights, rank),
                truncate(
                    with_semantics(weights, rotary=rotation),
                    qk_rank=rank // 2,
                    rotary="pairs",
                    moments=moments,
                    longest=TOKENS,
                ).weights,
            ),
        )
        lost = of_groups(measured(weights, ours, x, rotation, TOKENS), groups)
        for other in others:
            assert bool((lost <= of_groups(measured(weights, other, x, rotation, TOKENS), groups)).all())


def test_keys_that_no_query_sees_are_left_out_though_they_are_large() -> None:
    weights, rotation, x = rotary(biased=False, groups=4), rotation_of(), some_text()
    (q,), (k,) = weights.q, weights.k
    W_Q, W_K = q.weight.clone(), k.weight.clone()
    W_Q[..., [1, 4]] = 0.0  # pair 1
    W_K[..., [1, 4]] *= 100.0
    weights = replace(weights, q=(Link(W_Q),), k=(Link(W_K),))
    result, record = maps_of_rank(with_semantics(weights, rotary=rotation), qk_rank=4)
    assert record.tier == "rounding-exact"
    assert float(measured(weights, each_by_itself(weights, 4), x, rotation, TOKENS).max()) > 0.1
    assert float(measured(weights, result, x, rotation, TOKENS).max()) < 1e-20


@pytest.mark.parametrize("on_text", [False, True])
def test_all_channels_are_the_layer_itself(on_text: bool) -> None:
    weights, rotation = rotary(), rotation_of()
    moments = moments_of(weights, some_text()) if on_text else None
    result, record = maps_of_rank(with_semantics(weights, rotary=rotation), qk_rank=6, moments=moments)
    assert (record.tier, record.bound) == ("rounding-exact", 0.0)
    for one, other in zip(result.tensors(), weights.tensors(), strict=True):
        assert torch.equal(one, other)
    some = maps_of_rank(with_semantics(weights, rotary=rotation), qk_rank=[6, 2], moments=moments).weights
    assert ranks_of(some, "k") == [6, 2]
    assert torch.equal(some.multiplied("k").weight[0], weights.multiplied("k").weight[0])


@pytest.mark.parametrize("on_text", [False, True])
@pytest.mark.parametrize("longest", [None, TOKENS])
def test_the_gauge_makes_no_difference(longest: int | None, on_text: bool) -> None:
    weights, rotation, x = rotary(7, groups=4, biased=False), rotation_of(), some_text()
    # One complex number c per pair: keys by c, queries by 1 / c*.
    to_q, to_k = (torch.eye(7, dtype=torch.float64).repeat(NUM_HEADS, 1, 1) for _ in range(2))
    for a, b in zip(*rotation.pairs, strict=True):
        c = torch.randn(NUM_HEADS, dtype=torch.complex128)
        for change, factor in ((to_k, c), (to_q, 1 / c.conj())):
            change[:, a, a], change[:, b, b] = factor.real, factor.real
            change[:, a, b], change[:, b, a] = factor.imag, -factor.imag
    (q,), (k,) = weights.q, weights.k
    other = replace(weights, q=(q.then(Link(to_q)),), k=(k.then(Link(to_k)),))
    torch.testing.assert_close(
        turned_scores(weights, x, rotation, 5), turned_scores(other, x, rotation, 5), rtol=1e-9, atol=1e-9
    )
    one, two = (
        maps_of_rank(
            with_semantics(w, rotary=rotation),
            qk_rank=3,
            moments=moments_of(w, x) if on_text else None,
            longest=longest,
        ).weights
        for w in (weights, other)
    )
    for m in (0, 4):
        found = (turned_scores(w, x, rotation, m) for w in (one, two))
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


def test_what_all_tokens_have_in_common_takes_no_rank_where_there_are_biases() -> None:
    weights, rotation = rotary(groups=4), rotation_of()
    x = some_text() * 1e-3 + 3.0
    lost, whole = (
        measured(weights, after, x, rotation, TOKENS)
        for after in (
            maps_of_rank(
                with_semantics(weights, rotary=rotation), qk_rank=1, moments=moments_of(weights, x)
            ).weights,
            None,
        )
    )
    assert bool((lost < 1e-4 * whole).all())


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"qk_rank": 7}, "qk_rank is 7: a map into 6 channels takes 1 to 6"),
        ({"qk_rank": True}, "qk_rank is True: it must be a whole number"),
        (
            {"traits": {"rotary": rotation_of(start=1)}},
            "the rotation turns channels up to 7, of heads 6 wide",
        ),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], reason: str) -> None:
    weights = with_semantics(rotary(), **{"rotary": rotation_of(), **options.get("traits", {})})
    given = {name: value for name, value in options.items() if name != "traits"}
    arguments: dict[str, Any] = {"qk_rank": 2, **given}
    with pytest.raises(RewriteRefusedError, match=f"^truncate refused: {reason}"):
        maps_of_rank(weights, **arguments)
