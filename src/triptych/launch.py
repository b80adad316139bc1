"""What `torchrun` says in the environment of the processes that it starts."""

import os
import sys
from typing import NoReturn

from triptych.errors import ElsewhereError

# Beginnings of the names of its variables.
_SAID = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK"),
    *("ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_"),
)


def num_launched() -> int:
    """How many processes a launcher has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def num_on_machine() -> int:
    """How many of them are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", num_launched()))


def place_on_machine() -> int:
    """The number of this process on its machine, from 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def environment_alone() -> dict[str, str]:
    """The environment for a process that is not one of the launched ones."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_SAID)}


def num_restarts() -> int:
    """How often `torchrun --max-restarts` has started these processes anew."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def speaks(error: BaseException | None = None) -> bool:
    """Whether this process tells the user: the first; of an error of its own, the first of each machine."""
    if num_launched() == 1 or os.environ["RANK"] == "0":
        return True
    own = error is not None and not isinstance(error, ElsewhereError)
    return own and os.environ.get("LOCAL_RANK") == "0"


def end_now(code: int) -> NoReturn:
    """End this process, everything printed, without the interpreter's own clean-up.

    A process of several has been seen to abort in that clean-up ("terminate called without an active
    exception"), which a launcher takes for a failure of the run.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
