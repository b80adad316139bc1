"""The interface of tokenizers, and shared code for the tokenizers library."""

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar, final

import tokenizers
from pydantic import BaseModel, ValidationError

from triptych.errors import DataError, TriptychError, UsageError, first_line
from triptych.files import write_text
from triptych.guesses import about_attribute, about_call
from triptych.literals import SpecialTokens
from triptych.running.text.given import (
    Text,
    TextPair,
    as_lines,
    require_ids,
    require_one,
)
from triptych.untrusted import LONGEST_TOKENIZER, read_limited

Made = TypeVar("Made")
RecordT = TypeVar("RecordT", bound=BaseModel)

# Guards the flag of a library object until the texts are encoded with it.
_ENCODING = Lock()

# Texts with a space to remove, in order: the rules of Hugging Face's `clean_up_tokenization`.
_PARTED = (" .", " ?", " !", " ,", " ' ", " n't", " 'm", " 's", " 've", " 're")


class Conversation(NamedTuple):
    """A conversation rendered by a chat template."""

    text: str
    ids: Callable[
        [SpecialTokens], list[int]
    ]  # computes the token ids; see `Tokenizer.chat_ids`


class EncodedText(NamedTuple):
    """The tokens of a text, or of a pair of texts."""

    ids: list[int]
    # token type of each token, 0 or 1; None for a tokenizer without token types
    types: list[int] | None = None
    # number of the first token of a pair's second text; None for a single text, or an empty second text
    second: int | None = None


class Tokenizer(ABC):
    """A tokenizer: text to token ids and back."""

    vocab_size: int  # number of tokens, special tokens included; every id is below it
    special_ids: frozenset[int]  # ids of the special tokens, skipped by `decode`
    pad_id: int | None  # padding token; None if missing, like all ids below
    bos_id: int | None  # beginning-of-text token
    eos_id: int | None  # end-of-text token
    unk_id: int | None = None  # token for unknown text
    mask_id: int | None = None  # mask token

    @property
    @abstractmethod
    def vocabulary(self) -> tuple[str, ...]:
        """The tokens of the file by id, without duplicates."""

    @abstractmethod
    def encode(
        self,
        texts: str | Sequence[str],
        *,
        add_special: bool = False,
        parse_special: bool = False,
    ) -> list[list[int]]:
        """Encode each text into token ids; a string is one text."""
        # `add_special` puts the special tokens of the checkpoint around each text ([CLS] and [SEP], <s>);
        # `parse_special` reads special tokens spelled out in a text ([MASK], <|im_end|>) as tokens.

    def encode_pairs(
        self, pairs: Sequence[TextPair], *, parse_special: bool = False
    ) -> list[EncodedText]:
        """Encode pairs of texts, with the special tokens around and between them."""
        raise UsageError("the tokenizer has no form for a pair of texts: give one text")

    @abstractmethod
    def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special: bool = True
    ) -> list[str]:
        """Decode each sequence of ids; invalid UTF-8 becomes U+FFFD."""

    @abstractmethod
    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return each token in readable form, for plots: spaces as "▁", single bytes as `<0xF0>`."""

    @cached_property
    def id_of_piece(self) -> Mapping[str, int]:
        """The id of each token in readable form; the lowest of several tokens with one form."""
        pieces = self.pieces(range(self.vocab_size))
        return {piece: number for number, piece in reversed([*enumerate(pieces)])}

    def word_pieces(self, ids: Sequence[int]) -> list[str]:
        """Return `pieces` with the marks of SentencePiece: "▁" at the first token of each word."""
        return self.pieces(ids)

    def opening(self, text: str) -> str:
        """Return the prefix required by every part of a text translated in parts; may be empty."""
        return ""

    def chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """Render a conversation with the checkpoint's chat template; see `chat_ids`."""
        return self.conversation(messages, add_generation_prompt).text

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        add_generation_prompt: bool = True,
        special_tokens: SpecialTokens = "text",
    ) -> list[int]:
        """Encode a conversation.

        Special tokens written by the template are tokens. Special tokens spelled out in a message are plain
        text by default, so that a message cannot pretend to end; "tokens" reads them as tokens, as in
        `transformers`.
        """
        return self.conversation(messages, add_generation_prompt).ids(special_tokens)

    def conversation(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool
    ) -> Conversation:
        """Render a conversation with the checkpoint's chat template, for `chat` and `chat_ids`."""
        raise UsageError("the tokenizer has no chat template: give a plain prompt")

    @abstractmethod
    def to_json(self) -> str:
        """Serialize the whole tokenizer as text."""

    def save(self, path: Path) -> None:
        """Write the tokenizer, atomically, as JSON."""
        write_text(path, self.to_json())

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self.vocab_size:,} tokens"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(about_attribute("tokenizer", name))

        def __call__(self, *given: object, **options: object) -> NoReturn:
            raise TypeError(about_call("tokenizer"))


@final
@dataclass(frozen=True)
class OutputRules:
    """The constraints on every output of a translator, for any search."""

    start: tuple[
        int, ...
    ]  # first input tokens of the decoder, not empty; excluded from the output
    end: int  # last token of an output
    never: tuple[int, ...] = ()  # tokens excluded from outputs
    min_length: int = 0  # minimum number of tokens before the end, `start` included
    # length of n-grams allowed only once, `start` included; 0 = no limit
    no_repeat: int = 0


class SentenceTokenizer(Tokenizer):
    """A tokenizer of translators: sentences have a beginning, an end and padding."""

    pad_id: int  # padding token, never part of a text
    bos_id: int  # first decoder input of every output
    eos_id: int  # last token of source and output
    # True = special tokens spelled out in a sentence are read as tokens, as in `transformers`
    reads_special = False

    def sentence_ids(
        self, text: Text, special_tokens: SpecialTokens = "tokens"
    ) -> list[int]:
        """Encode a sentence without its end; a sentence of token ids loses its end."""
        text = require_one(text, "the text")
        if isinstance(text, str):
            parse_special = self.reads_special and special_tokens == "tokens"
            return self.encode([text.strip()], parse_special=parse_special)[0]
        require_ids(text, self.vocab_size, "the text")
        ids = [*map(int, text)]
        return ids[:-1] if ids[-1:] == [self.eos_id] else ids

    @property
    def rules(self) -> OutputRules:
        """The constraints on outputs in these tokens."""
        return OutputRules((self.bos_id,), self.eos_id, (self.pad_id, self.bos_id))


def read_saved(path: Path) -> str:
    """Read the text written by `Tokenizer.save`."""
    try:
        return read_limited(path, LONGEST_TOKENIZER).decode()
    except FileNotFoundError as error:
        raise DataError(
            f"{path} does not exist; a run folder holds its tokenizer"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error


def read_record(kind: type[RecordT], text: str, origin: str) -> RecordT:
    """Parse the record of a tokenizer in triptych's format, written by `Tokenizer.save`."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise DataError(
            f"{origin} is damaged or not a tokenizer: {where}: {first['msg']}"
        ) from None


def token_ids_in(text: str, origin: str, advice: str = "") -> tuple[list[int], int]:
    """Return ids in a file of the tokenizers library, including the largest, and a bound on their count."""
    # The library allocates memory for every id up to the largest, so ids are checked before it reads a file.
    try:
        record = json.loads(text)
        added = [token["id"] for token in record.get("added_tokens") or []]
        vocab = record["model"]["vocab"]
        own = [*vocab.values()] if isinstance(vocab, dict) else [len(vocab) - 1]
        if strange := [
            number for number in (*added, *own) if not isinstance(number, int)
        ]:
            raise TypeError(f"{strange[0]!r} is no id of a token")
        return [number for number in (*added, *own) if number >= 0], len(added) + len(
            vocab
        )
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(
            f"{origin} is damaged or not a tokenizer: {what}{advice}"
        ) from None


def by_library(make: Callable[[], Made], origin: str, advice: str = "") -> Made:
    """Call the tokenizers library, and convert its errors to `DataError`."""
    try:
        return make()
    except (TriptychError, ValueError):
        raise
    # The library raises bare Exception for any error, or PanicException, a direct subclass of BaseException.
    except BaseException as error:
        if (
            not isinstance(error, Exception)
            and type(error).__name__ != "PanicException"
        ):
            raise
        first = first_line(error)
        if "Oniguruma" in first and "limit" in first:
            raise DataError(
                f"{origin} has a regular expression that the tokenizers library does not run ({first}): it "
                "cannot be read; give a tokenizer with a simpler one"
            ) from None
        raise DataError(
            f"{origin} is damaged or not a tokenizer: {first}{advice}"
        ) from None


@final
class TextEncoder:
    """An encoder of texts with a tokenizer of the tokenizers library."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner

    def encode(
        self, texts: str | Sequence[str], *, add_special: bool, parse_special: bool
    ) -> list[list[int]]:
        """Encode each text; see `Tokenizer.encode`."""
        lines = as_lines(texts)
        if not parse_special and (other := self._of_plain_text) is not None:
            return [
                found.ids
                for found in other.encode_batch_fast(
                    lines, add_special_tokens=add_special
                )
            ]
        return self._encode(lines, add_special=add_special, parse_special=parse_special)

    def encode_pairs(
        self, pairs: Sequence[TextPair], *, parse_special: bool
    ) -> list[EncodedText]:
        """Encode pairs of texts; see `Tokenizer.encode_pairs`."""
        inner = None if parse_special else self._of_plain_text
        # As in `transformers`, an empty second text is left out.
        given = [
            (pair.first, pair.second) if pair.second else pair.first for pair in pairs
        ]
        with _ENCODING:
            if inner is None:
                inner = self._inner
                inner.encode_special_tokens = not parse_special
            found = inner.encode_batch(given, add_special_tokens=True)
        encoded = list[EncodedText]()
        for one in found:
            parts = one.sequence_ids
            second = parts.index(1) if 1 in parts else None
            encoded.append(EncodedText(one.ids, one.type_ids, second))
        return encoded

    def encode_apart(
        self, text: str, own: Sequence[tuple[int, int]]
    ) -> list[int] | None:
        """Encode a text with special tokens in the character ranges `own` only.

        Returns None if special tokens are spelled elsewhere: see `encode_pieces`.
        """
        found = self._with_places(text)
        for token, start, end in found:
            if self._is_spelled(token, text[start:end]) and not _is_within(
                text, start, end, own
            ):
                return None
        return [token for token, *_ in found]

    def encode_pieces(self, text: str, own: Sequence[tuple[int, int]]) -> list[int]:
        """Encode a text as in `encode_apart`, piece by piece between the special tokens in `own`."""
        ids = list[int]()
        begin = 0
        for first, last in own:
            for token, start, end in self._with_places(text[first:last]):
                if self._is_spelled(token, text[first + start : first + end]):
                    ids += self._ids_of_piece(
                        text[begin : first + start], is_first=begin == 0
                    )
                    ids.append(token)
                    begin = first + end
        return ids + self._ids_of_piece(text[begin:], is_first=begin == 0)

    def _ids_of_piece(self, text: str, *, is_first: bool) -> list[int]:
        if not text:
            return []
        if not is_first and (other := self._inside) is not None:
            return list(other.encode(text, add_special_tokens=False).ids)
        return self.encode([text], add_special=False, parse_special=False)[0]

    def _with_places(self, text: str) -> list[tuple[int, int, int]]:
        """Encode a text with special tokens; return each id with its range of characters."""
        with _ENCODING:
            self._inner.encode_special_tokens = False
            found = self._inner.encode(text, add_special_tokens=False)
        return [
            (token, *place)
            for token, place in zip(found.ids, found.offsets, strict=True)
        ]

    def _is_spelled(self, token: int, text: str) -> bool:
        """Return True if a token is special and spelled by its text, not the token of unknown characters."""
        name = self._special.get(token)
        return name is not None and (token != self._unknown or text.strip() == name)

    @cached_property
    def _special(self) -> dict[int, str]:
        added = self._inner.get_added_tokens_decoder()
        return {token: one.content for token, one in added.items() if one.special}

    @cached_property
    def _unknown(self) -> int | None:
        name = _unknown_of(json.loads(self._inner.to_str())["model"])
        return None if name is None else self._inner.token_to_id(name)

    @cached_property
    def _inside(self) -> tokenizers.Tokenizer | None:
        """The tokenizer of plain text in the middle of a text; None if it is not different."""
        record = json.loads((self._of_plain_text or self._inner).to_str())
        if not _never_prepends(record["pre_tokenizer"]):
            return None
        found = tokenizers.Tokenizer.from_str(json.dumps(record))
        found.encode_special_tokens = True
        return found

    def _encode(
        self, lines: Sequence[str], *, add_special: bool, parse_special: bool
    ) -> list[list[int]]:
        with _ENCODING:
            # The file does not store this flag. Its default reads special tokens spelled in a text as tokens.
            self._inner.encode_special_tokens = not parse_special
            found = self._inner.encode_batch_fast(lines, add_special_tokens=add_special)
        return [encoding.ids for encoding in found]

    @cached_property
    def _of_plain_text(self) -> tokenizers.Tokenizer | None:
        """The tokenizer of plain text if the vocabulary has pieces equal to special tokens.

        None if texts cannot produce such pieces: then the library's flag is sufficient.
        """
        special = self._special
        spelled = self._encode(
            [*special.values()], add_special=False, parse_special=False
        )
        names = [
            name
            for (token, name), ids in zip(special.items(), spelled, strict=True)
            if token in ids
        ]
        record = json.loads(self._inner.to_str()) if names else {}
        names = [name for name in names if name != _unknown_of(record["model"])]
        return _without(record, names) if names else None


def _is_within(
    text: str, start: int, end: int, ranges: Sequence[tuple[int, int]]
) -> bool:
    """Return True if a range, without white space at its ends, is within any given range."""
    name = text[start:end]
    start += len(name) - len(name.lstrip())
    end -= len(name) - len(name.rstrip())
    return any(first <= start and end <= last for first, last in ranges)


def _never_prepends(part: dict[str, Any] | None) -> bool:
    """Disable the space before the first word of a text in a pre-tokenizer; return True if it was enabled."""
    changed = False
    for inner in (part or {}).get("pretokenizers", ()):
        changed = _never_prepends(inner) or changed
    if part is not None and part.get("prepend_scheme") == "first":
        part["prepend_scheme"] = "never"
        changed = True
    return changed


def _unknown_of(model: Mapping[str, Any]) -> str | None:
    """Return the token for unknown text."""
    if model["type"] != "Unigram":
        name = model.get("unk_token")
        return None if name is None else str(name)
    return None if model["unk_id"] is None else str(model["vocab"][model["unk_id"]][0])


def _without(record: dict[str, Any], names: Sequence[str]) -> tokenizers.Tokenizer:
    """Return a tokenizer that never produces the pieces of these names."""
    # A renamed piece begins with a space. Pre-tokenized text never contains it: the text is split at spaces,
    # or its spaces are replaced by marks.
    renamed = {name: f" {name}" for name in names}
    model = record["model"]
    if model["type"] == "Unigram":
        model["vocab"] = [
            [renamed.get(piece, piece), score] for piece, score in model["vocab"]
        ]
    else:
        model["vocab"] = {
            renamed.get(piece, piece): token for piece, token in model["vocab"].items()
        }
    if "merges" in model:
        pairs = [
            pair.split(" ", 1) if isinstance(pair, str) else pair
            for pair in model["merges"]
        ]
        model["merges"] = [
            pair for pair in pairs if not {*pair, "".join(pair)} & renamed.keys()
        ]
    for token in record["added_tokens"]:
        token["content"] = renamed.get(token["content"], token["content"])
    found = tokenizers.Tokenizer.from_str(json.dumps(record))
    found.encode_special_tokens = True
    return found


def join_punctuation(text: str) -> str:
    """Remove the space before punctuation and English contractions, like Hugging Face's clean-up."""
    for parts in _PARTED:
        text = text.replace(parts, parts.strip())
    return text


_BROKEN = "\ufffd"
# An incomplete character of UTF-8 has at most three bytes.
_MOST_WITHHELD = 3


@final
class StreamDecoder:
    """A decoder for streams: the concatenated results for single tokens are the text of all tokens.

        stream = StreamDecoder(tokenizer)
        for token in tokens:
            print(stream.push(token), end="", flush=True)
        print(stream.finish())

    A character with bytes in several tokens is returned once it is complete.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        # Tokens are decoded together with earlier tokens of known text, since a tokenizer may treat the
        # beginning of a text differently.
        self._ids: list[int] = []
        self._num_known = 0
        self._given = ""
        self._num_broken = 0  # tokens in a row that left the text with a broken end

    def push(self, token: int) -> str:
        """Add a token and return the newly completed text; "" while a character is incomplete."""
        self._ids.append(token)
        text = self._decode(self._ids)
        end = len(text.rstrip(_BROKEN))
        self._num_broken = self._num_broken + 1 if end < len(text) else 0
        if self._num_broken > _MOST_WITHHELD:
            end = max(end, len(text) - _MOST_WITHHELD)
        new = text[len(self._given) : end]
        self._given += new
        if new and end == len(text):
            self._ids, self._num_known = (
                self._ids[self._num_known :],
                len(self._ids) - self._num_known,
            )
            self._given = self._decode(self._ids)
        return new

    def finish(self) -> str:
        """Return the remaining text, with U+FFFD for incomplete characters."""
        new = self._decode(self._ids)[len(self._given) :]
        self._given += new
        return new

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode([ids], skip_special=self._skip_special)[0]
