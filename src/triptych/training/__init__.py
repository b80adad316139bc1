"""Recipe, objective, schedule, the loop, and the state it resumes from."""

from triptych.training.loop import Trainer, TrainingResult
from triptych.training.losses import Loss, output_loss, rdrop_loss
from triptych.training.optimizers import learning_rate
from triptych.training.recipe import (
    AnyRecipe,
    ContinuedRecipe,
    LanguageRecipe,
    Recipe,
    TextRecipe,
    read_recipe,
    require_translation,
    resolve,
)
from triptych.training.sections import DataConfig, DecodingConfig, TrainingConfig, ValidationConfig

__all__ = [
    "AnyRecipe",
    "ContinuedRecipe",
    "DataConfig",
    "DecodingConfig",
    "LanguageRecipe",
    "Loss",
    "Recipe",
    "TextRecipe",
    "Trainer",
    "TrainingConfig",
    "TrainingResult",
    "ValidationConfig",
    "learning_rate",
    "output_loss",
    "rdrop_loss",
    "read_recipe",
    "require_translation",
    "resolve",
]
