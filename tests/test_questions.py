"""What docs/explanation/questions.md shows is what its code and its commands print."""

from pathlib import Path

import pytest

from blocks import assert_shown, blocks_of, run_blocks

PAGE = Path(__file__).parent.parent / "docs" / "explanation" / "questions.md"


def test_the_code_and_the_commands_print_what_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    blocks = [block for block in blocks_of(PAGE) if block.language != "console"]
    assert len(blocks) > 20
    assert {block.language for block in blocks} == {"python", "text"}
    for one in run_blocks(PAGE):
        assert_shown(one, PAGE.name)
        if one.block.language == "console":  # counts: the same to the digit
            assert one.shown
            lines = [line.split() for line in one.printed.splitlines()]
            assert [line for line in one.shown.splitlines() if line.split() not in lines] == [], one.printed
