"""Runs on several corpora with weights, filters, BPE dropout and SentencePiece models."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from interrupting import SignalAt, assert_same_run
from tiny_recipe import tiny_recipe
from triptych.errors import DataError, UsageError
from triptych.model import load
from triptych.running.text import SentencePieceTokenizer
from triptych.training import Recipe, read_recipe, resolve, runs
from triptych.training.corpora.generated import generate_pairs
from triptych.training.progress import LineDisplay, SilentDisplay
from triptych.training.recipe import merge

OLD = {"generated": 60, "generated_part": "train"}
NEW = {"generated": 20, "generated_part": "train", "generated_seed": 7}
TRAINING = {"max_steps": 8, "batch_tokens": 300, "warmup_steps": 2, "threads": 1, "save_every_steps": 3}


def recipe_of(**sections: dict[str, Any]) -> Recipe:
    recipe = resolve(merge(tiny_recipe(60, 5, training=TRAINING), sections))
    assert isinstance(recipe, Recipe)
    return recipe


CASES: dict[str, dict[str, dict[str, Any]]] = {
    "corpora with weights": {"data": {"train": [{**OLD, "weight": 0.25}, {**NEW, "weight": 2}]}},
    "bpe dropout": {"training": {"bpe_dropout": 0.2}},
    "both": {
        "data": {"train": [{**OLD, "weight": 0.25}, NEW], "drop_duplicates": True},
        "training": {"bpe_dropout": 0.2},
    },
}


@pytest.mark.parametrize("case", ["both", *(pytest.param(c, marks=pytest.mark.slow) for c in [*CASES][:2])])
def test_a_run_that_is_stopped_within_a_pass_and_resumed_is_the_same_to_the_bit(
    case: str, tmp_path: Path
) -> None:
    sections = {"training": {"batch_tokens": 1000}, "validation": {"every_steps": 4}}
    recipe = recipe_of(**merge(sections, CASES[case]))
    runs.train(recipe, tmp_path / "whole", LineDisplay())
    # Later passes read other pairs, or other pieces.
    batches = runs.prepare(recipe, Path.cwd(), SilentDisplay()).objective().train
    passes = [
        sorted(line for ids in batches.plan(i) for line in batches.collate(ids).line_numbers) for i in (0, 1)
    ]
    sizes = [sum(batches.collate(ids).num_target_tokens for ids in batches.plan(i)) for i in (0, 1)]
    assert (passes[0], sizes[0]) != (passes[1], sizes[1])
    assert len(batches.plan(0)) < 6 < TRAINING["max_steps"]
    runs.train(recipe, tmp_path / "stopped", SignalAt(6, signal.SIGINT))
    runs.resume(tmp_path / "stopped", (), LineDisplay())
    assert_same_run(tmp_path / "stopped", tmp_path / "whole")


def test_a_list_of_one_corpus_is_that_corpus(tmp_path: Path) -> None:
    runs.train(recipe_of(), tmp_path / "one", LineDisplay())
    runs.train(recipe_of(data={"train": [OLD]}), tmp_path / "list", LineDisplay())
    assert_same_run(tmp_path / "list", tmp_path / "one")


def test_corpora_and_what_was_left_out_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.tsv").write_text("Ja.\tYes.\nJa.\tYes.\nNein.\tNo.\nWie?\t" + "What? " * 9 + "\n")
    (tmp_path / "valid.tsv").write_text("Nein.\tNo.\nVier.\tFour.\n")
    train = [{"file": str(tmp_path / "mine.tsv"), "weight": 5}, OLD]
    data = {"train": train, "valid": {"file": str(tmp_path / "valid.tsv")}, "cache": ""}
    clean = {"drop_duplicates": True, "max_length_ratio": 5}

    def train_with(name: str, **more: Any) -> None:
        tree = {**tiny_recipe(training={**TRAINING, "max_steps": 1}), "data": {**data, **more}}
        runs.train(resolve(tree), tmp_path / name, LineDisplay())

    train_with("run", **clean)
    lines = capsys.readouterr().err.splitlines()
    assert "training text, mine.tsv: 4 pairs, weight 5: 25% of a pass" in lines
    assert "training text, generated train: 60 pairs, weight 1: 75% of a pass" in lines
    (left_out,) = [line for line in lines if line.startswith("left out of the training text: ")]
    assert "1 with one side more than 5 times as long as the other (the first in line 4)" in left_out
    assert "that repeat another pair (the first in line 2)" in left_out
    (warning,) = [line for line in lines if line.startswith("warning: ")]
    assert warning.startswith(
        "warning: 1 of 2 validation sentences are in the training text as well, 1 with the same translation"
    )
    train_with("other", drop_validation=True)
    errors = capsys.readouterr().err
    assert "1 with a source of the validation text (the first in line 3)" in errors
    assert "warning: " not in errors


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"train": []}, "data.train: .*at least 1 item"),
        ({"train": [{**OLD, "wieght": 2}]}, "unknown key data.train.0.wieght: did you mean weight"),
        ({"train": {**OLD, "wieght": 2}}, "unknown key data.train.wieght: did you mean weight"),
        ({"train": {**OLD, "weight": 0}}, "data.train.weight: .*greater than 0"),
        ({"train": OLD, "valid": {**OLD, "weight": 2}}, "unknown key data.valid.weight"),
        ({"train": OLD, "drop_validation": True}, "data: drop_validation needs valid"),
        (
            {"train": OLD, "drop_other_languages": True},
            "drop_other_languages compares with decoding.languages",
        ),
    ],
)
def test_a_training_text_that_cannot_be_is_refused_by_its_key(data: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        resolve({**tiny_recipe(), "data": data})


def test_a_recipe_file_names_its_corpora_in_a_list(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[[data.train]]\nsource = "new.de"\ntarget = "new.en"\n\n'
        '[[data.train]]\nfile = "old.tsv"\nweight = 0.1\n'
    )
    recipe = read_recipe(path)
    assert isinstance(recipe, Recipe)
    assert [corpus.weight for corpus in recipe.data.corpora] == [1, 0.1]
    stored = tmp_path / "stored.toml"
    stored.write_text(recipe.to_toml())
    assert read_recipe(stored) == recipe


def test_a_checkpoint_goes_on_with_old_and_new_text(small_run: Path, tmp_path: Path) -> None:
    tree = merge(
        tiny_recipe(60, 5, training={**TRAINING, "checkpoint": str(small_run)}),
        {"data": {"train": [NEW, {**OLD, "weight": 0.1}]}},
    )
    del tree["model"], tree["tokenizer"]
    runs.train(resolve(tree), tmp_path / "run", LineDisplay())
    stored = read_recipe(tmp_path / "run" / "recipe.toml")
    assert isinstance(stored, Recipe)
    assert [corpus.weight for corpus in stored.data.corpora] == [1, 0.1]
    assert (tmp_path / "run/tokenizer.json").read_bytes() == (small_run / "tokenizer.json").read_bytes()


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with SentencePiece models of German, English and both."""
    sentencepiece = pytest.importorskip("sentencepiece")
    folder = tmp_path_factory.mktemp("pieces")
    german, english = ([*side] for side in zip(*generate_pairs(300, "train", seed=1), strict=True))
    for name, lines, options in (
        ("de", german, {"model_type": "unigram", "pad_id": 3}),
        ("en", english, {"model_type": "unigram", "vocab_size": 150}),
        ("both", [*german, *english], {"model_type": "bpe", "byte_fallback": True, "vocab_size": 400}),
    ):
        sentencepiece.SentencePieceTrainer.train(
            **{"vocab_size": 180, "minloglevel": 2} | options,
            sentence_iterator=iter(lines),
            model_prefix=str(folder / name),
        )
    return folder


def of_pieces(pieces: Path, **tokenizer: Any) -> Recipe:
    tree = tiny_recipe(60, 5, training={**TRAINING, "max_steps": 2})
    named = {key: str(pieces / value) if key.endswith("model") else value for key, value in tokenizer.items()}
    if "target_model" in tokenizer:
        tree = merge(tree, {"model": {"tie_embeddings": "target"}})
    return resolve({**tree, "tokenizer": {"kind": "sentencepiece", **named}})  # type: ignore[return-value]


def test_a_sentencepiece_model_cuts_the_text_of_a_run(pieces: Path, tmp_path: Path) -> None:
    runs.train(of_pieces(pieces, model="both.model"), tmp_path / "run", LineDisplay())
    stored = read_recipe(tmp_path / "run" / "recipe.toml")
    assert isinstance(stored, Recipe)
    model = load(tmp_path / "run")
    (tokenizer,) = {model.reader.tokenizers.source, model.reader.tokenizers.target}
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert stored.tokenizer.vocab_size == tokenizer.vocab_size == 401  # <pad> is added
    processor = tokenizer._processor
    for text in ("Der Zug kommt um halb vier an.", "日本 < 5"):
        (ids,) = tokenizer.encode([text])
        assert tokenizer.pieces(ids) == processor.encode(text, out_type=str)
        assert tokenizer.decode([ids]) == [processor.decode(processor.encode(text))]
    assert len(model.translate(["Vier.", "Heute ist Montag."])) == 2
    ids = torch.tensor([tokenizer.encode(["Vier."])[0]])
    assert torch.isfinite(model.reader.encoder_decoder(ids, ids)).all()
    model.convert(tmp_path / "ct2", "ctranslate2")  # compares the logits with those of CTranslate2


def test_each_side_may_have_its_own_model(pieces: Path, tmp_path: Path) -> None:
    recipe = of_pieces(pieces, model="de.model", joint=False, target_model="en.model")
    runs.train(recipe, tmp_path / "run", LineDisplay())
    pair = load(tmp_path / "run").reader.tokenizers
    assert (pair.source.vocab_size, pair.target.vocab_size) == (180, 151)
    for name in ("pad_id", "bos_id", "eos_id"):
        assert getattr(pair.source, name) == getattr(pair.target, name)
    runs.resume(tmp_path / "run", ["training.max_steps=3"], LineDisplay())


@pytest.mark.parametrize(
    ("tokenizer", "error", "said"),
    [
        ({}, UsageError, "model is missing"),
        ({"model": "both.model", "target_model": "en.model"}, UsageError, "target_model goes with"),
        ({"model": "de.model", "joint": False}, UsageError, "target_model is missing"),
        ({"kind": "bpe", "model": "both.model"}, UsageError, 'model goes with kind = "sentencepiece"'),
        ({"model": "both.model", "vocab_size": 300}, UsageError, "both.model has 401 tokens"),
        ({"model": "none.model"}, DataError, "none.model cannot be read: No such file"),
        ({"model": "de.vocab"}, DataError, "de.vocab is damaged or not a SentencePiece model"),
    ],
)
def test_a_model_that_does_not_fit_is_refused_and_leaves_no_run(
    pieces: Path, tmp_path: Path, tokenizer: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        runs.train(of_pieces(pieces, **tokenizer), tmp_path / "run", LineDisplay())
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_bpe_dropout_is_refused_for_other_tokenizers(pieces: Path, tmp_path: Path) -> None:
    tree = of_pieces(pieces, model="both.model").model_dump(mode="json", exclude_unset=True)
    with pytest.raises(UsageError, match=r"training.bpe_dropout needs pieces of byte-pair encoding"):
        runs.train(resolve(merge(tree, {"training": {"bpe_dropout": 0.1}})), tmp_path / "run", LineDisplay())
    assert json.dumps(tree)
    assert not (tmp_path / "run").exists()
