"""SentencePiece's segmentation: as the library itself gives it, and as the plainest search finds it."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from checkpoints.tiny_spm import BYTE_PIECES, PIECES, RULES, SPECIALS, Piece, charsmap
from triptych.errors import DataError
from triptych.text import (
    SentencePieceRecord,
    SentencePieceSpec,
    SentencePieceTokenizer,
    Tokenizer,
    TokenizerPair,
)
from triptych.text.sentencepiece import SentencePiece

KINDS = ["bpe", "unigram"]
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


def make(kind: str, pieces: list[Piece] = PIECES, **options: Any) -> SentencePiece:
    more = BYTE_PIECES if options.get("byte_fallback") else []
    record = {"kind": kind, "pieces": [*pieces, *more], "rules": charsmap(RULES), **options}
    return SentencePiece(SentencePieceSpec.model_validate(record))


# Each as sentencepiece 0.2.0 has it, given the file that `spm` makes of the same pieces and rules.
AS_THE_LIBRARY = {
    "bpe": {
        "ababa": "▁ aba ba",
        "aabaaba": "▁ aa b aa ba",
        "abaab a": "▁ ab aa b ▁a",
        ".......": "▁ ... ... .",
    },
    "unigram": {
        "ababa": "▁ ab aba",
        "aabaaba": "▁a aba aba",
        "abaab a": "▁ aba ab ▁a",
        ".......": "▁ .. .. ...",
    },
}
FOR_BOTH = {
    "": "",
    "   ": "",
    "\u200b": "",
    "\u200b a": "▁a",
    "ﬁﬁ  …": "▁ fi fi ▁ ...",
    "e\u0301ｅ\u0301": "▁ é é",
    "日本 ab日": "▁ 日本 ▁ ab 日",
    "<x>a<x> b c": "▁ <x> a <x> ▁ b ▁ c",
    "▁a▁": "▁ ▁a",
    "abㅤab": "▁ ab ▁ x ▁ ab",
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_is_cut_as_the_library_cuts_it(kind: str) -> None:
    cutter = make(kind)
    for text, pieces in {**AS_THE_LIBRARY[kind], **FOR_BOTH}.items():
        assert cutter.split(text) == pieces.split(), text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({}, ["▁", "ab", "▁", "日", "c"]),
        ({"byte_fallback": True}, ["▁", "ab", "▁", "<0xE6>", "<0x97>", "<0xA5>", "c"]),
        ({"whitespace_as_suffix": True}, ["ab", "▁", "日", "c", "▁"]),
        ({"add_dummy_prefix": False}, ["ab", "▁", "日", "c"]),
        ({"remove_extra_whitespaces": False}, ["▁", "▁", "ab", "▁", "▁", "日", "c", "▁"]),
        ({"escape_whitespaces": False}, [" ", "ab", " 日", "c"]),
    ],
)
def test_every_option_does_what_it_does_in_the_library(
    kind: str, options: dict[str, bool], pieces: list[str]
) -> None:
    assert make(kind, **options).split(" ab  日c ") == pieces


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
def test_pieces_are_joined_as_in_the_library(pieces: list[str], text: str) -> None:
    assert make("bpe", byte_fallback=True).join(pieces) == text


def merged_naively(scores: dict[str, float], text: str) -> list[str]:
    """Of all neighbours that make a piece, merge those of the best score, the leftmost first; again."""
    parts = list(text)
    while True:
        joined = [(scores.get(a + b), i) for i, (a, b) in enumerate(pairwise(parts))]
        candidates = [(-score, i) for score, i in joined if score is not None]
        if not candidates:
            return parts
        _, i = min(candidates)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@given(text=st.text("abc ", max_size=30))
def test_pairs_are_merged_best_first_and_leftmost_first(text: str) -> None:
    cutter = make("bpe", WORDS)
    scores = {piece: score for piece, score, own in WORDS if own == "normal"}
    assert cutter.split(text) == merged_naively(scores, cutter.normalise(text))


@given(text=st.text("abc", max_size=9))
def test_the_unigram_cut_has_the_largest_sum(text: str) -> None:
    cutter = make("unigram", WORDS)
    scores = {piece: score for piece, score, own in WORDS if own == "normal"}

    def largest(rest: str) -> float:
        if not rest:
            return 0.0
        cuts = (rest[:end] for end in range(1, len(rest) + 1))
        return max(scores[cut] + largest(rest[len(cut) :]) for cut in cuts if cut in scores)

    found = sum(scores[piece] for piece in cutter.split(text))
    assert found == largest(cutter.normalise(text))  # quarters: exact


def test_what_was_cut_once_is_cut_the_same_again() -> None:
    cutter = make("bpe")
    first = cutter.split("abaab abaab " * 3)
    assert cutter.split("abaab abaab " * 3) == first == ["▁", "ab", "aa", "b"] * 6


def test_the_longest_rule_is_applied_and_only_where_a_key_is_whole() -> None:
    cutter = make("bpe")
    assert cutter.normalise("ｅ ｅ\u0301 ｅx\u0301") == "▁e▁é▁ex\u0301"
    plain = SentencePiece(SentencePieceSpec.model_validate({"kind": "bpe", "pieces": WORDS}))
    assert plain.normalise("ｅ ﬁ\u00a0") == "▁ｅ▁ﬁ\u00a0"


@pytest.mark.parametrize("size", [1, 3, 300])
def test_a_trie_over_many_keys_gives_back_every_value(size: int) -> None:
    rules = {chr(0x3040 + i) * (1 + i % 3): f"{i}" for i in range(size)}
    cutter = SentencePiece(
        SentencePieceSpec.model_validate({"kind": "bpe", "pieces": WORDS, "rules": charsmap(rules)})
    )
    for key, replacement in rules.items():
        assert cutter.normalise(f"a{key}z") == f"▁a{replacement}z"


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
    with pytest.raises(ValidationError, match="normalisation rules"):
        SentencePieceSpec.model_validate({"kind": "bpe", "pieces": WORDS, "rules": rules})


@given(at=st.integers(4, len(GOOD) - 1), byte=st.integers(0, 255))
def test_a_damaged_trie_is_refused_or_at_least_ends(at: int, byte: int) -> None:
    rules = GOOD[:at] + bytes([byte]) + GOOD[at + 1 :]
    try:
        spec = SentencePieceSpec.model_validate({"kind": "bpe", "pieces": WORDS, "rules": rules})
    except ValidationError:
        return
    SentencePiece(spec).split("abc ﬁ ｅ\u0301 가 가 \u200b … ㅤ zz")


@pytest.mark.parametrize(
    ("pieces", "options", "message"),
    [
        ([*WORDS, ("", 0.0, "normal")], {}, "a piece is empty"),
        ([*WORDS, ("a", 0.0, "normal")], {}, "there are two pieces 'a'"),
        ([*WORDS, ("z", float("nan"), "normal")], {}, "a score is not a number"),
        (WORDS[1:], {}, "there are 0 unknown pieces, not one"),
        ([*WORDS, ("?", 0.0, "unknown")], {}, "there are 2 unknown pieces, not one"),
        (SPECIALS, {}, "there is no normal piece"),
        (WORDS, {"byte_fallback": True}, "byte_fallback is true, but there are 0 byte pieces"),
        ([*WORDS, *BYTE_PIECES], {}, "byte_fallback is false, but there are 256 byte pieces"),
        ([*WORDS, *BYTE_PIECES[1:]], {"byte_fallback": True}, "there are 255 byte pieces"),
    ],
)
def test_pieces_that_do_not_belong_together_are_refused(
    pieces: list[Piece], options: dict[str, bool], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        SentencePieceSpec.model_validate({"kind": "bpe", "pieces": pieces, **options})


VOCAB = ("</s>", "<unk>", "▁a", "ab", "b", "▁", "日本", ">>de<<", ".", "▁n't", "<s>", "<pad>")


def record(**changes: Any) -> SentencePieceRecord:
    return SentencePieceRecord.model_validate(
        {
            "pad_id": 11,
            "bos_id": 11,
            "eos_id": 0,
            "unk_id": 1,
            "vocab": VOCAB,
            "model": make("bpe", byte_fallback=True).spec
            if changes.pop("bytes", False)
            else make("bpe").spec,
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
        ({"vocab": ["a", "b"]}, "pad_id 11 is no token of a vocabulary of 2"),
        ({"vocab": [*VOCAB, "ab"]}, "a piece is in the vocabulary twice"),
        ({"eos_id": -1}, "eos_id"),
        ({"format": "triptych sentencepiece 2"}, "format"),
        ({"more": 1}, "more"),
        ({"model": {"kind": "word", "pieces": []}}, "model.kind"),
    ],
)
def test_a_damaged_sentencepiece_tokenizer_is_refused_by_name(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "tokenizer.json"
    text = json.dumps({**json.loads(SentencePieceTokenizer(record()).to_json()), **change})
    path.write_text(text.replace('"format": ', '"format":'))
    with pytest.raises(DataError) as refused:
        Tokenizer.load(path)
    assert str(refused.value).startswith(f"{path} is damaged or holds no tokenizer")
    assert message in str(refused.value)


def test_half_a_sentencepiece_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    text = SentencePieceTokenizer(record()).to_json()
    path.write_text(text[: len(text) // 2])
    with pytest.raises(DataError, match="damaged"):
        Tokenizer.load(path)
