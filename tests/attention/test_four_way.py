"""The 4th matrix as data: against NumPy, and what it refuses."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tolerances import assert_same
from triptych.core.attention import four_way_attention


def make(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def in_numpy(Q: np.ndarray, K: np.ndarray, V: np.ndarray, W: np.ndarray) -> np.ndarray:
    """One pair of a query and a row of W after the other."""
    d_k = Q.shape[1]
    result = np.zeros((len(Q), len(W)))
    for i, q in enumerate(Q):
        powers = np.exp([q @ k / np.sqrt(d_k) for k in K])
        read = sum(power * v for power, v in zip(powers / powers.sum(), V, strict=True))
        for j, w in enumerate(W):
            result[i, j] = read @ w / np.sqrt(d_k)
    return result


@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_it_is_the_formula(batch: tuple[int, ...]) -> None:
    Q, K, V, W = make((*batch, 4, 6), (*batch, 5, 6), (*batch, 5, 3), (*batch, 7, 3))
    output = four_way_attention(Q, K, V, W)
    assert output.shape == (*batch, 4, 7)
    for place in np.ndindex(*batch):
        expected = in_numpy(*(x[place].detach().numpy() for x in (Q, K, V, W)))
        assert_same(output[place].detach(), torch.from_numpy(expected), kind="output")


def test_its_gradient_reaches_all_four() -> None:
    Q, K, V, W = make((2, 3, 4), (2, 5, 4), (2, 5, 2), (2, 4, 2))
    assert torch.autograd.gradcheck(four_way_attention, (Q, K, V, W))
    gradients = torch.autograd.grad(four_way_attention(Q, K, V, W).square().sum(), [Q, K, V, W])
    assert all(bool(gradient.abs().min() > 0) for gradient in gradients)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((4, 6), (5, 7), (5, 3), (7, 3)), "Q has width 6 and K 7: they must be equal"),
        (((4, 6), (5, 6), (5, 3), (7, 2)), "V has width 3 and W 2: they must be equal"),
        (((4, 6), (5, 6), (8, 3), (7, 3)), "K has 5 rows and V 8: one of each a token"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_numbers(
    shapes: tuple[tuple[int, ...], ...], message: str
) -> None:
    # Called past the check of shapes that only the test run has.
    plain = getattr(four_way_attention, "__wrapped__", four_way_attention)
    with pytest.raises(ValueError, match=message):
        plain(*make(*shapes))
