"""Changes tried one by one: does a test fail?

A parent imports all that tests need. Each trial is a fork of it with the change made, which runs tests until
one fails. Functions get their changed code in place; for a change elsewhere the package is imported anew.
"""

import importlib
import json
import os
import pkgutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from benchmarks.mutation.changes import Change
from benchmarks.mutation.recording import ROOMS, TARGET
from benchmarks.mutation.swapping import Functions

_PACKAGE = "triptych"
_FIRST = 40
Outcome = Literal["noticed", "survived", "not executed"]
HEAVY = (
    *("numpy", "torch", "torch._dynamo", "torch.utils.checkpoint", "safetensors.torch", "tokenizers"),
    *("pydantic", "jaxtyping", "beartype", "hypothesis", "rich.console", "typer", "typer.testing", "altair"),
    *("sacrebleu", "huggingface_hub", "transformers", "transformers.models.auto.modeling_auto"),
)


@dataclass(frozen=True)
class Trial:
    """What became of a change.

    Attributes:
        change: which.
        outcome: "noticed" if a test failed, or none could be run any more, or time ran out.
        by: the test that failed, or what else happened.
        tests: how many were to run.
        seconds: it took.
    """

    change: Change
    outcome: Outcome
    by: str
    tests: int
    seconds: float


def found_before(target: Path, changes: Sequence[Change]) -> list[Trial]:
    """The trials of the same changes that a run made before it was stopped."""
    stored = json.loads(target.read_text(encoding="utf-8")) if target.exists() else []
    for one in stored:
        one["change"] = Change(**one["change"] | {"lines": tuple(one["change"]["lines"])})
    trials = [Trial(**one) for one in stored]
    return trials if [trial.change for trial in trials] == [*changes][: len(trials)] else []


# Path of a source, its text before and after.
Changed = tuple[Path, str, str]


class Bench:
    """A copy of the repository, in which sources may be changed, and this process to fork."""

    def __init__(self, root: Path, log: Path, heavy: Sequence[str] = HEAVY) -> None:
        self._root, self._log = root, log
        self._fit, self._unfit = set[str](), set[str]()
        self._trials = 0
        os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONHASHSEED="0")
        for name in heavy:
            try:
                importlib.import_module(name)
            except ImportError:
                continue
        importlib.import_module("pytest")
        sys.path[:0] = [str(root / "src"), str(root / "tests")]
        self._functions = self._imported()

    def _imported(self) -> Functions:
        """Import the package from the copy, as the tests do."""
        _forget()
        with importlib.import_module("checking").install():
            package = importlib.import_module(_PACKAGE)
            refused = importlib.import_module(f"{_PACKAGE}.errors").UsageError
            for module in pkgutil.walk_packages(package.__path__, f"{_PACKAGE}."):
                if not module.name.endswith("__main__"):
                    with suppress(ImportError, refused):  # what an extra is needed for
                        importlib.import_module(module.name)
        return Functions()

    def try_(self, change: Change, tests: Sequence[str], seconds: float) -> Trial:
        """Run tests on the changed source, those of the first file first.

        Tests that are gone, or fail without the change, do not count.
        """
        began, ran = time.monotonic(), 0
        first = [test for test in tests if _file(test) == _file(tests[0])]
        others = [test for test in tests if _file(test) != _file(tests[0])]
        for stage in (first[:_FIRST], first[_FIRST:] + others):
            by, fit = self._stage(change, stage, seconds)
            ran += fit
            if by:
                return Trial(change, "noticed", by, ran, time.monotonic() - began)
        return Trial(change, "survived" if ran else "not executed", "", ran, time.monotonic() - began)

    def _stage(self, change: Change, tests: Sequence[str], seconds: float) -> tuple[str, int]:
        """What noticed the change, if anything, and how many tests were fit to."""
        while left := [test for test in tests if test not in self._unfit]:
            code = self._changed(change, left, seconds)
            if code is None:
                return "time that ran out", len(left)
            failed = self._failed()
            if code == 0 or not (unfit := self._unfit_among(failed, seconds)):
                return "" if code == 0 else failed[0] if failed else f"exit {code}", len(left)
            self._unfit |= unfit
        return "", 0

    def _unfit_among(self, failed: Sequence[str], seconds: float) -> set[str]:
        """Of tests that failed, those that are gone or fail without a change, too."""
        gone = {test for test in failed if test in self._gone()}
        if gone:
            return gone
        unknown = [test for test in failed if "::" in test and test not in self._fit]
        if not unknown or self._forked(unknown, seconds) == 0:
            self._fit.update(unknown)
            return set()
        return set(unknown)

    def _changed(self, change: Change, tests: Sequence[str], seconds: float) -> int | None:
        """The exit status of tests on the changed source, which is put back."""
        path = self._root / change.file
        source, times = path.read_text(encoding="utf-8"), path.stat()
        path.write_text(change.applied(source), encoding="utf-8")
        # Bytecode is known by size and time of its source: no two may have the same time.
        self._trials += 1
        os.utime(path, (times.st_atime, times.st_mtime + 10 + self._trials))
        try:
            return self._forked(tests, seconds, (path, source, change.applied(source)))
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))

    def _gone(self) -> set[str]:
        """The tests that pytest did not find."""
        said = "ERROR: not found: "
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        return {
            line.removeprefix(said).removeprefix(f"{self._root}/") for line in lines if line.startswith(said)
        }

    def _failed(self) -> list[str]:
        """The tests that failed in the last trial, or were not found."""
        lines = self._log.read_text(encoding="utf-8", errors="replace").splitlines()
        failed = [line.split(" ", 1)[1] for line in lines if line.startswith(("FAILED ", "ERROR tests"))]
        return [name.partition(" - ")[0] for name in failed] + sorted(self._gone())

    def _forked(self, tests: Sequence[str], seconds: float, change: Changed | None = None) -> int | None:
        """The exit status of pytest; None if it took longer."""
        child = self._start(tests, self._log, ["-x", "-rfE"], change)
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.02)
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None

    def record(self, file: str, rooms: Sequence[str], target: Path) -> int:
        """Start a process that writes which lines of the rooms each test of a file executes."""
        target.mkdir(parents=True)
        os.environ.update({ROOMS: ":".join(rooms), TARGET: str(target)})
        options = ["-m", "not slow", "-p", "benchmarks.mutation.recording"]
        return self._start([file], target / "log", options)

    def _start(
        self, tests: Sequence[str], log: Path, options: Sequence[str], change: Changed | None = None
    ) -> int:
        """The id of a fork that runs tests."""
        child = os.fork()
        if not child:
            self._run(tests, log, options, change)
        return child

    def _run(self, tests: Sequence[str], log: Path, options: Sequence[str], change: Changed | None) -> None:
        code = 70
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number in (1, 2):
                os.dup2(output, number)
            os.chdir(self._root)
            if change is not None and not self._functions.swap(*change):
                _forget()
            import pytest

            quiet = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--no-header", "--tb=no"]
            # Of plugins that the parent has imported.
            quiet.append("-Wignore::pytest.PytestAssertRewriteWarning")
            code = int(pytest.main([*quiet, *options, *tests]))
        except BaseException:  # noqa: BLE001 (a fork must not go on as its parent would)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)


def _file(test: str) -> str:
    return test.partition("::")[0]


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == _PACKAGE]:
        del sys.modules[name]
