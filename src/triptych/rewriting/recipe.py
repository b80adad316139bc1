"""Recipes of rewriting: which rewrites, in which order."""

from collections.abc import Mapping
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

from triptych.algebra.rewrites.registry import read_rewrite, require_order
from triptych.algebra.rewrites.rewrite import Rewrite
from triptych.errors import UsageError
from triptych.opening import read_whole_text
from triptych.toml import read_toml


@final
class RewriteRecipe(BaseModel):
    """A `rewrite.toml`."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: tuple[Annotated[InstanceOf[Rewrite], BeforeValidator(read_rewrite)], ...] = Field(min_length=1)
    skip_refused: bool = False  # whether a layer that refuses a rewrite is left as it is and recorded
    calibration: Path | None = None  # the text for the rewrites that look at one

    @model_validator(mode="before")
    @classmethod
    def _calls_are_steps(cls, found: Any) -> Any:
        if not isinstance(found, dict) or "do" not in found:
            return found
        if "step" in found:
            raise ValueError("do and [[step]] say the same in two ways: give one of the two")
        return {"step" if name == "do" else name: value for name, value in found.items()}

    def to_toml(self) -> str:
        """The recipe as a file has it."""
        record: dict[str, Any] = {"step": [step.options() for step in self.step]}
        record["skip_refused"] = self.skip_refused
        if self.calibration is not None:
            record["calibration"] = str(self.calibration.absolute())
        return tomli_w.dumps(record)


def read_rewrite_recipe(path: Path) -> RewriteRecipe:
    """Read a recipe from a file."""
    return rewrite_recipe_of(read_toml(path, "recipe"), path.parent, str(path))


def rewrite_recipe_of(record: Mapping[str, Any], folder: Path, origin: str) -> RewriteRecipe:
    """Make a recipe of its keys."""
    try:
        recipe = RewriteRecipe.model_validate(dict(record))
        require_order(recipe.step)
    except UsageError as error:
        raise UsageError(f"{origin}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            what = f"there is no such key: there are do, {', '.join(RewriteRecipe.model_fields)}"
        raise UsageError(f"{origin}: {where}: {what}" if where else f"{origin}: {what}") from None
    if recipe.calibration is not None:
        recipe = recipe.model_copy(update={"calibration": folder / recipe.calibration})
    return recipe


def require_calibration(recipe: RewriteRecipe) -> None:
    """Check that a recipe has a text if a step looks at one, and only then."""
    needing = [step.name for step in recipe.step if step.needs_text]
    if needing and recipe.calibration is None:
        how = "give one with --calibrate, or as calibration of a recipe, or use criterion free"
        raise UsageError(f"{needing[0]} needs a text: {how}")
    if recipe.calibration is not None:
        if not needing:
            raise UsageError(
                "no step uses the calibration text: leave it out, or choose a criterion that uses it"
            )
        read_whole_text(recipe.calibration)
