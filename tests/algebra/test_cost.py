"""Counts from a writing's shapes, checked by hand where the numbers are known."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from triptych.core.algebra.cost import cached_numbers, maps_flops, pass_cost, writing_cost
from triptych.core.algebra.semantics import HeadGate, Semantics
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention import PARAMETERISATIONS, parameterisation

D, H, D_K, D_V, N = 512, 8, 64, 64, 100


def skeleton(
    name: str, d_model: int = D, num_heads: int = H, **options: int | bool | None
) -> AttentionWeights:
    return parameterisation(name, **options).skeleton(d_model, num_heads)


def test_one_heads_QK_form_costs_65_536_numbers_factored_and_262_144_as_one_matrix() -> None:
    factored, bilinear = skeleton("factored"), skeleton("bilinear")
    assert sum(link.num_parameters for link in (*factored.q, *factored.k)) // H == 65_536
    assert sum(link.num_parameters for link in (*bilinear.q, *bilinear.k)) // H == 262_144


@given(half=st.integers(1, 40), d_k=st.integers(1, 90), odd=st.booleans())
def test_factored_is_smaller_exactly_when_d_k_is_below_half_of_d_model(
    half: int, d_k: int, odd: bool
) -> None:
    d_model = 2 * half + odd
    factored, bilinear = (
        writing_cost(skeleton(name, d_model, 3, d_k=d_k, d_v=4)).parameters
        for name in ("factored", "bilinear")
    )
    assert (factored < bilinear) == (d_k < d_model / 2)


def test_the_papers_layer_costs_what_the_paper_says() -> None:
    cost = writing_cost(skeleton("factored"))
    assert cost.parameters == 4 * D * D
    assert cost.query_flops == 2 * D * D
    assert cost.memory_flops == 4 * D * D
    assert cost.output_flops == 2 * D * D
    assert cost.pair_flops == 2 * H * (D_K + D_V)
    assert cost.cached_numbers == 2 * D


@pytest.mark.parametrize(
    ("name", "query", "memory"),
    [
        ("symmetric", 0, 2 * 2 * D * D),
        ("shared", 0, 2 * D * D),
        ("key_value", 2 * D * D, 2 * D * D),
        ("direct", 0, 0),
        ("bilinear", 2 * H * D * D, 2 * D * D),
        ("stacked", 4 * D * D, 8 * D * D),
        ("latent", 2 * D * D, 2 * D * 128 + 2 * 128 * 2 * D),
        ("collaborative", 2 * D * D + H * D, 4 * D * D),
    ],
)
def test_a_map_that_serves_several_sides_is_applied_once(name: str, query: int, memory: int) -> None:
    cost = writing_cost(skeleton(name))
    assert (cost.query_flops, cost.memory_flops) == (query, memory)


def test_a_map_of_one_copy_is_applied_to_every_vector_that_enters() -> None:
    shared, own = Link(torch.ones(1, 6, 5)), Link(torch.ones(4, 5, 5))
    assert maps_flops(((shared, own),)) == 2 * 6 * 5 + 4 * 2 * 5 * 5
    assert maps_flops(((own, shared),)) == 4 * 2 * 5 * 5 + 4 * 2 * 6 * 5
    assert maps_flops(((shared,),), streams=4) == 4 * 2 * 6 * 5
    assert maps_flops(((shared,), (shared, own))) == maps_flops(((shared, own),))


# What of the input, queries, keys, values, heads and steps between is kept, by hand: numbers a token.
KEPT = {
    "factored": 5 * D,
    "bilinear": D + H * D + 2 * D,  # the keys are the input
    "stacked": D + 3 * D + 4 * D,
    "symmetric": 4 * D,
    "shared": 3 * D,
    "key_value": 4 * D,
    "four_matrix": 6 * D,
    "direct": 2 * D,
    "grouped": 3 * D + D_K + D_V,
    "differential": 3 * D + D_K + D_V + D // 2,  # the sum of a pair, which W_O reads
    "latent": 5 * D + 128,
    "collaborative": D + (D + H * D) + D + 2 * D,  # x W^Q, which the m_i multiply, and the queries
    "identity_query": 4 * D,  # a slice is a view of the input
    "identity_value": 4 * D,
    "identity_output": 5 * D,
    "identity_ov": 4 * D,
}


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_what_training_keeps_is_each_tensor_once(name: str) -> None:
    done = pass_cost(skeleton(name), N)
    assert done.kept_numbers == N * KEPT[name]
    assert done.pair_numbers == H * N * N


def test_gates_are_a_map_to_one_number_for_each_head() -> None:
    plain = skeleton("latent")
    gate = HeadGate(torch.empty(H, D, device="meta"), torch.empty(H, device="meta"))
    gated = replace(plain, semantics=replace(plain.semantics, gate=gate))
    assert writing_cost(gated).parameters - writing_cost(plain).parameters == H * (D + 1)
    assert writing_cost(gated).output_flops - writing_cost(plain).output_flops == 2 * H * D
    for route in ("expanded", "absorbed"):
        one, other = (pass_cost(weights, 3, cached=9, route=route) for weights in (gated, plain))  # type: ignore[arg-type]
        assert one.flops - other.flops == 3 * 2 * H * D
        assert one.weight_numbers - other.weight_numbers == H * (D + 1)


def test_all_is_moved_once_in_and_once_out() -> None:
    done = pass_cost(skeleton("factored"), N)
    assert done.weight_numbers == 4 * D * D
    assert done.moved_numbers == N * (D + 2 * 4 * D + D)
    step = pass_cost(skeleton("factored"), 1, cached=N - 1)
    assert step.moved_numbers == D + 2 * 4 * D + D + (N - 1) * 2 * D


def test_the_absorbed_route_moves_queries_to_the_latents() -> None:
    r, weights = 128, skeleton("latent")
    maps = 2 * D * D + 2 * D * r + 2 * D * D  # W_Q, W_D, W_O
    step = pass_cost(weights, 1, cached=N - 1)
    assert step.route == "absorbed"
    assert step.flops == maps + 2 * H * r * (D_K + D_V) + N * 2 * H * 2 * r
    assert step.moved_numbers == D + 2 * (D + r + 2 * H * r + D) + D + (N - 1) * r
    expanded = pass_cost(weights, 1, cached=N - 1, route="expanded")
    assert expanded.flops == maps + N * 2 * H * r * (D_K + D_V) + N * 2 * H * (D_K + D_V)
    # The keys and values of all tokens are rebuilt: written and read.
    assert expanded.moved_numbers == D + 2 * (D + r + D + N * 2 * D) + D + (N - 1) * r


@given(
    d_latent=st.integers(1, 40),
    query_len=st.integers(1, 12),
    cached=st.integers(0, 12),
    d_k=st.integers(1, 9),
)
def test_the_route_counted_is_the_one_that_the_layer_takes(
    d_latent: int, query_len: int, cached: int, d_k: int
) -> None:
    chosen = parameterisation("latent", d_latent=d_latent, d_k=d_k, d_v=3)
    with torch.device("meta"):
        projections = chosen.build(12, 2)
    done = pass_cost(projections.weights(), query_len, cached=cached)
    assert done.route == projections.route(query_len, cached + query_len)


def test_only_a_writing_that_stores_less_than_keys_and_values_can_absorb() -> None:
    for name in PARAMETERISATIONS:
        if name == "latent":
            assert pass_cost(skeleton(name), 1, cached=5, route="absorbed").route == "absorbed"
            continue
        assert pass_cost(skeleton(name), 1, cached=5000).route == "expanded"
        with pytest.raises(ValueError, match="nothing to absorb"):
            pass_cost(skeleton(name), 1, cached=5, route="absorbed")


def test_more_cached_than_there_is_is_refused() -> None:
    with pytest.raises(ValueError, match="7 tokens are cached, but the memory has 6"):
        pass_cost(skeleton("factored"), 2, cached=7, memory_len=6)


def test_a_memory_that_is_cached_needs_neither_its_maps_nor_its_tokens() -> None:
    weights = skeleton("factored", k_bias=True, q_bias=True, o_bias=True)
    fresh = pass_cost(weights, 3, memory_len=N)
    again = pass_cost(weights, 3, memory_len=N, cached=N)
    assert fresh.weight_numbers == weights.num_parameters
    assert again.weight_numbers == 2 * D * D + 2 * D
    assert fresh.flops - again.flops == N * 4 * D * D
    assert fresh.moved_numbers - again.moved_numbers == N * (D + 2 * 2 * D) - N * 2 * D


def test_queries_made_by_the_keys_map_are_made_anew_for_another_sequence() -> None:
    weights = skeleton("symmetric")
    alone, across = pass_cost(weights, N), pass_cost(weights, N, memory_len=N)
    assert across.flops - alone.flops == N * 2 * D * D


def test_what_is_cached_is_what_keys_and_values_have_in_common_and_what_not() -> None:
    def link(copies: int, d_in: int, d_out: int) -> Link:
        return Link(torch.ones(copies, d_in, d_out))

    down, up, other = link(1, 6, 2), link(2, 2, 3), link(2, 6, 3)
    o = (link(2, 3, 6),)

    def cached(k: tuple[Link, ...], v: tuple[Link, ...]) -> int:
        return cached_numbers(AttentionWeights(6, 2, (other,), k, v, o, Semantics(1.0)))

    assert cached((other,), (link(2, 6, 3),)) == 12
    assert cached((other,), (other,)) == 6
    assert cached((down, up), (down, link(2, 2, 3))) == 2
    assert cached((down,), (down, up)) == 2
    assert cached((), ()) == 6
    assert cached((), (other,)) == 12
    assert cached((down, up), (other,)) == 12


def chained(copies: int, d_in: int, d_out: int) -> Link:
    return Link(torch.ones(copies, d_in, d_out))


def test_a_map_of_a_group_is_applied_for_each_of_its_heads_in_the_absorbed_route() -> None:
    down, up_k, up_v = chained(1, 6, 2), chained(2, 2, 3), chained(2, 2, 5)
    weights = AttentionWeights(
        6, 4, (chained(4, 6, 3),), (down, up_k), (down, up_v), (chained(4, 5, 6),), Semantics(1.0)
    )
    step = pass_cost(weights, 1, cached=9, route="absorbed")
    maps = 2 * (4 * 6 * 3 + 6 * 2 + 4 * 5 * 6)
    assert step.flops == maps + 2 * 4 * 2 * (3 + 5) + 10 * 2 * 4 * (2 + 2)
    # Each group's keys and values are rebuilt once.
    expanded = pass_cost(weights, 1, cached=9, route="expanded")
    assert expanded.flops == maps + 10 * 2 * 2 * 2 * (3 + 5) + 10 * 2 * 4 * (3 + 5)


def test_queries_by_the_keys_map_are_made_besides_the_keys_that_are_rebuilt() -> None:
    down, up_k, up_v = chained(1, 6, 2), chained(2, 2, 3), chained(2, 2, 3)
    weights = AttentionWeights(
        6, 2, (down, up_k), (down, up_k), (down, up_v), (chained(2, 3, 6),), Semantics(1.0)
    )
    step = pass_cost(weights, 1, cached=9, route="expanded")
    rebuilt = 10 * 2 * 2 * 2 * (3 + 3)
    assert step.flops == 2 * 6 * 2 + 2 * 2 * 2 * 3 + rebuilt + 10 * 2 * 2 * (3 + 3) + 2 * 2 * 3 * 6
    # Without a cache the new tokens are all there are, and what both need is made once.
    whole = pass_cost(weights, 4, route="expanded")
    assert whole.flops == 4 * (2 * 6 * 2 + 2 * 2 * 2 * (3 + 3) + 4 * 2 * 2 * (3 + 3) + 2 * 2 * 3 * 6)
