"""Filters against their plain formulas, and draws."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triptych.running.decoding.sampling import (
    RowState,
    choose,
    draw,
    filtered,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    penalise_repeats,
)
from triptych.running.decoding_options import SamplingOptions

# Eighths: logits that differ, differ by more than rounding, so no sum of probabilities meets `p` by rounding.
ROW = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=12, unique=True)


def softmax(row: list[float]) -> list[float]:
    total = sum(math.exp(x) for x in row)
    return [math.exp(x) / total for x in row]


def kept(logits: torch.Tensor) -> set[int]:
    return {i for i, x in enumerate(logits[0].tolist()) if x > -math.inf}


def best_first(row: list[float]) -> list[int]:
    return sorted(range(len(row)), key=lambda i: -row[i])


@settings(max_examples=60, deadline=None)
@given(ROW, st.integers(1, 14))
def test_top_k_keeps_the_k_best(row: list[float], k: int) -> None:
    assert kept(keep_top_k(torch.tensor([row]).double(), k)) == set(best_first(row)[:k])


@settings(max_examples=60, deadline=None)
@given(ROW, st.floats(0.05, 0.95))
def test_top_p_keeps_the_fewest_that_sum_to_p(row: list[float], p: float) -> None:
    expected, total = set(), 0.0
    for token in best_first(row):
        if total >= p - 1e-12:
            break
        expected.add(token)
        total += softmax(row)[token]
    assert kept(keep_top_p(torch.tensor([row]).double(), p)) == expected


@settings(max_examples=60, deadline=None)
@given(ROW, st.floats(0.05, 0.95))
def test_min_p_keeps_what_is_p_times_as_probable_as_the_best(row: list[float], p: float) -> None:
    of = softmax(row)
    expected = {i for i, x in enumerate(of) if x >= p * max(of)}
    assert kept(keep_min_p(torch.tensor([row]).double(), p)) == expected


def test_filters_apply_one_after_the_other_to_logits_over_the_temperature() -> None:
    logits = torch.randn(3, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3
    options = SamplingOptions(temperature=0.7, top_k=20, top_p=0.8, min_p=0.02)
    expected = keep_min_p(keep_top_p(keep_top_k(logits / 0.7, 20), 0.8), 0.02)
    assert torch.equal(filtered(logits, options), expected)
    assert kept(expected) != kept(keep_top_k(logits / 0.7, 20))


def test_filters_are_those_of_transformers() -> None:
    generation = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(4, 60, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 3
    ids = torch.randint(0, 60, (4, 9), generator=torch.Generator().manual_seed(2))
    seen = torch.zeros(4, 60, dtype=torch.bool).scatter_(1, ids, True)
    for ours, theirs in (
        (keep_top_k(logits, 7), generation.TopKLogitsWarper(7)),
        (keep_top_p(logits, 0.7), generation.TopPLogitsWarper(0.7)),
        (keep_min_p(logits, 0.1), generation.MinPLogitsWarper(0.1)),
        (penalise_repeats(logits, seen, 1.3), generation.RepetitionPenaltyLogitsProcessor(1.3)),
    ):
        assert torch.equal(ours, theirs(ids, logits.clone()))


def test_a_draw_is_the_token_in_whose_share_of_one_the_number_lies() -> None:
    logits = torch.tensor([[0.2, 0.0, 0.5, 0.3]]).log().double()
    for number, token in ((0.0, 0), (0.19, 0), (0.21, 2), (0.69, 2), (0.71, 3), (1 - 2**-32, 3)):
        assert draw(logits, torch.tensor([number], dtype=torch.float64)).tolist() == [token]


def test_draws_have_the_probabilities_of_the_model() -> None:
    logits = torch.tensor([[0.2, 0.1, 0.5, 0.2]]).log().repeat(4000, 1)
    rows = [RowState(3, sample, []) for sample in range(4000)]
    counts = choose(logits, SamplingOptions(temperature=1.0), rows).bincount(minlength=4) / 4000
    assert (counts - torch.tensor([0.2, 0.1, 0.5, 0.2])).abs().max() < 0.03


def test_tokens_seen_are_less_probable_from_the_prompt_on() -> None:
    row, options = RowState(0, 0, [1]), SamplingOptions(repetition_penalty=2.0)
    logits = torch.tensor([[1.0, 3.0, 1.4]])
    assert [int(choose(logits, options, [row])) for _ in range(4)] == [1, 1, 1, 1]
    logits = torch.tensor([[1.0, 2.0, 1.4]])
    assert [int(choose(logits, options, [row])) for _ in range(2)] == [2, 0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[("temperature", -1.0), ("temperature", math.nan), ("top_k", 0), ("top_p", 0.0), ("top_p", 1.5)],
        *[("temperature", 1e300), ("min_p", -0.1), ("repetition_penalty", 0.0)],
        *[("repetition_penalty", 1e-300), ("repetition_penalty", 1e300), ("repetition_penalty", math.nan)],
    ],
)
def test_values_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingOptions(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_at_the_edges_of_every_option_the_best_token_stays_and_is_drawn(dtype: torch.dtype) -> None:
    logits = torch.tensor([[3.0, -80.0, 90.0, 0.0, -math.inf], [1.0, 1.0, 1.0, 1.0, 1.0]], dtype=dtype)
    edges: dict[str, list[float]] = {
        "temperature": [1e-6, 1.0, 1e6],
        "top_k": [1, 1 << 40],
        "top_p": [5e-324, 1e-300, 1e-9, 1.0],
        "min_p": [5e-324, 1e-300, 1.0],
        "repetition_penalty": [0.01, 100.0],
    }
    for name, values in edges.items():
        for value in values:
            options = SamplingOptions(**{"temperature": 1.0, name: value})  # type: ignore[arg-type]
            assert set(best_places(logits)) <= kept_places(filtered(logits.float(), options))
            rows = [RowState(7, sample, [0, 2]) for sample in range(2)]
            drawn = choose(logits, options, rows).tolist()
            assert all(0 <= token < 5 for token in drawn), (name, value)


def best_places(logits: torch.Tensor) -> list[tuple[int, int]]:
    """The first of the best tokens of every row."""
    return [(row, int(token)) for row, token in enumerate(logits.argmax(dim=-1))]


def kept_places(logits: torch.Tensor) -> set[tuple[int, int]]:
    return {(row, token) for row, token in (logits > -math.inf).nonzero().tolist()}
