"""BPE dropout: the merges of a tokenizer, each left out by chance."""

import json
import math
from collections import Counter
from functools import cache
from itertools import product

import numpy as np
import pytest

from triptych.errors import UsageError
from triptych.running.text import TokenizerPair
from triptych.training.corpora.bpe_dropout import BpeDropout
from triptych.training.corpora.corpora import CorpusSpec, ParallelCorpus, read_parallel
from triptych.training.corpora.encoded import EncodedCorpus, encode_corpus
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizers

CORPUS = read_parallel(CorpusSpec(generated=60, generated_part="train"))
TOKENIZERS = train_tokenizers(TokenizerSpec(vocab_size=400, joint=False), CORPUS.source, CORPUS.target)
ODD = ["", "<pad><eos> a", "  two  spaces ", "日本語 text\tтекст", "e\u0301té 😀", "a" * 50]


def dropout_of(
    text: ParallelCorpus, probability: float, seed: int = 3, tokenizers: TokenizerPair = TOKENIZERS
) -> tuple[BpeDropout, EncodedCorpus]:
    corpus = encode_corpus(text, tokenizers, cache_folder=None)
    return BpeDropout(corpus, text, tokenizers, probability, seed), corpus


def lists(corpus: EncodedCorpus) -> list[list[list[int]]]:
    return [[side[i].tolist() for i in range(len(side))] for side in (corpus.source, corpus.target)]


def text_of(sentences: list[str]) -> ParallelCorpus:
    return ParallelCorpus(sentences, sentences, [*range(len(sentences))], "toy", CORPUS.counts)


@pytest.mark.parametrize("text", [CORPUS, text_of(ODD)], ids=["generated", "odd"])
def test_without_dropout_the_pieces_are_those_of_the_library(text: ParallelCorpus) -> None:
    dropout, usual = dropout_of(text, 0.0)
    assert lists(dropout.of_epoch(0, max_tokens=1000)) == lists(usual)


@pytest.mark.parametrize("probability", [0.1, 0.5, 0.99])
def test_with_dropout_the_text_is_the_same_in_more_pieces(probability: float) -> None:
    text = text_of([*ODD, *CORPUS.source])
    dropout, usual = dropout_of(text, probability)
    drawn = dropout.of_epoch(1, max_tokens=1000)
    for side, tokenizer in (("source", TOKENIZERS.source), ("target", TOKENIZERS.target)):
        ids = [one.tolist() for one in map(getattr(drawn, side).__getitem__, range(len(text)))]
        assert tokenizer.decode(ids, skip_special=False) == tokenizer.decode(
            tokenizer.encode(text.source), skip_special=False
        )
        assert (getattr(drawn, side).lengths >= getattr(usual, side).lengths).all()
    assert drawn.source.lengths.sum() > usual.source.lengths.sum()


def test_pieces_depend_on_seed_and_epoch_alone() -> None:
    first, _ = dropout_of(CORPUS, 0.3)
    again, _ = dropout_of(CORPUS, 0.3)
    other, _ = dropout_of(CORPUS, 0.3, seed=4)
    before = lists(first.of_epoch(2, max_tokens=1000))
    assert lists(first.of_epoch(5, max_tokens=1000)) != before
    assert lists(again.of_epoch(2, max_tokens=1000)) == before
    assert lists(other.of_epoch(2, max_tokens=1000)) != before


def test_pairs_that_get_too_long_keep_their_pieces() -> None:
    dropout, usual = dropout_of(CORPUS, 0.9)
    longest = int(np.median(np.maximum(usual.source.lengths, usual.target.lengths)))
    drawn = dropout.of_epoch(0, max_tokens=longest)
    free = dropout.of_epoch(0, max_tokens=10_000)
    kept = 0
    for i in range(len(CORPUS)):
        fits = max(len(free.source[i]), len(free.target[i])) <= longest
        expected = free if fits else usual
        kept += not fits
        assert drawn.source[i].tolist() == expected.source[i].tolist()
        assert drawn.target[i].tolist() == expected.target[i].tolist()
    assert 0 < kept < len(CORPUS)


def reference(
    symbols: tuple[str, ...], ranks: dict[tuple[str, str], int], p: float
) -> dict[tuple[str, ...], float]:
    """Probability of each segmentation, by algorithm 1 of the paper and all its random choices."""

    @cache
    def of(symbols: tuple[str, ...]) -> dict[tuple[str, ...], float]:
        places = [i for i in range(len(symbols) - 1) if symbols[i : i + 2] in ranks]
        found: Counter[tuple[str, ...]] = Counter()
        for dropped in product((True, False), repeat=len(places)):
            chance = math.prod(p if one else 1 - p for one in dropped)
            left = [place for place, is_dropped in zip(places, dropped, strict=True) if not is_dropped]
            if not left:
                found[symbols] += chance
                continue
            best = min(left, key=lambda place: (ranks[symbols[place], symbols[place + 1]], place))
            merged = (*symbols[:best], symbols[best] + symbols[best + 1], *symbols[best + 2 :])
            for pieces, share in of(merged).items():
                found[pieces] += chance * share
        return found

    return of(symbols)


def test_segmentations_are_as_frequent_as_the_papers_algorithm_makes_them() -> None:
    times, p = 4000, 0.4
    texts = ["banana bandana ananas"] * 10
    pair = train_tokenizers(TokenizerSpec(vocab_size=290), texts, texts)
    tokenizer = pair.source
    record = json.loads(tokenizer.to_json())["model"]
    ranks = {(left, right): rank for rank, (left, right) in enumerate(record["merges"])}
    dropout, _ = dropout_of(text_of(["banana"] * times), p, tokenizers=pair)
    drawn = dropout.of_epoch(0, max_tokens=1000).source
    vocabulary = tokenizer.vocabulary
    counts = Counter(tuple(vocabulary[token] for token in drawn[i].tolist()) for i in range(times))
    expected = reference(("Ġ", *"banana"), ranks, p)
    assert counts.keys() <= expected.keys()
    assert len(expected) > 5
    for pieces, share in expected.items():
        deviation = (share * (1 - share) / times) ** 0.5
        assert abs(counts[pieces] / times - share) < 5 * deviation + 1e-9


def test_other_tokenizers_are_refused() -> None:
    pair = train_tokenizers(TokenizerSpec(kind="unigram", vocab_size=300), CORPUS.source, CORPUS.target)
    with pytest.raises(UsageError, match=r"bpe_dropout needs pieces of byte-pair encoding"):
        dropout_of(CORPUS, 0.1, tokenizers=pair)
