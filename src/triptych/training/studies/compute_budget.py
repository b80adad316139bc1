"""Cost of a recipe, counted without training, and the search for a width of equal cost."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch.utils.flop_counter import FlopCounterMode

from triptych.core.algebra.cost import cached_numbers
from triptych.core.attention import shapes_only
from triptych.core.models import EncoderDecoder, LanguageModel, blocks_of
from triptych.errors import UsageError
from triptych.training.recipe import AnyRecipe, value_at, with_values
from triptych.training.task_table import task_of

Quantity = Literal["parameters", "flops", "cache"]

# Length of the sequences for counting operations; for translation, of source and target.
_LENGTH = 32
_LARGEST_WIDTH = 1 << 20
# Largest distance between neighbouring valid values: every head needs an even width.
_FARTHEST = 130


@final
@dataclass(frozen=True)
class VocabularySizes:
    """Sizes of the vocabularies; source and target are equal for a language model."""

    source: int
    target: int


@final
@dataclass(frozen=True)
class Solved:
    """Recipe adjusted to a budget."""

    recipe: AnyRecipe  # recipe with the adjusted key
    key: str | None  # adjusted key; None for an unchanged recipe
    value: int | None  # value of the key
    amount: float  # resulting amount of the held quantity
    missed: float  # `amount` over the budget, minus 1

    def describe(self, what: str) -> str:
        """Format the key, its value, the amount and its deviation from the budget."""
        chosen = "" if self.key is None else f"{self.key} = {self.value:,}: "
        return f"{chosen}{in_words(what, self.amount)} ({self.missed:+.2%})"


def amount(recipe: AnyRecipe, vocabulary: VocabularySizes, what: Quantity) -> float:
    """Count the parameters or the cache bytes of a recipe's model, or the FLOPs of its training."""
    with shapes_only():
        model = task_of(recipe).make_model(vocabulary.source, vocabulary.target)
    if what == "parameters":
        return float(sum(parameter.numel() for parameter in model.parameters()))
    if what == "cache":
        return float(cache_bytes(model))
    return 3.0 * _forward_flops(model) * _tokens(recipe)


def training_flops(recipe: AnyRecipe, vocabulary: VocabularySizes) -> float | None:
    """Count the training operations of matrix products per target token; None for a checkpoint's model."""
    if task_of(recipe).from_checkpoint:
        return None
    return amount(recipe, vocabulary, "flops") / _tokens(recipe)


def cache_bytes(model: EncoderDecoder | LanguageModel) -> int:
    """Count the bytes cached per token in float32, over all self-attention layers of the decoder."""
    *_, stack = model.stacks
    layers = (block.self_attention for block in blocks_of(model, stack))
    return sum(4 * cached_numbers(layer.weights()) for layer in layers)


def _forward_flops(model: EncoderDecoder | LanguageModel) -> float:
    """Count the operations of matrix products of one forward pass, per target token."""
    ids = torch.zeros(1, _LENGTH, dtype=torch.long, device="meta")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        if isinstance(model, EncoderDecoder):
            model(ids, ids)
        else:
            model(ids)
    return float(counter.get_total_flops()) / _LENGTH


def _tokens(recipe: AnyRecipe) -> int:
    training = recipe.training
    return (
        training.max_steps
        * training.accumulate_batches
        * task_of(recipe).tokens_of_batch
    )


def solve(
    recipe: AnyRecipe,
    key: str,
    budget: float,
    measure: Callable[[AnyRecipe], float],
    tolerance: float,
) -> Solved:
    """Return the recipe with the integer value of a key closest to a budget.

    Raises `UsageError` if the key is not an integer, every value is invalid, or the closest value misses the
    budget by more than `tolerance`.
    """
    found = value_at(recipe, key)
    if isinstance(found, bool) or not isinstance(found, int | None):
        raise UsageError(
            f"budget.free {key}: it is {found!r}: a whole number is needed"
        )
    measured: dict[int, float | None] = {}

    def of(value: int) -> float | None:
        if value not in measured:
            try:
                measured[value] = measure(with_values(recipe, {key: value}))
            except UsageError:
                measured[value] = None  # a width may not fit the number of heads
        return measured[value]

    low, high = _bracket(of, budget)
    while high - low > 1:
        middle = (low + high) // 2
        here = _near(of, middle, low, high)
        if here is None:
            break
        if of(here) <= budget:  # type: ignore[operator]
            low = here
        else:
            high = here
    valid = {value: had for value, had in measured.items() if had is not None}
    if not valid:
        raise UsageError(f"budget.free {key}: no whole number of it makes a recipe")
    best = min(valid, key=lambda value: (abs(valid[value] - budget), value))
    missed = valid[best] / budget - 1
    if abs(missed) > tolerance:
        raise UsageError(
            f"the budget of {budget:,.0f} cannot be met by {key}: the closest is {best:,} with "
            f"{valid[best]:,.0f} ({missed:+.1%}); choose another key, or raise budget.tolerance"
        )
    return Solved(with_values(recipe, {key: best}), key, best, valid[best], missed)


def _bracket(of: Callable[[int], float | None], budget: float) -> tuple[int, int]:
    """Return two values around the budget: at most the budget (or 0), and above it if such a value exists."""
    low = 0
    high = 1
    while high < _LARGEST_WIDTH:
        valid = _near(of, high, low, 2 * high)
        if valid is not None:
            if of(valid) > budget:  # type: ignore[operator]
                return low, valid
            low = valid
        high *= 2
    return low, high


def _near(
    of: Callable[[int], float | None], middle: int, low: int, high: int
) -> int | None:
    """Return the valid value closest to the middle, strictly between `low` and `high`; None if missing."""
    for away in range(min(high - low, _FARTHEST)):
        for value in dict.fromkeys((middle - away, middle + away)):
            if low < value < high and of(value) is not None:
                return value
    return None


def in_words(what: str, number: float) -> str:
    """Format an amount with its unit."""
    unit = {
        "flops": " FLOPs",
        "cache": " bytes a token",
        "seconds": " s",
        "parameters": " parameters",
    }[what]
    return (
        f"{number:.3g}{unit}"
        if what in ("flops", "seconds")
        else f"{number:,.0f}{unit}"
    )
