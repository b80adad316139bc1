from pathlib import Path

import numpy as np
import pytest

from triptych.running.text import TokenSequences
from triptych.training.corpora import encoded
from triptych.training.corpora.corpora import CorpusSpec, ParallelCorpus, read_parallel
from triptych.training.corpora.encoded import EncodedCorpus, encode_corpus
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizers

CORPUS = read_parallel(CorpusSpec(generated=50, generated_part="train"))
TOKENIZERS = train_tokenizers(TokenizerSpec(vocab_size=400, joint=False), CORPUS.source, CORPUS.target)


def assert_same(left: EncodedCorpus, right: EncodedCorpus) -> None:
    for a, b in ((left.source, right.source), (left.target, right.target)):
        np.testing.assert_array_equal(a.ids, b.ids, strict=True)
        np.testing.assert_array_equal(a.offsets, b.offsets, strict=True)
    np.testing.assert_array_equal(left.line_numbers, right.line_numbers, strict=True)
    assert left.name == right.name


def refuse_to_encode(*_: object) -> None:
    raise AssertionError("tokenized again")


@pytest.mark.parametrize("at_once", [7, 10_000])
def test_an_encoded_corpus_holds_the_ids_of_every_sentence(
    at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encoded, "_TEXTS_AT_ONCE", at_once)
    corpus = encode_corpus(CORPUS, TOKENIZERS, cache_folder=None)
    assert len(corpus) == len(corpus.source) == 50
    assert corpus.source.ids.dtype == np.int32
    assert [corpus.source[i].tolist() for i in range(50)] == TOKENIZERS.source.encode(CORPUS.source)
    assert [corpus.target[i].tolist() for i in range(50)] == TOKENIZERS.target.encode(CORPUS.target)
    assert corpus.source.lengths.tolist() == [len(corpus.source[i]) for i in range(50)]
    assert corpus.line_numbers.tolist() == CORPUS.line_numbers


def test_a_corpus_is_found_tokenized_the_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = encode_corpus(CORPUS, TOKENIZERS, cache_folder=tmp_path / "new" / "cache")
    monkeypatch.setattr(encoded, "_encode_sides", refuse_to_encode)
    assert_same(first, encode_corpus(CORPUS, TOKENIZERS, cache_folder=tmp_path / "new" / "cache"))


def test_other_texts_and_other_tokenizers_have_other_cache_files(tmp_path: Path) -> None:
    encode_corpus(CORPUS, TOKENIZERS, cache_folder=tmp_path)
    swapped = ParallelCorpus(CORPUS.target, CORPUS.source, CORPUS.line_numbers, CORPUS.name, CORPUS.counts)
    encode_corpus(swapped, TOKENIZERS, cache_folder=tmp_path)
    others = train_tokenizers(TokenizerSpec(vocab_size=300), CORPUS.source, CORPUS.target)
    encode_corpus(CORPUS, others, cache_folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("damage", ["empty", "truncated", "flipped", "other"])
def test_a_damaged_cache_file_is_rewritten(tmp_path: Path, damage: str) -> None:
    first = encode_corpus(CORPUS, TOKENIZERS, cache_folder=tmp_path)
    (path,) = tmp_path.iterdir()
    sound = path.read_bytes()
    damaged = {
        "empty": b"",
        "truncated": sound[:-5],
        "flipped": sound[:-40] + bytes([sound[-40] ^ 1]) + sound[-39:],
        "other": b"not safetensors at all",
    }
    path.write_bytes(damaged[damage])
    assert_same(first, encode_corpus(CORPUS, TOKENIZERS, cache_folder=tmp_path))
    assert path.read_bytes() == sound
    assert list(tmp_path.iterdir()) == [path]


def test_pairs_with_a_long_side_are_dropped_and_counted() -> None:
    corpus = EncodedCorpus(
        TokenSequences.pack([[5], [5, 6, 7], [5, 6], []]),
        TokenSequences.pack([[8, 9], [8], [8, 9, 9], [7]]),
        np.array([1, 4, 6, 7]),
        "four",
    )
    rest, num_dropped = corpus.within(2)
    assert num_dropped == 2
    assert rest.line_numbers.tolist() == [1, 7]
    assert [rest.source[0].tolist(), rest.source[1].tolist()] == [[5], []]
    assert [rest.target[0].tolist(), rest.target[1].tolist()] == [[8, 9], [7]]
    assert corpus.within(3)[1] == 0
    assert len(corpus.within(0)[0]) == 0
