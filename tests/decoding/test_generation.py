"""Continuations: the same whatever the batch, the padding and the cache."""

import copy
import math
from typing import Any

import pytest
import torch

from heads import with_semantics
from triptych import thresholds
from triptych.core.algebra.semantics import Temperature
from triptych.core.attention import MultiHeadAttention
from triptych.core.models import LanguageModel, LanguageModelConfig, PositionsConfig
from triptych.errors import UsageError
from triptych.literals import Precision
from triptych.running.decoding.engine import Engine
from triptych.running.decoding.generation import begin, generate_tokens
from triptych.running.decoding.hypotheses import Hypothesis
from triptych.running.decoding.linear_maps import PRECISIONS, Maps
from triptych.running.decoding.token_loop import Loop
from triptych.running.decoding_options import GenerationOptions, SamplingOptions
from triptych.running.input_limits import LONGEST_PROMPT

VOCAB = 29
SCHEMES = ["none", "learned", "sinusoidal", "rotary", "alibi"]
PROMPTS = [[1, 2, 3, 4, 5], [7], [8, 9, 3], [4, 4], [11, 2, 7, 7, 1, 0, 3]]


def make(scheme: str = "rotary", kind: str = "decoder", **options: Any) -> LanguageModel:
    torch.manual_seed(0)
    config = LanguageModelConfig.model_validate(
        {
            **{"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 24, "context": 12},
            "positions": PositionsConfig(scheme=scheme, max_tokens=24),  # type: ignore[arg-type]
            **options,
        }
    )
    model = LanguageModel.of(config, kind, VOCAB).double().eval()  # type: ignore[arg-type]
    with torch.no_grad():  # sharper than fresh weights are: no two tokens are as probable
        model.embeddings.table.weight.mul_(40)
    return model


def of_another_library(model: LanguageModel) -> LanguageModel:
    """The model, without the recipe that says how long the texts of its training were."""
    model.recipe_limit = None
    return model


def plain(model: LanguageModel, prompt: list[int], count: int) -> list[int]:
    """Greedy, by the whole text anew for every token; past the context of a recipe by the last half of it."""
    most = count + len(prompt) if model.recipe_limit is None else model.recipe_limit
    new, window = list[int](), prompt[-most:]
    for _ in range(count):
        new.append(int(model(torch.tensor([window])).logits[0, -1].argmax()))
        window = [*window, new[-1]]
        window = window if len(window) <= most else window[-(most // 2) :]
    return new


def ids_of(found: list[list[Hypothesis]]) -> list[list[tuple[int, ...]]]:
    return [[one.ids for one in of_prompt] for of_prompt in found]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_greedy_text_depends_neither_on_batch_nor_padding_nor_cache(scheme: str) -> None:
    model = make(scheme)
    engine, options = Engine(model), GenerationOptions(max_new_tokens=8)
    together = generate_tokens(engine, PROMPTS, options)
    for prompt, (found,) in zip(PROMPTS, together, strict=True):
        assert list(found.ids) == plain(model, prompt, 8)
        assert found.finish == "length"
        (alone,) = generate_tokens(engine, [prompt], options)[0]
        assert alone.ids == found.ids
        assert alone.log_probs == pytest.approx(found.log_probs, rel=1e-9)
    assert ids_of(generate_tokens(engine, PROMPTS, options, batch_rows=2)) == ids_of(together)


def test_log_probabilities_are_those_of_the_model() -> None:
    model = make()
    sampling = SamplingOptions(temperature=2.0, top_k=5, repetition_penalty=1.5)
    (found,) = generate_tokens(Engine(model), [PROMPTS[0]], GenerationOptions(6, sampling))[0]
    whole = torch.tensor([[*PROMPTS[0], *found.ids]])
    log_probs = model(whole).logits.log_softmax(dim=-1)[0, len(PROMPTS[0]) - 1 : -1]
    expected = log_probs.gather(1, torch.tensor(found.ids)[:, None])[:, 0]
    assert found.log_probs == pytest.approx(expected.tolist(), rel=1e-9)
    assert found.score == pytest.approx(sum(found.log_probs))


def test_the_same_seed_gives_the_same_text_in_any_batch_and_another_seed_another() -> None:
    engine = Engine(make("rotary"))
    sampling = SamplingOptions(temperature=3.0)
    options = GenerationOptions(10, sampling, seed=5, num_samples=3)
    together = ids_of(generate_tokens(engine, PROMPTS, options))
    alone = [ids_of(generate_tokens(engine, [prompt], options))[0] for prompt in PROMPTS]
    assert together == alone
    assert len(set(together[0])) == 3
    assert together != ids_of(generate_tokens(engine, PROMPTS, GenerationOptions(10, sampling, 6, 3)))


def test_fewer_samples_are_the_first_of_more() -> None:
    engine, sampling = Engine(make()), SamplingOptions(temperature=3.0)
    more = ids_of(generate_tokens(engine, PROMPTS[:1], GenerationOptions(8, sampling, 1, 4)))
    fewer = ids_of(generate_tokens(engine, PROMPTS[:1], GenerationOptions(8, sampling, 1, 2)))
    assert more[0][:2] == fewer[0]


def test_a_low_temperature_comes_to_greedy() -> None:
    engine = Engine(make())
    greedy = ids_of(generate_tokens(engine, PROMPTS, GenerationOptions(8)))
    cold = GenerationOptions(8, SamplingOptions(temperature=1e-4))
    assert ids_of(generate_tokens(engine, PROMPTS, cold)) == greedy
    only = GenerationOptions(8, SamplingOptions(temperature=1.0, top_k=1))
    assert ids_of(generate_tokens(engine, PROMPTS, only)) == greedy


def test_a_stop_token_ends_a_text_and_is_no_part_of_it_while_others_go_on() -> None:
    engine = Engine(make())
    free = generate_tokens(engine, PROMPTS, GenerationOptions(10))
    stop = free[0][0].ids[3]
    stopped = generate_tokens(engine, PROMPTS, GenerationOptions(10, stop_ids=(stop,)))
    for (before,), (after,) in zip(free, stopped, strict=True):
        place = before.ids.index(stop) if stop in before.ids else None
        assert after.ids == before.ids[:place]
        assert after.finish == ("length" if place is None else "token")
        assert len(after.log_probs) == len(after.ids) + (after.finish == "token")


def test_a_caller_can_end_rows_one_by_one() -> None:
    engine, free = Engine(make()), GenerationOptions(10)
    whole = generate_tokens(engine, PROMPTS, free)
    told: dict[int, list[int]] = {}

    def ends(row: int, token: int) -> bool:
        told.setdefault(row, []).append(token)
        return len(told[row]) == row + 2

    ended = generate_tokens(engine, PROMPTS, free, ends=ends, batch_rows=3)
    for row, ((before,), (after,)) in enumerate(zip(whole, ended, strict=True)):
        assert after.ids == before.ids[: row + 2] == tuple(told[row])
        assert after.finish == "text"


def test_a_text_ends_at_the_last_position_and_longer_prompts_are_refused_with_the_limit() -> None:
    engine = Engine(of_another_library(make("learned")))  # 24 positions
    (found,) = generate_tokens(engine, [[1] * 20], GenerationOptions(50))[0]
    assert (len(found.ids), found.finish) == (5, "positions")
    assert len(generate_tokens(engine, [[1] * 24], GenerationOptions(50))[0][0].ids) == 1
    with pytest.raises(UsageError, match=r"prompt 2 has 25 tokens.* positions for 24"):
        generate_tokens(engine, [[1], [1] * 25], GenerationOptions(50))
    with pytest.raises(UsageError, match="empty"):
        generate_tokens(engine, [[]], GenerationOptions(5))


@pytest.mark.parametrize("scheme", ["learned", "rotary"])
def test_a_text_goes_on_past_the_context_of_its_recipe_from_the_last_half(scheme: str) -> None:
    model = make(scheme)  # a context of 12
    prompts = [*PROMPTS, [5, 6, 7] * 7]
    found = generate_tokens(Engine(model), prompts, GenerationOptions(40))
    assert [list(one.ids) for (one,) in found] == [plain(model, ids, 40) for ids in prompts]
    assert {one.finish for (one,) in found} == {"length"}


def test_what_is_drawn_past_the_context_depends_on_the_text_alone() -> None:
    engine = Engine(make())
    sampling = SamplingOptions(repetition_penalty=1.2, temperature=3.0)
    options = GenerationOptions(30, sampling, seed=5, num_samples=2)
    together = ids_of(generate_tokens(engine, PROMPTS, options))
    assert together == [ids_of(generate_tokens(engine, [prompt], options))[0] for prompt in PROMPTS]


def test_a_beam_ends_where_the_context_does() -> None:
    (found,) = generate_tokens(Engine(make()), [[1, 2, 3]], GenerationOptions(40, beam_size=2))[0]
    assert (len(found.ids), found.finish) == (10, "positions")


def test_short_prompts_go_on_when_a_long_one_is_at_the_last_position() -> None:
    model = of_another_library(make("learned"))  # 24 positions
    prompts = [[1, 2, 3] * 7, [4, 5], [6], [7], [8], [9]]
    found = generate_tokens(Engine(model), prompts, GenerationOptions(15))
    expected = [plain(model, ids, min(15, 25 - len(ids))) for ids in prompts]
    assert [list(one.ids) for (one,) in found] == expected
    assert [one.finish for (one,) in found] == ["positions"] + ["length"] * 5


def test_tokens_are_there_as_they_come() -> None:
    engine, told = Engine(make()), list[tuple[int, int]]()
    (asked,) = begin(engine, PROMPTS[:1], GenerationOptions(5), lambda *new: bool(told.append(new)))
    counts = [len(told) for _ in Loop(engine).steps(asked.texts)]
    assert counts == [1, 2, 3, 4, 5]
    assert told == [(0, token) for token in plain(make(), PROMPTS[0], 5)]


def best_of_all(
    model: LanguageModel, prompt: list[int], length: int, stop: int
) -> dict[tuple[int, ...], float]:
    """The log-probability of every text of at most `length` tokens, by looking at all of them."""
    found: dict[tuple[int, ...], float] = {}

    def grow(ids: tuple[int, ...], total: float) -> None:
        if len(ids) == length:
            found[ids] = total
            return
        log_probs = model(torch.tensor([[*prompt, *ids]])).logits[0, -1].log_softmax(dim=-1).tolist()
        for token, log_prob in enumerate(log_probs):
            if token == stop:
                found[(*ids, stop)] = total + log_prob
            else:
                grow((*ids, token), total + log_prob)

    grow((), 0.0)
    return found


def test_a_beam_as_wide_as_there_are_texts_finds_the_best_of_all() -> None:
    torch.manual_seed(1)
    config = LanguageModelConfig(num_layers=1, d_model=8, num_heads=2, d_ff=8)
    model = LanguageModel.of(config, "decoder", 4).double().eval()
    with torch.no_grad():
        model.embeddings.table.weight.mul_(60)
    expected = sorted(best_of_all(model, [1, 2], 3, 3).items(), key=lambda pair: -pair[1])
    options = GenerationOptions(3, beam_size=64, num_samples=5, stop_ids=(3,))
    found = generate_tokens(Engine(model), [[1, 2]], options)[0]
    ended = [(*one.ids, 3) if one.finish == "token" else one.ids for one in found]
    assert ended == [ids for ids, _ in expected[:5]]
    assert [one.score for one in found] == pytest.approx([total for _, total in expected[:5]])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens"),
        ({"num_samples": 2}, "all alike"),
        ({"beam_size": 2, "num_samples": 3}, "beam of 2"),
        ({"beam_size": 2, "sampling": SamplingOptions(temperature=1.0)}, "no sampling option"),
        ({"alpha": -math.inf}, "alpha"),
        ({"stop_texts": ("",)}, "stop string is empty"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GenerationOptions(**options)


def test_an_encoder_continues_nothing() -> None:
    with pytest.raises(ValueError, match="encoder"):
        Engine(make(kind="encoder"))


LAYERS: list[dict[str, Any]] = [
    {"attention": {"projections": "grouped", "num_kv_heads": 1}},
    {"attention": {"projections": "latent", "d_latent": 4}, "positions": {"scheme": "alibi"}},
    {"attention": {"projections": "key_value"}, "positions": {"scheme": "learned"}},
    {"gated": True, "activation": "swish", "norm_kind": "rms", "bias": False},
    {"activation": "relu", "norm": "post", "tie_embeddings": False},
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", LAYERS, ids=str)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_prepared_model_computes_what_the_model_does(
    options: dict[str, Any], precision: Precision
) -> None:
    torch.manual_seed(0)
    config = LanguageModelConfig.model_validate(
        {"num_layers": 2, "d_model": 32, "num_heads": 2, "d_ff": 48, "context": 12, **options}
    )
    model = LanguageModel.of(config, "decoder", VOCAB).eval()
    model = model.double() if precision == "fp32" else model
    engine = Engine(model, precision)
    # Long enough that many rows of scores are computed by the kernel and few by products.
    texts = torch.randint(0, VOCAB, (3, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = model(texts).logits
    opened, logits = engine.read(texts[:, :20].tolist())
    found = [logits, *(engine.step(texts[:, i], opened) for i in range(20, 24))]
    apart = (torch.stack(found, dim=1) - expected[:, 19:]).abs().max() / expected.abs().max()
    assert float(apart) < {"fp32": 1e-12, "bf16": 0.05, "int8": 0.1}[precision]
    assert (float(apart) > 1e-5) == (precision != "fp32")


@pytest.mark.parametrize(
    ("precision", "dtype", "most"),
    [("fp32", torch.float32, 1e-5), ("bf16", torch.float32, 0.05), ("fp32", torch.float16, 0.01)],
)
def test_texts_of_unlike_length_grow_over_many_slots_as_the_model_reads_them(
    precision: Precision, dtype: torch.dtype, most: float
) -> None:
    model = make("rotary", attention={"projections": "grouped", "num_kv_heads": 1}).float()
    texts = torch.randint(0, VOCAB, (2, 70), generator=torch.Generator().manual_seed(1))
    engine = Engine(copy.deepcopy(model).to(dtype), precision)
    opened, _ = engine.read([texts[0, :60].tolist(), texts[1, :3].tolist()])
    for i in range(10):  # past the number of slots that bfloat16 reads at once
        logits = engine.step(torch.stack([texts[0, 60 + i], texts[1, 3 + i]]), opened)
        grown = texts[:1, : 61 + i], texts[1:, : 4 + i]
        expected = torch.stack([model(text).logits[0, -1].detach() for text in grown])
        assert float((logits - expected).abs().max() / expected.abs().max()) < most


def test_weights_are_packed_only_where_a_copy_is_a_small_part_of_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    packed: list[bool] = []

    def watched(*arguments: Any, **options: Any) -> Maps:
        packed.append(options["packed"])
        return Maps(*arguments, **options)

    monkeypatch.setattr("triptych.running.decoding.engine.Maps", watched)
    Engine(make())
    monkeypatch.setattr(thresholds, "SHARE_PACKED", 1e-9)
    Engine(make())
    assert packed == [True, False]


def test_the_model_itself_is_left_as_it_is() -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    kept = model(torch.tensor([PROMPTS[0]])).logits
    for precision in PRECISIONS:
        generate_tokens(Engine(model, precision), PROMPTS, GenerationOptions(3))
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(model(torch.tensor([PROMPTS[0]])).logits, kept)


def test_what_attention_does_besides_its_maps_is_done_in_batches_too() -> None:
    changes = ({"window": 3}, {"soft_cap": 0.5}, {"chunk": 3}, {"temperature": Temperature(0.5, 2.0)})
    for changed in changes:
        model = make("rotary")
        for block in model.blocks:
            weights = with_semantics(block.self_attention.weights(), **changed)  # type: ignore[union-attr,operator]
            block.self_attention = MultiHeadAttention.from_weights(weights)
        engine = Engine(model)
        found = generate_tokens(engine, PROMPTS, GenerationOptions(6))
        assert [list(one.ids) for (one,) in found] == [plain(model, prompt, 6) for prompt in PROMPTS]


def test_a_prompt_is_no_longer_than_is_asked_or_than_can_be_read() -> None:
    engine = Engine(of_another_library(make("rotary")))
    long = [1] * (LONGEST_PROMPT + 1)
    with pytest.raises(UsageError, match="32,769 tokens, and at most 32,768 are read at once: shorten it"):
        generate_tokens(engine, [long], GenerationOptions(1))
    options = GenerationOptions(1, max_prompt_tokens=4)
    with pytest.raises(UsageError, match="prompt 1 has 5 tokens, and at most 4"):
        generate_tokens(engine, PROMPTS, options)
    windowed = Engine(make("rotary"))  # of a recipe: reads the end of a prompt
    assert generate_tokens(windowed, [long], GenerationOptions(1))[0]
    with pytest.raises(UsageError, match="at most 4"):
        begin(windowed, PROMPTS, options)
