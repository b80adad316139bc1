"""Recipe, objective, schedule, the loop, and the state it resumes from."""

from triptych.training.consistency import consistent_loss, reference_consistent_loss
from triptych.training.loop import Outcome, Trainer
from triptych.training.objective import Loss, output_loss, reference_loss
from triptych.training.recipe import (
    DataConfig,
    DecodingConfig,
    Recipe,
    TrainingConfig,
    ValidationConfig,
    read_recipe,
    resolve,
)
from triptych.training.schedule import learning_rate

__all__ = [
    "DataConfig",
    "DecodingConfig",
    "Loss",
    "Outcome",
    "Recipe",
    "Trainer",
    "TrainingConfig",
    "ValidationConfig",
    "consistent_loss",
    "learning_rate",
    "output_loss",
    "read_recipe",
    "reference_consistent_loss",
    "reference_loss",
    "resolve",
]
