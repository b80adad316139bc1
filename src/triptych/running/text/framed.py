"""The tokenizer of another library's checkpoint as the source or target tokenizer of a translator."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, final

from triptych.running.text.pretrained import PretrainedTokenizer
from triptych.running.text.tokenizers import (
    Conversation,
    OutputRules,
    SentenceTokenizer,
    Tokenizer,
)


class Frame(NamedTuple):
    """The special tokens around a text."""

    before: tuple[int, ...]  # token ids before the text
    after: tuple[int, ...]  # token ids after the text

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "Frame":
        """Return the special tokens added by a tokenizer around every text."""
        (plain,) = tokenizer.encode(["a"])
        (framed,) = tokenizer.encode(["a"], add_special=True)
        places = range(len(framed) - len(plain) + 1)
        start = next((i for i in places if framed[i : i + len(plain)] == plain), 0)
        return cls(tuple(framed[:start]), tuple(framed[start + len(plain) :]))


@final
class FramedTokenizer(SentenceTokenizer):
    """A checkpoint's tokenizer with special tokens around every sentence."""

    reads_special = True

    def __init__(
        self, inner: PretrainedTokenizer, frame: Frame, pad_id: int, rules: OutputRules
    ) -> None:
        self._inner = inner
        self._rules = rules
        (*self._before,), (*self._after, self.eos_id) = frame
        self.vocab_size = inner.vocab_size
        self.special_ids = inner.special_ids
        self.pad_id = pad_id
        self.bos_id = rules.start[0]
        self.unk_id = inner.unk_id
        self.mask_id = inner.mask_id

    @property
    def rules(self) -> OutputRules:
        return self._rules

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return self._inner.vocabulary

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        add_special: bool = False,
        parse_special: bool = False,
    ) -> list[list[int]]:
        """Encode each text within its frame, without the end of sentence unless `add_special`."""
        found = self._inner.encode(texts, parse_special=parse_special)
        after = [*self._after, self.eos_id] if add_special else self._after
        return [[*self._before, *ids, *after] for ids in found]

    def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special: bool = True
    ) -> list[str]:
        return self._inner.decode(ids, skip_special=skip_special)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        return self._inner.pieces(ids)

    def word_pieces(self, ids: Sequence[int]) -> list[str]:
        return self._inner.word_pieces(ids)

    def conversation(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool
    ) -> Conversation:
        return self._inner.conversation(messages, add_generation_prompt)

    def to_json(self) -> str:
        """Serialize the checkpoint's tokenizer, without the frame."""
        return self._inner.to_json()
