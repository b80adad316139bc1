"""The table of families in docs/reference/families.md."""

from pathlib import Path

import pytest

from triptych.checkpoints.family import END, START, families, with_table

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "families.md"


def test_the_table_is_what_the_family_files_say() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "make docs brings it up to date"


def test_every_family_and_every_test_that_is_named_is_there() -> None:
    page = with_table(START + END)
    assert page.count("\n| ") - 1 == sum(bool(family.attention) for family in families())
    for name in ("test_families.py", "test_models_run.py", "test_model_writing.py"):
        assert f"`{name}`" in page
        assert (Path(__file__).parent / name).is_file()


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="the page has no"):
        with_table("nothing")
