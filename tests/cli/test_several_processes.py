"""`evaluate`, `inspect` and `compare` in several processes give what one process gives."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from small_checkpoints import gpt2
from studying import STAND_IN
from training.launching import start

pytestmark = pytest.mark.slow
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")


def said(*command: object) -> str:
    """What a command prints that ends well."""
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_seconds(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in one.items() if name != "seconds"} for one in records]


def test_two_processes_score_what_one_does(small_run: Path, tmp_path: Path) -> None:
    text, runs = tmp_path / "text", [tmp_path / f"run-{number}" for number in range(3)]
    text.write_text("Vier.\nHeute ist Montag.\n")
    for run in runs:
        shutil.copytree(small_run, run)
    asked = ("-m", "triptych", "evaluate", *runs, "--source", text, "--reference", text, "--workers", "1")
    alone = json.loads(said(sys.executable, *asked, "--json"))
    together = json.loads(said(*TORCHRUN, *asked, "--json"))
    assert [record["run"] for record in together] == [*map(str, runs)]
    assert without_seconds(together) == without_seconds(alone)
    assert said(*TORCHRUN, *asked) == said(sys.executable, *asked)


def test_two_processes_inspect_what_one_does(small_run: Path, tmp_path: Path) -> None:
    names = [small_run, *(gpt2(tmp_path / f"gpt2-{number}") for number in range(2))]
    found = {}
    for launcher in ((sys.executable,), TORCHRUN):
        table = tmp_path / f"heads-{len(found)}.csv"
        records = json.loads(said(*launcher, "-m", "triptych", "inspect", *names, "--csv", table, "--json"))
        found[launcher] = without_seconds(records), table.read_text()
    alone, together = found.values()
    assert together == alone


def test_two_processes_write_the_text_of_a_student_that_one_does_and_train_on_it(
    small_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "recipe.toml").write_text((small_run / "recipe.toml").read_text())
    asked = ("-m", "triptych", "distil", small_run, tmp_path / "recipe.toml", "--workers", "1")
    asked += ("--set", "training.max_steps=2", "--set", "training.device=cpu", "--device", "cpu")
    said(sys.executable, *asked, "--out", tmp_path / "alone", "--no-train")
    said(*TORCHRUN, *asked, "--out", tmp_path / "together")
    alone, together = ((tmp_path / name / "train.jsonl").read_text() for name in ("alone", "together"))
    assert together == alone
    assert json.loads((tmp_path / "together" / "student" / "summary.json").read_text())["steps"] == 2


def test_an_error_in_one_process_is_one_line_and_the_code_of_all(small_run: Path, tmp_path: Path) -> None:
    """Whoever takes the checkpoint that is not there, whether it is the first process or another."""
    for names in ([tmp_path / "gone", small_run], [small_run, small_run, tmp_path / "gone"]):
        answers = start(2, "-m", "triptych", "inspect", *map(str, names))
        assert [code for code, _ in answers] == [2, 2], answers
        lines = [line for _, text in answers for line in text.splitlines() if line.startswith("triptych: ")]
        assert len(lines) == 1, answers
        assert "gone" in lines[0]


def test_processes_with_other_lists_are_refused(small_run: Path, tmp_path: Path) -> None:
    code = (
        "import os, sys; rank = int(os.environ['RANK']); "
        f"sys.argv = ['triptych', 'inspect', *[{str(small_run)!r}] * (rank + 1)]; "
        "from triptych.cli.main import run; run()"
    )
    answers = start(2, "-c", code)
    assert [code for code, _ in answers] == [1, 1], answers
    assert "rank 1 has another version of the list of what is to be done" in answers[0][1]


STUDY_OF_TWO = """
import pathlib, sys
from triptych.training.studies import parallel_runs
parallel_runs._COMMAND = (sys.executable, "-S", str(pathlib.Path("stand_in.py").absolute()))
sys.argv = ["triptych", "compare", "study.toml", *sys.argv[1:]]
from triptych.cli.main import run
run()
"""


@pytest.fixture
def study(place: Path) -> Path:
    """A script that makes the study of the folder, where a stand-in that tells its process makes the runs."""
    told = (
        'import os\n(folder / "made-by").write_text(str(os.getppid()) + " " + os.environ.get("RANK", "-"))\n'
    )
    (place / "stand_in.py").write_text(
        STAND_IN.replace("seed = int(", f"{told}time.sleep(0.5)\nseed = int(", 1)
    )
    (place / "script.py").write_text(STUDY_OF_TWO)
    return place / "script.py"


def test_two_processes_share_the_runs_of_a_study(place: Path, study: Path) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("vl_convert")
    with (place / "study.toml").open("a") as file:
        file.write("[jobs]\nworkers = 2\n")
    alone = json.loads(said(sys.executable, study, "--out", "alone", "--json"))
    together = start(2, str(study), "--out", "together", "--json")
    assert [code for code, _ in together] == [0, 0], together
    assert "{" not in together[1][1]
    assert json.loads(together[0][1][together[0][1].index("{") :]) == alone
    for name in ("runs.csv", "README.md"):
        ours, theirs = ((place / folder / name).read_text() for folder in ("together", "alone"))
        assert ours.replace("together", "alone") == theirs
    told = [path.read_text().split() for path in place.glob("together/runs/*/made-by")]
    assert len({parent for parent, _ in told}) == 2, "each process makes some of the runs"
    assert {rank for _, rank in told} == {"-"}, "a run knows of no launcher"
    assert {path.read_text() for path in place.glob("together/runs/*/calls")} == {"1"}, (
        "nothing is made twice"
    )
    again = start(2, str(study), "--out", "together", "--json")
    assert json.loads(again[0][1][again[0][1].index("{") :]) == alone
    assert {path.read_text() for path in place.glob("together/runs/*/calls")} == {"1"}


def test_a_run_of_a_study_that_fails_is_said_once_and_is_the_code_of_all(place: Path, study: Path) -> None:
    pytest.importorskip("scipy")
    pytest.importorskip("vl_convert")
    with (place / "study.toml").open("a") as file:
        file.write("[variants.bad]\ntraining.learning_rate = 13.0\n")
    answers = start(2, str(study))
    assert [code for code, _ in answers] == [1, 1], answers
    assert answers[0][1].count("failed: bad-seed-1: exit code 1: the loss is nan") == 1
    assert "failed" not in answers[1][1]
