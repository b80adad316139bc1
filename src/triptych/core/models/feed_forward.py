"""Feed-forward layers, activations and dropout."""

from collections.abc import Callable
from functools import partial
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.core.models.architecture import Activation, FeedForwardConfig

_LEVELS = 1 << 16
_LANES = 4  # number of 16-bit values in one 64-bit draw


@final
class Dropout(nn.Module):
    """Dropout: in training, zero each element with probability `p` and scale remaining elements by 1/(1 − p).

    On the CPU, torch makes one draw per element, a seventh of the time of a training step; here a 64-bit draw
    decides four elements, with `p` rounded to a multiple of 2⁻¹⁶. Other devices use torch's kernel.
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Apply dropout; the identity in evaluation mode."""
        if not self.training or self.p == 0:
            return x
        if x.device.type != "cpu":
            return F.dropout(x, self.p)
        return x * _dropout_factors(x, self.p)

    def extra_repr(self) -> str:
        return f"p={self.p}"


# A factor for each element of x: 0 with probability p, else 1/(1 − p).
def _dropout_factors(x: Tensor, p: float) -> Tensor:
    draws = torch.empty(-(-x.numel() // _LANES), dtype=torch.int64).random_(
        -(1 << 63), None
    )
    levels = draws.view(torch.int16)[: x.numel()].view(x.shape)
    threshold = min(round(p * _LEVELS), _LEVELS - 1)
    kept = levels >= threshold - _LEVELS // 2
    return kept.to(x.dtype).mul_(_LEVELS / (_LEVELS - threshold))


def _relu_squared(x: Tensor) -> Tensor:
    return torch.relu(x).square()


def _gelu_sigmoid(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu_sigmoid": _gelu_sigmoid,
    "swish": F.silu,
    "relu_squared": _relu_squared,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@final
class XIELU(nn.Module):
    """The xIELU activation: `p x² + βx` above 0, `n (eˣ − 1 − x) + βx` below 0, with learned p and n.

    p and n − β are the softplus of the parameters.

    Source: Huang and Schlag 2024, arXiv 2411.13010.
    """

    beta: Tensor
    eps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.tensor([0.8]).expm1().log())
        self.alpha_n = nn.Parameter(torch.tensor([0.3]).expm1().log())
        self.register_buffer("beta", torch.tensor(0.5))
        self.register_buffer("eps", torch.tensor(-1e-6))  # upper bound of x in eˣ

    def forward(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        p = F.softplus(self.alpha_p)
        n = self.beta + F.softplus(self.alpha_n)
        below = (torch.expm1(torch.min(x, self.eps)) - x) * n
        return torch.where(x > 0, p * x * x, below) + self.beta * x


def activation_of(config: FeedForwardConfig) -> Callable[[Tensor], Tensor]:
    if config.activation == "xielu":
        return XIELU()
    if config.activation == "swish" and config.beta != 1.0:
        return partial(_swish, beta=config.beta)
    return ACTIVATIONS[config.activation]


def _swish(x: Tensor, beta: float) -> Tensor:
    return x * torch.sigmoid(beta * x)


def combined(
    config: FeedForwardConfig,
    activation: Callable[[Tensor], Tensor],
    gate: Tensor,
    inner: Tensor,
) -> Tensor:
    """Return the hidden values of a gated layer, `f(gate) ⊙ (inner + offset)`, after sparsity and limit."""
    if config.sparsity:
        gate = _sparse(gate, config.sparsity)
    if config.limit is not None:
        gate = gate.clamp(max=config.limit)
        inner = inner.clamp(-config.limit, config.limit)
    return activation(gate) * (inner + config.offset if config.offset else inner)


def _sparse(x: Tensor, share: float) -> Tensor:
    """Apply `FeedForwardConfig.sparsity` to the gate."""
    deviations = torch.special.ndtri(torch.tensor(share, dtype=torch.float64)).item()
    cutoff = (
        x.mean(dim=-1, keepdim=True)
        + x.std(dim=-1, keepdim=True, unbiased=False) * deviations
    )
    return torch.relu(x - cutoff)


@final
class FeedForward(nn.Module):
    """A feed-forward layer; see `FeedForwardConfig`. Ungated with "relu", equation 2 of the paper."""

    def __init__(self, config: FeedForwardConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.Linear(d_model, config.d_ff, bias=config.bias)
        self.gate = (
            nn.Linear(d_model, config.d_ff, bias=config.bias) if config.gated else None
        )
        self.outer = nn.Linear(config.d_ff, d_model, bias=config.out_bias)
        self.activation = activation_of(config)
        self.dropout = Dropout(config.dropout)
        for linear in (self.inner, self.gate, self.outer):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def forward(
        self, x: Float[Tensor, "*rows d_model"]
    ) -> Float[Tensor, "*rows d_model"]:
        if self.gate is None:
            hidden = self.activation(self.inner(x))
        else:
            hidden = combined(self.config, self.activation, self.gate(x), self.inner(x))
        return self.outer(self.dropout(hidden) if self.training else hidden)  # type: ignore[no-any-return]
