"""One call of an attention layer, operation by operation, and the places where a tap may change it."""

from dataclasses import dataclass
from typing import Literal, Protocol, final, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from triptych.algebra.weights import AttentionWeights

Activation = Literal["q", "k", "v", "scores", "weights", "z"]
ACTIVATIONS: tuple[Activation, ...] = ("q", "k", "v", "scores", "weights", "z")


@runtime_checkable
class Tap(Protocol):
    """Changes what a layer computes on the way: queries, keys, values, scores, weights, or what W_O reads."""

    def __call__(self, name: Activation, value: Tensor, first: int | None) -> Tensor:
        """The value that the layer goes on with."""


@final
@dataclass(frozen=True, eq=False)
class LayerSteps:
    """Every value of one call, in the order of the computation; keys and values of every query head."""

    q: Float[Tensor, "batch heads query_len d_k"]  # queries as they meet the keys, after norms and rotation
    k: Float[Tensor, "batch heads key_len d_k"]  # keys, likewise
    v: Float[Tensor, "batch heads key_len d_v"]
    # `q kᵀ`; of other scores, what these make of queries and keys
    products: Float[Tensor, "batch heads query_len key_len"]
    scaled: Float[Tensor, "batch heads query_len key_len"]  # the products times the scale
    biased: Float[Tensor, "batch heads query_len key_len"]  # with what positions add
    # after the soft cap: what the softmax takes, before any mask
    scores: Float[Tensor, "batch heads query_len key_len"]
    visible: Bool[Tensor, "#batch #heads #query_len key_len"]
    weights: Float[Tensor, "batch heads query_len key_len"]
    # what the mixed values of each head are multiplied by; None without a gate
    gate: Float[Tensor, "batch heads query_len 1"] | None
    # what W_O reads: the weights times the values, times the gate
    z: Float[Tensor, "batch heads query_len d_v"]
    output: Float[Tensor, "batch query_len d_model"]

    def by_head(self, weights: AttentionWeights) -> Float[Tensor, "batch heads query_len d_model"]:
        """What each head adds to the output, `z W_O`; with the output bias they sum to it."""
        return self.z @ weights.W_O.to(self.z)
