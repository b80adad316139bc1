"""What a recipe learns, without its text: batches of the recipe's size."""

from dataclasses import dataclass
from typing import Any, final

import numpy as np
import torch
from jaxtyping import Int64

from triptych.errors import UsageError
from triptych.models import EncoderDecoder, LanguageModel
from triptych.text import Batch, EncodedCorpus, LanguageBatch, TokenBatches, TokenSequences
from triptych.training import AnyRecipe, ContinuedRecipe, LanguageRecipe, Recipe
from triptych.training.fitting import (
    choices,
    fit_language_tokenizer,
    fit_language_training,
    fit_tokenizer,
    fit_training,
)
from triptych.training.language import TokensOfText
from triptych.training.objectives import Objective, Translation

# Of what a recipe leaves out, training takes the largest for a text as long as this.
_LONG_TEXT = 10**12
# Tokens of a sentence, its end included. The batches of a translation hold as many tokens whatever it is.
_SENTENCE = 32
_PAD, _BOS, _EOS = 0, 1, 2


def filled(recipe: AnyRecipe) -> tuple[AnyRecipe, list[str]]:
    """The recipe with what training would choose for a long text, and what was chosen."""
    device = "cpu" if recipe.training.device == "cpu" else "cuda"
    match recipe:
        case ContinuedRecipe():
            raise UsageError(
                "plan makes the model of a recipe, and model.checkpoint names one that exists: write its "
                "sizes under [model] in its place"
            )
        case LanguageRecipe():
            of_text = fit_language_tokenizer(recipe, _LONG_TEXT, device)
            whole: AnyRecipe = fit_language_training(of_text, _LONG_TEXT, device)
        case Recipe():

            def steps_per_epoch(recipe: Recipe) -> int:
                return _LONG_TEXT // recipe.training.batch_tokens

            of_pairs = fit_tokenizer(recipe, _LONG_TEXT, device)
            whole = fit_training(of_pairs, _LONG_TEXT, device, steps_per_epoch)
    return whole, choices(recipe, whole)


@final
@dataclass(frozen=True)
class Rows:
    """Rows of a text that is not there."""

    num_rows: int
    context: int
    num_targets_of_row: int
    within_documents: bool

    @property
    def num_target_tokens(self) -> int:
        return self.num_rows * self.num_targets_of_row

    def plan(self, epoch: int) -> list[Int64[np.ndarray, "batch"]]:
        del epoch
        return [np.arange(self.num_rows)]

    def collate(self, indices: Int64[np.ndarray, "batch"]) -> LanguageBatch:
        ids = torch.zeros(len(indices), self.context, dtype=torch.int64)
        starts = torch.zeros_like(ids) if self.within_documents else None
        return LanguageBatch(ids, torch.zeros_like(ids), starts, len(indices) * self.num_targets_of_row)


def batches_of(recipe: AnyRecipe) -> Rows | TokenBatches:
    """Batches of the size that a recipe trains on."""
    if isinstance(recipe, Recipe):
        length = min(_SENTENCE, recipe.training.batch_tokens, recipe.data.max_sentence_tokens + 1)
        num_pairs = max(recipe.training.batch_tokens // length, 1)
        side = TokenSequences.pack([[_EOS] * (length - 1)] * num_pairs)
        corpus = EncodedCorpus(side, side, np.arange(1, num_pairs + 1), "a plan's text")
        ids = {"pad_id": _PAD, "bos_id": _BOS, "eos_id": _EOS}
        return TokenBatches(corpus, max_tokens=recipe.training.batch_tokens, seed=0, shuffle=False, **ids)
    assert isinstance(recipe, LanguageRecipe), "filled() refuses others"
    context = recipe.model.context
    targets = max(round(recipe.masking.share * context), 1) if recipe.kind == "encoder" else context
    return Rows(recipe.training.batch_size, context, targets, recipe.data.within_documents)


def objective_of(recipe: AnyRecipe, num_layers: int | None = None) -> Objective[Any, Any]:
    """What a recipe learns, its model made on the current device or in the current mode."""
    batches = batches_of(recipe)
    if isinstance(recipe, Recipe):
        assert isinstance(batches, TokenBatches)
        size = recipe.tokenizer.vocab_size
        of_pairs = EncoderDecoder.of(recipe.model, size, size, _PAD)
        return Translation(of_pairs, batches, batches, recipe.training, recipe.validation, None)
    assert isinstance(recipe, LanguageRecipe), "filled() refuses others"
    assert isinstance(batches, Rows)
    config = recipe.model
    if num_layers is not None:
        config = config.model_copy(update={"num_layers": num_layers})
    model = LanguageModel.of(config, recipe.kind, recipe.tokenizer.vocab_size)
    return TokensOfText(model, batches, batches, 1.0)


def without_values(batch: LanguageBatch | Batch) -> LanguageBatch | Batch:
    """A batch of the same sizes, made in the current mode."""
    if isinstance(batch, LanguageBatch):
        return LanguageBatch(
            torch.zeros(batch.ids.shape, dtype=batch.ids.dtype),
            torch.zeros(batch.targets.shape, dtype=batch.targets.dtype),
            None if batch.starts is None else torch.zeros(batch.starts.shape, dtype=batch.starts.dtype),
            batch.num_target_tokens,
        )
    src, tgt_in, tgt_out = (
        torch.zeros(side.shape, dtype=side.dtype) for side in (batch.src, batch.tgt_in, batch.tgt_out)
    )
    return Batch(src, tgt_in, tgt_out, batch.line_numbers, batch.num_target_tokens)
