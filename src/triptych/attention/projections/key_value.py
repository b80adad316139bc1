"""One map for keys and values."""

from dataclasses import dataclass
from typing import ClassVar, final

from triptych.attention.projections.abstract import (
    Parameterisation,
    ParameterisationSizes,
    head_width,
)
from triptych.attention.projections.maps import FromHeads, ToHeads


@final
@dataclass(frozen=True)
class KeyValue(Parameterisation):
    """K = V: `W_QK = W_i^Q W_i^Kᵀ`, `W_OV = W_i^K W_i^O`, half the cache.

    Attributes:
        d_k: width of queries, keys and values alike; d_model / num_heads if None.
        q_bias: whether the query map has a bias; likewise `kv_bias` (keys and values), `o_bias`.
    """

    name: ClassVar[str] = "key_value"
    parameters_formula: ClassVar[str] = "3*h*d*d_k"
    cache_formula: ClassVar[str] = "h*d_k"
    k: ClassVar[tuple[str, ...]] = ("kv_proj",)
    v: ClassVar[tuple[str, ...]] = ("kv_proj",)

    d_k: int | None = None
    q_bias: bool = False
    kv_bias: bool = False
    o_bias: bool = False

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        return ParameterisationSizes(
            d_k,
            {
                "q_proj": ToHeads(d_model, d_k, num_heads, self.q_bias),
                "kv_proj": ToHeads(d_model, d_k, num_heads, self.kv_bias),
                "o_proj": FromHeads(d_k, d_model, num_heads, self.o_bias),
            },
        )
