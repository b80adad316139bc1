"""Token rules of a checkpoint, which forbid next tokens whatever their probability.

The rules match `transformers`: `NoRepeatNGram`, `NoBadWords`, `SuppressTokens`,
`SuppressTokensAtBegin`, `MinNewTokensLength` and `MinLength` of `generation/logits_process.py`, version
5.23.0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True)
class TokenRules:
    """Rules that forbid next tokens."""

    no_repeat_ngram_size: int = (
        0  # size of n-grams forbidden to repeat, prompt included; 0 for no rule
    )
    bad_words: tuple[tuple[int, ...], ...] = ()  # forbidden token sequences
    never: tuple[int, ...] = ()
    never_first: tuple[int, ...] = ()  # tokens forbidden right after the prompt
    min_new_tokens: int = 0  # minimum number of new tokens before an end token
    min_length: int = 0  # minimum length of a text before an end token, prompt included
    ends: tuple[int, ...] = ()  # end tokens

    def forbidden(self, ids: Sequence[int], num_prompt: int) -> set[int]:
        """Return the tokens forbidden after a text whose prompt has `num_prompt` tokens."""
        found = {*self.never}
        if len(ids) == num_prompt:
            found |= {*self.never_first}
        if len(ids) - num_prompt < self.min_new_tokens or len(ids) < self.min_length:
            found |= {*self.ends}
        for word in self.bad_words:
            *before, last = word
            if len(word) == 1 or (
                len(word) <= len(ids) and [*ids[-len(before) :]] == before
            ):
                found.add(last)
        return found | self._repeated(ids)

    def _repeated(self, ids: Sequence[int]) -> set[int]:
        """Return the tokens that would repeat an n-gram of the text."""
        size = self.no_repeat_ngram_size
        if not size or len(ids) + 1 < size:
            return set()
        before = [*ids[len(ids) - size + 1 :]]
        starts = range(len(ids) - size + 1)
        return {ids[i + size - 1] for i in starts if [*ids[i : i + size - 1]] == before}


NO_RULES = TokenRules()
