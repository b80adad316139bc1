"""What every way to write a head has in common.

A `Parameterisation` is the choice (a small frozen record, fit for a recipe); `Projections` is the
module it builds, which holds the matrices. The layer asks its projections for queries, for what to
remember of each token, for keys and values made of it, and for the output: it never knows which
parameterisation it holds.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triptych.algebra.cost import Route
from triptych.algebra.weights import AttentionWeights, Chain, Link


class Projections(nn.Module, ABC):
    """The matrices of one attention layer.

    Attributes:
        d_model: width of input and output.
        num_heads: number of query heads.
        d_k: the width whose root the scores are divided by.
        o_proj: W^O, from the heads side by side to the model's width.
        caches_keys: the first thing remembered of a token is its keys and nothing but its keys, so
            that a rotation can be applied once, when it is stored.
        no_two_memories: why keys and values cannot come from two sequences; "" if they can.
    """

    d_model: int
    num_heads: int
    d_k: int
    o_proj: nn.Linear
    caches_keys: ClassVar[bool] = True
    no_two_memories: ClassVar[str] = ""

    @abstractmethod
    def queries(
        self, x: Float[Tensor, "batch query_len d_model"]
    ) -> Float[Tensor, "batch num_heads query_len width"]:
        """The queries of every head."""

    @abstractmethod
    def remember(
        self,
        key_input: Float[Tensor, "batch key_len d_model"],
        value_input: Float[Tensor, "batch key_len d_model"],
    ) -> tuple[Tensor, ...]:
        """What is kept of each token attended to: tensors `[batch, heads, key_len, width]`.

        This is what a cache stores while decoding, as small as the parameterisation allows.
        """

    def keys_values(self, remembered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Keys `[batch, num_key_heads, key_len, width]` and values `[batch, num_value_heads, …]`."""
        k, v = remembered
        return k, v

    def output(
        self, heads: Float[Tensor, "batch num_heads query_len width"], route: Route = "expanded"
    ) -> Float[Tensor, "batch query_len d_model"]:
        """`Σ_i head_i W_i^O`, as one product over the heads side by side."""
        return self.o_proj(join_heads(heads))  # type: ignore[no-any-return]

    @abstractmethod
    def weights(self) -> AttentionWeights:
        """The matrices as chains of maps: views of the parameters, sharing included."""

    def of_one_sequence(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> tuple[Float[Tensor, "batch num_heads length width"], tuple[Tensor, ...]]:
        """`queries(x)` and `remember(x, x)`, for self-attention; what both need is computed once."""
        remembered = self.remember(x, x)
        return self.queries(x), remembered

    def route(self, query_len: int, key_len: int) -> Route:
        """The cheaper of the ways to attend: only a few parameterisations have more than one."""
        return "expanded"

    @property
    def absorbs_biases(self) -> bool:
        """Whether the absorbed route stays exact where weights do not sum to 1 (masked, dropped)."""
        return True

    def absorbed(self, q: Tensor, remembered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the absorbed route: what was remembered serves as it is."""
        raise NotImplementedError(f"{type(self).__name__} has one route only")

    @torch.no_grad()
    def load(self, weights: AttentionWeights) -> None:
        """Copy the numbers of a writing of the same structure into the parameters.

        Raises:
            ValueError: the structures differ, or the scales do and no map can make up for it.
        """
        mine = self.weights()
        weights = weights.with_scale(mine.scale)
        difference = structural_difference(mine, weights)
        if difference:
            raise ValueError(f"{type(self).__name__} cannot hold these weights: {difference}")
        for own, given in zip(mine.links(), weights.links(), strict=True):
            if own.learned:
                own.weight.copy_(given.weight)
            elif not _same_but_rounded(own.weight, given.weight):
                raise ValueError(f"{type(self).__name__} cannot hold these weights: a fixed map differs")
            if own.bias is not None:
                own.bias.copy_(torch.zeros_like(own.bias) if given.bias is None else given.bias)
        if mine.o_bias is not None:
            mine.o_bias.copy_(torch.zeros_like(mine.o_bias) if weights.o_bias is None else weights.o_bias)


@dataclass(frozen=True)
class Parameterisation(ABC):
    """A way to write the two forms, without sizes of a particular model.

    Attributes:
        name: as in a recipe.
        parameters_formula: learned numbers of a layer without biases, in `d`, `h`, `d_k`, `d_v` and
            the class's own sizes, as a Python expression.
        cache_formula: numbers cached per token, likewise.
        no_rotary: why rotary positions make no sense with it; "" if they do.
    """

    name: ClassVar[str]
    parameters_formula: ClassVar[str]
    cache_formula: ClassVar[str]
    no_rotary: ClassVar[str] = ""

    @abstractmethod
    def build(self, d_model: int, num_heads: int) -> Projections:
        """Make the matrices for a layer of this size, freshly initialised.

        Raises:
            ValueError: sizes that do not fit, with the numbers.
        """

    @classmethod
    @abstractmethod
    def fitting(cls, weights: AttentionWeights) -> "Parameterisation | None":
        """The options with which this parameterisation might hold a writing; None if it never could.

        Only widths and biases have to be read off: whether the structure really is the same is
        checked afterwards, on what `build` makes.
        """

    def skeleton(self, d_model: int, num_heads: int) -> AttentionWeights:
        """The writing of a layer of this size, shapes without numbers (on the "meta" device).

        Raises:
            ValueError: sizes that do not fit.
        """
        with torch.device("meta"):
            return self.build(d_model, num_heads).weights()


def structural_difference(one: AttentionWeights, other: AttentionWeights) -> str:
    """Why the writing `one` has no room for the numbers of `other`; "" if it has.

    Scales may differ, and a bias that `other` lacks is a bias of zeros.
    """
    if one.num_heads != other.num_heads:
        return f"{one.num_heads} heads, not {other.num_heads}"
    links: dict[int, Link] = {}
    for side in ("q", "k", "v", "o"):
        mine, theirs = one.chain(side), other.chain(side)
        if len(mine) != len(theirs):
            return f"{side} is a chain of {len(mine)} maps, not {len(theirs)}"
        for own, given in zip(mine, theirs, strict=True):
            if own.weight.shape != given.weight.shape:
                return f"a map of {side} is {list(own.weight.shape)}, not {list(given.weight.shape)}"
            if own.learned != given.learned:
                return f"a map of {side} is {'learned' if own.learned else 'fixed'} here only"
            if own.bias is None and given.bias is not None:
                return f"a map of {side} has no place for its bias"
            if links.setdefault(id(own), given) is not given:
                return f"{side} shares a map here only"
    shared = {id(link) for link in links.values()}
    if len(shared) != len(links):
        return "maps are shared there only"
    if one.o_bias is None and other.o_bias is not None:
        return "there is no place for the output bias"
    return ""


def _same_but_rounded(fixed: Tensor, given: Tensor) -> bool:
    """Whether a fixed map is the same, or was before it passed through a dtype of fewer digits."""
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return any(torch.equal(fixed.to(dtype).to(fixed.dtype), given) for dtype in dtypes)


def head_width(width: int | None, name: str, d_model: int, num_heads: int) -> int:
    """A width given, or d_model shared out among the heads.

    Raises:
        ValueError: num_heads does not divide d_model and no width is given, or one is not positive.
    """
    at_least_one_head(num_heads)
    if width is not None:
        return at_least_one(width, name)
    if d_model % num_heads:
        raise ValueError(f"num_heads {num_heads} does not divide d_model {d_model}: give {name} explicitly")
    return d_model // num_heads


def at_least_one_head(num_heads: int) -> int:
    """The number of heads, if it can be one.

    Raises:
        ValueError: it cannot.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}: at least one head is needed")
    return num_heads


def at_least_one(value: int, name: str) -> int:
    """The value, if it can be a size.

    Raises:
        ValueError: it cannot.
    """
    if value < 1:
        raise ValueError(f"{name} is {value}: it must be at least 1")
    return value


def projection_variance(d_model: int, num_heads: int, d_k: int) -> float:
    """Variance of a channel of the queries as `initialise_input` draws them, for inputs of variance 1.

    Every parameterisation is initialised so that one score, and one value on the way out, vary as much
    as with maps of this variance, at the same size and for inputs drawn independently.
    """
    return d_model / (d_model + num_heads * d_k)


def initialise(linear: nn.Linear, variance: float | None = None) -> nn.Linear:
    """Draw weights evenly from ± √(3 · variance) (Glorot's variance if None) and set the bias to 0."""
    if variance is None:
        nn.init.xavier_uniform_(linear.weight)
    else:
        bound = math.sqrt(3 * variance)
        nn.init.uniform_(linear.weight, -bound, bound)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)
    return linear


def initialise_input(linear: nn.Linear) -> nn.Linear:
    """Draw a map into the heads with half of Glorot's variance: as one map to Q, K and V would be drawn.

    Post-norm models learn faster so: in 200 steps of a small one to 4.30 instead of 4.59 nats (docs/log.md).
    """
    return initialise(linear, 1 / (linear.in_features + linear.out_features))


def link_from_input(linear: nn.Linear, copies: int) -> Link:
    """A stored map `[copies · d_out, d_in]` as one link with a copy a head."""
    weight = linear.weight.view(copies, -1, linear.in_features).mT
    return Link(weight, None if linear.bias is None else linear.bias.view(copies, -1))


def link_to_output(linear: nn.Linear, copies: int) -> Chain:
    """A stored output map `[d_out, copies · d_in]` as a chain of one link; its bias is left out."""
    return (Link(linear.weight.view(linear.out_features, copies, -1).permute(1, 2, 0)),)


def split_heads(
    x: Float[Tensor, "batch length joined"], num_heads: int
) -> Float[Tensor, "batch num_heads length width"]:
    """Head i takes the i-th slice of the last dimension."""
    batch, length, _ = x.shape
    return x.view(batch, length, num_heads, -1).transpose(1, 2)


def join_heads(
    heads: Float[Tensor, "batch num_heads length width"],
) -> Float[Tensor, "batch length joined"]:
    """The inverse of `split_heads`."""
    batch, _, length, _ = heads.shape
    return heads.transpose(1, 2).reshape(batch, length, -1)


def through_own_map(
    heads: Float[Tensor, "batch num_heads length d_in"], maps: Float[Tensor, "num_heads d_in d_out"]
) -> Float[Tensor, "batch num_heads length d_out"]:
    """`head_i W_i`; not `heads @ maps`, for which torch copies the maps once a sentence of the batch."""
    return torch.einsum("bhnk,hkr->bhnr", heads, maps)
