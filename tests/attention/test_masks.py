"""Masks: True = may attend."""

import pytest
import torch

from triptych.core.attention import causal_mask, padding_mask


@pytest.mark.parametrize("pad_id", [0, 7])
def test_the_padding_mask_is_true_exactly_where_there_is_a_token(pad_id: int) -> None:
    ids = torch.tensor([[5, 3, pad_id], [4, pad_id, pad_id]])
    mask = padding_mask(ids, pad_id)
    assert mask.shape == (2, 1, 1, 3)
    assert mask.squeeze().tolist() == [[True, True, False], [True, False, False]]


@pytest.mark.parametrize(("query_len", "key_len"), [(1, 1), (4, 4), (2, 5), (1, 5)])
def test_the_causal_mask_counts_queries_from_the_end_of_the_keys(query_len: int, key_len: int) -> None:
    expected = [[key <= key_len - query_len + row for key in range(key_len)] for row in range(query_len)]
    assert causal_mask(query_len, key_len).tolist() == expected
