"""SentencePiece tokenizers: what a text becomes, what is refused, and how they are saved."""

import json
import pickle
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.tiny_spm import BYTE_PIECES, PIECES, RULES, SPECIALS, Piece, block, charsmap, spm
from triptych.errors import DataError, UsageError
from triptych.running.text import (
    SentencePieceRecord,
    SentencePieceTokenizer,
    TokenizerPair,
    read_sentence_tokenizer,
)
from triptych.running.text.sentencepiece import load_sentencepiece

WORDS: list[Piece] = [
    *SPECIALS,
    ("▁", -1.0, "normal"),
    *((letter, -2.0 - i / 4, "normal") for i, letter in enumerate("abc")),
    ("ab", -1.5, "normal"),
    ("ba", -1.5, "normal"),
    ("aa", -1.25, "normal"),
    ("aba", -0.5, "normal"),
    ("bab", -0.75, "normal"),
    ("▁a", -1.75, "normal"),
    ("c▁", -0.25, "normal"),
]


def model(kind: str, pieces: Sequence[Piece] = PIECES, **options: Any) -> bytes:
    more = BYTE_PIECES if options.get("byte_fallback") else []
    return spm([*pieces, *more], kind, RULES, **options)


GOOD = charsmap(RULES)


@pytest.mark.parametrize(
    "rules",
    [
        b"\0",
        GOOD[:3],
        GOOD[:4],
        GOOD[:-1],  # the last replacement has no end
        b"\xff\xff\xff\xff" + GOOD[4:],
        b"\0\0\0\0" + GOOD[4:],
        (1024).to_bytes(4, "little") + b"\x00\xff\xff\x00" * 256 + b"\0",  # children far outside
        (1024).to_bytes(4, "little") + b"\x00\x05\x00\x00" + b"\xff" * 1020 + b"a\0",  # a value far outside
    ],
)
def test_rules_that_lead_out_of_themselves_are_refused(rules: bytes) -> None:
    with pytest.raises(ValueError, match=r"INTERNAL: .*(normaliz|precompiled_charsmap|Trie data)"):
        load_sentencepiece(spm(WORDS) + block(3, block(2, rules)))


@given(at=st.integers(4, len(GOOD) - 1), byte=st.integers(0, 255))
def test_a_damaged_trie_is_refused_or_at_least_ends(at: int, byte: int) -> None:
    rules = GOOD[:at] + bytes([byte]) + GOOD[at + 1 :]
    try:
        processor = load_sentencepiece(spm(WORDS) + block(3, block(2, rules)))
    except ValueError:
        return
    found = processor.encode("abc ﬁ ｅ\u0301 가 가 \u200b … ㅤ zz")
    assert all(0 <= piece < len(processor) for piece in found)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "unk is not defined"),
        (b"\xff" * 30, "ParseFromArray"),
        (spm(WORDS)[:-1], "ParseFromArray"),
        (spm(WORDS) + b"\x80", "ParseFromArray"),
        (spm(WORDS) + block(1, block(1, b"\xff")), "'utf-8' codec can't decode byte 0xff"),
        (spm(WORDS) + block(5, block(2, b"\1")), "normalization rule is broken"),
        (spm([*WORDS, ("", 0.0, "normal")]), "piece must not be empty"),
        (spm([*WORDS, ("a", 0.0, "normal")]), "a is already defined"),
        (spm([*WORDS, ("z" * 200_000, 0.0, "normal")]), "piece is too long"),
        (spm([*WORDS, ("z", float("nan"), "normal")], "unigram"), "score is NaN or Inf"),
        (spm(WORDS[1:]), "unk is not defined"),
        (spm([*WORDS, ("?", 0.0, "unknown")]), "unk is already defined"),
        (spm(WORDS, byte_fallback=True), "there are not 256 byte pieces"),
        (spm([*WORDS, *BYTE_PIECES]), "`byte_fallback` is false"),
        (spm([*WORDS, *BYTE_PIECES[1:]], byte_fallback=True), "there are not 256 byte pieces"),
    ],
)
def test_a_damaged_model_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_sentencepiece(data)


def test_a_missing_or_too_old_library_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sentencepiece, "__version__", "0.2.0")
    with pytest.raises(UsageError, match=r"0\.2\.0 crashes .* pip install --upgrade"):
        load_sentencepiece(model("bpe"))
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(UsageError, match=r"needs sentencepiece: pip install 'triptych\[sentencepiece\]'"):
        load_sentencepiece(model("bpe"))


VOCAB = ("</s>", "<unk>", "▁a", "ab", "b", "▁", "日本", ">>de<<", ".", "▁n't", "<s>", "<pad>")


def record(**changes: Any) -> SentencePieceRecord:
    return SentencePieceRecord.model_validate(
        {
            "pad_id": 11,
            "bos_id": 11,
            "eos_id": 0,
            "unk_id": 1,
            "vocab": VOCAB,
            "model": model("bpe", byte_fallback=changes.pop("bytes", False)),
            **changes,
        }
    )


def test_ids_are_those_of_the_vocabulary_and_not_of_the_model() -> None:
    tokenizer = SentencePieceTokenizer(record())
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size) == (11, 11, 0, 12)
    # "c" is a piece of the model only; an unknown run may be in the vocabulary all the same.
    assert tokenizer.encode(["a ab b", "c", "日本", "日", ""]) == [
        [2, 5, 3, 5, 4],
        [5, 1],
        [5, 6],
        [5, 1],
        [],
    ]
    assert tokenizer.pieces([2, 0, 11]) == ["▁a", "</s>", "<pad>"]


def test_special_tokens_spelled_out_in_a_text_are_text_to_sentencepiece_too() -> None:
    tokenizer = SentencePieceTokenizer(record())
    for text in ("</s>", "<pad>", "a <s>", "<unk>"):
        assert not {0, 10, 11} & set(tokenizer.encode([text])[0])


def test_a_language_code_in_front_is_one_token() -> None:
    tokenizer = SentencePieceTokenizer(record())
    assert tokenizer.encode([">>de<< a", ">>de<<", ">>fr<< a"]) == [[7, 2], [7], [1, 2]]
    assert 7 not in tokenizer.encode([" >>de<< a"])[0]


def test_decoding_skips_special_and_unknown_tokens_and_hides_control_pieces() -> None:
    tokenizer = SentencePieceTokenizer(record())
    assert tokenizer.decode([[11, 2, 1, 10, 4, 0, 11], [], [5, 5, 2, 5]]) == ["ab", "", "a"]


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        (["<s>", "▁a", "</s>", "b"], "ab"),
        (["▁", "<0xE6>", "<0x97>", "<0xA5>", "<0xE6>", "<0x97>", "a"], "日\ufffd\ufffda"),
        (["zz", "▁", "▁"], "zz"),
        (["<0x20>", "a", "▁", "<0xC3>"], "a \ufffd"),
        ([], ""),
    ],
)
def test_pieces_are_joined_bytes_to_characters_and_marks_to_spaces(pieces: list[str], text: str) -> None:
    vocab = tuple(dict.fromkeys((*VOCAB, *pieces)))
    tokenizer = SentencePieceTokenizer(record(bytes=True, vocab=vocab))
    assert tokenizer.decode([[vocab.index(piece) for piece in pieces]]) == [text]


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(UsageError, match="half of a surrogate pair"):
        SentencePieceTokenizer(record(bytes=True)).encode("\ud800a")


def test_a_tokenizer_can_be_sent_to_another_process() -> None:
    tokenizer = SentencePieceTokenizer(record())
    again = pickle.loads(pickle.dumps(tokenizer))
    assert again.encode(["a ab b 日本"]) == tokenizer.encode(["a ab b 日本"])
    assert again.to_json() == tokenizer.to_json()


def test_punctuation_is_joined_only_where_the_checkpoint_asks_for_it() -> None:
    ids = [2, 5, 8, 9]
    assert SentencePieceTokenizer(record()).decode([ids]) == ["a . n't"]
    assert SentencePieceTokenizer(record(joins_punctuation=True)).decode([ids]) == ["a.n't"]


@pytest.mark.parametrize("joint", [True, False])
def test_a_pair_of_sentencepiece_tokenizers_is_saved_and_loaded_as_it_was(
    tmp_path: Path, joint: bool
) -> None:
    source = SentencePieceTokenizer(record(bytes=True))
    target = source if joint else SentencePieceTokenizer(record(joins_punctuation=True))
    TokenizerPair(source, target).save(tmp_path)
    loaded = TokenizerPair.load(tmp_path)
    assert loaded.joint is joint
    texts = ["ab  aba", "日 ｅ\u0301", ">>de<< a…"]
    assert loaded.source.encode(texts) == source.encode(texts)
    for before, after in ((source, loaded.source), (target, loaded.target)):
        assert after.to_json() == before.to_json()
        assert (after.pad_id, after.bos_id, after.eos_id) == (11, 11, 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab": ["a", "b"]}, "pad_id 11 is outside the vocabulary of 2"),
        ({"vocab": [*VOCAB, "ab"]}, "a piece is in the vocabulary twice"),
        ({"eos_id": -1}, "eos_id"),
        ({"format": "triptych sentencepiece 1"}, "format"),
        ({"more": 1}, "more"),
        ({"model": {"kind": "word", "pieces": []}}, "model"),
        ({"model": ""}, "model: INTERNAL: unk is not defined."),
        ({"model": "CgUKA+/vvw=="}, "model: "),
        ({"model": "?"}, "model: "),
    ],
)
def test_a_damaged_sentencepiece_tokenizer_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "tokenizer.json"
    text = json.dumps({**json.loads(SentencePieceTokenizer(record()).to_json()), **change})
    path.write_text(text.replace('"format": ', '"format":'))
    with pytest.raises(DataError) as refused:
        read_sentence_tokenizer(path)
    assert str(refused.value).startswith(f"{path} is damaged or not a tokenizer")
    assert message in str(refused.value)


def test_half_a_sentencepiece_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    text = SentencePieceTokenizer(record()).to_json()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match="damaged"):
        read_sentence_tokenizer(path)
