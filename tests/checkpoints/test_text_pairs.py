"""Pairs of texts are joined and run as by the tokenizer and the model of `transformers`."""

from pathlib import Path
from typing import Any

import pytest
import torch

import triptych
from checkpoints.classifiers import KINDS, classifier
from checkpoints.oracle import in_float64
from checkpoints.runs import some
from small_checkpoints import gpt2_that_runs
from triptych import UsageError

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

PAIR = ("The quick brown fox", "jumps over the dog")
OTHER = ("The dog", "the lazy fox. Don't you?")


def theirs(model: Any, folder: Path, pair: tuple[str, str]) -> tuple[list[int], torch.Tensor]:
    """The token ids and the logits of a pair, by the last head."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer(*pair, return_tensors="pt")
    given.pop("attention_mask")
    with in_float64(), torch.no_grad():
        found = model(**given)
    *_, last = (found[key] for key in found if key.endswith("logits"))
    return given["input_ids"][0].tolist(), last[0]


@pytest.mark.parametrize("name", some(KINDS, ("Bert", "Roberta", "DebertaV2", "Bart")))
def test_a_pair_of_texts_has_the_tokens_and_logits_of_transformers(name: str, tmp_path: Path) -> None:
    model = classifier(name, tmp_path)
    ours = triptych.load(tmp_path)
    # Texts of two lengths, and a text alone, in one padded batch.
    one, other, alone = ours.run([PAIR, OTHER, "The quick brown fox"])
    for run, pair in ((one, PAIR), (other, OTHER)):
        ids, logits = theirs(model, tmp_path, pair)
        assert list(run.ids) == ids
        assert (run.logits - logits).abs().max() < 1e-10
        assert run.second is not None
    assert alone.second is None


@pytest.mark.parametrize("name", ["Bert", "Albert"])
def test_the_second_head_of_two_has_the_logits_of_transformers_for_pairs(name: str, tmp_path: Path) -> None:
    model = classifier(name, tmp_path, "PreTraining")
    for run, pair in zip(triptych.load(tmp_path).run([PAIR, OTHER]), (PAIR, OTHER), strict=True):
        ids, logits = theirs(model, tmp_path, pair)
        assert list(run.ids) == ids
        assert run.second_logits is not None
        assert (run.second_logits - logits).abs().max() < 1e-10


def test_the_types_of_a_pairs_tokens_are_read(tmp_path: Path) -> None:
    classifier("Bert", tmp_path)
    model = triptych.load(tmp_path)
    run = model.run(PAIR)
    assert not torch.equal(run.logits, model.run(run.ids).logits)


def test_a_type_without_a_row_in_the_model_is_refused(tmp_path: Path) -> None:
    classifier("Bert", tmp_path, type_vocab_size=1)
    model = triptych.load(tmp_path)
    with pytest.raises(UsageError, match=r"the type 1, and the model has 1 type: give one text"):
        model.run(PAIR)
    assert model.run(PAIR[0]).labels is not None


@pytest.mark.parametrize("name", ["Bert", "Bart"])
def test_both_texts_of_a_pair_are_marked_where_attention_is_shown(name: str, tmp_path: Path) -> None:
    classifier(name, tmp_path)
    attention = triptych.load(tmp_path).attend(PAIR)
    second = attention.second
    assert second is not None
    assert attention.saved().record["second"] == second
    assert f"the second text from token {second}" in repr(attention)
    for kind in attention.viewed().texts[0].kinds:
        shift = 1 if kind.kind == "decoder" else 0  # the start token of a decoder
        assert (kind.second_query, kind.second_key) == (second, second + shift)
    alone = attention.viewed().texts[0].kinds[0]
    assert alone.marked == (second, second)


def test_a_pair_is_patched_from_another_pair(tmp_path: Path) -> None:
    classifier("Bert", tmp_path)
    model = triptych.load(tmp_path)
    corrupted = PAIR[::-1]
    clean = model.run(PAIR)
    assert len(clean.ids) == len(model.run(corrupted).ids)
    swept = model.sweep(PAIR, corrupted, lambda run: run.logits[0])
    patched = model.patch("1.2", clean).run(corrupted)
    place = swept.heads.index("1.2")
    assert float(swept.values[place, 0]) == pytest.approx(float(patched.logits[0]), abs=1e-12)


def test_a_tuple_of_two_strings_is_a_pair_and_a_list_are_two_texts(tmp_path: Path) -> None:
    classifier("Bert", tmp_path)
    model = triptych.load(tmp_path)
    assert torch.equal(model.run([PAIR])[0].logits, model.run(PAIR).logits)
    assert [run.second for run in model.run([*PAIR])] == [None, None]
    assert model.run((PAIR[0], "")).ids == model.run(PAIR[0]).ids  # as in `transformers`


def test_a_pair_where_one_text_is_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is a pair of texts, and one is read here"):
        triptych.load(gpt2_that_runs(tmp_path / "gpt2")).run(("two", "men"))
    model = triptych.load("demo")
    with pytest.raises(UsageError, match="is a pair of texts, and one is read here: give a string"):
        model.run(PAIR)
