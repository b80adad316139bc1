"""How the loop comes by its batches."""

import json
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from triptych.core.models import PRESETS, EncoderDecoder
from triptych.running.text import TokenSequences
from triptych.training import Trainer, TrainingConfig, ValidationConfig
from triptych.training.corpora.encoded import EncodedCorpus
from triptych.training.corpora.pair_batches import Batch, TokenBatches
from triptych.training.objectives import TranslationObjective
from triptych.training.progress import LineDisplay
from triptych.training.state import Counters

_VOCAB_SIZE = 20


def make_batches(num_pairs: int) -> TokenBatches:
    generator = np.random.default_rng(0)
    sides = [
        TokenSequences.pack(
            [generator.integers(3, _VOCAB_SIZE, n).tolist() for n in generator.integers(1, 9, num_pairs)]
        )
        for _ in range(2)
    ]
    corpus = EncodedCorpus(*sides, np.arange(num_pairs), "made up")
    return TokenBatches(corpus, max_tokens=30, seed=0, pad_id=0, bos_id=1, eos_id=2)


def make_trainer(folder: Path, **training: object) -> Trainer:
    config = PRESETS["tiny"].model_copy(update={"d_model": 8, "d_ff": 8, "num_heads": 2})
    chosen = TrainingConfig.model_validate({"accumulate_batches": 3, "warmup_steps": 2, **training})
    validation = ValidationConfig(every_steps=1000, bleu=False, metric="loss")
    model = EncoderDecoder.of(config, _VOCAB_SIZE, _VOCAB_SIZE, 0)
    objective = TranslationObjective(model, make_batches(60), make_batches(4), chosen, validation, None)
    return Trainer(chosen, validation.every_steps, objective, folder, Counters())


def test_in_bfloat16_a_run_learns_what_it_does_in_float32(tmp_path: Path) -> None:
    """Did the computing model not follow, every loss after the first would be that of fresh weights."""
    losses: dict[str, list[float]] = {}
    for precision in ("fp32", "bf16"):
        torch.manual_seed(4)
        folder = tmp_path / precision
        folder.mkdir()
        given = {"precision": precision, "learning_rate": 0.03, "max_steps": 4, "log_every_steps": 1}
        make_trainer(folder, **given).run(LineDisplay())
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        losses[precision] = [record["loss"] for record in records if "loss" in record]
    wide, narrow = losses["fp32"], losses["bf16"]
    assert len(wide) == 4
    assert narrow == pytest.approx(wide, rel=0.01)
    assert narrow != wide
    assert wide[-1] < 0.85 * wide[0]


def lines(batches: list[Batch]) -> list[tuple[int, ...]]:
    return [batch.line_numbers for batch in batches]


def makers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "triptych-ahead"]


def test_the_counters_stand_where_the_batches_used_end_not_those_made(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_epochs=3)
    sizes = [len(trainer.objective.train.plan(epoch)) for epoch in range(3)]
    assert sizes[0] % 3 != 0, "the last update of an epoch must be a smaller one"
    found = []
    for update in trainer._updates():
        found.append((trainer.counters.epoch, trainer.counters.batch, len(update)))
    expected = [
        (epoch, min(start + 3, size), min(3, size - start))
        for epoch, size in enumerate(sizes)
        for start in range(0, size, 3)
    ]
    assert found == expected
    assert (trainer.counters.epoch, trainer.counters.batch) == (3, 0)
    assert not makers()


def test_a_trainer_goes_on_with_the_batches_that_another_left(tmp_path: Path) -> None:
    whole = [lines(list(update)) for update in make_trainer(tmp_path, max_epochs=2)._updates()]
    for taken in range(1, len(whole) + 1):
        first, second = (make_trainer(tmp_path, max_epochs=2) for _ in range(2))
        updates = first._updates()
        begun = [lines(list(next(updates))) for _ in range(taken)]
        updates.close()
        second.counters.epoch, second.counters.batch = first.counters.epoch, first.counters.batch
        assert begun + [lines(list(update)) for update in second._updates()] == whole


def test_a_run_leaves_no_thread_behind_however_it_ends(tmp_path: Path) -> None:
    make_trainer(tmp_path, max_steps=2).run(LineDisplay())
    assert not makers()
    trainer = make_trainer(tmp_path, max_steps=20)

    def fail(batches: object) -> tuple[float, int]:
        raise ZeroDivisionError

    trainer._update = fail  # type: ignore[assignment, method-assign]
    with pytest.raises(ZeroDivisionError):
        trainer.run(LineDisplay())
    assert not makers()


def test_batches_are_page_locked_for_a_gpu_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, ...]] = []

    def note(batch: Batch) -> Batch:
        pinned.append(batch.line_numbers)
        return batch

    monkeypatch.setattr(Batch, "pinned", note)
    trainer = make_trainer(tmp_path)
    next(trainer._batches_from(0, 0))
    assert pinned == []
    trainer.device = torch.device("cuda")
    _, _, batches = next(trainer._batches_from(0, 0))
    assert pinned == lines(list(batches))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs a CUDA device")
def test_a_page_locked_batch_holds_the_same_ids() -> None:
    batches = make_batches(20)
    batch = batches.collate(batches.plan(0)[0])
    pinned = batch.pinned()
    for name in ("src", "tgt_in", "tgt_out"):
        assert getattr(pinned, name).is_pinned()
        torch.testing.assert_close(getattr(pinned, name), getattr(batch, name))
    assert pinned.line_numbers == batch.line_numbers


@pytest.mark.parametrize(("seconds_a_batch", "said"), [(0.001, False), (10_000.0, True)])
def test_a_plan_longer_than_a_day_says_so_and_what_would_shorten_it(
    seconds_a_batch: float, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tmp_path, max_steps=50)
    monkeypatch.setattr(trainer, "measure_seconds", lambda batch: seconds_a_batch)
    plan = trainer.describe_plan()
    assert plan.startswith("plan: 50 steps, ")
    assert "\n" not in plan
    assert ("longer than a day" in plan) == ("training.max_steps" in plan) == said
    assert (" days" in plan) == said


def test_the_plan_of_a_finished_run_is_empty(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, max_steps=50)
    trainer.counters.step = 50
    assert trainer.describe_plan() == ""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_measuring_leaves_weights_gradients_and_random_numbers_alone(precision: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, precision=precision)
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    random = torch.get_rng_state()
    batch = trainer.objective.train.collate(trainer.objective.train.plan(0)[0])
    assert trainer.measure_seconds(batch) > 0
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


@pytest.mark.parametrize("rates", [[2e9, 5e9], [5e9, 2e9]], ids=["busy at the start", "busy later"])
def test_the_rate_of_products_is_the_best_that_was_measured_until_now(
    rates: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = iter(rates)
    monkeypatch.setattr("triptych.training.loop.measure_peak", lambda device, dtype: next(measured))
    trainer = make_trainer(tmp_path, max_steps=1)
    trainer.measure_seconds(trainer.objective.train.collate(trainer.objective.train.plan(0)[0]))
    trainer.run(LineDisplay())
    assert trainer.peak == 5e9
