"""Tasks: the answers to every question about a kind of recipe.

A `Task` makes the inputs of a run from a recipe (`prepare`); their objective computes the loss. The other
methods give the model of a recipe, the size of its steps, its validation text, the words of its model card.
The tasks are in `translation.py`, `language.py` and `continuing.py`; `task_table.py`
finds the task of a recipe.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from triptych.core.models import AnyModel
from triptych.training.folder import Prepared
from triptych.training.loop import TrainingResult
from triptych.training.progress import Display
from triptych.training.recipe import Recipe, TextRecipe

RecipeT = TypeVar("RecipeT", bound=Recipe | TextRecipe)


class StepShape(NamedTuple):
    """The batch of a training step and its model, for predictions of the step's cost."""

    length: int  # tokens of a row
    num_rows: int  # rows of a batch, over all devices
    targets_of_row: int  # tokens of a row with a loss
    model: AnyModel  # model without memory; equal blocks are there once
    times: int = 1  # number of repetitions of its blocks in the recipe's model
    passes: int = 1  # passes of each row through the model
    gathers_to_validate: bool = (
        False  # True if a validation runs the whole model in one process
    )


class CardWords(NamedTuple):
    """The parts of a model card that depend on the task."""

    tag: str  # tag of the Hub
    about: str  # beginning of the first sentence
    tokens: str  # counted tokens
    judged: str  # metric and value of the best validation
    use: str  # code block for using the model, with its language
    model: str  # sizes of the model


class Task(ABC, Generic[RecipeT]):
    """A task with its recipe.

    Attributes:
        command: command for the finished model.
        first_keys: keys that a new recipe lists, by their paths.
        batch_key: key of `[training]` with the size of a batch.
        tokens_of_batch: number of tokens of a full batch.
        from_checkpoint: True if the model begins with the weights of a checkpoint.
    """

    command: str
    first_keys: tuple[str, ...]
    batch_key: str
    tokens_of_batch: int
    from_checkpoint = False

    def __init__(self, recipe: RecipeT) -> None:
        self.recipe: RecipeT = recipe

    @abstractmethod
    def prepare(
        self, base: Path, display: Display, folder: Path | None = None
    ) -> Prepared:
        """Read the inputs of a new run, or of the run in `folder`, without writing a file.

        For a new run, missing keys of the recipe are chosen. Relative paths are relative to `base`.
        """

    @abstractmethod
    def fitted_to(self, length: int, device: str) -> RecipeT:
        """Choose missing keys of the recipe for an unread text of `length` characters and tokens."""

    @abstractmethod
    def make_model(self, source_size: int, target_size: int) -> AnyModel:
        """Make the recipe's model for vocabularies of these sizes."""

    @abstractmethod
    def step_shape(self) -> StepShape:
        """Return the shape of a training step; call it within `shapes_only`."""

    @abstractmethod
    def validation_text(self, base: Path) -> tuple[list[str], list[str] | None]:
        """Return the start of the validation text: documents, or all sentences with their translations."""

    @abstractmethod
    def validation_samples(self, base: Path) -> Iterator[tuple[str, str | None]]:
        """Yield the parts of the validation text, with their translations if the task has any."""

    @abstractmethod
    def card(self, outcome: TrainingResult, best: str) -> CardWords:
        """Return the words of the model card; `best` is the value of the best validation."""
