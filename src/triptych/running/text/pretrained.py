"""Tokenizers of checkpoints of other libraries."""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, Literal, final

import tokenizers
from pydantic import BaseModel, ConfigDict
from tokenizers.models import BPE, WordLevel, WordPiece

from triptych.errors import DataError, UsageError, first_line
from triptych.files import write_json, write_text
from triptych.literals import SpecialTokens
from triptych.running.text.chat import WrittenChat, render_chat
from triptych.running.text.given import TextPair
from triptych.running.text.pieces import piece_of
from triptych.running.text.sentence_tokenizers import BYTE_OF, read_sentence_tokenizer
from triptych.running.text.sentencepiece import SPACE_MARK
from triptych.running.text.tokenizer_classes import CLASSES, class_of, gives_types
from triptych.running.text.tokenizer_making import (
    LARGEST_ID,
    add_tokens,
    is_byte_level,
    read_vocabulary,
    require_added,
)
from triptych.running.text.tokenizer_settings import (
    Token,
    TokenizerSettings,
    content_of,
)
from triptych.running.text.tokenizers import (
    Conversation,
    EncodedText,
    TextEncoder,
    Tokenizer,
    by_library,
    join_punctuation,
    read_record,
    read_saved,
    token_ids_in,
)
from triptych.running.text.vocabularies import (
    VOCABULARIES,
    convert_vocabulary,
    find_vocabulary,
)

_FORMAT_START = '{"format":"triptych pretrained'
_FETCH_AGAIN = "; fetch it again"
# All files of a tokenizer.
TOKENIZER_FILES = (
    *(
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "added_tokens.json",
    ),
    *("chat_template.jinja", "merges.txt", *VOCABULARIES),
)


@final
class PretrainedRecord(BaseModel):
    """The content of a `PretrainedTokenizer`'s file."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    # Marks the file; always its first field.
    format: Literal["triptych pretrained tokenizer 1"] = (
        "triptych pretrained tokenizer 1"
    )
    tokens: dict[str, str]  # named special tokens, such as `eos_token`
    # True = decoding removes the space before punctuation and English contractions
    joins_punctuation: bool = False
    token_types: bool = False  # True = the tokens of a pair have types
    chat_templates: dict[str, str]  # templates by name; "default" for a single template
    inner: str  # tokenizer in the format of the tokenizers library


@final
class PretrainedTokenizer(Tokenizer):
    """The tokenizer of another library's checkpoint, read by `load_tokenizer`."""

    def __init__(self, record: PretrainedRecord, origin: str) -> None:
        self._record = record
        self._origin = origin
        self._inner = by_library(
            lambda: tokenizers.Tokenizer.from_str(record.inner), origin, _FETCH_AGAIN
        )
        self._inner.no_truncation()
        self._inner.no_padding()
        self._encoder = TextEncoder(self._inner)
        added = self._inner.get_added_tokens_decoder()
        self.special_ids = frozenset(
            token for token, content in added.items() if content.special
        )
        ids = {
            name: self._inner.token_to_id(token)
            for name, token in record.tokens.items()
        }
        self.pad_id, self.bos_id, self.eos_id = (
            ids.get(f"{name}_token") for name in ("pad", "bos", "eos")
        )
        self.unk_id, self.mask_id = ids.get("unk_token"), ids.get("mask_token")
        self._is_byte_level = "ByteLevel" in repr(self._inner.decoder)
        self._token_of = {
            token: text
            for text, token in self._inner.get_vocab(with_added_tokens=True).items()
        }
        self.vocab_size = max(self._token_of, default=-1) + 1

    def __reduce__(
        self,
    ) -> tuple[type["PretrainedTokenizer"], tuple[PretrainedRecord, str]]:
        return type(self), (self._record, self._origin)

    @property
    def vocabulary(self) -> tuple[str, ...]:
        """The tokens of the file by id; `<unused 7>` if the id 7 is unused."""
        return tuple(
            self._token_of.get(token, f"<unused {token}>")
            for token in range(self.vocab_size)
        )

    def encode(
        self,
        texts: str | Sequence[str],
        *,
        add_special: bool = False,
        parse_special: bool = False,
    ) -> list[list[int]]:
        """Encode each text into token ids, as in `transformers` if both options are set."""

        def encode() -> list[list[int]]:
            return self._encoder.encode(
                texts, add_special=add_special, parse_special=parse_special
            )

        return by_library(encode, self._origin, _FETCH_AGAIN)

    def encode_pairs(
        self, pairs: Sequence[TextPair], *, parse_special: bool = False
    ) -> list[EncodedText]:
        """Encode pairs of texts, as in `transformers` if `parse_special`."""
        found = by_library(
            lambda: self._encoder.encode_pairs(pairs, parse_special=parse_special),
            self._origin,
            _FETCH_AGAIN,
        )
        if self._record.token_types:
            return found
        return [one._replace(types=None) for one in found]

    def decode(
        self, ids: Sequence[Sequence[int]], *, skip_special: bool = True
    ) -> list[str]:
        """Decode each sequence of ids, as in `transformers`; invalid UTF-8 becomes U+FFFD."""
        sequences = [[int(token) for token in some] for some in ids]
        texts: list[str] = by_library(
            lambda: self._inner.decode_batch(
                sequences, skip_special_tokens=skip_special
            ),
            self._origin,
            _FETCH_AGAIN,
        )
        return (
            [join_punctuation(text) for text in texts]
            if self._record.joins_punctuation
            else texts
        )

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """Return each token in readable form: spaces are shown as "▁", parts of characters by their bytes."""
        found = []
        for token in ids:
            text = self._token_of.get(int(token), f"<unused {token}>")
            if (
                self._is_byte_level
                and token not in self.special_ids
                and BYTE_OF.keys() >= set(text)
            ):
                found.append(piece_of(bytes(BYTE_OF[char] for char in text)))
            else:
                found.append(text.replace(" ", SPACE_MARK))
        return found

    def word_pieces(self, ids: Sequence[int]) -> list[str]:
        """Return `pieces`, where "▁" begins a word whatever mark of words the vocabulary has."""
        # Vocabularies mark the start of a word, its end, or the tokens within it.
        pieces = self.pieces(ids)
        model = self._inner.model
        if isinstance(model, WordLevel):
            return [f"{SPACE_MARK}{piece}" for piece in pieces]
        if isinstance(model, WordPiece):
            inside = model.continuing_subword_prefix
            return [
                piece.removeprefix(inside)
                if piece.startswith(inside)
                else f"{SPACE_MARK}{piece}"
                for piece in pieces
            ]
        end = getattr(model, "end_of_word_suffix", None)
        if not end:
            return pieces
        begins = [True, *(piece.endswith(end) for piece in pieces[:-1])]
        return [
            f"{SPACE_MARK * is_first}{piece.removesuffix(end)}"
            for piece, is_first in zip(pieces, begins, strict=True)
        ]

    def conversation(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool
    ) -> Conversation:
        """Render a conversation with the checkpoint's chat template, for `chat` and `chat_ids`."""
        written = self._written(messages, add_generation_prompt)

        def ids(special_tokens: SpecialTokens) -> list[int]:
            if special_tokens == "tokens":
                return self.encode([written.text], parse_special=True)[0]
            found = self._encoder.encode_apart(*written)
            if found is not None:
                return found
            # Either a message spells a special token, or the origin of the template's tokens is unknown.
            # Harmless messages of the same form distinguish the two cases.
            harmless = self._written(
                [_harmless(message) for message in messages], add_generation_prompt
            )
            if self._encoder.encode_apart(*harmless) is None:
                raise UsageError(
                    f"the chat template of {self._origin} writes special tokens that cannot be told from "
                    'what messages say: special_tokens="tokens" reads both as tokens'
                )
            return self._encoder.encode_pieces(*written)

        return Conversation(written.text, ids)

    def _written(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool
    ) -> WrittenChat:
        templates = self._record.chat_templates
        if not templates:
            raise UsageError("the tokenizer has no chat template: give a plain prompt")
        if "default" not in templates:
            raise UsageError(
                f"{self._origin} has the chat templates {', '.join(sorted(templates))} and no default; "
                "give a prompt without them"
            )
        return render_chat(
            templates["default"],
            messages,
            self._record.tokens,
            add_generation_prompt=add_generation_prompt,
            origin=self._origin,
        )

    @property
    def inner_json(self) -> str:
        """The tokenizer in the format of the tokenizers library."""
        return self._record.inner

    @property
    def chat_template(self) -> str | None:
        """The default chat template; None if it is missing."""
        return self._record.chat_templates.get("default")

    @property
    def named_ids(self) -> dict[str, int]:
        """Ids of named special tokens, such as `eos_token`."""
        ids = {
            name: self._inner.token_to_id(token)
            for name, token in self._record.tokens.items()
        }
        return {name: token for name, token in ids.items() if token is not None}

    def to_json(self) -> str:
        """Serialize the tokenizer in triptych's format."""
        return self._record.model_dump_json()

    def save_files(self, folder: Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json` in Hugging Face's format; the folder exists."""
        record = self._record
        settings: dict[str, object] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **record.tokens,
            "clean_up_tokenization_spaces": record.joins_punctuation,
        }
        if "default" in record.chat_templates:
            settings["chat_template"] = record.chat_templates["default"]
        write_text(folder / "tokenizer.json", record.inner)
        write_json(folder / "tokenizer_config.json", settings)

    @classmethod
    def from_json(cls, text: str, origin: str) -> "PretrainedTokenizer":
        """Read a tokenizer serialized by `to_json`."""
        record = read_record(PretrainedRecord, text, origin)
        _require_moderate_ids(record.inner, origin)
        return cls(record, origin)


def read_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer of any class, written by `Tokenizer.save`."""
    text = read_saved(path)
    if text.startswith(_FORMAT_START):
        return PretrainedTokenizer.from_json(text, str(path))
    return read_sentence_tokenizer(path)


def copy_tokenizer(folder: Path, target: Path) -> None:
    """Replace the tokenizer files in `target` by the files in `folder`, in Hugging Face's format."""
    for name in TOKENIZER_FILES:
        (target / name).unlink(missing_ok=True)
        if (folder / name).is_file():
            shutil.copyfile(folder / name, target / name)


def load_tokenizer(
    folder: Path, *, vocab_size: int | None = None
) -> PretrainedTokenizer:
    """Load the tokenizer of a checkpoint in Hugging Face's format."""
    # If `tokenizer.json` is missing, `transformers` converts the older vocabulary files.
    path = folder / "tokenizer.json"
    if path.exists():
        text = read_saved(path)
        _require_moderate_ids(text, str(path))
        whole = json.loads(text)
        settings = TokenizerSettings.read(folder, whole)
        make = partial(_of_whole, text, whole, settings, vocab_size)
    else:
        path = find_vocabulary(folder)
        settings = TokenizerSettings.read(folder, {})
        make = partial(convert_vocabulary, path, settings)
    try:
        inner, tokens = by_library(make, str(path), _FETCH_AGAIN)
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {first_line(error)}") from None
    if (
        isinstance(inner.model, WordPiece)
        and inner.model.token_to_id(inner.model.unk_token) is None
    ):
        raise DataError(
            f"{path} cannot be read: the token for unknown words, {inner.model.unk_token!r}, is not in it"
        )
    joins = bool(settings.record.get("clean_up_tokenization_spaces"))
    record = PretrainedRecord(
        tokens={
            name: token
            for name, token in tokens.items()
            if inner.token_to_id(token) is not None
        },
        joins_punctuation=joins and not isinstance(inner.model, BPE),
        token_types=gives_types(settings, is_byte_level=is_byte_level(inner)),
        chat_templates=_chat_templates(folder, settings),
        inner=inner.to_str(),
    )
    tokenizer = PretrainedTokenizer(record, str(path))
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        last = tokenizer.vocab_size - 1
        token = tokenizer.pieces([last])[0]
        raise DataError(
            f"{path} does not fit the model: token {token!r} has the id {last}, and the embedding "
            f"has {vocab_size} rows; give the tokenizer that belongs to the checkpoint"
        )
    return tokenizer


def _of_whole(
    text: str, record: Mapping[str, Any], settings: TokenizerSettings, rows: int | None
) -> tuple[tokenizers.Tokenizer, dict[str, str]]:
    """Build the tokenizer of a `tokenizer.json`; return it with its named special tokens."""
    # A known class rebuilds everything but the vocabulary, as in `transformers`.
    inner = tokenizers.Tokenizer.from_str(text)
    name = class_of(settings, is_byte_level=is_byte_level(inner))
    named: Mapping[str, Token] = settings.given
    if name is None:
        add_tokens(inner, settings, named, settings.extra or ())
    else:
        inner, named = CLASSES[name].make(
            settings, read_vocabulary(record, inner), rows
        )
        require_added(inner, settings)
    return inner, {name: content_of(token) for name, token in named.items()}


def _chat_templates(folder: Path, settings: TokenizerSettings) -> dict[str, str]:
    # A separate file takes precedence over the settings, with one template or several by name.
    path = folder / "chat_template.jinja"
    if path.exists():
        return {"default": read_saved(path)}
    found = settings.record.get("chat_template")
    if found is None:
        return {}
    if isinstance(found, str):
        return {"default": found}
    try:
        templates = (
            found
            if isinstance(found, dict)
            else {one["name"]: one["template"] for one in found}
        )
        if all(
            isinstance(text, str) for text in chain.from_iterable(templates.items())
        ):
            return dict(templates)
    except (TypeError, KeyError):
        pass
    raise DataError(
        f"{settings.where}: chat_template is neither text nor a list of named texts; correct it"
    )


def _harmless(value: Any, name: str = "") -> Any:
    """Return a message of the same form, with all text but roles and types replaced by "x"."""
    match value:
        case dict():
            return {key: _harmless(one, key) for key, one in value.items()}
        case list() | tuple():
            return [_harmless(one) for one in value]
        case str() if name not in ("role", "type"):
            return "x"
    return value


def _require_moderate_ids(text: str, origin: str) -> None:
    ids, _ = token_ids_in(text, origin, _FETCH_AGAIN)
    if max(ids, default=0) > LARGEST_ID:
        raise DataError(
            f"{origin} is damaged: a token has the id {max(ids)}; fetch it again"
        )
