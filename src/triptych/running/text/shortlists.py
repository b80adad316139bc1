"""Lexical shortlists: the target tokens allowed for each source token.

The file is a vocabulary map of CTranslate2: every line has a source token, a tab, and target tokens separated
by spaces. The line without a source token has the target tokens allowed in every sentence.

Source: Brown et al. 1993, aclanthology.org/J93-2003 (IBM Model 1); Moore 2004, aclanthology.org/P04-1066
(smoothing of its counts).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import final

import numpy as np
from jaxtyping import Int64

from triptych.errors import DataError, UsageError
from triptych.running.text.lines import iterate_file
from triptych.running.text.sentence_tokenizers import TokenizerPair
from triptych.running.text.sequences import TokenSequences

_SPACES = frozenset(" \t\r\n")
_ROUNDS = 5
# Added to the count of each pair, or a rare source token would explain every token in its sentences.
_ADDED = 0.1
# Every 20th pair is reserved for the test set, up to this maximum.
_HELD_OUT = 20
_MOST_HELD_OUT = 2000
# Maximum number of training pairs, spread evenly over a longer text.
_MOST_PAIRS = 200_000


@dataclass(frozen=True)
class Coverage:
    """The coverage of a shortlist on a text.

    Attributes:
        size: mean number of target tokens allowed in a sentence.
        share: share of the translations' tokens allowed in their sentences.
    """

    size: float
    share: float


@final
class Shortlist:
    """The target tokens allowed in a sentence, by its source tokens."""

    def __init__(
        self, always: Sequence[int], by_source: Mapping[int, Sequence[int]]
    ) -> None:
        """Store the target tokens allowed in every sentence, and the tokens added by each source token."""
        self.always = np.unique(np.asarray(always, dtype=np.int64))
        self.by_source = {
            token: np.asarray(ids, dtype=np.int64) for token, ids in by_source.items()
        }

    def of(self, sentence: Iterable[int]) -> Int64[np.ndarray, "allowed"]:
        """Return the allowed target tokens of a sentence in ascending order."""
        added = [
            self.by_source[token] for token in set(sentence) if token in self.by_source
        ]
        return np.unique(np.concatenate([self.always, *added]))

    def coverage(self, source: TokenSequences, target: TokenSequences) -> Coverage:
        """Measure the coverage on a text of at least one pair."""
        sizes = []
        inside = 0
        for i in range(len(source)):
            allowed = self.of(source[i].tolist())
            sizes.append(len(allowed))
            inside += int(np.isin(target[i], allowed).sum())
        return Coverage(float(np.mean(sizes)), inside / max(len(target.ids), 1))

    def as_text(self, tokenizers: TokenizerPair) -> str:
        """Return the content of the shortlist's file."""
        source = tokenizers.source.vocabulary
        target = tokenizers.target.vocabulary
        lines = {
            "": self.always,
            **{source[token]: ids for token, ids in self.by_source.items()},
        }
        names = {*lines, *(target[i] for i in chain.from_iterable(lines.values()))}
        if spaced := next(
            (name for name in names if not _SPACES.isdisjoint(name)), None
        ):
            raise UsageError(
                f"the token {spaced!r} has a space in it, which the file of a shortlist cannot say"
            )
        return "".join(
            f"{name}\t{' '.join(target[i] for i in ids)}\n"
            for name, ids in lines.items()
        )


def learn_shortlist(
    source: TokenSequences,
    target: TokenSequences,
    tokenizers: TokenizerPair,
    most: int,
    frequent: int,
) -> tuple[Shortlist, Coverage]:
    """Learn a shortlist from pairs, and measure its coverage on a test set.

    P(t | s) is the probability of IBM Model 1. In each round it is proportional to the sum, over all pairs
    with s and t, of P(t | s) / Σ_{s'} P(t | s'), with s' over the source tokens and an empty token. A source
    token allows its `most` most probable target tokens and the target token of the same name. Every sentence
    allows the `frequent` most frequent target tokens.
    """
    if len(source) < _HELD_OUT:
        raise DataError(
            f"{len(source)} pairs are too few for a shortlist: give at least {_HELD_OUT}"
        )
    held = np.arange(len(source)) % _HELD_OUT == 0
    held &= np.cumsum(held) <= _MOST_HELD_OUT
    judged = source.where(held), target.where(held)
    source = source.where(~held)
    target = target.where(~held)
    num_source = tokenizers.source.vocab_size
    num_target = tokenizers.target.vocab_size
    keys = list[np.ndarray]()
    rows = list[np.ndarray]()
    num_rows = 0
    for i in range(0, len(source), -(-len(source) // _MOST_PAIRS)):
        given = np.append(
            np.unique(source[i]).astype(np.int64), num_source
        )  # the last is the empty token
        keys.append((given[None, :] * num_target + target[i][:, None]).ravel())
        rows.append(
            np.repeat(np.arange(num_rows, num_rows + len(target[i])), len(given))
        )
        num_rows += len(target[i])
    pairs, place = np.unique(np.concatenate(keys), return_inverse=True)
    row = np.concatenate(rows)
    sources = pairs // num_target
    probability = np.ones(len(pairs))
    for _ in range(_ROUNDS):
        share = probability[place]
        share /= np.bincount(row, share)[row]
        counts = np.bincount(place, share)
        probability = (counts + _ADDED) / (
            np.bincount(sources, counts) + _ADDED * num_target
        )[sources]
    best_first = np.lexsort((-probability, sources))
    found: dict[int, list[int]] = {}
    for token, other in zip(
        sources[best_first].tolist(),
        (pairs[best_first] % num_target).tolist(),
        strict=True,
    ):
        if token < num_source and len(kept := found.setdefault(token, [])) < most:
            kept.append(other)
    same = {name: i for i, name in enumerate(tokenizers.target.vocabulary)}
    for token, name in enumerate(tokenizers.source.vocabulary):
        if (other := same.get(name)) is not None and other not in found.setdefault(
            token, []
        ):
            found[token].append(other)
    often = np.argsort(-np.bincount(target.ids, minlength=num_target), kind="stable")[
        :frequent
    ]
    learned = Shortlist([*often.tolist(), tokenizers.target.eos_id], found)
    return learned, learned.coverage(*judged)


def read_shortlist(path: Path, tokenizers: TokenizerPair) -> Shortlist:
    """Read the file of a shortlist for a model with these tokenizers."""
    # Token names are looked up in the vocabularies; -1 marks an unknown name.
    sides = [
        {name: i for i, name in enumerate(side.vocabulary)}
        for side in (tokenizers.source, tokenizers.target)
    ]
    always = [tokenizers.target.eos_id]
    by_source = dict[int, list[int]]()
    for number, line in enumerate(iterate_file(path), start=1):
        name, tab, rest = line.partition("\t")
        names = rest.split(" ") if rest else []
        known = [
            sides[0].get(name, -1) if name else 0,
            *(sides[1].get(token, -1) for token in names),
        ]
        if not tab or -1 in known:
            what = (
                "has no tab"
                if not tab
                else f"{[name, *names][known.index(-1)]!r} is no token of the model"
            )
            raise DataError(
                f"{path}, line {number}: {what}: make the shortlist anew (triptych shortlist)"
            )
        if name:
            by_source[known[0]] = known[1:]
        else:
            always += known[1:]
    if len(always) == 1:
        raise DataError(
            f"{path} has no tokens for every sentence (a line that begins with a tab), so a sentence of "
            "other words would become empty: make the shortlist anew (triptych shortlist)"
        )
    return Shortlist(always, by_source)
