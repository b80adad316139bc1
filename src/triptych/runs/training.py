"""From a recipe to a trained model: `train` starts a run, `resume` goes on with one."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triptych.errors import UsageError
from triptych.files import write_folder, write_text
from triptych.models.device import find_device
from triptych.models.initial import Draws
from triptych.runs.card import write_card
from triptych.runs.continuing import prepare_continued, take_up_continued
from triptych.runs.folder import RECIPE, SUMMARY, holds_run, require_place
from triptych.runs.language import prepare_language, take_up_language
from triptych.runs.preparing import Prepared
from triptych.runs.translation import prepare_translation, take_up_translation
from triptych.storage.copying import CERTIFICATE
from triptych.threads import torch_threads
from triptych.training import (
    AnyRecipe,
    ContinuedRecipe,
    LanguageRecipe,
    Recipe,
    Trainer,
    TrainingResult,
    read_recipe,
)
from triptych.training.plan import describe_plan
from triptych.training.progress import Display, LineDisplay
from triptych.training.state import Counters, own_files, read_counters


@dataclass(frozen=True)
class Summary:
    """A finished or interrupted run.

    Attributes:
        outcome: how it ended.
        num_parameters: of the model.
        padding_waste: share of padding in the training batches.
        task: what was learned, as the recipe has it.
    """

    outcome: TrainingResult
    num_parameters: int
    padding_waste: float
    task: str = "translation"

    def figures(self) -> dict[str, Any]:
        counters = self.outcome.counters
        return {
            "task": self.task,
            "steps": counters.step,
            "tokens": counters.tokens,
            "seconds": round(counters.seconds, 3),
            "tokens_per_second": round(counters.tokens / max(counters.seconds, 1e-9), 1),
            "parameters": self.num_parameters,
            "padding_waste": round(self.padding_waste, 4),
            "chosen": self.outcome.chosen,
            "best_step": counters.best_step,
            "best_by": counters.best_by,
            "best_score": None if counters.best_score is None else abs(counters.best_score),
            "average_scores": self.outcome.scores,
        }


def train(recipe: AnyRecipe, folder: Path, display: Display | None = None, *, force: bool = False) -> Summary:
    """Start a run.

    Args:
        recipe: what to do; relative paths in it are relative to the current folder.
        folder: the run folder, made here once the input is known to be good; new or empty.
        display: shows how it goes; lines on standard error if None.
        force: the folder may hold other files; those with the name of a run's are replaced.

    Raises:
        TriptychError: a folder that is taken, input that is not as it should be, a loss no longer finite, a
            full disk.
    """
    require_place(folder, force=force)
    base, display = Path.cwd(), display or LineDisplay()
    prepared = prepare(recipe, base, display)
    with _threads_and_seed(prepared.recipe):
        trainer = _trainer(prepared, folder, base)

        def fill(place: Path) -> None:
            prepared.begin(trainer.model, place)
            # The recipe comes last: a folder that has one is a run that can be resumed.
            write_text(place / RECIPE, prepared.recipe.to_toml())

        # No run folder is made, and nothing replaced, before all that can be checked has been.
        if folder.exists():
            for path in own_files(folder):
                path.unlink()
            fill(folder)
        else:
            folder.absolute().parent.mkdir(parents=True, exist_ok=True)
            write_folder(folder, fill)
        return _run(prepared.recipe, trainer, display)


def resume(folder: Path, overrides: Sequence[str] = (), display: Display | None = None) -> Summary:
    """Go on with a run from its last saved state, or from its beginning if it has none.

    Args:
        folder: the run folder.
        overrides: only where training ends may change: `training.max_steps`, `training.max_epochs`,
            `training.early_stopping`.
        display: shows how it goes; lines on standard error if None.

    Raises:
        TriptychError: no run there, changed text, a damaged state; and all that `train` raises.
    """
    if not (folder / RECIPE).exists():
        raise UsageError(f"{folder} has no run to resume: there is no {RECIPE}")
    if (folder / CERTIFICATE).exists():
        raise UsageError(f"{folder} was rewritten: resume the original run instead")
    allowed = {"training.max_steps", "training.max_epochs", "training.early_stopping"}
    for override in overrides:
        if override.partition("=")[0].strip() not in allowed:
            raise UsageError(
                f"--set {override}: a resumed run keeps its recipe; "
                f"only {', '.join(sorted(allowed))} may change"
            )
    recipe = read_recipe(folder / RECIPE, overrides)
    display = display or LineDisplay()
    if not holds_run(folder):
        raise UsageError(f"{folder} has no run to resume: there is no config.json of one")
    has_state = (folder / "state" / "last.safetensors").exists()
    base = Path(read_counters(folder / "state").started_in) if has_state else Path.cwd()
    prepared = _taken_up(recipe, folder, base, display)
    with _threads_and_seed(recipe):
        trainer = _trainer(prepared, folder, base)
        if has_state:
            trainer.resume()
            display.say(f"resuming {folder} after step {trainer.counters.step:,}")
        if overrides:
            write_text(folder / RECIPE, recipe.to_toml())
        return _run(prepared.recipe, trainer, display)


def prepare(recipe: AnyRecipe, base: Path, display: Display) -> Prepared:
    """Read what a new run needs, and choose what its recipe leaves out; nothing is written.

    Args:
        recipe: as given.
        base: folder that relative paths of the recipe are relative to.
        display: is told of what is read and chosen.
    """
    match recipe:
        case Recipe():
            return prepare_translation(recipe, base, display)
        case LanguageRecipe():
            return prepare_language(recipe, base, display)
        case ContinuedRecipe():
            return prepare_continued(recipe, base, display)


def _taken_up(recipe: AnyRecipe, folder: Path, base: Path, display: Display) -> Prepared:
    match recipe:
        case Recipe():
            return take_up_translation(recipe, folder, base, display)
        case LanguageRecipe():
            return take_up_language(recipe, folder, base, display)
        case ContinuedRecipe():
            return take_up_continued(recipe, folder, base, display)


@contextmanager
def _threads_and_seed(recipe: AnyRecipe) -> Iterator[None]:
    """Those of the recipe inside the block; afterwards threads and random numbers are as they were."""
    device = find_device(recipe.training.device)
    drawn_on = [device] if device.type == "cuda" else []
    with torch_threads(recipe.training.threads), torch.random.fork_rng(drawn_on):
        torch.manual_seed(recipe.seed)
        yield


def _trainer(prepared: Prepared, folder: Path, base: Path) -> Trainer:
    counters = Counters(fingerprints=prepared.fingerprints(), started_in=str(base))
    recipe = prepared.recipe
    if recipe.initial_values == "by_name" and not isinstance(recipe, ContinuedRecipe):
        with Draws() as draws:
            objective = prepared.objective()
        draws.again_by_name(objective.model, recipe.seed)
        torch.manual_seed(recipe.seed)  # dropout begins alike, too
    else:
        objective = prepared.objective()
    every = recipe.validation.every_steps
    return Trainer(recipe.training, every, objective, folder, counters, prepared.publish)


def _run(recipe: AnyRecipe, trainer: Trainer, display: Display) -> Summary:
    num_parameters = sum(p.numel() for p in trainer.model.parameters())
    waste = trainer.objective.padding_waste()
    display.say(
        f"model: {num_parameters:,} parameters; padding {waste:.1%} of the batches; "
        f"{torch.get_num_threads()} threads, {recipe.training.precision}, {trainer.device}"
    )
    if plan := describe_plan(trainer):
        display.say(plan)
    summary = Summary(trainer.run(display), num_parameters, waste, recipe.task)
    if summary.outcome.signal_number is None:
        write_card(trainer.folder, recipe, summary.outcome, num_parameters, display)
        write_text(trainer.folder / SUMMARY, json.dumps(summary.figures(), indent=2) + "\n")
    return summary
