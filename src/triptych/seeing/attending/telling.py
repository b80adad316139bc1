"""Heads with the largest mutual information between query and attended key."""

from typing import final

import torch
from jaxtyping import Float
from torch import Tensor


@final
class Telling:
    """The mutual information of query and key of every head, from weights added in blocks of queries.

    It is 0 if all tokens attend to the same keys, and grows with the influence of the query on the weights.
    Leave out weights on the query's own token before they are added.
    """

    def __init__(self) -> None:
        # With the weights w, their sums r by row and c by column, and the whole sum t, the information is
        # Σ w log(w t / (r c)) / n for n queries. Each logarithm of the fraction has a separate sum.
        self._rows = 0
        self._inner: Tensor | float = 0.0
        self._columns: Tensor | float = 0.0

    def add(self, weights: Float[Tensor, "heads rows keys"]) -> None:
        """Add the next queries of every head."""
        # torch adds pairwise, so single precision is enough within a block, and several times as fast.
        by_row = weights.sum(dim=2)
        entries = torch.special.xlogy(weights, weights).sum(
            dim=2
        ) - torch.special.xlogy(by_row, by_row)
        self._inner = self._inner + entries.double().sum(dim=1)
        self._columns = self._columns + weights.sum(dim=1).double()
        self._rows += weights.shape[1]

    def nats(self) -> Float[Tensor, " heads"]:
        """Return the information of every head."""
        columns = torch.as_tensor(self._columns)
        total = columns.sum(dim=-1)
        apart = torch.special.xlogy(total, total) - torch.special.xlogy(
            columns, columns
        ).sum(dim=-1)
        nats: Tensor = (self._inner + apart) / max(1, self._rows)
        return nats
