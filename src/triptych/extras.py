"""Libraries that come with an extra of the package."""

from importlib.util import find_spec

from triptych.errors import UsageError


def require_extra(extra: str, *libraries: str, what: str) -> None:
    """Check that libraries are installed; what follows may import them.

    Args:
        extra: of the package, which brings them.
        libraries: by the names of their modules.
        what: what needs them, the subject of the message.

    Raises:
        UsageError: one of them is not there; the message says what to install.
    """
    for library in libraries:
        if find_spec(library) is None:
            raise UsageError(f"{what} needs {library}: pip install 'triptych[{extra}]'")
