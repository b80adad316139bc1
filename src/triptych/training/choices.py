"""Choices for missing keys of a recipe, by its text and its machine.

A key in the recipe always wins. Choices are printed before training and stored in the run's `recipe.toml`, so
that a resumed run does not choose again. They are the size of the vocabulary, the preset of the model, the
number of steps, the batches, the warm-up (a tenth of a translator's steps, a twentieth of a language model's)
and the interval of validations. A recipe of translation with `warmup_steps` keeps the paper's schedule. The
device decides a precision of "auto".

The figures follow the built-in recipes: about seven passes over 29,000 pairs, four over 160,000.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from triptych.core.models import PRESETS, has_fast_bf16
from triptych.training.progress import Display
from triptych.training.recipe import AnyRecipe, ContinuedRecipe, LanguageRecipe, Recipe

_OfWhole = TypeVar("_OfWhole", Recipe, LanguageRecipe)
_OfText = TypeVar("_OfText", LanguageRecipe, ContinuedRecipe)
_OfAny = TypeVar("_OfAny", Recipe, LanguageRecipe, ContinuedRecipe)

_MOST_WARMUP_STEPS = 4000  # the paper's warm-up for 100,000 steps
_WARMUP_SHARE = 10
# Passes over a text of `_OF_TOKENS` target tokens. A text n times as long gets √n times fewer passes.
_PASSES = 10.0
_OF_TOKENS = 400_000
_FEWEST_PASSES = 3.0
_MOST_PASSES = 40.0
_FEWEST_STEPS = 300
_USUAL_STEPS = 1500
_SMALLEST_BATCH = 512


@dataclass(frozen=True)
class _Limits:
    """Limits of sizes for a reasonable training time on a machine."""

    # Least target tokens of a text, and the preset of the model for it; largest first.
    presets: tuple[tuple[int, str], ...]
    vocab_size: int
    batch_tokens: int
    total_tokens: float  # target tokens of a whole run


_CPU = _Limits(((300_000, "small"), (0, "tiny")), 16_000, 4096, 4e7)
_GPU = _Limits(
    ((5_000_000, "base"), (300_000, "small"), (0, "tiny")), 37_000, 16_384, 2.5e9
)

_LANGUAGE_MODELS: dict[str, dict[str, Any]] = {
    "tiny": {"num_layers": 4, "d_model": 128, "num_heads": 4, "context": 64},
    "small": {"num_layers": 6, "d_model": 256, "num_heads": 4, "context": 128},
    "base": {"num_layers": 12, "d_model": 512, "num_heads": 8, "context": 512},
}
# Context of a run from a checkpoint, limited by the model's positions.
_CONTINUED_CONTEXT = {"cpu": 128, "cuda": 512}
# Ratio of learning rates: fresh weights to pretrained weights, of language models and of translators.
_GENTLER = 40
_GENTLER_TRANSLATING = 10
# RMSNorm and SwiGLU without biases, the usual blocks of today's language models.
_BLOCKS = {"norm_kind": "rms", "activation": "swish", "gated": True, "bias": False}


def fit_tokenizer(recipe: _OfWhole, num_chars: int, device: str) -> _OfWhole:
    """Choose the size of the vocabulary: about 3 √n for n characters of training text per vocabulary."""
    size = min(
        max(3 * math.sqrt(num_chars / recipe.num_vocabularies), 500),
        _limits(device).vocab_size,
    )
    return recipe.filled({"tokenizer": {"vocab_size": round(size / 100) * 100}})


def fit_training(
    recipe: Recipe,
    num_tokens: int,
    device: str,
    steps_per_epoch: Callable[[Recipe], int],
    d_model: int | None = None,
) -> Recipe:
    """Choose the model and the schedule of a translator; `d_model` is the width of an existing model."""
    # The number of steps comes last: it depends on the batches.
    recipe = _settled(recipe, device)
    limits = _limits(device)
    if d_model is None:
        preset = next(name for least, name in limits.presets if num_tokens >= least)
        model = {**PRESETS[preset].model_dump(exclude_none=True), "norm": "pre"}
        recipe = recipe.filled({"model": model})
    goes_on = recipe.training.checkpoint is not None
    passes = _FEWEST_PASSES if goes_on else _passes(num_tokens)
    total = min(passes * num_tokens, limits.total_tokens)
    batch = max(
        _batch_tokens(total, limits), recipe.data.max_sentence_tokens + 1
    )  # a batch holds its longest sentence
    recipe = recipe.filled({"training": {"batch_tokens": batch}})
    of_epoch = steps_per_epoch(recipe)
    recipe, steps = _with_steps(recipe, of_epoch * total / num_tokens, of_epoch)
    if "warmup_steps" not in recipe.training.model_fields_set:
        schedule = _schedule(steps, d_model or recipe.model.d_model)
        if goes_on:
            schedule["learning_rate"] = float(
                f"{schedule['learning_rate'] / _GENTLER_TRANSLATING:.2g}"
            )
        recipe = recipe.filled({"training": schedule})
    return recipe.filled({"validation": {"every_steps": _validate_every(steps)}})


def _passes(num_tokens: int) -> float:
    return min(
        max(_PASSES * math.sqrt(_OF_TOKENS / num_tokens), _FEWEST_PASSES), _MOST_PASSES
    )


def _batch_tokens(total: int | float, limits: _Limits) -> int:
    usual: int = 2 ** int(math.log2(max(total / _USUAL_STEPS, 1)))
    return min(max(usual, _SMALLEST_BATCH), limits.batch_tokens)


def _schedule(steps: int, d_model: int) -> dict[str, Any]:
    warmup = min(max(steps // _WARMUP_SHARE, 1), _MOST_WARMUP_STEPS)
    # The paper's peak fits its long warm-up; after a short warm-up it would be too high.
    peak = min((d_model * warmup) ** -0.5, 0.002 * math.sqrt(128 / d_model))
    return {
        "warmup_steps": warmup,
        "learning_rate": float(f"{peak:.2g}"),
        "schedule": "linear",
        "clip_norm": 1.0,
    }


def fit_language_training(
    recipe: LanguageRecipe, num_tokens: int, device: str
) -> LanguageRecipe:
    """Choose the model and the schedule of a language model."""
    limits = _limits(device)
    preset = next(name for least, name in limits.presets if num_tokens >= least)
    recipe = recipe.filled({"model": {**_LANGUAGE_MODELS[preset], **_BLOCKS}})
    total = min(_passes(num_tokens) * num_tokens, limits.total_tokens)
    peak = 0.004 * math.sqrt(128 / recipe.model.d_model)
    return _fit_schedule(recipe, num_tokens, total, peak, device)


def fit_continued_training(
    recipe: ContinuedRecipe,
    num_tokens: int,
    device: str,
    d_model: int,
    max_tokens: int | None,
) -> ContinuedRecipe:
    """Choose the schedule of a run from a checkpoint: three passes at a low learning rate."""
    longest = _CONTINUED_CONTEXT["cpu" if device == "cpu" else "cuda"]
    recipe = recipe.filled(
        {
            "model": {
                "context": longest if max_tokens is None else min(longest, max_tokens)
            }
        }
    )
    total = min(_FEWEST_PASSES * num_tokens, _limits(device).total_tokens)
    peak = 0.004 * math.sqrt(128 / d_model) / _GENTLER
    return _fit_schedule(recipe, num_tokens, total, peak, device)


def _fit_schedule(
    recipe: _OfText, num_tokens: int, total: float, peak: float, device: str
) -> _OfText:
    """Choose batches, steps, warm-up and learning rate for a total number of tokens."""
    recipe, limits, context = (
        _settled(recipe, device),
        _limits(device),
        recipe.model.context,
    )
    recipe = recipe.filled(
        {"training": {"batch_size": max(_batch_tokens(total, limits) // context, 1)}}
    )
    of_update = (
        recipe.training.batch_size * context * recipe.training.accumulate_batches
    )
    recipe, steps = _with_steps(
        recipe, total / of_update, max(math.ceil(num_tokens / of_update), 1)
    )
    schedule = {
        "warmup_steps": min(max(steps // 20, 1), 1000),
        "learning_rate": float(f"{peak:.2g}"),
    }
    return recipe.filled(
        {"training": schedule, "validation": {"every_steps": _validate_every(steps)}}
    )


def _settled(recipe: _OfAny, device: str) -> _OfAny:
    """Replace a precision of "auto" by the device's precision."""
    if recipe.training.precision != "auto":
        return recipe
    precision = "bf16" if has_fast_bf16(device) else "fp32"
    training = recipe.training.model_copy(update={"precision": precision})
    return recipe.model_copy(update={"training": training})


def _with_steps(recipe: _OfAny, usual: float, of_epoch: int) -> tuple[_OfAny, int]:
    """Choose `max_steps`; returns the recipe and the number of steps, limited by `max_epochs`."""
    epochs = recipe.training.max_epochs
    steps = (
        max(math.ceil(usual / 10) * 10, _FEWEST_STEPS)
        if epochs is None
        else epochs * of_epoch
    )
    recipe = recipe.filled({"training": {"max_steps": steps}})
    chosen = recipe.training.max_steps
    return recipe, chosen if epochs is None else min(chosen, steps)


def _validate_every(steps: int) -> int:
    return min(max(steps // 10, 1), 1000)


def say_choices(
    before: AnyRecipe, after: AnyRecipe, text: str, display: Display
) -> None:
    """Print the choices for a text."""
    if chosen := ", ".join(choices(before, after)):
        display.say(f"left out of the recipe, chosen for {text}: {chosen}")


def choices(before: AnyRecipe, after: AnyRecipe) -> list[str]:
    """List the choices as `section.key = value`; of the model only sizes and the position of norms."""
    # A choice is a key set after the choice and missing, or "auto", before.
    found = []
    for path in after.chosen_keys:
        *sections, key = path.split(".")
        given = _section(before, sections)
        chosen = _section(after, sections)
        if given is None or key not in chosen.model_fields_set:
            continue
        if key not in given.model_fields_set or getattr(given, key) == "auto":
            found.append(f"{path} = {getattr(chosen, key)}")
    return found


def _section(recipe: AnyRecipe, path: Sequence[str]) -> Any:
    """Return a section of a recipe by its path; None if this kind of recipe does not have it."""
    found: Any = recipe
    for name in path:
        found = getattr(found, name, None)
    return found


def _limits(device: str) -> _Limits:
    return _CPU if device == "cpu" else _GPU
