"""Tokenizers trained for language models."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.errors import DataError, UsageError
from triptych.running.text import PretrainedTokenizer, read_tokenizer
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizer, train_tokenizers

TEXTS = ["The cat and the dog.\n", "Der Hund und die Katze\t– größer.", "  two  spaces\n\n<eos>"] * 4
KINDS = ("bpe", "unigram", "bytes", "characters")
TOKENIZERS = {kind: train_tokenizer(TokenizerSpec(kind=kind, vocab_size=300), TEXTS) for kind in KINDS}
LOSSLESS = [kind for kind in KINDS if kind != "characters"]


@pytest.mark.parametrize("kind", LOSSLESS)
@given(text=st.text())
def test_every_text_comes_back_as_it_was(kind: str, text: str) -> None:
    tokenizer = TOKENIZERS[kind]
    (ids,) = tokenizer.encode(text)
    assert tokenizer.decode([ids]) == [text]
    assert all(0 <= token < tokenizer.vocab_size for token in ids)
    assert not set(ids) & tokenizer.special_ids


@given(text=st.text(alphabet=sorted(set("".join(TEXTS)))))
def test_a_text_of_known_characters_comes_back_as_it_was(text: str) -> None:
    tokenizer = TOKENIZERS["characters"]
    (ids,) = tokenizer.encode(text)
    assert len(ids) == len(text)
    assert tokenizer.decode([ids]) == [text]


def test_an_unknown_character_becomes_unk_and_is_skipped() -> None:
    tokenizer = TOKENIZERS["characters"]
    (ids,) = tokenizer.encode("c€€t")
    assert ids[1:3] == [tokenizer.unk_id] * 2
    assert tokenizer.decode([ids]) == ["ct"]
    assert tokenizer.decode([ids], skip_special=False) == ["c<unk><unk>t"]


def test_the_most_frequent_characters_are_kept() -> None:
    tokenizer = train_tokenizer(TokenizerSpec(kind="characters", vocab_size=6), ["aab", "bbcc", "c", "c"])
    assert tokenizer.vocabulary == ("<pad>", "<eos>", "<mask>", "<unk>", "b", "c")


def test_a_byte_is_its_number_behind_the_special_tokens() -> None:
    assert TOKENIZERS["bytes"].encode("\0é") == [[3, 3 + 0xC3, 3 + 0xA9]]
    assert TOKENIZERS["bytes"].vocab_size == 259


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_tokenizer_is_saved_whole_and_trained_again_the_same(kind: str, tmp_path: Path) -> None:
    tokenizer = TOKENIZERS[kind]
    tokenizer.save(tmp_path / "tokenizer.json")
    again = read_tokenizer(tmp_path / "tokenizer.json")
    assert isinstance(again, PretrainedTokenizer)
    assert again.encode(TEXTS) == tokenizer.encode(TEXTS)
    spec = TokenizerSpec(kind=kind, vocab_size=300)
    assert train_tokenizer(spec, iter(TEXTS)).to_json() == tokenizer.to_json()


def test_what_cannot_be_trained_is_refused() -> None:
    with pytest.raises(UsageError, match="need at least 5"):
        train_tokenizer(TokenizerSpec(kind="characters", vocab_size=4), TEXTS)
    with pytest.raises(DataError, match="no character"):
        train_tokenizer(TokenizerSpec(kind="characters"), [""])
    with pytest.raises(UsageError, match='"bytes" goes with language models'):
        train_tokenizers(TokenizerSpec(kind="bytes"), TEXTS, TEXTS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mask_takes_the_space_before_it_where_pieces_have_theirs(kind: str) -> None:
    tokenizer = TOKENIZERS[kind]
    (ids,) = tokenizer.encode(["a <mask>"], parse_special=True)
    (letter,), (space,) = tokenizer.encode(["a"]), tokenizer.encode([" "])
    spaces = [] if kind in ("bpe", "unigram") else space
    assert ids == [*letter, *spaces, tokenizer.mask_id]
