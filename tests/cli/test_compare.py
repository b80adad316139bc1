"""`triptych compare`, where a stand-in makes the runs."""

import json
from pathlib import Path

import pytest

from command import Command

pytest.importorskip("scipy")
pytest.importorskip("vl_convert")


def test_a_study_gives_tables_files_and_json(triptych: Command, place: Path, stand_in: Path) -> None:
    answer = triptych("compare", "study.toml")
    assert answer.code == 0, answer.err
    assert "shared: better by -0.5000" in answer.out
    assert "shared: model.d_ff = " in answer.err
    for name in ("runs.csv", "README.md", "report.html"):
        assert (place / "studies" / "sharing" / name).stat().st_size > 0
    again = triptych("compare", "study.toml", "--json")
    assert json.loads(again.out)["baseline"] == "factored"


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
    assert "shared: better" in answer.out


def test_a_study_that_is_not_there_is_a_line(triptych: Command, place: Path) -> None:
    answer = triptych("compare", "gone.toml")
    assert (answer.code, answer.err) == (2, "triptych: there is no study gone.toml\n")
