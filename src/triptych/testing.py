"""Tests of models: `assert_same_function` for pytest and for any other runner.

The fixture `same_function` of the plugin for pytest (`pytest_plugin.py`) is this function.
"""

from pathlib import Path

from triptych.literals import Requirement
from triptych.model import diff


def assert_same_function(
    a: object,
    b: object,
    *,
    require: Requirement = "function",
    text: str | Path | None = None,
    within: float | None = None,
) -> None:
    """Assert that two models compute the same function for every input.

    The message of a failure is the verdict, where the models part, and the kind of change.

    Args:
        a: a `Model`, or whatever `triptych.load` takes.
        b: the other model.
        require: "numbers" for equal weights, "function", or "near".
        text: a text file to measure the difference on, for "near".
        within: largest mean KL divergence in nats on the text, for "near".

    Raises:
        AssertionError: the models are further apart than required.
        UsageError: there is no such model, or `within` is given without a text.
        DataError: a model cannot be read.
    """
    found = diff(a, b, text=text)
    if why := found.why_not(require, within):
        raise AssertionError(f"{why}\n{found!r}")
