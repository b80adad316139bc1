"""Training: recipe, objective, schedule, the loop, and the state it resumes from.

A `Recipe` (`recipe.py`, `sections.py`; TOML) is prepared into an `Objective` (`objectives.py`,
`translation.py`, `language.py`): batches and a loss. `loop.py` updates, validates and stops; `state.py` and
`sharded_state.py` keep what resumes to the same bits; `computing.py` and `distributed.py` spread it over
processes (`triptych.processes`). `runs.py` is the way in, `folder.py` a run's files; `device_plan.py` plans
`layouts.py` by formulas. `studies/` compares recipes over seeds (`Study`). Start with `runs.py` and
`loop.py`.

Interface: `continuing`, `corpora.generated`, `device_plan`, `distilling`, `folder`, `new`, `progress`,
`runs`, `shortlist`, `studies`, `studies.tables`.
"""

from triptych.training.loop import Trainer as Trainer
from triptych.training.loop import TrainingResult as TrainingResult
from triptych.training.losses import Loss as Loss
from triptych.training.losses import output_loss as output_loss
from triptych.training.losses import rdrop_loss as rdrop_loss
from triptych.training.optimizers import learning_rate as learning_rate
from triptych.training.recipe import AnyRecipe as AnyRecipe
from triptych.training.recipe import ContinuedRecipe as ContinuedRecipe
from triptych.training.recipe import LanguageRecipe as LanguageRecipe
from triptych.training.recipe import Recipe as Recipe
from triptych.training.recipe import TextRecipe as TextRecipe
from triptych.training.recipe import find_recipe as find_recipe
from triptych.training.recipe import read_recipe as read_recipe
from triptych.training.recipe import require_translation as require_translation
from triptych.training.recipe import resolve as resolve
from triptych.training.recipe import shipped_recipes as shipped_recipes
from triptych.training.sections import TrainingConfig as TrainingConfig
from triptych.training.sections import ValidationConfig as ValidationConfig
from triptych.training.task_table import task_of as task_of
