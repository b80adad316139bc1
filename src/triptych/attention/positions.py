"""Positions: what tells a Transformer the order of its tokens."""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn


def sinusoidal(length: int, d_model: int) -> Float[Tensor, "length d_model"]:
    """The paper's fixed encoding, sines on even and cosines on odd channels.

        PE(pos, 2i) = sin(pos / 10000^(2i/d_model))    PE(pos, 2i+1) = cos(the same)

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.5.
    """
    position = torch.arange(length, dtype=torch.float64)[:, None]
    frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10_000) / d_model))
    table = torch.empty(length, d_model, dtype=torch.float64)
    table[:, 0::2] = torch.sin(position * frequency)
    table[:, 1::2] = torch.cos(position * frequency[: d_model // 2])
    return table


@final
class SinusoidalPositions(nn.Module):
    """Adds `sinusoidal` to embeddings; its table grows with the longest text seen, and is not saved."""

    table: Tensor

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model
        self.register_buffer("table", torch.empty(0, d_model), persistent=False)

    def forward(
        self, x: Float[Tensor, "batch length d_model"], start: int = 0
    ) -> Float[Tensor, "batch length d_model"]:
        """Add the encodings of positions `start` to `start + length − 1`."""
        end = start + x.shape[1]
        if self.table.shape[0] < end or self.table.dtype != x.dtype or self.table.device != x.device:
            rows = max(256, 1 << (end - 1).bit_length())
            self.table = sinusoidal(rows, self.d_model).to(device=x.device, dtype=x.dtype)
        return x + self.table[start:end]
