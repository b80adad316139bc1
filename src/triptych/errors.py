"""The errors a user can put right.

The command prints the message of a `TriptychError` as one line and exits with its code; anything
else is a fault of ours and keeps its traceback.
"""


class TriptychError(Exception):
    """Something the user can put right. The message says what was wrong, where, and what to do."""

    exit_code = 1


class UsageError(TriptychError):
    """The request itself cannot be carried out: a bad option, recipe or file name."""

    exit_code = 2


class DataError(TriptychError):
    """The content of an input file is not what it should be."""


class ConfigurationWarning(UserWarning):
    """A field of a checkpoint's configuration that is set and not followed, as `transformers` does not."""
