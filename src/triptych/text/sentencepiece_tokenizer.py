"""SentencePiece models over a vocabulary of their own, as Marian checkpoints have them."""

from collections.abc import Sequence
from typing import Literal, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from triptych.errors import DataError
from triptych.text.lines import as_lines
from triptych.text.sentencepiece import SPACE_MARK, load_sentencepiece
from triptych.text.tokenizers import SentenceTokenizer, join_punctuation

# What the file of such a tokenizer begins with.
FILE_START = '{"format":"triptych sentencepiece'


@final
class SentencePieceRecord(BaseModel):
    """All that a `SentencePieceTokenizer` is made of, as its file has it.

    Attributes:
        format: what tells the file from others; it stands first.
        pad_id: fills rows up.
        bos_id: begins every output.
        eos_id: ends source and output.
        unk_id: stands for every piece that is not in the vocabulary.
        joins_punctuation: after decoding, the space before punctuation and English contractions is
            taken out (`clean_up_tokenization_spaces` in Hugging Face's files).
        vocab: the pieces by id, which need not be those of the model.
        model: the content of the SentencePiece model file, which cuts text into pieces.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

    format: Literal["triptych sentencepiece 2"] = "triptych sentencepiece 2"
    pad_id: int = Field(ge=0)
    bos_id: int = Field(ge=0)
    eos_id: int = Field(ge=0)
    unk_id: int = Field(ge=0)
    joins_punctuation: bool = False
    vocab: tuple[str, ...]
    model: bytes

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
    """A SentencePiece model over a vocabulary of its own, as Marian models have.

    A text is normalised first, so decoding does not give back every text as it was, and what is not in
    the vocabulary is unknown. A text that begins with a code such as `>>de<<` has it as its first token:
    models with several target languages are told the language so. Special tokens that a text spells out
    are always text.
    """

    def __init__(self, record: SentencePieceRecord) -> None:
        self._record = record
        self._processor = load_sentencepiece(record.model)
        self.pad_id, self.bos_id, self.eos_id = record.pad_id, record.bos_id, record.eos_id
        self.unk_id = record.unk_id
        self._special = frozenset((record.pad_id, record.bos_id, record.eos_id, record.unk_id))
        # No text may have these, not even one whose unknown characters spell them.
        never = {record.vocab[token] for token in (record.pad_id, record.eos_id, record.unk_id)}
        ids = list(range(len(self._processor)))
        pieces = zip(self._processor.id_to_piece(ids), self._processor.is_control(ids), strict=True)
        never |= {piece for piece, is_control in pieces if is_control}
        self._ids = {piece: token for token, piece in enumerate(record.vocab) if piece not in never}

    @property
    def record(self) -> SentencePieceRecord:
        """All that it is made of."""
        return self._record

    @property
    def vocab_size(self) -> int:
        """Number of tokens, specials included."""
        return len(self._record.vocab)

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of padding, beginning, end and the unknown piece."""
        return self._special

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The pieces by id."""
        return self._record.vocab

    def encode(
        self, texts: str | Sequence[str], *, add_special: bool = False, parse_special: bool = False
    ) -> list[list[int]]:
        """Token ids of each text, without beginning and end; a string is one text."""
        return [
            [self._ids.get(piece, self._record.unk_id) for piece in self._cut(text)]
            for text in as_lines(texts)
        ]

    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]:
        """Text of each sequence of ids; unknown tokens are special."""
        vocab, skipped = self._record.vocab, self._special if skip_special else frozenset()
        texts = [
            self._processor.decode([vocab[token] for token in some if token not in skipped])
            .replace(SPACE_MARK, " ")
            .strip()
            for some in ids
        ]
        return [join_punctuation(text) for text in texts] if self._record.joins_punctuation else texts

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token as the vocabulary has it."""
        return [self._record.vocab[token] for token in ids]

    def to_json(self) -> str:
        """The tokenizer in a format of its own."""
        return self._record.model_dump_json()

    @classmethod
    def from_json(cls, text: str, origin: str) -> "SentencePieceTokenizer":
        """The inverse of `to_json`."""
        try:
            return cls(SentencePieceRecord.model_validate_json(text))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise DataError(f"{origin} is damaged or not a tokenizer: {where}: {first['msg']}") from None
        except ValueError as error:
            raise DataError(f"{origin} is damaged or not a tokenizer: model: {error}") from None

    def opening(self, text: str) -> str:
        """The code such as `>>de<<` that a text begins with."""
        if text.startswith(">>") and (end := text.find("<<")) != -1:
            return text[: end + 2]
        return ""

    def _cut(self, text: str) -> list[str]:
        code = self.opening(text)
        # As bytes, which may hold half of a surrogate pair: it becomes U+FFFD.
        rest = text[len(code) :].encode(errors="surrogatepass")
        pieces: list[str] = self._processor.encode(rest, out_type=str)
        return [code, *pieces] if code else pieces
