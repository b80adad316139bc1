"""Several residual streams with one active stream (AltUp), and a low-rank residual (LAuReL).

Streams are one tensor `[batch, length, streams, d_model]`. Before its attention, a block predicts every
stream as a linear combination of all streams. The sub-layers run on the predicted active stream; the change
of the active stream then corrects all streams.

Source: Baykal et al. 2023, arXiv 2301.13310; Menghani et al. 2024, arXiv 2411.07501; `modeling_gemma3n.py` of
github.com/huggingface/transformers, version 5.23.0, which also clips coefficients while training.
"""

import math
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triptych.core.models.architecture import StreamsConfig

_LEAST_SQUARE = 1e-5  # lower bound of the mean square of a stream in `_as_large`


@final
class Streams(nn.Module):
    """The maps from one stream to several streams, and back."""

    def __init__(self, config: StreamsConfig, d_model: int) -> None:
        super().__init__()
        others = config.number - 1
        self.made = nn.ModuleList(
            nn.Linear(d_model, d_model, bias=False) for _ in range(others)
        )
        self.read = nn.ModuleList(
            nn.Linear(d_model, d_model, bias=False) for _ in range(others)
        )

    def enter(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length streams d_model"]:
        """Return the streams of the first block: `x`, and maps of `x` rescaled to its size."""
        return torch.stack([x, *(_as_large(make(x), x) for make in self.made)], dim=2)

    def leave(
        self, x: Float[Tensor, "batch length streams d_model"]
    ) -> Float[Tensor, "batch length d_model"]:
        """Return the mean of the first stream and of maps of further streams, rescaled to its size."""
        first, *others = x.unbind(2)
        back = (
            _as_large(read(other), first)
            for read, other in zip(self.read, others, strict=True)
        )
        return torch.stack([first, *back]).mean(dim=0)


def _as_large(x: Tensor, other: Tensor) -> Tensor:
    """Rescale a stream to the root mean square of another stream."""
    own = x.square().mean(dim=-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
    return x * other.square().mean(dim=-1, keepdim=True).sqrt() / own


@final
class BlockStreams(nn.Module):
    """Prediction and correction of several streams in a block, and the low-rank residual."""

    def __init__(self, config: StreamsConfig, d_model: int) -> None:
        super().__init__()
        self.active = config.active
        count = config.number
        self.router = nn.Linear(d_model, count, bias=False)
        self.router_norm = nn.RMSNorm(d_model, config.eps)
        self.predictions = nn.Linear(count, count * count, bias=False)
        self.corrections = nn.Linear(count, count, bias=False)
        self.scale = nn.Parameter(torch.ones(d_model)) if config.scaled else None
        self.left = nn.Linear(d_model, config.rank, bias=False)
        self.right = nn.Linear(config.rank, d_model, bias=False)
        self.low_rank_norm = nn.RMSNorm(d_model, config.eps)

    # Coefficients of the streams, between −1 and 1.
    def _routed(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch length streams"]:
        routed: Tensor = self.router(self.router_norm(x) / x.shape[-1])
        return torch.tanh(routed.to(torch.promote_types(x.dtype, torch.float32))).to(
            x.dtype
        )

    def predict(
        self, x: Float[Tensor, "batch length streams d_model"]
    ) -> Float[Tensor, "batch length streams d_model"]:
        """Add to each stream a combination of all streams, with coefficients from the active stream."""
        weights: Tensor = self.predictions(self._routed(x[:, :, self.active]))
        return x + weights.view(*x.shape[:3], x.shape[2]) @ x

    def join(
        self,
        x: Float[Tensor, "batch length d_model"],
        read: Float[Tensor, "batch length d_model"],
    ) -> Float[Tensor, "batch length d_model"]:
        """Return `(x + read + low_rank(read)) / √2`, where `read` is the input of the attention."""
        joined: Tensor = x + read + self.low_rank_norm(self.right(self.left(read)))
        return joined / math.sqrt(2)

    def correct(
        self,
        predicted: Float[Tensor, "batch length streams d_model"],
        x: Float[Tensor, "batch length d_model"],
    ) -> Float[Tensor, "batch length streams d_model"]:
        """Correct predicted streams by the change of the active stream, from its prediction to `x`."""
        weights: Tensor = self.corrections(self._routed(x)) + 1.0
        return (
            predicted
            + weights[..., None] * (x - predicted[:, :, self.active])[:, :, None]
        )

    def add(
        self,
        x: Float[Tensor, "batch length streams d_model"],
        added: Float[Tensor, "batch length d_model"],
    ) -> Float[Tensor, "batch length streams d_model"]:
        """Add a vector per token to all streams but the first."""
        return torch.cat([x[:, :, :1], x[:, :, 1:] + added[:, :, None]], dim=2)

    def scaled(self, x: Float[Tensor, "batch length streams d_model"]) -> Tensor:
        """Return the active stream, scaled, for `BlockInput`."""
        active = x[:, :, self.active]
        return active if self.scale is None else active * self.scale
