"""Tokenizers of translators: trained byte-level tokenizers, SentencePiece models, and pairs of tokenizers."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import tokenizers
from pydantic import BaseModel, ConfigDict, Field, model_validator
from tokenizers import decoders, models, normalizers, pre_tokenizers

from triptych.errors import DataError
from triptych.running.text.given import as_lines
from triptych.running.text.pieces import piece_of
from triptych.running.text.sentencepiece import SPACE_MARK, load_sentencepiece
from triptych.running.text.tokenizers import (
    SentenceTokenizer,
    TextEncoder,
    by_library,
    join_punctuation,
    read_record,
    read_saved,
    token_ids_in,
)

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
BYTE_ALPHABET = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))


@final
class ByteLevelTokenizer(SentenceTokenizer):
    """A byte-level tokenizer trained by `train_tokenizers`: `decode(encode(x)) == NFC(x)` for every text x.

    The text gets a leading space, removed again by decoding. It is split into words (with the space before
    the word), runs of digits and runs of punctuation. The vocabulary contains all 256 bytes, so unknown
    tokens do not occur.

    Attributes:
        pad_id: padding token `<pad>`, 0.
        bos_id: beginning of sentence `<bos>`, 1.
        eos_id: end of sentence `<eos>`, 2.
    """

    pad_id = PAD_ID
    bos_id = BOS_ID
    eos_id = EOS_ID
    special_ids = frozenset((PAD_ID, BOS_ID, EOS_ID))

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner, self.vocab_size = inner, int(inner.get_vocab_size())
        self._encoder = TextEncoder(inner)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The tokens by id, with bytes as characters of the byte alphabet."""
        return tuple(
            str(self._inner.id_to_token(token)) for token in range(self.vocab_size)
        )

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        add_special: bool = False,
        parse_special: bool = False,
    ) -> list[list[int]]:
        """Encode each text into token ids, without `<bos>` and `<eos>`; a string is one text."""
        return self._encoder.encode(
            texts, add_special=add_special, parse_special=parse_special
        )

    def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special: bool = True
    ) -> list[str]:
        """Decode each sequence of ids; invalid UTF-8 becomes U+FFFD."""
        texts: list[str] = self._inner.decode_batch(
            [list(some) for some in ids], skip_special_tokens=skip_special
        )
        return texts

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return each token in readable form: spaces are shown as "▁", parts of characters by their bytes."""
        found = []
        for token in map(int, ids):
            if token in self.special_ids:
                found.append(SPECIAL_TOKENS[token])
                continue
            found.append(
                piece_of(
                    bytes(BYTE_OF[char] for char in str(self._inner.id_to_token(token)))
                )
            )
        return found

    def to_json(self) -> str:
        """Serialize the tokenizer in the format of the tokenizers library."""
        return str(self._inner.to_str(pretty=True))

    @classmethod
    def from_json(cls, text: str, origin: str) -> "ByteLevelTokenizer":
        """Read a tokenizer serialized by `to_json`."""
        # Check the ids first: the library allocates memory for every id up to the largest.
        numbers, count = token_ids_in(text, origin)
        if max(numbers, default=0) >= max(count, 1):
            raise DataError(
                f"{origin} is damaged: a token has the id {max(numbers)}, and there are at most {count} "
                "tokens"
            )
        inner = by_library(lambda: tokenizers.Tokenizer.from_str(text), origin)
        difference = _difference_from_ours(inner)
        if difference is not None:
            raise DataError(
                f"{origin} is a tokenizer of another program ({difference}); give one that triptych trained"
            )
        return cls(inner)


def assemble(model: models.Model) -> tokenizers.Tokenizer:
    """Build a tokenizer around a model, with the normalizer, pre-tokenizer and decoder of all our models."""
    inner = tokenizers.Tokenizer(model)
    # ByteLevel's add_prefix_space skips a text with a leading space, so decoding would lose this space.
    inner.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Prepend(" ")]
    )
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    return inner


def _difference_from_ours(inner: tokenizers.Tokenizer) -> str | None:
    """Return the difference between a tokenizer and ours; None for a tokenizer trained by triptych."""
    theirs = json.loads(inner.to_str())
    ours = json.loads(assemble(models.BPE()).to_str())
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if theirs[part] != ours[part]:
            return f"another {part}"
    if [inner.token_to_id(token) for token in SPECIAL_TOKENS] != [
        PAD_ID,
        BOS_ID,
        EOS_ID,
    ]:
        return (
            f"special tokens that are not {', '.join(SPECIAL_TOKENS)} with ids 0, 1, 2"
        )
    missing = [char for char in BYTE_ALPHABET if inner.token_to_id(char) is None]
    return f"{len(missing)} bytes missing from its vocabulary" if missing else None


_PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(0x100) if byte not in _PRINTABLE]
# The byte of each character of the byte alphabet.
BYTE_OF = {
    **{chr(byte): byte for byte in _PRINTABLE},
    **{chr(0x100 + index): byte for index, byte in enumerate(_OTHERS)},
}

# Beginning of the file of a `SentencePieceTokenizer`.
FILE_START = '{"format":"triptych sentencepiece'


@final
class SentencePieceRecord(BaseModel):
    """The content of a `SentencePieceTokenizer`'s file."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64"
    )

    # Marks the file; always its first field.
    format: Literal["triptych sentencepiece 2"] = "triptych sentencepiece 2"
    pad_id: int = Field(ge=0)  # padding token
    bos_id: int = Field(ge=0)  # first token of every output
    eos_id: int = Field(ge=0)  # last token of source and output
    unk_id: int = Field(ge=0)  # token for pieces outside the vocabulary
    # True = decoding removes the space before punctuation and English contractions
    # (`clean_up_tokenization_spaces` in Hugging Face's files)
    joins_punctuation: bool = False
    vocab: tuple[str, ...]  # pieces by id; may differ from the model's pieces
    model: (
        bytes  # content of the SentencePiece model file, used to split text into pieces
    )

    @model_validator(mode="after")
    def _ids_are_of_the_vocabulary(self) -> "SentencePieceRecord":
        for name in ("pad_id", "bos_id", "eos_id", "unk_id"):
            if getattr(self, name) >= len(self.vocab):
                raise ValueError(
                    f"{name} {getattr(self, name)} is outside the vocabulary of {len(self.vocab)}"
                )
        if len(set(self.vocab)) < len(self.vocab):
            raise ValueError("a piece is in the vocabulary twice")
        return self


@final
class SentencePieceTokenizer(SentenceTokenizer):
    """A SentencePiece model with a separate vocabulary, as in Marian models.

    Text is normalised first, so decoding does not restore every text exactly, and pieces outside the
    vocabulary are unknown. A leading code such as `>>de<<` becomes the first token: it selects the target
    language of multilingual models. Special tokens in a text are always read as plain text.
    """

    def __init__(self, record: SentencePieceRecord) -> None:
        self.record = record
        self._processor = load_sentencepiece(record.model)
        self.pad_id = record.pad_id
        self.bos_id = record.bos_id
        self.eos_id = record.eos_id
        self.unk_id = record.unk_id
        self.vocab_size = len(record.vocab)
        self.special_ids = frozenset(
            (record.pad_id, record.bos_id, record.eos_id, record.unk_id)
        )
        # Texts never encode to these pieces, even if a text spells them out in unknown characters.
        never = {
            record.vocab[token]
            for token in (record.pad_id, record.eos_id, record.unk_id)
        }
        ids = list(range(len(self._processor)))
        pieces = zip(
            self._processor.id_to_piece(ids),
            self._processor.is_control(ids),
            strict=True,
        )
        never |= {piece for piece, is_control in pieces if is_control}
        self._ids = {
            piece: token
            for token, piece in enumerate(record.vocab)
            if piece not in never
        }

    @property
    def vocabulary(self) -> tuple[str, ...]:
        return self.record.vocab

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        add_special: bool = False,
        parse_special: bool = False,
    ) -> list[list[int]]:
        """Encode each text into token ids, without beginning and end; a string is one text."""
        return [
            [self._ids.get(piece, self.record.unk_id) for piece in self._cut(text)]
            for text in as_lines(texts)
        ]

    def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special: bool = True
    ) -> list[str]:
        """Decode each sequence of ids; the unknown token counts as special."""
        vocab = self.record.vocab
        skipped = self.special_ids if skip_special else frozenset()
        texts = [
            self._processor.decode(
                [vocab[token] for token in some if token not in skipped]
            )
            .replace(SPACE_MARK, " ")
            .strip()
            for some in ids
        ]
        return (
            [join_punctuation(text) for text in texts]
            if self.record.joins_punctuation
            else texts
        )

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return each token by its piece in the vocabulary."""
        return [self.record.vocab[token] for token in ids]

    def to_json(self) -> str:
        """Serialize the tokenizer in triptych's format."""
        return self.record.model_dump_json()

    @classmethod
    def from_json(cls, text: str, origin: str) -> "SentencePieceTokenizer":
        """Read a tokenizer serialized by `to_json`."""
        record = read_record(SentencePieceRecord, text, origin)
        try:
            return cls(record)
        except ValueError as error:
            raise DataError(
                f"{origin} is damaged or not a tokenizer: model: {error}"
            ) from None

    @classmethod
    def from_model(cls, model: bytes, origin: str) -> "SentencePieceTokenizer":
        """Make a tokenizer of the content of a SentencePiece model file.

        The ids of the special tokens are the same for all models: padding 0, beginning 1, end 2, unknown 3.
        The other pieces follow in the order of the model.
        """
        try:
            processor = load_sentencepiece(model)
        except ValueError as error:
            raise DataError(
                f"{origin} is damaged or not a SentencePiece model: {error}"
            ) from None
        pieces = processor.id_to_piece([*range(len(processor))])
        # A model may lack all special tokens except the unknown token.
        special = [
            name if number < 0 else pieces[number]
            for name, number in (
                ("<pad>", processor.pad_id()),
                ("<s>", processor.bos_id()),
                ("</s>", processor.eos_id()),
                ("<unk>", processor.unk_id()),
            )
        ]
        vocab = [*special, *(piece for piece in pieces if piece not in special)]
        return cls(
            SentencePieceRecord(
                pad_id=PAD_ID,
                bos_id=BOS_ID,
                eos_id=EOS_ID,
                unk_id=EOS_ID + 1,
                vocab=tuple(vocab),
                model=model,
            )
        )

    def opening(self, text: str) -> str:
        """Return the leading code of a text, such as `>>de<<`; "" if it is missing."""
        if text.startswith(">>") and (end := text.find("<<")) != -1:
            return text[: end + 2]
        return ""

    def _cut(self, text: str) -> list[str]:
        code = self.opening(text)
        pieces: list[str] = self._processor.encode(text[len(code) :], out_type=str)
        return [code, *pieces] if code else pieces


_SOURCE_FILE = "tokenizer.json"
_TARGET_FILE = "tokenizer.target.json"


def read_sentence_tokenizer(path: Path) -> SentenceTokenizer:
    """Read a translator's tokenizer, written by `Tokenizer.save`."""
    text = read_saved(path)
    if text.startswith(FILE_START):
        return SentencePieceTokenizer.from_json(text, str(path))
    return ByteLevelTokenizer.from_json(text, str(path))


@final
@dataclass(frozen=True)
class TokenizerPair:
    """The source and target tokenizers; the same object twice if the vocabulary is joint."""

    source: SentenceTokenizer
    target: SentenceTokenizer

    @property
    def joint(self) -> bool:
        """Return True if source and target share a vocabulary."""
        return self.source is self.target

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, and `tokenizer.target.json` if the target tokenizer is separate."""
        self.source.save(folder / _SOURCE_FILE)
        if self.joint:
            # A file left over from an earlier pair would be read as the target tokenizer.
            (folder / _TARGET_FILE).unlink(missing_ok=True)
        else:
            self.target.save(folder / _TARGET_FILE)

    @classmethod
    def load(cls, folder: Path) -> "TokenizerPair":
        """Read the tokenizers written by `save`."""
        source = read_sentence_tokenizer(folder / _SOURCE_FILE)
        if not (folder / _TARGET_FILE).exists():
            return cls(source, source)
        return cls(source, read_sentence_tokenizer(folder / _TARGET_FILE))
