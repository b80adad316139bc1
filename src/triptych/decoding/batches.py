"""A batch of sentences, searched."""

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor, nn

from triptych.decoding.engine import DecodingEngine, Engine
from triptych.decoding.maps import Precision
from triptych.decoding.plain_engine import PlainEngine, needs_plain
from triptych.decoding.search import Hypothesis, SearchOptions, search
from triptych.decoding.shortlisting import ShortlistEngine
from triptych.decoding.workers import Searcher
from triptych.errors import UsageError
from triptych.models import EncoderDecoder
from triptych.text import OutputRules
from triptych.text.shortlists import Shortlist

# Time grows with the square of a text's length, and so do files that show all of its attention.
LONGEST_PROMPT, LONGEST_LINE, LONGEST_SHOWN = 32_768, 1_024, 8_192


def check_length(
    which: str, length: int, positions: int | None, asked: int | None, otherwise: int, option: str
) -> None:
    """Check that a text can be read at once."""
    if not length:
        raise UsageError(f"{which} is empty: give it some text")
    if positions is not None and length > positions:
        raise UsageError(
            f"{which} has {length:,} tokens, but the model has positions for {positions:,}: shorten it"
        )
    most = asked or positions or otherwise
    if length > most:
        raise UsageError(
            f"{which} has {length:,} tokens, and at most {most:,} are read at once: shorten it, or raise "
            f"{option}"
        )


def batch_searcher(
    model: EncoderDecoder,
    src_eos_id: int,
    options: SearchOptions,
    precision: Precision,
    rules: OutputRules,
    shortlist: Shortlist | None = None,
) -> Searcher:
    """A function from sentences, token ids without the end of sentence, to hypotheses for each."""
    engine: DecodingEngine
    if needs_plain(model):
        what = "a model with changed values, or with attention that cannot be fused,"
        if precision != "fp32":
            raise UsageError(f"{what} runs in fp32, not in {precision}")
        if shortlist is not None:
            raise UsageError(f"{what} runs without a shortlist: leave it out")
        engine = PlainEngine(model, never=rules.never)
    elif shortlist is not None:
        if rules.no_repeat:
            raise UsageError("a model that repeats no phrase is searched without a shortlist: leave it out")
        engine = ShortlistEngine(model, shortlist, rules, precision)
    else:
        engine = Engine(model, precision, never=rules.never)

    def searcher(sentences: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        src = _padded(sentences, src_eos_id, model.pad_id).to(engine.device)
        return search(engine, src, options, rules)

    return searcher


def _padded(sentences: Sequence[Sequence[int]], eos_id: int, pad_id: int) -> Tensor:
    rows = [torch.tensor([*ids, eos_id]) for ids in sentences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)


def batches_of_like_length(
    sentences: Sequence[Sequence[int]],
    batch_tokens: int | None = None,
    batch_sentences: int | None = None,
    *,
    pads: bool = True,
) -> Iterator[list[int]]:
    """Places of sentences of like length, or without `pads` of one length, the longest first."""
    batch: list[int] = []
    for i in sorted(range(len(sentences)), key=lambda i: -len(sentences[i])):
        longest = len(sentences[batch[0]] if batch else sentences[i])
        full = batch_tokens is not None and (longest + 1) * (len(batch) + 1) > batch_tokens
        other = not pads and longest != len(sentences[i])
        if batch and (full or other or len(batch) == batch_sentences):
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def padded_alike(batch: Sequence[int], lengths: Sequence[int], limit: int | None) -> Iterator[list[int]]:
    """The parts of a batch whose texts do not change each other."""
    if limit is None or max(lengths[i] for i in batch) <= limit:
        yield [*batch]
        return
    by_length: dict[int, list[int]] = {}
    for i in batch:
        by_length.setdefault(lengths[i], []).append(i)
    yield from by_length.values()


@final
class EvaluationMode:
    """Evaluation mode inside, the mode before it afterwards."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.was_training = model.training

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.was_training)
