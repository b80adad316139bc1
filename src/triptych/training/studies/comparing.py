"""Comparison of a study's variants: make or resume its runs, and collect their results."""

import math
import shutil
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any, final

import torch

from triptych import user_code
from triptych.errors import TriptychError, UsageError
from triptych.extras import require_extra
from triptych.files import hold_folder, write_text
from triptych.processes import World, code_digests
from triptych.rewriting.recipe import RewriteRecipe
from triptych.running.text import (
    MOST_UNKNOWN,
    read_documents,
    require_documents,
)
from triptych.threads import num_cores
from triptych.toml import read_toml
from triptych.training.corpora.corpora import read_parallel
from triptych.training.metrics import read_metrics
from triptych.training.progress import SilentDisplay
from triptych.training.recipe import AnyRecipe, with_values
from triptych.training.studies.compute_budget import (
    Solved,
    VocabularySizes,
    amount,
    solve,
    training_flops,
)
from triptych.training.studies.parallel_runs import ALONE, StudyProgress, run_all
from triptych.training.studies.statistics import too_few
from triptych.training.studies.study import Study, recipes_of, rewrites_of
from triptych.training.studies.study_job import Result, StudyJob, TrainedRun
from triptych.training.task_table import task_of

# Name of the repeated baseline: other initial values and dropout, the same text in the same order.
NOISE = "(baseline again)"
_OTHER_SEED = 1_000_000
# Updates of a timing run for a budget of seconds; the first half warms up.
_TIMED_STEPS = 40

Tell = Callable[[str, StudyProgress], None]
Say = Callable[[str], None]


@final
@dataclass(frozen=True)
class Variant:
    """Variant with every choice except the seed."""

    name: str
    # Recipe with budget and learning rate; of a rewritten variant, the recipe of its trained variant.
    recipe: AnyRecipe
    solved: Solved | None = None  # solution of the budget; None without a budget
    # Validation loss by learning rate of a sweep; NaN if training failed.
    swept: Mapping[float, float] = field(default_factory=dict)
    # Operations of training per target token; None for a checkpoint's model.
    flops: float | None = None


@final
@dataclass(frozen=True)
class Outcome:
    """Results of a study."""

    study: Study
    folder: Path  # folder of the runs
    variants: dict[str, Variant]  # variants by name, in order, with the baseline
    results: dict[
        str, dict[int, Result]
    ]  # results by variant and seed; `NOISE` is the repeated baseline
    failed: dict[str, str]  # error messages by name of the run
    sweep_seconds: float  # training time of the sweep of learning rates

    @property
    def trained(self) -> dict[str, dict[int, Result]]:
        """Results of the trained variants."""
        return {
            name: one
            for name, one in self.results.items()
            if name not in self.study.rewritten
        }

    def values(self, metric: str) -> dict[str, dict[int, float]]:
        """Return a metric by variant and seed, for runs with this metric."""
        found = {
            name: {
                seed: float(one.figures[metric])
                for seed, one in results.items()
                if metric in one.figures
            }
            for name, results in self.results.items()
        }
        return {name: values for name, values in found.items() if values}

    def run_folder(self, variant: str, seed: int) -> Path:
        """Return the run folder of a variant and a seed."""
        return self.folder / "runs" / _run_name(variant, seed)


def compare_study(
    study: Study,
    folder: Path,
    *,
    origin: Path = Path(),
    tell: Tell = lambda stage, progress: None,
    say: Say = lambda line: None,
    world: World = ALONE,
) -> Outcome:
    """Make the missing runs of a study, and collect the results of all runs.

    Args:
        study: study; relative paths of its recipes are relative to the current folder.
        folder: folder for runs and results; a stopped study resumes here.
        origin: base folder of `study.base`.
        tell: called with the stage and its progress.
        say: called with messages about choices.
        world: processes that share the runs. All of them see the folder, and return the same outcome.

    Raises:
        UsageError: The folder belongs to another study, a recipe is not valid, the budget cannot be met, or a
            library is missing.
        StudyStoppedError: A signal stopped the study; the same call resumes it.
    """
    require_extra("studies", "scipy", what="a study")
    if world.size > 1:
        world.require_same({"the study": study.model_dump_json(), **code_digests()})
    base, made = recipes_of(study, origin)
    rewrites = rewrites_of(study, origin)

    def begin() -> tuple[tuple[int, int], dict[str, Any]]:
        if study.test is not None:
            try:
                read_parallel(study.test)
            except TriptychError as error:
                raise UsageError(f"study {study.name}: [test]: {error}") from None
        if study.test_text is not None:
            next(
                require_documents(
                    read_documents(study.test_text), study.test_text.describe()
                )
            )
        vocabulary, filled = _prepared(study, base)
        choices = filled.model_dump(mode="json", exclude_unset=True)
        if "bits_per_byte" in study.metrics:
            for name in _with_other_texts(base, made):
                _prepared(study, made[name].filled(choices), f" of variant {name}")
        return (vocabulary.source, vocabulary.target), choices

    sizes, choices = world.on_first(begin, patiently=True)
    vocabulary = VocabularySizes(*sizes)
    made = {name: recipe.filled(choices) for name, recipe in made.items()}
    variants = _held(
        study, made, vocabulary
    )  # finds most mistakes before a folder is made
    if warning := too_few(len(study.seed_list), len(study.variants) - 1):
        say(warning)
    with ExitStack() as held:
        world.on_first(lambda: _claim(folder, study, held))
        runner = _Runner(study, folder, tell, world)
        trained = [
            replace(one, flops=training_flops(one.recipe, vocabulary))
            for one in _sweep_learning_rates(
                runner, _timed(runner, study, variants), say
            )
        ]
        for one in trained:
            if one.solved is not None:
                say(f"{one.name}: {one.solved.describe(study.budget.hold)}")
        results, failed = _make_runs(runner, trained, rewrites)
    by_name = {one.name: one for one in trained}
    for name in rewrites:
        parent = by_name[study.parent_of(name)]
        by_name[name] = Variant(name, parent.recipe, flops=parent.flops)
    return Outcome(study, folder, by_name, results, failed, runner.sweep_seconds)


def _make_runs(
    runner: "_Runner", trained: Sequence[Variant], rewrites: Mapping[str, RewriteRecipe]
) -> tuple[dict[str, dict[int, Result]], dict[str, str]]:
    """Make all trained and all rewritten runs; returns results by variant and seed, and failures by run."""
    # A run is rewritten only if its training succeeded.
    planned = {
        (name, seed): runner.planned("runs", recipe, name, _run_name(name, seed))
        for name, seed, recipe in _seeded(runner.study, trained)
    }
    found, failed = runner.run("runs", list(planned.values()))
    rewritten = {}
    for (trained_name, seed), run in planned.items():
        if run.name not in found:
            continue
        for name, recipe in rewrites.items():
            if runner.study.parent_of(name) == trained_name:
                rewritten[name, seed] = runner.planned_rewrite(
                    recipe, name, _run_name(name, seed), run
                )
    more, failed_too = runner.run("rewrites", list(rewritten.values()))
    found = found | more
    failed = failed | failed_too
    results: dict[str, dict[int, Result]] = {}
    for (name, seed), run in (planned | rewritten).items():
        if run.name in found:
            results.setdefault(name, {})[seed] = found[run.name]
    return results, failed


def _claim(folder: Path, study: Study, held: ExitStack) -> None:
    """Make the folder of a study, or check an existing folder; lock it until `held` is closed."""
    taken = UsageError(f"{folder} is taken, and holds no study: name another folder")
    if folder.exists() and not folder.is_dir():
        raise taken
    folder.mkdir(parents=True, exist_ok=True)
    held.enter_context(hold_folder(folder, wait=False))
    place = folder / "study.json"
    if place.exists():
        # Finished runs stay valid with other seeds, metrics or workers; other learning rates repeat some.
        kept_free = ("name", "seeds", "metrics", "jobs", "noise")
        free: dict[str, Any] = {
            **dict.fromkeys(kept_free, True),
            "sweep": {"learning_rates"},
        }
        then = Study.model_validate_json(place.read_text(encoding="utf-8"))
        if then.model_dump(exclude=free) != study.model_dump(exclude=free):
            raise UsageError(
                f"{folder} holds another study, or this one before it was changed: name another folder"
            )
    elif any(folder.iterdir()):
        raise taken
    write_text(place, study.model_dump_json(indent=2) + "\n")


def _with_other_texts(base: AnyRecipe, made: Mapping[str, AnyRecipe]) -> list[str]:
    """List one variant for each combination of text and tokenizer other than the base's."""
    keys = {"task", "data", "tokenizer"}
    texts = [base.model_dump(include=keys)]
    found = []
    for name, recipe in made.items():
        text = recipe.model_dump(include=keys)
        if text not in texts:
            texts.append(text)
            found.append(name)
    return found


def _prepared(
    study: Study, recipe: AnyRecipe, of: str = ""
) -> tuple[VocabularySizes, AnyRecipe]:
    """Read the text of a recipe; returns the vocabulary sizes, and the recipe with its missing keys chosen.

    `of` names a variant in the message about undefined bits per byte.
    """
    # Random states are restored: making the model draws values.
    prepared = task_of(recipe).prepare(Path.cwd(), SilentDisplay())
    with torch.random.fork_rng(devices=[]):
        objective = prepared.objective()
    if "bits_per_byte" in study.metrics and objective.bytes_per_token is None:
        raise UsageError(
            f"study {study.name}: metrics: there are no bits per byte{of}, because more than "
            f"{MOST_UNKNOWN:.1%} of the validation text is unknown to the tokenizer (<unk>): take "
            "bits_per_byte out, or give the tokenizer a larger vocab_size"
        )
    stacks = [*objective.model.stacks.values()]
    return VocabularySizes(stacks[0].vocab_size, stacks[-1].vocab_size), prepared.recipe


def _held(
    study: Study, made: Mapping[str, AnyRecipe], vocabulary: VocabularySizes
) -> list[Variant]:
    """Set the free key of each variant to meet the budget; returns the variants."""
    # The baseline defines the budget and stays unchanged.
    budget = study.budget
    what = budget.hold
    if what == "none" or what == "seconds":
        return [Variant(name, recipe) for name, recipe in made.items()]
    target = amount(made[study.baseline_name], vocabulary, what)
    held = []
    for name, recipe in made.items():
        key = budget.free_of.get(name, budget.free)
        if name == study.baseline_name or key is None:
            held.append(Variant(name, recipe, Solved(recipe, None, None, target, 0.0)))
            continue
        try:
            solved = solve(
                recipe,
                key,
                target,
                lambda one: amount(one, vocabulary, what),
                budget.tolerance,
            )
        except UsageError as error:
            raise UsageError(f"variant {name}: {error}") from None
        held.append(Variant(name, solved.recipe, solved))
    return held


def _timed(
    runner: "_Runner", study: Study, variants: Sequence[Variant]
) -> list[Variant]:
    """Set each variant's steps by the baseline's training time if the budget holds seconds."""
    if study.budget.hold != "seconds":
        return list(variants)
    planned = {
        one.name: runner.planned(
            "timing", _seed(with_values(one.recipe, _TIMING), 1), one.name, one.name
        )
        for one in variants
    }
    # Run sequentially: parallel runs slow each other.
    runner.run("timing", list(planned.values()), workers=1, must=True)
    rates = {name: _steps_a_second(one) for name, one in planned.items()}
    baseline = next(one for one in variants if one.name == study.baseline_name).recipe
    seconds = baseline.training.max_steps / rates[study.baseline_name]
    held = []
    for one in variants:
        steps = max(round(seconds * rates[one.name]), 1)
        recipe = with_values(one.recipe, {"training.max_steps": steps})
        took = steps / rates[one.name]
        held.append(
            replace(
                one,
                recipe=recipe,
                solved=Solved(
                    recipe, "training.max_steps", steps, took, took / seconds - 1
                ),
            )
        )
    return held


_TIMING = {
    "training.max_steps": _TIMED_STEPS,
    "training.log_every_steps": 1,
    "validation.every_steps": _TIMED_STEPS,
}


def _steps_a_second(job: StudyJob) -> float:
    """Return the steps a second in the second half of a run, from the median time of a step."""
    records = [
        r
        for r in read_metrics(job.folder / "metrics.jsonl")
        if "tokens_per_second" in r
    ]
    tokens = [
        after - earlier
        for earlier, after in pairwise([0, *(r["tokens"] for r in records)])
    ]
    seconds = [n / r["tokens_per_second"] for n, r in zip(tokens, records, strict=True)]
    return 1 / float(statistics.median(seconds[len(seconds) // 2 :]))


def _sweep_learning_rates(
    runner: "_Runner", variants: Sequence[Variant], say: Say
) -> list[Variant]:
    """Set each variant's learning rate to the rate with the lowest validation loss of the sweep, if any."""
    # A rate with a failed run has a loss of NaN, and is never chosen.
    sweep = runner.study.sweep
    if not sweep.learning_rates:
        return list(variants)
    planned = {}
    for one, rate in product(variants, sweep.learning_rates):
        seeds = range(sweep.seeds)
        planned[one.name, rate] = [
            _of_sweep(runner, one, rate, number) for number in seeds
        ]
    found, _ = runner.run("sweep", list(chain.from_iterable(planned.values())))
    runner.sweep_seconds += sum(result.seconds for result in found.values())
    losses = {
        place: statistics.fmean(
            found[run.name].figures["loss"] if run.name in found else math.nan
            for run in runs
        )
        for place, runs in planned.items()
    }
    return [
        _at_best_rate(one, {r: losses[one.name, r] for r in sweep.learning_rates}, say)
        for one in variants
    ]


def _of_sweep(
    runner: "_Runner", variant: Variant, rate: float, number: int
) -> StudyJob:
    sweep = runner.study.sweep
    steps = max(round(variant.recipe.training.max_steps * sweep.steps_share), 1)
    tried = with_values(
        variant.recipe, {"training.learning_rate": rate, "training.max_steps": steps}
    )
    name = f"{variant.name}-{rate:g}" + (f"-seed-{number + 1}" if number else "")
    return runner.planned(
        "sweep", _seed(tried, sweep.seed + number), variant.name, name
    )


def _at_best_rate(variant: Variant, losses: Mapping[float, float], say: Say) -> Variant:
    finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
    if not finite:
        raise TriptychError(
            f"variant {variant.name}: training failed at every learning rate of the sweep"
        )
    best = min(finite, key=lambda rate: finite[rate])
    at_end = len(losses) > 1 and best in (min(losses), max(losses))
    say(
        f"{variant.name}: learning rate {best:g}"
        + (", at an end of the sweep: widen it" if at_end else "")
    )
    recipe = with_values(variant.recipe, {"training.learning_rate": best})
    return replace(variant, recipe=recipe, swept=losses)


def _seeded(
    study: Study, variants: Sequence[Variant]
) -> Iterator[tuple[str, int, AnyRecipe]]:
    """Yield variant, seed and recipe of every run, seed by seed."""
    for seed in study.seed_list:
        for one in variants:
            yield one.name, seed, _seed(one.recipe, seed)
            if study.noise and one.name == study.baseline_name:
                yield (
                    NOISE,
                    seed,
                    with_values(_seed(one.recipe, seed), {"seed": seed + _OTHER_SEED}),
                )


def _seed(recipe: AnyRecipe, seed: int) -> AnyRecipe:
    return with_values(
        recipe, {"seed": seed, "data_seed": seed, "initial_values": "by_name"}
    )


def _run_name(variant: str, seed: int) -> str:
    return f"{'baseline-again' if variant == NOISE else variant}-seed-{seed}"


@final
class _Runner:
    """Maker of a study's runs, in the folder of their stage."""

    def __init__(self, study: Study, folder: Path, tell: Tell, world: World) -> None:
        self.study = study
        self.folder = folder
        self.tell = tell
        self.world = world
        self.sweep_seconds = 0.0
        self._begun_anew: set[Path] = (
            set()
        )  # folders of runs with a changed learning rate

    def planned(
        self, stage: str, recipe: AnyRecipe, variant: str, name: str
    ) -> StudyJob:
        """Write the recipe of a run; returns its job."""
        threads = self.study.jobs.threads
        steps = recipe.training.max_steps
        # A line of metrics at every validation gives the curves their tokens and seconds.
        log_every = min(recipe.training.log_every_steps, recipe.validation.every_steps)
        recipe = with_values(
            recipe,
            {
                "name": name,
                "training.threads": threads,
                "training.log_every_steps": log_every,
            },
        )
        return self._job(
            self.folder / stage / name, recipe, variant, steps, whole=stage == "runs"
        )

    def planned_rewrite(
        self, recipe: RewriteRecipe, variant: str, name: str, of: StudyJob
    ) -> StudyJob:
        """Write the recipe of a rewrite of the run `of`; returns its job."""
        trained = TrainedRun(folder=of.folder, result=of.result)
        return self._job(
            of.folder.parent / name, recipe, variant, 1, whole=True, rewrite_of=trained
        )

    def _job(
        self,
        folder: Path,
        recipe: AnyRecipe | RewriteRecipe,
        variant: str,
        steps: int,
        *,
        whole: bool,
        rewrite_of: TrainedRun | None = None,
    ) -> StudyJob:
        """Return the job of a run; its recipe and its result lie next to its folder."""
        file, result = (
            folder.parent / f"{folder.name}{ending}"
            for ending in (".toml", ".result.json")
        )

        def keep() -> None:
            file.parent.mkdir(exist_ok=True)
            changed = rewrite_of is not None and rewrite_of.folder in self._begun_anew
            if not isinstance(recipe, RewriteRecipe) and file.exists():
                # `_claim` checked the study: only a learning rate requires a new run.
                before = (
                    read_toml(file, "the recipe")
                    .get("training", {})
                    .get("learning_rate")
                )
                changed = before != recipe.training.learning_rate
            if changed:
                self._begun_anew.add(folder)
                shutil.rmtree(folder, ignore_errors=True)
                result.unlink(missing_ok=True)
            write_text(file, recipe.to_toml())

        self.world.on_first(keep)
        return StudyJob(
            recipe=file,
            rewrite_of=rewrite_of,
            folder=folder,
            result=result,
            variant=variant,
            steps=steps,
            threads=self.study.jobs.threads,
            test=self.study.test if whole else None,
            test_text=self.study.test_text if whole else None,
            test_sentences=self.study.test_sentences,
            heads=whole,
            code=tuple(user_code.paths()),
        )

    def run(
        self,
        stage: str,
        planned: Sequence[StudyJob],
        workers: int | None = None,
        *,
        must: bool = False,
    ) -> tuple[dict[str, Result], dict[str, str]]:
        """Make the runs; returns results and failures by name. With `must`, a failure is an error."""
        most = workers or self.study.jobs.workers or self._room()
        found, failed = run_all(
            planned, self.folder, most, lambda made: self.tell(stage, made), self.world
        )
        if must and failed:
            name, what = next(iter(failed.items()))
            raise TriptychError(f"{stage} of {name} failed: {what}")
        return found, failed

    def _room(self) -> int:
        """Return the number of runs at a time: one per GPU, or as many as the cores allow."""
        if torch.cuda.is_available():
            return torch.cuda.device_count()
        return max(num_cores() // self.study.jobs.threads, 1)
