"""A pytest plugin that writes which lines of the rooms each test executes, and how long it takes.

Lines that only an import executes belong to no test, and those of a fixture to the first test that uses it.
"""

import json
import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import coverage
import pytest

ROOMS, TARGET = "MUTANTS_ROOMS", "MUTANTS_TARGET"
_AT_IMPORT = ""


class Recorder:
    """Follows the tests of one run, and writes a file for each file of tests."""

    def __init__(self, rooms: list[str], target: Path) -> None:
        self._target, self._root = target, Path.cwd()
        self._seconds: dict[str, float] = defaultdict(float)
        self._failed: set[str] = set()
        self._coverage = coverage.Coverage(
            data_file=None, include=[f"{self._root / room}/*" for room in rooms], config_file=False
        )
        self._coverage.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, None, None]:
        self._coverage.switch_context(item.nodeid)
        yield
        self._coverage.switch_context(_AT_IMPORT)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] += report.duration
        if not report.passed:
            self._failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        lines = {
            str(Path(file).relative_to(self._root)): data.contexts_by_lineno(file)
            for file in data.measured_files()
        }
        files: dict[str, list[str]] = defaultdict(list)
        for test in self._seconds:
            files[test.partition("::")[0]].append(test)
        for file, tests in files.items():
            number = {test: place for place, test in enumerate(tests)}
            found = {
                "file": file,
                "tests": tests,
                "seconds": [round(self._seconds[test], 4) for test in tests],
                "left_out": sorted(number[test] for test in tests if test in self._failed),
                "lines": {
                    name: {
                        line: sorted(number[context] for context in contexts if context in number)
                        for line, contexts in of_file.items()
                        if any(context in number for context in contexts)
                    }
                    for name, of_file in lines.items()
                },
            }
            self._target.mkdir(parents=True, exist_ok=True)
            (self._target / f"{file.replace('/', '.')}.json").write_text(json.dumps(found))


def pytest_configure(config: pytest.Config) -> None:
    recorder = Recorder(os.environ[ROOMS].split(":"), Path(os.environ[TARGET]))
    config.pluginmanager.register(recorder)
