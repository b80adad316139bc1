"""The task of each kind of recipe."""

from typing import Any

from triptych.training.continuing import ContinuedTask
from triptych.training.language import LanguageTask
from triptych.training.recipe import AnyRecipe, ContinuedRecipe, LanguageRecipe, Recipe
from triptych.training.task import Task
from triptych.training.translation import TranslationTask

TASKS: dict[type[AnyRecipe], type[Task[Any]]] = {
    Recipe: TranslationTask,
    LanguageRecipe: LanguageTask,
    ContinuedRecipe: ContinuedTask,
}


def task_of(recipe: AnyRecipe) -> Task[Any]:
    """Return what the run of a recipe learns."""
    return TASKS[type(recipe)](recipe)
