import re
import shutil
from pathlib import Path

import pytest
import sacrebleu

from command import Command


def _write(path: Path, lines: list[str]) -> Path:
    path.write_text("\n".join(lines) + "\n")
    return path


def test_scores_are_sacrebleus_with_signature_and_interval(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    source = _write(tmp_path / "src", ["Es ist halb vier.", "", "Vier.", "Heute ist Montag."] * 5)
    reference = _write(tmp_path / "ref", ["It is half past three.", "x", "Four.", "Today is Monday."] * 5)
    out = tmp_path / "out.txt"
    record = triptych(
        "evaluate", small_run, "--source", source, "--reference", reference, "--out", out, "--json"
    ).record()
    hypotheses = out.read_text().split("\n")[:-1]
    assert len(hypotheses) == 20
    references = [reference.read_text().split("\n")[:-1]]
    bleu, chrf = record["scores"]
    assert bleu["value"] == sacrebleu.corpus_bleu(hypotheses, references).score
    assert chrf["value"] == sacrebleu.corpus_chrf(hypotheses, references).score
    assert "tok:13a" in bleu["signature"]
    assert "version:" in chrf["signature"]
    for score in record["scores"]:
        low, high = score["interval"]
        assert low <= score["value"] <= high


def test_a_translator_is_scored_with_ctranslate2_too(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    pytest.importorskip("ctranslate2", reason="needs the extra [ctranslate2]")
    text = _write(tmp_path / "text", ["Es ist halb vier.", "Vier.", "Heute ist Montag."])
    outs = {}
    for engine in ("triptych", "ctranslate2"):
        out = tmp_path / engine
        options = ("--engine", engine, "--stop", "full", "--workers", 2, "--out", out)
        record = triptych(
            "evaluate", small_run, "--source", text, "--reference", text, "--json", *options
        ).record()
        assert (record["engine"], record["workers"]) == (engine, 2)
        outs[engine] = out.read_text()
    assert outs["triptych"] == outs["ctranslate2"]


def test_scores_are_lines_for_people(triptych: Command, small_run: Path, tmp_path: Path) -> None:
    text = _write(tmp_path / "text", ["Vier.", "Heute ist Montag."])
    answer = triptych("evaluate", small_run, "--source", text, "--reference", text).done()
    assert [line.split()[0] for line in answer.out.splitlines()] == ["BLEU", "chrF2"]


def test_several_translators_are_a_list_in_their_order_or_a_table(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    text = _write(tmp_path / "text", ["Vier.", "Heute ist Montag."])
    other = tmp_path / "other"
    shutil.copytree(small_run, other)
    texts = ("--source", text, "--reference", text, "--workers", "1")
    alone = triptych("evaluate", small_run, *texts, "--json").record()
    records = triptych("evaluate", other, small_run, *texts, "--json").record()
    assert [record["run"] for record in records] == [str(other), str(small_run)]
    assert [record["scores"] for record in records] == [alone["scores"]] * 2
    table = triptych("evaluate", other, small_run, *texts).out
    value = f"{alone['scores'][0]['value']:.2f}"
    rows = [line for line in table.splitlines() if str(other) in line or str(small_run) in line]
    assert [value in row for row in rows] == [True, True]
    assert f"BLEU: {alone['scores'][0]['signature']}" in table


def test_a_narrow_terminal_gets_whole_scores_of_several_translators(
    triptych: Command, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("FORCE_COLOR", "1")
    text = _write(tmp_path / "text", ["Vier.", "Heute ist Montag."])
    runs = (small_run, small_run)
    answer = triptych("evaluate", *runs, "--source", text, "--reference", text, "--workers", "1")
    plain = re.sub(r"\x1b\[[0-9;]*m", "", answer.out)
    assert len(re.findall(r"\d\.\d\d \[\d+\.\d\d, \d+\.\d\d\]", plain)) == 4


def test_translations_of_several_models_have_no_file(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    text, out = _write(tmp_path / "text", ["Vier."]), tmp_path / "out"
    answer = triptych("evaluate", small_run, small_run, "--source", text, "--reference", text, "--out", out)
    answer.refused("--out takes the translations of one model")
    assert not out.exists()


@pytest.mark.parametrize(
    ("lines", "message"),
    [((2, 1), "src has 2 lines, {folder}/ref 1: both need the same number"), ((0, 0), "empty")],
)
def test_sides_of_different_length_or_without_a_line_are_refused(
    triptych: Command, small_run: Path, tmp_path: Path, lines: tuple[int, int], message: str
) -> None:
    sides = [tmp_path / "src", tmp_path / "ref"]
    for side, count in zip(sides, lines, strict=True):
        side.write_text("Vier.\n" * count)
    answer = triptych("evaluate", small_run, "--source", sides[0], "--reference", sides[1])
    answer.refused(message.format(folder=tmp_path), code=1)
