"""Sampling of translations from an encoder-decoder."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

from jaxtyping import Float
from torch import Tensor

from triptych.running.decoding.engine import DecodingEngine
from triptych.running.decoding.hypotheses import Finish, Hypothesis, length_penalty
from triptych.running.decoding.sampling import RowState, choose
from triptych.running.decoding.search import limit_of_sentence, read_sources, rules_of
from triptych.running.decoding.token_loop import (
    DecodingBatch,
    Read,
    Text,
    require_finite_best,
)
from triptych.running.decoding_options import SamplingOptions, SearchOptions
from triptych.running.text.tokenizers import OutputRules
from triptych.running.token_rules import TokenRules


@dataclass(frozen=True)
class DrawKind:
    """Common options of the texts of a batch."""

    sampling: SamplingOptions
    rules: OutputRules
    alpha: float  # exponent of the length penalty of scores


@final
class SentenceSample(Text):
    """A drawn translation of a sentence."""

    kind: DrawKind

    def __init__(
        self, given: Sequence[int], kind: DrawKind, limit: int, seed: int, sample: int
    ) -> None:
        """Start; `limit` is the maximum length of the output, `sample` its number among the sentence's."""
        self.given = given
        self.kind = kind
        self.limit = limit
        self.size = len(given)
        self.draws = RowState(seed, sample, kind.rules.start)
        self.ids: list[int] = []
        self._log_probs: list[float] = []
        self._finish: Finish | None = None

    @property
    def read(self) -> Read:
        return [[[*self.given]], [[*self.kind.rules.start, *self.ids]]]

    def batch(self, engine: Any) -> "SentenceSamples":
        return SentenceSamples(engine, self.kind)

    def take(self, token: int, log_prob: float, *, is_cut: bool) -> None:
        """Append a token; `is_cut` is True if the limit ends the text, and not the model."""
        self._log_probs.append(log_prob)
        if token != self.kind.rules.end:
            self.ids.append(token)
            return
        self._finish = "length" if is_cut else "token"
        self.is_over = True

    @property
    def hypothesis(self) -> Hypothesis:
        """The finished translation."""
        log_prob = math.fsum(self._log_probs)
        score = log_prob / length_penalty(len(self._log_probs), self.kind.alpha)
        return Hypothesis(
            tuple(self.ids), log_prob, score, tuple(self._log_probs), self._finish
        )


def sentence_samples(
    engine: DecodingEngine,
    ids: Sequence[int],
    options: SearchOptions,
    rules: OutputRules,
) -> list[SentenceSample]:
    """Build the draws of a sentence, token ids with the end of sentence, for a `Loop`."""
    rules = rules_of(options, rules)
    sampling = replace(
        options.sampling, rules=TokenRules(no_repeat_ngram_size=rules.no_repeat)
    )
    kind = DrawKind(sampling, rules, options.alpha)
    limit = limit_of_sentence(engine, ids, options, rules)
    return [
        SentenceSample(ids, kind, limit, options.seed, sample)
        for sample in range(options.num_best)
    ]


@final
class SentenceSamples(DecodingBatch[SentenceSample]):
    """Batch of sampled translations with one row per translation."""

    kind: DrawKind

    def __init__(self, engine: Any, kind: DrawKind) -> None:
        super().__init__(engine, kind, 1, joins=engine.joins)

    def open(self, texts: Sequence[SentenceSample]) -> tuple[Any, Tensor]:
        return read_sources(
            self.engine, [text.given for text in texts], 1, self.kind.rules.start
        )

    def choose(self) -> list[SentenceSample]:
        places = self.open_places
        open_ = [text for place in places if (text := self.texts[place]) is not None]
        logits = self.logits[places]
        # `log_softmax` works row by row; the bits of a `logsumexp` depend on the other rows.
        log_probs = logits.log_softmax(dim=-1)
        require_finite_best(log_probs.amax(dim=-1), self.engine, open_)
        possible = logits[:, : self.engine.num_choices].clone()
        are_cut = self._obey(possible, open_)
        chosen = choose(possible, self.kind.sampling, [text.draws for text in open_])
        self.tokens = chosen.new_zeros(len(self.texts))
        self.tokens[places] = chosen
        own = log_probs.gather(1, chosen[:, None])[:, 0].tolist()
        for text, token, log_prob, is_cut in zip(
            open_, chosen.tolist(), own, are_cut, strict=True
        ):
            text.take(token, log_prob, is_cut=is_cut)
        return []

    def _obey(
        self, logits: Float[Tensor, "texts vocab"], texts: Sequence[SentenceSample]
    ) -> list[bool]:
        """Set logits of forbidden next tokens to −inf; return for each text whether the limit ends it."""
        rules = self.kind.rules
        are_cut = list[bool]()
        for own, text in zip(logits, texts, strict=True):
            is_at_limit = len(text.ids) >= text.limit
            are_cut.append(is_at_limit and bool(own[rules.end] < own.max()))
            if is_at_limit:
                # Only the end token remains.
                of_end = own[rules.end].clone()
                own.fill_(-math.inf)
                own[rules.end] = of_end
            elif len(rules.start) + len(text.ids) < rules.min_length:
                own[rules.end] = -math.inf
        return are_cut
