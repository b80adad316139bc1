"""`triptych lens`."""

from pathlib import Path

from command import Command
from triptych.model import load

TEXT = "two young men"


def test_the_parts_of_a_logit_are_printed_with_their_sum(checkpoint: Path, triptych: Command) -> None:
    words = "--token", "e", "--against", "o"
    found = load(checkpoint).lens(TEXT).attribution("e", "o")
    shown = triptych("lens", checkpoint, TEXT, *words, "--all").out
    assert f"{found.total:+.4f}" in shown
    assert all(f"{part.value:+.4f}" in shown for part in found.parts)
    assert "others" in triptych("lens", checkpoint, TEXT, *words, "--top", "3").out
    record = triptych("lens", checkpoint, TEXT, *words, "--json").record()
    assert record == {"model": str(checkpoint), **found.record()}


def test_the_tokens_that_each_block_would_predict_are_printed(checkpoint: Path, triptych: Command) -> None:
    predicted = load(checkpoint).lens(TEXT).top(2, 0)
    words = "--position", "0", "--top", "2"
    assert triptych("lens", checkpoint, TEXT, *words, "--json").record()["stages"] == predicted.rows()
    shown = triptych("lens", checkpoint, TEXT, *words).out
    assert [row.stage for row in predicted if row.stage not in shown] == []
    assert "--against goes with --token" in triptych("lens", checkpoint, TEXT, "--against", "o").err
