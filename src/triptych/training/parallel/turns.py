"""Numbers of pieces of work, each of which one process takes."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import final


@final
class Turns:
    """Numbers from 0, each of which one process takes: whoever is free takes the next."""

    def __init__(self, add: Callable[[str, int], int], count: int) -> None:
        self._add, self.count = add, count

    def take(self) -> int | None:
        """The next number; None if there is none, or a process has given up."""
        if self._add("given-up", 0):
            return None
        number = self._add("taken", 1) - 1
        return number if number < self.count else None

    def taken(self) -> Iterator[int]:
        """The numbers that this process gets, one after the other."""
        while (number := self.take()) is not None:
            yield number

    def end_one(self) -> None:
        """Tell that the work of a number that was taken has ended."""
        self._add("ended", 1)

    @property
    def are_over(self) -> bool:
        """Whether the work of every number has ended, or a process has given up."""
        return self._add("ended", 0) >= self.count or self._add("given-up", 0) > 0

    @contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """An error inside the block ends the work of all processes after what they are at."""
        try:
            yield
        except BaseException:
            self._add("given-up", 1)
            raise


def counts_of_one_process() -> Callable[[str, int], int]:
    """Counts for `Turns` that no other process shares."""
    counts = Counter[str]()

    def add(name: str, more: int) -> int:
        counts[name] += more
        return counts[name]

    return add
