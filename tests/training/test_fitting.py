"""What a recipe leaves out is chosen for its text; what it gives stands."""

from pathlib import Path
from typing import Any

import pytest

import triptych
from tiny_recipe import generated
from triptych.core.models import PRESETS
from triptych.training import AnyRecipe, LanguageRecipe, Recipe, read_recipe, resolve
from triptych.training.choices import choices, fit_language_training, fit_tokenizer, fit_training

DATA = generated()
SHIPPED = sorted((Path(triptych.__file__).parent / "recipes").glob("*.toml"))


def fit(recipe: AnyRecipe, num_tokens: int, device: str = "cpu") -> AnyRecipe:
    """For a text whose batches are full to nine tenths."""

    def steps_per_epoch(recipe: Recipe) -> int:
        of_update = recipe.training.batch_tokens * recipe.training.accumulate_batches
        return max(round(num_tokens / (0.9 * of_update)), 1)

    if isinstance(recipe, LanguageRecipe):
        fitted = fit_tokenizer(recipe, 5 * num_tokens, device)
        return fit_language_training(fitted, num_tokens, device)
    fitted = fit_tokenizer(recipe, 10 * num_tokens, device)
    return fit_training(fitted, num_tokens, device, steps_per_epoch)


def fitted(num_tokens: int, device: str = "cpu", **sections: Any) -> Recipe:
    return fit(resolve({"data": DATA, **sections}), num_tokens, device)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.name)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_recipes_that_come_along_leave_only_their_precision_to_be_chosen(
    path: Path, device: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.training.choices.has_fast_bf16", lambda kind: precision == "bf16")
    recipe = read_recipe(path)
    chosen = fit(recipe, 500_000, device)
    if recipe.training.precision != "auto":
        assert (chosen, choices(recipe, chosen)) == (recipe, [])
        return
    assert choices(recipe, chosen) == [f"training.precision = {precision}"]
    assert chosen == read_recipe(path, [f"training.precision={precision}"])


@pytest.mark.parametrize(
    ("num_tokens", "device", "preset"),
    [
        (5_000, "cpu", "tiny"),
        (299_999, "cuda", "tiny"),
        (300_000, "cpu", "small"),
        (100_000_000, "cpu", "small"),
        (100_000_000, "cuda", "base"),
    ],
)
def test_with_data_alone_model_and_schedule_follow_the_text(
    num_tokens: int, device: str, preset: str
) -> None:
    recipe = fitted(num_tokens, device)
    assert recipe.model == PRESETS[preset].model_copy(update={"norm": "pre"})
    training, total = recipe.training, recipe.training.max_steps * 0.9 * recipe.training.batch_tokens
    assert training.warmup_steps == min(training.max_steps // 10, 4000)
    assert training.max_steps >= 300
    assert 512 <= training.batch_tokens <= (4096 if device == "cpu" else 16_384)
    assert 0.99 * min(3 * num_tokens, 4e7) < total
    assert total < 1.05 * (4e7 if device == "cpu" else 2.5e9)
    assert recipe.validation.every_steps == min(training.max_steps // 10, 1000)


def test_a_longer_text_gets_a_larger_vocabulary_fewer_passes_and_more_steps() -> None:
    recipes = [fitted(num_tokens) for num_tokens in (20_000, 200_000, 2_000_000)]
    vocab_sizes = [recipe.tokenizer.vocab_size for recipe in recipes]
    totals = [recipe.training.max_steps * recipe.training.batch_tokens for recipe in recipes]
    assert vocab_sizes == sorted(set(vocab_sizes))
    assert totals == sorted(set(totals))
    assert totals[0] / 20_000 > totals[1] / 200_000 > totals[2] / 2_000_000


def test_a_vocabulary_of_one_side_is_for_half_of_the_text() -> None:
    sizes = [
        fitted(100_000, tokenizer={"joint": joint}, model={"tie_embeddings": "target"}).tokenizer.vocab_size
        for joint in (True, False)
    ]
    assert sizes == [3000, 2100]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.vocab_size", 777),
        ("model.norm", "post"),
        ("model.encoder.num_layers", 5),
        ("training.max_steps", 77),
        ("training.batch_tokens", 999),
        ("training.warmup_steps", 7),
        ("training.learning_rate", 0.125),
        ("validation.every_steps", 5),
    ],
)
def test_a_key_that_is_given_stands(key: str, value: object) -> None:
    given = resolve({"data": DATA}, [f"{key}={value}"])
    chosen = fit(given, 50_000)
    found: Any = chosen
    for part in key.split("."):
        found = getattr(found, part)
    assert found == value
    told = choices(given, chosen)
    assert told
    assert not [line for line in told if line.startswith(f"{key} ")]


def test_the_warm_up_is_a_share_of_the_steps_that_are_given() -> None:
    assert fitted(400_000, training={"max_steps": 2300, "batch_tokens": 4096}).training.warmup_steps == 230
    assert fitted(400_000, training={"max_steps": 5}).training.warmup_steps == 1
    of_epochs = fitted(400_000, training={"max_epochs": 2, "batch_tokens": 4096}).training
    assert of_epochs.warmup_steps == of_epochs.max_steps // 10 == round(400_000 / (0.9 * 4096)) * 2 // 10


def test_with_a_warm_up_given_the_schedule_is_the_papers() -> None:
    training = fitted(400_000, training={"warmup_steps": 400}).training
    assert (training.learning_rate, training.schedule, training.clip_norm) == (None, "inverse_sqrt", 0.0)


def test_a_batch_holds_the_longest_sentence_there_may_be() -> None:
    assert fitted(5_000, data={**DATA, "max_sentence_tokens": 700}).training.batch_tokens == 701


def test_a_language_model_grows_with_its_text_and_keeps_what_is_given() -> None:
    data = {"train": {"files": ["a.txt"]}}
    recipes = [
        fit(resolve({"task": "language-model", "data": data}), num_tokens)
        for num_tokens in (20_000, 200_000, 5_000_000)
    ]
    for recipe in recipes:
        assert recipe.model.gated
        assert recipe.training.warmup_steps == min(recipe.training.max_steps // 20, 1000)
        assert recipe.training.batch_size * recipe.model.context <= 4096
    widths = [recipe.model.d_model for recipe in recipes]
    assert widths == [128, 128, 256]
    totals = [r.training.max_steps * r.training.batch_size * r.model.context for r in recipes]
    assert totals == sorted(set(totals))
    assert totals[0] / 20_000 > totals[1] / 200_000 > totals[2] / 5_000_000
    given = resolve(
        {"task": "language-model", "data": data, "model": {"d_model": 96, "activation": "gelu"},
         "training": {"max_steps": 7, "batch_size": 3}}
    )  # fmt: skip
    chosen = fit(given, 5_000_000)
    assert (chosen.model.d_model, chosen.model.activation) == (96, "gelu")
    assert (chosen.training.max_steps, chosen.training.batch_size) == (7, 3)
    assert not [line for line in choices(given, chosen) if line.startswith(("model.d_model", "training.max"))]
