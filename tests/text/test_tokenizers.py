import json
import subprocess
import sys
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from triptych.errors import DataError, UsageError
from triptych.running.text import TokenizerPair, read_sentence_tokenizer, token_id
from triptych.running.text.sentence_tokenizers import BYTE_ALPHABET, BYTE_OF
from triptych.training.corpora.generated import generate_pairs
from triptych.training.corpora.tokenizer_training import (
    TokenizerSpec,
    _cut_words,
    train_tokenizer,
    train_tokenizers,
)

PAIRS = generate_pairs(300, "train", 0)
SOURCE = [source for source, _ in PAIRS]
TARGET = [target for _, target in PAIRS]
KINDS = ["bpe", "unigram"]
SPECS = {kind: TokenizerSpec.model_validate({"kind": kind, "vocab_size": 500}) for kind in KINDS}
JOINT = {kind: train_tokenizers(SPECS[kind], SOURCE, TARGET).source for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
# Characters that Python's tables do not know yet may be composed by the library's newer ones.
@given(text=st.text(st.characters(exclude_categories=("Cs", "Cn"))))
@settings(deadline=None, max_examples=200)
def test_any_text_is_decoded_to_its_normal_form(kind: str, text: str) -> None:
    tokenizer = JOINT[kind]
    assert tokenizer.decode(tokenizer.encode([text])) == [unicodedata.normalize("NFC", text)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "text", ["", " ", "  zwei", "ein \n", "\u0308a", "日本語", "\U0001f469\u200d\U0001f680", "a\0b", "a\rb"]
)
def test_odd_texts_are_decoded_as_they_were(kind: str, text: str) -> None:
    assert JOINT[kind].decode(JOINT[kind].encode([text])) == [text]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["<eos>", "<pad>", "a <bos> b<eos>"])
def test_special_tokens_spelled_out_in_a_text_are_text(kind: str, text: str, tmp_path: Path) -> None:
    JOINT[kind].save(tmp_path / "tokenizer.json")
    for tokenizer in (JOINT[kind], read_sentence_tokenizer(tmp_path / "tokenizer.json")):
        (ids,) = tokenizer.encode([text])
        assert min(ids) > 2
        assert tokenizer.decode([ids]) == [text]


@pytest.mark.parametrize("kind", KINDS)
def test_a_string_is_one_text(kind: str) -> None:
    tokenizer = JOINT[kind]
    assert tokenizer.encode("ab cd") == tokenizer.encode(["ab cd"])


def test_a_token_is_looked_up_in_a_vocabulary_that_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_tokenizer(SPECS["bpe"], SOURCE)
    pieces = tokenizer.pieces(range(tokenizer.vocab_size))
    read = list[int]()

    def counted(ids: Sequence[int]) -> list[str]:
        read.append(len(ids))
        return [pieces[one] for one in ids]

    monkeypatch.setattr(tokenizer, "pieces", counted)
    assert [token_id(tokenizer, piece) for piece in pieces] == [pieces.index(piece) for piece in pieces]
    assert read == [tokenizer.vocab_size]  # a sweep looks its two tokens up for every head


def test_special_tokens_are_text_even_if_the_corpus_is_full_of_them() -> None:
    pair = train_tokenizers(TokenizerSpec(vocab_size=400), ["<eos>"] * 50, ["<pad> <eos>"] * 50)
    assert min(pair.source.encode(["<eos> <pad>"])[0]) > 2


@pytest.mark.parametrize("kind", KINDS)
def test_special_ids_are_fixed_and_skipped_by_decoding(kind: str) -> None:
    tokenizer = JOINT[kind]
    assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_id) == (0, 1, 2)
    (ids,) = tokenizer.encode(["Guten Tag."])
    assert tokenizer.decode([[1, *ids, 2, 0, 0], []]) == ["Guten Tag.", ""]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_below_the_vocabulary_size(kind: str) -> None:
    ids = JOINT[kind].encode([*SOURCE, "\U0010ffff日"])
    assert max(max(some) for some in ids) < JOINT[kind].vocab_size == 500


def test_the_separator_of_words_and_punctuation_is_a_border() -> None:
    assert JOINT["bpe"].pieces(JOINT["bpe"].encode(["der, der"])[0]) == ["▁der", ",", "▁der"]


def test_pieces_show_fragments_of_characters_and_special_tokens() -> None:
    tokenizer = JOINT["bpe"]
    assert tokenizer.pieces([1, 0, 2]) == ["<bos>", "<pad>", "<eos>"]
    assert "".join(tokenizer.pieces(tokenizer.encode(["語"])[0])) == "▁<0xE8><0xAA><0x9E>"


def test_the_byte_of_every_character_of_the_alphabet_is_known() -> None:
    assert set(BYTE_OF) == set(BYTE_ALPHABET)
    assert sorted(BYTE_OF.values()) == list(range(256))


@pytest.mark.slow
def test_another_process_trains_the_same_tokenizers() -> None:
    program = (
        "import json\n"
        "from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizers\n"
        "from triptych.training.corpora.generated import generate_pairs\n"
        "source, target = zip(*generate_pairs(300, 'train', 0))\n"
        f"specs = [TokenizerSpec(kind=kind, vocab_size=500) for kind in {KINDS}]\n"
        "print(json.dumps([train_tokenizers(spec, source, target).source.to_json() for spec in specs]))\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert json.loads(run.stdout) == [JOINT[kind].to_json() for kind in KINDS]


def test_separate_tokenizers_know_their_own_side() -> None:
    pair = train_tokenizers(TokenizerSpec(vocab_size=500, joint=False), SOURCE, TARGET)
    assert not pair.joint
    assert pair.source.to_json() != pair.target.to_json()
    assert len(pair.source.encode(SOURCE[:1])[0]) < len(pair.target.encode(SOURCE[:1])[0])


@pytest.mark.parametrize("joint", [True, False])
def test_a_saved_pair_is_loaded_as_it_was(tmp_path: Path, joint: bool) -> None:
    # The folder of a former pair, of the other sort, is written over.
    train_tokenizers(TokenizerSpec(vocab_size=300, joint=not joint), SOURCE, TARGET).save(tmp_path)
    pair = train_tokenizers(TokenizerSpec(vocab_size=500, joint=joint), SOURCE, TARGET)
    pair.save(tmp_path)
    loaded = TokenizerPair.load(tmp_path)
    assert loaded.joint is pair.joint is joint
    assert loaded.source.encode(SOURCE) == pair.source.encode(SOURCE)
    assert loaded.target.encode(TARGET) == pair.target.encode(TARGET)
    assert loaded.source.to_json() == pair.source.to_json()


def test_a_small_text_gives_a_smaller_vocabulary() -> None:
    assert train_tokenizers(TokenizerSpec(), ["ab ab"], ["ab"]).source.vocab_size < 270


@pytest.mark.parametrize(("kind", "smallest"), [("bpe", 259), ("unigram", 260)])
def test_a_size_below_the_bytes_and_specials_is_refused(kind: str, smallest: int) -> None:
    small = TokenizerSpec.model_validate({"kind": kind, "vocab_size": smallest - 1})
    with pytest.raises(
        UsageError, match=rf"vocab_size = {smallest - 1} is too small: .* at least {smallest}"
    ):
        train_tokenizers(small, SOURCE, TARGET)
    least = TokenizerSpec.model_validate({"kind": kind, "vocab_size": smallest})
    assert train_tokenizers(least, SOURCE, TARGET).source.vocab_size == smallest


def test_a_minimal_frequency_is_refused_where_it_has_no_effect() -> None:
    with pytest.raises(ValidationError, match='min_frequency goes with kind = "bpe", but kind is "unigram"'):
        TokenizerSpec(kind="unigram", min_frequency=3)


def test_a_minimal_frequency_keeps_rare_pieces_out() -> None:
    sizes = [
        train_tokenizers(TokenizerSpec(min_frequency=least), SOURCE, TARGET).source.vocab_size
        for least in (1, 50)
    ]
    assert sizes[0] > sizes[1]


def test_a_missing_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"tokenizer\.json does not exist"):
        TokenizerPair.load(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"\xff\xfe", b"[1, 2]"])
def test_a_damaged_tokenizer_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer\.json (cannot be read|is damaged or not a tokenizer)"):
        read_sentence_tokenizer(tmp_path / "tokenizer.json")


def test_a_tokenizer_that_its_library_panics_at_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    ours = json.loads(JOINT["bpe"].to_json())
    ours["model"]["continuing_subword_prefix"] = "longer than any token"
    path.write_text(json.dumps(ours))
    with pytest.raises(DataError, match=r"tokenizer\.json is damaged or not a tokenizer"):
        read_sentence_tokenizer(path)


def test_a_tokenizer_of_another_make_is_refused_with_the_difference(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers.Tokenizer(tokenizers.models.BPE()).save(str(path))
    with pytest.raises(DataError, match=r"of another program \(another normalizer"):
        read_sentence_tokenizer(path)


def test_a_tokenizer_that_lacks_bytes_or_specials_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    ours = json.loads(JOINT["unigram"].to_json())
    ours["model"]["vocab"] = [["a", 0.0]]
    path.write_text(json.dumps(ours | {"added_tokens": []}))
    with pytest.raises(DataError, match="special tokens that are not <pad>, <bos>, <eos> with ids 0, 1, 2"):
        read_sentence_tokenizer(path)
    ours["model"]["vocab"] = [["<pad>", 0.0], ["<bos>", 0.0], ["<eos>", 0.0], ["a", 0.0]]
    path.write_text(json.dumps(ours))
    with pytest.raises(DataError, match="255 bytes missing from its vocabulary"):
        read_sentence_tokenizer(path)


def test_a_text_of_one_word_is_read_in_parts_and_other_texts_whole() -> None:
    word = "GATTACA" * 700
    parts = [*_cut_words(word)]
    assert "".join(parts) == word
    assert max(map(len, parts)) == 1000
    for text in ("", "ab " * 2000, "x1" * 2000, "今天天气很好。" * 500, "_" * 1000):
        assert [*_cut_words(text)] == [text]
    tokenizer = train_tokenizer(TokenizerSpec(vocab_size=270), [word])
    assert tokenizer.decode(tokenizer.encode([word])) == [word]
