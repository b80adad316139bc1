"""Beam search over a batch of sentences, and batching by length."""

from collections.abc import Iterator, Sequence
from typing import final

from torch import nn

from triptych.core.models import EncoderDecoder
from triptych.errors import UsageError
from triptych.literals import Precision
from triptych.running.decoding.engine import DecodingEngine, Engine
from triptych.running.decoding.ensemble import EnsembleEngine
from triptych.running.decoding.glossary import Sentence
from triptych.running.decoding.plain_engine import PlainEngine, needs_plain
from triptych.running.decoding.search import BeamText, Hypothesis, SearchOptions, sentence_text
from triptych.running.decoding.shortlisting import ShortlistEngine
from triptych.running.decoding.token_loop import Loop
from triptych.running.text import OutputRules
from triptych.running.text.shortlists import Shortlist

# Time grows with the square of the length of a text. So does the size of a page with all attention weights.
LONGEST_PROMPT = 32_768
LONGEST_LINE = 1_024
LONGEST_SHOWN = 8_192


def check_length(
    which: str, length: int, positions: int | None, asked: int | None, otherwise: int, option: str = ""
) -> None:
    """Check that a text can be read at once; `option`, if any, names the option to raise the limit."""
    if not length:
        raise UsageError(f"{which} is empty: give it some text")
    if positions is not None and length > positions:
        raise UsageError(
            f"{which} has {length:,} tokens, but the model has positions for {positions:,}: shorten it"
        )
    most = asked or positions or otherwise
    if length > most:
        raise UsageError(
            f"{which} has {length:,} tokens, and at most {most:,} are read at once: shorten it"
            + (option and f", or raise {option}")
        )


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


def batches_of_like_length(
    sentences: Sequence[Sequence[int]],
    batch_tokens: int | None = None,
    batch_sentences: int | None = None,
    *,
    pads: bool = True,
) -> Iterator[list[int]]:
    """Yield batches of sentence indices in order of falling length.

    Sentences of a batch have similar lengths. If `pads` is False, they have equal lengths.
    """
    batch: list[int] = []
    for i in sorted(range(len(sentences)), key=lambda i: -len(sentences[i])):
        longest = len(sentences[batch[0]] if batch else sentences[i])
        # Sentences come in falling length, so the first sentence sets the padded length; 1 for the end.
        full = batch_tokens is not None and (longest + 1) * (len(batch) + 1) > batch_tokens
        other = not pads and longest != len(sentences[i])
        if batch and (full or other or len(batch) == batch_sentences):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def padded_alike(batch: Sequence[int], lengths: Sequence[int], limit: int | None) -> Iterator[list[int]]:
    """Split a batch into parts in which texts do not change each other's results.

    Texts longer than `limit` share a batch only with texts of the same length.
    """
    if limit is None or max(lengths[i] for i in batch) <= limit:
        yield [*batch]
        return
    by_length: dict[int, list[int]] = {}
    for i in batch:
        by_length.setdefault(lengths[i], []).append(i)
    yield from by_length.values()


@final
class EvaluationMode:
    """Context manager for evaluation mode, which restores the previous mode afterwards."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.was_training = model.training

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.was_training)
