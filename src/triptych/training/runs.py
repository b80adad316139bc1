"""Training runs: start a run from a recipe (`train`), resume it (`resume`), score its model (`validate`)."""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from triptych.core.models import (
    AnyModel,
    find_device,
    has_fast_bf16,
    read_own_model,
    to_device,
)
from triptych.core.models.initial import DeferredInit
from triptych.core.storage import CERTIFICATE
from triptych.errors import UsageError
from triptych.files import NewFolder, hold_folder, write_json, write_text
from triptych.launch import num_restarts
from triptych.processes import World, code_digests, launched
from triptych.running.opening import RECIPE
from triptych.threads import torch_threads
from triptych.training.card import write_card
from triptych.training.computing import (
    ONE_PROCESS,
    Layout,
    LazyParameters,
    Whole,
    choose_parallel,
)
from triptych.training.folder import SUMMARY, Prepared, holds_run, require_place
from triptych.training.loop import (
    Trainer,
    TrainingResult,
)
from triptych.training.objectives import Objective
from triptych.training.progress import (
    Display,
    LineDisplay,
    LoggedDisplay,
    SilentDisplay,
)
from triptych.training.recipe import (
    AnyRecipe,
    read_recipe,
)
from triptych.training.state import Counters, find_state, own_files, read_counters
from triptych.training.task_table import task_of
from triptych.user_code import use_code

# Settings that a resumed run may change: its end, the distribution over processes, and memory.
_MAY_CHANGE = {
    "training.activation_checkpointing",
    "training.early_stopping",
    "training.max_epochs",
    "training.max_steps",
    "training.parallel",
    "training.shard_size",
    "training.timeout_minutes",
}


@dataclass(frozen=True)
class Summary:
    """Summary of a finished or interrupted run."""

    outcome: TrainingResult
    num_parameters: int  # number of the model's parameters
    padding_waste: float  # share of padding in the training batches
    task: str = "translation"  # `task` of the recipe
    command: str = "translate"  # command for the finished model

    def figures(self) -> dict[str, Any]:
        counters = self.outcome.counters
        return {
            "task": self.task,
            "steps": counters.step,
            "tokens": counters.tokens,
            "seconds": round(counters.seconds, 3),
            "tokens_per_second": round(
                counters.tokens / max(counters.seconds, 1e-9), 1
            ),
            "parameters": self.num_parameters,
            "padding_waste": round(self.padding_waste, 4),
            "chosen": self.outcome.chosen,
            "best_step": counters.best_step,
            "best_by": counters.best_by,
            "best_score": None
            if counters.best_score is None
            else abs(counters.best_score),
            "average_scores": self.outcome.scores,
        }


def train(
    recipe: AnyRecipe | str | Path,
    folder: str | Path,
    display: Display | None = None,
    *,
    force: bool = False,
) -> Summary:
    """Start a run.

    Args:
        recipe: recipe, its file, or the name of a built-in recipe; relative paths in it are relative to the
            current folder.
        folder: run folder, new or empty; made once the input is checked.
        display: progress display; lines on standard error if None.
        force: allow a folder with other files; files with the name of a run's file are replaced.

    Raises:
        TriptychError: The folder is taken, the input is invalid, the loss is not finite, or the disk is full.
    """
    if isinstance(recipe, str | Path):
        recipe = read_recipe(recipe)
    folder = Path(folder)
    shown = display or LineDisplay()
    with (
        launched(recipe.training.device, recipe.training.timeout_minutes) as world,
        ExitStack() as held,
    ):
        if (
            world.size > 1
            and num_restarts()
            and world.on_first(lambda: (folder / RECIPE).exists())
        ):
            # torchrun restarts the processes of a failed run with the same arguments.
            return _go_on(folder, (), shown, world)
        base = Path.cwd()
        prepared: list[Prepared] = []

        def begin() -> None:
            require_place(folder, force=force)
            new = prepare(recipe, base, shown)
            if world.size > 1:
                with _threads_and_seed(new.recipe):
                    _make_folder(
                        folder, new, _without_memory(new)[0].model, held, force=force
                    )
            # Release the tensors of a checkpoint: each process maps the copy in the run folder.
            if world.size == 1 or not new.from_checkpoint:
                prepared.append(new)

        world.on_first(begin, patiently=True)

        own = world.on_all(
            lambda: (
                prepared[0]
                if prepared
                else prepare(
                    read_recipe(folder / RECIPE), base, SilentDisplay(), folder
                )
            )
        )
        shown = _logged(shown, folder, world)
        with _threads_and_seed(own.recipe):
            trainer = _trainer(own, folder, base, world, shown)
            if world.size == 1:
                # Every check precedes the first change on disk.
                _make_folder(folder, own, trainer.model, held, force=force)
            return _run_trainer(own.recipe, trainer, shown)


def resume(
    folder: str | Path,
    overrides: Sequence[str] = (),
    display: Display | None = None,
    *,
    code: str | Path | None = None,
) -> Summary:
    """Resume a run from its last saved state, or from its beginning if it has not saved a state.

    Args:
        folder: run folder.
        overrides: changes of the recipe, `NAME=VALUE`; only `training.max_steps`, `max_epochs`,
            `early_stopping`, `parallel`, `shard_size`, `timeout_minutes` and `activation_checkpointing`.
        display: progress display; lines on standard error if None.
        code: file with the classes in the run's recipe, the same as at its start.

    Raises:
        TriptychError: The folder is not a run, the text changed, or the state is damaged; and all errors of
            `train`.
    """
    folder = Path(folder)
    if code is not None:
        use_code(code)
    # The code comes first: validation of the recipe needs its classes.
    recipe = _recipe_of(folder, overrides)
    with launched(recipe.training.device, recipe.training.timeout_minutes) as world:
        return _go_on(folder, overrides, display or LineDisplay(), world)


def validate(folder: Path) -> dict[str, float]:
    """Return the figures of a run's model on its validation text, measured by the code of training."""
    recipe = read_recipe(folder / RECIPE)
    with _threads_and_seed(recipe):
        prepared = prepare(recipe, Path.cwd(), SilentDisplay(), folder)
        objective = prepared.objective()
        if not prepared.from_checkpoint:
            # A rewritten model may differ in size from the recipe's.
            objective.model = to_device(
                read_own_model(folder), find_device(recipe.training.device)
            )
        computing = Whole(objective, recipe.training.precision)
        computing.set_mode(training=False)
        text = objective.valid
        loss, tokens = computing.judge_all(
            text.collate(indices) for indices in text.plan(0)
        )
        with torch.no_grad():
            return objective.figures(loss / tokens, objective.model)


def _go_on(
    folder: Path, overrides: Sequence[str], display: Display, world: World
) -> Summary:
    display = _logged(display, folder, world)
    with ExitStack() as held:
        # The lock keeps other launches out of the folder.
        world.on_first(lambda: held.enter_context(hold_folder(folder, wait=False)))
        recipe = world.on_all(lambda: _recipe_of(folder, overrides))
        has_state = world.on_first(lambda: find_state(folder / "state") is not None)
        base = world.on_all(
            lambda: (
                Path(read_counters(folder / "state").started_in)
                if has_state
                else Path.cwd()
            )
        )
        prepared = world.on_all(lambda: prepare(recipe, base, display, folder))
        with _threads_and_seed(recipe):
            fresh = prepared if not has_state else replace(prepared, vectors={})
            trainer = _trainer(fresh, folder, base, world, display)
            if has_state:
                trainer.resume()
                display.say(f"resuming {folder} after step {trainer.counters.step:,}")
            if overrides:
                world.on_first(lambda: write_text(folder / RECIPE, recipe.to_toml()))
            return _run_trainer(prepared.recipe, trainer, display)


def _recipe_of(folder: Path, overrides: Sequence[str]) -> AnyRecipe:
    """Read the recipe of a run, and check that the run can be resumed with `overrides`."""
    # `holds_run` comes last: an invalid recipe has the clearer error.
    if not (folder / RECIPE).exists():
        raise UsageError(
            f"{folder} has no run to resume: give a folder with a {RECIPE} that train wrote"
        )
    if (folder / CERTIFICATE).exists():
        raise UsageError(f"{folder} was rewritten: resume the original run instead")
    for override in overrides:
        if override.partition("=")[0].strip() not in _MAY_CHANGE:
            raise UsageError(
                f"--set {override}: a resumed run keeps its recipe; "
                f"only {', '.join(sorted(_MAY_CHANGE))} may change"
            )
    recipe = read_recipe(folder / RECIPE, overrides)
    if not holds_run(folder):
        raise UsageError(
            f"{folder} has no run to resume: its config.json is missing; train again"
        )
    return recipe


def _make_folder(
    folder: Path, prepared: Prepared, model: AnyModel, held: ExitStack, *, force: bool
) -> None:
    """Make the folder of a new run, and lock it until `held` is closed."""

    def fill(place: Path) -> None:
        prepared.begin(model, place)
        # Write the recipe last: a folder with a recipe is a run that `resume` accepts.
        write_text(place / RECIPE, prepared.recipe.to_toml())

    if not folder.exists():
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        made = held.enter_context(NewFolder(folder))
        fill(made.path)
        try:
            made.finish()
        except FileExistsError:
            require_place(folder, force=False)
            raise
        return
    held.enter_context(hold_folder(folder, wait=False))
    # Another process may have made a run here while this process read the text.
    require_place(folder, force=force)
    for path in own_files(folder):
        path.unlink()
    fill(folder)


def _logged(display: Display, folder: Path, world: World) -> Display:
    """Return the display of this process: only the first process prints; several processes write logs."""
    if world.size == 1:
        return display
    shown = display if world.is_first else SilentDisplay()
    return LoggedDisplay(folder / "logs" / f"rank-{world.rank}.log", shown)


def prepare(
    recipe: AnyRecipe, base: Path, display: Display, folder: Path | None = None
) -> Prepared:
    """Read the inputs of a new run, or of the run in `folder`, without writing a file."""
    return task_of(recipe).prepare(base, display, folder)


@contextmanager
def _threads_and_seed(recipe: AnyRecipe) -> Iterator[None]:
    """Set the threads and the seed of the recipe inside the block, and restore them afterwards."""
    device = find_device(recipe.training.device)
    drawn_on = [device] if device.type == "cuda" else []
    with torch_threads(recipe.training.threads), torch.random.fork_rng(drawn_on):
        torch.manual_seed(recipe.seed)
        yield


def _trainer(
    prepared: Prepared, folder: Path, base: Path, world: World, display: Display
) -> Trainer:
    recipe = prepared.recipe
    fingerprints = world.on_all(prepared.fingerprints)
    if world.size > 1:
        digest = hashlib.sha256(recipe.to_toml().encode()).hexdigest()
        world.require_same({**fingerprints, "the recipe": digest, **code_digests()})
    objective, layout = _laid_out(prepared, world, display)
    counters = Counters(fingerprints=fingerprints, started_in=str(base))
    every = recipe.validation.every_steps
    return Trainer(
        recipe.training, every, objective, folder, counters, prepared.publish, layout
    )


def _laid_out(
    prepared: Prepared, world: World, display: Display
) -> tuple[Objective[Any, Any], Layout]:
    """Return the objective and the layout of its model on the processes.

    In shards, the parameters are allocated later: only each process's part gets memory.
    """
    recipe = prepared.recipe
    if world.size == 1:
        return _objective(prepared, display), ONE_PROCESS
    objective, deferred = world.on_all(lambda: _without_memory(prepared))
    kind, why = choose_parallel(recipe.training, objective.model, world)
    display.say(why)
    if kind == "ddp":
        return world.on_all(lambda: _objective(prepared, display)), Layout(world, kind)
    if deferred is None:
        return objective, Layout(world, kind)
    # Initial values by name; pretrained vectors replace values of their tables.
    values = (
        (
            name,
            prepared.vectors[name].into(value) if name in prepared.vectors else value,
        )
        for name, value in deferred.values(objective.model, _seed_by_name(recipe))
    )
    return objective, Layout(
        world, kind, LazyParameters(find_device(recipe.training.device), values)
    )


def _without_memory(
    prepared: Prepared,
) -> tuple[Objective[Any, Any], DeferredInit | None]:
    """Make the objective with a model without initial values, or mapped from the checkpoint's files."""
    if prepared.from_checkpoint:
        return prepared.objective(), None
    with DeferredInit() as deferred:
        return prepared.objective(), deferred


def _objective(prepared: Prepared, display: Display) -> Objective[Any, Any]:
    """Make the objective with the initial values of its model, in memory not shared with a file."""
    objective = prepared.objective()
    by_name = _seed_by_name(prepared.recipe)
    if by_name is not None:
        with DeferredInit() as deferred:
            twin = prepared.objective().model
        with torch.no_grad():
            for name, value in deferred.values(twin, by_name):
                objective.model.get_parameter(name).copy_(value)
        torch.manual_seed(by_name)  # dropout begins with the same random state
    if prepared.from_checkpoint:
        for parameter in objective.model.parameters():
            parameter.data = parameter.data.clone()
    for name, vectors in prepared.vectors.items():
        with torch.no_grad():
            table = objective.model.get_parameter(name)
            table.copy_(vectors.into(table))
        display.say(vectors.describe())
    return objective


def _seed_by_name(recipe: AnyRecipe) -> int | None:
    """Return the seed of initial values by parameter name; None if values are drawn in order, or read."""
    return recipe.seed if recipe.initial_values == "by_name" else None


def _run_trainer(recipe: AnyRecipe, trainer: Trainer, display: Display) -> Summary:
    num_parameters = sum(p.numel() for p in trainer.model.parameters())
    waste = trainer.objective.padding_waste()
    display.say(
        f"model: {num_parameters:,} parameters; padding {waste:.1%} of the batches; "
        f"{torch.get_num_threads()} threads, {recipe.training.precision}, {trainer.device}"
    )
    if recipe.training.precision == "bf16" and not has_fast_bf16(trainer.device.type):
        display.say(
            "this device has no products in bfloat16: training.precision = 'fp32' is faster here"
        )
    if plan := trainer.describe_plan():
        display.say(plan)
    summary = Summary(
        trainer.run(display),
        num_parameters,
        waste,
        recipe.task,
        task_of(recipe).command,
    )
    if summary.outcome.signal_number is None:
        # An interrupted run gets its card and summary once it is resumed and finishes.

        def write() -> None:
            write_card(
                trainer.folder,
                task_of(recipe),
                summary.outcome,
                num_parameters,
                display,
            )
            write_json(trainer.folder / SUMMARY, summary.figures())

        trainer.world.on_first(write)
    return summary
