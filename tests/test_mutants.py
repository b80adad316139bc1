"""Mutation testing itself: which changes are tried, with which tests, and that they take effect."""

import json
from dataclasses import asdict
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
from benchmarks.mutation.changes import Change, changes_of, is_sound, span_of
from benchmarks.mutation.choosing import Recorded, Recordings, chosen_for
from benchmarks.mutation.swapping import Functions
from benchmarks.mutation.trials import Trial, found_before

ROOT = Path(__file__).parents[1]

SOURCE = '''"""Words: 1 + 1."""

LIMIT = 3


class Box:
    """Words."""

    sizes: tuple[int, ...] = (4,)

    def __repr__(self) -> str:
        return str(5 + 5)

    @property
    def half(self) -> float:
        return self.whole / 2

    def fill(self, whole: int = 7) -> bool:
        """Words."""
        if whole < LIMIT and not whole == 0:
            self.whole = max(whole,
                             -whole)
            print(f"é {whole + 1}")
            raise ValueError("é" + str(whole + 1))
        return "é" in self.names or whole is None
'''


def found(source: str) -> list[tuple[int, str, str]]:
    return [
        (change.line, change.old, change.new)
        for change in changes_of("box.py", source)
        if is_sound(change, source)
    ]


def test_operators_constants_conditions_and_statements_are_changed() -> None:
    condition = "whole < LIMIT and not whole == 0"
    assert sorted(found(SOURCE)) == sorted(
        [
            (3, "3", "4"),
            (3, "3", "2"),
            (9, "4", "5"),
            (9, "4", "3"),
            (16, "/", "*"),
            (16, "2", "3"),
            (16, "2", "1"),
            (18, "7", "8"),
            (18, "7", "6"),
            (20, condition, f"not ({condition})"),
            (20, "<", "<="),
            (20, "and", "or"),
            (20, "not whole == 0", "(whole == 0)"),
            (20, "==", "!="),
            (20, "0", "1"),
            (20, "0", "-1"),
            (21, "self.whole = max(whole,\n                             -whole)", "pass"),
            (21, "max", "min"),
            (22, "-whole", "(whole)"),
            (23, 'print(f"é {whole + 1}")', "pass"),
            (25, "in", "not in"),
            (25, "or", "and"),
            (25, "is", "is not"),
        ]
    )


def test_a_change_is_where_it_says(tmp_path: Path) -> None:
    (change,) = [one for one in changes_of("box.py", SOURCE) if one.new == "not in"]
    assert change.applied(SOURCE) == SOURCE.replace('"é" in self', '"é" not in self')
    assert change.scope == "Box.fill"
    assert span_of(change, SOURCE) == (18, 25)
    assert change.lines == (25, 25)
    assert not is_sound(change, SOURCE.replace("or whole", "or ("))


def recorded(folder: Path, root: Path) -> Recordings:
    """Two tests of box.py, of which one executes line 20 and below, and one that failed."""
    (root / "box.py").write_text(SOURCE)
    (root / "test_box.py").write_text("")
    recordings = Recordings(folder, root)
    written = {
        "file": "test_box.py",
        "tests": ["test_box.py::test_half", "test_box.py::test_fill", "test_box.py::test_broken"],
        "seconds": [0.5, 0.1, 0.0],
        "left_out": [2],
        "lines": {"box.py": {"16": [0], "20": [0, 1, 2], "21": [1], "25": [1, 2]}},
    }
    (root / "written.json").write_text(json.dumps(written))
    recordings.add(root / "written.json", recordings.keep_sources(["box.py"]))
    return recordings


def change_at(line: int, new: str, source: str = SOURCE) -> Change:
    return next(one for one in changes_of("box.py", source) if (one.line, one.new) == (line, new))


def test_a_sample_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    first, second, *_ = changes_of("box.py", SOURCE)
    trials = [Trial(first, "noticed", "a test", 3, 1.5)]
    (tmp_path / "found.json").write_text(json.dumps([asdict(trial) for trial in trials]))
    assert found_before(tmp_path / "found.json", [first, second]) == trials
    assert found_before(tmp_path / "found.json", [second, first]) == []
    assert found_before(tmp_path / "nothing.json", [first, second]) == []


def test_the_tests_that_execute_a_line_are_chosen(tmp_path: Path) -> None:
    lines = recorded(tmp_path / "cache", tmp_path).of_file("box.py")
    half, fill = (Recorded(f"test_box.py::test_{name}", s) for name, s in (("half", 0.5), ("fill", 0.1)))
    assert lines == {16: [half], 20: [half, fill], 21: [fill], 25: [fill]}
    assert chosen_for(change_at(20, "<="), lines, (18, 25), 9.0) == [fill, half]
    assert chosen_for(change_at(20, "<="), lines, (18, 25), 0.3) == [fill]
    # No test is known to execute line 22: those of its statement, of its function, of its file are taken.
    assert chosen_for(change_at(22, "(whole)"), lines, (18, 25), 9.0) == [fill]
    assert chosen_for(change_at(23, "pass"), lines, (18, 25), 9.0) == [fill, half]
    assert chosen_for(change_at(3, "4"), lines, (1, 25), 9.0) == [fill, half]
    assert chosen_for(change_at(3, "4"), {}, (1, 25), 9.0) == []


def test_lines_are_found_again_where_the_source_has_moved_on(tmp_path: Path) -> None:
    recordings = recorded(tmp_path / "cache", tmp_path)
    assert recordings.is_fresh("test_box.py")
    moved = SOURCE.replace("LIMIT = 3\n", "LIMIT = 3\nMORE = 4\n").replace(
        "self.whole / 2", "self.whole // 2"
    )
    (tmp_path / "box.py").write_text(moved)
    lines = Recordings(tmp_path / "cache", tmp_path).of_file("box.py")
    assert sorted(lines) == [21, 22, 26]
    (tmp_path / "test_box.py").write_text("# another")
    assert not recordings.is_fresh("test_box.py")


@pytest.mark.parametrize(
    ("line", "new", "swapped"),
    [
        (16, "*", True),
        (21, "pass", True),
        (20, "or", True),
        (3, "4", False),
        (9, "5", False),
        (18, "8", False),
    ],
)
def test_functions_take_their_changed_code_in_place(
    line: int, new: str, swapped: bool, tmp_path: Path
) -> None:
    path = tmp_path / "box.py"
    path.write_text(SOURCE)
    spec = spec_from_file_location("box", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    box = module.Box()
    box.whole = 10
    assert Functions().swap(path, SOURCE, change_at(line, new).applied(SOURCE)) is swapped
    assert box.half == (20 if (line, new) == (16, "*") else 5)
    with pytest.raises(ValueError, match="é3"):
        box.fill(2)
    assert box.whole == (10 if new == "pass" else 2)
    with pytest.raises(ValueError if new == "or" else AttributeError):
        box.fill(5)
