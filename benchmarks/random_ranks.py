"""Effective ranks of W_QK and W_OV before training, at the size of the studies (d_model 64, 4 heads)."""

import torch

from triptych.core.attention import (
    Bilinear,
    Direct,
    Factored,
    IdentityOutput,
    IdentityQuery,
    IdentityValue,
    KeyValue,
    MultiHeadAttention,
    Shared,
    Symmetric,
)

for projections in (
    Factored(),
    Symmetric(),
    KeyValue(),
    Shared(),
    Direct(),
    IdentityQuery(),
    IdentityValue(),
    IdentityOutput(),
    Bilinear(),
):
    ranks: dict[str, list[float]] = {"W_QK": [], "W_OV": []}
    for seed in range(10):
        torch.manual_seed(seed)
        for head in MultiHeadAttention(64, 4, projections).heads:
            ranks["W_QK"].append(float(head.qk.effective_rank()))
            ranks["W_OV"].append(float(head.ov.effective_rank()))
    print(projections.name, *(f"{form} {sum(found) / len(found):.1f}" for form, found in ranks.items()))
