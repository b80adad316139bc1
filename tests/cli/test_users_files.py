"""No command removes or replaces a file that triptych did not write."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from command import Command
from small_checkpoints import gpt2
from tiny_recipe import FAST_DEMO
from triptych import demonstration, files
from triptych.cli.main import COMMANDS
from triptych.running.opening import open_translator
from triptych.seeing.reports.html import GENERATOR
from triptych.training.progress import LineDisplay
from triptych.training.state import RUN_FILES

TINY = (
    "data.train.generated=300", "data.valid.generated=4", "data.cache=''", "tokenizer.vocab_size=400",
    "model.preset='tiny'", "model.encoder.num_layers=1", "model.decoder.num_layers=1", "training.max_steps=2",
    "training.warmup_steps=1", "validation.every_steps=2", "validation.max_sentences=2",
)  # fmt: skip
SETS = [word for text in TINY for word in ("--set", text)]
MINE = "written by hand\n"


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, with a file of every name that a run has, and it is where the command is called."""
    for within, names in RUN_FILES.items():
        for name in (*names, "report.html", "certificate.json", "notes.txt"):
            path = tmp_path / "home" / within / name.replace("[0-9]", "1").replace("*", "1")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(MINE)
    for side in ("source.de", "reference.en"):
        (tmp_path / "home" / side).write_text("Vier.\n")
    monkeypatch.chdir(tmp_path / "home")
    return tmp_path / "home"


# What each command is asked to write over, beside files that it only reads.
WRITES: dict[str, list[list[str]]] = {
    "demo": [["--out", "."], ["--out", "state"]],
    "recipes": [],
    "new": [["recipe.toml", "--source", "source.de", "--target", "reference.en"]],
    "train": [["demo", *SETS, "--out", "."], ["--resume", "."]],
    "distil": [["{run}", "demo", *SETS, "--out", name] for name in (".", "notes.txt")],
    "shortlist": [["{run}", "--out", "notes.txt"]],
    "translate": [["{run}", "source.de", "--out", name] for name in ("notes.txt", "source.de")],
    "evaluate": [
        ["{run}", "--source", "source.de", "--reference", "reference.en", "--out", name]
        for name in ("notes.txt", "reference.en")
    ],
    "generate": [],
    "serve": [],
    "explore": [["{run}", "--text", "twelve", "--html", name] for name in ("notes.txt", "source.de")],
    "report": [["{run}", "--html", "notes.txt"], ["{run}", "--html", "source.de"]],
    "fill": [],
    "attend": [["{run}", "Vier.", f"--{form}", "notes.txt"] for form in ("npz", "csv", "html")],
    "lens": [],
    "explain": [],
    "inspect": [["{gpt2}", f"--{form}", "notes.txt"] for form in ("html", "csv", "parquet")],
    "rewrite": [["{gpt2}", "--exact", "--no-compare", "--out", name] for name in (".", "notes.txt")],
    "verify": [["."], ["{gpt2}"]],
    "diff": [["{gpt2}", "{gpt2}", f"--{form}", "notes.txt"] for form in ("html", "junit")],
    "convert": [["{run}", "--to", "hf", "--out", name] for name in (".", "notes.txt")],
    "compare": [["study.toml", "--out", "."], ["study.toml", "--out", "notes.txt"]],
    "plan": [],
    "cost": [["--d-model", "16", "--num-heads", "2", "--html", "report.html"]],
}
CASES = [(command, options) for command, calls in WRITES.items() for options in calls]


def test_every_command_is_tried() -> None:
    assert set(WRITES) == set(COMMANDS)


@pytest.mark.parametrize(("command", "options"), CASES, ids=lambda value: " ".join(value))
def test_a_users_files_are_neither_removed_nor_replaced(
    command: str, options: list[str], triptych: Command, home: Path, small_run: Path, tmp_path: Path
) -> None:
    checkpoint = gpt2(tmp_path / "gpt2") if "{gpt2}" in options else tmp_path
    before, read = contents(home), contents(small_run)
    answer = triptych(command, *[o.format(run=small_run, gpt2=checkpoint) for o in options])
    assert answer.code in (1, 2), answer.out
    assert [line.startswith("triptych: ") for line in answer.said].count(True) == 1, answer.err
    assert contents(home) == before
    assert contents(small_run) == read


READS: dict[str, list[str]] = {
    "translate": ["{run}", "source.de"],
    "evaluate": ["{run}", "--source", "source.de", "--reference", "reference.en"],
    "inspect": ["{run}"],
    "rewrite": ["{run}", "--exact", "--plan"],
    "cost": ["--d-model", "16", "--num-heads", "2"],
}


@pytest.mark.parametrize("command", READS)
def test_a_command_that_is_asked_for_no_file_writes_none(
    command: str, triptych: Command, home: Path, small_run: Path
) -> None:
    before, read = contents(home), contents(small_run)
    triptych(command, *[o.format(run=small_run) for o in READS[command]]).done()
    assert contents(home) == before
    assert contents(small_run) == read


def test_what_was_written_before_may_be_written_again_and_other_files_by_force(
    triptych: Command, home: Path, tmp_path: Path
) -> None:
    checkpoint = gpt2(tmp_path / "gpt2")
    for form in ("html", "csv", "parquet"):
        for _ in range(2):
            triptych("inspect", checkpoint, f"--{form}", f"new.{form}").done()
        triptych("inspect", checkpoint, f"--{form}", "notes.txt", "--force").done()
        assert (home / "notes.txt").read_bytes() != MINE.encode()
        (home / "notes.txt").write_text(MINE)
    triptych("cost", "--d-model", "16", "--num-heads", "2", "--html", "report.html", "--force").done()
    assert b"triptych" in (home / "report.html").read_bytes()


def test_text_is_replaced_by_force_but_never_what_is_read(
    triptych: Command, home: Path, small_run: Path
) -> None:
    texts = ["--source", "source.de", "--reference", "reference.en"]
    triptych("evaluate", small_run, *texts, "--out", "notes.txt", "--force").done()
    written = (home / "notes.txt").read_text()
    triptych("translate", small_run, "source.de", "--out", "notes.txt", "--force").done()
    assert (home / "notes.txt").read_text() == written != MINE
    before = contents(home)
    for options in (["evaluate", small_run, *texts], ["translate", small_run, "source.de"]):
        for name in ("source.de", small_run / "config.json"):
            triptych(*options, "--out", name, "--force").refused("that is read")
    assert contents(home) == before


def test_a_run_is_made_among_other_files_by_force_alone(triptych: Command, home: Path) -> None:
    for within in sorted(RUN_FILES.keys() - {"."}):
        shutil.rmtree(home / within)
    (home / "recipe.toml").unlink()
    others = {name: found for name, found in contents(home).items() if name not in RUN_FILES["."]}
    triptych("train", "demo", *SETS, "--out", ".", "--force").done()
    assert open_translator(home).translator().translate("Vier.").source == "Vier."
    assert "An encoder-decoder Transformer" in (home / "README.md").read_text()
    assert others.items() <= contents(home).items()


@pytest.mark.parametrize("name", [*sorted(RUN_FILES.keys() - {"."}), "README.md"])
def test_a_users_folder_with_the_name_of_a_runs_is_in_the_way_even_by_force(
    name: str, triptych: Command, tmp_path: Path
) -> None:
    (tmp_path / "home" / name).mkdir(parents=True)
    (tmp_path / "home" / name / "notes.txt").write_text(MINE)
    answer = triptych("train", "demo", *SETS, "--out", tmp_path / "home", "--force")
    assert answer.code == 2
    assert contents(tmp_path) == {f"home/{name}/notes.txt": MINE.encode()}


def test_a_model_card_changed_by_hand_is_kept_when_the_run_goes_on(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(small_run, run)
    card = (run / "README.md").read_text()
    go_on = ("train", "--resume", run, "--set", "training.max_steps={}")
    triptych(*go_on[:-1], "training.max_steps=41").done()
    renewed = (run / "README.md").read_text()
    assert "41 steps" in renewed != card
    (run / "README.md").write_text(renewed.replace("Training:", "Training (ours):"))
    answer = triptych(*go_on[:-1], "training.max_steps=42").done()
    assert "is kept" in answer.err
    assert (run / "README.md").read_text() == renewed.replace("Training:", "Training (ours):")


def test_files_beside_a_runs_own_outlive_its_going_on(
    triptych: Command, small_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(small_run, run)
    mine = [
        ".notes.txt.20240101.tmp",
        "state/checkpoint-mine.safetensors",
        "state/.x.12345678.tmp",
        "config.json.bak",
    ]
    for name in mine:
        (run / name).write_text(MINE)
    triptych("train", "--resume", run, "--set", "training.max_steps=41").done()
    assert [(run / name).read_text() for name in mine] == [MINE] * len(mine)


def quick_page(report: object, path: Path) -> None:
    """A page of ours, another one every time; the charts of a whole one take seconds."""
    del report
    path.write_text(f"{GENERATOR} {time.monotonic_ns()}")


@pytest.fixture
def finished_demo(
    shown: demonstration.Demonstration, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    monkeypatch.setattr(demonstration, "write_report", quick_page)
    return shutil.copytree(shown.report.parent, tmp_path / "demo")


def names(folder: Path) -> set[str]:
    """Of every file below a folder but TensorBoard's, which tell the time."""
    return {name for name in contents(folder) if not name.startswith("tensorboard")}


def killed(*_: object, **__: object) -> None:
    """Stands for what the process did not come to."""
    raise KeyboardInterrupt


def killed_after(count: int) -> Callable[..., None]:
    """`move_files`, killed after so many files."""

    def move(source: Path, target: Path, last: str) -> None:
        del last
        found = sorted(path for path in source.rglob("*") if path.is_file())
        assert len(found) > count
        for path in found[:count]:
            path.replace(target / path.relative_to(source))
        raise KeyboardInterrupt

    return move


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stand_in"),
    [
        pytest.param("write_report", killed, id="before its report"),
        pytest.param("move_files", killed, id="before it takes the place"),
        pytest.param("move_files", killed_after(4), id="while it takes the place"),
    ],
)
def test_a_finished_demo_is_there_until_the_next_is_whole(
    name: str, stand_in: Callable[..., None], finished_demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (finished_demo / "notes.txt").write_text(MINE)
    known, report = names(finished_demo), (finished_demo / "report.html").read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(demonstration, name, stand_in)
        with pytest.raises(KeyboardInterrupt):
            demonstration.demo(finished_demo, LineDisplay(), FAST_DEMO, num_tested=5)
    assert names(finished_demo) >= known
    assert (finished_demo / "report.html").read_bytes() == report
    assert len(open_translator(finished_demo).translator().translate(["Vier."])) == 1
    again = demonstration.demo(finished_demo, LineDisplay(), FAST_DEMO, num_tested=5)
    assert isinstance(again, demonstration.Demonstration)
    assert names(finished_demo) == known
    assert (finished_demo / "report.html").read_bytes() != report
    assert (finished_demo / "notes.txt").read_text() == MINE


def test_a_report_that_is_not_the_demos_is_not_replaced(finished_demo: Path, triptych: Command) -> None:
    folder = finished_demo
    (folder / "report.html").write_text("<title>mine</title>")
    before = contents(folder)
    answer = triptych("demo", "--out", folder)
    assert answer.code == 2
    assert "not a report of the demo" in answer.err
    assert contents(folder) == before


def test_only_what_a_killed_process_left_of_a_place_is_removed(tmp_path: Path) -> None:
    (tmp_path / ".out.partial-notes-of-mine").mkdir()
    files.write_folder(tmp_path / "out", lambda folder: None)
    assert (tmp_path / ".out.partial-notes-of-mine").is_dir()
