"""How the threads of a command wait for each other.

OpenMP's threads spin while they wait, so that the next parallel region begins at once. Beside another busy
process a thread that waits spins on the processor that the thread it waits for needs, and training falls to a
twentieth of its speed. Asleep, waiting threads leave the processor to whoever has work.
"""

import os

# What the command sets, read by the OpenMP runtime when torch loads it (`make bench TABLE=busy` measures it).
ASLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
# With any of these in the environment the user has decided.
_DECIDED_BY = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


def let_waiting_threads_sleep() -> None:
    """Set how this process and those it starts wait; must be called before torch is imported.

    It changes the environment of the whole process, so it is for the command alone, never for the library.
    """
    if not any(name in os.environ for name in _DECIDED_BY):
        os.environ.update(ASLEEP)
