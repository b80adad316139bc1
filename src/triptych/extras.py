"""Optional libraries from the extras of the package."""

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from triptych.errors import UsageError


def is_installed(library: str) -> bool:
    """Return True if a module is installed, without importing it."""
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # the parent package is missing
        return False


def require_extra(extra: str, *libraries: str, what: str) -> None:
    """Check that the libraries of an extra are installed."""
    if missing := [library for library in libraries if not is_installed(library)]:
        raise UsageError(
            f"{what} needs {' and '.join(missing)}: pip install 'triptych[{extra}]'"
        )


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence progress bars and irrelevant warnings of `transformers`."""
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    verbosity = logging.get_verbosity()
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()  # type: ignore[no-untyped-call]
