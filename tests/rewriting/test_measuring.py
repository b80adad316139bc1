"""What is measured of a rewritten layer: moves and errors, against the layers' own outputs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from triptych.core.algebra.function import run_layer
from triptych.core.algebra.norm_folding import fold_norm
from triptych.core.algebra.semantics import Semantics
from triptych.core.algebra.weights import AttentionWeights, Link, Norm
from triptych.core.checkpoints.stored_layers import AttentionLayer, Site
from triptych.rewriting.certificate import Measured, Probes
from triptych.rewriting.measuring import measure_change, measure_map, total_errors

D, HEADS, WIDTH = 12, 4, 3
PROBES = Probes(count=3, length=5, seed=11)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def weights_of(norm: Norm | None) -> AttentionWeights:
    return AttentionWeights(
        d_model=D,
        num_heads=HEADS,
        q=(Link(drawn(HEADS, D, WIDTH), drawn(HEADS, WIDTH)),),
        k=(Link(drawn(HEADS, D, WIDTH), drawn(HEADS, WIDTH)),),
        v=(Link(drawn(HEADS, D, WIDTH), drawn(HEADS, WIDTH)),),
        o=(Link(drawn(HEADS, WIDTH, D)),),
        o_bias=drawn(D),
        norm=norm,
        semantics=Semantics(0.5),
    )


def layer_of(weights: AttentionWeights) -> AttentionLayer:
    return AttentionLayer(Site("encoder", 0, "self", "layer"), weights, ())


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_a_norm_that_is_folded_moves_nothing_whatever_it_stores(offset: float, shifted: bool) -> None:
    before = weights_of(Norm(drawn(D), drawn(D) if shifted else None, offset))
    folded = measure_change(layer_of(before), layer_of(fold_norm(before).weights), PROBES)
    assert folded.relative < 1e-13
    assert before.norm is not None
    forgotten = replace(before, norm=replace(before.norm, offset=1.0 - offset))
    assert measure_change(layer_of(before), layer_of(forgotten), PROBES).relative > 0.05


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_so_with_a_map_that_reads_the_norm(offset: float, shifted: bool) -> None:
    norm, weight, bias = Norm(drawn(D), drawn(D) if shifted else None, offset), drawn(7, D), drawn(7)
    neutral = Norm(torch.zeros_like(norm.weight) if offset else torch.ones_like(norm.weight), None, offset)
    moved = bias if norm.bias is None else bias + weight @ norm.bias
    folded = measure_map(norm, neutral, (weight, bias), (weight * (norm.weight + offset), moved), PROBES)
    assert total_errors([folded]).relative < 1e-13
    forgotten = measure_map(norm, neutral, (weight, bias), (weight * norm.weight, moved), PROBES)
    assert (total_errors([forgotten]).relative > 0.05) == bool(offset)


def on_probes(weights: AttentionWeights, dtype: torch.dtype) -> Tensor:
    """The output on the probes, which are drawn here as they are described."""
    x = torch.randn(3, 5, D, dtype=torch.float64, generator=torch.Generator().manual_seed(11))
    x = x - x.mean(-1, keepdim=True)
    x = x / x.square().mean(-1, keepdim=True).sqrt()
    return run_layer(weights.to(dtype), x.to(dtype)).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_error_is_set_beside_that_of_the_original_in_its_own_dtype(dtype: torch.dtype) -> None:
    before = weights_of(None).to(dtype)
    (q,) = before.q
    coarser = q.weight.double() * (1 + 64 * torch.finfo(dtype).eps * drawn(*q.weight.shape))
    after = replace(before, q=(replace(q, weight=coarser.to(dtype)),))
    found = measure_change(layer_of(before), layer_of(after), PROBES)
    exact = on_probes(before, torch.float64)
    own, new = (float((on_probes(one, dtype) - exact).norm()) for one in (before, after))
    assert found.error_ratio == pytest.approx(new / own, rel=1e-6)
    assert found.error_ratio > 3
    moved = on_probes(after, torch.float64) - exact
    assert found.relative == pytest.approx(float(moved.norm() / exact.norm()), rel=1e-6)
    assert found.worst_absolute == pytest.approx(float(moved.abs().max()), rel=1e-6)
    same = measure_change(layer_of(before), layer_of(before), PROBES)
    assert (same.error_ratio, same.relative) == (1.0, 0.0)


def test_errors_of_several_maps_are_those_of_their_outputs_side_by_side() -> None:
    norm = Norm(torch.ones(D, dtype=torch.bfloat16), None)
    maps = [(drawn(rows, D).bfloat16(), drawn(rows).bfloat16()) for rows in (4, 9)]
    changed = [((1.02 * weight).bfloat16(), bias) for weight, bias in maps]
    whole = [tuple(torch.cat(parts) for parts in zip(*side, strict=True)) for side in (maps, changed)]
    apart = total_errors(
        [measure_map(norm, norm, one, other, PROBES) for one, other in zip(maps, changed, strict=True)]
    )
    together = total_errors([measure_map(norm, norm, whole[0], whole[1], PROBES)])  # type: ignore[arg-type]
    for name in ("worst_absolute", "relative", "error_ratio"):
        assert getattr(apart, name) == pytest.approx(getattr(together, name), rel=1e-9)
    assert 2 < apart.error_ratio < 50
    assert isinstance(apart, Measured)
