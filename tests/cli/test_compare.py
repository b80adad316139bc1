"""`triptych compare`, where a stand-in makes the runs."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from command import Command
from triptych.cli.compare import live_table
from triptych.training.studies import StudyProgress
from triptych.training.studies.study_job import Result

pytest.importorskip("scipy")
pytest.importorskip("vl_convert")


@pytest.mark.slow
def test_a_study_gives_tables_files_and_json(triptych: Command, place: Path, stand_in: Path) -> None:
    answer = triptych("compare", "study.toml").done()
    assert "shared: no difference seen (-0.5000" in answer.out
    assert "shared: model.d_ff = " in answer.err
    assert len([line for line in answer.err.splitlines() if line.startswith("runs: ")]) == 9
    assert "runs: 9 of 9 done" in answer.err
    for name in ("runs.csv", "README.md", "report.html"):
        assert (place / "studies" / "sharing" / name).stat().st_size > 0
    again = triptych("compare", "study.toml", "--json")
    assert "runs: " not in again.err
    assert json.loads(again.out)["baseline"] == "factored"


def test_the_live_table_has_what_each_variant_has_reached() -> None:
    variants = {f"{name}-seed-{seed}": name for name in ("factored", "shared") for seed in (1, 2)}
    result = Result({"loss": 1.5, "bleu": 30.0}, heads={}, seconds=1.0, steps=1, tokens=1)
    progress = StudyProgress(
        variants,
        done={"factored-seed-1": result, "factored-seed-2": replace(result, figures={"loss": 2.5})},
        failed={"shared-seed-2": "exit code 1"},
        running={"shared-seed-1": 0.25},
        seconds_left=120.0,
    )
    table = live_table("runs", progress, "loss")
    assert table.title == "runs: 2 of 4 done, 1 failed, about 2 min left"
    rows = zip(*([str(cell) for cell in column.cells] for column in table.columns), strict=True)
    assert list(rows) == [
        ("factored", "2 of 2", "2.0000", ""),
        ("shared", "0 of 2, 1 failed", "", "seed-1 25%"),
    ]
    assert [column.header for column in live_table("sweep", progress, "bleu").columns] == [
        "variant",
        "runs",
        "in progress",
    ]


def test_a_failed_run_is_exit_code_1_and_the_others_are_shown(
    triptych: Command,
    place: Path,
    stand_in: Path,
) -> None:
    with (place / "study.toml").open("a") as file:
        file.write("[variants.bad]\ntraining.learning_rate = 13.0\n")
    answer = triptych("compare", "study.toml", "--out", "out")
    assert answer.code == 1
    assert "failed: bad-seed-1: exit code 1: the loss is nan" in answer.err
    assert "shared: no difference seen" in answer.out


def test_a_study_that_is_not_there_is_a_line(triptych: Command, place: Path) -> None:
    answer = triptych("compare", "gone.toml")
    assert (answer.code, answer.err) == (2, "triptych: there is no study gone.toml\n")
