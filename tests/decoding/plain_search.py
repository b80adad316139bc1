"""Greedy and beam search through the model's own modules, without a cache: the slow reference.

`search` follows the same rules faster, by an engine. The repetition penalty and the rule on n-grams are the
processors of `transformers`.
"""

from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.core.models import EncoderDecoder
from triptych.running.decoding.engine import DecodingEngine
from triptych.running.decoding.hypotheses import Hypothesis, best_first, length_penalty, limit_of
from triptych.running.decoding.search import enough_finished, sentence_text
from triptych.running.decoding.token_loop import Loop
from triptych.running.decoding_options import SearchOptions
from triptych.running.text import OutputRules


def search(
    engine: DecodingEngine, src: Int[Tensor, "batch src_len"], options: SearchOptions, rules: OutputRules
) -> list[list[Hypothesis]]:
    """The best outputs for each source sentence of a batch that is padded, best first."""
    given = [row[row != engine.pad_id].tolist() for row in src]
    texts = [sentence_text(engine, ids, options, rules) for ids in given]
    Loop(engine).run(texts)
    return [text.best[: options.num_best] for text in texts]


@torch.no_grad()
def plain_search(
    model: EncoderDecoder, src: Int[Tensor, "batch src_len"], options: SearchOptions, bos_id: int, eos_id: int
) -> list[list[Hypothesis]]:
    """The best outputs for each source sentence, best first.

    Sentences do not influence each other: each has its own limit and its own end. When a sentence
    is done, `SearchOptions.stop` says.

    Args:
        model: in evaluation mode.
        src: token ids with the end of sentence, padded with the model's pad_id.
        options: how to search.
        bos_id: the token every output begins with.
        eos_id: the token that ends one.

    Returns:
        num_best hypotheses for every sentence (fewer only where the search found fewer).
    """
    beams = _Beams(model, src, options, bos_id, eos_id)
    while beams.open_sentences:
        beams.advance()
    return beams.results()


@final
class _Beams:
    """The open hypotheses of all unfinished sentences: `beam_size` rows for each, side by side."""

    def __init__(
        self, model: EncoderDecoder, src: Tensor, options: SearchOptions, bos_id: int, eos_id: int
    ) -> None:
        self.model, self.options, self.eos_id = model, options, eos_id
        self.never = torch.tensor([model.pad_id, bos_id], device=src.device)
        self.memory = model.encode(src)
        self.memory_mask = model.memory_mask(src)
        batch, k = src.shape[0], options.beam_size
        self.open_sentences = list(range(batch))
        source_tokens = ((src != model.pad_id).sum(dim=1) - 1).tolist()
        self.limits = [limit_of(n, options.max_extra_tokens, model.max_target_tokens) for n in source_tokens]
        self.ids = torch.full((batch * k, 1), bos_id, device=src.device)
        # All rows of a sentence begin alike: only the first may be continued, or all would be copies.
        self.log_probs = torch.full((batch, k), -torch.inf, device=src.device)
        self.log_probs[:, 0] = 0.0
        self.finished: list[list[Hypothesis]] = [[] for _ in range(batch)]

    def advance(self) -> None:
        """Lengthen every open hypothesis by a token."""
        k = self.options.beam_size
        totals = self.log_probs[:, :, None] + self._next_log_probs()
        vocab = totals.shape[-1]
        # Twice the beam: even if half of it ends here, a full beam stays open.
        values, places = totals.flatten(1).topk(min(2 * k, k * vocab - 1), dim=1)
        parents, tokens = places // vocab, places % vocab
        ends = tokens == self.eos_id
        self._collect(values[:, :k], parents[:, :k], ends[:, :k])
        still_open = values.masked_fill(ends, -torch.inf).topk(k, dim=1)
        self._continue(
            still_open.values, parents.gather(1, still_open.indices), tokens.gather(1, still_open.indices)
        )

    def results(self) -> list[list[Hypothesis]]:
        """The best of each sentence."""
        return [best_first(found)[: self.options.num_best] for found in self.finished]

    def _next_log_probs(self) -> Float[Tensor, "open beam vocab"]:
        x = self.model.decode(self.ids, self.memory, self.memory_mask)[:, -1]
        logits = self.model.head(x).float()
        logits.index_fill_(1, self.never, -torch.inf)
        log_probs = self._processed(logits).view(len(self.open_sentences), self.options.beam_size, -1)
        length = self.ids.shape[1]  # with the token to come, without the first
        at_limit = [i for i, sentence in enumerate(self.open_sentences) if length > self.limits[sentence]]
        if at_limit:
            of_end = log_probs[at_limit, :, self.eos_id]
            log_probs[at_limit] = -torch.inf
            log_probs[at_limit, :, self.eos_id] = of_end
        return log_probs

    def _processed(self, logits: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows vocab"]:
        options = self.options
        penalty = options.sampling.repetition_penalty
        if penalty != 1:
            from transformers import RepetitionPenaltyLogitsProcessor

            logits = RepetitionPenaltyLogitsProcessor(penalty)(self.ids, logits)
        log_probs = logits.log_softmax(dim=-1)
        if options.no_repeat_ngram_size:
            from transformers import NoRepeatNGramLogitsProcessor

            log_probs = NoRepeatNGramLogitsProcessor(options.no_repeat_ngram_size)(self.ids, log_probs)
        return log_probs

    def _collect(self, values: Tensor, parents: Tensor, ends: Tensor) -> None:
        """Note the hypotheses among the best beam_size candidates that end here."""
        ends = ends & values.isfinite()
        length = self.ids.shape[1]
        penalty = length_penalty(length, self.options.alpha)
        for place, rank in ends.nonzero().tolist():
            row = place * self.options.beam_size + int(parents[place, rank])
            log_prob = float(values[place, rank])
            found = Hypothesis(tuple(self.ids[row, 1:].tolist()), log_prob, log_prob / penalty)
            self.finished[self.open_sentences[place]].append(found)

    def _continue(self, values: Tensor, parents: Tensor, tokens: Tensor) -> None:
        best_open = values[:, 0].tolist()
        places = [
            place
            for place, sentence in enumerate(self.open_sentences)
            if not self._is_done(sentence, best_open[place])
        ]
        k = self.options.beam_size
        kept = torch.tensor(places, dtype=torch.long, device=values.device)
        rows = (kept[:, None] * k + parents[kept]).flatten()
        self.ids = torch.cat([self.ids[rows], tokens[kept].view(-1, 1)], dim=1)
        self.log_probs = values[kept]
        self.open_sentences = [self.open_sentences[place] for place in places]
        self.memory, self.memory_mask = self.memory[kept], self.memory_mask[kept]

    def _is_done(self, sentence: int, best_open: float) -> bool:
        found = self.finished[sentence]
        if best_open == -torch.inf:
            return True
        if len(found) >= enough_finished(self.options):
            return True
        if len(found) < self.options.num_best:
            return False
        wanted = best_first(found)[self.options.num_best - 1].score
        # A log-probability is at most 0 and only falls; the longest output has the largest penalty.
        return wanted >= best_open / length_penalty(self.limits[sentence] + 1, self.options.alpha)
