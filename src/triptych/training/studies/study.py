"""Studies: a recipe, its variants, a common budget, and the seeds.

A study is TOML:

    name = "sharing"
    base = "shakespeare-char-cpu"       # a recipe: a file, or the name of a built-in recipe
    seeds = 8                           # or a list of seeds
    metrics = ["loss"]                  # the first decides

    [set]                               # changes of the base, for all variants
    training.max_steps = 500

    [budget]
    hold = "parameters"
    free = "model.d_ff"                 # key adjusted to give a variant the baseline's budget

    [variants.factored]                 # the first is the baseline

    [variants.shared]
    model.attention.projections = "shared"

    [variants.cut]                      # not trained: rewrites the runs of another variant
    rewrite_of = "factored"
    rewrite.do = ["truncate(rank=4)"]
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)

from triptych.errors import UsageError, near_path
from triptych.rewriting.recipe import (
    RewriteRecipe,
    parse_rewrite_recipe,
    require_calibration,
)
from triptych.running.text import LanguageCorpusSpec
from triptych.toml import read_toml
from triptych.training.corpora.corpora import CorpusSpec
from triptych.training.recipe import (
    AnyRecipe,
    explain_invalid,
    find_recipe,
    merge,
    resolve,
)

Metric = Literal[
    "loss",
    "bits_per_byte",
    "test_loss",
    "bleu",
    "chrf",
    "exact_match",
    "tokens_per_second",
    "memory",
    "parameters",
    "cache_bytes",
]
# Metrics for which higher is better; for all other metrics, lower is better.
HIGHER_IS_BETTER = {"bleu", "chrf", "exact_match", "tokens_per_second"}
# Metrics of translations of a test text.
OF_TRANSLATIONS = {"bleu", "chrf", "exact_match"}
# Range of possible values of each metric.
POSSIBLE = {
    "loss": (0.0, math.inf),
    "bits_per_byte": (0.0, math.inf),
    "test_loss": (0.0, math.inf),
    "bleu": (0.0, 100.0),
    "chrf": (0.0, 100.0),
    "exact_match": (0.0, 1.0),
}
# Metrics of cost: they do not depend on the seed, or only the machine changes them.
OF_COST = {"tokens_per_second", "memory", "parameters", "cache_bytes"}

# Names of variants are also names of folders.
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
# With fewer seeds an interval is too wide to be useful.
LEAST_SEEDS = 3


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class BudgetConfig(_Section):
    """Budget: a quantity with the same value for all variants."""

    # "parameters" of the model; "flops" of training; "seconds" of training on this machine; "cache", bytes
    # cached per token during decoding; or "none".
    hold: Literal["parameters", "flops", "seconds", "cache", "none"] = "none"
    free: str | None = (
        None  # key of the recipe, an integer, adjusted to meet the budget
    )
    free_of: dict[str, str] = {}  # keys that replace `free`, by variant
    # Largest deviation from the budget, as a share of it; a larger deviation is an error.
    tolerance: float = Field(0.02, gt=0, lt=1)

    @model_validator(mode="after")
    def _something_is_free(self) -> "BudgetConfig":
        if self.hold == "none" and (self.free or self.free_of):
            raise ValueError("free is given, but hold = 'none': say what is held")
        if self.hold == "seconds" and (
            self.free not in (None, "training.max_steps") or self.free_of
        ):
            raise ValueError(
                "hold = 'seconds' adjusts training.max_steps: leave free out"
            )
        if self.hold not in ("none", "seconds") and not self.free:
            raise ValueError(
                f"hold = '{self.hold}' needs free: the key of the recipe that is adjusted"
            )
        return self


class SweepConfig(_Section):
    """Choice of the learning rate of each variant."""

    learning_rates: tuple[
        float, ...
    ] = ()  # rates to try; empty: the recipe's learning rate
    # Share of the steps of a whole run. Below 1 the sweep is cheaper, and prefers higher
    # rates than are best for whole runs.
    steps_share: float = Field(1.0, gt=0, le=1)
    seeds: int = Field(
        1, ge=1
    )  # number of runs per rate; the mean of their losses decides
    # Seed of the first run of a rate; the next run has the next seed. Other runs do not use these seeds.
    seed: int = Field(1_000_003, ge=0, lt=2**62)

    @field_validator("learning_rates")
    @classmethod
    def _are_rates(cls, rates: tuple[float, ...]) -> tuple[float, ...]:
        if any(rate <= 0 for rate in rates) or len(set(rates)) < len(rates):
            raise ValueError("learning rates are positive, each given once")
        return rates


class JobsConfig(_Section):
    """Runs at a time and their threads."""

    threads: int = Field(1, ge=1)  # CPU threads per run
    # Number of runs at a time; None: one per GPU, or as many as the cores allow.
    workers: int | None = Field(None, ge=1)


class Study(_Section):
    """Study, parsed from its file."""

    name: str = Field(pattern=_NAME)  # name; the default folder is `studies/NAME`
    base: str  # recipe: a file, relative to the study's file, or the name of a built-in recipe
    # Number of seeds, counted from 1, or a list of seeds. With eight seeds the exact test can compare up to
    # six variants with a baseline; five seeds are too few for any difference to be significant.
    seeds: int | tuple[int, ...] = 8
    metrics: tuple[Metric, ...] = ("loss",)  # metrics to compare; the first decides
    baseline: str | None = None  # variant to compare with; the first variant if None
    # Also train the baseline with other initial values and dropout on the same text: the noise floor.
    noise: bool = True
    set: dict[str, Any] = {}  # changes of the base, for every variant
    # Changed keys of the recipe, by variant. A rewritten variant has two keys instead: `rewrite_of`, the
    # variant to rewrite, and `rewrite`, the keys of a recipe of `triptych rewrite`. Paths of a calibration
    # text are relative to the study's file.
    variants: dict[str, dict[str, Any]]
    budget: BudgetConfig = BudgetConfig()  # common budget
    sweep: SweepConfig = SweepConfig()  # choice of learning rates
    jobs: JobsConfig = JobsConfig()  # runs at a time
    # Pairs for BLEU, chrF and exact matches, with the keys of a corpus in a recipe.
    test: CorpusSpec | None = None
    test_sentences: int | None = Field(
        None, ge=1
    )  # number of pairs, from the start; all if None
    # Text for `test_loss` of language models, not used for any choice.
    test_text: LanguageCorpusSpec | None = None

    @field_validator("seeds")
    @classmethod
    def _are_enough(cls, seeds: int | tuple[int, ...]) -> int | tuple[int, ...]:
        count = seeds if isinstance(seeds, int) else len(set(seeds))
        if count < LEAST_SEEDS:
            raise ValueError(
                f"{count} seeds are too few for an interval: give {LEAST_SEEDS} or more"
            )
        return seeds

    @model_validator(mode="after")
    def _fits_together(self) -> "Study":
        # Errors of keys valid separately but not together.
        if len(self.variants) < 2:
            raise ValueError("a study compares two variants or more")
        for name in self.variants:
            if not (
                name[:1].isalnum()
                and all(c.isascii() and (c.isalnum() or c in "._-") for c in name)
            ):
                raise ValueError(
                    f"variants.{name}: a variant names a folder: letters, digits, . _ - only"
                )
        _check_rewritten(self.trained, self.rewritten)
        if self.baseline_name not in self.trained:
            what = (
                "is rewritten from another"
                if self.baseline_name in self.variants
                else "there is not"
            )
            known = ", ".join(self.trained)
            raise ValueError(
                f"baseline is {self.baseline_name!r}, which {what}: it is one of {known}"
            )
        if unknown := self.budget.free_of.keys() - self.trained.keys():
            raise ValueError(
                f"budget.free_of names {sorted(unknown)[0]!r}, which is no trained variant"
            )
        if not self.metrics or len(set(self.metrics)) < len(self.metrics):
            raise ValueError("metrics: name one or more, each once")
        if self.metrics[0] in OF_COST:
            raise ValueError(
                f"metrics: {self.metrics[0]} cannot decide: put a figure of quality first"
            )
        if (
            wanted := sorted(OF_TRANSLATIONS & set(self.metrics))
        ) and self.test is None:
            raise ValueError(
                f"metrics: {wanted[0]} needs [test] with source and target, or another corpus"
            )
        if "test_loss" in self.metrics and self.test_text is None:
            raise ValueError(
                "metrics: test_loss needs [test_text] with files, or another corpus of text"
            )
        return self

    @property
    def trained(self) -> dict[str, dict[str, Any]]:
        """Changed keys of the trained variants."""
        return {
            name: keys
            for name, keys in self.variants.items()
            if not _is_rewritten(keys)
        }

    @property
    def rewritten(self) -> dict[str, dict[str, Any]]:
        """Keys of the rewritten variants."""
        return {
            name: keys for name, keys in self.variants.items() if _is_rewritten(keys)
        }

    def parent_of(self, variant: str) -> str:
        """Return the variant from which `variant` is rewritten."""
        return str(self.variants[variant]["rewrite_of"])

    @property
    def seed_list(self) -> tuple[int, ...]:
        """Seeds of the runs."""
        if isinstance(self.seeds, int):
            return tuple(range(1, self.seeds + 1))
        return tuple(dict.fromkeys(self.seeds))

    @property
    def baseline_name(self) -> str:
        return self.baseline or next(iter(self.variants))


def _is_rewritten(keys: Mapping[str, Any]) -> bool:
    return "rewrite_of" in keys or "rewrite" in keys


def _check_rewritten(
    trained: Mapping[str, Any], rewritten: Mapping[str, Mapping[str, Any]]
) -> None:
    """Check that each rewritten variant has only `rewrite_of`, a trained variant, and `rewrite`."""
    for number, (name, keys) in enumerate(rewritten.items()):
        if missing := {"rewrite_of", "rewrite"} - keys.keys():
            raise ValueError(
                f"variants.{name}: {missing.pop()} is missing: give rewrite_of and rewrite"
            )
        if extra := sorted(keys.keys() - {"rewrite_of", "rewrite"}):
            raise ValueError(
                f"variants.{name}: {extra[0]} is a key of training, and a rewrite of trained runs trains "
                "nothing: leave it out"
            )
        if not isinstance(keys["rewrite"], dict):
            raise ValueError(
                f"variants.{name}: rewrite is a table, as in rewrite.do = ['truncate(rank=4)']"
            )
        if keys["rewrite_of"] not in list(trained):
            what = f"variants.{name}: rewrite_of is {keys['rewrite_of']!r}"
            raise ValueError(
                f"{what}, which is none of those trained: {', '.join(trained)}"
            )
        # Each pair of variants is compared once.
        if twin := next(
            (one for one in list(rewritten)[:number] if rewritten[one] == keys), None
        ):
            raise ValueError(
                f"variants {twin} and {name} are equal: leave one of them out"
            )


def read_study(path: Path | str) -> Study:
    """Read a study.

    A study with `like = "OTHER.toml"` inherits the keys of this other study, a file in the same folder.

    Raises:
        UsageError: The file is missing or not TOML, or a key or value is not valid.
    """
    tree = _study_tree(Path(path), ())
    try:
        return Study.model_validate(tree)
    except ValidationError as error:
        raise UsageError(f"study {path}: {explain_invalid(error, Study)}") from None


def _study_tree(path: Path, before: tuple[str, ...]) -> dict[str, Any]:
    """Read the keys of a study, merged with the keys of its `like`."""
    tree = read_toml(path, "study", f"there is no study {path}{near_path(path)}")
    like = tree.pop("like", None)
    if like is None:
        return tree
    if not isinstance(like, str) or Path(like).name != like:
        raise UsageError(
            f"study {path}: like is {like!r}: name the file of a study in the same folder"
        )
    seen = (*before, path.name)
    if like in seen:
        raise UsageError(
            f"study {path}: like leads back to it: {' → '.join((*seen, like))}"
        )
    return merge(_study_tree(path.parent / like, seen), tree)


def recipes_of(study: Study, folder: Path) -> tuple[AnyRecipe, dict[str, AnyRecipe]]:
    """Return the recipes of the base and of every trained variant, before budget, seeds and learning rate."""
    # A file next to the study has priority over a built-in recipe of the same name.
    near = folder / study.base
    path = near if near.is_file() else find_recipe(study.base)
    base = merge(read_toml(path, "recipe"), study.set)
    made = {
        name: resolve(merge(base, changes), origin=f"variant {name}")
        for name, changes in study.trained.items()
    }
    for name, recipe in made.items():
        for other in made:
            if other == name:
                break
            if made[other] == recipe:
                raise UsageError(
                    f"variants {other} and {name} are equal: leave one of them out"
                )
    _check_task(study, made)
    return resolve(base, origin=f"base {study.base}"), made


def rewrites_of(study: Study, folder: Path) -> dict[str, RewriteRecipe]:
    """Return the rewrite recipe of each rewritten variant."""
    found = {}
    for name, keys in study.rewritten.items():
        origin = f"variant {name}: rewrite"
        found[name] = parse_rewrite_recipe(keys["rewrite"], folder, origin)
        try:
            require_calibration(found[name])
        except UsageError as error:
            raise UsageError(f"{origin}: {error}") from None
    return found


def _check_task(study: Study, made: Mapping[str, AnyRecipe]) -> None:
    tasks = {recipe.task for recipe in made.values()}
    if len(tasks) > 1:
        raise UsageError(
            f"study {study.name}: variants of different tasks ({', '.join(sorted(tasks))})"
        )
    (task,) = tasks
    if task != "translation" and (
        found := sorted(OF_TRANSLATIONS & set(study.metrics))
    ):
        raise UsageError(
            f"study {study.name}: metric {found[0]} is of translation, not of a {task}"
        )
    if task != "language-model" and study.test_text is not None:
        raise UsageError(
            f"study {study.name}: test_text is of language models, not of a {task}"
        )
    if task == "masked-language-model" and "cache_bytes" in study.metrics:
        raise UsageError(
            f"study {study.name}: metric cache_bytes: an encoder keeps no cache"
        )
