"""Large layers rewritten a few groups of heads at a time: as the whole layer, and refused as a whole."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from triptych.algebra.function import attend
from triptych.algebra.positions import RotaryEmbedding
from triptych.algebra.rewrites import (
    EXACT,
    DropKeyBias,
    FoldNorm,
    FoldValueBias,
    GaugeFix,
    Layer,
    LayerRewrite,
    MergeKVHeads,
    PruneHeads,
    RepeatKVHeads,
    RewriteRefusedError,
    Rewritten,
    SortHeads,
    Truncate,
)
from triptych.algebra.semantics import HeadGate, Semantics
from triptych.algebra.weights import AttentionWeights, Link, Norm
from triptych.checkpoints.layer import AttentionLayer, Site
from triptych.rewriting.certificate import StepRecord
from triptych.rewriting.layers import RewrittenLayer, rewrite_layer, rewritten_parts
from triptych.rewriting.measuring import move_of_forms

HEADS, D, WIDTH = 8, 24, 6
FEW, ALL = 1, 1 << 40  # numbers: one group of heads at a time, and the layer at once


def layer_of(groups: int, *, rotary: bool = False, dead: Sequence[int] = (), seed: int = 0) -> AttentionLayer:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    output = draw(HEADS, WIDTH, D)
    output[list(dead)] = 0
    weights = AttentionWeights(
        d_model=D,
        num_heads=HEADS,
        q=(Link(draw(HEADS, D, WIDTH), draw(HEADS, WIDTH)),),
        k=(Link(draw(groups, D, WIDTH), draw(groups, WIDTH)),),
        v=(Link(draw(groups, D, WIDTH), draw(groups, WIDTH)),),
        o=(Link(output),),
        o_bias=draw(D),
        semantics=Semantics(
            scale=0.4,
            kind="causal",
            rotary=RotaryEmbedding(torch.tensor([1.0, 0.1, 0.01])) if rotary else None,
        ),
    )
    return AttentionLayer(Site("decoder", 0, "causal", "layer"), weights, ())


def gated(read: AttentionLayer) -> AttentionLayer:
    """The same layer with gates, behind a norm."""
    drawn = torch.randn(HEADS + 2, D + 1, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    gate, norm = HeadGate(drawn[:HEADS, 1:], drawn[:HEADS, 0]), Norm(drawn[-2, 1:] + 1, drawn[-1, 1:])
    semantics = replace(read.weights.semantics, gate=gate)
    return replace(read, weights=replace(read.weights, semantics=semantics, norm=norm))


def both(
    read: AttentionLayer, *steps: LayerRewrite, skip_refused: bool = False
) -> tuple[RewrittenLayer, RewrittenLayer]:
    """At once and in parts."""
    whole, parts = (
        rewrite_layer(read, steps, skip_refused=skip_refused, most_numbers=most) for most in (ALL, FEW)
    )
    return whole, parts


def assert_alike(whole: RewrittenLayer, parts: RewrittenLayer) -> None:
    assert parts.kept == whole.kept
    assert [words_of(record) for record in parts.records] == [words_of(record) for record in whole.records]
    for one, other in zip(parts.records, whole.records, strict=True):
        assert one.bound == pytest.approx(other.bound, rel=1e-9, abs=1e-9)
    assert parts.weights.num_parameters == whole.weights.num_parameters
    for mine, theirs in zip(parts.weights.tensors(), whole.weights.tensors(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


def words_of(record: StepRecord) -> StepRecord:
    return record.model_copy(update={"bound": 0.0})


RECIPES: dict[str, tuple[LayerRewrite, ...]] = {
    "exact": EXACT,
    "one head": (FoldValueBias(), PruneHeads(number=1), GaugeFix()),
    "heads of one group": (PruneHeads(heads=(0, 1)), GaugeFix()),
    "heads of several groups": (FoldValueBias(), PruneHeads(heads=(1, 2, 7)), Truncate(rank=3)),
    "nearly all heads": (DropKeyBias(), PruneHeads(number=7), SortHeads()),
    "rank": (FoldValueBias(), Truncate(rank=3)),
    "rank with a value bias": (Truncate(rank=4), GaugeFix()),
    "rank that cuts nothing": (Truncate(rank=6), SortHeads()),
    "sorted and repeated": (SortHeads(), RepeatKVHeads()),
    "heads that are gone, sorted": (PruneHeads(heads=(3,)), SortHeads()),
}


@pytest.mark.parametrize("groups", [8, 4, 2])
@pytest.mark.parametrize("name", RECIPES)
def test_groups_of_heads_come_out_as_in_the_whole_layer(name: str, groups: int) -> None:
    whole, parts = both(layer_of(groups, dead=(2,)), *RECIPES[name], skip_refused=True)
    assert_alike(whole, parts)


@pytest.mark.parametrize("name", ["exact", "nearly all heads", "heads that are gone, sorted"])
def test_gates_of_groups_of_heads_come_out_as_in_the_whole_layer(name: str) -> None:
    read = gated(layer_of(4, dead=(2,)))
    whole, parts = both(read, FoldNorm(), *RECIPES[name], skip_refused=True)
    assert_alike(whole, parts)
    assert whole.weights.norm is None
    for mine, theirs in zip(
        parts.weights.semantics.tensors(), whole.weights.semantics.tensors(), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-9)


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("rotary", ["maps", "pairs"])
def test_rotary_heads_are_cut_group_by_group_as_together(rotary: Any, groups: int) -> None:
    read = layer_of(groups, rotary=True)
    whole, parts = both(read, Truncate(rank=2, rotary=rotary), GaugeFix(forms=("ov",)))
    assert_alike(whole, parts)
    assert parts.records[0].bound > 0


@pytest.mark.parametrize("groups", [8, 2])
@pytest.mark.parametrize("spread", [{"budget": 0.4}, {"energy": 0.8}])
@pytest.mark.parametrize("before", [(), (FoldValueBias(), PruneHeads(number=2))])
def test_a_budget_is_shared_out_over_groups_as_over_the_layer(
    before: tuple[LayerRewrite, ...], spread: dict[str, float], groups: int
) -> None:
    read = layer_of(groups)
    step = Truncate(**spread)
    ready = [
        step.prepare(rewritten_parts(read, before, skip_refused=False, most_numbers=most))
        for most in (ALL, FEW)
    ]
    assert ready[0].ranks == ready[1].ranks
    assert set(ready[0].ranks["decoder 0"]) == {"qk", "ov"}
    assert_alike(*both(read, *before, ready[0]))


def numbers_of(layers: Sequence[AttentionWeights]) -> int:
    """Of the maps, without biases: what channels cost."""
    return sum(link.weight.numel() for weights in layers for link in weights.links())


@pytest.mark.parametrize("budget", [0.3, 0.6, 0.85])
def test_a_budget_holds_where_some_layers_share_keys_and_values_and_others_do_not(budget: float) -> None:
    """A channel that eight heads share costs nine maps a column, one of a head of its own two."""
    read = [layer_of(groups, seed=groups) for groups in (8, 1, 2)]
    given = [Layer(f"layer {place}", one.weights) for place, one in enumerate(read)]
    step = Truncate(budget=budget).prepare(given)
    before = numbers_of([layer.weights for layer in given])
    kept = 0
    for layer, groups in zip(given, (8, 1, 2), strict=True):
        for ranks in step.ranks[layer.name].values():
            assert len(ranks) == groups
            kept += sum(ranks) * D * (HEADS // groups + 1)
    assert kept <= budget * before
    assert kept > budget * before - D * (HEADS + 1)  # not a channel more would have been paid for


def test_what_a_step_needs_of_a_large_layer_comes_in_parts() -> None:
    read = layer_of(4)
    layers = list(rewritten_parts(read, (PruneHeads(heads=(0, 1, 2)),), skip_refused=False, most_numbers=FEW))
    assert [layer.weights.num_heads for layer in layers] == [1, 2, 2]
    assert [layer.first_head for layer in layers] == [0, 1, 3]


@pytest.mark.parametrize("groups", [8, 2])
def test_heads_are_sorted_by_size_within_their_groups_and_groups_by_theirs(groups: int) -> None:
    read = layer_of(groups)
    done = rewrite_layer(read, (SortHeads(),), skip_refused=False, most_numbers=ALL)
    sizes = done.weights.to(torch.float64).ov.norm().view(groups, HEADS // groups)
    assert bool((sizes.diff(dim=1) <= 0).all())
    assert bool((sizes.norm(dim=1).diff() <= 0).all())
    assert sorted(sizes.flatten().tolist()) == pytest.approx(sorted(read.weights.ov.norm().tolist()))
    assert done.kept is not None
    assert sorted(done.kept) == list(range(HEADS))


def test_heads_that_are_gone_leave_what_their_value_bias_adds() -> None:
    read = layer_of(8)
    (done,) = (
        rewrite_layer(read, (FoldValueBias(), PruneHeads(heads=(0,))), skip_refused=False, most_numbers=FEW),
    )
    x = torch.randn(1, 5, D, dtype=torch.float64)
    weights = read.weights
    silent = replace(weights, v=(replace(weights.v[0], weight=weights.v[0].weight.clone()),))
    silent.v[0].weight[0] = 0
    torch.testing.assert_close(attend(done.weights, x), attend(silent, x))


class Fussy(LayerRewrite):
    """Doubles the output of heads, but for those with a number of which it will not have it."""

    name = "fussy"
    tier = "bounded"
    place = 6
    by_groups = True

    first_head: int

    def apply(self, layer: Layer) -> Rewritten:
        if layer.first_head <= self.first_head < layer.first_head + layer.weights.num_heads:
            raise RewriteRefusedError("fussy", f"head {self.first_head} will not have it")
        done = GaugeFix(forms=("ov",)).apply(layer)
        (o,) = done.weights.o
        return Rewritten(replace(done.weights, o=(replace(o, weight=2 * o.weight),)), done.record)


@pytest.mark.parametrize("head", [0, 3, 7])
def test_a_step_that_some_heads_refuse_is_left_out_for_all(head: int) -> None:
    read = layer_of(8)
    after = (FoldValueBias(), SortHeads())
    without = rewrite_layer(read, after, skip_refused=True, most_numbers=FEW)
    found = rewrite_layer(
        read, (after[0], Fussy(first_head=head), after[1]), skip_refused=True, most_numbers=FEW
    )
    assert [record.refused for record in found.records] == ["", f"head {head} will not have it", ""]
    assert (found.records[0], found.records[2]) == without.records
    for mine, theirs in zip(found.weights.tensors(), without.weights.tensors(), strict=True):
        assert torch.equal(mine, theirs)
    with pytest.raises(RewriteRefusedError, match=f"fussy at decoder 0 refused: head {head} will"):
        rewrite_layer(read, (Fussy(first_head=head),), skip_refused=False, most_numbers=FEW)


def test_parts_that_are_looked_at_before_a_step_leave_out_what_any_refuses() -> None:
    read = layer_of(8)
    found = list(rewritten_parts(read, (Fussy(first_head=5),), skip_refused=True, most_numbers=FEW))
    for head, layer in enumerate(found):
        assert torch.equal(layer.weights.o[0].weight[0], read.weights.o[0].weight[head])


def test_a_step_that_does_something_to_some_heads_only_is_of_the_tier_of_those() -> None:
    read = layer_of(8, dead=(2,))
    whole, parts = both(read, PruneHeads(), GaugeFix())
    assert parts.records[0].tier == whole.records[0].tier == "rounding-exact"
    assert parts.records[0].choice == "1 of 8 heads left out: 2"


def test_number_of_heads_that_a_layer_has_not_is_refused_in_parts_too() -> None:
    with pytest.raises(RewriteRefusedError, match="number is 8, and there are 8 heads"):
        rewrite_layer(layer_of(8), (PruneHeads(number=8),), skip_refused=False, most_numbers=FEW)
    done = rewrite_layer(
        layer_of(8), (PruneHeads(number=8), SortHeads()), skip_refused=True, most_numbers=FEW
    )
    assert [bool(record.refused) for record in done.records] == [True, False]


def test_heads_that_keep_different_widths_are_as_wide_as_the_widest() -> None:
    read = layer_of(8)
    step = Truncate(forms=("qk",), budget=0.4).model_copy(
        update={"ranks": {"decoder 0": {"qk": (1, 2, 3, 4, 1, 1, 1, 1)}}}
    )
    whole, parts = both(read, step)
    assert_alike(whole, parts)
    assert parts.weights.q[0].d_out == 4
    assert not parts.weights.q[0].weight[0, :, 1:].any()


def test_heads_of_which_some_cannot_carry_their_value_bias_all_give_it_to_the_output() -> None:
    step = Truncate(forms=("ov",), budget=0.4).model_copy(
        update={"ranks": {"decoder 0": {"ov": (6, 2, 6, 6, 6, 6, 6, 6)}}}
    )
    whole, parts = both(layer_of(8), step)
    assert whole.weights.v[0].bias is None
    assert_alike(whole, parts)


@pytest.mark.parametrize("rotary", [False, True])
def test_forms_of_a_layer_in_parts_have_moved_as_far_as_in_one(rotary: bool) -> None:
    read = layer_of(4, rotary=rotary)
    done = rewrite_layer(read, (Truncate(rank=2),), skip_refused=False, most_numbers=ALL)
    after = replace(read, weights=done.weights)
    whole, parts = (move_of_forms(read, after, most_numbers=most) for most in (ALL, FEW))
    assert whole == pytest.approx(parts, rel=1e-12)
    assert whole == pytest.approx(done.records[0].bound, rel=0.1)


def test_heads_are_merged_in_the_whole_layer() -> None:
    assert_alike(*both(layer_of(4), MergeKVHeads(num_kv_heads=2), GaugeFix()))
