"""`triptych lens`."""

import json
from pathlib import Path

from command import Command
from small_checkpoints import gpt2_that_runs
from triptych.model import load

TEXT = "two young men"


def test_the_parts_of_a_logit_are_printed_with_their_sum(tmp_path: Path, triptych: Command) -> None:
    folder = gpt2_that_runs(tmp_path / "gpt2")
    words = "--token", "e", "--against", "o"
    found = load(folder).lens(TEXT).attribution("e", "o")
    shown = triptych("lens", folder, TEXT, *words, "--all").out
    assert f"{found.total:+.4f}" in shown
    assert all(f"{part.value:+.4f}" in shown for part in found.parts)
    assert "others" in triptych("lens", folder, TEXT, *words, "--top", "3").out
    record = json.loads(triptych("lens", folder, TEXT, *words, "--json").out)
    assert record == {"model": str(folder), **found.record()}


def test_the_tokens_that_each_block_would_predict_are_printed(tmp_path: Path, triptych: Command) -> None:
    folder = gpt2_that_runs(tmp_path / "gpt2")
    predicted = load(folder).lens(TEXT).top(2, 0)
    words = "--position", "0", "--top", "2"
    assert json.loads(triptych("lens", folder, TEXT, *words, "--json").out)["stages"] == predicted.rows()
    shown = triptych("lens", folder, TEXT, *words).out
    assert [row.stage for row in predicted if row.stage not in shown] == []
    assert "--against goes with --token" in triptych("lens", folder, TEXT, "--against", "o").err
