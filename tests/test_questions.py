"""What docs/explanation/questions.md shows is what its code and its commands print."""

import contextlib
import io
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pytest

from triptych.cli.main import run as run_command

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "questions.md"
# A number as the page may show it: 1,048,576, 0.33, 1e-15, 96%.
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[+-]\d+)?%?")


class Block(NamedTuple):
    """A fenced block and where it stands."""

    language: str
    text: str
    line: int


def _blocks() -> list[Block]:
    page = PAGE.read_text(encoding="utf-8")
    fences = re.finditer(r"^```(\w+)\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    return [Block(found[1], found[2], page.count("\n", 0, found.start()) + 1) for found in fences]


def _is_near(shown: str, printed: str) -> bool:
    """Whether a number is the one shown, to what another machine may make of it."""
    if "." not in shown and "e" not in shown and not shown.endswith("%"):
        return shown == printed
    one, other = (float(number.replace(",", "").rstrip("%")) for number in (shown, printed))
    if "e" in shown:  # a rounding error: its size is what matters, and less is as good
        return other <= 100 * max(one, 1e-16)
    if shown.endswith("%"):  # the result of a training
        return abs(one - other) <= 8
    return abs(one - other) <= max(0.1 * abs(one), 0.005)


def _assert_same(shown: str, printed: str, where: str) -> None:
    assert NUMBER.sub("#", printed).split() == NUMBER.sub("#", shown).split(), f"{where}:\n{printed}"
    for expected, found in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        assert _is_near(expected, found), f"{where} shows {expected}, printed was {found}:\n{printed}"


def test_the_code_shown_prints_what_is_shown() -> None:
    names: dict[str, object] = {}
    blocks = [block for block in _blocks() if block.language != "console"]
    assert len(blocks) > 20
    for block, following in pairwise([*blocks, Block("end", "", 0)]):
        where = f"{PAGE.name}, line {block.line}"
        if block.language == "text":
            continue
        assert block.language == "python", where
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            # The lines before it, left empty, make tracebacks name the page's own lines.
            exec(compile("\n" * block.line + block.text, PAGE.name, "exec"), names)
        _assert_same(following.text if following.language == "text" else "", printed.getvalue(), where)


@pytest.mark.parametrize(
    "block", [block for block in _blocks() if block.language == "console"], ids=lambda block: block.line
)
def test_the_commands_shown_print_the_lines_shown(
    block: Block, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed, *shown = block.text.splitlines()
    prompt, *arguments = typed.split()
    assert prompt == "$"
    assert arguments[0] == "triptych"
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as stop:
        run_command()
    assert not stop.value.code
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines()]
    assert shown
    for line in shown:
        assert line.split() in lines, f"not printed: {line}\n{printed}"
