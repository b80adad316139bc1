"""The type of the fixture that calls the command."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """What a command gave."""

    code: int
    out: str
    err: str

    @property
    def said(self) -> list[str]:
        """The lines of standard error, but for the one that names the engine of a translation."""
        return [line for line in self.err.splitlines() if not line.startswith("triptych: engine auto: ")]

    def record(self, code: int = 0) -> Any:
        """The JSON that it printed."""
        assert self.code == code, self.err
        return json.loads(self.out)

    def done(self) -> "Answer":
        """Check that it succeeded."""
        assert self.code == 0, self.err
        return self

    def refused(self, *says: str, code: int = 2) -> "Answer":
        """Check that it printed nothing but one line of an error, which says so much."""
        assert self.code == code, self
        assert [one for one in says if one not in self.err] == [], self.err
        assert (self.out, len(self.said)) == ("", 1), self
        return self


Command = Callable[..., Answer]

# What every command says of a model that is not there.
MISSING = "there is no such file or folder, and it is no name on the Hub (owner/name)"
