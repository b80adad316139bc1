"""Masks, under one convention: boolean, **True = may attend**.

A mask broadcasts to `[batch, num_heads, query_len, key_len]`. A row without a single True attends
to nothing: its output is zero, on every path.
"""

import torch
from jaxtyping import Bool, Int
from torch import Tensor


def padding_mask(ids: Int[Tensor, "batch key_len"], pad_id: int) -> Bool[Tensor, "batch 1 1 key_len"]:
    """True where `ids` holds a token, False where it holds padding."""
    return (ids != pad_id)[:, None, None, :]


def causal_mask(
    query_len: int | torch.SymInt, key_len: int | torch.SymInt, device: torch.device | None = None
) -> Bool[Tensor, "query_len key_len"]:
    """True where a query may look: at its own position and before it.

    The queries are the *last* `query_len` of the `key_len` positions, so that one mask serves
    training (equal lengths) and decoding with a cache (fewer queries than keys).
    """
    offset = key_len - query_len
    return torch.ones(query_len, key_len, dtype=torch.bool, device=device).tril(offset)
