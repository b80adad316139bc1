"""Tokenizers and the pair of them that a translator has.

Those that are trained here work on bytes and are lossless on any text; those of others' checkpoints
are SentencePiece models.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from threading import Lock
from typing import Literal, final

import tokenizers
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

from triptych.errors import DataError, UsageError
from triptych.files import write_text
from triptych.text.lines import SURROGATE, as_lines
from triptych.text.sentencepiece import SPACE_MARK, load_sentencepiece

PAD_ID = 0
BOS_ID = 1
EOS_ID = 2
SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
BYTE_ALPHABET = tuple(sorted(pre_tokenizers.ByteLevel.alphabet()))

# What `parse_special` sets in the library's object must stay until the texts are encoded.
_ENCODING = Lock()

_SOURCE_FILE = "tokenizer.json"
_TARGET_FILE = "tokenizer.target.json"

_SENTENCE_PIECE_START = '{"format":"triptych sentencepiece'
# What is joined again, and in which order: the rules of Hugging Face's `clean_up_tokenization`.
_PARTED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


@final
class TokenizerSpec(BaseModel):
    """How to train the tokenizers.

    Attributes:
        kind: "bpe", byte-pair encoding; "unigram", the unigram language model; for language models also
            "characters", those of the training text, and "bytes", the 256 of them.
        vocab_size: most tokens per vocabulary, bytes and specials included; a small text yields fewer, and of
            characters the most frequent are kept.
        joint: one vocabulary for both sides, or one for each.
        min_frequency: how often a pair of pieces must occur to be merged (BPE only; 2 where not given).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["bpe", "unigram", "characters", "bytes"] = "bpe"
    vocab_size: int = Field(default=8000, ge=1)
    joint: bool = True
    min_frequency: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check_that_the_options_agree(self) -> "TokenizerSpec":
        if self.kind != "bpe" and self.min_frequency is not None:
            raise ValueError(f'min_frequency goes with kind = "bpe", but kind is "{self.kind}"; leave it out')
        return self


class Tokenizer(ABC):
    """Text to token ids and back.

    Unless `parse_special` is set, `<eos>` and its like in a text are text.

    Attributes:
        pad_id: fills rows up; None where there is none, as with all of these.
        bos_id: begins a text.
        eos_id: ends a text.
        unk_id: stands for what is not in the vocabulary.
        mask_id: stands for a hidden token.
    """

    pad_id: int | None
    bos_id: int | None
    eos_id: int | None
    unk_id: int | None = None
    mask_id: int | None = None

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of tokens, specials included; every id is below it."""

    @property
    @abstractmethod
    def special_ids(self) -> frozenset[int]:
        """The ids of all special tokens, which `decode` skips."""

    @property
    @abstractmethod
    def vocabulary(self) -> tuple[str, ...]:
        """Every token by id, as its file has it; no two are the same."""

    @abstractmethod
    def encode(
        self, texts: str | Sequence[str], *, add_special: bool = False, parse_special: bool = False
    ) -> list[list[int]]:
        """Token ids of each text.

        Args:
            texts: a string is one text.
            add_special: put the special tokens around a text that the checkpoint's files say (`[CLS]` and
                `[SEP]`, `<s>`); tokenizers that are trained here put none.
            parse_special: read special tokens that a text spells out (`[MASK]`, `<|im_end|>`) as such.
        """

    @abstractmethod
    def decode(self, ids: Sequence[Sequence[int]], *, skip_special: bool = True) -> list[str]:
        """Text of each sequence of ids; broken UTF-8 becomes U+FFFD.

        Args:
            ids: a sequence for each text.
            skip_special: leave out special tokens; else they are written as the vocabulary has them.
        """

    @abstractmethod
    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Each token in readable form, for pictures; spaces are shown as "▁"."""

    def opening(self, text: str) -> str:
        """What every part of a text has to begin with when it is translated in parts; "" for nothing."""
        return ""

    def chat(self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True) -> str:
        """The text of a conversation, as the checkpoint's chat template writes it.

        Encode it with `parse_special`, and without `add_special`: the template writes them itself.

        Args:
            messages: each with a "role" and a "content".
            add_generation_prompt: end with the beginning of an answer.

        Raises:
            UsageError: there is no chat template, or it refuses the messages.
            DataError: the template is damaged, runs for too long or writes too much.
        """
        raise UsageError("the tokenizer has no chat template; give a prompt without --chat")

    @abstractmethod
    def to_json(self) -> str:
        """The tokenizer as text, whole."""

    def save(self, path: Path) -> None:
        """Write the tokenizer, atomically, as JSON."""
        write_text(path, self.to_json())


class SentenceTokenizer(Tokenizer):
    """A tokenizer of translators: sentences have a beginning, an end and padding.

    Attributes:
        pad_id: fills rows up; no text has it.
        bos_id: begins every output.
        eos_id: ends source and output.
    """

    pad_id: int
    bos_id: int
    eos_id: int

    @staticmethod
    def load(path: Path) -> "SentenceTokenizer":
        """Read what `save` wrote.

        Raises:
            DataError: no such file, damaged, or a tokenizer of another make.
        """
        text = read_saved(path)
        if text.startswith(_SENTENCE_PIECE_START):
            return SentencePieceTokenizer.from_json(text, str(path))
        return ByteLevelTokenizer.from_json(text, str(path))


def read_saved(path: Path) -> str:
    """The text that `Tokenizer.save` wrote.

    Raises:
        DataError: no such file, or not text.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; a run folder holds its tokenizer") from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


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
        """The inverse of `to_json`.

        Raises:
            DataError: a text that is damaged or of another make; `origin` says where it came from.
        """
        _require_dense(text, origin)
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        # The library raises bare Exception for whatever is wrong with the text.
        except Exception as error:
            raise DataError(f"{origin} is damaged or not a tokenizer: {error}") from error
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
    """No id is past the number of tokens: the library takes memory for every id below the largest.

    Raises:
        DataError: one is.
    """
    try:
        record = json.loads(text)
        added = [token["id"] for token in record.get("added_tokens") or []]
        vocab = record["model"]["vocab"]
        ids = [*added, *vocab.values()] if isinstance(vocab, dict) else added
        too_large = [number for number in ids if number >= len(added) + len(vocab)]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise DataError(f"{origin} is damaged or not a tokenizer: {error}") from None
    if too_large:
        raise DataError(
            f"{origin} is damaged: a token has the id {too_large[0]}, and there are {len(vocab)} tokens"
        )


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

    Raises:
        UsageError: sentencepiece is not installed.
        ValueError: the record's model is damaged.
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
        """The inverse of `to_json`.

        Raises:
            DataError: a text that is damaged; `origin` says where it came from.
        """
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


def encode_batch(
    inner: tokenizers.Tokenizer, texts: str | Sequence[str], *, add_special: bool, parse_special: bool
) -> list[list[int]]:
    """`Tokenizer.encode` of a tokenizer of the tokenizers library.

    Raises:
        DataError: a text that holds half of a surrogate pair.
    """
    lines = list(as_lines(texts))
    with _ENCODING:
        # Not stored in the file: without it, special tokens spelled out in a text turn special.
        inner.encode_special_tokens = not parse_special
        try:
            encodings = inner.encode_batch_fast(lines, add_special_tokens=add_special)
        # The library says a TypeError for it.
        except (UnicodeEncodeError, TypeError):
            if any(SURROGATE.search(line) for line in lines):
                raise DataError("the text holds half of a surrogate pair; give UTF-8 text") from None
            raise
    return [encoding.ids for encoding in encodings]


def join_punctuation(text: str) -> str:
    """Take out the space before punctuation and English contractions, as Hugging Face's clean-up does."""
    for parts in _PARTED:
        text = text.replace(parts, parts.strip())
    return text


@final
@dataclass(frozen=True)
class TokenizerPair:
    """The tokenizers of the two sides; the same object twice where the vocabulary is joint."""

    source: SentenceTokenizer
    target: SentenceTokenizer

    @property
    def joint(self) -> bool:
        """Whether both sides share one vocabulary."""
        return self.source is self.target

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, and `tokenizer.target.json` where the target has its own."""
        self.source.save(folder / _SOURCE_FILE)
        if self.joint:
            # Left over from an earlier pair, it would be taken for the target's.
            (folder / _TARGET_FILE).unlink(missing_ok=True)
        else:
            self.target.save(folder / _TARGET_FILE)

    @classmethod
    def load(cls, folder: Path) -> "TokenizerPair":
        """Read what `save` wrote.

        Raises:
            DataError: a file is missing, damaged, or of another make.
        """
        source = SentenceTokenizer.load(folder / _SOURCE_FILE)
        if not (folder / _TARGET_FILE).exists():
            return cls(source, source)
        return cls(source, SentenceTokenizer.load(folder / _TARGET_FILE))


def train_tokenizers(
    spec: TokenizerSpec, source_texts: Iterable[str], target_texts: Iterable[str]
) -> TokenizerPair:
    """Train the tokenizers of both sides; the same texts give the same tokenizers.

    Args:
        spec: kind and size.
        source_texts: source sentences.
        target_texts: target sentences.

    Returns:
        Tokenizers of at most `spec.vocab_size` tokens each.

    Raises:
        UsageError: a size that does not hold the bytes and the special tokens, with both; or a kind that
            translators do not have.
    """
    if spec.kind not in ("bpe", "unigram"):
        raise UsageError(f'tokenizer.kind = "{spec.kind}" goes with language models; set "bpe" or "unigram"')

    def train(texts: Iterable[str]) -> SentenceTokenizer:
        return ByteLevelTokenizer(train_pieces(spec, texts, _assemble, SPECIAL_TOKENS))

    if spec.joint:
        tokenizer = train(chain(source_texts, target_texts))
        return TokenizerPair(tokenizer, tokenizer)
    return TokenizerPair(train(source_texts), train(target_texts))


def train_pieces(
    spec: TokenizerSpec,
    texts: Iterable[str],
    assemble: Callable[[models.Model], tokenizers.Tokenizer],
    special_tokens: Sequence[str],
) -> tokenizers.Tokenizer:
    """Train byte-level pieces; the same texts give the same ones.

    Args:
        spec: kind, "bpe" or "unigram", and size.
        texts: training texts.
        assemble: puts normalization, the cut into words and decoding around a model.
        special_tokens: get the first ids.

    Raises:
        UsageError: a size that does not hold the bytes and the special tokens.
    """
    # BPE fits the bytes and specials exactly; the unigram trainer overshoots its size unless one more fits.
    smallest = len(special_tokens) + len(BYTE_ALPHABET) + (spec.kind == "unigram")
    if spec.vocab_size < smallest:
        raise UsageError(
            f"vocab_size = {spec.vocab_size} is too small: the bytes and the special tokens need at least "
            f"{smallest} with kind = {spec.kind!r}"
        )
    if spec.kind == "bpe":
        inner = assemble(models.BPE())
        trainer = trainers.BpeTrainer(
            vocab_size=spec.vocab_size,
            min_frequency=spec.min_frequency or 2,
            special_tokens=list(special_tokens),
            initial_alphabet=list(BYTE_ALPHABET),
            show_progress=False,
        )
        inner.train_from_iterator(texts, trainer)
        return inner
    inner = assemble(models.Unigram())
    unigrams = trainers.UnigramTrainer(
        vocab_size=spec.vocab_size,
        special_tokens=list(special_tokens),
        initial_alphabet=list(BYTE_ALPHABET),
        show_progress=False,
    )
    inner.train_from_iterator(texts, unigrams)
    scores = dict(json.loads(inner.to_str())["model"]["vocab"])
    settled = assemble(models.Unigram(_settle_scores(scores, special_tokens), None, False))
    settled.add_special_tokens(list(special_tokens))
    return settled


def _settle_scores(scores: dict[str, float], special_tokens: Sequence[str]) -> list[tuple[str, float]]:
    """The vocabulary in an order, and with scores, that training again gives again.

    The library's trainer goes through its words in an order that changes from run to run, and the last
    digits of the scores change with it. So do the scores of the bytes it adds at the end, which are the
    lowest score plus 0, 0.0001, 0.0002 and so on. So scores are rounded, and all those bytes get the lowest.
    """
    lowest = min(scores.values())
    highest_added = lowest + 0.0001 * len(BYTE_ALPHABET)
    settled = {
        piece: round(lowest if len(piece) == 1 and score < highest_added else score, 6)
        for piece, score in scores.items()
        if piece not in special_tokens
    }
    ordered = sorted(settled.items(), key=lambda item: (-item[1], item[0]))
    return [(token, 0.0) for token in special_tokens] + ordered


def _assemble(model: models.Model) -> tokenizers.Tokenizer:
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
    ours = json.loads(_assemble(models.BPE()).to_str())
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
