"""The operations of a piece of work, and the rate that a machine reaches."""

import pytest
import torch
from torch.nn import functional as F

from triptych.training.losses import output_loss
from triptych.training.machine import count_operations, measure_peak


def test_products_in_place_and_in_chunks_are_counted_like_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("triptych.training.losses.MIN_CHUNK_TOKENS", 8)
    monkeypatch.setattr("triptych.training.losses.MAX_CHUNK_TOKENS", 8)
    x, weight = torch.randn(20, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)

    def work() -> None:
        output_loss(x, weight, torch.arange(20), 0.0).smoothed.backward()  # type: ignore[no-untyped-call]

    assert count_operations(work) == 3 * 2 * 20 * 16 * 30


def test_the_attention_of_a_cpu_is_counted_forward_and_backward() -> None:
    query, key, value = (torch.randn(2, 4, 64, 8, requires_grad=True) for _ in range(3))

    def work() -> None:
        F.scaled_dot_product_attention(query, key, value).sum().backward()  # type: ignore[no-untyped-call]

    product = 2 * 2 * 4 * 64 * 64 * 8
    assert count_operations(work) == (2 + 5) * product  # the scores are made again for their gradient


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rate_of_products_is_that_of_this_machine(dtype: torch.dtype) -> None:
    assert 1e8 < measure_peak(torch.device("cpu"), dtype) < 1e14
