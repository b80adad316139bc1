"""Python in several processes, with what torchrun says in the environment of each."""

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

RANKS = Path(__file__).with_name("ranks.py")


def assert_ranks_pass(size: int, *arguments: str) -> None:
    """A check of `ranks.py` passes in so many processes; the output of one that fails is the message."""
    answers = start(size, str(RANKS), *arguments)
    assert [code for code, _ in answers] == [0] * size, "\n".join(said for _, said in answers)


def start(
    size: int, *arguments: str, timeout: float = 600, last: Mapping[str, str] = MappingProxyType({})
) -> list[tuple[int, str]]:
    """Start Python in so many processes as torchrun does; exit code and output of each.

    Args:
        size: number of processes.
        arguments: of Python.
        timeout: in seconds.
        last: what the environment of the last process has besides.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    given |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    processes = [
        subprocess.Popen(
            [sys.executable, *arguments],
            env={
                **os.environ,
                **given,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                **(last if rank == size - 1 else {}),
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(size)
    ]
    try:
        said = [process.communicate(timeout=timeout)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, text) for process, text in zip(processes, said, strict=True)]
