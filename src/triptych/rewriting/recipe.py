"""Recipes of rewriting: which rewrites, in which order."""

from pathlib import Path
from typing import Annotated, Any, final

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
from triptych.toml import read_toml


@final
class RewriteRecipe(BaseModel):
    """A `rewrite.toml`.

    Attributes:
        step: rewrites in the order in which they are done; in a file either tables `[[step]]`, or calls,
            `do = ["truncate(rank=6)"]`.
        skip_refused: whether a layer that refuses a rewrite is left as it is and recorded, not an error.
        calibration: the text for the rewrites that look at one; relative to the recipe's folder.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    step: tuple[Annotated[InstanceOf[Rewrite], BeforeValidator(read_rewrite)], ...] = Field(min_length=1)
    skip_refused: bool = False
    calibration: Path | None = None

    @model_validator(mode="before")
    @classmethod
    def _calls_are_steps(cls, found: Any) -> Any:
        if not isinstance(found, dict) or "do" not in found:
            return found
        if "step" in found:
            raise ValueError("do and [[step]] say the same in two ways: give one of the two")
        return {"step" if name == "do" else name: value for name, value in found.items()}


def read_rewrite_recipe(path: Path) -> RewriteRecipe:
    """Read a recipe from a file.

    Raises:
        UsageError: the file does not exist, is not TOML, or has unknown names.
    """
    record = read_toml(path, "recipe")
    try:
        recipe = RewriteRecipe.model_validate(record)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"{path}: {where}: {what}" if where else f"{path}: {what}") from None
    if recipe.calibration is not None and not recipe.calibration.is_absolute():
        recipe = recipe.model_copy(update={"calibration": path.parent / recipe.calibration})
    require_order(recipe.step)
    return recipe
