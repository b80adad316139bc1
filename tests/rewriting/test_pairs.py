"""Named kinds of change over families: recognised, named, and never with a false name."""

from pathlib import Path

import pytest

pytest.importorskip("transformers")

from named_kinds import FAMILIES, outcomes

# Rows of fewer than 16 entries do not show that they lie on levels.
KNOWN = {"deepseek_v3": {"16 levels by rows of the stored maps"}}
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("family", FAMILIES)
def test_kinds_are_named_over_families_and_no_name_is_false(family: str, tmp_path: Path) -> None:
    found = [*outcomes([family], tmp_path)]
    wrong = {one.made.change: one.result for one in found if one.result != "named"}
    for change in KNOWN.get(family, ()):
        wrong.pop(change, None)
    assert not {"same", "false name"} & {*wrong.values()}, wrong
    assert len(wrong) <= 0.1 * len(found), wrong
    assert len(found) >= 20
