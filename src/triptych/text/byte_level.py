"""The byte-level tokenizers that are trained for translators: lossless on any text."""

import json
from collections.abc import Sequence
from typing import final

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from triptych.errors import DataError
from triptych.text.sentencepiece import SPACE_MARK
from triptych.text.tokenizers import SentenceTokenizer, by_library, encode_batch, ids_of

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
BYTE_ALPHABET = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))


@final
class ByteLevelTokenizer(SentenceTokenizer):
    """What `train_tokenizers` makes: `decode(encode(x)) == NFC(x)` for every text x.

    A space is put in front of the text before it is cut into words, each with the space before it, numbers
    and runs of punctuation; it is taken off again after decoding. The 256 bytes are in the vocabulary, so no
    token is ever unknown.

    Attributes:
        pad_id: 0, `<pad>`.
        bos_id: 1, `<bos>`.
        eos_id: 2, `<eos>`.
    """

    pad_id = PAD_ID
    bos_id = BOS_ID
    eos_id = EOS_ID

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of `<pad>`, `<bos>` and `<eos>`."""
        return frozenset((PAD_ID, BOS_ID, EOS_ID))

    @property
    def vocab_size(self) -> int:
        """Number of tokens, bytes and specials included."""
        return int(self._inner.get_vocab_size())

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """Every token by id, its bytes in the characters that stand for them."""
        return tuple(str(self._inner.id_to_token(token)) for token in range(self.vocab_size))

    def encode(
        self, texts: str | Sequence[str], *, add_special: bool = False, parse_special: bool = False
    ) -> list[list[int]]:
        """Token ids of each text, without `<bos>` and `<eos>`; a string is one text."""
        return encode_batch(self._inner, texts, add_special=add_special, parse_special=parse_special)

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]:
        """Text of each sequence of ids; broken UTF-8 becomes U+FFFD."""
        texts: list[str] = self._inner.decode_batch(
            [list(some) for some in ids], skip_special_tokens=skip_special
        )
        return texts

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token in readable form, for pictures.

        Spaces are shown as "▁", and bytes that are only part of a character as U+FFFD.
        """
        return [self._readable(int(token)) for token in ids]

    def to_json(self) -> str:
        """The tokenizer in the format of the tokenizers library, which others read too."""
        return str(self._inner.to_str(pretty=True))

    @classmethod
    def from_json(cls, text: str, origin: str) -> "ByteLevelTokenizer":
        """The inverse of `to_json`."""
        _require_dense(text, origin)
        inner = by_library(lambda: tokenizers.Tokenizer.from_str(text), origin)
        difference = _difference_from_ours(inner)
        if difference is not None:
            raise DataError(
                f"{origin} is a tokenizer of another program ({difference}); give one that triptych trained"
            )
        return cls(inner)

    def _readable(self, token_id: int) -> str:
        if token_id < len(SPECIAL_TOKENS):
            return SPECIAL_TOKENS[token_id]
        token = str(self._inner.id_to_token(token_id))
        return (
            bytes(BYTE_OF[char] for char in token).decode("utf-8", errors="replace").replace(" ", SPACE_MARK)
        )


def _require_dense(text: str, origin: str) -> None:
    """Check that no id is past the number of tokens."""
    ids, count = ids_of(text, origin)
    if max(ids, default=0) >= max(count, 1):
        raise DataError(
            f"{origin} is damaged: a token has the id {max(ids)}, and there are at most {count} tokens"
        )


def assemble(model: models.Model) -> tokenizers.Tokenizer:
    """A tokenizer around the model, with all that is the same for every model."""
    inner = tokenizers.Tokenizer(model)
    # ByteLevel's own add_prefix_space leaves a text alone that begins with a space, which then gets lost.
    inner.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Prepend(" ")])
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return inner


def _difference_from_ours(inner: tokenizers.Tokenizer) -> str | None:
    """What a foreign tokenizer does differently; None for one of ours."""
    theirs = json.loads(inner.to_str())
    ours = json.loads(assemble(models.BPE()).to_str())
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if theirs[part] != ours[part]:
            return f"another {part}"
    if [inner.token_to_id(token) for token in SPECIAL_TOKENS] != [PAD_ID, BOS_ID, EOS_ID]:
        return f"special tokens that are not {', '.join(SPECIAL_TOKENS)} with ids 0, 1, 2"
    missing = [char for char in BYTE_ALPHABET if inner.token_to_id(char) is None]
    return f"{len(missing)} bytes missing from its vocabulary" if missing else None


def _byte_of_char() -> dict[str, int]:
    """The byte that each character of the byte alphabet stands for.

    Printable Latin-1 characters stand for their own byte, U+0100 and on for the others in order.
    Source: OpenAI's GPT-2 encoder, github.com/openai/gpt-2, src/encoder.py.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    own = {chr(byte): byte for byte in printable}
    return own | {chr(0x100 + index): byte for index, byte in enumerate(others)}


BYTE_OF = _byte_of_char()
