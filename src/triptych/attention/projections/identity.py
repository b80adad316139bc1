"""Maps taken away: the heads read, or write, slices of the stream."""

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
    """Some sides are slices of the stream.

    Attributes:
        taken: those sides.
    """

    taken: ClassVar[tuple[Side, ...]]

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> Parameterisation | None:
        found = super().fitting(weights)
        return found if found is not None and all(_is_sliced(weights, side) for side in cls.taken) else None


def _is_sliced(weights: AttentionWeights, side: Side) -> bool:
    """Whether a side's map is fixed, to its heads' slices of the stream."""
    link, width = weights.chain(side)[0], weights.d_model // weights.num_heads
    if link.learned:
        return False
    fixed = Joined(weights.num_heads, width, False) if side == "o" else Slices(weights.num_heads, width)
    own = fixed.link(fixed.make(), link.weight).weight
    return own.shape == link.weight.shape and (own.is_meta or torch.equal(own, link.weight))


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
    taken: ClassVar[tuple[Side, ...]] = ("q",)
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

    d_v = d_model / num_heads. Source: He and Hofmann 2023, arXiv 2311.01906, who take W^O away too
    (`IdentityOV`).

    Attributes:
        d_k: width of queries and keys; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `k_bias`, `o_bias`.
    """

    name: ClassVar[str] = "identity_value"
    taken: ClassVar[tuple[Side, ...]] = ("v",)
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
    taken: ClassVar[tuple[Side, ...]] = ("o",)
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


@final
@dataclass(frozen=True)
class IdentityOV(_Identity):
    """W^V = W^O = I: head i adds its slice of the tokens it looks at to the same slice, `W_OV = I_i I_iᵀ`.

    d_v = d_model / num_heads. Heads neither change what they move nor mix it, and no map could make what they
    write smaller: it begins √2 times as large as that of `Factored`. Source: He and Hofmann 2023, arXiv
    2311.01906.

    Attributes:
        d_k: width of queries and keys; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `k_bias`, and `o_bias` for the output.
    """

    name: ClassVar[str] = "identity_ov"
    taken: ClassVar[tuple[Side, ...]] = ("v", "o")
    parameters_formula: ClassVar[str] = "2*h*d*d_k"
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
                "o_proj": Joined(num_heads, d_v, self.o_bias),
            },
        )
