"""Waiting threads spin only briefly in the command, unless the user decided; the library leaves it alone."""

import os
import re
import subprocess
import sys

import pytest

from triptych.cli.process import limit_spinning

_COMMAND = "import sys; sys.argv = ['triptych', 'cost', '--d-model', '8', '--num-heads', '2']; \
from triptych.cli.main import run; run()"
_LIBRARY = "import triptych; triptych.MultiHeadAttention"


def spin_count(code: str) -> str:
    """How often threads look before they sleep, as the OpenMP runtime of a new process says."""
    decided = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME", "OMP_NUM_THREADS"}
    inherited = {name: value for name, value in os.environ.items() if name not in decided}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**inherited, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\w+)'", done.stderr)
    if found is None:
        pytest.skip("torch's OpenMP runtime is not GNU's, which alone says how long it spins")
    return found[1]


@pytest.mark.slow
def test_waiting_threads_of_the_command_spin_only_briefly() -> None:
    assert spin_count(_COMMAND) == "10000"


@pytest.mark.parametrize("variable", ["GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"])
def test_what_the_user_decided_stands(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "1234")
    before = dict(os.environ)
    limit_spinning()
    assert dict(os.environ) == before


@pytest.mark.slow
def test_the_library_leaves_it_alone() -> None:
    assert spin_count(_LIBRARY) != "10000"
