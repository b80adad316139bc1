"""Recipe, objective, schedule, the loop, and the state it resumes from."""

from triptych.training.loop import Trainer, TrainingResult
from triptych.training.losses import Loss, output_loss, reference_loss
from triptych.training.rdrop import rdrop_loss, reference_rdrop_loss
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
from triptych.training.schedule import learning_rate
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
    "reference_loss",
    "reference_rdrop_loss",
    "require_translation",
    "resolve",
]
