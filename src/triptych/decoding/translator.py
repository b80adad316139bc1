"""Text in, text out."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.decoding.pieces import split_line
from triptych.decoding.search import Hypothesis, SearchOptions, search
from triptych.models import AttentionMaps, EncoderDecoder
from triptych.text import TokenizerPair

_LINE_BREAKS = {ord("\n"): " ", ord("\r"): " "}


@dataclass(frozen=True)
class Candidate:
    """One translation of a line.

    Attributes:
        text: as a reader wants it, in one line.
        pieces: its tokens, readable.
        score: log-probability over the length penalty; for a line translated in pieces, their sum.
        log_prob: natural logarithm of the probability.
    """

    text: str
    pieces: tuple[str, ...]
    score: float
    log_prob: float


@dataclass(frozen=True)
class Translation:
    """What became of a line.

    Attributes:
        source: the line.
        candidates: best first; empty for an empty line.
        num_pieces: in how many pieces it was translated; more than 1 only past the model's limit.
    """

    source: str
    candidates: tuple[Candidate, ...]
    num_pieces: int

    @property
    def text(self) -> str:
        """The best translation."""
        return self.candidates[0].text if self.candidates else ""


@dataclass(frozen=True)
class SentenceAttention:
    """Who looks where while a sentence is translated.

    Attributes:
        source_pieces: source tokens, the end of sentence last.
        target_pieces: target tokens, the end of sentence last: row i is what was looked at to
            produce token i.
        maps: the weights, batch size 1.
    """

    source_pieces: tuple[str, ...]
    target_pieces: tuple[str, ...]
    maps: AttentionMaps

    def cross(self, layer: int) -> Float[Tensor, "num_heads tgt_len src_len"]:
        """Cross-attention of a decoder layer."""
        return self.maps.cross[layer][0]


@final
class Translator:
    """A model with its tokenizers."""

    def __init__(
        self,
        model: EncoderDecoder,
        tokenizers: TokenizerPair,
        options: SearchOptions | None = None,
        batch_tokens: int = 2048,
    ) -> None:
        """Put a translator together.

        Args:
            model: set to evaluation mode while translating.
            tokenizers: of the model's run.
            options: how to search; the paper's if None.
            batch_tokens: padded source tokens translated at a time.
        """
        self.model = model
        self.tokenizers = tokenizers
        self.options = options or SearchOptions()
        self.batch_tokens = batch_tokens

    def translate(self, lines: Sequence[str]) -> list[Translation]:
        """Translate lines, in their order.

        An empty line gives an empty translation. A line past `max_source_tokens` is cut into pieces
        between sentences where possible; no part of it is dropped.
        """
        pieces_of = [self._pieces(line) for line in lines]
        flat = [piece for pieces in pieces_of for piece in pieces]
        found = iter(self._search([ids for _, ids in flat]))
        return [
            self._assemble(line, [next(found) for _ in pieces])
            for line, pieces in zip(lines, pieces_of, strict=True)
        ]

    def translate_stream(self, batches: Iterable[Sequence[str]]) -> Iterator[Translation]:
        """Translate batch by batch, each as soon as it is there."""
        for lines in batches:
            yield from self.translate(lines)

    def attention(self, source: str, target: str | None = None) -> SentenceAttention:
        """The attention weights of a translation.

        Args:
            source: a line, within the model's limit.
            target: its translation; made here if None.
        """
        src_ids = self.tokenizers.source.encode([source.strip()])[0]
        if target is None:
            hypotheses = self._search([src_ids])[0]
            tgt_ids = list(hypotheses[0].ids)
        else:
            tgt_ids = self.tokenizers.target.encode([target])[0]
        src_tok, tgt_tok = self.tokenizers.source, self.tokenizers.target
        device = next(self.model.parameters()).device
        src = torch.tensor([[*src_ids, src_tok.eos_id]], device=device)
        tgt_in = torch.tensor([[tgt_tok.bos_id, *tgt_ids]], device=device)
        with _EvaluationMode(self.model), torch.no_grad():
            maps = self.model.attention_maps(src, tgt_in)
        return SentenceAttention(
            tuple(src_tok.pieces([*src_ids, src_tok.eos_id])),
            tuple(tgt_tok.pieces([*tgt_ids, tgt_tok.eos_id])),
            maps,
        )

    def _pieces(self, line: str) -> list[tuple[str, list[int]]]:
        line = line.strip()
        if not line:
            return []
        encode = self.tokenizers.source.encode
        ids = encode([line])[0]
        limit = self.model.config.max_source_tokens
        if len(ids) <= limit:
            return [(line, ids)]
        pieces = split_line(line, lambda text: len(encode([text])[0]) <= limit)
        return list(zip(pieces, encode(pieces), strict=True))

    def _search(self, sentences: Sequence[list[int]]) -> list[list[Hypothesis]]:
        """Search for every sentence, those of like length together, and restore the order."""
        order = sorted(range(len(sentences)), key=lambda i: len(sentences[i]), reverse=True)
        results: list[list[Hypothesis]] = [[] for _ in sentences]
        with _EvaluationMode(self.model):
            for batch in self._batches(order, sentences):
                found = search(
                    self.model,
                    self._pad([sentences[i] for i in batch]),
                    self.options,
                    self.tokenizers.target.bos_id,
                    self.tokenizers.target.eos_id,
                )
                for i, hypotheses in zip(batch, found, strict=True):
                    results[i] = hypotheses
        return results

    def _batches(self, order: Sequence[int], sentences: Sequence[list[int]]) -> Iterator[list[int]]:
        batch: list[int] = []
        for i in order:
            longest = len(sentences[batch[0]] if batch else sentences[i]) + 1
            if batch and longest * (len(batch) + 1) > self.batch_tokens:
                yield batch
                batch = []
            batch.append(i)
        if batch:
            yield batch

    def _pad(self, sentences: Sequence[list[int]]) -> Tensor:
        eos_id = self.tokenizers.source.eos_id
        rows = [torch.tensor([*ids, eos_id]) for ids in sentences]
        padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=self.model.pad_id)
        return padded.to(next(self.model.parameters()).device)

    def _assemble(self, line: str, found: list[list[Hypothesis]]) -> Translation:
        # The n-th best of a line cut in pieces is the n-th best of every piece.
        num_candidates = min((len(hypotheses) for hypotheses in found), default=0)
        candidates = tuple(
            self._candidate([hypotheses[rank] for hypotheses in found]) for rank in range(num_candidates)
        )
        return Translation(line, candidates, len(found))

    def _candidate(self, hypotheses: list[Hypothesis]) -> Candidate:
        tokenizer = self.tokenizers.target
        texts = tokenizer.decode([hypothesis.ids for hypothesis in hypotheses])
        return Candidate(
            # Text learned from records may hold line breaks; a line's translation is a line.
            text=" ".join(text for text in texts if text).translate(_LINE_BREAKS),
            pieces=tuple(piece for h in hypotheses for piece in tokenizer.pieces(h.ids)),
            score=sum(h.score for h in hypotheses),
            log_prob=sum(h.log_prob for h in hypotheses),
        )


@final
class _EvaluationMode:
    """Evaluation mode inside, the mode before it afterwards."""

    def __init__(self, model: EncoderDecoder) -> None:
        self.model = model
        self.was_training = model.training

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.was_training)
