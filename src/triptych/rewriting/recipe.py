"""Recipes of rewriting: which steps, in which order."""

import tomllib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, final, get_args

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from triptych.errors import UsageError
from triptych.rewriting.steps import (
    DropKeyBias,
    Expand,
    FoldMaps,
    FoldNorm,
    FoldOtherNorms,
    FoldValueBias,
    GaugeFix,
    MergeKVHeads,
    PruneHeads,
    RepeatKVHeads,
    SortHeads,
    Step,
    ToLatent,
)
from triptych.rewriting.truncation import Truncate

AnyStep = Annotated[
    FoldMaps
    | Expand
    | FoldNorm
    | FoldOtherNorms
    | DropKeyBias
    | FoldValueBias
    | PruneHeads
    | MergeKVHeads
    | Truncate
    | GaugeFix
    | SortHeads
    | RepeatKVHeads
    | ToLatent,
    Field(discriminator="rewrite"),
]


STEPS: tuple[type[Step], ...] = get_args(get_args(AnyStep)[0])
_NAMES = tuple(step.model_fields["rewrite"].default for step in STEPS)


# Every exact rewrite that makes nothing larger.
EXACT: tuple[AnyStep, ...] = (
    FoldMaps(),
    FoldNorm(),
    FoldOtherNorms(),
    DropKeyBias(),
    FoldValueBias(),
    PruneHeads(),
    GaugeFix(),
    SortHeads(),
)


@final
class RewriteRecipe(BaseModel):
    """A `rewrite.toml`.

    Attributes:
        step: in the order in which they are done.
        skip_refused: whether a layer that refuses a step is left as it is, and said so; else it is an error.
        calibration: the text for the steps that look at one; relative to the recipe's folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: tuple[AnyStep, ...] = Field(min_length=1)
    skip_refused: bool = False
    calibration: Path | None = None


def read_rewrite_recipe(path: Path) -> RewriteRecipe:
    """A recipe from a file.

    Raises:
        UsageError: it is not there, no TOML, or names what there is not.
    """
    try:
        record = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path}: not TOML: {error}") from None
    try:
        recipe = RewriteRecipe.model_validate(record)
    except ValidationError as error:
        raise UsageError(f"{path}: {_first_problem(error)}") from None
    if recipe.calibration is not None and not recipe.calibration.is_absolute():
        recipe = recipe.model_copy(update={"calibration": path.parent / recipe.calibration})
    require_order(recipe.step)
    return recipe


def validated_step(record: dict[str, object]) -> AnyStep:
    """A step from its record.

    Raises:
        UsageError: it says something that there is not.
    """
    adapter: TypeAdapter[AnyStep] = TypeAdapter(AnyStep)
    try:
        return adapter.validate_python(record)
    except ValidationError as error:
        raise UsageError(_first_problem(error)) from None


def require_order(steps: Sequence[Step]) -> None:
    """Steps that undo or spoil what comes before them are refused.

    Raises:
        UsageError: two steps in the wrong order, with the reason.
    """
    for before, after in pairwise(steps):
        if after.place < before.place:
            reason = _WHY_BEFORE.get(type(after), "what it does would undo that, or be undone by it")
            raise UsageError(f"{after.rewrite} must come before {before.rewrite}: {reason}")


_WHY_BEFORE: dict[type[Step], str] = {
    FoldMaps: "products of maps are folded while they are products",
    Expand: "maps that are shared cannot change for one side only",
    FoldNorm: "a norm's shift becomes biases of the maps, which would be there again",
    FoldOtherNorms: "norms are folded together, while all maps that read them are as they were",
    DropKeyBias: "the biases go before channels and heads are mixed",
    FoldValueBias: "the biases go before channels and heads are mixed",
    PruneHeads: "heads that go should not take part in what is shared out",
    MergeKVHeads: "heads are merged while all their channels are there",
    Truncate: "the basis and the order of heads depend on what is left",
    GaugeFix: "the order of heads is that of what is left",
    SortHeads: "copies of key-value heads come last",
}


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    if first["type"] == "union_tag_invalid":
        return f"there is no rewrite {first['ctx']['tag']}: there are {', '.join(_NAMES)}"
    where = ".".join(str(part) for part in first["loc"] if part not in ("function-after",))
    what = first["msg"].removeprefix("Value error, ")
    return f"{where}: {what}" if where else what
