"""Texts and scores are the same, bit for bit, alone, in a batch and in another order."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from decoding.plain_search import search
from decoding.test_engine import make_model
from triptych.decoding import (
    PRECISIONS,
    Engine,
    GenerationOptions,
    Precision,
    SamplingOptions,
    SearchOptions,
    generate_tokens,
)
from triptych.decoding.generation import begin
from triptych.decoding.loop import Loop, Text
from triptych.decoding.search import sentence_text
from triptych.models import LanguageModel, LanguageModelConfig
from triptych.opening import open_model
from triptych.text import OutputRules

CHECKPOINTS = Path(__file__).parents[3] / "shared" / "checkpoints"
WAYS = {
    "greedy": GenerationOptions(max_new_tokens=24),
    "sampled": GenerationOptions(24, SamplingOptions(temperature=1.0, top_p=0.9), seed=3, num_samples=2),
    "beam": GenerationOptions(max_new_tokens=12, beam_size=4, num_samples=4),
}
GROUPED = {"projections": "grouped", "num_kv_heads": 2}
GATED = {"gated": True, "activation": "swish", "d_ff": 88, "norm_kind": "rms"}
# Of trained models in every run what once failed; the small models have every precision.
TRAINED = [p if p == "int8" else pytest.param(p, marks=pytest.mark.slow) for p in PRECISIONS]
MODELS: dict[str, dict[str, Any]] = {
    "learned": {"positions": {"scheme": "learned", "max_tokens": 256}, "num_heads": 4},
    "grouped": {"positions": {"scheme": "rotary"}, "num_heads": 8, "attention": GROUPED},
    "alibi": {"positions": {"scheme": "alibi"}, "num_heads": 2},
    "gated": {"positions": {"scheme": "rotary"}, "num_heads": 2, **GATED},
}


def texts_of(count: int, longest: int, vocab: int, seed: int = 0) -> list[list[int]]:
    draw = random.Random(seed)
    lengths = [longest, 1, 2, *(draw.randint(1, longest) for _ in range(count - 3))]
    return [[draw.randrange(3, vocab) for _ in range(length)] for length in lengths]


def assert_neighbours_change_nothing(make: Any, texts: Sequence[Any]) -> None:
    """`make` takes texts and gives an answer for each."""
    together = make(texts)
    order = random.Random(1).sample(range(len(texts)), len(texts))
    assert make([texts[i] for i in order]) == [together[i] for i in order]
    few = order[: len(order) // 3]
    assert make([texts[i] for i in few]) == [together[i] for i in few]
    for text, found in zip(texts, together, strict=True):
        assert make([text]) == [found]


def joining(engine: Any, begun: Sequence[Text]) -> None:
    """Decode texts of which each joins when the others have taken some steps; one is left in the middle."""
    loop = Loop(engine, most_rows=max(text.num_rows for text in begun) * (len(begun) // 2))
    for number, text in enumerate(begun):
        loop.waiting.append(text)
        for _ in range(number % 4):
            loop.step()
    begun[0].is_over = True
    loop.run([])


@pytest.mark.parametrize(
    ("name", "precision", "way"),
    [
        # Every precision and way of one model; of the others what depends on their layers.
        pytest.param(
            *case,
            marks=[pytest.mark.slow] * (case[0] != "grouped" and bool({"bf16", "sampled", "beam"} & {*case})),
        )
        for case in itertools.product(MODELS, PRECISIONS, WAYS)
    ],
)
def test_a_small_language_model_continues_a_text_as_if_it_were_alone(
    name: str, precision: Precision, way: str
) -> None:
    torch.manual_seed(0)
    given = {"num_layers": 2, "d_model": 64, "d_ff": 96, "context": 256, **MODELS[name]}
    model = LanguageModel.of(LanguageModelConfig.model_validate(given), "decoder", 301).eval()
    engine = Engine(model, precision)
    texts = texts_of(9, 90, 301)
    assert_neighbours_change_nothing(lambda texts: generate_tokens(engine, texts, WAYS[way]), texts)
    asked = begin(engine, texts, WAYS[way])
    joining(engine, [text for one in asked for text in one.texts])
    assert [one.result() for one in asked[1:]] == generate_tokens(engine, texts, WAYS[way])[1:]


def test_two_wide_heads_that_share_a_key_read_a_short_text_as_beside_a_longer_one_in_bfloat16() -> None:
    torch.manual_seed(0)
    heads = {"num_heads": 8, "attention": {"projections": "grouped", "num_kv_heads": 4}}
    sizes = {"num_layers": 2, "d_model": 1024, "d_ff": 64, "context": 256, "positions": {"scheme": "rotary"}}
    model = LanguageModel.of(LanguageModelConfig.model_validate(sizes | heads), "decoder", 301).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)  # sharp enough for weights that differ
    engine, texts = Engine(model, "bf16"), texts_of(16, 20, 301)
    assert_neighbours_change_nothing(lambda texts: generate_tokens(engine, texts, WAYS["greedy"]), texts)


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("positions", ["sinusoidal", pytest.param("rotary", marks=pytest.mark.slow)])
def test_a_small_translator_translates_a_sentence_as_if_it_were_alone(
    positions: str, precision: Precision, beam_size: int
) -> None:
    model = make_model(positions=positions, vocab=301).float()
    engine = Engine(model, precision, never=(0, 1))
    options = SearchOptions(beam_size=beam_size, num_best=beam_size, max_extra_tokens=8)

    def found(texts: Sequence[Sequence[int]]) -> Any:
        width = max(map(len, texts)) + 1
        src = torch.tensor([[*ids, 2] + [0] * (width - 1 - len(ids)) for ids in texts])
        return search(engine, src, options, OutputRules((1,), 2, (0, 1)))

    texts = texts_of(12, 19, 30)
    assert_neighbours_change_nothing(found, texts)
    sentences = [sentence_text(engine, [*ids, 2], options, OutputRules((1,), 2, (0, 1))) for ids in texts]
    joining(engine, sentences)
    assert [text.best[:beam_size] for text in sentences[1:]] == found(texts)[1:]


def test_many_sentences_that_join_are_a_batch_of_their_own() -> None:
    engine, rules = Engine(make_model(vocab=301).float()), OutputRules((1,), 2, (0, 1))
    options = SearchOptions(max_extra_tokens=8)

    def begun() -> list[Text]:
        return [sentence_text(engine, [*ids, 2], options, rules) for ids in texts_of(15, 19, 30)]

    texts, loop = begun(), Loop(engine)
    for part in (texts[:2], texts[2:14], texts[14:]):
        loop.waiting.extend(part)
        for _ in range(3):
            loop.step()
    assert [len(batch.texts) for batch in loop.batches] == [2, 13]
    loop.run([])
    alone = begun()
    for text in alone:
        Loop(engine).run([text])
    assert [text.best for text in texts] == [text.best for text in alone]  # type: ignore[attr-defined]


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no trained checkpoints here")
@pytest.mark.parametrize("way", ["greedy", pytest.param("sampled", marks=pytest.mark.slow), "beam"])
@pytest.mark.parametrize("precision", TRAINED)
@pytest.mark.parametrize("name", ["gpt2", pytest.param("llama-gqa", marks=pytest.mark.slow)])
def test_a_trained_language_model_continues_a_text_as_if_it_were_alone(
    name: str, precision: Precision, way: str
) -> None:
    opened = open_model(CHECKPOINTS / name, "cpu")
    engine = Engine(opened.language_model, precision)
    assert_neighbours_change_nothing(
        lambda texts: generate_tokens(engine, texts, WAYS[way]), texts_of(9, 200, 2000)
    )


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no trained checkpoints here")
@pytest.mark.parametrize("beam_size", [pytest.param(1, marks=pytest.mark.slow), 4])
@pytest.mark.parametrize("precision", TRAINED)
def test_a_trained_translator_translates_a_sentence_as_if_it_were_alone(
    precision: Precision, beam_size: int
) -> None:
    opened = open_model(CHECKPOINTS / "marian-multi30k", "cpu")
    options = SearchOptions(beam_size=beam_size, num_best=beam_size, max_extra_tokens=10)
    translator = opened.translator(options, precision=precision)
    assert_neighbours_change_nothing(translator.search_tokens, texts_of(16, 70, 7000))
