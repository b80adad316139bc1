"""A norm's gain and shift in the maps that read it, and what else may read it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import (
    D_MODEL,
    LENGTH,
    assert_same_function,
    make_layer,
    make_norm,
    random_input,
    storages,
    with_semantics,
)
from tolerances import assert_same
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.norm_folding import (
    OtherReaders,
    fold_norm,
    fold_norm_into_map,
    require_readers_foldable,
)
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import HeadGate, HeadNorm, Semantics
from triptych.core.algebra.weights import AttentionWeights, Link, Norm, Side
from triptych.core.attention.projections import PARAMETERISATIONS
from triptych.rewriting.functions.folding import expand

# A fixed map takes up nothing.
FIXED = {"direct": "q", "identity_query": "q", "identity_value": "v", "identity_ov": "v"}
NAMES = tuple(name for name in PARAMETERISATIONS if name not in FIXED)


def make(
    name: str, kind: Any = "self", *, biased: bool = True, shifted: bool = True, offset: float = 0.0
) -> AttentionWeights:
    """A layer behind a norm, its memory behind another."""
    weights = make_layer(name, biased=biased).weights(kind)
    memory_norm = make_norm(shifted=shifted) if kind == "cross" else None
    return replace(weights, norm=make_norm(offset, shifted=shifted), memory_norm=memory_norm)


@pytest.mark.parametrize(("biased", "shifted"), [(False, True), (True, False), (False, False)])
@pytest.mark.parametrize("kind", ["self", "cross"])
@pytest.mark.parametrize("name", NAMES)
def test_the_maps_take_up_gain_and_shift(name: str, kind: str, biased: bool, shifted: bool) -> None:
    weights = make(name, kind, biased=biased, shifted=shifted)
    result, record = fold_norm(weights)
    assert result.norm is None
    assert result.memory_norm is None
    assert record.tier == "rounding-exact"
    assert_same_function(weights, result)
    assert len(set(storages(result))) == len(list(result.links()))
    if not (biased or shifted):
        assert all(result.head_bias(side) is None for side in ("q", "k", "v"))


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_gates_take_up_gain_and_shift(shifted: bool, biased: bool) -> None:
    weights = make("grouped", "causal", shifted=shifted)
    drawn = torch.randn(4, 25, dtype=torch.float64)
    gate = HeadGate(drawn[:, 1:], drawn[:, 0] if biased else None)
    weights = replace(weights, semantics=replace(weights.semantics, gate=gate))
    (folded, record), norm, x = fold_norm(weights), weights.norm, random_input(LENGTH)
    assert norm is not None
    assert record.notes[-1] == "the gates of the heads read the norm as well, and take it up"
    normed = x * norm.weight if norm.bias is None else x * norm.weight + norm.bias
    assert_same(run_layer(folded, x), run_layer(weights, normed), kind="output")


@pytest.mark.parametrize("side", ["norm", "memory_norm"])
@pytest.mark.parametrize("name", NAMES)
def test_of_two_norms_either_may_be_missing(name: str, side: str) -> None:
    weights = make(name, "cross")
    one: dict[str, Any] = {"norm": None, "memory_norm": None, side: getattr(weights, side)}
    weights = replace(weights, **one)
    result = fold_norm(weights).weights
    assert result.norm is result.memory_norm is None
    assert_same_function(weights, result)


def test_a_gain_stored_relative_to_one_is_converted() -> None:
    weights = make("factored", offset=1.0)
    result, record = fold_norm(weights)
    assert_same_function(weights, result)
    assert record.notes == ("of the norm a gain of 1 (stored as 0) and no shift are left",)
    assert weights.norm is not None
    W_Q = (1 + weights.norm.weight)[:, None] * weights.W_Q
    assert_same(result.W_Q, W_Q, kind="output")


def test_the_shift_passes_the_map_as_it_was_before() -> None:
    weights = make("factored")
    assert weights.norm is not None
    assert weights.norm.bias is not None
    old_bias = weights.head_bias("v")
    assert old_bias is not None
    assert_same(
        fold_norm(weights).weights.head_bias("v"), weights.norm.bias @ weights.W_V + old_bias, kind="output"
    )


def test_a_shift_of_zeros_needs_no_bias() -> None:
    weights = make("grouped", biased=False)
    assert weights.norm is not None
    still = replace(weights.norm, bias=torch.zeros(D_MODEL, dtype=torch.float64))
    result = fold_norm(with_semantics(replace(weights, norm=still), bias_slots=frozenset())).weights
    assert result.head_bias("q") is result.head_bias("k") is result.head_bias("v") is None


def test_what_is_shared_stays_shared() -> None:
    for name, one, other in (("symmetric", "q", "k"), ("key_value", "k", "v"), ("shared", "q", "v")):
        assert fold_norm(make(name)).weights.tied(one, other)
    latent = fold_norm(make("latent")).weights
    assert latent.k[0] is latent.v[0]
    assert fold_norm(make("key_value", "cross")).weights.tied("k", "v")


def test_queries_part_from_keys_that_read_another_norm() -> None:
    result, record = fold_norm(make("shared", "cross"))
    assert not result.tied("q", "k")
    assert result.tied("k", "v")
    assert record.notes[0] == "q shared a map with k and v, which read another norm: it has its own now"
    assert fold_norm(make("symmetric")).record.notes[0].startswith("of the norm")


def test_only_the_first_map_of_a_chain_changes() -> None:
    weights = make("stacked")
    result = fold_norm(weights).weights
    assert result.q[1] is weights.q[1]
    assert result.o is weights.o
    parted = replace(weights, k=(replace(weights.k[0], norm=HeadNorm(1e-6)), weights.k[1]))
    assert fold_norm(parted).weights.k[0].norm is not None


def test_one_matrix_takes_the_gain_on_both_sides() -> None:
    weights = make("bilinear", shifted=False, biased=False)
    assert weights.norm is not None
    gain = weights.norm.weight
    expected = gain[:, None] * weights.q[0].weight * gain
    assert_same(fold_norm(weights).weights.q[0].weight, expected, kind="output")
    # A value map that is the query map, too, takes it on one side only.
    tied = replace(weights, v=weights.q, o=make_layer("factored", biased=False, d_v=D_MODEL).weights().o)
    assert_same_function(tied, fold_norm(tied).weights)


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        ({"norm_place": "post"}, "post-norm: the residual carries its gain"),
        ({"norm_place": "sandwich"}, "sandwich"),
        ({"other_norm_readers": "the feed-forward layer"}, "also read by the feed-forward layer"),
        ({"bias_slots": frozenset("qo")}, "no bias slot on k and v for the shift"),
        ({"bias_slots": frozenset("kvo")}, "no bias slot on q for the shift"),
    ],
)
def test_a_norm_that_cannot_be_folded_stays(traits: dict[str, Any], reason: str) -> None:
    with pytest.raises(RewriteRefusedError, match=f"^fold_norm refused: .*{reason}"):
        fold_norm(with_semantics(make("factored"), **traits))


def test_without_a_norm_there_is_nothing_to_fold() -> None:
    weights = make_layer("factored", biased=True).weights("self")
    with pytest.raises(RewriteRefusedError, match="there is nothing to fold"):
        fold_norm(weights)
    with pytest.raises(RewriteRefusedError, match="there is nothing to fold"):
        fold_norm(replace(weights, memory_norm=make_norm()))


@pytest.mark.parametrize("name", FIXED)
def test_a_fixed_map_takes_up_nothing_until_it_is_expanded(name: str) -> None:
    weights = make(name)
    reason = f"{FIXED[name]} reads the norm through a fixed map.*; expand it first"
    with pytest.raises(RewriteRefusedError, match=reason):
        fold_norm(weights)
    assert_same_function(weights, fold_norm(expand(weights).weights).weights)


@pytest.mark.parametrize("side", ["q", "v"])
def test_a_side_without_a_map_takes_up_nothing(side: Side) -> None:
    empty: dict[str, Any] = {side: ()}
    with pytest.raises(RewriteRefusedError, match=f"{side} is the norm's output itself"):
        fold_norm(replace(make("factored"), **empty))


@pytest.mark.parametrize(
    ("traits", "reason"),
    [
        ({"soft_cap": 30.0}, "its shift β would be their bias, and the scores are soft-capped at ±30"),
        ({"sinks": True}, "its shift β would be their bias, and .*a sink"),
    ],
)
def test_where_the_input_is_the_key_its_shift_is_a_key_bias(traits: dict[str, Any], reason: str) -> None:
    with pytest.raises(RewriteRefusedError, match=reason):
        fold_norm(with_semantics(make("bilinear"), **traits))
    assert fold_norm(with_semantics(make("bilinear", shifted=False), **traits)).weights.norm is None


def test_where_the_input_is_the_key_nothing_may_stand_between_it_and_the_queries() -> None:
    weights = make("bilinear")
    with pytest.raises(RewriteRefusedError, match="the keys are the input itself, and under rotary"):
        fold_norm(with_semantics(weights, positions="rotary"))
    with pytest.raises(RewriteRefusedError, match=r"queries and keys are normalised .*\(QK-norm\)"):
        fold_norm(with_semantics(weights, qk_norm=True))
    with pytest.raises(RewriteRefusedError, match="there is a norm after map 1 of q"):
        fold_norm(replace(weights, q=(replace(weights.q[0], norm=HeadNorm(1e-6)),)))


def test_a_norm_of_a_self_attentions_memory_is_no_concern_of_it() -> None:
    other = Norm(torch.ones(D_MODEL, dtype=torch.float64))
    assert fold_norm(replace(make("factored"), memory_norm=other)).weights.memory_norm is other


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("shape", [(7, D_MODEL), (3, 7, D_MODEL)])
def test_a_map_outside_the_attention_takes_up_gain_and_shift(shape: tuple[int, ...], offset: float) -> None:
    norm, weight, bias = make_norm(offset), torch.randn(shape).double(), torch.randn(shape[:-1]).double()
    assert norm.bias is not None
    x = torch.randn(5, D_MODEL).double()
    folded, shifted = fold_norm_into_map(norm, weight, bias)
    assert shifted is not None
    expected = (x * (norm.weight + offset) + norm.bias) @ weight.mT + bias[..., None, :]
    assert_same(x @ folded.mT + shifted[..., None, :], expected, kind="output")


def test_a_map_without_a_bias_takes_up_a_gain_and_a_shift_of_zeros_only() -> None:
    weight = torch.randn(7, D_MODEL).double()
    norm = make_norm(shifted=False)
    for shift in (None, torch.zeros(D_MODEL).double()):
        folded, bias = fold_norm_into_map(replace(norm, bias=shift), weight, None)
        assert bias is None
        assert torch.equal(folded, weight * norm.weight)
    with pytest.raises(RewriteRefusedError, match="no bias slot for the shift"):
        fold_norm_into_map(make_norm(), weight, None)
    with pytest.raises(RewriteRefusedError, match="no bias slot on up for the shift"):
        require_readers_foldable("pre", make_norm(), {"gate": True, "up": False})


def test_a_layer_takes_up_a_norm_along_with_what_else_reads_it_or_not_at_all() -> None:
    weights = with_semantics(make("factored"), other_norm_readers="the feed-forward")
    result, record = fold_norm(weights, OtherReaders(("fc_in",)))
    assert result.norm is None
    assert "what else reads the norm takes it up as well: fc_in" in record.checked
    with pytest.raises(RewriteRefusedError, match="which cannot take it up: it is packed"):
        fold_norm(weights, OtherReaders(("fc_in",), "it is packed"))


@pytest.mark.parametrize("per_head", [False, True])
def test_the_shift_of_a_norm_between_maps_goes_into_the_map_behind_it(per_head: bool) -> None:
    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    own = (4, 6) if per_head else (6,)
    norm = HeadNorm(1e-6, drawn(*own) + 1.5, drawn(*own), centred=True)
    down = Link(drawn(4 if per_head else 1, D_MODEL, 6) / 4, None, norm)
    k, v = (down, Link(drawn(4, 6, 4))), (down, Link(drawn(4, 6, 4), drawn(4, 4)))
    q, o = (Link(drawn(4, D_MODEL, 4)),), (Link(drawn(4, 4, D_MODEL)),)
    weights, x = AttentionWeights(D_MODEL, 4, q, k, v, o, Semantics(0.5)), random_input(5)
    folded = fold_norm(weights).weights
    assert folded.k[0] is folded.v[0]
    assert not folded.k[0].norm.tensors()
    torch.testing.assert_close(run_layer(folded, x), run_layer(weights, x), rtol=0, atol=1e-10)
    slotless = replace(weights, bias_slots=frozenset("qvo"))
    with pytest.raises(RewriteRefusedError, match="no bias slot on k for the shift"):
        fold_norm(slotless)
