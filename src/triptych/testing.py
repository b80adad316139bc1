"""Tests of models: `assert_same_function` for pytest and for any other runner.

The fixture `same_function` of the plugin for pytest (`pytest_plugin.py`) is this function.
"""

from pathlib import Path

from triptych.literals import Requirement
from triptych.two_models import diff


def assert_same_function(
    a: object,
    b: object,
    *,
    require: Requirement = "function",
    text: str | Path | None = None,
    within: float | None = None,
) -> None:
    """Assert that two models compute the same function for every input.

    The message of a failure has the verdict, the first differing part, and the kind of change.

    Args:
        a: a `Model`, or whatever `triptych.load` takes.
        b: the other model.
        require: "numbers" (equal weights), "function" or "near".
        text: text file for the KL divergence, with "near".
        within: largest mean KL divergence on the text in nats, with "near".

    Raises:
        AssertionError: the models are further apart than required.
        UsageError: a model is missing, or `within` is given without a text.
        DataError: a model cannot be read.
    """
    found = diff(a, b, text=text)
    if why := found.why_not(require, within):
        raise AssertionError(f"{why}\n{found!r}")
