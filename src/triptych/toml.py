"""Reading of TOML files written by users."""

import tomllib
from pathlib import Path
from typing import Any

from triptych.errors import UsageError
from triptych.untrusted import LONGEST_TEXT, read_limited


def read_toml(path: Path, what: str, missing: str | None = None) -> dict[str, Any]:
    """Read a TOML file."""
    try:
        return tomllib.loads(read_limited(path, LONGEST_TEXT).decode())
    except FileNotFoundError as error:
        raise UsageError(missing or f"{path}: {error.strerror}") from None
    except (OSError, UnicodeDecodeError) as error:
        reason = "it is a folder; give a file in it" if path.is_dir() else error
        raise UsageError(f"{what} {path} cannot be read: {reason}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{what} {path} is not valid TOML: {error}") from None
    except RecursionError:
        raise UsageError(f"{what} {path} is nested too deeply") from None
