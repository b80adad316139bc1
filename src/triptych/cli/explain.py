"""`triptych explain`."""

import re

from rich.markdown import Markdown

from triptych.cli.terminal import Terminal, write_output
from triptych.error_codes import CODES, explain_code
from triptych.errors import UsageError, nearest

_LINK = re.compile(r"\[([^]]*)\]\([^)]*\)")


def explain(error: str | None = None) -> None:
    """Explain the code of an error, or list the codes.

    A failed command prints the code of its error with --verbose. Codes stay the same in later versions.

    Options:
        error: The code of an error.

    Examples:
        triptych explain
        triptych explain refused
    """
    # Without a code, the list of codes is the answer.
    if error is None:
        width = max(map(len, CODES))
        write_output(
            "".join(f"{one:<{width}}  {title}\n" for one, title in CODES.items())
        )
        return
    if error not in CODES:
        near = nearest(error, CODES)
        hint = f"did you mean {near}?" if near else f"codes are {', '.join(CODES)}"
        raise UsageError(f"there is no code {error}: {hint}")
    # Pages that the section links to are not part of the package.
    Terminal().print(Markdown(_LINK.sub(r"\1", explain_code(error))))
