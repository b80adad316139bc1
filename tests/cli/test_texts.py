"""A text or a file of texts, and files of text that are written twice."""

from pathlib import Path

import pytest

from command import Command
from small_checkpoints import gpt2_that_runs


def test_a_text_is_translated_as_the_line_of_a_file_is(triptych: Command, small_run: Path, cwd: Path) -> None:
    Path("in.de").write_text("Vier.\nDrei.\n")
    Path("Vier.").mkdir()  # a folder is no text
    both = triptych("translate", small_run, "in.de").out.splitlines()
    assert [triptych("translate", small_run, text).out for text in ("Vier.", "Drei.")] == [
        f"{line}\n" for line in both
    ]
    assert triptych("translate", small_run, "Vier.\nDrei.").out.splitlines() == both
    assert triptych("translate", small_run, "-", stdin=b"Vier.\nDrei.\n").out.splitlines() == both


def test_a_file_that_exists_is_read_as_prompts(triptych: Command, cwd: Path) -> None:
    gpt2_that_runs(Path("gpt2"))
    Path("prompts").write_text("To be\nNot to be\n")
    options = "--max-new-tokens", "2"
    assert triptych("generate", "gpt2", "prompts", *options).out == (
        triptych("generate", "gpt2", "--file", "prompts", *options).out
    )


@pytest.mark.parametrize("name", ["missing.de", "texts/missing", "../in.txt"])
@pytest.mark.parametrize("command", ["translate", "generate"])
def test_the_name_of_a_file_that_is_not_there_is_no_text(
    command: str, name: str, triptych: Command, small_run: Path
) -> None:
    triptych(command, small_run, name).refused(f"there is no file {name}")


@pytest.mark.parametrize("text", ["Vier.", "z.B.", "3.5 oder 4?", "und/oder.", "x" * 5000])
def test_texts_are_not_taken_for_names(text: str, triptych: Command, small_run: Path) -> None:
    triptych("translate", small_run, text).done()


def test_what_was_written_is_replaced_until_somebody_changes_it(
    triptych: Command, small_run: Path, cwd: Path
) -> None:
    texts = ["--source", "in.de", "--reference", "in.de"]
    Path("in.de").write_text("Vier.\n")
    for _ in range(2):
        triptych("translate", small_run, "Vier.", "--out", "out.en").done()
        triptych("evaluate", small_run, *texts, "--out", "out.en").done()
    Path("out.en").write_text(changed := Path("out.en").read_text() + "mine\n")
    for command in (["translate", small_run, "Vier."], ["evaluate", small_run, *texts]):
        triptych(*command, "--out", "out.en").refused("--force")
    assert Path("out.en").read_text() == changed
    Path("copy.en").write_bytes(Path("out.en").read_bytes())  # what was written lies elsewhere
    triptych("translate", small_run, "Vier.", "--out", "out.en", "--force").done()
    Path("out.en").replace("copy.en")
    assert triptych("translate", small_run, "Vier.", "--out", "copy.en").code == 2


@pytest.mark.parametrize("command", [["inspect", "."], ["verify", "."], ["verify", "a.txt"]])
def test_what_is_no_model_has_one_exit_code(command: list[str], triptych: Command, cwd: Path) -> None:
    Path("a.txt").write_text("text")
    answer = triptych(*command)
    assert answer.code == 2
    assert "is no" in answer.err or "not a run folder" in answer.err
