"""Training: recipe, objective, schedule, the loop, and the state it resumes from.

A `Recipe` (`recipe.py`, `sections.py`; TOML) is prepared into an `Objective` (`objectives.py`,
`translation.py`, `language.py`): batches and a loss. `loop.py` updates, validates and stops; `state.py` and
`sharded_state.py` keep what resumes to the same bits; `processes.py`, `computing.py` and `distributed.py`
spread it. `runs.py` is the way in, `folder.py` a run's files; `device_plan.py` plans `layouts.py` by
formulas. Start with `runs.py` and `loop.py`.
"""

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
from triptych.training.sections import TrainingConfig, ValidationConfig

__all__ = [
    "AnyRecipe",
    "ContinuedRecipe",
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
