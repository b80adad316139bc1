"""CTranslate2 continuing texts: the tokens, log-probabilities and ends of our own engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from triptych.converting.engines import CTranslate2Generator
from triptych.core.checkpoints.stored_models import load_language_model
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.errors import UsageError
from triptych.files import cache_folder
from triptych.running.decoding.engine import Engine
from triptych.running.decoding.generation import generate_tokens
from triptych.running.decoding.hypotheses import Hypothesis
from triptych.running.decoding_options import GenerationOptions, SamplingOptions

SHARED = Path(__file__).parents[3] / "shared" / "checkpoints"
PROMPTS = [[1, 2, 3, 4, 5], [7], [8, 9, 3], [4, 4], [11, 2, 7, 7, 1, 0, 3], [6, 1, 2]]

pytest.importorskip("ctranslate2", reason="needs CTranslate2")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def make(**options: Any) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 24, "context": 12}
    model = LanguageModel.of(LanguageModelConfig.model_validate({**sizes, **options}), "decoder", 29).eval()
    with torch.no_grad():  # sharper than fresh weights are: no two tokens are as probable
        model.embeddings.table.weight.mul_(40)
    return model


MODELS: dict[str, dict[str, Any]] = {
    "rotary, grouped": {"attention": {"projections": "grouped", "num_kv_heads": 1}, "norm_kind": "rms"},
    "learned": {"positions": {"scheme": "learned", "max_tokens": 14}},
}


def assert_alike(found: list[list[Hypothesis]], expected: list[list[Hypothesis]]) -> None:
    for theirs, ours in zip(found, expected, strict=True):
        assert [one.ids for one in theirs] == [one.ids for one in ours]
        assert [one.finish for one in theirs] == [one.finish for one in ours]
        for one, other in zip(theirs, ours, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
            assert one.score == pytest.approx(other.score, abs=1e-4)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_greedy_texts_are_those_of_our_own_engine(options: dict[str, Any]) -> None:
    model = make(**options)
    model.recipe_limit = None  # as of another library's checkpoint: no text is read again
    free = GenerationOptions(max_new_tokens=10)
    ours = generate_tokens(Engine(model), PROMPTS, free)
    theirs = CTranslate2Generator(model, batch_rows=2)
    assert_alike(theirs.decode(PROMPTS, free), ours)
    # Stop tokens, one of them 0, and the end of a text that the caller sees.
    stops = (0, ours[0][0].ids[4])
    ending = GenerationOptions(max_new_tokens=10, stop_ids=stops)
    seen = dict.fromkeys(range(len(PROMPTS)), 0)

    def ends(row: int, token: int) -> bool:
        seen[row] += 1
        return row == 2 and seen[row] == 3

    expected = generate_tokens(Engine(model), PROMPTS, ending, ends=ends)
    seen = dict.fromkeys(range(len(PROMPTS)), 0)
    found = theirs.decode(PROMPTS, ending, ends)
    assert {one.finish for (one,) in expected} >= {"token", "text"}
    assert_alike(found, expected)


def test_a_text_of_a_run_ends_at_the_context_of_its_training() -> None:
    model, options = make(), GenerationOptions(max_new_tokens=20)  # a context of 12
    ((found,),) = CTranslate2Generator(model).decode([[1, 2, 3]], options)
    ((ours,),) = generate_tokens(Engine(model), [[1, 2, 3]], options)
    assert found.ids == ours.ids[:10]
    assert found.finish == "positions"


def test_no_token_ends_a_text_unless_it_is_asked_to() -> None:
    model = make()
    with torch.no_grad():
        model.final_norm.bias.copy_(model.embeddings.table.weight[0])
    ((found,),) = CTranslate2Generator(model).decode([[1, 2]], GenerationOptions(max_new_tokens=5))
    assert found.ids == (0,) * 5


@pytest.mark.parametrize("stops", [(), (3, 7)])
def test_beams_find_the_texts_of_our_own_engine(stops: tuple[int, ...]) -> None:
    model = make()
    options = GenerationOptions(max_new_tokens=6, beam_size=3, num_samples=2, alpha=0.7, stop_ids=stops)
    ours = generate_tokens(Engine(model), PROMPTS, options)
    assert_alike(CTranslate2Generator(model).decode(PROMPTS, options), ours)


def test_a_stream_gives_the_tokens_of_the_whole() -> None:
    model = make()
    options = GenerationOptions(max_new_tokens=8, stop_ids=(5,))
    generator = CTranslate2Generator(model)
    for prompt in PROMPTS:
        ((whole,),) = generator.decode([prompt], options)
        new = list(generator.stream(prompt, options, lambda row, token: False))
        assert tuple(one.token for one in new if one.finish != "token") == whole.ids
        assert [one.log_prob for one in new] == pytest.approx(whole.log_probs, abs=1e-5)
        assert new[-1].finish == whole.finish


def test_models_of_the_same_weights_that_compute_something_else_are_kept_apart() -> None:
    for base in (100.0, 100.01):
        CTranslate2Generator(make(positions={"scheme": "rotary", "rotary_base": base}))
    assert len([*cache_folder().iterdir()]) == 2


def test_options_of_sampling_and_bad_prompts_are_refused() -> None:
    model = make(**MODELS["learned"])
    model.recipe_limit = None  # as of another library's checkpoint: positions are the limit
    generator = CTranslate2Generator(model)
    for sampling in (SamplingOptions(temperature=1.0), SamplingOptions(repetition_penalty=1.2)):
        with pytest.raises(UsageError, match="--engine ctranslate2 takes the most probable tokens"):
            generator.decode([[1]], GenerationOptions(sampling=sampling))
    with pytest.raises(UsageError, match="the prompt is empty"):
        generator.decode([[]], GenerationOptions())
    with pytest.raises(UsageError, match="the prompt has 15 tokens, but the model has positions for 14"):
        generator.decode([[1] * 15], GenerationOptions())


@pytest.mark.parametrize("name", ["gpt2", "llama-gqa"])
def test_trained_checkpoints_continue_as_our_own_engine_does(name: str) -> None:
    if not (SHARED / name).is_dir():
        pytest.skip(f"needs ../shared/checkpoints/{name}")
    model = load_language_model(SHARED / name)
    options = GenerationOptions(max_new_tokens=24)
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(30, 1000, (8,), generator=draw).tolist() for _ in range(8)]
    ours = generate_tokens(Engine(model), prompts, options)
    found = CTranslate2Generator(model).decode(prompts, options)
    assert sum(one[0].ids == other[0].ids for one, other in zip(found, ours, strict=True)) >= 7
    rounded = CTranslate2Generator(model, "int8").decode(prompts, options)
    assert {one.finish for (one,) in rounded} == {"length"}
