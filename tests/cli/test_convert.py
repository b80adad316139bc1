"""`triptych convert`: what it prints, and with which code it ends."""

from pathlib import Path

import pytest

from checkpoints.tiny_marian import write_marian
from command import Command
from triptych.training import read_recipe

SENTENCES = b"Das Buch kostet drei Euro.\n\nEs ist halb vier.\nHeute ist Montag.\nVier.\n"


@pytest.mark.slow
def test_a_run_for_transformers_is_translated_by_us_as_the_run_is(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    answer = triptych("convert", small_run, "--to", "hf", "-o", tmp_path / "out").done()
    assert "made to fit: channels of the whole model reordered" in answer.out
    assert (
        "checked: logits of the folder, read by transformers, and of the model: largest difference"
        in answer.out
    )
    assert answer.out.splitlines()[-1].startswith(f"written: {tmp_path / 'out'} (marian, ")
    before, after = (
        triptych("translate", folder, stdin=SENTENCES) for folder in (small_run, tmp_path / "out")
    )
    assert after.out == before.out


def test_a_checkpoint_becomes_a_folder_of_ours_that_the_commands_take(
    triptych: Command, tmp_path: Path
) -> None:
    write_marian(tmp_path)
    record = triptych("convert", tmp_path, "--from", "hf", "--out", tmp_path / "ours", "--json").record()
    assert (record["source"], record["target"]) == (str(tmp_path), str(tmp_path / "ours"))
    assert (record["format"], record["folded"]) == ("run", [])
    assert record["parameters"] > 1000
    assert [check["tried"] for check in record["checks"]] == [True]
    before, after = (
        triptych("translate", folder, stdin=b"ab ba\n") for folder in (tmp_path, tmp_path / "ours")
    )
    assert (after.code, after.out) == (0, before.out)
    (tmp_path / "text").write_text("ab ba\n")
    texts = ("--source", tmp_path / "text", "--reference", tmp_path / "text")
    assert triptych("evaluate", tmp_path / "ours", *texts, "--json").record()["beam_size"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give either --to FORMAT"),
        (["--to", "hf", "--from", "hf"], "give either --to FORMAT"),
        (["--to", "hf", "--quantization", "int8"], "--quantization int8 goes with --to ctranslate2"),
        (["--from", "hf"], "is a run already"),
    ],
)
def test_what_does_not_go_together_is_a_usage_error(
    triptych: Command, small_run: Path, tmp_path: Path, arguments: list[str], message: str
) -> None:
    triptych("convert", small_run, "-o", tmp_path / "out", *arguments).refused(message)
    assert list(tmp_path.iterdir()) == []


def test_a_run_becomes_one_page_for_the_web(triptych: Command, small_run: Path, tmp_path: Path) -> None:
    answer = triptych("convert", small_run, "--to", "web", "-o", tmp_path / "page.html").done()
    lines = answer.out.splitlines()
    assert lines[1] == "made to fit: 10 sentences of held-out text for the loss"
    assert lines[2].startswith("checked: logits of the weights on the page: largest difference ")
    assert lines[-1].startswith(f"written: {tmp_path / 'page.html'} (encoder-decoder, ")
    assert b'id="model-here"' in (tmp_path / "page.html").read_bytes()


def test_nothing_is_overwritten(triptych: Command, small_run: Path, tmp_path: Path) -> None:
    triptych("convert", small_run, "--to", "hf", "-o", tmp_path).refused("exists: choose another name")


def test_a_run_is_as_it_was_afterwards(triptych: Command, small_run: Path, tmp_path: Path) -> None:
    before = {path.name: path.stat().st_mtime_ns for path in small_run.iterdir()}
    triptych("convert", small_run, "--to", "hf", "-o", tmp_path / "out").done()
    assert {path.name: path.stat().st_mtime_ns for path in small_run.iterdir()} == before
    assert read_recipe(small_run / "recipe.toml").decoding.beam_size == 2
