"""Libraries that come with an extra of the package."""

import importlib.util

from triptych.errors import UsageError


def is_installed(library: str) -> bool:
    """Whether a library is there, by the name of its module; it is not imported."""
    try:
        return importlib.util.find_spec(library) is not None
    except ModuleNotFoundError:  # of a module inside a library
        return False


def require_extra(extra: str, *libraries: str, what: str) -> None:
    """Check that libraries are installed; what follows may import them."""
    if missing := [library for library in libraries if not is_installed(library)]:
        raise UsageError(f"{what} needs {' and '.join(missing)}: pip install 'triptych[{extra}]'")
