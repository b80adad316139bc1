"""Dropout whose random numbers cost little on a CPU."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

_LEVELS = 1 << 16
_LANES = 4  # 16-bit numbers in one 64-bit draw


@final
class Dropout(nn.Module):
    """Zeroes each number with probability `p` while training and scales the others by 1/(1 − p).

    torch draws one number at a time on the CPU, which is a seventh of a training step; here each
    64-bit draw decides four elements, `p` rounded to a multiple of 2⁻¹⁶. On other devices torch's
    own kernel is used.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Same shape; the identity in evaluation mode."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        return x * _keep(x, self.p)

    def extra_repr(self) -> str:
        """Shown by `print(model)`."""
        return f"p={self.p}"


def _keep(x: Tensor, p: float) -> Tensor:
    draws = torch.empty(-(-x.numel() // _LANES), dtype=torch.int64).random_(-(1 << 63), None)
    levels = draws.view(torch.int16)[: x.numel()].view(x.shape)
    threshold = min(round(p * _LEVELS), _LEVELS - 1)
    kept = levels >= threshold - _LEVELS // 2
    return kept.to(x.dtype).mul_(_LEVELS / (_LEVELS - threshold))
