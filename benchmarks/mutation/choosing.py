"""Which tests execute a line, from what was recorded of them, also when the source has moved on since."""

import difflib
import hashlib
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.mutation.changes import Change


def digest(text: str) -> str:
    """Names a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Recorded:
    """A test as it was recorded."""

    name: str
    seconds: float


class Recordings:
    """What was recorded of every file of tests, in a folder.

    Beside each recording stands the text of the sources it is of, by digest.
    """

    def __init__(self, folder: Path, root: Path) -> None:
        self._folder, self.root = folder, root
        self._sources = folder / "sources"
        self._moved: dict[tuple[str, str], dict[int, int]] = {}

    def keep_sources(self, files: list[str]) -> dict[str, str]:
        """Store the sources as they are, and give the digest of each."""
        self._sources.mkdir(parents=True, exist_ok=True)
        found = {}
        for file in files:
            text = (self.root / file).read_text(encoding="utf-8")
            found[file] = digest(text)
            (self._sources / found[file]).write_text(text, encoding="utf-8")
        return found

    def is_fresh(self, tests: str) -> bool:
        """Whether a file of tests is recorded as it is now."""
        path = self._path(tests)
        return path.exists() and json.loads(path.read_text())["digest"] == self._digest(tests)

    def add(self, recorded: Path, sources: dict[str, str]) -> None:
        """Take over what the plugin wrote of one file of tests."""
        found = json.loads(recorded.read_text())
        found |= {"digest": self._digest(found["file"]), "sources": sources}
        self._path(found["file"]).write_text(json.dumps(found))

    def _path(self, tests: str) -> Path:
        return self._folder / f"{tests.replace('/', '.')}.json"

    def _digest(self, tests: str) -> str:
        return digest((self.root / tests).read_text(encoding="utf-8"))

    @cached_property
    def _all(self) -> list[dict[str, Any]]:
        found = [json.loads(path.read_text()) for path in sorted(self._folder.glob("*.json"))]
        return [one for one in found if (self.root / one["file"]).exists()]

    def _now(self, file: str, then: str) -> dict[int, int]:
        """Where each line of a source as it was recorded stands now, of those that are still there."""
        key = file, then
        if key not in self._moved:
            before = (self._sources / then).read_text(encoding="utf-8").splitlines()
            after = (self.root / file).read_text(encoding="utf-8").splitlines()
            blocks = difflib.SequenceMatcher(None, before, after, autojunk=False).get_matching_blocks()
            self._moved[key] = {a + i + 1: b + i + 1 for a, b, size in blocks for i in range(size)}
        return self._moved[key]

    def of_file(self, file: str) -> dict[int, list[Recorded]]:
        """The tests that execute each line of a source, as it is now."""
        found: dict[int, list[Recorded]] = defaultdict(list)
        for one in self._all:
            lines = one["lines"].get(file)
            if not lines:
                continue
            now = self._now(file, one["sources"][file])
            left_out = set(one["left_out"])
            for line, numbers in lines.items():
                if int(line) in now:
                    found[now[int(line)]] += [
                        Recorded(one["tests"][n], one["seconds"][n]) for n in numbers if n not in left_out
                    ]
        return found


def chosen_for(
    change: Change, lines: dict[int, list[Recorded]], within: tuple[int, int], most_seconds: float
) -> list[Recorded]:
    """The tests that may notice a change, those of the quickest files first.

    They are those that execute its line; if none is known to (an import does, or the line is new), those of
    its statement, of its function or class (`within`), or of any line of the file.

    Args:
        change: to be noticed.
        lines: tests of every line of its file.
        within: first and last line of the function or class around it.
        most_seconds: what they may take in all, as recorded; the quickest are taken.
    """
    spans = ((change.line, change.line), change.lines, within, (1, max(lines, default=1)))
    chosen: set[Recorded] = set()
    for first, last in spans:
        chosen = {test for line in range(first, last + 1) for test in lines.get(line, ())}
        if chosen:
            break
    total, kept = 0.0, list[Recorded]()
    for test in sorted(chosen, key=lambda test: (test.seconds, test.name)):
        total += test.seconds
        if kept and total > most_seconds:
            break
        kept.append(test)
    files: dict[str, list[Recorded]] = defaultdict(list)
    for test in kept:
        files[test.name.partition("::")[0]].append(test)
    ordered = sorted(files.values(), key=lambda tests: sum(test.seconds for test in tests))
    return [test for tests in ordered for test in tests]
