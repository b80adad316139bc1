"""BPE dropout: other pieces of the same words in each epoch.

Byte-pair encoding merges the two neighbours with the best rank, again and again. With dropout, each possible
merge is left out with probability p at each step. A model sees more pieces of rare words and learns parts
shared by words. The dropout of the tokenizers library has no seed, so that a resumed run would differ.
Source: Provilkov et al. 2020, arXiv 1910.13267, algorithm 1.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import final

import numpy as np
import tokenizers
from jaxtyping import Int, Int64

from triptych.errors import UsageError
from triptych.running.text import (
    ByteLevelTokenizer,
    SentenceTokenizer,
    TokenizerPair,
    TokenSequences,
    offsets_of,
)
from triptych.training.corpora.corpora import ParallelCorpus
from triptych.training.corpora.encoded import EncodedCorpus

# Sentences segmented at a time: the arrays of a step are a few times as large as the text.
_SENTENCES_AT_ONCE = 20_000
_NO_MERGE = np.iinfo(np.int64).max


@final
class BpeDropout:
    """Training text with newly drawn pieces for each epoch."""

    def __init__(
        self,
        corpus: EncodedCorpus,
        text: ParallelCorpus,
        tokenizers: TokenizerPair,
        probability: float,
        seed: int,
    ) -> None:
        """Cut the text into words; `corpus` has its pieces without dropout."""
        self._corpus = corpus
        self._sides = (
            _Segmenter(tokenizers.source, text.source),
            _Segmenter(tokenizers.target, text.target),
        )
        self._probability = probability
        self._seed = seed

    def of_epoch(self, epoch: int, *, max_tokens: int) -> EncodedCorpus:
        """Return the text with the pieces of an epoch, which depend on seed and epoch alone.

        Pairs past `max_tokens` keep their pieces without dropout.
        """
        source, target = (
            side.draw(
                self._probability,
                np.random.default_rng([self._seed, epoch, number]),
            )
            for number, side in enumerate(self._sides)
        )
        # Dropout leaves words in more pieces, so a pair can exceed the limit.
        longest = np.maximum(source.lengths, target.lengths)
        fits = longest <= max_tokens
        return replace(
            self._corpus,
            source=_either(fits, source, self._corpus.source),
            target=_either(fits, target, self._corpus.target),
        )


def _either(
    first: np.ndarray, these: TokenSequences, others: TokenSequences
) -> TokenSequences:
    """Return, for each sequence, that of `these` where `first` is true, else that of `others`."""
    if first.all():
        return these
    lengths = np.where(first, these.lengths, others.lengths)
    ids = np.empty(int(lengths.sum()), dtype=np.int32)
    is_first = np.repeat(first, lengths)
    ids[is_first] = these.where(first).ids
    ids[~is_first] = others.where(~first).ids
    return TokenSequences(ids, offsets_of(lengths))


@final
class _Segmenter:
    """Source or target texts as sequences of words, and the merges of the tokenizer."""

    def __init__(self, tokenizer: SentenceTokenizer, texts: Sequence[str]) -> None:
        record = json.loads(tokenizer.to_json())
        if (
            not isinstance(tokenizer, ByteLevelTokenizer)
            or record["model"]["type"] != "BPE"
        ):
            raise UsageError(
                "training.bpe_dropout needs pieces of byte-pair encoding, which triptych trained "
                "(tokenizer.kind = 'bpe'): leave it out"
            )
        inner = tokenizers.Tokenizer.from_str(tokenizer.to_json())
        vocab: dict[str, int] = record["model"]["vocab"]
        self._merges = _Merges(record["model"]["merges"], vocab, inner)
        numbers: dict[str, int] = {}  # number of each word
        sentences = [
            [
                numbers.setdefault(word, len(numbers))
                for word, _ in inner.pre_tokenizer.pre_tokenize_str(
                    inner.normalizer.normalize_str(text)
                )
            ]
            for text in texts
        ]
        self._sentences = TokenSequences.pack(sentences)
        self._words = TokenSequences.pack(
            [[vocab[char] for char in word] for word in numbers]
        )

    def draw(
        self, probability: float, generator: np.random.Generator
    ) -> TokenSequences:
        """Return the pieces of each text with dropout."""
        parts = []
        for start in range(0, len(self._sentences), _SENTENCES_AT_ONCE):
            bounds = self._sentences.offsets[start : start + _SENTENCES_AT_ONCE + 1]
            words = self._sentences.ids[bounds[0] : bounds[-1]]
            pieces = self._merges.segment(
                _taken(self._words, words), probability, generator
            )
            # A sentence has the pieces of its words in order.
            of_words = np.concatenate([[0], np.cumsum(pieces.lengths)])
            parts.append((pieces.ids, np.diff(of_words[bounds - bounds[0]])))
        ids, lengths = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        return TokenSequences(ids, offsets_of(lengths))


def _taken(sequences: TokenSequences, chosen: Int[np.ndarray, " n"]) -> TokenSequences:
    """Return the chosen sequences, in this order."""
    lengths = sequences.lengths[chosen]
    offsets = offsets_of(lengths)
    shifts = np.repeat(sequences.offsets[chosen] - offsets[:-1], lengths)
    return TokenSequences(sequences.ids[np.arange(len(shifts)) + shifts], offsets)


@final
class _Merges:
    """The merges of a tokenizer as arrays, for all words of a text at a time."""

    def __init__(
        self,
        merges: Sequence[Sequence[str]],
        vocab: dict[str, int],
        inner: tokenizers.Tokenizer,
    ) -> None:
        special = {token.content for token in inner.get_added_tokens_decoder().values()}
        # No text encodes to a special token.
        pairs = [
            (vocab[left], vocab[right], vocab[left + right])
            for left, right in merges
            if left + right not in special
        ]
        self._size = 1 + max(vocab.values())
        table = np.array(pairs, dtype=np.int64).reshape(-1, 3)
        keys = table[:, 0] * self._size + table[:, 1]
        self._made = table[:, 2]
        self._order = np.argsort(keys, kind="stable")
        self._keys = keys[self._order]

    def segment(
        self,
        words: TokenSequences,
        probability: float,
        generator: np.random.Generator,
    ) -> TokenSequences:
        """Merge the bytes of each word into pieces; every step merges one pair of each unfinished word."""
        ids = words.ids.astype(np.int64)
        owner = np.repeat(np.arange(len(words)), words.lengths)
        ranks = self._ranks(ids, owner)
        done: list[tuple[np.ndarray, np.ndarray]] = []
        while len(ids):
            left = ranks
            if probability:
                dropped = generator.random(len(ranks)) < probability
                left = np.where(dropped, _NO_MERGE, ranks)
            starts = np.flatnonzero(np.diff(owner, prepend=-1))
            best = np.minimum.reduceat(left, starts)
            lengths = np.diff(starts, append=len(ids))
            goes_on = np.repeat(best < _NO_MERGE, lengths)
            done.append((owner[~goes_on], ids[~goes_on]))
            is_best = (left == np.repeat(best, lengths)) & goes_on
            merged = np.flatnonzero(is_best)
            merged = merged[np.diff(owner[merged], prepend=-1) != 0]  # the leftmost
            ids[merged] = self._made[ranks[merged]]
            keep = goes_on
            keep[merged + 1] = False
            # A merge changes only the two pairs next to it.
            stale = np.zeros(len(ids), dtype=bool)
            stale[merged] = True
            stale[merged[merged > 0] - 1] = True
            ids, owner, ranks, stale = (
                array[keep] for array in (ids, owner, ranks, stale)
            )
            new = np.flatnonzero(stale)
            ranks[new] = self._ranks(ids, owner, new)
        owners = np.concatenate([one for one, _ in done])
        pieces = np.concatenate([one for _, one in done])
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=len(words))
        return TokenSequences(pieces[order].astype(np.int32), offsets_of(counts))

    def _ranks(
        self,
        ids: Int64[np.ndarray, " num_symbols"],
        owner: Int64[np.ndarray, " num_symbols"],
        places: Int64[np.ndarray, " num_places"] | None = None,
    ) -> Int64[np.ndarray, " num_places"]:
        """Return the rank of the merge of each symbol with the next symbol of the word."""
        places = np.arange(len(ids)) if places is None else places
        found = np.full(len(places), _NO_MERGE)
        if not len(self._keys):
            return found
        following = np.minimum(places + 1, len(ids) - 1)
        is_pair = (owner[following] == owner[places]) & (following > places)
        # A pair of symbols is encoded as a single integer, for a binary search among the merges.
        keys = ids[places] * self._size + ids[following]
        nearest = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        is_merge = is_pair & (self._keys[nearest] == keys)
        found[is_merge] = self._order[nearest[is_merge]]
        return found
