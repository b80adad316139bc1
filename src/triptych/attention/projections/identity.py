"""One of the four maps taken away: the heads read, or write, slices of the stream."""

from abc import ABC
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from triptych.algebra.weights import AttentionWeights, Side
from triptych.attention.projections.abstract import (
    Parameterisation,
    ParameterisationSizes,
    head_width,
    projection_variance,
    slice_width,
)
from triptych.attention.projections.maps import FromHeads, Joined, Slices, ToHeads


@dataclass(frozen=True)
class _Identity(Parameterisation, ABC):
    """One side is slices of the stream.

    Attributes:
        taken: that side.
    """

    taken: ClassVar[Side]

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> Parameterisation | None:
        found = super().fitting(weights)
        if found is None or weights.chain(cls.taken)[0].learned:
            return None
        link, width = weights.chain(cls.taken)[0], weights.d_model // weights.num_heads
        fixed = (
            Joined(weights.num_heads, width, False) if cls.taken == "o" else Slices(weights.num_heads, width)
        )
        own = fixed.link(fixed.make(), link.weight).weight
        same = own.shape == link.weight.shape and (own.is_meta or torch.equal(own, link.weight))
        return found if same else None


@final
@dataclass(frozen=True)
class IdentityQuery(_Identity):
    """W^Q = I: the i-th slice of the input is the query of head i, `W_QK = I_i W_i^Kᵀ`.

    d_k = d_model / num_heads. Source: arXiv 2510.23912.

    Attributes:
        d_v: width of values; d_model / num_heads if None.
        k_bias: whether the key map has a bias; likewise `v_bias`, `o_bias`.
    """

    name: ClassVar[str] = "identity_query"
    taken: ClassVar[Side] = "q"
    parameters_formula: ClassVar[str] = "h*d*d_k + 2*h*d*d_v"
    cache_formula: ClassVar[str] = "h*(d_k + d_v)"
    q: ClassVar[tuple[str, ...]] = ("slices",)

    d_v: int | None = None
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_k = slice_width(self.name, d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        # Queries come as they are: keys begin smaller, so that scores vary as those of `Factored`.
        variance = projection_variance(d_model, num_heads, d_k) ** 2 / d_model
        return ParameterisationSizes(
            d_k,
            {
                "slices": Slices(num_heads, d_k),
                "k_proj": ToHeads(d_model, d_k, num_heads, self.k_bias, variance),
                "v_proj": ToHeads(d_model, d_v, num_heads, self.v_bias),
                "o_proj": FromHeads(d_v, d_model, num_heads, self.o_bias),
            },
        )


@final
@dataclass(frozen=True)
class IdentityValue(_Identity):
    """W^V = I: the i-th slice of the input is the value of head i, `W_OV = I_i W_i^O`.

    d_v = d_model / num_heads. Source: He and Hofmann 2023, arXiv 2311.01906, who take W^O away too.

    Attributes:
        d_k: width of queries and keys; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `k_bias`, `o_bias`.
    """

    name: ClassVar[str] = "identity_value"
    taken: ClassVar[Side] = "v"
    parameters_formula: ClassVar[str] = "2*h*d*d_k + h*d*d_v"
    cache_formula: ClassVar[str] = "h*(d_k + d_v)"
    v: ClassVar[tuple[str, ...]] = ("slices",)

    d_k: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    o_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_v = slice_width(self.name, d_model, num_heads)
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        return ParameterisationSizes(
            d_k,
            {
                "q_proj": ToHeads(d_model, d_k, num_heads, self.q_bias),
                "k_proj": ToHeads(d_model, d_k, num_heads, self.k_bias),
                "slices": Slices(num_heads, d_v),
                # Values come as they are: the output map begins as small as the others' values are.
                "o_proj": FromHeads(d_v, d_model, num_heads, self.o_bias, 1 / (2 * d_model)),
            },
        )


@final
@dataclass(frozen=True)
class IdentityOutput(_Identity):
    """W^O = I: head i writes the i-th slice of the output, `W_OV = W_i^V I_iᵀ`.

    d_v = d_model / num_heads. Heads no longer mix before the residual sum.

    Attributes:
        d_k: width of queries and keys; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `k_bias`, `v_bias`, and `o_bias` for the output.
    """

    name: ClassVar[str] = "identity_output"
    taken: ClassVar[Side] = "o"
    parameters_formula: ClassVar[str] = "2*h*d*d_k + h*d*d_v"
    cache_formula: ClassVar[str] = "h*(d_k + d_v)"

    d_k: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_v = slice_width(self.name, d_model, num_heads)
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        return ParameterisationSizes(
            d_k,
            {
                "q_proj": ToHeads(d_model, d_k, num_heads, self.q_bias),
                "k_proj": ToHeads(d_model, d_k, num_heads, self.k_bias),
                "v_proj": ToHeads(d_model, d_v, num_heads, self.v_bias),
                "o_proj": Joined(num_heads, d_v, self.o_bias),
            },
        )
