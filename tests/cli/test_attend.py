"""`triptych attend`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from command import Command
from small_checkpoints import gpt2
from triptych import load
from triptych.core.attention import QueriesAndKeys


def test_the_heads_that_tell_most_are_printed_and_on_demand_every_head(
    triptych: Command, checkpoint: Path
) -> None:
    few = triptych("attend", checkpoint, "Four o'clock.")
    whole = triptych("attend", checkpoint, "Four o'clock.", "--all")
    assert few.code == whole.code == 0, few.err + whole.err
    shown, every = (
        [line.split()[:4] for line in answer.out.splitlines() if line.startswith(" decoder ")]
        for answer in (few, whole)
    )
    assert len(shown) == 10
    assert len(every) == 12
    assert "The 10 of 12 heads that tell most" in few.out
    assert "--all" not in whole.out
    # The fourth column says how much a head tells.
    assert [float(row[3]) for row in shown] == sorted((float(row[3]) for row in every), reverse=True)[:10]


def test_json_is_what_the_library_gives(triptych: Command, small_run: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("Vier.\nFünf Uhr.\n", encoding="utf-8")
    answer = triptych(
        "attend", small_run, "--file", tmp_path / "texts", "--heads", "cross.*.1", "--json"
    ).done()
    records = [json.loads(line) for line in answer.out.splitlines()]
    found = load(small_run).attend(["Vier.", "Fünf Uhr."])
    for record, one in zip(records, found, strict=True):
        assert record["num_generated"] == len(one.tokens)
        assert [(head["kind"], head["layer"], head["head"]) for head in record["heads"]] == [
            ("cross", 0, 1),
            ("cross", 1, 1),
        ]
        np.testing.assert_allclose(record["heads"][1]["weights"], one.of("cross")[1][1], atol=1e-6)


def test_what_heads_write_for_each_token_is_printed_and_in_json(triptych: Command, small_run: Path) -> None:
    call = ("attend", small_run, "Vier.", "--writes", "2", "--heads")
    record = triptych(*call, "*.0.1", "--json").record()
    encoder, _, cross = (head["writes"] for head in record["heads"])
    assert encoder is None
    assert [len(nearest) for nearest in cross] == [2] * len(record["source_tokens"])
    printed = [line.split() for line in triptych(*call, "cross.0.1").out.splitlines()]
    assert ["cross", "0", "1", record["source_tokens"][0], *cross[0]] in printed


def test_one_row_is_shown_step_by_step(triptych: Command, small_run: Path, tmp_path: Path) -> None:
    call = ("attend", small_run, "Vier.", "--target", "four", "--steps", "cross.1.1:0")
    steps = load(small_run).attend("Vier.", "four").steps("cross.1", 1, query=0)
    printed = triptych(*call).done()
    assert "Direct effect on the next token" in printed.out
    assert f"{float(steps.weights[0]):.3f}" in printed.out
    record = triptych(*call, "--json").record()
    assert record["weights"] == pytest.approx(steps.weights.tolist())
    triptych(*call, "--html", tmp_path / "page.html").done()
    assert "Direct effect" in (tmp_path / "page.html").read_text()
    for wrong, message in (
        (("--steps", "3"), 'as in "3.2:5"'),
        (("--steps", "cross.1.1:0", "--heads", "1"), "--heads does not go with --steps"),
    ):
        triptych("attend", small_run, "Vier.", *wrong).refused(message)


def test_arrays_and_rows_are_written_and_written_again(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    files = "--npz", tmp_path / "a.npz", "--csv", tmp_path / "a.csv"
    for _ in range(2):
        triptych("attend", small_run, "Vier.", "--target", "four", *files).done()
    with np.load(tmp_path / "a.npz", allow_pickle=False) as arrays:
        assert arrays["num_generated"] == 0
        assert arrays["cross.1"].shape == (2, len(arrays["tokens"]), len(arrays["source_tokens"]))


def test_a_page_and_pictures_are_written_and_written_again(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("vl_convert")
    names = [tmp_path / f"a.{form}" for form in ("html", "svg")]
    files = [word for path in names for word in (f"--{path.suffix[1:]}", path)]
    one = ("--heads", "cross.1.0")
    for _ in range(2):
        answer = triptych("attend", small_run, "Vier.", *one, *files).done()
    assert "written: " in answer.out
    assert '"kind":"cross"' in names[0].read_text(encoding="utf-8")
    assert "cross layer 1, head 0" in names[1].read_text(encoding="utf-8")
    too_many = ("--heads", "cross.*", "--svg", tmp_path / "b.svg")
    triptych("attend", small_run, "Vier.", *too_many).refused("a picture shows one head, and 4 are chosen")
    assert not (tmp_path / "b.svg").exists()


@pytest.mark.parametrize("form", ["npz", "csv", "html"])
def test_who_stops_a_command_has_the_file_of_before_and_no_half_of_one(
    triptych: Command, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    path = tmp_path / f"a.{form}"
    triptych("attend", small_run, "Vier.", f"--{form}", path).done()
    before, calls, weights = path.read_bytes(), list[slice](), QueriesAndKeys._weights

    def stopped(self: QueriesAndKeys, rows: slice) -> torch.Tensor:
        calls.append(rows)
        if len(calls) > 3:  # of 5 layers
            raise KeyboardInterrupt
        return weights(self, rows)

    monkeypatch.setattr(QueriesAndKeys, "_weights", stopped)
    assert triptych("attend", small_run, "Fünf.", f"--{form}", path).code == 130
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (before, [path])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["", "--json"], "the text is empty"),
        ([], "give either a text"),
        (["Vier.", "--heads", "cross.0.2"], "layer cross.0 has no head 2: its heads are 0 to 1"),
        (["Vier.", "--npz", "no/such/folder.npz"], "the folder of no/such/folder.npz does not exist"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    triptych: Command, small_run: Path, arguments: list[str], message: str
) -> None:
    triptych("attend", small_run, *arguments).refused(message)


def test_a_model_that_cannot_be_run_can_be_inspected_and_the_message_says_so(
    triptych: Command, tmp_path: Path
) -> None:
    model = gpt2(tmp_path / "gpt2")  # it has no feed-forward layers
    triptych("attend", model, "Vier.").refused("triptych inspect can read its heads", code=1)
