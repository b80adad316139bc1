"""The comparison of two models, from the cheapest test to the search for rewrites."""

from pathlib import Path

from triptych.progress import Progress, untold
from triptych.rewriting.differences.records import Difference
from triptych.running.opened_source import Opened


def compare(a: Opened, b: Opened, *, text: Path | None = None, progress: Progress = untold) -> Difference:
    """Compare two models: whether they compute one function, and where they part if they do not.

    Only the algebra of their weights decides that functions are the same.

    Args:
        a: the first model, A.
        b: the second model, B.
        text: a text to measure the difference of their predictions on, if they are not the same.
        progress: called with the part, the number of parts done, and their number.

    Raises:
        DataError: a model cannot be read.
        UsageError: the text is empty, or a model cannot be run on it.
    """
    raise NotImplementedError
