"""The two forms of a head's map agree, however the rows arrive."""

import numpy as np
import pytest
import torch

from triptych.running.measuring.weight_maps import HeadWeights, RowKeeper


def weights(num_heads: int, num_queries: int, num_keys: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(num_heads, num_queries, num_keys, generator=generator)).softmax(-1)


@pytest.mark.parametrize("block", [1, 7, 250])
def test_rows_in_blocks_are_kept_as_rows_at_once(block: int) -> None:
    whole = weights(2, 250, 130)
    keeper = RowKeeper(2, 250, 130, 4)
    for rows in whole.split(block, dim=1):
        keeper.add(rows)
    for found, head in zip(keeper.maps(), whole.numpy(), strict=True):
        expected = np.sort(head, axis=1)[:, ::-1]
        np.testing.assert_array_equal(found.weights, expected[:, :4])
        np.testing.assert_array_equal(np.take_along_axis(head, found.keys.astype(np.int64), 1), found.weights)
        np.testing.assert_allclose(found.left_out, expected[:, 4:].sum(1), atol=1e-6)
        np.testing.assert_allclose(found.overview, HeadWeights.whole(head).overview, atol=1e-6)


def test_a_row_of_an_overview_holds_all_the_weight() -> None:
    overview = HeadWeights.whole(weights(1, 300, 1000)[0].numpy()).overview
    assert overview.shape == (75, 91)
    np.testing.assert_allclose(overview.sum(1), 1, atol=1e-5)


def test_fewer_weights_leave_out_more() -> None:
    head = HeadWeights.whole(weights(1, 20, 30)[0].numpy())
    few, again = head.largest(3), head.largest(8).largest(3)
    np.testing.assert_array_equal(few.keys, again.keys)
    np.testing.assert_allclose(few.left_out, again.left_out, atol=1e-6)
    np.testing.assert_allclose(few.left_out + few.weights.sum(1), 1, atol=1e-5)


def test_missing_rows_are_an_error() -> None:
    keeper = RowKeeper(1, 10, 10, 2)
    keeper.add(weights(1, 4, 10))
    with pytest.raises(ValueError, match="4 of 10 rows"):
        keeper.maps()


@pytest.mark.parametrize("wrong", [-0.1, 1.1, float("nan")])
def test_a_weight_outside_0_to_1_is_an_error(wrong: float) -> None:
    with pytest.raises(ValueError, match="0–1"):
        HeadWeights.whole(np.full((2, 2), wrong, np.float32))
