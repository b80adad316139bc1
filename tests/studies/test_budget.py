"""The solver meets its budget, by counts that are checked against models that are built."""

import pytest
import torch

from triptych.core.attention import PARAMETERISATIONS
from triptych.core.models import EncoderDecoder, LanguageModel
from triptych.errors import UsageError
from triptych.training.recipe import AnyRecipe, resolve, with_values
from triptych.training.studies.compute_budget import VocabularySizes, amount, solve

SIZES = VocabularySizes(50, 50)


def language_recipe(**model: object) -> AnyRecipe:
    sizes = {"num_layers": 2, "d_model": 32, "num_heads": 4, "context": 16, "d_ff": 64, **model}
    return resolve(
        {
            "task": "language-model",
            "data": {"train": {"files": ["t"]}},
            "model": sizes,
            "training": {"max_steps": 10, "batch_size": 3},
        }
    )


def translation_recipe() -> AnyRecipe:
    corpus = {"source": "s", "target": "t"}
    return resolve(
        {
            "data": {"train": corpus, "valid": corpus},
            "model": {"preset": "tiny"},
            "training": {"max_steps": 10, "batch_tokens": 100},
        }
    )


@pytest.mark.parametrize("projections", PARAMETERISATIONS)
def test_every_parameterisation_is_brought_to_the_parameters_of_another(projections: str) -> None:
    learned = {"scheme": "learned"}  # which all of them can have
    budget = amount(language_recipe(positions=learned), SIZES, "parameters")
    recipe = language_recipe(positions=learned, attention={"projections": projections})
    solved = solve(recipe, "model.d_ff", budget, lambda one: amount(one, SIZES, "parameters"), 0.01)
    model = LanguageModel.of(solved.recipe.model, "decoder", 50)
    built = sum(parameter.numel() for parameter in model.parameters())
    assert built == solved.amount
    # No other whole number is closer: a step of d_ff is 2 layers × (2 maps of 32 and a bias).
    assert abs(built - budget) <= (2 * (2 * 32 + 1)) / 2


def test_parameters_of_a_translator_are_those_of_its_model() -> None:
    recipe = translation_recipe()
    model = EncoderDecoder.of(recipe.model, 50, 50, 0)
    assert amount(recipe, SIZES, "parameters") == sum(p.numel() for p in model.parameters())


def test_flops_follow_width_and_steps() -> None:
    recipe = language_recipe()
    here = amount(recipe, SIZES, "flops")
    # Matrix products of a token, forward: two layers of q, k, v, o and two maps of the MLP; the head.
    linear = 2 * (2 * (4 * 32 * 32 + 2 * 32 * 64) + 32 * 50)
    tokens = 10 * 3 * 16
    assert here > 3 * linear * tokens
    assert here < 1.3 * 3 * linear * tokens  # scores and weighted sums of 32 positions
    assert amount(with_values(recipe, {"training.max_steps": 20}), SIZES, "flops") == 2 * here


def test_the_cache_is_what_is_kept_of_a_token() -> None:
    # Keys and values of 32 numbers in two layers, of 4 bytes; a quarter of the heads keep a quarter.
    assert amount(language_recipe(), SIZES, "cache") == 2 * 2 * 32 * 4
    grouped = language_recipe(attention={"projections": "grouped", "num_kv_heads": 1})
    assert amount(grouped, SIZES, "cache") == 2 * 2 * 8 * 4
    latent = language_recipe(
        attention={"projections": "latent", "d_latent": 5}, positions={"scheme": "learned"}
    )
    solved = solve(
        latent, "model.attention.d_latent", 2 * 2 * 8 * 4.0, lambda one: amount(one, SIZES, "cache"), 0.01
    )
    assert (solved.value, solved.missed) == (16, 0.0)


def test_widths_that_do_not_go_with_the_heads_are_passed_over() -> None:
    recipe = language_recipe()
    budget = 1.9 * amount(recipe, SIZES, "parameters")
    solved = solve(recipe, "model.d_model", budget, lambda one: amount(one, SIZES, "parameters"), 0.1)
    assert solved.value is not None
    assert solved.value % 8 == 0  # 4 heads of an even width, for rotary pairs


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("model.num_heads", "cannot be met by model.num_heads"),
        ("model.activation", "a whole number is needed"),
        ("modell.d_ff", "no section modell"),
        ("model.no_such_key", "no whole number of it makes a recipe"),
    ],
)
def test_a_budget_that_cannot_be_met_says_so(key: str, message: str) -> None:
    recipe = language_recipe()
    budget = 2 * amount(recipe, SIZES, "parameters")
    with pytest.raises(UsageError, match=message):
        solve(recipe, key, budget, lambda one: amount(one, SIZES, "parameters"), 0.02)


def test_counting_draws_no_random_number() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    amount(language_recipe(), SIZES, "flops")
    assert torch.equal(before, torch.get_rng_state())
