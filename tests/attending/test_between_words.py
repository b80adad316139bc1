"""Attention between words, rollout, and weights as arrays and tables."""

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer as Inner
from tokenizers.models import BPE, WordLevel, WordPiece

from attending.tiny_readers import language_reader, pair_reader
from triptych.errors import UsageError
from triptych.running.text import PretrainedRecord, PretrainedTokenizer
from triptych.seeing.attending import attend
from triptych.seeing.attending.alignment import all_words_of

TEXT = "the cat sat on the mat"


def tokenizer_of(model: Any) -> PretrainedTokenizer:
    record = PretrainedRecord(tokens={}, chat_templates={}, inner=Inner(model).to_str())
    return PretrainedTokenizer(record, "this test")


@pytest.mark.parametrize(
    ("model", "pieces"),
    [
        (WordPiece({"play": 0, "##ing": 1, "cats": 2}, unk_token="play"), ["▁play", "ing", "▁cats"]),
        (
            BPE({"play": 0, "ing</w>": 1, "cats</w>": 2}, [], end_of_word_suffix="</w>"),
            ["▁play", "ing", "▁cats"],
        ),
        (WordLevel({"play": 0, "ing": 1, "cats": 2}, unk_token="play"), ["▁play", "▁ing", "▁cats"]),
        (BPE({"▁play": 0, "ing": 1, "▁cats": 2}, []), ["▁play", "ing", "▁cats"]),
    ],
    ids=["WordPiece", "ends of words", "words", "SentencePiece"],
)
def test_words_begin_as_the_vocabulary_marks_them(model: Any, pieces: list[str]) -> None:
    assert tokenizer_of(model).word_pieces([0, 1, 2]) == pieces


def test_all_tokens_are_in_a_word() -> None:
    pieces = ["<s>", "▁", "cat", "s", "▁", "▁sat", ".", "▁", "</s>", "▁"]
    special = [piece[0] == "<" for piece in pieces]
    found = all_words_of(pieces, special)
    assert [word.text for word in found] == ["<s>", "cats", "sat", ".", "</s>", "▁"]
    assert [word.start for word in found] == [0, *(word.stop for word in found[:-1])]
    assert found[-1].stop == len(pieces)
    assert all_words_of([], []) == ()


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_rows_of_words_are_means_of_the_rows_of_their_tokens_and_sum_to_one(kind: str) -> None:
    attention = attend(language_reader(kind=kind), TEXT)
    found = attention.words("1.2")
    assert [word.text for word in found.source if word.text.isalpha()] == TEXT.split()
    torch.testing.assert_close(found.weights.sum(dim=1), torch.ones(len(found.target), dtype=torch.float64))
    rows, keys = found.target[1], found.source[0]
    wanted = attention["1.2"][rows.start : rows.stop, keys.start : keys.stop].sum(dim=1).mean()
    torch.testing.assert_close(found.weights[1, 0], wanted)
    of_layer = torch.stack([attention.words(f"1.{head}").weights for head in range(4)]).mean(dim=0)
    torch.testing.assert_close(attention.words(1).weights, of_layer)
    with pytest.raises(UsageError, match=r'words\("3\.2"\) is the attention of a head between words'):
        attention.words()


@pytest.mark.parametrize("stack", ["encoder", "decoder", "cross"])
def test_words_of_a_translation_are_of_their_own_sides(stack: str) -> None:
    attention = attend(pair_reader(), "the cat sat", target="a dog ran")
    found = attention.words(f"{stack}.0.1")
    torch.testing.assert_close(found.weights.sum(dim=1), torch.ones(len(found.target), dtype=torch.float64))
    source, target = ({word.text for word in side} for side in (found.source, found.target))
    assert ("cat" in source) == (stack != "decoder")
    assert ("dog" in target) == (stack != "encoder")
    assert found.source[-1].stop == len(attention.of(stack).keys)


def test_the_rollout_is_the_product_of_means_with_the_residual_connection() -> None:
    attention = attend(language_reader(), TEXT)
    rollout = attention.rollout()
    one, two = (
        (attention[layer].mean(dim=0) + torch.eye(len(attention.tokens), dtype=torch.float64)) / 2
        for layer in (0, 1)
    )
    torch.testing.assert_close(rollout[0], one)
    torch.testing.assert_close(rollout[1], two @ one)
    torch.testing.assert_close(rollout.sum(dim=-1), torch.ones(rollout.shape[:2], dtype=torch.float64))
    pairs = attend(pair_reader(), "the cat sat", target="a dog ran")
    torch.testing.assert_close(pairs.rollout(), pairs.rollout("encoder"))
    with pytest.raises(
        UsageError, match=r"cross-attention has no rollout: .*'encoder' and 'decoder' have one"
    ):
        pairs.rollout("cross")


def test_weights_are_an_array_of_layers_and_a_table_of_all_weights() -> None:
    pandas = pytest.importorskip("pandas")
    attention = attend(language_reader(), "the cat")
    array = attention.to_numpy()
    assert array.shape == (len(attention.of("decoder")), 4, len(attention.tokens), len(attention.tokens))
    assert np.array_equal(array[1, 2], attention["1.2"].numpy())
    table = attention.to_pandas("1.2")
    assert isinstance(table, pandas.DataFrame)
    assert list(table.columns) == [
        "kind",
        "layer",
        "head",
        "query",
        "query_token",
        "key",
        "key_token",
        "weight",
    ]
    assert len(table) == (array[1, 2] > 0).sum()
    row = table.iloc[-1]
    assert row["weight"] == pytest.approx(array[1, 2, row["query"], row["key"]], abs=1e-6)
    pairs = attend(pair_reader(), "the cat sat", target="a dog ran")
    assert np.array_equal(pairs.to_numpy(), pairs.to_numpy("cross"))


def test_without_pandas_a_line_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    attention = attend(language_reader(), "the cat")
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "pandas" else found(name, *more)
    )
    with pytest.raises(
        UsageError, match=r"needs pandas: pip install pandas; save\(\"weights.csv\"\) writes the same"
    ):
        attention.to_pandas()
