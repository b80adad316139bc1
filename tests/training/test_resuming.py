"""A run interrupted in any way and resumed ends in the same weights, to the last bit."""

import hashlib
import itertools
import json
import math
import multiprocessing
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from interrupting import KillAt, KillError, SignalAt, WaitAt, assert_same_run, full_disk, wait_until
from tiny_recipe import tiny_recipe
from triptych.errors import DataError, TriptychError, UsageError
from triptych.running.text import TokenizerPair
from triptych.training import Recipe, read_recipe, resolve, runs
from triptych.training.corpora.generated import generate_pairs
from triptych.training.metrics import read_metrics
from triptych.training.progress import LineDisplay
from triptych.training.recipe import MaskingSpec
from triptych.training.runs import prepare
from triptych.training.sections import LanguageValidationConfig
from triptych.training.state import Counters, read_counters, save_or_explain

_STEPS = 12
_VALIDATE_EVERY = 4


def recipe_tree(*, bleu: bool = True, **training: object) -> dict[str, object]:
    """Small enough for a test, with all on that a resumed run must restore; BLEU takes half the time."""
    tree = tiny_recipe(
        100,
        12,
        model={"dropout": 0.2, "encoder": {"num_layers": 1, "attention": {"dropout": 0.1}}},
        training={
            "max_steps": _STEPS,
            "accumulate_batches": 2,
            "learning_rate": 0.01,
            "warmup_steps": 3,
            "clip_norm": 1.0,
            "save_every_steps": 3,
            "log_every_steps": 4,
            "average_last": 2,
            "threads": 1,
            **training,
        },
        validation={"every_steps": _VALIDATE_EVERY, "max_sentences": 3, "bleu": bleu},
        decoding={"beam_size": 2, "max_extra_tokens": 5},
    )
    return {**tree, "seed": 5}


def small_recipe(**options: Any) -> Recipe:
    return resolve(recipe_tree(**options))


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    runs.train(small_recipe(), folder, LineDisplay())
    return folder


def test_the_same_seed_gives_the_same_run_to_the_last_bit(uninterrupted: Path, tmp_path: Path) -> None:
    runs.train(small_recipe(), tmp_path / "run", LineDisplay())
    assert_same_run(tmp_path / "run", uninterrupted)


def test_two_threads_give_the_same_run_every_time(tmp_path: Path) -> None:
    for name in ("one", "other"):
        # Of two threads on busy cores one waits for the other: few steps.
        runs.train(small_recipe(bleu=False, threads=2, max_steps=2), tmp_path / name, LineDisplay())
    assert_same_run(tmp_path / "one", tmp_path / "other")


def test_another_seed_gives_another_run(tmp_path: Path) -> None:
    recipe = small_recipe(bleu=False, max_steps=2).model_copy(update={"seed": 6})
    losses = set()
    for name in ("one", "other"):
        runs.train(recipe, tmp_path / name, LineDisplay())
        losses.add(runs.validate(tmp_path / name)["valid_loss"])
        recipe = recipe.model_copy(update={"seed": 7})
    assert len(losses) == 2


def test_the_run_crosses_epochs_so_that_resuming_is_tested_in_mid_epoch(uninterrupted: Path) -> None:
    counters = read_counters(uninterrupted / "state")
    assert counters.step == _STEPS
    assert counters.epoch >= 1
    assert counters.batch > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("stop_at", [1, 4, 5, 11])
def test_a_run_stopped_by_a_signal_and_resumed_is_bit_identical(
    uninterrupted: Path, tmp_path: Path, stop_at: int
) -> None:
    folder = tmp_path / "run"
    outcome = runs.train(small_recipe(), folder, SignalAt(stop_at, signal.SIGINT)).outcome
    assert outcome.signal_number == signal.SIGINT
    assert outcome.counters.step == stop_at
    assert runs.resume(folder, (), LineDisplay()).outcome.signal_number is None
    assert_same_run(folder, uninterrupted)


def test_a_killed_process_resumes_to_bit_identical_weights(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    _write_recipe(tmp_path / "recipe.toml")
    process = _start(tmp_path, "train", "recipe.toml", "--out", str(folder))
    _wait_until(lambda: _saved_step(folder) >= 3, process)
    process.kill()
    process.communicate()
    assert _saved_step(folder) < _STEPS - 2, "the process was too fast to be killed in the middle"
    with pytest.raises(KillError):
        runs.resume(folder, (), KillAt(_STEPS - 1))
    runs.resume(folder, (), LineDisplay())
    assert_same_run(folder, uninterrupted)


def _save_for_ever(path: Path) -> None:
    for step in itertools.count():
        numbers = {"numbers": torch.zeros(10 + 1000 * (step % 2))}  # another size each time
        save_or_explain(numbers, path, {"counters": json.dumps(asdict(Counters(step=step)))})


def test_where_a_run_stands_can_be_read_while_it_saves(tmp_path: Path) -> None:
    path = tmp_path / "last.safetensors"
    saving = multiprocessing.get_context("fork").Process(target=_save_for_ever, args=(path,), daemon=True)
    saving.start()
    try:
        while not path.exists():
            assert saving.is_alive()
        steps = [read_counters(tmp_path).step for _ in range(1000)]
    finally:
        saving.kill()
        saving.join()
    assert steps == sorted(steps)
    assert steps[-1] > steps[0]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signalled_process_saves_says_how_to_go_on_and_exits_with_its_code(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    folder = tmp_path / "run"
    _write_recipe(tmp_path / "recipe.toml", max_steps=100_000)
    process = _start(tmp_path, "train", "recipe.toml", "--out", str(folder))
    _wait_until(lambda: _saved_step(folder) >= 3, process)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    assert f"triptych train --resume {folder}" in errors
    assert "Traceback" not in errors
    stopped = int(errors.split("stopped after step ")[1].split(",")[0].replace(",", ""))
    assert _saved_step(folder) == stopped


def test_resuming_with_other_text_is_refused_and_named(tmp_path: Path) -> None:
    for name in ("train.de", "train.en", "valid.de", "valid.en"):
        (tmp_path / name).write_text("\n".join(f"{name[:5]} Zeile {i} hier" for i in range(40)) + "\n")
    tree = recipe_tree()
    tree["data"] = {
        part: {"source": str(tmp_path / f"{part}.de"), "target": str(tmp_path / f"{part}.en")}
        for part in ("train", "valid")
    } | {"cache": ""}
    runs.train(resolve(tree), tmp_path / "run", SignalAt(4, signal.SIGTERM))
    for changed, named in (
        ("train.de", "the training text (data.train)"),
        ("valid.de", "the validation text (data.valid)"),
        ("valid.en", "the validation text (data.valid)"),
    ):
        text = (tmp_path / changed).read_text()
        # The last line alone, by one letter.
        (tmp_path / changed).write_text(text.removesuffix("hier\n") + "Hier\n")
        with pytest.raises(TriptychError) as refused:
            runs.resume(tmp_path / "run", (), LineDisplay())
        message = str(refused.value)
        assert f"changed since the run began: {named}; put back" in message
        assert "\n" not in message
        (tmp_path / changed).write_text(text)
    assert runs.resume(tmp_path / "run", (), LineDisplay()).outcome.counters.step == _STEPS


def test_resuming_with_another_way_to_validate_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    runs.train(small_recipe(), folder, SignalAt(4, signal.SIGTERM))
    recipe = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(recipe.replace("max_sentences = 3", "max_sentences = 4"))
    with pytest.raises(TriptychError, match=r"changed since the run began: how it is validated"):
        runs.resume(folder, (), LineDisplay())


def test_a_new_field_leaves_fingerprints_of_runs_begun_before_as_they_are() -> None:
    """Bytes that version 0.9 hashed: a field that joins a section goes into its `later_fields`."""
    recipe = resolve(tiny_recipe(100, 12, validation={"every_steps": 4, "max_sentences": 3}))
    validation = recipe.validation
    assert validation.to_fingerprint(excluded={"every_steps"}) == (
        b'{"metric":"loss","bleu":false,"max_sentences":3,"beam_size":1}'
    )
    chosen = validation.model_copy(update={"bleu_tokenize": "zh"})
    assert b'"bleu_tokenize":"zh"' in chosen.to_fingerprint()
    assert recipe.decoding.model_dump_json(include={"alpha", "max_extra_tokens"}) == (
        '{"alpha":0.6,"max_extra_tokens":50}'
    )
    assert LanguageValidationConfig().to_fingerprint() == (
        b'{"every_steps":500,"sample_tokens":0,"sample_prompt":""}'
    )
    assert MaskingSpec().model_dump_json() == '{"share":0.15,"masked":0.8,"random":0.1,"whole_words":false}'
    model = recipe.model.model_dump_json().encode()
    assert hashlib.sha256(model).hexdigest()[:16] == "4c8a17d90de713b6"


def test_the_best_is_chosen_by_loss_while_bleu_is_noise_and_the_card_says_so(tmp_path: Path) -> None:
    tree = recipe_tree()
    tree["validation"] = {"every_steps": _VALIDATE_EVERY, "max_sentences": 3, "metric": "bleu"}
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    summary = runs.train(resolve(tree), whole, LineDisplay())
    counters = summary.outcome.counters
    losses = {
        record["step"]: record["valid_loss"]
        for record in read_metrics(whole / "metrics.jsonl")
        if "valid_loss" in record
    }
    assert (counters.best_by, counters.best_score) == ("loss", -min(losses.values()))
    assert losses[counters.best_step] == min(losses.values())
    assert summary.figures()["best_by"] == "loss"
    card = (whole / "README.md").read_text()
    why = "(BLEU decides once the 95 % interval of BLEU lies above 5)"
    assert f"Best validation, chosen by loss {why}: " in card
    runs.train(resolve(tree), stopped, SignalAt(_VALIDATE_EVERY + 1, signal.SIGTERM))
    assert runs.resume(stopped, (), LineDisplay()).outcome.counters.best_by == "loss"
    assert_same_run(stopped, whole)


def test_what_was_chosen_is_said_stored_and_not_chosen_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tree = recipe_tree()
    tree["training"] = {"max_steps": 4, "threads": 1, "save_every_steps": 3}
    del tree["tokenizer"]
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    runs.train(resolve(tree), whole, LineDisplay())
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("left out of")]
    assert "tokenizer.vocab_size = " in line
    assert "training.batch_tokens = 512" in line
    stored = read_recipe(whole / "recipe.toml")
    assert stored.training.batch_tokens == 512
    runs.train(resolve(tree), stopped, SignalAt(2, signal.SIGTERM))
    before = (stopped / "recipe.toml").read_text()
    runs.resume(stopped, (), LineDisplay())
    assert (stopped / "recipe.toml").read_text() == before
    assert_same_run(stopped, whole)


def test_resuming_keeps_the_recipe_but_may_go_on_longer(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    runs.train(small_recipe(bleu=False, max_steps=2), folder, LineDisplay())
    with pytest.raises(UsageError, match=r"training\.learning_rate.*only.*max_steps"):
        runs.resume(folder, ("training.learning_rate=1",), LineDisplay())
    outcome = runs.resume(folder, ("training.max_steps=3",), LineDisplay()).outcome
    assert outcome.counters.step == 3


def test_a_folder_that_holds_a_run_is_not_overwritten(uninterrupted: Path) -> None:
    before = (uninterrupted / "model.safetensors").read_bytes()
    with pytest.raises(UsageError, match="already has a run"):
        runs.train(small_recipe(), uninterrupted, LineDisplay())
    assert (uninterrupted / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("exists", [False, True], ids=["new", "empty"])
@pytest.mark.parametrize("finished", [True, False], ids=["finished", "training"])
def test_of_two_that_train_into_one_folder_the_slower_harms_nothing(
    finished: bool, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The quicker one begins, or finishes, while the slower reads its text."""
    folder = tmp_path / "run"
    if exists:
        folder.mkdir()
    at_step, go_on = threading.Event(), threading.Event()
    quicker = WaitAt(3, at_step, go_on)
    pool, before = ThreadPoolExecutor(1), dict[Path, bytes]()

    def slowly(*given: Any) -> Any:
        monkeypatch.undo()
        done.append(pool.submit(runs.train, small_recipe(bleu=False, max_steps=6), folder, quicker))
        if finished:
            go_on.set()
            done[0].result(60)
        assert at_step.wait(60)
        before.update({path: path.read_bytes() for path in folder.rglob("*") if path.is_file()})
        return prepare(*given)

    done = list[Future[Any]]()
    monkeypatch.setattr("triptych.training.runs.prepare", slowly)
    with pool:
        try:
            said = "already has a run" if finished else "another process is at work in this folder"
            with pytest.raises(UsageError, match=said):
                runs.train(
                    small_recipe(bleu=False, max_steps=2, learning_rate=0.02),
                    folder,
                    LineDisplay(),
                    force=True,
                )
            assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
        finally:
            go_on.set()
        assert done[0].result(60).outcome.counters.step == 6
    assert runs.validate(folder)["valid_loss"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_resuming_where_there_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has no run to resume"):
        runs.resume(tmp_path, (), LineDisplay())


def test_a_damaged_state_is_named(uninterrupted: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    runs.train(small_recipe(bleu=False, max_steps=3), folder, LineDisplay())
    state = folder / "state" / "last.safetensors"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(TriptychError, match=r"last\.safetensors is damaged"):
        runs.resume(folder, (), LineDisplay())


def test_a_loss_that_is_not_finite_stops_with_step_lines_and_rate_and_keeps_the_last_state(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    # At this rate the first update makes weights so large that the next loss overflows.
    recipe = small_recipe(bleu=False, learning_rate=1e30, warmup_steps=1, clip_norm=0.0, save_every_steps=1)
    with pytest.raises(TriptychError) as caught:
        runs.train(recipe, folder, LineDisplay())
    message = str(caught.value)
    assert re.search(r"step 2: the (loss|gradient's norm) is (nan|inf) at learning rate", message)
    lines = re.search(r"batch of lines ([\d, ]+)", message)
    assert lines is not None
    assert all(1 <= int(line) <= 100 for line in lines[1].split(",") if line.strip())
    assert "the state of step 1 is kept" in message
    assert read_counters(folder / "state").step == 1
    tensors = load_file(folder / "state" / "last.safetensors")
    assert all(bool(value.isfinite().all()) for value in tensors.values() if value.is_floating_point())


def test_a_full_disk_leaves_the_state_before_it_whole(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the full disk: writes fail in mid-file."""
    folder = tmp_path / "run"
    runs.train(small_recipe(), folder, SignalAt(4, signal.SIGTERM))
    state = folder / "state" / "last.safetensors"
    before = state.read_bytes()
    with (
        full_disk(len(before) // 2),
        pytest.raises(TriptychError, match=r"could not be saved.*then resume the run"),
    ):
        runs.resume(folder, (), LineDisplay())
    assert state.read_bytes() == before
    assert not list(folder.rglob("*.tmp"))


def test_early_stopping_ends_a_run_that_no_longer_improves(tmp_path: Path) -> None:
    # A rate this small changes nothing that shows in the loss, and a huge one makes it worse.
    recipe = small_recipe(
        bleu=False, max_steps=400, learning_rate=0.5, warmup_steps=1, early_stopping=2, clip_norm=0.0
    )
    outcome = runs.train(recipe, tmp_path / "run", LineDisplay()).outcome
    assert outcome.counters.step < 400
    assert outcome.counters.validations_since_best == 2
    assert outcome.counters.step == outcome.counters.best_step + 2 * _VALIDATE_EVERY


def test_a_validation_has_perplexity_and_bits_per_byte_of_the_target_side(uninterrupted: Path) -> None:
    last = [r for r in read_metrics(uninterrupted / "metrics.jsonl") if "valid_loss" in r][-1]
    targets = [target for _, target in generate_pairs(12, "valid", 0)]
    (tokenizer,) = {TokenizerPair.load(uninterrupted).target}
    num_tokens = sum(len(ids) + 1 for ids in tokenizer.encode(targets))
    num_bytes = sum(len(target.encode()) for target in targets)
    nats = last["valid_loss"] * num_tokens
    assert last["valid_bits_per_byte"] == pytest.approx(nats / num_bytes / math.log(2))
    assert last["valid_perplexity"] == pytest.approx(math.exp(last["valid_loss"]))


def test_max_epochs_ends_a_run(tmp_path: Path) -> None:
    outcome = runs.train(
        small_recipe(bleu=False, max_steps=10_000, max_epochs=1), tmp_path / "run", LineDisplay()
    ).outcome
    assert (outcome.counters.epoch, outcome.counters.batch) == (1, 0)
    assert 1 < outcome.counters.step < 100


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path) -> None:
    for name, training in (
        ("epochs", {"max_epochs": 1}),
        ("off", {"max_steps": 3}),
        ("steps", {"max_steps": 4}),
    ):
        folder = tmp_path / name
        step = runs.train(small_recipe(bleu=False, **training), folder, LineDisplay()).outcome.counters.step
        before = {
            path: path.read_bytes() for path in (folder / "model.safetensors", folder / "metrics.jsonl")
        }
        assert runs.resume(folder, (), LineDisplay()).outcome.counters.step == step
        for path, content in before.items():
            assert path.read_bytes() == content, f"{name}: {path.name} changed"


@pytest.mark.slow
def test_a_run_killed_before_its_first_step_resumes_from_any_folder(
    uninterrupted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KillError):
        runs.train(small_recipe(), folder, KillAt(1))
    assert read_counters(folder / "state").step == 0
    (folder / "state" / ".last.safetensors.half.tmp").write_bytes(b"left by the kill")
    monkeypatch.chdir(tmp_path)
    runs.resume(folder, (), LineDisplay())
    assert_same_run(folder, uninterrupted)
    assert not list(folder.rglob("*.tmp"))


def test_relative_paths_are_found_again_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a.de", "a.en"):
        (tmp_path / name).write_text("\n".join(f"{name} Zeile {i} hier" for i in range(40)) + "\n")
    tree = recipe_tree(bleu=False, max_steps=6)
    spec = {"source": "a.de", "target": "a.en"}
    tree["data"] = {"train": spec, "valid": spec, "cache": ""}
    monkeypatch.chdir(tmp_path)
    runs.train(resolve(tree), Path("run"), SignalAt(2, signal.SIGTERM))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert runs.resume(tmp_path / "run", (), LineDisplay()).outcome.counters.step == 6


def test_the_average_is_the_mean_of_the_last_checkpoints(uninterrupted: Path) -> None:
    counters = read_counters(uninterrupted / "state")
    assert counters.checkpoints == [_STEPS - _VALIDATE_EVERY, _STEPS]
    kept = sorted((uninterrupted / "state").glob("checkpoint-*.safetensors"))
    assert len(kept) == 2
    first, second = (load_file(path) for path in kept)
    final = load_file(uninterrupted / "model.safetensors")
    best = load_file(uninterrupted / "state" / "best.safetensors")
    mean = {key: ((first[key].double() + second[key].double()) / 2).float() for key in first}
    is_mean = all(torch.equal(final[key], mean[key]) for key in final)
    is_best = all(torch.equal(final[key], best[key]) for key in final)
    assert is_mean != is_best
    assert counters.best_by == "loss"
    chosen = read_metrics(uninterrupted / "metrics.jsonl")[-1]["average_valid_loss"]
    assert is_mean == (-chosen >= (counters.best_score or 0))


@pytest.mark.slow
def test_accumulated_batches_learn_like_one_large_batch(tmp_path: Path) -> None:
    """Without dropout, how the tokens of an update are cut into batches must not matter."""
    losses = []
    for name, batch_tokens, accumulate in (("one", 10**6, 1), ("many", 300, 1000)):
        tree = recipe_tree(
            bleu=False,
            batch_tokens=batch_tokens,
            accumulate_batches=accumulate,
            max_steps=6,
            log_every_steps=1,
        )
        tree["model"] = {**tree["model"], "dropout": 0.0, "encoder": {"num_layers": 1}}  # type: ignore[dict-item]
        tree["data"] = {**tree["data"], "train": {"generated": 60, "generated_part": "train"}}  # type: ignore[dict-item]
        runs.train(resolve(tree), tmp_path / name, LineDisplay())
        records = read_metrics(tmp_path / name / "metrics.jsonl")
        losses.append([record["loss"] for record in records if "loss" in record])
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)
    assert losses[0][-1] < losses[0][0]


def _write_recipe(path: Path, **training: object) -> None:
    path.write_text(small_recipe(**training).to_toml())


def _start(folder: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "triptych", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _saved_step(folder: Path) -> int:
    try:
        return read_counters(folder / "state").step
    except DataError:
        return 0


def _wait_until(reached: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    def look() -> bool:
        assert process.poll() is None, process.communicate()[1]
        return reached()

    wait_until(look, 120)
