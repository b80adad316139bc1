"""Runs of language models: what they learn, and that a run interrupted in any way ends in the same bits."""

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import triptych
from interrupting import SignalAt, assert_same_run
from tiny_recipe import text_tree
from triptych.core.models import read_model
from triptych.core.models.architecture import HeadConfig
from triptych.core.models.language_model import LanguageModelHead
from triptych.errors import DataError, TriptychError, UsageError
from triptych.running.opening import open_language_model
from triptych.training import LanguageRecipe, resolve, runs
from triptych.training.losses import head_loss
from triptych.training.metrics import read_metrics
from triptych.training.progress import LineDisplay
from triptych.training.state import read_counters

_STEPS = 12
LINES = [f"the {colour} {animal} sat on mat {i}" for i, (colour, animal) in enumerate(
    [(c, a) for c in ("red", "blue", "old", "tiny") for a in ("cat", "dog", "owl", "hen", "fox")] * 6
)]  # fmt: skip


def recipe_of(folder: Path, task: str = "language-model", **sections: dict[str, object]) -> LanguageRecipe:
    given: dict[str, dict[str, Any]] = {
        "model": {"dropout": 0.1},
        "training": {"max_steps": _STEPS, "save_every_steps": 3, "log_every_steps": 2, "optimizer": "muon",
                     "average_last": 2},
        "validation": {"every_steps": 4},
    }  # fmt: skip
    given = {name: {**given.get(name, {}), **sections.get(name, {})} for name in (given | sections)}
    tree = {"seed": 3, **text_tree(folder, LINES, task, **given)}
    recipe = resolve(tree)
    assert isinstance(recipe, LanguageRecipe)
    return recipe


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A whole run of each task, by its name, in folders `run` beside their text."""
    found = {}
    for task in ("language-model", "masked-language-model"):
        folder = tmp_path_factory.mktemp(task)
        runs.train(recipe_of(folder, task), folder / "run", LineDisplay())
        found[task] = folder / "run"
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("task", ["language-model", "masked-language-model"])
@pytest.mark.parametrize("stop_at", [4, 7])
def test_a_run_stopped_by_a_signal_and_resumed_is_bit_identical(
    task: str, stop_at: int, finished: dict[str, Path], tmp_path: Path
) -> None:
    whole = finished[task]
    recipe = recipe_of(whole.parent, task)
    outcome = runs.train(recipe, tmp_path / "run", SignalAt(stop_at, signal.SIGINT)).outcome
    assert (outcome.signal_number, outcome.counters.step) == (signal.SIGINT, stop_at)
    runs.resume(tmp_path / "run", (), LineDisplay())
    assert_same_run(tmp_path / "run", whole)
    assert read_counters(whole / "state").epoch >= 1, "it must cross a pass over the text"


def test_a_loss_that_is_not_finite_stops_and_says_where_in_the_text(tmp_path: Path) -> None:
    training = {"learning_rate": 1e30, "warmup_steps": 1, "clip_norm": 0.0, "optimizer": "adam",
                "weight_decay": 0.0, "save_every_steps": 1}  # fmt: skip
    with pytest.raises(TriptychError, match=r"step 2: the .* on batch 2 of pass 1 over the training text; "):
        runs.train(recipe_of(tmp_path, training=training), tmp_path / "run", LineDisplay())
    assert read_counters(tmp_path / "run" / "state").step == 1


def test_other_text_is_refused_when_resuming(tmp_path: Path) -> None:
    runs.train(recipe_of(tmp_path), tmp_path / "run", SignalAt(2, signal.SIGTERM))
    (tmp_path / "text.txt").write_text("\n".join([*LINES[:-1], "the end"]) + "\n")
    with pytest.raises(TriptychError, match=r"changed since the run began: the training text \(data.train\)"):
        runs.resume(tmp_path / "run", (), LineDisplay())


@pytest.mark.parametrize("task", ["language-model", "masked-language-model"])
def test_a_run_learns_and_its_figures_agree(task: str, finished: dict[str, Path]) -> None:
    records = read_metrics(finished[task] / "metrics.jsonl")
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[-1] < losses[0] - 0.3
    last = [record for record in records if "valid_loss" in record][-1]
    assert all(record["peak_share"] > 0 for record in records if "tokens_per_second" in record)
    assert last["valid_perplexity"] == pytest.approx(math.exp(last["valid_loss"]))
    card = (finished[task] / "README.md").read_text()
    assert f"tags: [{'text-generation' if task == 'language-model' else 'fill-mask'}]" in card


def test_a_validation_is_the_loss_of_the_whole_text_held_out(finished: dict[str, Path]) -> None:
    folder = finished["language-model"]
    opened = open_language_model(folder, "cpu")
    text = (folder.parent / "text.txt").read_text()
    documents = text.splitlines()
    held_out, start = [], int(sum(map(len, documents)) * 0.9)
    for line in documents:  # the characters of documents, their ends not counted
        held_out += [line[start:]] if len(line) > start else []
        start = max(start - len(line), 0)
    eos = opened.tokenizer.eos_id
    ids = [token for one in opened.tokenizer.encode(held_out) for token in [*one, eos]]
    total, num_bytes = 0.0, sum(len(line.encode()) for line in held_out)
    with torch.no_grad():
        for begin in range(0, len(ids) - 1, 16):
            read, said = ids[begin : begin + 16], ids[begin + 1 : begin + 17]
            logits = opened.model(torch.tensor([read])).logits[0, : len(said)]
            total += F.cross_entropy(logits, torch.tensor(said), reduction="sum").item()
    summary = read_metrics(folder / "metrics.jsonl")
    best = min(
        value
        for record in summary
        for name, value in record.items()
        if name in ("valid_loss", "average_valid_loss")
    )
    assert total / (len(ids) - 1) == pytest.approx(best, rel=1e-5)
    bits = next(record for record in summary if best in record.values())
    name = "average_valid_bits_per_byte" if "average_valid_loss" in bits else "valid_bits_per_byte"
    assert bits[name] == pytest.approx(best * len(ids) / num_bytes / math.log(2), rel=1e-5)


def test_a_run_continues_text_and_one_that_fills_masks_fills_them(finished: dict[str, Path]) -> None:
    opened = open_language_model(finished["language-model"], "cpu")
    assert opened.end_ids == (opened.tokenizer.eos_id,)
    ((best, *_),) = triptych.load(finished["masked-language-model"], device="cpu").fill("the [MASK] cat")
    filling = open_language_model(finished["masked-language-model"], "cpu")
    tokenizer = filling.tokenizer
    (before,), (after,) = tokenizer.encode(["the"]), tokenizer.encode([" cat"])
    # No space of its own before the mask, and the ends around the text that documents have in training.
    ids = [tokenizer.eos_id, *before, tokenizer.mask_id, *after, tokenizer.eos_id]
    chances = filling.model(torch.tensor([ids])).logits.detach()[0, len(before) + 1].softmax(dim=-1)
    assert best.probability == pytest.approx(float(chances.max()))
    with pytest.raises(DataError, match="which does not translate"):
        read_model(finished["language-model"])


def test_samples_of_text_are_shown_and_logged(tmp_path: Path) -> None:
    validation = {"sample_tokens": 5, "sample_prompt": "the red"}
    recipe = recipe_of(tmp_path, validation=validation, training={"max_steps": 4})
    runs.train(recipe, tmp_path / "run", LineDisplay())
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    samples = [record["valid_sample"] for record in records if "valid_sample" in record]
    assert len(samples) == 1
    assert samples[0].startswith("the red")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"validation": {"sample_tokens": 3}}, "an encoder writes no text"),
        ({"training": {"batch_tokens": 3}}, "unknown key training.batch_tokens: did you mean batch_size"),
        ({"data": {"valid_share": 1.5}}, "data.valid_share"),
    ],
)
def test_a_recipe_that_makes_no_sense_is_refused(
    sections: dict[str, dict[str, object]], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=said):
        recipe_of(tmp_path, "masked-language-model", **sections)


def test_an_unknown_task_names_those_there_are() -> None:
    with pytest.raises(UsageError, match="task is 'language-modle': did you mean language-model"):
        resolve({"task": "language-modle"})


@pytest.mark.parametrize("chunk", [3, None])
@pytest.mark.parametrize(
    "config",
    [
        HeadConfig(),
        HeadConfig(scale=0.25),
        HeadConfig(tied=False, bias=True, scale=2.0),
        HeadConfig(soft_cap=2.0, bias=True),
        HeadConfig(transform=True, activation="gelu", soft_cap=5.0, scale=3.0),
    ],
)
def test_the_loss_of_every_head_is_that_of_its_logits(
    config: HeadConfig, chunk: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if chunk is not None:
        monkeypatch.setattr("triptych.training.losses.MIN_CHUNK_TOKENS", chunk)
        monkeypatch.setattr("triptych.training.losses.MAX_CHUNK_TOKENS", chunk)
    torch.manual_seed(0)
    table = torch.nn.Embedding(13, 6)
    head = LanguageModelHead(config, 6, table, std=0.02).double()
    if head.output.bias is not None:
        torch.nn.init.normal_(head.output.bias)
    x = torch.randn(8, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(13, (8,))
    found = head_loss(head, x, targets, 0.1)
    weights = [x, *head.parameters()]
    expected = F.cross_entropy(head(x), targets, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(found.smoothed, expected)
    torch.testing.assert_close(found.likelihood, F.cross_entropy(head(x), targets, reduction="sum").detach())
    gradients = torch.autograd.grad(found.smoothed, weights)
    for one, other in zip(gradients, torch.autograd.grad(expected, weights), strict=True):
        torch.testing.assert_close(one, other)
