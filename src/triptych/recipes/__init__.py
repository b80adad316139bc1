"""The recipes that come along, by name."""

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from triptych.errors import UsageError


def names() -> list[str]:
    """The names of the shipped recipes."""
    return sorted(
        entry.name.removesuffix(".toml") for entry in files(__name__).iterdir() if _is_recipe(entry.name)
    )


def about(name: str) -> str:
    """What a shipped recipe is for: its first line."""
    return find(name).read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def find(name: str | Path) -> Path:
    """The file of a recipe: a path that exists, or the name of a shipped one."""
    path = Path(name)
    if path.is_file():
        return path
    if str(name) in names():
        return Path(str(files(__name__) / f"{name}.toml"))
    if path.exists():
        return path  # whoever reads it says what it is
    near = get_close_matches(str(name), names(), n=1)
    known = f"did you mean {near[0]}?" if near else f"give a TOML file, or one of {', '.join(names())}"
    raise UsageError(f"there is no recipe {name}: {known}")


def _is_recipe(name: str) -> bool:
    return name.endswith(".toml")
