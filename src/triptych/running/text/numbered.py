"""Token ids without a vocabulary, for models without a tokenizer."""

from collections.abc import Mapping, Sequence
from typing import NoReturn, final

from triptych.errors import TriptychError
from triptych.running.text.given import TextPair
from triptych.running.text.tokenizers import Tokenizer


@final
class NumberedTokens(Tokenizer):
    """A replacement for a missing tokenizer: tokens are shown by their ids, and texts are refused."""

    pad_id = bos_id = eos_id = None
    special_ids = frozenset[int]()

    def __init__(self, vocab_size: int, why: TriptychError) -> None:
        """Build a replacement for `vocab_size` tokens; `why` is the error about the missing tokenizer."""
        self.vocab_size = vocab_size
        self.why = why

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return tuple(map(str, range(self.vocab_size)))

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        add_special: bool = False,
        parse_special: bool = False,
    ) -> NoReturn:
        """Refuse texts with the error about the missing tokenizer."""
        self._refuse()

    def encode_pairs(
        self, pairs: Sequence[TextPair], *, parse_special: bool = False
    ) -> NoReturn:
        """Refuse texts with the error about the missing tokenizer."""
        self._refuse()

    def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special: bool = True
    ) -> list[str]:
        """Return the ids of each sequence as text with spaces between ids."""
        return [" ".join(self.pieces(some)) for some in ids]

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return each token's id as text."""
        return [str(int(token)) for token in ids]

    def conversation(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool
    ) -> NoReturn:
        """Refuse conversations with the error about the missing tokenizer."""
        self._refuse()

    def to_json(self) -> NoReturn:
        """Refuse serialization with the error about the missing tokenizer."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        kind = type(self.why)
        message = str(self.why).removesuffix(".")
        raise kind(f"{message}; token ids are read without one")
