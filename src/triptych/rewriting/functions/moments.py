"""Second moments of queries, keys and mixed values of one attention layer, gathered over a text.

They are the only statistics used by data-aware rewrites: a few values per pair of channels of one head,
instead of values per pair of input channels. A layer needs a single pass over the text.
"""

from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.function import channels, mixed_values
from triptych.core.algebra.weights import AttentionWeights
from triptych.errors import DataError


@final
@dataclass(frozen=True, eq=False)
class Moments:
    """Means over a text, in float64, of the channels of a layer in one parameterisation."""

    count: int  # number of query tokens
    key_count: int  # number of key tokens
    longest: int  # tokens of the longest sequence, padding included
    q: Float[Tensor, "num_heads d_k d_k"]  # E[qᵀq] of every head
    k: Float[Tensor, "key_heads d_k d_k"]
    q_mean: Float[Tensor, "num_heads d_k"]  # E[q]
    k_mean: Float[Tensor, "key_heads d_k"]
    mixed: Float[
        Tensor, "num_heads d_v d_v"
    ]  # E[zᵀz] of every head's mixed values z = p v before W_O
    mixed_mean: Float[Tensor, "num_heads d_v"]  # E[z]
    x_square: float  # mean square of an entry of the queries' input; `y_square`: the same for keys
    y_square: float
    # E[bᵀb] of the inputs b of a latent's up-projections: the normalised latent of a latent layer; otherwise
    # unrotated key channels and values of all heads. None if not gathered.
    served: Float[Tensor, "served served"] | None = None

    @property
    def k_centred(self) -> Float[Tensor, "key_heads d_k d_k"]:
        """Second moments of the keys about their mean."""
        return self.k - self.k_mean[:, :, None] * self.k_mean[:, None, :]

    @property
    def mixed_centred(self) -> Float[Tensor, "num_heads d_v d_v"]:
        """Second moments of the mixed values about their mean."""
        return self.mixed - self.mixed_mean[:, :, None] * self.mixed_mean[:, None, :]


@final
class MomentsGatherer:
    """Running sums over a text: call `gatherer.add(weights, x)` per batch, then `result()`."""

    def __init__(self, *, served: bool = False) -> None:
        """Start with empty sums; `served` also gathers the moments for a latent."""
        self._served = served
        self._counts = [0, 0]
        self._longest = 0
        self._sums: list[Tensor] = []

    def add(
        self,
        weights: AttentionWeights,
        x: Float[Tensor, "batch query_len d_model"],
        memory: Float[Tensor, "batch key_len d_memory"] | None = None,
    ) -> None:
        """Add a batch."""
        q, k, v = made = channels(weights, x, memory)
        mixed = mixed_values(weights, x, made)
        y = x if memory is None else memory
        served = (
            _latent_inputs(weights, y, k, v).double().flatten(0, 1)
            if self._served
            else None
        )
        # `[heads, tokens, width]`, with the tokens of all texts of the batch concatenated.
        q, k, mixed, inputs, asked = (
            t.transpose(0, 1).double().flatten(1, 2)
            for t in (q, k, mixed, x[:, None], y[:, None])
        )
        sums = [
            q.mT @ q,
            k.mT @ k,
            q.sum(dim=1),
            k.sum(dim=1),
            mixed.mT @ mixed,
            mixed.sum(dim=1),
            inputs.square().mean(dim=-1).sum(),
            asked.square().mean(dim=-1).sum(),
        ]
        if served is not None:
            sums.append(served.mT @ served)
        self._longest = max(self._longest, x.shape[1], y.shape[1])
        self._counts = [self._counts[0] + q.shape[1], self._counts[1] + k.shape[1]]
        self._sums = (
            [a + b for a, b in zip(self._sums, sums, strict=True)]
            if self._sums
            else sums
        )

    def result(self) -> Moments:
        """Return the means over all batches."""
        if not all(self._counts):
            raise DataError("there are no tokens to take moments of: give some text")
        # Tokens without visible keys give NaN.
        if not all(bool(total.isfinite().all()) for total in self._sums):
            raise DataError(
                "queries, keys or mixed values of the text are not finite: leave out tokens that see nothing"
            )
        count, key_count = self._counts
        q, k, q_sum, k_sum, mixed, mixed_sum, x_square, y_square, *served = self._sums
        return Moments(
            count=count,
            key_count=key_count,
            longest=self._longest,
            q=q / count,
            k=k / key_count,
            q_mean=q_sum / count,
            k_mean=k_sum / key_count,
            mixed=mixed / count,
            mixed_mean=mixed_sum / count,
            x_square=float(x_square) / count,
            y_square=float(y_square) / key_count,
            served=served[0] / key_count if served else None,
        )


def _latent_inputs(
    weights: AttentionWeights, y: Tensor, k: Tensor, v: Tensor
) -> Float[Tensor, "batch key_len served"]:
    down = weights.k[0]
    rotary = weights.semantics.rotary
    if down.norm is not None and down.norm.channels is not None:
        bare = replace(down, norm=replace(down.norm, weight=None))
        return bare(y[:, None])[:, 0, :, : down.norm.channels]
    turned = set[int]() if rotary is None else {*rotary.pairs[0], *rotary.pairs[1]}
    plain = [channel for channel in range(k.shape[-1]) if channel not in turned]
    return torch.cat(
        [part.transpose(1, 2).flatten(2) for part in (k[..., plain], v)], dim=-1
    )
