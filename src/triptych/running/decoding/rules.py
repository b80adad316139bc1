"""Tokens that may not come next, whatever their probability: what a checkpoint asks of its continuations.

Each rule is one of `transformers`: `NoRepeatNGram`, `NoBadWords`, `SuppressTokens`, `SuppressTokensAtBegin`,
`MinNewTokensLength` and `MinLength` of `generation/logits_process.py`, version 5.23.0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class TokenRules:
    """Rules on the tokens that may not come next."""

    no_repeat_ngram_size: int = 0  # no n tokens in a row come twice, the prompt's included; 0 for no rule
    bad_words: tuple[tuple[int, ...], ...] = ()  # tokens in a row that never come
    never: tuple[int, ...] = ()
    never_first: tuple[int, ...] = ()  # right after the prompt
    min_new_tokens: int = 0  # no end before so many tokens are new
    min_length: int = 0  # no end before the text, its prompt included, has so many tokens
    ends: tuple[int, ...] = ()  # the tokens that end a text

    def forbidden(self, ids: Sequence[int], num_prompt: int) -> set[int]:
        """Return the tokens that may not come after a text whose prompt has `num_prompt` tokens."""
        found = {*self.never}
        if len(ids) == num_prompt:
            found |= {*self.never_first}
        if len(ids) - num_prompt < self.min_new_tokens or len(ids) < self.min_length:
            found |= {*self.ends}
        for word in self.bad_words:
            *before, last = word
            if len(word) == 1 or (len(word) <= len(ids) and [*ids[-len(before) :]] == before):
                found.add(last)
        return found | self._repeated(ids)

    def _repeated(self, ids: Sequence[int]) -> set[int]:
        """Return the tokens that would end n tokens in a row that the text has already."""
        size = self.no_repeat_ngram_size
        if not size or len(ids) + 1 < size:
            return set()
        before = [*ids[len(ids) - size + 1 :]]
        starts = range(len(ids) - size + 1)
        return {ids[i + size - 1] for i in starts if [*ids[i : i + size - 1]] == before}


NO_RULES = TokenRules()
