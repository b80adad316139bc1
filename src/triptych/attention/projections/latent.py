"""Keys and values from one small latent."""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor, nn

from triptych.algebra.cost import Route
from triptych.algebra.weights import AttentionWeights, standard_scale
from triptych.attention.projections.abstract import (
    Parameterisation,
    Projections,
    at_least_one,
    head_width,
    initialise,
    initialise_input,
    join_heads,
    link_from_input,
    link_to_output,
    projection_variance,
    split_heads,
    through_own_map,
)


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

    d_latent: int | None = None
    d_k: int | None = None
    d_v: int | None = None
    q_bias: bool = False
    k_bias: bool = False
    v_bias: bool = False
    o_bias: bool = False
    down_bias: bool = False

    def build(self, d_model: int, num_heads: int) -> "LatentProjections":
        """Make the five maps; the latent varies as the input, keys and values as `Factored`'s."""
        d_k = head_width(self.d_k, "d_k", d_model, num_heads)
        d_v = head_width(self.d_v, "d_v", d_model, num_heads)
        if self.d_latent is None:
            r = 2 * head_width(None, "d_latent", d_model, num_heads)
        else:
            r = at_least_one(self.d_latent, "d_latent")
        k_variance = projection_variance(d_model, num_heads, d_k) / r
        v_variance = projection_variance(d_model, num_heads, d_v) / r
        return LatentProjections(
            num_heads=num_heads,
            d_k=d_k,
            q_proj=initialise_input(nn.Linear(d_model, num_heads * d_k, bias=self.q_bias)),
            kv_down=initialise(nn.Linear(d_model, r, bias=self.down_bias), 1 / d_model),
            k_up=initialise(nn.Linear(r, num_heads * d_k, bias=self.k_bias), k_variance),
            v_up=initialise(nn.Linear(r, num_heads * d_v, bias=self.v_bias), v_variance),
            o_proj=initialise(nn.Linear(num_heads * d_v, d_model, bias=self.o_bias)),
        )

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "Latent | None":
        """Two maps each for keys and values, the first the very same."""
        if len(weights.q) != 1 or not len(weights.k) == len(weights.v) == 2:
            return None
        return cls(
            d_latent=weights.k[0].d_out,
            d_k=weights.q[0].d_out,
            d_v=weights.v[1].d_out,
            q_bias=weights.q[0].bias is not None,
            k_bias=weights.k[1].bias is not None,
            v_bias=weights.v[1].bias is not None,
            o_bias=weights.o_bias is not None,
            down_bias=weights.k[0].bias is not None,
        )


@final
class LatentProjections(Projections):
    """The matrices of `Latent`."""

    caches_keys: ClassVar[bool] = False
    no_two_memories: ClassVar[str] = "latent makes keys and values from one latent, of one sequence"

    def __init__(
        self,
        *,
        num_heads: int,
        d_k: int,
        q_proj: nn.Linear,
        kv_down: nn.Linear,
        k_up: nn.Linear,
        v_up: nn.Linear,
        o_proj: nn.Linear,
    ) -> None:
        super().__init__()
        self.d_model = q_proj.in_features
        self.num_heads = num_heads
        self.d_k = d_k
        self.q_proj = q_proj
        self.kv_down = kv_down
        self.k_up = k_up
        self.v_up = v_up
        self.o_proj = o_proj

    def queries(self, x: Tensor) -> Tensor:
        """`x W_i^Q`."""
        return split_heads(self.q_proj(x), self.num_heads)

    def remember(self, key_input: Tensor, value_input: Tensor) -> tuple[Tensor, ...]:
        """The latent, once for all heads: r numbers a token."""
        return (self.kv_down(key_input)[:, None],)

    def keys_values(self, remembered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of every head, rebuilt from the latent."""
        latent = remembered[0][:, 0]
        return split_heads(self.k_up(latent), self.num_heads), split_heads(self.v_up(latent), self.num_heads)

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
        return self.o_proj(join_heads(heads))  # type: ignore[no-any-return]

    def weights(self) -> AttentionWeights:
        """Keys and values are two links, the first the same."""
        down = link_from_input(self.kv_down, 1)
        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            scale=standard_scale(self.d_k),
            q=(link_from_input(self.q_proj, self.num_heads),),
            k=(down, link_from_input(self.k_up, self.num_heads)),
            v=(down, link_from_input(self.v_up, self.num_heads)),
            o=link_to_output(self.o_proj, self.num_heads),
            o_bias=self.o_proj.bias,
        )
