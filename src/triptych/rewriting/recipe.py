"""Recipes of rewriting: rewrites in order."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, final

import tomli_w
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    model_validator,
)

from triptych.errors import UsageError
from triptych.rewriting.functions.registry import EXACT, read_rewrite, require_order
from triptych.rewriting.functions.rewrite import Rewrite
from triptych.running.opening import read_whole_text
from triptych.toml import read_toml


@final
class RewriteRecipe(BaseModel):
    """A `rewrite.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: tuple[Annotated[InstanceOf[Rewrite], BeforeValidator(read_rewrite)], ...] = (
        Field(min_length=1)
    )
    skip_refused: bool = False  # record a refusal and leave the layer unchanged
    calibration: Path | None = None  # text for rewrites that use a text

    @model_validator(mode="before")
    @classmethod
    def _calls_are_steps(cls, found: Any) -> Any:
        if not isinstance(found, dict):
            return found
        if "do" in found and "step" in found:
            raise ValueError(
                "do and [[step]] say the same in two ways: give one of the two"
            )
        record = {
            "step" if name == "do" else name: value for name, value in found.items()
        }
        steps = record.get("step")
        if isinstance(steps, list | tuple) and "exact" in steps:
            record |= {"step": _with_exact(steps), "skip_refused": True}
        return record

    def to_toml(self) -> str:
        """Return the recipe as the text of its file."""
        record: dict[str, Any] = {"step": [step.options() for step in self.step]}
        record["skip_refused"] = self.skip_refused
        if self.calibration is not None:
            record["calibration"] = str(self.calibration.absolute())
        return tomli_w.dumps(record)


def _with_exact(steps: Sequence[object]) -> tuple[Rewrite, ...]:
    """Replace "exact" by all exact rewrites, merged with the remaining steps in the required order."""
    others = [read_rewrite(step) for step in steps if step != "exact"]
    names = [step.name for step in EXACT]
    if twice := next((step.name for step in others if step.name in names), None):
        raise UsageError(f"exact does {twice} already: leave one of the two out")
    return tuple(sorted([*EXACT, *others], key=attrgetter("place")))


def to_recipe(
    steps: Sequence[Any],
    calibration: str | Path | None = None,
    *,
    layers: Sequence[int] | None = None,
    skip_refused: bool = False,
) -> RewriteRecipe:
    """Build a recipe from steps, or complete a recipe or recipe file by the given options."""
    # A recipe or its file, completed by options of the call.
    if len(steps) == 1 and isinstance(steps[0], RewriteRecipe | Path):
        recipe = (
            read_rewrite_recipe(steps[0]) if isinstance(steps[0], Path) else steps[0]
        )
        given: dict[str, Any] = {"skip_refused": True} if skip_refused else {}
        given |= {} if calibration is None else {"calibration": Path(calibration)}
        return recipe.model_copy(update=given)
    if not steps:
        raise UsageError('nothing to do: name a rewrite, or "exact" for all exact ones')
    record: dict[str, Any] = {"step": steps, "skip_refused": skip_refused}
    if calibration is not None:
        record["calibration"] = str(calibration)
    recipe = parse_rewrite_recipe(record, Path(), "rewrite")
    if layers is None:
        return recipe
    own = [
        one if one.layers else one.model_copy(update={"layers": tuple(layers)})
        for one in recipe.step
    ]
    return recipe.model_copy(update={"step": tuple(own)})


def read_rewrite_recipe(path: Path) -> RewriteRecipe:
    """Read a recipe from a file."""
    return parse_rewrite_recipe(read_toml(path, "recipe"), path.parent, str(path))


def parse_rewrite_recipe(
    record: Mapping[str, Any], folder: Path, origin: str
) -> RewriteRecipe:
    """Build a recipe from its keys."""
    try:
        recipe = RewriteRecipe.model_validate(dict(record))
        require_order(recipe.step)
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        # Name the available keys instead of pydantic's message.
        if first["type"] == "extra_forbidden":
            what = f"there is no such key: there are do, {', '.join(RewriteRecipe.model_fields)}"
        raise UsageError(
            f"{origin}: {where}: {what}" if where else f"{origin}: {what}"
        ) from None
    if recipe.calibration is not None:
        recipe = recipe.model_copy(update={"calibration": folder / recipe.calibration})
    return recipe


def require_calibration(recipe: RewriteRecipe) -> None:
    """Check that a recipe has a text exactly if a step uses it."""
    needing = [step.name for step in recipe.step if step.needs_text]
    if needing and recipe.calibration is None:
        how = "give one with --calibrate, or as calibration of a recipe, or leave out what looks at it"
        raise UsageError(f"{needing[0]} needs a text: {how}")
    if recipe.calibration is not None:
        if not needing:
            raise UsageError(
                "no step uses the calibration text: leave it out, or choose a step that uses it"
            )
        read_whole_text(recipe.calibration)
