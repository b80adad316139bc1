"""The parameterisations of the package: chains of maps, and their sizes.

Each class is a row of the table: its chains (`q`, `k`, `v`, `o`) unless a chain is one map, its options, and
maps with other sizes or initial values than the default (`Parameterisation.maps`). Options have the same
meaning in all classes: `d_k` is the width of queries and keys, `d_v` the width of values, d_model / num_heads
if None; `x_bias` adds a bias to the map `x_proj`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

import torch

from triptych.core.algebra.semantics import HeadGate
from triptych.core.algebra.weights import AttentionWeights, Side, standard_scale
from triptych.core.attention.projections.abstract import (
    LayerSizes,
    Maps,
    Parameterisation,
    at_least_one,
)
from triptych.core.attention.projections.maps import (
    ConstantFactor,
    FromHeads,
    Joined,
    Mixing,
    PerHead,
    Slices,
    ToHeads,
)


@dataclass(frozen=True)
class _OfFourSides(Parameterisation):
    """The options of maps to queries, keys, values and output."""

    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False


@final
@dataclass(frozen=True)
class Factored(_OfFourSides):
    """The paper's parameterisation: `W_QK = W_i^Q W_i^Kᵀ`, `W_OV = W_i^V W_i^O`. Biases are not in the paper.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.2.2.
    """

    name = "factored"
    parameters_formula = "2*h*d*d_k + 2*h*d*d_v"
    cache_formula = "h*(d_k + d_v)"


@final
@dataclass(frozen=True)
class Bilinear(Parameterisation):
    """One matrix per head instead of two: `W_QK = W_i` (d_model × d_model), `W_OV = W_i^V W_i^O`.

    The input itself is the single key head, `x W_i` are the queries. W_i can have full rank; the product
    `W_i^Q W_i^Kᵀ` has rank d_k at most, and fewer parameters exactly if d_k < d_model / 2. d_k only sets the
    scale: scores are divided by √d_k.
    """

    name = "bilinear"
    parameters_formula = "h*d**2 + 2*h*d*d_v"
    cache_formula = "d + h*d_v"
    no_rotary = (
        "one matrix W_i takes the place of both W^Q and W^K, so there are no queries and keys to turn: "
        "under rotary positions the form would have to change with the distance"
    )
    no_qk_norm = (
        "one matrix W_i takes the place of both W^Q and W^K, "
        "so there are no queries and keys to normalise"
    )
    k = ()
    read_off: ClassVar[Mapping[str, str]] = {"d_k": "scale"}

    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def maps(self, s: LayerSizes) -> Maps:
        variance = (
            s.variance(s.d_k) ** 2 * s.d_k / s.d**2
        )  # scores vary as in `Factored`
        return {
            **super().maps(s),
            "q_proj": ToHeads(s.d, s.d, s.h, self.q_bias, variance),
        }


@final
@dataclass(frozen=True)
class Stacked(_OfFourSides):
    """A map of all heads, then a map per head: `W_QK = (W^Q W_i^Q)(W^K W_i^K)ᵀ`, `W_OV = W^V W_i^V W_i^O`.

    The two maps follow each other directly, so the forms are the same as in `Factored`: only the
    parameterisation, and hence the training, differs. `first_bias` adds biases to W^Q, W^K and W^V.
    """

    name = "stacked"
    parameters_formula = "3*d**2 + 2*h*d*d_k + 2*h*d*d_v"
    cache_formula = "h*(d_k + d_v)"
    q = ("q_first", "q_proj")
    k = ("k_first", "k_proj")
    v = ("v_first", "v_proj")
    read_off: ClassVar[Mapping[str, str]] = {"first_bias": "q_first k_first v_first"}

    first_bias: bool = False

    def maps(self, s: LayerSizes) -> Maps:
        first = ToHeads(
            s.d, s.d, 1, self.first_bias, 1 / s.d
        )  # keeps the variance of its input
        return {"q_first": first, "k_first": first, "v_first": first, **super().maps(s)}


@final
@dataclass(frozen=True)
class Symmetric(Parameterisation):
    """Queries and keys by one map: `W_QK = W_i W_iᵀ`, `W_OV = W_i^V W_i^O`.

    The form is symmetric and positive semi-definite: two tokens score each other equally (before the
    softmax), and the score of a token with itself is never negative. Under rotary positions only the form at
    distance 0 is symmetric.
    """

    name = "symmetric"
    parameters_formula = "h*d*d_k + 2*h*d*d_v"
    cache_formula = "h*(d_k + d_v)"
    q = ("qk_proj",)
    k = ("qk_proj",)
    read_off: ClassVar[Mapping[str, str]] = {"d_k": "qk_proj"}

    d_k: int | None = None
    d_v: int | None = None
    qk_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def maps(self, s: LayerSizes) -> Maps:
        return {
            "qk_proj": ToHeads(s.d, s.d_k, s.h, self.qk_bias, _tied_variance(s)),
            **super().maps(s),
        }


@final
@dataclass(frozen=True)
class Shared(Parameterisation):
    """W^Q = W^K = W^V: `W_QK = W_i W_iᵀ`, `W_OV = W_i W_i^O`."""

    name = "shared"
    parameters_formula = "2*h*d*d_k"
    cache_formula = "h*d_k"
    q = ("qkv_proj",)
    k = ("qkv_proj",)
    v = ("qkv_proj",)
    read_off: ClassVar[Mapping[str, str]] = {"d_k": "qkv_proj"}

    d_k: int | None = None
    qkv_bias: bool = False
    o_bias: bool = False

    def maps(self, s: LayerSizes) -> Maps:
        # W_O compensates for W_i, drawn smaller than by Glorot's rule.
        variance = _tied_variance(s)
        glorot = 2 / (s.d + s.h * s.d_k)
        return {
            "qkv_proj": ToHeads(s.d, s.d_k, s.h, self.qkv_bias, variance),
            "o_proj": FromHeads(
                s.d_k, s.d, s.h, self.o_bias, glorot * glorot / 2 / variance
            ),
        }


@final
@dataclass(frozen=True)
class KeyValue(Parameterisation):
    """K = V: `W_QK = W_i^Q W_i^Kᵀ`, `W_OV = W_i^K W_i^O`, with half the cache."""

    name = "key_value"
    parameters_formula = "3*h*d*d_k"
    cache_formula = "h*d_k"
    k = ("kv_proj",)
    v = ("kv_proj",)

    d_k: int | None = None
    q_bias: bool = False
    kv_bias: bool = False
    o_bias: bool = False

    def maps(self, s: LayerSizes) -> Maps:
        return {
            "q_proj": ToHeads(s.d, s.d_k, s.h, self.q_bias),
            "kv_proj": ToHeads(s.d, s.d_k, s.h, self.kv_bias),
            "o_proj": FromHeads(s.d_k, s.d, s.h, self.o_bias),
        }


@final
@dataclass(frozen=True)
class FourMatrix(_OfFourSides):
    """The "more symmetric" head: `W_QK = W_i^Q W_i^Kᵀ`, `W_OV = (1/√d_k) W_i^V M_iᵀ W_i^O`.

    The 4th matrix as weights, M_i (d_v × d_v): `softmax(QKᵀ/√d_k) V M_iᵀ / √d_k`. M_i directly precedes
    W_i^O and can be folded into it. The 4th matrix as data (n × d_v, a row per token) is
    `four_way_attention`, which cannot be a layer.
    """

    name = "four_matrix"
    parameters_formula = "2*h*d*d_k + 2*h*d*d_v + h*d_v**2"
    cache_formula = "h*(d_k + d_v)"
    o = ("m_weight", "m_factor", "o_proj")

    def maps(self, s: LayerSizes) -> Maps:
        maps = dict(super().maps(s))
        last = maps.pop("o_proj")
        return {
            **maps,
            "m_weight": PerHead(s.h, s.d_v, s.d_k / s.d_v),  # compensates the factor
            "m_factor": ConstantFactor(standard_scale(s.d_k), s.d_v),
            "o_proj": last,
        }


@final
@dataclass(frozen=True)
class Direct(Parameterisation):
    """`head_i = Attention(Q_i, K_i, V_i)`, the i-th slices of the input itself: `W_QK = I_i I_iᵀ`.

    Directly after a learned embedding, the maps of a layer could be absorbed into the embedding. In deeper
    layers, the same slices of the stream serve as queries, keys and values. d_k = d_v = d_model / num_heads.
    """

    name = "direct"
    parameters_formula = "h*d*d_v"
    cache_formula = "d"
    q = ("slices",)
    k = ("slices",)
    v = ("slices",)

    o_bias: bool = False

    def maps(self, s: LayerSizes) -> Maps:
        # Values are unchanged inputs: the output map starts as small as values of other parameterisations.
        return {
            "slices": Slices(s.h, s.slice_width),
            "o_proj": FromHeads(s.slice_width, s.d, s.h, self.o_bias, 1 / (2 * s.d)),
        }


@dataclass(frozen=True)
class _OfGroups(_OfFourSides):
    """Options of groups: consecutive query heads read one key-value head, and may share an output map."""

    cache_formula = "num_kv_heads*(d_k + d_v)"
    read_off: ClassVar[Mapping[str, str]] = {"num_kv_heads": "k_proj"}
    heads_of_map: ClassVar[int] = 1  # number of heads per output map

    num_kv_heads: int = 1

    def maps(self, s: LayerSizes) -> Maps:
        groups = at_least_one(self.num_kv_heads, "num_kv_heads")
        if s.h % (self.heads_of_map * groups):
            times = f"{self.heads_of_map} × " if self.heads_of_map > 1 else ""
            raise ValueError(
                f"{times}num_kv_heads {groups} does not divide num_heads {s.h}"
            )
        # Keys and values have the same variance as in `Factored`.
        return {
            **super().maps(s),
            "k_proj": ToHeads(s.d, s.d_k, groups, self.k_bias, s.variance(s.d_k) / s.d),
            "v_proj": ToHeads(s.d, s.d_v, groups, self.v_bias, s.variance(s.d_v) / s.d),
            "o_proj": FromHeads(s.d_v, s.d, s.h // self.heads_of_map, self.o_bias),
        }


@final
@dataclass(frozen=True)
class Grouped(_OfGroups):
    """Several query heads read one key-value head: `W_QK = W_i^Q W_g(i)^Kᵀ`, `W_OV = W_g(i)^V W_i^O`.

    Consecutive query heads share a key-value head, `num_kv_heads` in total. One key-value head is multi-query
    attention; `num_heads` key-value heads are `Factored`.

    Source: Shazeer 2019, arXiv 1911.02150; Ainslie et al. 2023, arXiv 2305.13245.
    """

    name = "grouped"
    parameters_formula = "h*d*d_k + num_kv_heads*d*(d_k + d_v) + h*d*d_v"


@final
@dataclass(frozen=True)
class Differential(_OfGroups):
    """Pairs of heads with one W_O: λ times the second head is subtracted, `A_1 V − λ A_2 V`.

    λ is a gate per token and pair, `σ(x w)`, initially 1/2. The two heads of a pair read the same key-value
    head, of `num_kv_heads`. `num_heads` counts both heads of a pair.

    Source: Ye et al. 2026, Differential Transformer V2 (huggingface.co/blog/microsoft/diff-attn-v2).
    """

    name = "differential"
    parameters_formula = "h*d*d_k + num_kv_heads*d*(d_k + d_v) + h*d*d_v/2 + h*d/2"
    heads_of_map = 2

    def gate(self, d_model: int, num_heads: int) -> HeadGate:
        return HeadGate(
            torch.zeros(num_heads // 2, d_model), whole=(True, False) * (num_heads // 2)
        )


@final
@dataclass(frozen=True)
class Latent(_OfFourSides):
    """Multi-head latent attention: `W_QK = W_i^Q (W^D U_i^K)ᵀ`, `W_OV = W^D U_i^V W_i^O`.

    The cache stores the latent `y W^D` of a token, `d_latent` values for all heads together (2 d_model /
    num_heads if None). Decoding attends to latents without keys: `q_i k_iᵀ = (q_i U_i^Kᵀ) (y W^D)ᵀ` (the
    absorbed route). `k_bias` and `v_bias` belong to U_i^K and U_i^V, `down_bias` to W^D.

    Source: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1, without decoupled rotary positions.
    """

    name = "latent"
    parameters_formula = "h*d*d_k + d*d_latent + h*d_latent*(d_k + d_v) + h*d*d_v"
    cache_formula = "d_latent"
    no_rotary = (
        "a rotation between U_i^K and the query would keep the latent from being read as it is cached "
        "(decoupled rotary keys are not part of this parameterisation)"
    )
    k = ("kv_down", "k_up")
    v = ("kv_down", "v_up")
    read_off: ClassVar[Mapping[str, str]] = {
        "d_latent": "kv_down",
        "d_v": "v_up",
        "k_bias": "k_up",
        "v_bias": "v_up",
        "down_bias": "kv_down",
    }

    d_latent: int | None = None
    down_bias: bool = False

    def maps(self, s: LayerSizes) -> Maps:
        r = (
            2 * s.width("d_latent")
            if self.d_latent is None
            else at_least_one(self.d_latent, "d_latent")
        )
        # The latent has the variance of the input; keys and values vary as in `Factored`.
        return {
            "q_proj": ToHeads(s.d, s.d_k, s.h, self.q_bias),
            "kv_down": ToHeads(s.d, r, 1, self.down_bias, 1 / s.d),
            "k_up": ToHeads(r, s.d_k, s.h, self.k_bias, s.variance(s.d_k) / r),
            "v_up": ToHeads(r, s.d_v, s.h, self.v_bias, s.variance(s.d_v) / r),
            "o_proj": FromHeads(s.d_v, s.d, s.h, self.o_bias),
        }


@final
@dataclass(frozen=True)
class Collaborative(_OfFourSides):
    """Shared query and key maps, weighted per head: `W_QK = W^Q diag(m_i) W^Kᵀ`, `W_OV = W_i^V W_i^O`.

    All heads share `d_shared` query and key channels (d_model if None). d_k only sets the scale: scores are
    divided by √d_k.

    Source: Cordonnier et al. 2020, arXiv 2006.16362.
    """

    name = "collaborative"
    parameters_formula = "2*d*d_shared + h*d_shared + 2*h*d*d_v"
    cache_formula = "d_shared + h*d_v"
    no_qk_norm = (
        "heads differ by how much they make of each shared channel, "
        "and a norm would take that off again"
    )
    q = ("q_proj", "mixing")
    read_off: ClassVar[Mapping[str, str]] = {"d_shared": "k_proj", "d_k": "scale"}

    d_shared: int | None = None

    def maps(self, s: LayerSizes) -> Maps:
        r = s.d if self.d_shared is None else at_least_one(self.d_shared, "d_shared")
        variance = s.variance(s.d_k) / s.d
        return {
            "q_proj": ToHeads(s.d, r, 1, self.q_bias, variance),
            "k_proj": ToHeads(s.d, r, 1, self.k_bias, variance),
            "mixing": Mixing(s.h, r, s.d_k / r),
            "v_proj": ToHeads(s.d, s.d_v, s.h, self.v_bias),
            "o_proj": FromHeads(s.d_v, s.d, s.h, self.o_bias),
        }


@dataclass(frozen=True)
class _Sliced(Parameterisation):
    """Chains without a map: the input or the output of a head is its slice of the stream."""

    sliced: ClassVar[tuple[Side, ...]] = ()

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> Parameterisation | None:
        fits = all(_is_sliced(weights, side) for side in cls.sliced)
        return super().fitting(weights) if fits else None


@final
@dataclass(frozen=True)
class IdentityQuery(_Sliced):
    """W^Q = I: the query of head i is the i-th slice of the input, `W_QK = I_i W_i^Kᵀ`.

    d_k = d_model / num_heads. Source: arXiv 2510.23912.
    """

    name = "identity_query"
    parameters_formula = "h*d*d_k + 2*h*d*d_v"
    cache_formula = "h*(d_k + d_v)"
    sliced = ("q",)
    q = ("slices",)

    d_v: int | None = None
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def maps(self, s: LayerSizes) -> Maps:
        # Queries are unchanged inputs: keys start smaller, so that scores vary as in `Factored`.
        key = ToHeads(s.d, s.d_k, s.h, self.k_bias, s.variance(s.d_k) ** 2 / s.d)
        return {"slices": Slices(s.h, s.d_k), **super().maps(s), "k_proj": key}


@final
@dataclass(frozen=True)
class IdentityValue(_Sliced):
    """W^V = I: the value of head i is the i-th slice of the input, `W_OV = I_i W_i^O`.

    d_v = d_model / num_heads. Source: He and Hofmann 2023, arXiv 2311.01906, who remove W^O too
    (`IdentityOV`).
    """

    name = "identity_value"
    parameters_formula = "2*h*d*d_k + h*d*d_v"
    cache_formula = "h*(d_k + d_v)"
    sliced = ("v",)
    v = ("slices",)

    d_k: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    o_bias: bool = False

    def maps(self, s: LayerSizes) -> Maps:
        # Values are unchanged inputs: the output map starts as small as values of other parameterisations.
        last = FromHeads(s.d_v, s.d, s.h, self.o_bias, 1 / (2 * s.d))
        return {**super().maps(s), "slices": Slices(s.h, s.d_v), "o_proj": last}


@final
@dataclass(frozen=True)
class IdentityOutput(_Sliced):
    """W^O = I: the i-th slice of the output is that of head i, `W_OV = W_i^V I_iᵀ`.

    d_v = d_model / num_heads. Heads do not mix before the residual sum. `o_bias` belongs to the output.
    """

    name = "identity_output"
    parameters_formula = "2*h*d*d_k + h*d*d_v"
    cache_formula = "h*(d_k + d_v)"
    sliced = ("o",)

    d_k: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False

    def maps(self, s: LayerSizes) -> Maps:
        return {**super().maps(s), "o_proj": Joined(s.h, s.d_v, self.o_bias)}


@final
@dataclass(frozen=True)
class IdentityOV(_Sliced):
    """W^V = W^O = I: head i moves its slice of the attended tokens to the same slice, `W_OV = I_i I_iᵀ`.

    d_v = d_model / num_heads. Heads neither change nor mix the values. Outputs start √2 times as large as
    outputs of `Factored`, because a map to scale them is missing. `o_bias` belongs to the output.

    Source: He and Hofmann 2023, arXiv 2311.01906.
    """

    name = "identity_ov"
    parameters_formula = "2*h*d*d_k"
    cache_formula = "h*(d_k + d_v)"
    sliced = ("v", "o")
    v = ("slices",)

    d_k: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    o_bias: bool = False

    def maps(self, s: LayerSizes) -> Maps:
        return {
            **super().maps(s),
            "slices": Slices(s.h, s.d_v),
            "o_proj": Joined(s.h, s.d_v, self.o_bias),
        }


def _tied_variance(s: LayerSizes) -> float:
    """Return the variance of W with which `x W Wᵀ yᵀ` varies as the scores of `Factored`.

    W and Wᵀ are not independent, which adds d_k / d_model to the variance; a smaller W compensates for it.
    """
    return s.variance(s.d_k) / s.d / math.sqrt(1 + s.d_k / s.d)


def _is_sliced(weights: AttentionWeights, side: Side) -> bool:
    """Return True if the chain is one fixed map from or to the slices of the heads."""
    chain = weights.chain(side)
    width = weights.d_model // weights.num_heads
    if len(chain) != 1 or chain[0].learned:
        return False
    fixed = (
        Joined(weights.num_heads, width, False)
        if side == "o"
        else Slices(weights.num_heads, width)
    )
    own = fixed.link(fixed.make(), chain[0].weight).weight
    return own.shape == chain[0].weight.shape and (
        own.is_meta or torch.equal(own, chain[0].weight)
    )
