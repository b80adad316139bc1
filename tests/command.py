"""The type of the fixture that calls the command."""

from collections.abc import Callable
from typing import NamedTuple


class Answer(NamedTuple):
    """What a command gave."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """The lines of standard error, but for the one that names the engine of a translation."""
        return [line for line in self.err.splitlines() if not line.startswith("triptych: engine auto: ")]


Command = Callable[..., Answer]

# What every command says of a model that is not there.
MISSING = "there is no such file or folder, and it is no name on the Hub (owner/name)"
