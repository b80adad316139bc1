"""A batch of sentences, searched in the fastest way that the model has."""

from collections.abc import Sequence
from typing import final

import torch
from torch import Tensor

from triptych.decoding.beams import search_with_engine
from triptych.decoding.engine import Engine, Precision, unsupported, unsupported_precision
from triptych.decoding.hypotheses import Hypothesis, SearchOptions
from triptych.decoding.search import search
from triptych.decoding.workers import Searcher
from triptych.models import EncoderDecoder


def why_no_engine(model: EncoderDecoder, options: SearchOptions, precision: Precision) -> str:
    """Why a search has to go through the model's own modules; "" if the engine can do it."""
    if not options.use_cache:
        return "a search without a cache goes through its own modules"
    device = next(model.parameters()).device
    return unsupported(model) or unsupported_precision(precision, device)


def batch_searcher(
    model: EncoderDecoder,
    src_eos_id: int,
    options: SearchOptions,
    precision: Precision,
    bos_id: int,
    eos_id: int,
) -> Searcher:
    """A function from sentences, token ids without the end of sentence, to hypotheses for each."""
    device = next(model.parameters()).device
    if why_no_engine(model, options, precision):

        def by_modules(sentences: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
            with EvaluationMode(model):
                src = _padded(sentences, src_eos_id, model.pad_id).to(device)
                return search(model, src, options, bos_id, eos_id)

        return by_modules

    engine = Engine(model, precision, never=(model.pad_id, bos_id))

    def by_engine(sentences: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        src = _padded(sentences, src_eos_id, model.pad_id).to(device)
        return search_with_engine(engine, src, options, bos_id, eos_id, model.max_target_tokens)

    return by_engine


def _padded(sentences: Sequence[Sequence[int]], eos_id: int, pad_id: int) -> Tensor:
    rows = [torch.tensor([*ids, eos_id]) for ids in sentences]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad_id)


@final
class EvaluationMode:
    """Evaluation mode inside, the mode before it afterwards."""

    def __init__(self, model: EncoderDecoder) -> None:
        self.model = model
        self.was_training = model.training

    def __enter__(self) -> None:
        self.model.eval()

    def __exit__(self, *_: object) -> None:
        self.model.train(self.was_training)
