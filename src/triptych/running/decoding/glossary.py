"""Glossaries: required terms of a translation, and beam search under this constraint.

The search is dynamic beam allocation. Hypotheses are grouped in banks by their number of term tokens. Every
bank has a share of the beam, and only a hypothesis with all terms may end. Source: Post & Vilar 2018, arXiv
1804.06609. Two differences: the beam grows by one hypothesis for each term token, so that every bank has a
share, and tokens that would lengthen the last word of a term are forbidden right after it.
"""

import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from triptych.errors import UsageError
from triptych.running.text.scripts import UNSPACED, is_unspaced
from triptych.running.text.tokenizers import SentenceTokenizer

_LETTER = rf"[^\W{UNSPACED}]"
_NO_TERM = -1


@final
class Glossary:
    """Terms of the source language and their translations.

    A term matches whole words with the glossary's spelling; only the case of its first letter may differ. If
    terms overlap, the first counts; if terms start together, the longest counts.
    """

    def __init__(self, terms: Mapping[str, str], tokenizer: SentenceTokenizer) -> None:
        """Raise `UsageError` for an empty term, or for a translation that the vocabulary cannot express."""
        pairs = [
            (_composed(source.strip()), " ".join(target.split()))
            for source, target in terms.items()
        ]
        for source, target in pairs:
            if not source or not target:
                raise UsageError(
                    f"glossary: {source!r} → {target!r}: give a term and its translation"
                )
        pairs.sort(key=lambda pair: -len(pair[0]))
        either = "|".join(
            f"((?i:{re.escape(term[0])}){re.escape(term[1:])})" for term, _ in pairs
        )
        # Without terms, the pattern never matches.
        self._pattern = re.compile(
            rf"(?<!{_LETTER})(?:{either or '(?!)'})(?!{_LETTER})"
        )
        self._ids = [_ids(target, tokenizer) for _, target in pairs]
        self._lengthening = _lengthening(tokenizer)

    def sentence(self, text: str, ids: Sequence[int]) -> "Sentence":
        """Attach to the tokens of a text the translations of its terms."""
        places = [match.lastindex for match in self._pattern.finditer(_composed(text))]
        terms = dict.fromkeys(self._ids[place - 1] for place in places if place)
        whole = []
        for term in terms:
            # A longer term requires the terms within it.
            longer = [other for other in terms if len(other) > len(term)]
            if not any(_last_end(other, term) for other in longer):
                whole.append(term)
        return Sentence(ids, Terms(whole, self._lengthening) if whole else None)


@lru_cache(maxsize=8)
def _lengthening(tokenizer: SentenceTokenizer) -> bytes:
    """Return a byte for each token: 1 if the token continues the word before it, else 0."""
    (before,) = _encoded(["a"], tokenizer)
    texts = tokenizer.decode(
        [[*before, token] for token in range(tokenizer.vocab_size)]
    )
    return bytes(re.match(f"a{_LETTER}", text.strip()) is not None for text in texts)


def _ids(term: str, tokenizer: SentenceTokenizer) -> tuple[int, ...]:
    """Return the tokens of a term inside a sentence."""
    # The term is encoded after a word, since tokens at the start of a text may differ.
    alone, before, both = _encoded([term, "a", f"a {term}"], tokenizer)
    ids = both[len(before) :] if both[: len(before)] == before else alone
    if is_unspaced(term[0]) and not tokenizer.decode([ids[:1]])[0].strip():
        ids = ids[1:]
    written = _composed(tokenizer.decode([ids])[0].strip())
    if written != _composed(term) or not {*ids}.isdisjoint(tokenizer.rules.never):
        raise UsageError(
            f"glossary: the model's tokens cannot write {term!r} (they give {written!r})"
        )
    return tuple(ids)


def _composed(text: str) -> str:
    """Return a text in normalization form C, in which equal letters are equal characters."""
    return unicodedata.normalize("NFC", text)


def _encoded(texts: Sequence[str], tokenizer: SentenceTokenizer) -> list[list[int]]:
    special = tokenizer.special_ids
    return [
        [token for token in ids if token not in special]
        for ids in tokenizer.encode(texts)
    ]


def _last_end(ids: tuple[int, ...], term: tuple[int, ...]) -> int:
    """Return the end of the last occurrence of a term in `ids`; 0 if it does not occur."""
    ends = range(len(ids), len(term) - 1, -1)
    return next((end for end in ends if ids[end - len(term) : end] == term), 0)


@final
class Terms:
    """Required terms of an output, as sequences of tokens."""

    def __init__(
        self, terms: Sequence[tuple[int, ...]], lengthening: bytes = b""
    ) -> None:
        """Require terms; a term may not be part of another term.

        `lengthening` has a byte for each token: 1 if the token continues the word before it.
        """
        self._terms = tuple(terms)
        self._lengthening = lengthening
        self.num_tokens = sum(map(len, terms))
        self.tokens = frozenset(chain.from_iterable(terms))

    def num_met(self, ids: tuple[int, ...]) -> int:
        """Count the tokens of completed terms in an output, and of a term that the output ends in."""
        ends = [_last_end(ids, term) for term in self._terms]
        since = ids[max(ends) :]
        begun = [0]
        for term, end in zip(self._terms, ends, strict=True):
            lengths = range(0 if end else min(len(term), len(since)), 0, -1)
            begun.append(next((n for n in lengths if since[-n:] == term[:n]), 0))
        return max(begun) + sum(
            len(term) for term, end in zip(self._terms, ends, strict=True) if end
        )

    def best(
        self,
        log_probs: Float[Tensor, "beam vocab"],
        beam: Sequence[tuple[tuple[int, ...], float]],
        end: int,
    ) -> list[tuple[float, int, int, float]]:
        """Return the best continuations of a beam (tokens and totals): finished, then open, by falling total.

        A continuation is a total, a row, a token and its log-probability.
        """
        # Right after a term, a token must not lengthen the term's last word.
        lengthening = torch.from_numpy(
            np.frombuffer(self._lengthening, dtype=bool).copy()
        )
        for row, (ids, _) in enumerate(beam):
            if any(ids and ids[-len(term) :] == term for term in self._terms):
                log_probs[row, : len(lengthening)][
                    lengthening.to(log_probs.device)
                ] = -math.inf
        tokens = sorted(self.tokens)
        of_terms = log_probs[:, tokens].tolist()
        # A bank needs at most `len(beam)` tokens of a row besides term tokens and the end.
        likely = log_probs.topk(min(len(beam) + len(tokens) + 1, log_probs.shape[1]))
        banks: list[list[tuple[float, int, int, float]]] = [
            [] for _ in range(self.num_tokens + 1)
        ]
        for row, (ids, total) in enumerate(beam):
            most = zip(
                likely.indices[row].tolist(), likely.values[row].tolist(), strict=True
            )
            without = self.num_met((*ids, _NO_TERM))
            for token, log_prob in {
                **dict(most),
                **dict(zip(tokens, of_terms[row], strict=True)),
            }.items():
                bank = self.num_met((*ids, token)) if token in self.tokens else without
                if total + log_prob > -math.inf and (
                    token != end or bank == self.num_tokens
                ):
                    banks[bank].append((total + log_prob, row, token, log_prob))
        ranked = [sorted(bank, reverse=True) for bank in banks]
        # Each bank gets an equal share of the beam; unused shares go to the best remaining candidates.
        going = [[one for one in bank if one[2] != end] for bank in ranked]
        share = len(beam) // len(banks)
        chosen = [*chain.from_iterable(bank[:share] for bank in going)]
        left = sorted(chain.from_iterable(bank[share:] for bank in going), reverse=True)
        chosen += left[: len(beam) - len(chosen)]
        ends = [
            one for one in ranked[-1][: len(beam) - self.num_tokens] if one[2] == end
        ]
        return ends + sorted(chosen, reverse=True)


class Sentence(list[int]):
    """Token ids of a sentence with the terms of its translation."""

    def __init__(self, ids: Sequence[int], terms: Terms | None = None) -> None:
        super().__init__(ids)
        self.terms = terms
