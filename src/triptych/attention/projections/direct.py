"""No projections: each head reads its slice of the input."""

from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor, nn

from triptych.algebra.weights import AttentionWeights, Link, standard_scale
from triptych.attention.projections.abstract import (
    Parameterisation,
    Projections,
    at_least_one_head,
    initialise_input,
    link_to_output,
    split_heads,
)


@final
@dataclass(frozen=True)
class Direct(Parameterisation):
    """`head_i = Attention(Q_i, K_i, V_i)`, the i-th slices of the input itself: `W_QK = I_i I_iᵀ`.

    Where a learned embedding is all that stands before the layer, maps that read it could be
    absorbed into it; deeper down the slices of one stream have to serve as queries, keys and values
    at once. d_k = d_v = d_model / num_heads.

    Attributes:
        o_bias: whether the output map has a bias; there are no others.
    """

    name: ClassVar[str] = "direct"
    parameters_formula: ClassVar[str] = "h*d*d_v"
    cache_formula: ClassVar[str] = "d"

    o_bias: bool = False

    def build(self, d_model: int, num_heads: int) -> "DirectProjections":
        """Make the output map."""
        if d_model % at_least_one_head(num_heads):
            raise ValueError(
                f"num_heads {num_heads} does not divide d_model {d_model}: direct gives each head a slice of "
                "the input"
            )
        width = d_model // num_heads
        return DirectProjections(
            num_heads=num_heads,
            d_k=width,
            # Values come as they are: the output map begins as small as the others' values are.
            o_proj=initialise_input(nn.Linear(d_model, d_model, bias=self.o_bias)),
        )

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "Direct | None":
        """The same fixed slices on all three sides."""
        if not (weights.tied("q", "k") and weights.tied("k", "v")) or weights.q[0].learned:
            return None
        return cls(o_bias=weights.o_bias is not None)


@final
class DirectProjections(Projections):
    """The output map of `Direct`."""

    caches_keys: ClassVar[bool] = False
    no_two_memories: ClassVar[str] = "direct takes keys and values from one sequence, the input itself"

    def __init__(self, *, num_heads: int, d_k: int, o_proj: nn.Linear) -> None:
        super().__init__()
        self.d_model = o_proj.out_features
        self.num_heads = num_heads
        self.d_k = d_k
        self.o_proj = o_proj

    def queries(self, x: Tensor) -> Tensor:
        """Slice i of the input."""
        return split_heads(x, self.num_heads)

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """The input, d numbers a token."""
        return (split_heads(key_input, self.num_heads),)

    def keys_values(self, remembered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """One tensor, read as both."""
        (slices,) = remembered
        return slices, slices

    def weights(self) -> AttentionWeights:
        """A selection of channels on all three sides."""
        weight = self.o_proj.weight
        eye = torch.eye(self.d_model, dtype=weight.dtype, device=weight.device)
        slices = (Link(eye.view(self.num_heads, self.d_k, self.d_model).mT, learned=False),)
        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            scale=standard_scale(self.d_k),
            q=slices,
            k=slices,
            v=slices,
            o=link_to_output(self.o_proj, self.num_heads),
            o_bias=self.o_proj.bias,
        )
