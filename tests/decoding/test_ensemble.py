"""A search of several models is the search of one whose probabilities are the mean of theirs."""

from collections.abc import Sequence
from typing import Any, final

import pytest
import torch
from torch import Tensor

from decoding.plain_search import plain_search, search
from decoding.test_engine import BOS, EOS, PAD, RULES, SOURCES, assert_alike, make_model, pad
from decoding.test_neighbours import assert_neighbours_change_nothing, joining, texts_of
from triptych.core.models import EncoderDecoder
from triptych.literals import Precision
from triptych.running.decoding import PRECISIONS, Engine, Hypothesis, SearchOptions
from triptych.running.decoding.ensemble import EnsembleEngine
from triptych.running.decoding.plain_engine import PlainEngine
from triptych.running.decoding.search import BeamText, sentence_text

VOCAB = 90


@pytest.fixture(scope="module")
def models() -> list[EncoderDecoder]:
    return [make_model(seed=6), make_model("grouped", seed=7), make_model(positions="rotary", seed=8)]


@final
class Mean:
    """What the slow search asks of a model: the logarithm of the mean of several models' probabilities."""

    pad_id = PAD

    def __init__(self, models: Sequence[EncoderDecoder]) -> None:
        self.models, self.max_target_tokens = models, min(model.max_target_tokens or 99 for model in models)

    def encode(self, src: Tensor) -> Any:
        return torch.stack([model.encode(src) for model in self.models], dim=1)

    def memory_mask(self, src: Tensor) -> Any:
        return self.models[0].memory_mask(src)

    def decode(self, ids: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        parts = zip(self.models, memory.unbind(1), strict=True)
        return torch.stack([model.decode(ids, one, mask) for model, one in parts], dim=2)

    def head(self, x: Tensor) -> Tensor:
        parts = zip(self.models, x.unbind(1), strict=True)
        never = torch.tensor([PAD, BOS])
        logits = [model.head(of).index_fill(1, never, -torch.inf) for model, of in parts]
        return torch.stack(logits).softmax(dim=-1).mean(dim=0).log()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kinds", [(Engine, Engine, Engine), (PlainEngine, Engine, PlainEngine)])
@pytest.mark.parametrize("beam_size", [1, 4])
def test_each_token_is_chosen_by_the_mean_of_the_probabilities(
    beam_size: int, kinds: Sequence[type[Engine] | type[PlainEngine]], models: list[EncoderDecoder]
) -> None:
    options = SearchOptions(beam_size=beam_size, num_best=beam_size, max_extra_tokens=8)
    engines = [kind(model, never=(PAD, BOS)) for kind, model in zip(kinds, models, strict=True)]
    slow: Any = Mean(models)
    expected = plain_search(slow, pad(SOURCES), options, BOS, EOS)
    assert_alike(search(EnsembleEngine(engines), pad(SOURCES), options, RULES), expected)
    assert expected != plain_search(models[0], pad(SOURCES), options, BOS, EOS)


@pytest.mark.parametrize(
    "precision", [pytest.param(one, marks=() if one == "bf16" else pytest.mark.slow) for one in PRECISIONS]
)
def test_neighbours_change_no_sentence_and_texts_join(precision: Precision) -> None:
    models = [make_model(seed=seed).float() for seed in (6, 7)]
    engine = EnsembleEngine([Engine(model, precision, never=RULES.never) for model in models])
    options, texts = SearchOptions(beam_size=3, max_extra_tokens=8), texts_of(12, 19, 30)

    def found(given: Sequence[Sequence[int]]) -> list[list[Hypothesis]]:
        return search(engine, pad([list(text) for text in given]), options, RULES)

    assert_neighbours_change_nothing(found, texts)
    begun: list[BeamText] = [sentence_text(engine, [*text, EOS], options, RULES) for text in texts]
    joining(engine, begun)
    assert [text.best[:1] for text in begun[1:]] == found(texts)[1:]
