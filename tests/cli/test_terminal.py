"""Odd command lines, names and streams: one line and no traceback, and nothing that a terminal would obey."""

import hashlib
import io
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.progress import Progress, TextColumn

from command import Answer, Command
from small_checkpoints import gpt2, gpt2_that_runs
from triptych.cli.main import COMMANDS, application
from triptych.cli.terminal import Terminal, json_text, read_text
from triptych.core.storage.copying import CERTIFICATE
from triptych.errors import DataError, UsageError
from triptych.printable import printable
from triptych.rewriting.functions import EXACT
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.training.studies import read_study

RED, SHOWN = "\x1b[31m\u202ered\x9b", r"\u001b[31m\u202ered\u009b"
NOT_UTF8 = os.fsdecode(b"\xff")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that runs, one that does not, and one with a certificate."""
    base = tmp_path_factory.mktemp("sound")
    gpt2_that_runs(base / "runs")
    gpt2(base / "gpt2")
    exact = RewriteRecipe.model_construct(step=tuple(EXACT), skip_refused=True)
    rewrite_checkpoint(str(base / "gpt2"), base / "rewritten", exact, compare=False)
    return base


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with odd files."""
    (tmp_path / "in.txt").write_text("The cat sat.\nIt was.\n")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000 + "]" * 5000)
    (tmp_path / "loop").symlink_to("loop")
    for name in (NOT_UTF8, RED):
        (tmp_path / f"{name}.txt").write_text("The cat.\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fault(answer: Answer) -> str:
    """What is wrong with an answer; "" if it is a result, or one line and the exit code of an error."""
    said = [line for line in answer.said if line.startswith(("triptych: ", "Error: "))]
    said = [line for line in said if not line.startswith("triptych: warning: ")]
    if "\x1b" in answer.out + answer.err:
        return f"an escape: {answer.out + answer.err!r}"
    if "Traceback" in answer.err or answer.code not in (0, 1, 2):
        return f"exit code {answer.code}: {answer.err[-400:]}"
    return "" if len(said) == (answer.code != 0) else f"{len(said)} lines: {answer.err[-400:]}"


@pytest.mark.parametrize("lines", [False, True])
def test_printable_text_stays_the_same_json_and_keeps_what_is_written(lines: bool) -> None:
    text = "".join(map(chr, range(0xA0))) + "\u2028\u202e\u2066\udcff\ufffe"
    shown = printable(text, lines=lines)
    assert shown.replace("\n", "").replace("\t", "").isprintable()
    assert ("\n" in shown) == lines
    record = json.dumps({"é": text}, ensure_ascii=False)
    assert json.loads(printable(record)) == {"é": text}
    for written in ("é\xa0ß\u3000漢 👩\u200d🔬 ا\u200cب", shown):
        assert printable(written, lines=True) == written


def test_a_console_shows_names_as_they_are_in_whatever_it_draws() -> None:
    with io.StringIO() as file:
        console = Terminal()
        console.file = file
        console.print(f"[red]{RED}[/nope] :cat:")
        with Progress(TextColumn("{task.description}", markup=False), console=console) as bar:
            bar.add_task(RED, total=1)
        assert f"[red]{SHOWN}[/nope] :cat:" in file.getvalue()
        assert not {"\x1b", "\x9b", "\u202e"} & {*file.getvalue()}


def test_names_in_a_certificate_reach_the_terminal_as_escapes(
    sound: Path, tmp_path: Path, triptych: Command
) -> None:
    place = tmp_path / RED
    shutil.copytree(sound / "rewritten", place)
    record = json.loads((place / CERTIFICATE).read_bytes())
    plain = {key: value for key, value in record.items() if key != "sha256"}
    plain["layers"][0]["module"] = RED
    plain["files"][RED] = "0" * 64
    text = json.dumps(plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    sealed = {**plain, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (place / CERTIFICATE).write_text(json.dumps(sealed))
    answer = triptych("verify", place)
    assert (fault(answer), answer.code) == ("", 1)
    assert SHOWN in answer.err
    assert r"\u001b[" in answer.out


def test_the_name_of_a_folder_reaches_no_page_message_or_card_as_it_is(
    sound: Path, home: Path, triptych: Command
) -> None:
    for name in (RED, NOT_UTF8):
        shown = printable(name)
        shutil.copytree(sound / "gpt2", name)
        answers = [
            triptych("inspect", name, "--html", f"{name}.html", "--csv", "heads.csv", "--force"),
            triptych("rewrite", name, "--exact", "--no-compare", "--out", f"{name}.new"),
            triptych("inspect", f"{name}.none"),
        ]
        assert [fault(answer) for answer in answers] == ["", "", ""]
        assert [answer.code for answer in answers] == [0, 0, 2]
        assert [shown in answer.out + answer.err for answer in answers] == [True, True, True]
        for written in (home / f"{name}.html", home / f"{name}.new" / "README.md"):
            text = written.read_text(encoding="utf-8")
            assert shown in text
            assert not {"\x1b", "\x9b", "\u202e"} & {*text}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["translate", "{run}"], "standard input is closed"),
        (["generate", "{runs}", "-"], "standard input is closed"),
        (["attend", "{runs}", "-"], "standard input is closed"),
        (["translate", "{run}", "in.txt", "--alpha", "1000"], "at most 10"),
        (["translate", "{run}", "in.txt", "--beam", "1000000"], "at most 10,000"),
        (["translate", "{run}", "in.txt", "--n-best", "9" * 20], "at most 10,000"),
        (["translate", "{run}", "in.txt", "--max-extra-tokens", "9" * 20], "at most 1,000,000,000"),
        (["generate", "{runs}", "a", "--beam", "9" * 20], "at most 10,000"),
        (["generate", "{runs}", "a", "--max-new-tokens", "9" * 20], "at most 1,000,000,000"),
        (["generate", "{runs}", "a", "--temperature", "1e-308"], "from 1e-06 to 1e+06"),
        (["attend", "{runs}", "a", "--max-new-tokens", "9" * 20], "max_new_tokens is 9999"),
        (["attend", "{runs}", "a", "--writes", "-1"], "-1 tokens of what a head writes"),
        (["attend", "{runs}", "a", "--top", "0", "--json"], "the 0 largest weights"),
        (["inspect", "{gpt2}", "--compare", "a--b"], "no name on the Hub"),
        (["verify", "{rewritten}", "--text", "/dev/full"], "byte 1 is NUL"),
        (["new", "new.toml", "--tsv", f"{NOT_UTF8}.tsv"], "is not UTF-8, as recipes are"),
        (["attend", "{runs}", "--over", "loop"], "loop"),
        (["attend", "{runs}", "a", "--html", "loop"], "loop: Too many levels"),
        (["inspect", "{gpt2}", "--html", "loop"], "loop: Too many levels"),
        (["rewrite", "loop", "--exact", "--out", "new"], "loop"),
        (["train", "deep.toml"], "recipe deep.toml is nested too deeply"),
        (["compare", "deep.toml"], "study deep.toml is nested too deeply"),
        (["train", "demo", "--set", "model.d_model=1000000000"], "d_model"),
        (["train", "demo", "--set", f"data.train.generated={'[' * 5000}"], "data.train.generated"),
        (
            [
                "plan",
                "demo",
                "--devices",
                "2",
                "--device-memory",
                "1GB",
                "--set",
                "model.d_model=9" + "9" * 20,
            ],
            "",
        ),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else "",
)
def test_what_cannot_be_done_is_one_line(
    arguments: list[str],
    said: str,
    folders: dict[str, Path],
    home: Path,
    triptych: Command,
) -> None:
    stdin = None if "closed" in said else b""
    answer = triptych(*(word.format(**folders) for word in arguments), stdin=stdin)
    assert fault(answer) == ""
    assert answer.code != 0
    assert said in answer.err
    assert (home / "loop").is_symlink()


def test_a_study_is_read_by_its_path_as_text_too(home: Path) -> None:
    (home / "x.toml").write_text("")
    with pytest.raises(UsageError, match=r"^study x\.toml: "):
        read_study("x.toml")


def test_closed_streams_are_no_traceback_and_no_file_takes_their_place(home: Path) -> None:
    command = f"{sys.executable} -m triptych cost --d-model 16 --num-heads 2 --html page.html <&- >&- 2>&-"
    assert subprocess.run(["sh", "-c", command], cwd=home, check=False).returncode == 0
    assert (home / "page.html").read_text().rstrip().endswith("</html>")


def test_an_encoding_without_letters_is_given_escapes(
    sound: Path, triptych: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii", write_through=True))
        assert fault(triptych("inspect", sound / "gpt2")) == ""
        assert rb"\u" in written.getvalue()


# Values of every kind, for every option that takes one.
ODD = ["", "-1", "1.5", "nan", "1e308", "9" * 20, "a" * 5000, RED, f"{NOT_UTF8}.txt", "loop", "/dev/full"]
# The demo is not among them: it takes a folder, and trains.
BASES: dict[str, list[str]] = {
    "train": ["demo", "--set", "training.max_steps=0"],
    "distil": ["{run}", "demo", "--out", "distilled", "--set", "training.max_steps=0"],
    "shortlist": ["{run}", "--source", "in.txt", "--target", "in.txt", "--out", "list.txt"],
    "translate": ["{run}", "in.txt"],
    "generate": ["{runs}", "Hello", "--max-new-tokens", "2"],
    "fill": ["{runs}", "a [MASK]"],
    "attend": ["{runs}", "Hello"],
    "lens": ["{runs}", "Hello"],
    "evaluate": ["{runs}", "--text", "in.txt"],
    "inspect": ["{gpt2}"],
    "rewrite": ["{gpt2}", "--exact", "--plan"],
    "verify": ["{rewritten}"],
    "diff": ["{gpt2}", "{rewritten}"],
    "convert": ["{run}", "--to", "hf", "--out", "in.txt"],
    "compare": ["deep.toml"],
    "plan": ["demo", "--devices", "1", "--device-memory", "1GB"],
    "cost": ["--d-model", "16", "--num-heads", "2"],
    "recipes": ["show", "demo"],
    "explain": ["refused"],
    "new": ["new.toml", "--tsv", "loop"],
    "report": ["{run}", "--html", "page.html"],
    "explore": ["{runs}", "--text", "Hello", "--html", "page.html"],
}


def odd_calls(name: str) -> Iterator[list[str]]:
    """Each option of a command with each odd value, and each odd value in the place of its first argument."""
    base = BASES[name]
    command: Any = typer.main.get_command(application([name]))
    command = command.commands[name]
    for option in command.params:
        longest = max(option.opts, key=len)
        if longest.startswith("--") and not option.is_flag:
            yield from ([*base, longest, *[value] * option.nargs] for value in ODD)
    if not base[0].startswith("-"):
        yield from ([value, *base[1:]] for value in ODD)


def wrong(name: str, calls: Iterable[list[str]], folders: dict[str, Path], triptych: Command) -> list[str]:
    """What calls of a command did wrong."""
    found = []
    for call in calls:
        answer = triptych(name, *(word.format(**folders) for word in call))
        if said := fault(answer):
            found.append(f"{name} {call}: {said}")
    return found


@pytest.fixture
def folders(sound: Path, small_run: Path, home: Path) -> dict[str, Path]:
    """By the names that `BASES` has for them."""
    return {"run": small_run, **{name: sound / name for name in ("runs", "gpt2", "rewritten")}}


def test_every_command_but_the_demo_and_the_server_is_given_odd_values() -> None:
    assert {*BASES, "demo", "serve"} == {*COMMANDS}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", f"--be{RED}"], "No such option: --be"),
        ([RED], "No such command"),
        (["cost", "--d-model", RED], "a valid integer"),
        (["inspect"], "Missing argument 'MODEL...'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_a_command_line_that_is_not_understood_is_one_line_without_escapes(
    arguments: list[str], said: str, triptych: Command
) -> None:
    answer = triptych(*arguments)
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert answer.err.startswith("triptych: ")
    assert said in answer.err
    assert not {"\x1b", "\x9b", "\u202e"} & {*answer.err}


def test_a_line_feed_in_a_name_begins_no_line(home: Path, triptych: Command) -> None:
    (home / "a\nb").mkdir()
    triptych("inspect", "a\nb").refused(r"a\nb is not a run folder")


@pytest.mark.parametrize("command", ["generate", "attend"])
def test_standard_input_has_a_limit(command: str, sound: Path, triptych: Command) -> None:
    answer = triptych(command, sound / "runs", "-", stdin=b"a" * ((16 << 20) + 1))
    answer.refused("more than 16,777,216 bytes")


def test_a_figure_that_is_no_number_is_no_json() -> None:
    assert json.loads(json_text({"loss": 1.5, "text": "é"})) == {"loss": 1.5, "text": "é"}
    for figure in (float("nan"), float("inf")):
        with pytest.raises(DataError, match="JSON cannot hold"):
            json_text({"loss": [figure]})


@pytest.mark.parametrize(
    "shell", ["bash", *(pytest.param(shell, marks=pytest.mark.slow) for shell in ("zsh", "fish"))]
)
def test_commands_and_options_are_completed(shell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}

    def said(*arguments: str, **more: str) -> str:
        call = [sys.executable, "-m", "triptych", *arguments]
        return subprocess.run(call, env={**environment, **more}, capture_output=True, text=True).stdout

    assert "_TRIPTYCH_COMPLETE" in said("--show-completion", shell)
    for typed, expected in (("triptych gener", "generate"), ("triptych generate --be", "--beam")):
        found = said(
            _TRIPTYCH_COMPLETE=f"complete_{shell}",
            _TYPER_COMPLETE_ARGS=typed,
            _TYPER_COMPLETE_FISH_ACTION="get-args",
            COMP_WORDS=typed,
            COMP_CWORD=str(len(typed.split()) - 1),
        )
        assert expected in found


def test_an_argument_is_utf8_in_any_locale() -> None:
    in_posix = "今天 café".encode().decode("ascii", "surrogateescape")
    assert read_text(in_posix, "prompt") == read_text("今天 café", "prompt") == "今天 café"
    with pytest.raises(UsageError, match="the prompt is not UTF-8"):
        read_text(b"caf\xe9".decode("ascii", "surrogateescape"), "prompt")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        *(pytest.param(name, 2, marks=pytest.mark.slow if name == "explore" else ()) for name in BASES),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in BASES),
    ],
)
def test_odd_values_end_in_one_line_or_a_result(
    name: str, count: int | None, folders: dict[str, Path], triptych: Command
) -> None:
    calls = [*odd_calls(name)]
    chosen = calls if count is None else random.Random(name).sample(calls, count)
    assert wrong(name, chosen, folders, triptych) == []
