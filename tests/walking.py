"""Which packages a verb enters, and from where: every call that crosses from one package into another.

`python tests/walking.py` prints the walks of open, train, attend and rewrite on tiny models.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from importlinter.api import read_configuration

from modules import ROOT, SOURCE

# Packages from the highest layer to the lowest one.
LAYERS = [
    {name.strip().removeprefix("triptych.") for name in layer.split("|")}
    for layer in read_configuration(str(ROOT / "pyproject.toml"))["contracts_options"][0]["layers"]
]
PACKAGES = set().union(*LAYERS)


class Entry(NamedTuple):
    """A call from one package into another."""

    caller: str  # "" for a call from outside the library
    package: str

    @property
    def goes_up(self) -> bool:
        """Whether the called package is not below the caller."""
        return bool(self.caller) and layer_of(self.package) <= layer_of(self.caller)

    def __str__(self) -> str:
        return f"{self.caller or 'you'} > {self.package}"


def layer_of(package: str) -> int:
    return next(number for number, layer in enumerate(LAYERS) if package in layer)


def package_of(file: str) -> str | None:
    """Return the package of a file of code; None outside the packages of the library."""
    if not file.startswith(f"{SOURCE}/"):
        return None
    name = Path(file).relative_to(SOURCE).parts[0].removesuffix(".py")
    return name if name in PACKAGES else None


@contextmanager
def walked() -> Iterator[dict[Entry, str]]:
    """Record the entries while a block runs, each with the name of the first function that is called."""
    found: dict[Entry, str] = {}
    stack: list[str | None] = []  # the package of each frame; None for a frame of no package
    imports = 0  # frames of modules that are being imported

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal imports
        is_import = frame.f_code.co_name == "<module>"
        if event == "call":
            package = package_of(frame.f_code.co_filename)
            imports += is_import
            if package is not None and not imports:
                caller = next((one for one in reversed(stack) if one is not None), "")
                if caller != package:
                    found.setdefault(Entry(caller, package), frame.f_code.co_qualname)
            stack.append(package)
        elif event == "return":
            imports -= is_import
            if stack:  # the frames that were open before have no entry
                stack.pop()

    sys.setprofile(watch)
    try:
        yield found
    finally:
        sys.setprofile(None)


def up(entries: Iterable[Entry]) -> set[str]:
    return {str(entry) for entry in entries if entry.goes_up}


def walks(folder: Path) -> Iterator[tuple[str, dict[Entry, str]]]:
    """Yield the entries of every verb, on tiny models."""
    import triptych
    from small_checkpoints import gpt2_that_runs
    from tiny_recipe import tiny_recipe
    from triptych.training import resolve

    checkpoint = gpt2_that_runs(folder / "gpt2", layers=1)
    recipe = resolve(tiny_recipe(20, 5, training={"max_steps": 2}, validation={"every_steps": 2}))

    def open_reader() -> None:
        assert len(triptych.load(checkpoint).layers) == 1

    model = triptych.load(checkpoint)
    verbs: dict[str, Callable[[], object]] = {
        "open": open_reader,
        "train": lambda: triptych.train(recipe, folder / "run"),
        "attend": lambda: model.attend("The cat sat.")[0, 0],
        "rewrite": lambda: model.rewrite("fold"),
    }
    for name, verb in verbs.items():
        with walked() as found:
            verb()
        yield name, found


def main() -> None:
    """Print every entry of every walk with the function that is called first."""
    with tempfile.TemporaryDirectory() as place:
        for name, found in walks(Path(place)):
            print(name)
            for entry, function in found.items():
                print(f"  {entry!s:24} {function}{'   (upwards)' if entry.goes_up else ''}")


if __name__ == "__main__":
    main()
