"""What becomes of memory that is freed."""

import os
import platform
import subprocess
import sys

import pytest

from triptych.cli.process import keep_freed_memory

ON_GLIBC = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="these are settings of glibc's malloc"
)

# Half a gigabyte in large blocks, as an update takes and frees them; prints what stays with the process.
_TAKE_AND_FREE = """
import os
from pathlib import Path
import numpy as np
from triptych.cli.process import keep_freed_memory

def resident_mb():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20

keep_freed_memory()
before = resident_mb()
blocks = [np.ones(40 << 20, dtype=np.uint8) for _ in range(12)]
del blocks
print(resident_mb() - before)
"""


def kept_mb(**environment: str) -> int:
    given = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    given.pop("GLIBC_TUNABLES", None)
    found = subprocess.run(
        [sys.executable, "-c", _TAKE_AND_FREE],
        env={**given, **environment},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    return int(found.stdout)


@ON_GLIBC
def test_freed_memory_stays_with_the_process() -> None:
    assert kept_mb() > 400


@ON_GLIBC
@pytest.mark.parametrize(
    "setting",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        {"MALLOC_ARENA_MAX": "4"},
        {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_what_the_environment_says_of_malloc_is_left_alone(setting: dict[str, str]) -> None:
    assert kept_mb(**setting) < 100


@pytest.mark.parametrize(
    ("library", "environment"),
    [("", {}), ("glibc", {"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}), ("glibc", {"MALLOC_CONF": "x"})],
)
def test_other_libraries_and_allocators_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, library: str, environment: dict[str, str]
) -> None:
    called: list[object] = []
    monkeypatch.setattr(platform, "libc_ver", lambda: (library, ""))
    monkeypatch.setattr("triptych.cli.process.ctypes.CDLL", called.append)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    keep_freed_memory()
    assert not called


def test_the_setting_is_made_where_nothing_speaks_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []

    class Library:
        def mallopt(self, option: int, value: int) -> int:
            made.append((option, value))
            return 1

    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("glibc", "2.36"))
    monkeypatch.setattr("triptych.cli.process.ctypes.CDLL", lambda name: Library())
    keep_freed_memory()
    assert dict(made) == {-3: 2**30, -1: 2**31 - 1}
