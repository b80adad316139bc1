"""Models to serve, and a server of two of them."""

from collections.abc import Iterator

import pytest

from served import Served
from small_models import checkpoint, language_model, small_run, translator
from triptych.model import Model

__all__ = ["checkpoint", "language_model", "served", "small_run", "translator"]


@pytest.fixture(scope="module")
def served(translator: Model, language_model: Model) -> Iterator[Served]:
    """A server of a translator and a language model, with the usual limits."""
    with Served({"gpt": language_model, "small-en-de": translator}) as running:
        yield running
