"""A run of a study as it is really made."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from studying import BASE
from triptych import load
from triptych.errors import DataError, UsageError
from triptych.running.text import LanguageCorpusSpec
from triptych.training.metrics import read_metrics
from triptych.training.runs import validate
from triptych.training.studies.study_job import Result, StudyJob, TrainedRun, do_job, read_result


def test_a_job_trains_measures_and_writes_its_result(place: Path) -> None:
    job = StudyJob(recipe=place / "base.toml", folder=place / "run", result=place / "result.json")
    assert do_job(job) == 0
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
    (place / "test.txt").write_text("Of a text that nothing was chosen by.\n")
    again = StudyJob(
        recipe=place / "base.toml",
        folder=place / "run",
        result=place / "again.json",
        test_text=LanguageCorpusSpec(files=(str(place / "test.txt"),)),
    )
    assert do_job(again) == 0  # the run is at its end: it is measured, and not trained again
    measured = read_result(again.result)
    assert measured is not None
    assert measured.figures["loss"] == result.figures["loss"]
    scored = load(place / "run").evaluate(place / "test.txt")
    assert measured.figures["test_loss"] == scored.nats_per_token != result.figures["loss"]


def test_a_trained_run_is_rewritten_and_measured_as_it_was_itself(place: Path) -> None:
    learned = '[model.positions]\nscheme = "learned"\nmax_tokens = 16\n'
    (place / "base.toml").write_text(BASE + learned)
    trained = TrainedRun(folder=place / "run", result=place / "result.json")
    assert do_job(StudyJob(recipe=place / "base.toml", folder=trained.folder, result=trained.result)) == 0
    before = read_result(trained.result)
    assert before is not None
    assert validate(trained.folder)["valid_loss"] == before.figures["loss"]

    def rewritten(do: str) -> Result:
        (place / "rewrite.toml").write_text(f'do = ["{do}"]')
        name = do.partition("(")[0]
        result = place / f"{name}.json"
        job = StudyJob(recipe=place / "rewrite.toml", rewrite_of=trained, folder=place / name, result=result)
        assert do_job(job) == 0
        found = read_result(result)
        assert found is not None
        return found

    exact = rewritten("gauge_fix")
    assert exact.figures["loss"] == pytest.approx(before.figures["loss"], abs=1e-5)
    cut = rewritten("truncate(rank=1, forms=['qk'])")
    # Keys of one number in the place of 8, in two heads; four bytes each.
    assert cut.figures["cache_bytes"] == before.figures["cache_bytes"] - 2 * 7 * 4
    # As many fewer columns of W_Q and of W_K.
    assert cut.figures["parameters"] == before.figures["parameters"] - 2 * 2 * 7 * 16
    assert cut.figures["loss"] != before.figures["loss"]
    assert cut.figures["bits_per_byte"] == pytest.approx(validate(place / "truncate")["valid_bits_per_byte"])
    assert cut.heads["qk_effective_rank"] == pytest.approx(1)
    assert (cut.seconds, cut.tokens) == (before.seconds, before.tokens)


def test_a_rewrite_that_a_model_refuses_leaves_no_run_behind(place: Path) -> None:
    trained = TrainedRun(folder=place / "run", result=place / "result.json")
    rewrite = StudyJob(
        recipe=place / "rewrite.toml", rewrite_of=trained, folder=place / "cut", result=place / "cut.json"
    )
    (place / "rewrite.toml").write_text('do = ["truncate(rank=99)"]')
    with pytest.raises(DataError, match=r"result\.json is missing"):
        do_job(rewrite)
    assert do_job(StudyJob(recipe=place / "base.toml", folder=trained.folder, result=trained.result)) == 0
    with pytest.raises(UsageError, match="rank is 99, and the widest head has 8"):
        do_job(rewrite)
    assert not rewrite.folder.exists()
    assert not rewrite.result.exists()


@pytest.mark.slow
def test_a_study_with_rewritten_runs_ends_in_the_same_table_after_it_was_stopped(place: Path) -> None:
    (place / "study.toml").write_text("""
name = "folded"
base = "base.toml"
seeds = 3
noise = false
[variants.stacked]
model.attention.projections = "stacked"
[variants.folded]
rewrite_of = "stacked"
rewrite.do = ["fold"]
[variants.cut]
rewrite_of = "stacked"
rewrite.do = ["fold", "truncate(rank=2)"]
""")

    def command(out: str) -> list[str]:
        return [sys.executable, "-m", "triptych", "compare", "study.toml", "--out", out, "--json"]

    whole = json.loads(subprocess.run(command("whole"), capture_output=True, check=True, timeout=900).stdout)
    means = {name: one["mean"] for name, one in whole["metrics"]["loss"]["means"].items()}
    assert means["folded"] == pytest.approx(means["stacked"], abs=1e-5)
    assert means["cut"] != pytest.approx(means["stacked"], abs=1e-5)
    parts = subprocess.Popen(command("parts"), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 600
    while not list(place.glob("parts/runs/cut-*.result.json")) and time.monotonic() < deadline:
        time.sleep(0.1)
    parts.kill()
    parts.communicate(timeout=120)
    time.sleep(3)  # runs of the killed one see that it is gone, and end
    assert not (place / "parts" / "README.md").exists()
    again = subprocess.run(command("parts"), capture_output=True, check=True, timeout=900)
    assert json.loads(again.stdout)["metrics"] == whole["metrics"]


@pytest.mark.slow
def test_a_study_of_real_runs_goes_on_after_being_stopped_at_any_moment(place: Path) -> None:
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
