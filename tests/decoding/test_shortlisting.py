"""A search with a shortlist is the search of all tokens with the others hidden."""

import math
from collections.abc import Sequence
from typing import Any, final

import pytest
import torch
from torch import Tensor

from decoding.plain_search import search
from decoding.test_engine import make_model, pad
from decoding.test_neighbours import assert_neighbours_change_nothing, texts_of
from triptych.core.models import EncoderDecoder
from triptych.literals import Precision
from triptych.running.decoding import PRECISIONS, Engine, Hypothesis, SearchOptions
from triptych.running.decoding.engine import GROUP, DecodingEngine
from triptych.running.decoding.shortlisting import ShortlistEngine
from triptych.running.text import OutputRules
from triptych.running.text.shortlists import Shortlist

VOCAB = 301
RULES = OutputRules((1,), 2, (0, 1))
TEXTS = texts_of(12, 19, 30)


@pytest.fixture(scope="module")
def model() -> EncoderDecoder:
    # A seed without near ties: between these the rounding of a product decides, which has other shapes here.
    return make_model(vocab=VOCAB, seed=3).float()


@pytest.fixture(scope="module")
def shortlist() -> Shortlist:
    draw = torch.Generator().manual_seed(0)
    own = {token: torch.randint(3, VOCAB, (9,), generator=draw).tolist() for token in range(3, 29)}
    return Shortlist([2, 5, 7], own)


def found(engine: DecodingEngine, texts: Sequence[Sequence[int]], beam_size: int) -> list[list[Hypothesis]]:
    options = SearchOptions(beam_size=beam_size, num_best=beam_size, max_extra_tokens=8)
    return search(engine, pad([list(text) for text in texts]), options, RULES)


def assert_same(ours: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    assert [[one.ids for one in of] for of in ours] == [[one.ids for one in of] for of in expected]
    scores = [[one.score for of in lists for one in of] for lists in (ours, expected)]
    torch.testing.assert_close(*map(torch.tensor, scores), rtol=1e-4, atol=1e-4)


@final
class Hidden(DecodingEngine):
    """The engine of all tokens, whose logits are hidden where the shortlist has no token: one sentence."""

    def __init__(self, engine: Engine, allowed: Sequence[int]) -> None:
        self.engine, self.device, self.pad_id = engine, engine.device, engine.pad_id
        self.max_tokens = engine.max_tokens
        self.hidden = torch.ones(math.ceil(engine.vocab_size / GROUP) * GROUP, dtype=torch.bool)
        self.hidden[list(allowed)] = False

    def start(self, src: Tensor, beam_size: int) -> Any:
        return self.engine.start(src, beam_size)

    def step(self, tokens: Tensor, cache: Any) -> Tensor:
        return self.engine.step(tokens, cache).masked_fill(self.hidden, -math.inf)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_sentence_uses_only_its_own_tokens(
    precision: Precision, beam_size: int, model: EncoderDecoder, shortlist: Shortlist
) -> None:
    ours = found(ShortlistEngine(model, shortlist, RULES, precision), TEXTS, beam_size)
    engine = Engine(model, precision, never=RULES.never)
    for text, own in zip(TEXTS, ours, strict=True):
        allowed = shortlist.of([*text, 2]).tolist()
        assert_same([own], found(Hidden(engine, allowed), [text], beam_size))
        assert {token for one in own for token in one.ids} <= set(allowed)


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_with_all_tokens_on_the_list_nothing_changes(
    precision: Precision, beam_size: int, model: EncoderDecoder
) -> None:
    everything = ShortlistEngine(model, Shortlist(range(VOCAB), {}), RULES, precision)
    engine = Engine(model, precision, never=RULES.never)
    assert_same(found(everything, TEXTS, beam_size), found(engine, TEXTS, beam_size))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_neighbours_change_no_sentence(
    precision: Precision, beam_size: int, model: EncoderDecoder, shortlist: Shortlist
) -> None:
    engine = ShortlistEngine(model, shortlist, RULES, precision)
    assert_neighbours_change_nothing(lambda texts: found(engine, texts, beam_size), TEXTS)
