"""Environment variables that `torchrun` sets for launched processes."""

import os
import sys
from typing import NoReturn

from triptych.errors import ElsewhereError

# Prefixes of the variables' names.
_SAID = (
    *(
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "ROLE_RANK",
    ),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_"),
)


def num_launched() -> int:
    """Return the number of launched processes; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def num_on_machine() -> int:
    """Return the number of launched processes on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_launched()))


def place_on_machine() -> int:
    """Return the index of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def environment_alone() -> dict[str, str]:
    """Return the environment without the launcher's variables, for an independent process."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(_SAID)
    }


def num_restarts() -> int:
    """Return the number of restarts by `torchrun --max-restarts`."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def speaks(error: BaseException | None = None) -> bool:
    """Return True if this process reports to the user.

    The first process reports. Errors other than `ElsewhereError` are also reported by the first process of
    every machine.
    """
    if num_launched() == 1 or os.environ["RANK"] == "0":
        return True
    own = error is not None and not isinstance(error, ElsewhereError)
    return own and os.environ.get("LOCAL_RANK") == "0"


def end_now(code: int) -> NoReturn:
    """Flush the output and end this process without the interpreter's clean-up.

    With several processes, the clean-up was observed to abort ("terminate called without an active
    exception"), which a launcher reports as a failure of the run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
