"""Decoding with a lexical shortlist: the output layer is restricted to the tokens allowed in a batch."""

import math
from typing import final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.core.models import EncoderDecoder
from triptych.errors import UsageError
from triptych.literals import Precision
from triptych.running.decoding.cache import TextCache
from triptych.running.decoding.engine import GROUP, DecodingEngine, Engine
from triptych.running.decoding.linear_maps import Maps
from triptych.running.memory import has_room_for_another
from triptych.running.text.shortlists import Shortlist
from triptych.running.text.tokenizers import OutputRules


@final
class ShortlistEngine(DecodingEngine):
    """An `Engine` with a restricted output vocabulary for each sentence.

    The output layer has the union of the shortlists of a batch. A sentence gets the logits of its shortlist
    in a fixed order, so that the other sentences of a batch do not change its output.
    """

    joins = False  # the output layer is specific to the sentences of a batch

    def __init__(
        self,
        model: EncoderDecoder,
        shortlist: Shortlist,
        rules: OutputRules,
        precision: Precision = "fp32",
    ) -> None:
        if model.head.config.soft_cap is not None:
            raise UsageError(
                "the model's logits are soft-capped, and shortlists do not do so: leave it out"
            )
        self._engine = Engine(model, precision)
        self._shortlist = shortlist
        self._end = rules.end
        self._engine.fixed = False
        self.device = self._engine.device
        self.pad_id = self._engine.pad_id
        self.max_tokens = self._engine.max_tokens
        output = model.head.output
        weight = output.weight.detach()
        bias = output.bias
        self._maps = Maps(precision, weight.dtype, packed=has_room_for_another(model))
        self._weight = weight * model.head.config.input_scale
        self._bias = (
            weight.new_zeros(len(weight)) if bias is None else bias.detach().clone()
        )
        # Forbidden tokens stay forbidden in every shortlist.
        self._bias[list(rules.never)] = -math.inf

    @property
    def why_batches_matter(self) -> str:
        reasons = (
            self._engine.why_batches_matter,
            "an output layer of the tokens of a batch",
        )
        return ", ".join(reason for reason in reasons if reason)

    def start(
        self, src: Int[Tensor, "batch src_len"], beam_size: int
    ) -> "ShortlistCache":
        """Encode sentences and build the output layer from their shortlists."""
        allowed = [self._shortlist.of(row) for row in src.tolist()]
        union = np.unique(np.concatenate([[self._end], *allowed]))
        missing = (
            GROUP - len(union) % GROUP
        )  # at least one padding column, with logits of −inf
        width = max(map(len, allowed)) + 1
        columns = np.full((len(allowed), width + -width % GROUP), self.pad_id)
        places = np.full(columns.shape, len(union))
        for row, ids in enumerate(allowed):
            own = np.concatenate([[self._end], ids[ids != self._end]])
            columns[row, : len(own)], places[row, : len(own)] = (
                own,
                np.searchsorted(union, own),
            )
        rows = torch.from_numpy(union).to(self.device)
        output = self._maps.linear(
            F.pad(self._weight[rows], (0, 0, 0, missing)),
            F.pad(self._bias[rows], (0, missing), value=-math.inf),
        )
        of_sentences = (
            torch.from_numpy(table).to(self.device) for table in (columns, places)
        )
        return ShortlistCache(self._engine.start(src, beam_size), output, *of_sentences)

    def step(
        self, tokens: Int[Tensor, " rows"], cache: "ShortlistCache"
    ) -> Float[Tensor, "rows columns"]:
        """Append `tokens` to the cache; return the logits of the next token, by the sentence's shortlist."""
        logits = cache.output(self._engine.decode(tokens, cache.beams))
        places = cache.places[:, None].expand(-1, logits.shape[1], -1)
        return logits.gather(2, places).flatten(0, 1).float()  # type: ignore[no-any-return]


@final
class ShortlistCache:
    """Cache and output layer of a batch; tokens of each sentence's shortlist and their rows in the layer."""

    def __init__(
        self,
        beams: TextCache,
        output: nn.Module,
        columns: Int[Tensor, "batch columns"],
        places: Int[Tensor, "batch columns"],
    ) -> None:
        self.beams = beams
        self.output = output
        self.columns = columns
        self.places = places

    def reorder(self, parents: Int[Tensor, "batch beam_size"]) -> None:
        self.beams.reorder(parents)

    def select(self, sentences: Tensor) -> None:
        self.beams.select(sentences)
        self.columns = self.columns[sentences]
        self.places = self.places[sentences]
