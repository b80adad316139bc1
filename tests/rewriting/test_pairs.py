"""Named kinds of change over families: recognised, named, and never with a false name."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from named_kinds import FAMILIES, outcomes

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_are_named_over_families_and_no_name_is_false(family: str, tmp_path: Path) -> None:
    found = [*outcomes([family], tmp_path)]
    wrong = {one.made.change: one.result for one in found if one.result != "named"}
    assert not {"same", "false name"} & {*wrong.values()}, wrong
    assert len(wrong) <= 0.1 * len(found), wrong
    assert len(found) >= 20
