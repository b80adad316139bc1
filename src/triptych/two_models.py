"""The comparison of two models."""

from pathlib import Path

from triptych.model import Model, load
from triptych.progress import Progress, untold
from triptych.running.opened_source import Opened
from triptych.seeing.difference import Difference, difference


def diff(
    a: object,
    b: object,
    *,
    text: str | Path | None = None,
    also: object = None,
    offline: bool = False,
    progress: Progress = untold,
) -> Difference:
    """Compare two models: the same function with the rewrites that lead from one to the other, or why not.

    Weights alone decide that two models compute the same function. A text only measures how far apart two
    other models are.

    Args:
        a: the first model, A: a `Model`, or whatever `load` takes.
        b: the second model, B.
        text: a text file to measure the difference of the predictions on, if the models are not the same.
        also: a third model C that B may be mixed from: the mean of A and C is then recognised.
        offline: read models of the Hub only from the cache on this machine.
        progress: called with the part, the number of parts done, and their number.

    Raises:
        UsageError: a model is missing, or cannot be run on the text.
        DataError: a model cannot be read.
    """
    one, other, third = (_opened(model, offline=offline) for model in (a, b, also))
    assert one is not None
    assert other is not None
    return difference(one, other, text=text, also=third, progress=progress)


def _opened(model: object, *, offline: bool) -> Opened | None:
    """Return a model as opened so far, or open it."""
    if model is None:
        return None
    return (model if isinstance(model, Model) else load(model, offline=offline))._opened
