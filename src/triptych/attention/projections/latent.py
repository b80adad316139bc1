"""Keys and values from one small latent."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn

from triptych.algebra.cost import Route
from triptych.attention.projections.abstract import (
    Parameterisation,
    ParameterisationSizes,
    Projections,
    at_least_one,
    head_width,
    projection_variance,
)
from triptych.attention.projections.maps import FromHeads, ToHeads, through_own_map


@final
@dataclass(frozen=True)
class Latent(Parameterisation):
    """Multi-head latent attention: `W_QK = W_i^Q (W^D U_i^K)ᵀ`, `W_OV = W^D U_i^V W_i^O`.

    A token is remembered as its latent `y W^D`, r numbers for all heads. Decoding need not rebuild
    a key: `q_i k_iᵀ = (q_i U_i^Kᵀ) (y W^D)ᵀ` (the absorbed route).

    Attributes:
        d_latent: width r of the latent; 2 d_model / num_heads if None.
        d_k: width of queries and keys; d_model / num_heads if None.
        d_v: width of values; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `k_bias`, `v_bias` (on U_i^K, U_i^V) and
            `o_bias`.
        down_bias: whether W^D has one.

    Source: DeepSeek-AI 2024, arXiv 2405.04434, section 2.1, without decoupled rotary positions.
    """

    name: ClassVar[str] = "latent"
    parameters_formula: ClassVar[str] = "h*d*d_k + d*d_latent + h*d_latent*(d_k + d_v) + h*d*d_v"
    cache_formula: ClassVar[str] = "d_latent"
    no_rotary: ClassVar[str] = (
        "a rotation between U_i^K and the query would keep the latent from being read as it is cached "
        "(decoupled rotary keys are not part of this parameterisation)"
    )
    k: ClassVar[tuple[str, ...]] = ("kv_down", "k_up")
    v: ClassVar[tuple[str, ...]] = ("kv_down", "v_up")
    read_off: ClassVar[Mapping[str, str]] = {
        "d_latent": "kv_down",
        "d_v": "v_up",
        "k_bias": "k_up",
        "v_bias": "v_up",
        "down_bias": "kv_down",
    }

    d_latent: int | None = None
    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    down_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        if self.d_latent is None:
            r = 2 * head_width(None, "d_latent", d_model, num_heads)
        else:
            r = at_least_one(self.d_latent, "d_latent")
        # The latent varies as the input, keys and values as those of `Factored`.
        k_variance = projection_variance(d_model, num_heads, d_k) / r
        v_variance = projection_variance(d_model, num_heads, d_v) / r
        return ParameterisationSizes(
            d_k,
            {
                "q_proj": ToHeads(d_model, d_k, num_heads, self.q_bias),
                "kv_down": ToHeads(d_model, r, 1, self.down_bias, 1 / d_model),
                "k_up": ToHeads(r, d_k, num_heads, self.k_bias, k_variance),
                "v_up": ToHeads(r, d_v, num_heads, self.v_bias, v_variance),
                "o_proj": FromHeads(d_v, d_model, num_heads, self.o_bias),
            },
        )

    def build(self, d_model: int, num_heads: int) -> "LatentProjections":
        return LatentProjections(self, d_model, num_heads)


@final
class LatentProjections(Projections):
    """The maps of `Latent`, with the absorbed route."""

    kv_down: nn.Linear
    k_up: nn.Linear
    v_up: nn.Linear

    def route(self, query_len: int, key_len: int) -> Route:
        """Absorbed where that takes fewer multiplications: few queries on many keys.

        Expanded: r h (d_k + d_v) a key to rebuild it, and h (d_k + d_v) a pair of query and key.
        Absorbed: r h (d_k + d_v) a query, and 2 h r a pair.
        """
        r, widths = self.kv_down.out_features, self.d_k + self.v_up.out_features // self.num_heads
        expanded = key_len * r * widths + query_len * key_len * widths
        absorbed = query_len * r * widths + query_len * key_len * 2 * r
        return "absorbed" if absorbed < expanded else "expanded"

    @property
    def absorbs_biases(self) -> bool:
        """A value bias passes through unweighted, which is exact for weights that sum to 1."""
        return self.v_up.bias is None

    def absorbed(self, q: Tensor, remembered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries moved into the latent space; the latent is the one key and value head.

        The key bias is left out: it adds the same to every score of a query.
        """
        (latent,) = remembered
        up = self.k_up.weight.view(self.num_heads, self.d_k, -1)
        return through_own_map(q, up), latent, latent

    def output(self, heads: Tensor, route: Route = "expanded") -> Tensor:
        """`Σ_i head_i W_i^O`; in the absorbed form head_i is still in the latent space."""
        if route == "absorbed":
            up = self.v_up.weight.view(self.num_heads, -1, self.kv_down.out_features)
            heads = through_own_map(heads, up.mT)
            if self.v_up.bias is not None:
                heads = heads + self.v_up.bias.view(self.num_heads, 1, -1)
        return super().output(heads)
