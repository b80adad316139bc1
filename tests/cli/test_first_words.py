"""What people type first: help, version, a text without quotes, a code of an error, `| head`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from command import Command
from small_checkpoints import gpt2_that_runs
from triptych.cli import terminal
from triptych.cli.failures import is_output_unread
from triptych.error_codes import CODES


@pytest.mark.parametrize(
    ("words", "same"),
    [
        ("help", "--help"),
        ("help attend", "attend --help"),
        ("help nothing", "nothing --help"),
        ("version", "--version"),
    ],
)
def test_help_and_version_are_words_too(words: str, same: str, triptych: Command) -> None:
    answer = triptych(*words.split())
    assert answer == triptych(*same.split())
    assert (words == "version") == answer.out.startswith("triptych ")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("attend gpt2 hello world", "'hello world'"),
        ("generate gpt2 to be or not --seed 3", "'to be or not'"),
        ("lens gpt2 two words", "'two words'"),
        ("translate runs/mine Guten Tag.", "'Guten Tag.'"),
    ],
)
def test_a_text_without_quotes_is_answered_by_the_same_in_quotes(
    words: str, text: str, triptych: Command
) -> None:
    triptych(*words.split()).refused(f": put a text in quotes, as in {text} (see triptych ")


def test_other_extra_arguments_get_no_hint(triptych: Command) -> None:
    assert "quotes" not in triptych("cost", "hello", "world").err


def test_a_code_of_an_error_is_explained(triptych: Command) -> None:
    listed = triptych("explain").out
    assert [line.split()[0] for line in listed.splitlines()] == [*CODES]
    said = triptych("explain", "refused").out
    assert CODES["refused"] in said
    assert "soft_cap" in said
    assert "](" not in said
    assert CODES["damaged"] in triptych("explain", "file").out
    assert "there is no code refusd: did you mean refused?" in triptych("explain", "refusd").err
    failed = triptych("inspect", "nowhere/of/mine", "--verbose").err
    assert failed.endswith("code request: triptych explain request\n")


@pytest.mark.parametrize("words", ["--help", "recipes", "explain file"])
def test_a_pipe_that_is_closed_is_no_failure(words: str) -> None:
    shell = f"set -o pipefail; {sys.executable} -m triptych {words} | true"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_only_a_pipe_without_a_reader_is_unread(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        assert not is_output_unread()
        os.close(reader)
        assert is_output_unread()
        monkeypatch.undo()


def test_a_text_that_ends_at_the_last_position_says_so(tmp_path: Path, triptych: Command) -> None:
    folder = gpt2_that_runs(tmp_path / "gpt2", positions=16)
    said = "ended at the 16 positions of the model, before --max-new-tokens"
    assert triptych("generate", folder, "hello", "--max-new-tokens", "50").err.splitlines()[-1] == said
    drawn = "--num-samples", "2", "--temperature", "1"
    assert f"prompt 1: {said}" in triptych("generate", folder, "hello", "--max-new-tokens", "50", *drawn).err
    assert triptych("generate", folder, "hello", "--max-new-tokens", "5").err == ""


def test_without_a_terminal_a_long_evaluation_prints_a_line_from_time_to_time(
    checkpoint: Path, tmp_path: Path, triptych: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("to be or not to be\n" * 20)

    def lines(*more: str) -> list[str]:
        answer = triptych("evaluate", checkpoint, "--text", tmp_path / "text.txt", "--context", "8", *more)
        return [line for line in answer.err.splitlines() if line.startswith("scoring, ")]

    assert lines() == []  # it ends within a minute
    monkeypatch.setattr(terminal, "_SECONDS_OF_A_LINE", 0.0)
    told = lines()
    assert len(told) > 10
    assert " nats per token: " in told[0]
    assert ": 100%, about 0:00:00 left" in told[-1]
    assert lines("--quiet") == []
