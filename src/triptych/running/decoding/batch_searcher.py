"""Beam search of sentences by a model or an ensemble."""

from collections.abc import Sequence
from typing import final

from triptych.core.models import EncoderDecoder
from triptych.errors import UsageError
from triptych.literals import Precision
from triptych.running.decoding.engine import DecodingEngine, Engine
from triptych.running.decoding.ensemble import EnsembleEngine
from triptych.running.decoding.glossary import Sentence
from triptych.running.decoding.plain_engine import PlainEngine, needs_plain
from triptych.running.decoding.search import BeamText, Hypothesis, sentence_text
from triptych.running.decoding.shortlisting import ShortlistEngine
from triptych.running.decoding.token_loop import Loop
from triptych.running.decoding_options import SearchOptions
from triptych.running.text import OutputRules
from triptych.running.text.shortlists import Shortlist


@final
class BatchSearcher:
    """Beam search: maps sentences, token ids without the end of sentence, to hypotheses of each sentence."""

    def __init__(
        self,
        models: Sequence[EncoderDecoder],
        src_eos_id: int,
        options: SearchOptions,
        precision: Precision,
        rules: OutputRules,
        shortlist: Shortlist | None = None,
    ) -> None:
        """Search with one model, or with an ensemble of models with the same vocabulary."""
        self._src_eos_id = src_eos_id
        self._options = options
        self._rules = rules
        if shortlist is not None and (len(models) > 1 or rules.no_repeat):
            what = "an ensemble" if len(models) > 1 else "a model that repeats no phrase"
            raise UsageError(f"{what} runs without a shortlist: leave it out")
        engines = [_engine(model, precision, rules, shortlist) for model in models]
        self.engine = engines[0] if len(engines) == 1 else EnsembleEngine(engines)

    def text(self, ids: Sequence[int], options: SearchOptions | None = None) -> BeamText:
        """Return a sentence, ready for a `Loop`."""
        terms = ids.terms if isinstance(ids, Sentence) else None
        whole = [*ids, self._src_eos_id]
        return sentence_text(self.engine, whole, options or self._options, self._rules, terms)

    def __call__(self, sentences: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        texts = [self.text(ids) for ids in sentences]
        Loop(self.engine).run(texts)
        return [text.best[: self._options.num_best] for text in texts]


def _engine(
    model: EncoderDecoder, precision: Precision, rules: OutputRules, shortlist: Shortlist | None
) -> DecodingEngine:
    what = "a model with changed values, or with attention that cannot be fused,"
    if not needs_plain(model):
        if shortlist is not None:
            return ShortlistEngine(model, shortlist, rules, precision)
        return Engine(model, precision, never=rules.never)
    if shortlist is not None:
        raise UsageError(f"{what} runs without a shortlist: leave it out")
    if precision != "fp32":
        raise UsageError(f"{what} runs in fp32, not in {precision}")
    return PlainEngine(model, never=rules.never)
