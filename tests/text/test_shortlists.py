"""Shortlists are learned from pairs, and read as they were written."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from triptych.errors import DataError, UsageError
from triptych.running.text import TokenizerPair, TokenSequences
from triptych.running.text.shortlists import Shortlist, learn_shortlist, read_shortlist
from triptych.training.corpora.generated import generate_pairs
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizers

PAIRS = generate_pairs(60, "train", seed=1)


@pytest.fixture(scope="module")
def tokenizers() -> TokenizerPair:
    sides = [german for german, _ in PAIRS], [english for _, english in PAIRS]
    return train_tokenizers(TokenizerSpec(vocab_size=300, joint=False), *sides)


@pytest.fixture(scope="module")
def sides(tokenizers: TokenizerPair) -> tuple[TokenSequences, TokenSequences]:
    return (
        TokenSequences.pack(tokenizers.source.encode([german for german, _ in PAIRS])),
        TokenSequences.pack(tokenizers.target.encode([english for _, english in PAIRS])),
    )


def probabilities(
    pairs: list[tuple[list[int], list[int]]], added: float, vocab: int
) -> dict[int, dict[int, float]]:
    """IBM Model 1 as it is written in the paper, with a source token -1 for none."""
    found: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(lambda: 1.0))
    for _ in range(5):
        counts: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
        for source, target in pairs:
            for other in target:
                total = sum(found[token][other] for token in {*source, -1})
                for token in {*source, -1}:
                    counts[token][other] += found[token][other] / total
        found = {
            token: {o: (c + added) / (sum(own.values()) + added * vocab) for o, c in own.items()}
            for token, own in counts.items()
        }
    return found


def test_the_most_probable_tokens_are_kept_of_each(
    tokenizers: TokenizerPair, sides: tuple[TokenSequences, TokenSequences]
) -> None:
    learned, coverage = learn_shortlist(*sides, tokenizers, most=3, frequent=5)
    pairs = [(s.tolist(), t.tolist()) for i, (s, t) in enumerate(zip(*sides, strict=True)) if i % 20]
    expected = probabilities(pairs, 0.1, tokenizers.target.vocab_size)
    names = list(tokenizers.target.vocabulary)
    for token, own in expected.items():
        if token < 0:
            continue
        ids = learned.by_source[token].tolist()
        worst = sorted(own.values(), reverse=True)[:3][-1]
        same = names.index(name) if (name := tokenizers.source.vocabulary[token]) in names else None
        kept = [i for i in ids[:3] if i in own]
        assert len(kept) == min(3, len(own))
        assert all(own[i] >= worst - 1e-12 for i in kept)
        assert same is None or same in ids
    often = np.bincount(np.concatenate([t for _, t in pairs]))
    assert tokenizers.target.eos_id in learned.always
    assert min(often[i] for i in learned.always if i != tokenizers.target.eos_id) >= sorted(often)[-5]
    held = [i for i in range(60) if i % 20 == 0]
    allowed = [learned.of(sides[0][i].tolist()) for i in held]
    assert coverage.size == pytest.approx(np.mean([len(ids) for ids in allowed]))
    inside = [token in ids for i, ids in zip(held, allowed, strict=True) for token in sides[1][i]]
    assert coverage.share == pytest.approx(np.mean(inside))


def test_a_shortlist_is_read_as_it_was_written(
    tokenizers: TokenizerPair, sides: tuple[TokenSequences, TokenSequences], tmp_path: Path
) -> None:
    learned, _ = learn_shortlist(*sides, tokenizers, most=7, frequent=10)
    (tmp_path / "list").write_text(learned.as_text(tokenizers), encoding="utf-8")
    again = read_shortlist(tmp_path / "list", tokenizers)
    for sentence in sides[0]:
        assert again.of(sentence.tolist()).tolist() == learned.of(sentence.tolist()).tolist()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\ta\nhouse", "line 2: has no tab"),
        ("\tnobody-knows-this\n", "line 1: 'nobody-knows-this' is no token"),
        ("nor-that\ta\n", "line 1: 'nor-that' is no token"),
        ("", "has no tokens for every sentence"),
        ("\t\n", "has no tokens for every sentence"),
    ],
)
def test_a_shortlist_of_another_model_is_refused_by_its_line(
    text: str, said: str, tokenizers: TokenizerPair, tmp_path: Path
) -> None:
    (tmp_path / "list").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=said):
        read_shortlist(tmp_path / "list", tokenizers)


def test_too_few_pairs_and_tokens_with_spaces_are_refused(
    tokenizers: TokenizerPair, sides: tuple[TokenSequences, TokenSequences]
) -> None:
    few = np.arange(60) < 19
    with pytest.raises(DataError, match="19 pairs are too few"):
        learn_shortlist(sides[0].where(few), sides[1].where(few), tokenizers, 3, 5)

    class Spaced:
        vocabulary = ("a b",)

    pair = TokenizerPair.__new__(TokenizerPair)
    object.__setattr__(pair, "source", Spaced())
    object.__setattr__(pair, "target", Spaced())
    with pytest.raises(UsageError, match="has a space"):
        Shortlist([0], {}).as_text(pair)
