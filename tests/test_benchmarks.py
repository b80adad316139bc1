"""The benchmarks' own honesty, without the peers: turns, figures, failures, records, pins."""

import json
import re
import shutil
import sys
from io import StringIO
from pathlib import Path

import pytest
from benchmarks.harness import turns
from benchmarks.harness.figures import exponent, ratio, summarise
from benchmarks.harness.page import Page, show, spread, write
from benchmarks.harness.race import (
    Contender,
    Entry,
    Race,
    Row,
    best_of,
    describe,
    environment_of,
    finalists,
    heats,
)
from benchmarks.harness.turns import turn_order
from rich.console import Console

ROOT = Path(__file__).parents[1]

# Says 100 tokens in so many seconds; or fails where it is told to.
FAKE = """
import sys
from benchmarks.workers.protocol import serve


def prepare(options):
    if options.get("fails") == "at once":
        raise ValueError("no such model")
    print("noise of a library")

    def work(request):
        if options.get("fails") == "later":
            sys.exit("out of memory")
        return {"seconds": options["seconds"] * request["batches"], "tokens": 100}

    return {"parameters": 7}, work


serve(prepare)
"""


@pytest.fixture
def race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Race:
    """A race whose worker "fake" needs neither torch nor peers."""
    workers = tmp_path / "benchmarks" / "workers"
    workers.mkdir(parents=True)
    for folder in (workers.parent, workers):
        (folder / "__init__.py").touch()
    shutil.copy(ROOT / "benchmarks" / "workers" / "protocol.py", workers)
    (workers / "fake.py").write_text(FAKE)
    monkeypatch.setattr(turns, "PAUSE_SECONDS", 0.0)
    return Race(Path(sys.executable), tmp_path, tmp_path / "logs", told={}, tell=lambda line: None)


def test_a_summary_is_the_median_with_its_range() -> None:
    summary = summarise([3.0, 1.0, 2.0])
    assert (summary.median, summary.low, summary.high) == (2.0, 1.0, 3.0)
    assert summary.spread == 1.0
    assert spread(summary) == "2 (1–3)"


def test_a_ratio_compares_only_rounds_that_both_took_part_in() -> None:
    found = ratio({0: 10.0, 1: 30.0, 2: 99.0}, {0: 5.0, 1: 10.0, 7: 1.0})
    assert found is not None
    assert found.samples == (2.0, 3.0)
    assert ratio({0: 1.0}, {1: 1.0}) is None


def test_an_exponent_is_the_slope_on_a_log_log_scale() -> None:
    assert exponent([1, 2, 4], [5.0, 20.0, 80.0]) == pytest.approx(2.0)


def test_every_round_begins_with_another_contender_and_every_second_runs_backwards() -> None:
    assert [turn_order(3, number) for number in range(4)] == [[0, 1, 2], [0, 2, 1], [2, 0, 1], [2, 1, 0]]
    assert turn_order(0, 3) == []


def test_contenders_take_turns_and_one_that_fails_is_a_row_with_its_reason(race: Race) -> None:
    ours = Entry(Contender("triptych", "fake"), {"seconds": 2.0})
    slow = Entry(Contender("slow", "fake"), {"seconds": 4.0})
    absent = Entry(Contender("absent", "fake"), {"fails": "at once"})
    dying = Entry(Contender("dying", "fake"), {"fails": "later"})
    rows = race.final([ours], [slow, absent, dying], {"steps": {"batches": 1}}, rounds=2)["steps"]
    assert [row.contender for row in rows] == ["triptych", "slow", "absent", "dying"]
    assert [row.failed for row in rows] == [
        None,
        None,
        "ValueError: no such model",
        "ended with status 1: out of memory",
    ]
    assert rows[0].rates == {0: 50.0, 1: 50.0}
    behind = rows[1].ratio_of(rows[0])
    assert behind is not None
    assert behind.median == 2.0
    assert rows[2].ratio_of(rows[0]) is None
    assert best_of(rows, "triptych") is rows[0]
    assert best_of(rows, "absent") is None


def test_screening_lays_each_stage_over_the_best_so_far_and_the_fastest_goes_on(race: Race) -> None:
    stages = (
        ({"seconds": 4.0}, {"seconds": 2.0}, {"fails": "at once"}),
        ({"compiled": False}, {"compiled": True}),
    )
    contender = Contender("peer", "fake", stages=stages)
    tried = race.screen(contender, {"batches": 1})
    assert [row.options for row in tried] == [
        {"seconds": 4.0},
        {"seconds": 2.0},
        {"fails": "at once"},
        {"seconds": 2.0, "compiled": False},
        {"seconds": 2.0, "compiled": True},
    ]
    assert [entry.options for entry in finalists(contender, tried)] == [tried[1].options, tried[3].options]


def test_a_contender_that_never_worked_goes_on_to_fail_in_the_table() -> None:
    contender = Contender("peer", "fake")
    tried = [Row("peer", {"a": "b"}, failed="no"), Row("peer", {"a": "c"}, failed="no")]
    assert [entry.options for entry in finalists(contender, tried)] == [{"a": "b"}]


def test_heats_fit_the_memory_and_ours_is_in_each() -> None:
    entries = [Entry(Contender(name, "fake"), {}, 4.0) for name in ("ours", "a", "b", "c")]
    found = heats(entries[:1], entries[1:], room_mb=12.0)
    assert [[entry.contender.name for entry in heat] for heat in found] == [["ours", "a", "b"], ["ours", "c"]]


def test_a_setting_becomes_words_and_variables() -> None:
    options = {"precision": "fp32", "allocator": "malloc: no mmap", "compiled": True, "threads": 2}
    assert describe(options) == "fp32, malloc: no mmap, compiled, threads 2"
    variables = environment_of(options)
    assert variables["MALLOC_MMAP_MAX_"] == "0"
    assert variables["OMP_NUM_THREADS"] == "2"


def test_the_record_says_on_what_machine_and_with_what_versions(tmp_path: Path) -> None:
    page = Page(
        "training", "Training", ("contender", "setting", "rate"), [["a", "b", "1"]], ["note"], {"x": 1}
    )
    show(page, Console(file=StringIO()))
    path = write(page, tmp_path / "results", root=ROOT, python=Path(sys.executable), how={"rounds": 3})
    record = json.loads(path.read_text())
    assert record["x"] == 1
    assert record["how"] == {"rounds": 3}
    assert record["machine"]["cores"] >= 1
    assert isinstance(record["machine"]["flags"], list)
    assert "torch" in record["versions"]
    assert set(record["code"]) == {"commit", "dirty"}
    assert record["date"].startswith("20")


def _pins(path: Path) -> dict[str, str]:
    """Names as pip compares them, with what stands behind ==; every line must have that."""
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    pairs = [re.fullmatch(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.+!]+)", line) for line in lines]
    assert None not in pairs, [line for line, pair in zip(lines, pairs, strict=True) if pair is None]
    return {re.sub(r"[-_.]+", "-", pair[1]).lower(): pair[2] for pair in pairs if pair}


def test_the_peers_are_pinned_to_the_last_version_and_agree_with_the_constraints() -> None:
    peers, own = _pins(ROOT / "benchmarks" / "peers.txt"), _pins(ROOT / "constraints.txt")
    assert {"torch", "transformers", "x-transformers", "ctranslate2", "eole", "joeynmt"} <= peers.keys()
    assert {name: own[name] for name in peers.keys() & own.keys()} == {
        name: peers[name] for name in peers.keys() & own.keys()
    }
