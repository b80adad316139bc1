"""A run of a study as it is really made."""

import json
from pathlib import Path

import pytest

from studying import BASE
from triptych.studies.job import Job, read_result, work
from triptych.training.metrics import read_metrics


def test_a_job_trains_measures_and_writes_its_result(place: Path) -> None:
    job = Job(recipe=place / "base.toml", folder=place / "run", result=place / "result.json")
    assert work(job) == 0
    result = read_result(job.result)
    assert result is not None
    last = [r for r in read_metrics(place / "run" / "metrics.jsonl") if "valid_loss" in r][-1]
    assert result.figures["loss"] == pytest.approx(last["valid_loss"])
    # One layer keeps keys and values of 16 numbers, 4 bytes each.
    assert result.figures["cache_bytes"] == 2 * 16 * 4
    assert result.steps == 4
    assert 0 < result.heads["qk_effective_rank"] <= 8
    assert (
        json.loads((place / "run" / "summary.json").read_text())["parameters"] == result.figures["parameters"]
    )
    again = Job(recipe=place / "base.toml", folder=place / "run", result=place / "again.json")
    assert work(again) == 0  # the run is at its end: it is measured, and not trained again
    assert read_result(again.result).figures["loss"] == result.figures["loss"]  # type: ignore[union-attr]


@pytest.mark.slow
def test_a_study_of_real_runs_goes_on_after_being_stopped_at_any_moment(place: Path) -> None:
    import signal
    import subprocess
    import sys
    import time

    (place / "base.toml").write_text(BASE.replace("max_steps = 4", "max_steps = 300"))

    def command(out: str) -> list[str]:
        return [sys.executable, "-m", "triptych", "compare", "study.toml", "--out", out, "--json"]

    whole = subprocess.run(command("whole"), capture_output=True, check=True, timeout=600)
    for seconds in (8, 14):
        stopped = subprocess.Popen(command("parts"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        time.sleep(seconds)
        stopped.send_signal(signal.SIGTERM if seconds == 8 else signal.SIGKILL)
        stopped.communicate(timeout=120)
    time.sleep(3)  # runs of the killed one see that it is gone, save and end
    parts = subprocess.run(command("parts"), capture_output=True, check=True, timeout=600)
    assert json.loads(parts.stdout)["metrics"] == json.loads(whole.stdout)["metrics"]
