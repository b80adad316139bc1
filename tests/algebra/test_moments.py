"""Second moments of a text, streamed: means over its tokens of what the definition gives."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from heads import BATCH, LENGTH, MEMORY_LENGTH, NUM_HEADS, gathered, make, random_input, with_semantics
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.semantics import HeadGate, HeadNorm
from triptych.errors import DataError
from triptych.rewriting.functions.moments import Moments, MomentsGatherer


def assert_alike(one: Moments, other: Moments) -> None:
    assert (one.count, one.key_count) == (other.count, other.key_count)
    assert one.longest == other.longest
    for name in ("q", "k", "q_mean", "k_mean", "mixed", "mixed_mean"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-12, atol=1e-12)
    assert one.x_square == pytest.approx(other.x_square)
    assert one.y_square == pytest.approx(other.y_square)


@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
@pytest.mark.parametrize("name", ["factored", "grouped", "stacked", "bilinear", "shared"])
def test_moments_are_means_over_all_tokens(name: str, kind: str) -> None:
    weights = make(name, kind)
    x, memory = random_input(LENGTH) + 0.5, random_input(MEMORY_LENGTH) if kind == "cross" else None
    gatherer = MomentsGatherer()
    gatherer.add(weights, x, memory)
    found, y = gatherer.result(), x if memory is None else memory
    assert (found.count, found.key_count) == (BATCH * LENGTH, BATCH * y.shape[1])

    def of(side: Any, head: int, rows: Tensor) -> np.ndarray:
        link = weights.multiplied(side).repeat(NUM_HEADS)
        made = rows.numpy() @ link.weight[head].numpy()
        return made if link.bias is None else made + link.bias[head].numpy()

    for head in range(NUM_HEADS):
        queries, keys, mixed = [], [], []
        for one, other in zip(x, y, strict=True):
            q, k, v = of("q", head, one), of("k", head, other), of("v", head, other)
            scores = weights.scale * q @ k.T
            if kind == "causal":
                scores[~np.tri(*scores.shape, dtype=bool)] = -np.inf
            p = np.exp(scores - scores.max(1, keepdims=True))
            queries.append(q)
            keys.append(k)
            mixed.append(p / p.sum(1, keepdims=True) @ v)
        q, k, z = (np.concatenate(rows) for rows in (queries, keys, mixed))
        copy = head * len(found.k) // NUM_HEADS
        np.testing.assert_allclose(found.q[head], q.T @ q / len(q), rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(found.k[copy], k.T @ k / len(k), rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(found.q_mean[head], q.mean(0), rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(found.k_centred[copy], np.cov(k.T, bias=True), rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(found.mixed[head], z.T @ z / len(z), rtol=1e-10, atol=1e-10)
        np.testing.assert_allclose(found.mixed_centred[head], np.cov(z.T, bias=True), rtol=1e-9, atol=1e-10)
    assert found.longest == max(LENGTH, y.shape[1])
    assert found.x_square == pytest.approx(float(x.square().mean()))
    assert found.y_square == pytest.approx(float(y.square().mean()))


def test_a_text_in_parts_is_the_same_text() -> None:
    weights, x = make("grouped"), torch.randn(6, LENGTH, 24, dtype=torch.float64)
    assert_alike(gathered(weights, x[:1], x[1:4], x[4:]), gathered(weights, x))


def test_moments_are_those_before_positions_after_norms_and_gates() -> None:
    weights, x = make("factored"), random_input(LENGTH)
    embedding = RotaryEmbedding(torch.tensor([1.0, 0.3, 0.1], dtype=torch.float64))
    plain, rotary = gathered(weights, x), gathered(with_semantics(weights, rotary=embedding), x)
    torch.testing.assert_close(rotary.q, plain.q, rtol=0, atol=0)
    assert not torch.allclose(rotary.mixed, plain.mixed)
    normed = gathered(with_semantics(weights, q_norm=HeadNorm(0.0)), x)
    closed = HeadGate(torch.zeros(weights.num_heads, 24), torch.full((weights.num_heads,), -math.log(3)))
    gated = gathered(with_semantics(weights, gate=closed), x)  # a quarter of everything passes
    torch.testing.assert_close(gated.mixed, plain.mixed / 16)
    squares = normed.q.diagonal(dim1=-2, dim2=-1).sum(-1)
    torch.testing.assert_close(squares, torch.full_like(squares, 6.0))


def test_sums_are_kept_in_float64() -> None:
    weights, x = make("factored"), random_input(LENGTH)
    narrow = gathered(weights.to(torch.float32), x.float())
    assert narrow.q.dtype == narrow.mixed.dtype == torch.float64
    torch.testing.assert_close(narrow.q, gathered(weights, x).q, rtol=1e-5, atol=1e-5)


def test_no_text_and_numbers_that_are_not_finite_are_said() -> None:
    with pytest.raises(DataError, match="there are no tokens to take moments of"):
        MomentsGatherer().result()
    weights, x, gatherer = make("factored"), random_input(LENGTH), MomentsGatherer()
    gatherer.add(weights, x.masked_fill(x > 1, torch.nan))
    with pytest.raises(DataError, match="are not finite: leave out tokens that see nothing"):
        gatherer.result()
