"""Heads taken out of a layer, and put together again."""

import pytest
import torch

from heads import with_semantics
from triptych.algebra.function import attend
from triptych.algebra.positions import ALiBi, RelativePositionBias
from triptych.algebra.semantics import HeadGate, HeadNorm, Semantics
from triptych.algebra.slices import groups_of, heads_of, joined, separable
from triptych.algebra.weights import AttentionWeights, Link

HEADS, GROUPS, D, WIDTH = 6, 3, 10, 4


def grouped(seed: int = 0) -> AttentionWeights:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return AttentionWeights(
        d_model=D,
        num_heads=HEADS,
        q=(Link(draw(HEADS, D, WIDTH), draw(HEADS, WIDTH)),),
        k=(Link(draw(GROUPS, D, WIDTH), draw(GROUPS, WIDTH)),),
        v=(Link(draw(GROUPS, D, WIDTH), draw(GROUPS, WIDTH)),),
        o=(Link(draw(HEADS, WIDTH, D)),),
        o_bias=draw(D),
        semantics=Semantics(0.5, "causal"),
    )


SCORINGS = {
    "plain": {},
    "slopes": {"bias": ALiBi(torch.rand(HEADS, dtype=torch.float64))},
    "table": {"bias": RelativePositionBias(torch.randn(8, HEADS, dtype=torch.float64), True, 16)},
    "sinks": {"sinks": torch.randn(HEADS, dtype=torch.float64)},
    "one gain": {"q_norm": HeadNorm(1e-6, torch.rand(WIDTH, dtype=torch.float64))},
    "gates": {"gate": HeadGate(torch.randn(HEADS, D, dtype=torch.float64), torch.randn(HEADS).double())},
}


@pytest.mark.parametrize("name", SCORINGS)
@pytest.mark.parametrize("most", [1, 2 * 4 * D * WIDTH, 10**9])
def test_runs_of_heads_add_up_to_the_layer(name: str, most: int) -> None:
    weights = with_semantics(grouped(), **SCORINGS[name])
    assert separable(weights)
    x = torch.randn(2, 7, D, dtype=torch.float64)
    runs = groups_of(weights, most)
    assert [start for start, _ in runs] == [0, *(stop for _, stop in runs[:-1])]
    assert runs[-1][1] == HEADS
    assert len(runs) == {1: 3, 2 * 4 * D * WIDTH: 3, 10**9: 1}[most]
    parts = [attend(heads_of(weights, *run), x) for run in runs]
    torch.testing.assert_close(sum(parts), attend(weights, x))


@pytest.mark.parametrize("name", ["plain", "gates"])
def test_runs_of_heads_are_put_together_as_they_were(name: str) -> None:
    weights = with_semantics(grouped(), **SCORINGS[name])
    whole = joined([heads_of(weights, *run) for run in groups_of(weights, 1)])
    for one, other in zip(whole.semantics.tensors(), weights.semantics.tensors(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(whole.tensors(), weights.tensors(), strict=True):
        assert torch.equal(one, other)


def test_output_biases_of_the_parts_add_up() -> None:
    weights = grouped()
    parts = [heads_of(weights, 0, 2), heads_of(weights, 2, 6)]
    assert parts[1].o_bias is None
    assert weights.o_bias is not None
    more = AttentionWeights(**{**vars(parts[1]), "o_bias": torch.ones(D, dtype=torch.float64)})
    added = joined([parts[0], more]).o_bias
    assert added is not None
    torch.testing.assert_close(added, weights.o_bias + 1)


def test_heads_that_are_normalised_together_stay_together() -> None:
    together = HeadNorm(1e-6, torch.rand(HEADS * WIDTH, dtype=torch.float64), over="all heads")
    assert not separable(with_semantics(grouped(), q_norm=together))
    own = HeadNorm(1e-6, torch.rand(HEADS, WIDTH, dtype=torch.float64))
    assert not separable(with_semantics(grouped(), k_norm=own))
