"""Figures of heads that were planted: each does one thing, and only its figure says so."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from triptych.core.algebra.resampling import ratio_intervals
from triptych.running.measuring.windows import UnitSums
from triptych.seeing.attending.behaviour import Kind, LayerFigures, RowFigures, figures_of, key_classes
from triptych.seeing.attending.over import OverText

#         a  b  c  a  b  d  c  a
TOKENS = [5, 6, 7, 5, 6, 8, 7, 5]
CAUSAL = torch.ones(8, 8, dtype=torch.bool).tril()


def looking_at(keys: Sequence[int], num_keys: int = 8) -> Tensor:
    """A head whose queries look at one key each."""
    return torch.eye(num_keys, dtype=torch.float64)[torch.tensor(keys)]


def measured_over(kind: Kind, *units: tuple[Sequence[Tensor], Tensor]) -> LayerFigures:
    stack = {"self": "encoder", "causal": "decoder", "cross": "cross"}[kind]
    found, names = UnitSums(len(units)), tuple(figure.name for figure in figures_of(kind))
    for unit, (heads, visible) in enumerate(units):
        queries, keys = (torch.tensor(TOKENS[:length]) for length in visible.shape)
        rows = RowFigures(kind, visible, queries, keys)
        found.add(
            unit, (stack, 0), names, rows.sums(torch.stack(list(heads))), rows.counts[:, None], rows.even
        )
    return LayerFigures(stack, 0, found.figures()[stack, 0])


def measured(kind: Kind, heads: Sequence[Tensor], visible: Tensor) -> LayerFigures:
    """Of a text that came twice."""
    return measured_over(kind, (heads, visible), (heads, visible))


PLANTED = {
    "previous": [0, 0, 1, 2, 3, 4, 5, 6],
    "self": [0, 1, 2, 3, 4, 5, 6, 7],
    "first": [0] * 8,
    "duplicate": [0, 0, 0, 0, 1, 0, 2, 3],  # queries 3, 4, 6 and 7 have an earlier twin
    "induction": [0, 0, 0, 1, 2, 0, 3, 4],
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_head_has_the_figure_1_and_is_called_by_it(name: str) -> None:
    found = measured("causal", [looking_at(keys) for keys in PLANTED.values()], CAUSAL)
    head = list(PLANTED).index(name)
    assert float(found.figures[name].value[head]) == pytest.approx(1)
    titles = {figure.name: figure.title for figure in figures_of("causal")}
    assert found.called(head) == titles[name]


def test_the_even_level_is_the_figure_of_a_head_that_looks_evenly() -> None:
    even = CAUSAL.double() / CAUSAL.sum(dim=-1, keepdim=True)
    found = measured("causal", [even], CAUSAL)
    for name, figure in found.figures.items():
        if figure.count:
            assert float(figure.value[0]) == pytest.approx(figure.even), name
    assert found.called(0) == ""
    assert found.figures["first"].even == pytest.approx(sum(1 / n for n in range(2, 9)) / 7)


def test_classes_are_of_the_keys_that_their_names_say() -> None:
    ids = torch.tensor(TOKENS)
    found = key_classes("causal", ids, ids)
    same = [[j for j in range(i) if TOKENS[j] == TOKENS[i]] for i in range(8)]
    after = [[j for j in range(1, i) if TOKENS[j - 1] == TOKENS[i]] for i in range(8)]
    assert [row.nonzero()[:, 0].tolist() for row in found["duplicate"]] == same
    assert [row.nonzero()[:, 0].tolist() for row in found["induction"]] == after
    assert "next" not in found
    assert "next" in key_classes("self", ids, ids)


def test_queries_count_that_see_a_key_of_the_class_and_another_one() -> None:
    found = measured("causal", [looking_at([0] * 8)], CAUSAL)
    counts = {name: figure.count // 2 for name, figure in found.figures.items()}  # the text came twice
    assert counts["previous"] == counts["first"] == counts["entropy"] == 7
    assert counts["duplicate"] == counts["induction"] == 4
    assert counts["distance_3_4"] == 5
    assert counts["distance_65_on"] == 0
    assert math.isnan(float(found.figures["distance_65_on"].value[0]))
    assert found.rows()[0]["distance_65_on"] is None


def test_distances_and_entropy_are_those_of_the_weights() -> None:
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(1, 8, 8, generator=generator, dtype=torch.float64).mul(CAUSAL)
    weights = weights / weights.sum(dim=-1, keepdim=True)
    found = measured("causal", list(weights), CAUSAL)
    rows = [weights[0, i, : i + 1] for i in range(1, 8)]
    far = sum(float(p) * (len(row) - 1 - j) for row in rows for j, p in enumerate(row)) / 7
    nats = -sum(float(p * p.log()) for row in rows for p in row) / 7
    assert float(found.figures["distance"].value[0]) == pytest.approx(far)
    assert float(found.figures["entropy"].value[0]) == pytest.approx(nats)


def test_hidden_keys_are_of_no_class() -> None:
    window = CAUSAL & torch.ones(8, 8, dtype=torch.bool).triu(-1)
    found = measured("causal", [looking_at(PLANTED["previous"])], window)
    assert found.figures["first"].count // 2 == 1
    assert found.figures["induction"].count == 0
    assert found.figures["previous"].even == pytest.approx(0.5)


def test_cross_attention_has_a_diagonal_of_texts_of_two_lengths() -> None:
    seen = torch.ones(4, 8, dtype=torch.bool)
    found = measured("cross", [looking_at([0, 2, 5, 7]), looking_at([7, 5, 2, 0]), looking_at([7] * 4)], seen)
    assert found.figures["diagonal"].value.tolist() == pytest.approx([1, 0, 0.25])
    assert [found.called(head) for head in range(3)] == ["diagonal", "", "last token"]
    assert "induction" not in found.figures


def test_the_interval_is_over_documents_that_are_drawn_whole() -> None:
    one = [looking_at([0] * 8)], CAUSAL
    other = [looking_at([0, 1, 2], 3)], CAUSAL[:3, :3]
    figure = measured_over("causal", one, other).figures["first"]
    assert figure.low is not None
    assert figure.high is not None
    assert float(figure.value[0]) == pytest.approx(7 / 9)
    assert (float(figure.low[0]), float(figure.high[0])) == (0, 1)


def test_intervals_cover_the_truth_as_often_as_they_say() -> None:
    generator = torch.Generator().manual_seed(3)
    draws = torch.rand(60, 400, generator=generator, dtype=torch.float64)
    low, high = ratio_intervals(draws, torch.ones(60, 1))
    covered = float(((low < 0.5) & (high > 0.5)).double().mean())
    assert 0.90 < covered < 0.98


def test_the_summary_says_where_no_head_does_a_thing() -> None:
    layer = measured("causal", [looking_at(PLANTED["previous"])], CAUSAL)
    lines = OverText("tiny", (layer,), "documents", 2, 16, 8).summary()
    assert lines[0] == "previous token: decoder 0 head 0, 1.00 (1.00 to 1.00; evenly 0.25)"
    assert next(line for line in lines if line.startswith("itself")).endswith("(no head is called by it)")
