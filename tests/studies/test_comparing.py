"""A study from its file to its report, where a stand-in makes the runs."""

import json
import os
import re
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.study_results import judged_again, read_runs_csv

from studying import CUT, STUDY
from triptych.errors import UsageError
from triptych.rewriting.recipe import read_rewrite_recipe
from triptych.seeing.reports import CurveChart, Report, Table
from triptych.training.studies import (
    Outcome,
    StudyProgress,
    StudyStoppedError,
    compare_study,
    read_study,
    write_study_page,
    write_study_pictures,
)
from triptych.training.studies import (
    parallel_runs as running,
)
from triptych.training.studies import (
    study_pages as pages,
)
from triptych.training.studies.comparing import NOISE
from triptych.training.studies.tables import (
    conclusions,
    curves_csv,
    figures,
    headed,
    markdown,
    runs_csv,
    sweep_csv,
    verdict,
)


def made(place: Path, out: str = "out") -> Outcome:
    return compare_study(read_study(place / "study.toml"), place / out, origin=place)


def change(place: Path, old: str, new: str) -> None:
    text = (place / "study.toml").read_text()
    assert old in text
    (place / "study.toml").write_text(text.replace(old, new))


def test_a_planted_difference_is_found_and_the_report_says_so(place: Path, stand_in: Path) -> None:
    change(place, "seeds = 3", "seeds = 6")
    outcome = made(place)
    assert outcome.results.keys() == {"factored", NOISE, "shared"}
    assert {seed for runs in outcome.results.values() for seed in runs} == {1, 2, 3, 4, 5, 6}
    (line,) = conclusions(outcome)
    assert line.startswith("shared: better by -0.5000")
    record = json.loads(json.dumps(figures(outcome), allow_nan=False))
    shared = record["metrics"]["loss"]["differences"]["shared"]
    assert (shared["is_seen"], shared["exact_p"]) == (True, 2 / 2**6)
    assert "| shared |" in markdown(outcome)
    assert "There is one comparison, so p is not corrected" in markdown(outcome)
    assert runs_csv(outcome).count("\n") == 1 + 18
    assert read_runs_csv(runs_csv(outcome)) == outcome.results
    assert curves_csv(outcome).splitlines()[1:3] == [
        "factored,1,2.0,128.0,0.2,2.041",
        "factored,1,4.0,256.0,0.4,2.041",
    ]
    pytest.importorskip("vl_convert")
    differences, curves = write_study_pictures(outcome, place)
    assert "loss: difference to factored" in differences.read_text()
    assert "Validation loss against updates" in curves.read_text()
    write_study_page(outcome, place / "page.html")
    page = (place / "page.html").read_text()
    # Every variant takes as many tokens and seconds for an update: over them the curves are the same picture.
    for axis, is_drawn in (("updates", True), ("target tokens", False), ("seconds of training", False)):
        assert (f"Validation loss against {axis}" in page) == is_drawn, axis
    # The answer, its table, and one chart; a chart of two points is no chart.
    parts = ("better than factored: shared.", ">loss (lower is better)<", ">Validation loss against updates<",
             "shared: better by", ">loss: difference to factored<", ">What it costs<")  # fmt: skip
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert "loss against parameters" not in page
    assert "http" not in page.split('<script type="module">')[0].replace("http://www.w3.org", "")


def test_the_verdict_names_better_and_worse_variants_and_those_without_a_difference(
    place: Path, stand_in: Path
) -> None:
    outcome = made(place)
    (result, *_) = outcome.results["factored"].values()
    added = {
        "factored": 0.0,
        "shared": -0.5,
        "slow": 0.5,
        **{f"same-{number}": 0.0 for number in range(1, 7)},
    }
    seeds = range(1, 13)
    noise = {name: (-1) ** place * 0.1 * name.startswith("same") for place, name in enumerate(added)}
    results = {
        name: {
            seed: replace(result, figures={"loss": 2 + 0.01 * seed + more + (-1) ** seed * noise[name]})
            for seed in seeds
        }
        for name, more in added.items()
    }
    assert verdict(replace(outcome, results=results)) == (
        "By loss over 12 seeds, better than factored: shared; worse than factored: slow; "
        "no difference to factored seen: same-1, same-2, same-3, same-4 and 2 more."
    )
    alone = {"factored": results["factored"]}
    assert verdict(replace(outcome, results=alone)) == "No variant has runs to compare with factored."


def test_seeds_that_cannot_show_a_difference_are_said_before_the_runs_and_below_the_table(
    place: Path, stand_in: Path
) -> None:
    said: list[str] = []
    outcome = compare_study(read_study(place / "study.toml"), place / "out", origin=place, say=said.append)
    warning = "3 seeds cannot show a difference: before correction the exact p is at least 0.25. With 1 comp"
    assert said[0].startswith(warning)
    assert warning in markdown(outcome)
    (line,) = conclusions(outcome)
    assert line.startswith("shared: no difference seen (-0.5000")
    assert "exact p = 0.25, Student's " in line


def test_tables_are_judged_again_from_the_raw_runs_alone(place: Path, stand_in: Path) -> None:
    outcome = made(place)
    report = markdown(outcome)
    bare = Outcome(outcome.study, place, {}, read_runs_csv(runs_csv(outcome)), {}, 0.0)
    assert judged_again(bare, report.replace("-0.5000", "-0.6000")) == report


def test_a_cell_of_a_report_is_one_cell_whatever_it_says(place: Path, stand_in: Path) -> None:
    markdown_it = pytest.importorskip("markdown_it")
    cells = ("a|b", r"a\|b", "a\\", r"\|", "|", "two\nlines", "plain")
    columns = tuple(f"column {number}" for number in range(len(cells)))
    shown = headed(made(place), [Table("Odd names", columns, (cells,))])
    page = markdown_it.MarkdownIt("commonmark").enable("table").render("\n".join(shown))
    assert re.findall("<td>(.*)</td>", page) == [cell.replace("\n", r"\n") for cell in cells]


def test_recipes_of_a_seed_differ_in_nothing_but_the_variant(place: Path, stand_in: Path) -> None:
    made(place)
    lines = {
        name: set((place / f"out/runs/{name}-seed-2.toml").read_text().splitlines())
        for name in ("factored", "shared", "baseline-again")
    }
    assert {line.split(" =")[0] for line in lines["factored"] ^ lines["shared"]} == {
        "name",
        "projections",
        "d_ff",
    }
    assert {line.split(" =")[0] for line in lines["factored"] ^ lines["baseline-again"]} == {"name", "seed"}
    assert {"seed = 2", "data_seed = 2", 'initial_values = "by_name"'} <= lines["factored"]


def test_what_is_told_has_every_run_with_its_variant_and_result(place: Path, stand_in: Path) -> None:
    told: list[tuple[str, StudyProgress]] = []
    outcome = compare_study(
        read_study(place / "study.toml"), place / "out", origin=place, tell=lambda *now: told.append(now)
    )
    stages = {stage for stage, _ in told}
    assert stages == {"runs"}
    last = told[-1][1]
    assert list(last.variants.values()) == ["factored", NOISE, "shared"] * 3
    assert last.done["shared-seed-2"] == outcome.results["shared"][2]


def test_a_launcher_that_leaves_no_process_a_run_is_an_error_and_not_a_wait(
    place: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(place, "seeds = 3", "seeds = 3\njobs.workers = 1")
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="LOCAL_WORLD_SIZE"):
        made(place)


def test_runs_that_are_done_are_not_made_again_and_more_seeds_are(place: Path, stand_in: Path) -> None:
    first = made(place)
    change(place, "seeds = 3", "seeds = 4")
    second = made(place)
    calls = [path.read_text() for path in sorted(place.glob("out/runs/*/calls"))]
    assert calls == ["1"] * 12
    for name, results in first.results.items():
        for seed, result in results.items():
            assert second.results[name][seed] == result


def test_a_wider_sweep_makes_the_runs_again_whose_rate_it_changes(place: Path, stand_in: Path) -> None:
    change(place, "[variants.factored]", "[sweep]\nlearning_rates = [0.004, 0.02]\n[variants.factored]")
    made(place)
    folders = [*place.glob("out/runs/*-seed-*/"), *place.glob("out/sweep/*-0.004/")]
    assert len(folders) == 11  # the baseline twice
    kept = [folder / "kept" for folder in folders]
    for before, after, best in (("0.02]", "0.02, 0.03]", 0.004), ("0.03]", "0.01]", 0.01)):
        for file in kept:
            file.write_text("")
        for recipe in place.glob("out/*/*.toml"):  # another release may write the same in another way
            recipe.write_text(recipe.read_text() + "# the same\n")
        change(place, before, after)
        outcome = made(place)
        assert {one.recipe.training.learning_rate for one in outcome.variants.values()} == {best}
        is_new = best != 0.004
        assert [file.exists() for file in kept] == [not is_new] * 9 + [True] * 2
    assert [path.read_text() for path in place.glob("out/*/*/calls")] == ["1"] * 17
    assert all("learning_rate = 0.01" in path.read_text() for path in place.glob("out/runs/*.toml"))
    change(place, "[sweep]", "[sweep]\nsteps_share = 0.5")
    with pytest.raises(UsageError, match="holds another study"):
        made(place)


def test_a_run_that_fails_is_reported_and_costs_no_other(place: Path, stand_in: Path) -> None:
    change(
        place,
        'projections = "shared"',
        'projections = "shared"\n[variants.bad]\ntraining.learning_rate = 13.0',
    )
    outcome = made(place)
    assert len(outcome.failed) == 3
    assert "exit code 1: the loss is nan" in outcome.failed["bad-seed-1"]
    assert outcome.results["shared"].keys() == {1, 2, 3}


def test_the_sweep_takes_the_rate_with_the_lowest_loss_and_is_paid_for(place: Path, stand_in: Path) -> None:
    change(place, "[variants.factored]", "[sweep]\nlearning_rates = [0.004, 0.02, 13.0]\n[variants.factored]")
    outcome = made(place)
    assert {one.recipe.training.learning_rate for one in outcome.variants.values()} == {0.004}
    assert outcome.sweep_seconds == pytest.approx(4 * 0.4)
    assert {one.recipe.seed for one in outcome.variants.values()} == {1}
    assert "seed = 1000003" in (place / "out/sweep/shared-0.02.toml").read_text()
    report = markdown(outcome)
    low, high = (1.5 + 1000003 * 7919 % 101 / 1000 + more for more in (0.006, 0.01))
    row = f"| shared | {low:.4f} | {high:.4f} | failed | 0.004 | the lowest tried: another may be better |"
    assert row in report
    assert [line.rsplit(",", 1)[0] for line in sweep_csv(outcome).splitlines()[1:4]] == [
        "factored,0.004",
        "factored,0.02",
        "factored,13.0",
    ]
    assert f"{outcome.variants['shared'].swept[0.02]}" in sweep_csv(outcome)


def test_a_rate_of_the_sweep_has_a_run_for_each_of_its_seeds(place: Path, stand_in: Path) -> None:
    change(
        place,
        "[variants.factored]",
        "[sweep]\nlearning_rates = [0.004, 0.02]\nseeds = 2\n[variants.factored]",
    )
    assert made(place).sweep_seconds == pytest.approx(8 * 0.4)
    assert "seed = 1000004" in (place / "out/sweep/shared-0.02-seed-2.toml").read_text()


def test_a_folder_of_another_study_is_refused(place: Path, stand_in: Path) -> None:
    made(place)
    change(place, 'projections = "shared"', 'projections = "key_value"')
    with pytest.raises(UsageError, match="holds another study"):
        made(place)
    (place / "mine").mkdir()
    (place / "mine" / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="is taken"):
        made(place, "mine")


def test_of_two_studies_in_one_folder_one_goes_on(place: Path, stand_in: Path) -> None:
    refused: list[str] = []

    def start_another(stage: str, progress: StudyProgress) -> None:
        if not refused:
            with pytest.raises(UsageError) as caught:
                made(place)
            refused.append(str(caught.value))

    study = read_study(place / "study.toml")
    outcome = compare_study(study, place / "out", origin=place, tell=start_another)
    assert refused == [f"{place / 'out'}: another process is at work in this folder; wait for it or stop it"]
    assert len(outcome.results) == 3


def test_a_study_that_is_stopped_lets_its_runs_save_and_ends_in_the_same_table(
    place: Path, stand_in: Path
) -> None:
    expected = figures(made(place, "undisturbed"))
    (place / "hold").write_text("")

    def stop() -> None:
        deadline = time.monotonic() + 60
        while not list(place.glob("out/runs/*/begun")) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    with pytest.raises(StudyStoppedError, match="the same command goes on") as caught:
        made(place)
    thread.join()
    assert caught.value.exit_code == 128 + signal.SIGTERM
    assert len(list(place.glob("out/runs/*/saved"))) == len(list(place.glob("out/runs/*/begun")))
    (place / "hold").unlink()
    assert figures(made(place)) == expected


def test_a_missing_test_text_is_said_before_anything_is_made(place: Path, stand_in: Path) -> None:
    (place / "study.toml").write_text(STUDY + '[test]\nsource = "gone.en"\ntarget = "gone.de"\n')
    with pytest.raises(UsageError, match=r"\[test\]: .*gone\.en"):
        made(place)
    assert not (place / "out").exists()


def test_bits_per_byte_of_a_text_with_unknown_characters_are_refused_before_a_run_is_made(
    place: Path, stand_in: Path
) -> None:
    asked = 'seeds = 3\nmetrics = ["loss", "bits_per_byte"]'
    change(place, "seeds = 3", asked)
    # The tokenizer is made of the training text, which comes first.
    (place / "text.txt").write_text("the cat sat on the mat.\n" * 40 + "日本語の猫 sat.\n" * 3)
    with pytest.raises(UsageError, match=r"sharing: metrics: .*more than 0\.1% of the validation text"):
        made(place)
    assert not (place / "out").exists()
    change(place, asked, "seeds = 3")
    assert made(place).results.keys() == {"factored", NOISE, "shared"}


@pytest.mark.parametrize(("count", "has_bits"), [(1, True), (2, False)])
def test_bits_per_byte_are_given_up_to_a_thousandth_of_unknown_characters(
    count: int, has_bits: bool, place: Path, stand_in: Path
) -> None:
    change(place, "seeds = 3", 'seeds = 3\nmetrics = ["loss", "bits_per_byte"]')
    recipe = (place / "base.toml").read_text()
    (place / "base.toml").write_text(recipe + '[data.valid]\nfiles = ["valid.txt"]\n')
    (place / "valid.txt").write_text("the cat sat on the mat.\n" * 50 + "猫" * count)
    if has_bits:
        assert made(place).values("bits_per_byte").keys() == {"factored", NOISE, "shared"}
    else:
        with pytest.raises(UsageError, match="no bits per byte"):
            made(place)


@pytest.mark.parametrize("key", ["data.valid.files", "data.train.files"])
def test_bits_per_byte_of_a_variant_with_a_text_of_its_own_are_refused_before_a_run_is_made(
    key: str, place: Path, stand_in: Path
) -> None:
    change(place, "seeds = 3", 'seeds = 3\nmetrics = ["loss", "bits_per_byte"]')
    recipe = (place / "base.toml").read_text()
    (place / "base.toml").write_text(recipe + '[data.valid]\nfiles = ["valid.txt"]\n')
    (place / "valid.txt").write_text("the cat sat on the mat.\n" * 50)
    (place / "other.txt").write_text("日本語の猫 sat.\n" * 50 if "valid" in key else "日本語の猫。\n" * 200)
    study = (place / "study.toml").read_text() + f'\n[variants.elsewhere]\n{key} = ["other.txt"]\n'
    (place / "study.toml").write_text(study)
    with pytest.raises(UsageError, match=r"no bits per byte of variant elsewhere, because more than 0\.1%"):
        made(place)
    assert not (place / "out").exists()


def test_runs_at_a_time_have_a_gpu_each(place: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in.write_text(
        stand_in.read_text().replace(
            "figures = {",
            '(folder / "gpu").write_text(__import__("os").environ["CUDA_VISIBLE_DEVICES"])\nfigures = {',
        )
    )
    gpus = SimpleNamespace(is_available=lambda: True, device_count=lambda: 2)
    monkeypatch.setattr(running, "torch", SimpleNamespace(cuda=gpus))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    change(place, "seeds = 3", "seeds = 3\n[jobs]\nworkers = 2")
    made(place)
    seen = [path.read_text() for path in place.glob("out/runs/*/gpu")]
    assert set(seen) == {"3", "5"}


def test_runs_of_a_variant_are_rewritten_seed_by_seed_once_they_are_trained(
    place: Path, stand_in: Path
) -> None:
    failing = CUT.replace("variants.cut", "variants.refused").replace("rank=2", "rank=2, layers=[9]")
    (place / "study.toml").write_text(STUDY + CUT + failing + "[sweep]\nlearning_rates = [0.01, 0.02]\n")
    outcome = made(place)
    for seed, result in outcome.results["cut"].items():
        parent = outcome.results["factored"][seed]
        assert result.figures["loss"] == pytest.approx(parent.figures["loss"] + 0.25)
        assert result.seconds == parent.seconds
    assert outcome.results["cut"].keys() == outcome.results["shared"].keys() == {1, 2, 3}
    assert outcome.failed.keys() == {f"refused-seed-{seed}" for seed in (1, 2, 3)}
    assert "layer 9 does not exist" in outcome.failed["refused-seed-2"]
    assert {path.name.split("-")[0] for path in place.glob("out/sweep/*.toml")} == {"factored", "shared"}
    (line,) = [line for line in conclusions(outcome) if line.startswith("cut")]
    assert line.startswith("cut: no difference seen (+0.2500")
    text = markdown(outcome)
    assert "Rewritten: cut from factored, refused from factored" in text
    assert read_rewrite_recipe(place / "out/runs/cut-seed-1.toml").step[0].options()["rank"] == 2
    assert figures(made(place)) == figures(outcome)
    calls = {path.parent.name: path.read_text() for path in place.glob("out/runs/*/calls")}
    assert calls["cut-seed-1"] == calls["factored-seed-1"] == "1"
    assert calls["refused-seed-1"] == "11"


def test_a_page_counts_the_training_of_rewritten_runs_once_and_draws_its_curve_once(
    place: Path, stand_in: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.write_text(stand_in.read_text().replace('"seconds": 0.4', '"seconds": 60.0'))
    (place / "study.toml").write_text(STUDY + CUT)
    reports: list[Report] = []
    monkeypatch.setattr(pages, "write_report", lambda report, path: reports.append(report))
    write_study_page(made(place), place / "page.html")
    (report,) = reports
    plots = (*report.lead, *report.plots)
    curves = [plot for plot in plots if isinstance(plot, CurveChart) and plot.x_title == "updates"]
    assert [[name for name, _ in plot.lines] for plot in curves] == [["factored", NOISE, "shared"]]
    assert dict(report.facts)["training"] == "9.0 min in all"  # nine runs of a minute, not twelve


def test_nothing_is_rewritten_of_a_run_that_failed(place: Path, stand_in: Path) -> None:
    text = STUDY + CUT.replace('"factored"', '"bad"') + "[variants.bad]\ntraining.learning_rate = 13.0\n"
    (place / "study.toml").write_text(text)
    outcome = made(place)
    assert outcome.failed.keys() == {f"bad-seed-{seed}" for seed in (1, 2, 3)}
    assert outcome.results.keys() == {"factored", NOISE, "shared"}
    assert "| cut |" in markdown(outcome)


@pytest.mark.parametrize(("workers", "count"), [(2, 2), (4, 3), (1, 3), (8, 3)])
def test_processes_of_a_machine_share_its_runs_at_a_time(
    workers: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    places = list[int]()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
    for rank in range(count):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        places += running.own_places(workers)
    assert places == [*range(workers)]
