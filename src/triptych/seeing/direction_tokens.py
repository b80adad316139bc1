"""Directions of the stream decoded to tokens: tokens read, and tokens written."""

from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.models import AttentionSite, LanguageModel
from triptych.running.opened_source import Opened
from triptych.seeing.attending.written_tokens import OutputTable

# Entries of embeddings in memory at a time.
_ENTRIES_AT_A_TIME = 1 << 24


@final
@dataclass(frozen=True)
class DirectionTokens:
    """A pair of directions, decoded to tokens.

    A change of W_OV has a direction of inputs and a direction of outputs. A change of W_QK has a direction of
    queries and a direction of keys. The signs of both directions are arbitrary together, so a pair has tokens
    for either sign. Directions without a table in the model are not decoded: outputs of an encoder, and the
    memory of cross-attention.

    Attributes:
        strength: singular value of the pair.
        reads: tokens furthest along the input direction, or the direction of queries.
        writes: tokens with the logits most raised by the output direction (W_OV), or furthest along the
            direction of keys (W_QK).
        opposite_reads: the same as `reads` for the negated pair.
        opposite_writes: the same as `writes` for the negated pair.
    """

    strength: float
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    opposite_reads: tuple[str, ...]
    opposite_writes: tuple[str, ...]

    def record(self) -> dict[str, Any]:
        """Return the fields as one record."""
        return {
            "strength": self.strength,
            "reads": [*self.reads],
            "writes": [*self.writes],
            "opposite_reads": [*self.opposite_reads],
            "opposite_writes": [*self.opposite_writes],
        }


@final
class DirectionDecoder:
    """Decodes directions around an attention layer through the model's own tables and norms."""

    def __init__(self, opened: Opened) -> None:
        self._reader = opened.to_run
        self._sites = opened.sites_of(self._reader.model)

    @torch.no_grad()
    def read(
        self, number: int, directions: Float[Tensor, "d_model n"], *, memory: bool
    ) -> Float[Tensor, "n vocab"] | None:
        """Compute the products of directions with every token, alone at the beginning of a text.

        The token's embedding passes the norm before the layer. Returns None for the memory of
        cross-attention.
        """
        # Memory has passed an encoder: no table of tokens lies next to it.
        site = self._sites[number]
        if memory and site.stack == "cross":
            return None
        model = self._stack(site)
        weight = model.embeddings.table.weight
        directions = directions.to(weight.device, torch.float32)
        step = max(1, _ENTRIES_AT_A_TIME // weight.shape[1])
        found = []
        for start in range(0, self._num_tokens(len(weight)), step):
            stop = min(start + step, self._num_tokens(len(weight)))
            ids = torch.arange(start, stop, device=weight.device)
            read = site.residual.enter(model.embeddings(ids[:, None])[:, 0])
            found.append(read.float() @ directions)
        return torch.cat(found).mT

    @torch.no_grad()
    def written(
        self, number: int, directions: Float[Tensor, "n d_model"]
    ) -> Float[Tensor, "n vocab"] | None:
        """Compute the logits of directions alone in the stream; None for a stack without an output."""
        site = self._sites[number]
        table = OutputTable.of(self._reader.model, site.stack)
        if table is None:
            return None
        directions = directions.to(table.table.device, table.table.dtype)
        added = site.residual.part_added(directions, directions)
        tokens = table.table[: self._num_tokens(len(table.table))]
        return OutputTable(table.norm, tokens).logits(added).float()

    def names(self, products: Tensor | None, count: int) -> list[tuple[str, ...]]:
        """Return the tokens of the largest products in each row; an empty list for None."""
        if products is None:
            return []
        best = products.topk(min(count, products.shape[1]), dim=-1).indices
        return [tuple(self._reader.tokenizer.pieces(row)) for row in best.tolist()]

    def _num_tokens(self, rows: int) -> int:
        # Rows past the tokenizer's vocabulary are not tokens.
        if not self._reader.has_tokenizer:
            return rows
        return min(rows, self._reader.tokenizer.vocab_size)

    def _stack(self, site: AttentionSite) -> LanguageModel:
        model = self._reader.model
        if isinstance(model, LanguageModel):
            return model
        return model.encoder if site.stack == "encoder" else model.decoder
