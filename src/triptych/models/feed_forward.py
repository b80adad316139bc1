"""Feed-forward layers, and the activations that they and others use."""

from collections.abc import Callable
from functools import partial
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.models.architecture import Activation, FeedForwardConfig
from triptych.models.dropout import Dropout


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


def activation_of(config: FeedForwardConfig) -> Callable[[Tensor], Tensor]:
    """The f of the layer."""
    if config.activation == "swish" and config.beta != 1.0:
        return partial(_swish, beta=config.beta)
    return ACTIVATIONS[config.activation]


def _swish(x: Tensor, beta: float) -> Tensor:
    return x * torch.sigmoid(beta * x)


def combined(
    config: FeedForwardConfig, activation: Callable[[Tensor], Tensor], gate: Tensor, inner: Tensor
) -> Tensor:
    """What the outer map reads of a layer with a gate, `f(gate) ⊙ (inner + offset)`, within its limit."""
    if config.limit is not None:
        gate = gate.clamp(max=config.limit)
        inner = inner.clamp(-config.limit, config.limit)
    return activation(gate) * (inner + config.offset if config.offset else inner)


@final
class FeedForward(nn.Module):
    """See `FeedForwardConfig`; without a gate and with "relu", the paper's equation 2."""

    def __init__(self, config: FeedForwardConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.inner = nn.Linear(d_model, config.d_ff, bias=config.bias)
        self.gate = nn.Linear(d_model, config.d_ff, bias=config.bias) if config.gated else None
        self.outer = nn.Linear(config.d_ff, d_model, bias=config.out_bias)
        self.activation = activation_of(config)
        self.dropout = Dropout(config.dropout)
        for linear in (self.inner, self.gate, self.outer):
            if linear is not None:
                nn.init.xavier_uniform_(linear.weight)
                if linear.bias is not None:
                    nn.init.zeros_(linear.bias)

    def forward(self, x: Float[Tensor, "*rows d_model"]) -> Float[Tensor, "*rows d_model"]:
        """Apply to every position alike."""
        if self.gate is None:
            hidden = self.activation(self.inner(x))
        else:
            hidden = combined(self.config, self.activation, self.gate(x), self.inner(x))
        return self.outer(self.dropout(hidden) if self.training else hidden)  # type: ignore[no-any-return]
