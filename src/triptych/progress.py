"""Progress reports of long operations."""

from collections.abc import Callable

Progress = Callable[[str, int | float, int | float], None]
"""Callback with a description of the operation, the amount done, and the total amount."""


def untold(what: str, done: int | float, total: int | float) -> None:
    """Ignore a progress report."""
