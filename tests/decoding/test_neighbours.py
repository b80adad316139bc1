"""Texts and scores are the same, bit for bit, alone, in a batch and in another order."""

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.plain_search import search
from decoding.test_engine import make_model
from triptych.core.algebra.semantics import HeadGate, Semantics
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention import MultiHeadAttention
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.literals import Precision
from triptych.running.decoding import (
    PRECISIONS,
    Engine,
    GenerationOptions,
    SamplingOptions,
    SearchOptions,
    generate_tokens,
)
from triptych.running.decoding.cache import even_length, hidden_past
from triptych.running.decoding.fused import FusedAttention, numbers_of
from triptych.running.decoding.generation import begin
from triptych.running.decoding.linear_maps import Maps
from triptych.running.decoding.neighbours import attention_differs
from triptych.running.decoding.search import sentence_text
from triptych.running.decoding.token_loop import Loop, Text
from triptych.running.opening import open_reader
from triptych.running.text import OutputRules
from triptych.threads import torch_threads

CHECKPOINTS = Path(__file__).parents[3] / "shared" / "checkpoints"
WAYS = {
    "greedy": GenerationOptions(max_new_tokens=24),
    "sampled": GenerationOptions(24, SamplingOptions(temperature=1.0, top_p=0.9), seed=3, num_samples=2),
    "beam": GenerationOptions(max_new_tokens=12, beam_size=4, num_samples=4),
}
GROUPED = {"projections": "grouped", "num_kv_heads": 2}
GATED = {"gated": True, "activation": "swish", "d_ff": 88, "norm_kind": "rms"}
# Of trained models in every run what once failed; the small models have every precision.
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


@pytest.mark.sampled(3)
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


@pytest.mark.slow
def test_texts_of_33_to_48_tokens_are_read_as_beside_longer_ones_in_bfloat16() -> None:
    torch.manual_seed(0)
    heads = {"num_heads": 8, "attention": {"projections": "grouped", "num_kv_heads": 4}}
    sizes = {"num_layers": 2, "d_model": 1024, "d_ff": 64, "context": 256, "positions": {"scheme": "rotary"}}
    model = LanguageModel.of(LanguageModelConfig.model_validate(sizes | heads), "decoder", 301).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2)  # sharp enough for weights that differ
    engine, texts = Engine(model, "bf16"), texts_of(16, 60, 301)
    assert_neighbours_change_nothing(lambda texts: generate_tokens(engine, texts, WAYS["greedy"]), texts)


# Heads, groups of keys, and the width of a head.
HEADS = [(9, 3, 64), (14, 2, 64), (32, 8, 128), (12, 12, 64), (8, 8, 32), (16, 1, 80), (8, 1, 256)]
HEADS += [(6, 6, 16)]
FEW_HEADS = [(8, 4, 128), (3, 3, 64)]


def fused_attention(heads: int, groups: int, width: int, dtype: torch.dtype) -> FusedAttention:
    keys, out = (Link(torch.zeros(groups, 8, width)),), (Link(torch.zeros(heads, width, 8)),)
    queries = (Link(torch.zeros(heads, 8, width)),)
    weights = AttentionWeights(8, heads, queries, keys, keys, out, Semantics(1.0, "causal"))
    return FusedAttention(weights, Maps("fp32", dtype), is_cross=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "heads", [*FEW_HEADS, *(pytest.param(heads, marks=pytest.mark.slow) for heads in HEADS)], ids=str
)
def test_heads_gather_the_same_beside_longer_texts(heads: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Each key comes twice, with values that cancel each other: what is gathered is rounding."""
    layer, (_, groups, width) = fused_attention(*heads, dtype), heads
    draw = torch.Generator().manual_seed(1)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw).to(dtype)

    for length in (1, 2, 6, 13, 16, 17, 29, 37, 48, 61, 64, 100):
        order = torch.randperm(length + length % 2, generator=draw)[:length]
        half = -(-length // 2)
        k, v = drawn(groups, half, width).repeat(1, 2, 1)[:, order], drawn(groups, half, width)
        v = torch.cat([v, -v], dim=1)[:, order]
        q = drawn(heads[0], length, width) * width**-0.5
        steps, prompts = [], []
        for longest in (length, 31, 33, 48, 64, 65, 150):
            for batch in (1, 2, 5) if longest >= length else ():
                keys, values = drawn(2, batch, groups, even_length(longest), width)
                keys[-1, :, :length], values[-1, :, :length] = k, v
                lengths = torch.tensor([longest] * (batch - 1) + [length])
                hidden = hidden_past(lengths, keys.shape[2], dtype)[:, None]
                asked = drawn(batch, heads[0], longest, width)
                asked[-1, :, :length] = q
                asked_last = asked[:, :, length - 1 : length]
                steps.append(layer.gathered(asked_last, keys, values, hidden, varies=False)[-1])
                keys, values = keys[:, :, :longest], values[:, :, :longest]
                causal = numbers_of(torch.ones(longest, longest).tril() > 0, keys)
                found = layer.gathered(asked, keys, values, causal, varies=True)
                prompts.append(found[-1, :, :length])
        for found in (steps, prompts):
            assert all(torch.equal(found[0], beside) for beside in found), length


def test_more_than_two_threads_and_layers_that_are_not_fused_are_named() -> None:
    given = {"num_layers": 1, "d_model": 32, "num_heads": 2}
    model = LanguageModel.of(LanguageModelConfig.model_validate(given), "decoder", 301).eval()
    engine = Engine(model)
    with torch_threads(2):
        assert engine.why_batches_matter == ""
    with torch_threads(3):
        assert engine.why_batches_matter == "more than 2 threads"
    for block in model.blocks:
        block.self_attention.tap = lambda name, values, first: values
    assert "attention that is not fused" in Engine(model).why_batches_matter


def test_what_attention_gathers_is_compared_on_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, bmm = fused_attention(4, 2, 16, torch.float32), torch.bmm
    assert not attention_differs(layer, torch.float32)
    monkeypatch.setattr(torch, "bmm", lambda a, b: bmm(a, b) * (1 + (b.shape[2] == 64) * 2**-20))
    assert attention_differs(layer, torch.float32)


def logits_of(engine: Engine, texts: Sequence[Sequence[int]]) -> Tensor:
    """Logits after each text, and after one and two tokens more."""
    cache, found = engine.read(texts)
    every = [found]
    for token in (3, 4):
        every.append(engine.step(torch.tensor([token + len(text) for text in texts]), cache))
    return torch.stack(every, dim=1)


@torch.no_grad()
def assert_logits_are_those_alone(engine: Engine, texts: Sequence[Sequence[int]]) -> None:
    """In batches of 2 to 8 texts, and of all of them."""
    alone = [logits_of(engine, [text])[0] for text in texts[:8]]
    assert engine.why_batches_matter == ""
    for batch in range(2, 9):
        found = logits_of(engine, texts[8 - batch : 8])
        assert all(map(torch.equal, found, alone[8 - batch :])), f"a batch of {batch}"
    assert all(map(torch.equal, logits_of(engine, texts[::-1])[-8:].flip(0), alone))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("per_channel", [False, True])
def test_gated_heads_give_a_text_the_same_logits_beside_any_others(
    per_channel: bool, precision: Precision
) -> None:
    torch.manual_seed(0)
    d_model, heads, groups, width = 1152, 9, 3, 32

    def link(*shape: int) -> Link:
        return Link(torch.randn(*shape) * shape[1] ** -0.5)

    gate = HeadGate(torch.randn(heads, *([width] if per_channel else []), d_model))
    semantics = Semantics(width**-0.5, "causal", gate=gate)
    keys, values = (link(groups, d_model, width),), (link(groups, d_model, width),)
    maps = (link(heads, d_model, width),), keys, values, (link(heads, width, d_model),)
    layer = MultiHeadAttention.from_weights(AttentionWeights(d_model, heads, *maps, semantics))
    config = LanguageModelConfig(num_layers=1, d_model=d_model, num_heads=heads, d_ff=96)
    model = LanguageModel(config.architecture("decoder", 301), [layer]).eval()
    engine = Engine(model, precision)
    assert_logits_are_those_alone(engine, texts_of(32, 60, 301))


# Width, heads, groups of keys, feed-forward layer and vocabulary of published models.
REAL = [(576, 9, 3, 1536, 49152), (896, 14, 2, 4864, 151936)]
REAL += [(2048, 32, 8, 8192, 49152), (4096, 32, 8, 14336, 49152)]


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("sizes", REAL, ids=str)
def test_a_layer_of_a_real_size_gives_a_text_the_same_logits_beside_any_others(
    sizes: tuple[int, int, int, int, int], precision: Precision
) -> None:
    d_model, heads, groups, d_ff, vocab = sizes
    given = {"num_layers": 1, "d_model": d_model, "num_heads": heads, "context": 256}
    attention = {"projections": "grouped", "num_kv_heads": groups}
    given |= {"attention": attention, "positions": {"scheme": "rotary"}, **GATED, "d_ff": d_ff}
    torch.manual_seed(0)
    model = LanguageModel.of(LanguageModelConfig.model_validate(given), "decoder", vocab).eval()
    engine, texts = Engine(model, precision), texts_of(32, 60, vocab)
    del model

    assert_logits_are_those_alone(engine, texts)


@pytest.mark.sampled(3)
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


@pytest.mark.slow
@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no trained checkpoints here")
@pytest.mark.parametrize("way", ["greedy", "sampled", "beam"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_a_trained_language_model_continues_a_text_as_if_it_were_alone(
    name: str, precision: Precision, way: str
) -> None:
    opened = open_reader(CHECKPOINTS / name, "cpu")
    engine = Engine(opened.language_model, precision)
    texts = texts_of(9, 200, 2000)
    assert_neighbours_change_nothing(lambda texts: generate_tokens(engine, texts, WAYS[way]), texts)


@pytest.mark.slow
@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no trained checkpoints here")
@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_trained_translator_translates_a_sentence_as_if_it_were_alone(
    precision: Precision, beam_size: int
) -> None:
    opened = open_reader(CHECKPOINTS / "marian-multi30k", "cpu")
    options = SearchOptions(beam_size=beam_size, num_best=beam_size, max_extra_tokens=10)
    translator = opened.translator(options, precision=precision)
    assert_neighbours_change_nothing(translator.search_tokens, texts_of(16, 70, 7000))
