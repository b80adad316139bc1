"""What `torchrun` says in the environment of the processes that it starts."""

import os
import sys
from typing import NoReturn

from triptych.errors import ElsewhereError


def num_launched() -> int:
    """How many processes a launcher has started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


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
