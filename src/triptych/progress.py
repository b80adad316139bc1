"""How long operations report their progress."""

from collections.abc import Callable

Progress = Callable[[str, int | float, int | float], None]
"""Called with what is being done, how much is done, and how much there is in total."""


def untold(what: str, done: int | float, total: int | float) -> None:
    """Report to nobody."""
