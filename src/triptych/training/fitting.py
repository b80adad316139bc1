"""What a recipe leaves out, chosen for its text and its machine.

A key that is given always wins. What is chosen here is printed before training and stored in the run's
`recipe.toml`, so a resumed run does not choose again. Chosen are the size of the vocabulary, the preset of
the model, how long it is trained and in which batches, the warm-up (a tenth of the steps) and how often it
is validated. A recipe that gives `warmup_steps` keeps the paper's schedule.

The figures come from the recipes that come along: about seven passes over 29,000 pairs, four over 160,000.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triptych.models import PRESETS
from triptych.training.recipe import Recipe

_MOST_WARMUP_STEPS = 4000  # the paper's, of its 100,000 steps
_WARMUP_SHARE = 10
# Passes over a text of so many target tokens; a text n times as long gets √n times fewer.
_PASSES, _OF_TOKENS = 10.0, 400_000
_FEWEST_PASSES, _MOST_PASSES = 3.0, 40.0
_FEWEST_STEPS, _USUAL_STEPS = 300, 1500
_SMALLEST_BATCH = 512


@dataclass(frozen=True)
class _Limits:
    """What a machine is good for.

    Attributes:
        presets: of the model, each with the least target tokens of a text that it is for, largest first.
        vocab_size: of a vocabulary.
        batch_tokens: of a batch.
        total_tokens: target tokens of a whole run.
    """

    presets: tuple[tuple[int, str], ...]
    vocab_size: int
    batch_tokens: int
    total_tokens: float


_CPU = _Limits(((300_000, "small"), (0, "tiny")), 16_000, 4096, 4e7)
_GPU = _Limits(((5_000_000, "base"), (300_000, "small"), (0, "tiny")), 37_000, 16_384, 2.5e9)


def fit_tokenizer(recipe: Recipe, num_chars: int, device: str) -> Recipe:
    """Choose the size of the vocabulary.

    Args:
        recipe: as read.
        num_chars: of the training text, both sides together.
        device: "cpu" or "cuda".

    Returns:
        The recipe with `tokenizer.vocab_size`: about 3 √num_chars of the text of one vocabulary.
    """
    chars = num_chars if recipe.tokenizer.joint else num_chars / 2
    most = _limits(device).vocab_size
    size = round(min(max(3 * math.sqrt(chars), 500), most) / 100) * 100
    return recipe.filled({"tokenizer": {"vocab_size": size}})


def fit_training(
    recipe: Recipe, num_tokens: int, device: str, steps_per_epoch: Callable[[Recipe], int]
) -> Recipe:
    """Choose model and schedule.

    Args:
        recipe: with its tokenizer.
        num_tokens: target tokens of the training text, ends of sentence included.
        device: "cpu" or "cuda".
        steps_per_epoch: updates of one pass with the `training.batch_tokens` of a recipe.

    Returns:
        The recipe with every choice in it.
    """
    limits = _limits(device)
    preset = next(name for least, name in limits.presets if num_tokens >= least)
    model = {**PRESETS[preset].model_dump(exclude_none=True), "norm": "pre"}
    passes = min(max(_PASSES * math.sqrt(_OF_TOKENS / num_tokens), _FEWEST_PASSES), _MOST_PASSES)
    total = min(passes * num_tokens, limits.total_tokens)
    batch = min(max(2 ** int(math.log2(max(total / _USUAL_STEPS, 1))), _SMALLEST_BATCH), limits.batch_tokens)
    batch = max(batch, recipe.data.max_sentence_tokens + 1)  # a batch holds its longest sentence
    recipe = recipe.filled({"model": model, "training": {"batch_tokens": batch}})
    of_epoch, most_epochs = steps_per_epoch(recipe), recipe.training.max_epochs
    steps = max(math.ceil(of_epoch * total / num_tokens / 10) * 10, _FEWEST_STEPS)
    steps = steps if most_epochs is None else most_epochs * of_epoch
    recipe = recipe.filled({"training": {"max_steps": steps}})
    steps = recipe.training.max_steps if most_epochs is None else min(recipe.training.max_steps, steps)
    if "warmup_steps" not in recipe.training.model_fields_set:
        recipe = recipe.filled({"training": _schedule(steps, recipe.model.d_model)})
    return recipe.filled({"validation": {"every_steps": min(max(steps // 10, 1), 1000)}})


def _schedule(steps: int, d_model: int) -> dict[str, Any]:
    warmup = min(max(steps // _WARMUP_SHARE, 1), _MOST_WARMUP_STEPS)
    # The paper's peak is for its long warm-up; after a short one it would be too high.
    peak = min((d_model * warmup) ** -0.5, 0.002 * math.sqrt(128 / d_model))
    return {
        "warmup_steps": warmup,
        "learning_rate": float(f"{peak:.2g}"),
        "schedule": "linear",
        "clip_norm": 1.0,
    }


def choices(before: Recipe, after: Recipe) -> list[str]:
    """What was chosen, as `section.key = value`; of the model the sizes alone."""
    told = {
        "tokenizer": ("vocab_size",),
        "model": ("d_model", "d_ff", "num_heads", "norm"),
        "training": (
            *("max_steps", "batch_tokens", "warmup_steps", "learning_rate", "schedule", "clip_norm"),
        ),
        "validation": ("every_steps",),
    }
    found = []
    for section, keys in told.items():
        given = getattr(before, section).model_fields_set
        chosen = getattr(after, section)
        found += [
            f"{section}.{key} = {getattr(chosen, key)}"
            for key in keys
            if key not in given and key in chosen.model_fields_set
        ]
    layers = [f"model.{side}.num_layers = {getattr(after.model, side).num_layers}"
              for side in ("encoder", "decoder")
              if "num_layers" not in getattr(before.model, side).model_fields_set]  # fmt: skip
    return [*found, *layers]


def _limits(device: str) -> _Limits:
    return _CPU if device == "cpu" else _GPU
