"""Errors that no command handles: a full disk, and what nobody foresaw."""

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import pytest
import torch

from command import Command
from interrupting import full_disk
from small_checkpoints import gpt2
from triptych.cli import main
from triptych.cli.failures import warnings_as_lines
from triptych.errors import ConfigurationWarning


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("train mien.toml", "there is no recipe mien.toml (did you mean mine.toml?)"),
        ("report mien", "mien holds no run of triptych (did you mean mine?)"),
        ("verify mien --against mine", "mien does not exist (did you mean mine?)"),
        ("compare mine", "study mine cannot be read: it is a folder; give a file in it"),
        ("evaluate mien --text mine.toml", "mien: no such path (did you mean mine?), and "),
        ("inspect a/b/mien", "a/b/mien: there is no such file or folder, and it is no name on the Hub"),
    ],
)
def test_a_mistyped_path_is_one_line_that_names_what_is_there(
    words: str, message: str, triptych: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine.toml").touch()
    answer = triptych(*words.split())
    assert answer.code in (1, 2)
    assert answer.err.startswith(f"triptych: {message}")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "words",
    [
        "translate {run} {text} --out",
        "translate {run} {text} --attention-html",
        "attend {run} Vier. --npz",
        "attend {run} Vier. --csv",
        "attend {run} Vier. --html",
        "attend {run} Vier. --heads decoder.0.0 --svg",
        "evaluate {run} --source {text} --reference {text} --out",
        "inspect {run} --csv",
        "inspect {run} --html",
        "inspect {run} --parquet",
        "rewrite {gpt2} --exact --no-compare --out",
        "rewrite {run} --exact --no-compare --out",
        "convert {run} --to hf --out",
        "convert {run} --to ctranslate2 --out",
        pytest.param("convert {run} --to onnx --out", marks=pytest.mark.slow),
        "cost --d-model 16 --num-heads 2 --html",
        "train {run}/recipe.toml --out",
    ],
)
def test_a_full_disk_is_one_line_that_names_the_place_and_leaves_nothing(
    words: str, triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    for library in ("ctranslate2", "onnx"):
        if library in words:
            pytest.importorskip(library)
    text, out = tmp_path / "text", tmp_path / "out" / "made"
    text.write_text("Vier.\n")
    out.parent.mkdir()
    checkpoint = gpt2(tmp_path / "gpt2") if "{gpt2}" in words else ""
    given = words.format(run=small_run, text=text, gpt2=checkpoint)
    with full_disk():
        answer = triptych(*given.split(), out)
    assert answer.code == 1, answer.err
    (line,) = [line for line in answer.said if line.startswith("triptych: ")]
    assert line.startswith(f"triptych: {out}")
    assert "File too large: files may not be larger here (ulimit -f)" in line
    assert "Traceback" not in answer.err
    assert not [path for path in out.parent.rglob("*") if path.is_file()]


@pytest.mark.parametrize("words", ["cost --d-model 16 --num-heads 2", "translate {run} {text}", "--help"])
def test_standard_output_on_a_full_disk_is_one_line(
    words: str, triptych: Command, small_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text").write_text("Vier.\n")
    with full_disk(), (tmp_path / "printed").open("w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        answer = triptych(*words.format(run=small_run, text=tmp_path / "text").split())
    assert answer.code == 1
    (line,) = answer.said
    assert line.startswith("triptych: standard output: File too large: files may not be larger")


@pytest.mark.parametrize("option", ["--version", "--help"])
@pytest.mark.parametrize("output", ["full disk", "closed pipe"])
def test_what_is_still_buffered_at_the_end_is_no_second_error(
    output: str, option: str, tmp_path: Path
) -> None:
    """Python tries again to write it when it ends: "Exception ignored", and exit code 120."""
    said = "triptych: standard output: File too large: files may not be larger"
    if output == "closed pipe":
        reader, writer = os.pipe()
        os.close(reader)
    else:
        writer = os.open(tmp_path / "printed", os.O_WRONLY | os.O_CREAT)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with full_disk():  # of this process and of those that it starts
        done = subprocess.run(
            [sys.executable, "-m", "triptych", option],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    os.close(writer)
    assert done.returncode == (1 if output == "full disk" else 0)
    assert [line.startswith(said) for line in done.stderr.splitlines()] == [True] * (output == "full disk")


class PanicException(BaseException):
    """As libraries written in Rust raise it."""


@pytest.mark.parametrize("kind", [LookupError, PanicException])
def test_what_nobody_foresaw_is_one_line_with_a_file_to_report(
    kind: type[BaseException], triptych: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: object) -> None:
        raise kind("no such \x1b[31mthing\nsecond line")

    monkeypatch.setattr(main, "application", fail)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    answer = triptych("cost", "--d-model", "16")
    (report,) = tmp_path.iterdir()
    assert answer.code == 70
    assert answer.err == (
        f"triptych: internal error ({kind.__name__}: no such \\u001b[31mthing): please report it, "
        "with the traceback in "
        f"{report}\n"
    )
    text = report.read_text()
    assert "Traceback (most recent call last)" in text
    assert "arguments: ['cost', '--d-model', '16']" in text
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    said = f"please report it, with what the command was, and this place: {__file__}, line "
    triptych("cost").refused(said, code=70)


def test_a_lack_of_memory_is_no_fault_to_report(triptych: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(arguments: object) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr(main, "application", fail)
    answer = triptych("cost")
    assert answer.code == 1
    assert answer.err.startswith("triptych: not enough memory (RuntimeError: ")
    assert answer.err.endswith("): give shorter texts, or fewer at a time\n")


# Sends this process Ctrl-C at a moment. Whoever a shell starts in the background ignores it: not here.
_CTRL_C_AT = """
import atexit, os, signal, sys

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

def listen(event, given):
    if {moment!r} == "importing" and event == "import" and given[0] == "torch":
        interrupt()
    if {moment!r} == "writing" and event == "open" and str(given[0]).startswith({folder!r}):
        interrupt()

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.addaudithook(listen)
if {moment!r} == "ending":
    atexit.register(interrupt)
from triptych.__main__ import run
run()
"""


@pytest.mark.parametrize(
    ("moment", "code", "said"),
    [
        ("importing", 130, "triptych: interrupted\n"),
        ("writing", 130, "triptych: interrupted\n"),
        ("ending", 0, ""),
    ],
)
def test_ctrl_c_is_one_line_at_any_moment_and_leaves_nothing_half_written(
    moment: str, code: int, said: str, small_run: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", _CTRL_C_AT.format(moment=moment, folder=str(tmp_path))]
    command += ["attend", str(small_run), "Vier.", "--csv", str(tmp_path / "looks.csv")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (code, said)
    assert [path.name for path in tmp_path.iterdir()] == ["looks.csv"] * (code == 0)


def test_a_warning_that_comes_from_several_places_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with warnings_as_lines():
        for line in (1, 2):
            warnings.warn_explicit("a field is set", ConfigurationWarning, "opening.py", line)
    assert capsys.readouterr().err == "triptych: warning: a field is set\n"
