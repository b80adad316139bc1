"""The type of the fixture that calls the command."""

from collections.abc import Callable
from typing import NamedTuple


class Answer(NamedTuple):
    """What a command gave."""

    code: int
    out: str
    err: str


Command = Callable[..., Answer]
