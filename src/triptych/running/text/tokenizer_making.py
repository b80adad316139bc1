"""Construction of the tokenizer of a class, from its vocabulary, settings and special tokens."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, final

import tokenizers
from tokenizers import AddedToken, processors

from triptych.errors import DataError
from triptych.running.text.tokenizer_settings import (
    NAMED_TOKENS,
    Token,
    TokenizerSettings,
    content_of,
)

Kind = Literal["pairs", "words", "unigrams"]
Pieces = tuple[tuple[str, float], ...]
"""Pieces with their scores, by id."""
# The largest published vocabularies have 262,144 tokens; the library allocates memory for every id up to the
# largest.
LARGEST_ID = 1 << 22


@final
@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a `tokenizer.json`, with the further parts used by tokenizer classes."""

    kind: Kind  # algorithm to split text into tokens
    ids: Mapping[str, int]  # id of every token
    charsmap: bytes  # SentencePiece's normalization rules; may be empty
    surrounding: Any  # post-processor with the special tokens around a text, or None
    merges: tuple[tuple[str, str], ...] = ()  # byte-pair merges in order of priority
    pieces: Pieces = ()  # unigram pieces with scores


def read_vocabulary(
    record: Mapping[str, Any], inner: tokenizers.Tokenizer
) -> Vocabulary:
    """Return the vocabulary of a `tokenizer.json`."""
    # Merges are stored as strings or as pairs, depending on the version of the file.
    model = record["model"]
    rules = record.get("normalizer") or {}
    charsmaps = [
        rule
        for rule in rules.get("normalizers", [rules])
        if rule.get("type") == "Precompiled"
    ]
    charsmap = (
        base64.b64decode(charsmaps[0]["precompiled_charsmap"]) if charsmaps else b""
    )
    common: dict[str, Any] = {"charsmap": charsmap, "surrounding": inner.post_processor}
    match inner.model:
        case tokenizers.models.BPE():
            pairs = (
                merge.split(" ") if isinstance(merge, str) else merge
                for merge in model["merges"]
            )
            merges = tuple((left, right) for left, right in pairs)
            return Vocabulary("pairs", model["vocab"], merges=merges, **common)
        case tokenizers.models.WordPiece():
            return Vocabulary("words", model["vocab"], **common)
        case tokenizers.models.Unigram():
            pieces = tuple(
                (str(piece), float(score)) for piece, score in model["vocab"]
            )
            ids = {piece: number for number, (piece, _) in enumerate(pieces)}
            return Vocabulary("unigrams", ids, pieces=pieces, **common)
        case other:
            raise ValueError(
                f"its model is a {type(other).__name__}, which no class of tokenizers has"
            )


@final
@dataclass(frozen=True)
class Making:
    """The inputs of a tokenizer class; `tokens` are the named special tokens as text."""

    settings: TokenizerSettings
    vocabulary: Vocabulary
    tokens: Mapping[str, str]

    def flag(self, name: str, default: bool) -> bool:
        return self.settings.flag(name, default)

    def token(self, name: str) -> str:
        if name not in self.tokens:
            raise ValueError(f"{self.settings.where} names no {name}")
        return self.tokens[name]


@final
@dataclass(frozen=True)
class TokenizerClass:
    """The behaviour of one tokenizer class of `transformers`."""

    kind: Kind  # kind of the vocabulary
    # builds the tokenizer, without added tokens and special tokens around a text
    build: Callable[[Making], tokenizers.Tokenizer]
    tokens: Mapping[str, str]  # default named special tokens
    # special tokens around a text, with "$A" for the text; None for the post-processor of `tokenizer.json`
    around: Callable[[Making], Sequence[str]] | None = None
    # continuation of the template of a single text for a pair, with "$B" for the second text; None if the
    # second text directly follows the first. A token type after a colon, otherwise 0: "$B:1"
    second: Callable[[Making], Sequence[str]] | None = None
    keeps_surrounding: bool = (
        False  # True = the post-processor of `tokenizer.json` overrides `around`
    )
    # flags of named special tokens stored as plain text or missing in the files
    flags: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    # further special tokens if the files do not list any
    extra: Callable[[TokenizerSettings], Sequence[Token]] = lambda settings: ()
    resets_flags: bool = False  # True = special tokens lose their flags

    def _named_tokens(self, settings: TokenizerSettings) -> dict[str, Token]:
        """Return the named special tokens of the files, with the class's defaults."""
        found: dict[str, Token] = {}
        for name in (*NAMED_TOKENS, *settings.given):
            # A null in the settings overrides the default.
            default = None if name in settings.record else self.tokens.get(name)
            if (token := settings.given.get(name, default)) is not None:
                flags = self.flags.get(name)
                found[name] = (
                    AddedToken(token, **flags)
                    if isinstance(token, str) and flags
                    else token
                )
        return found

    def make(
        self,
        settings: TokenizerSettings,
        vocabulary: Vocabulary,
        rows: int | None = None,
    ) -> tuple[tokenizers.Tokenizer, dict[str, Token]]:
        """Build the complete tokenizer; return it with its named special tokens.

        `rows` is the number of rows of the model's embedding.
        """
        if vocabulary.kind != self.kind:
            raise ValueError(
                f"its class goes with a vocabulary of {self.kind}, and it has one of {vocabulary.kind}; "
                "tokenizer_class PreTrainedTokenizerFast in tokenizer_config.json takes it as it is"
            )
        named = self._named_tokens(settings)
        extra = self.extra(settings) if settings.extra is None else settings.extra
        inner = self._make(settings, vocabulary, named, extra)
        # If ids exceed the embedding's rows, leave out default tokens missing in the vocabulary.
        if rows is not None and max(inner.get_vocab().values(), default=-1) >= rows:
            named = {
                name: token
                for name, token in named.items()
                if name in settings.given or content_of(token) in vocabulary.ids
            }
            if settings.extra is None:
                extra = [
                    token for token in extra if content_of(token) in vocabulary.ids
                ]
            inner = self._make(settings, vocabulary, named, extra)
        return inner, named

    def _make(
        self,
        settings: TokenizerSettings,
        vocabulary: Vocabulary,
        named: Mapping[str, Token],
        extra: Sequence[Token],
    ) -> tokenizers.Tokenizer:
        contents = {name: content_of(token) for name, token in named.items()}
        making = Making(settings, vocabulary, contents)
        inner = self.build(making)
        add_tokens(inner, settings, named, extra)
        # Adding a token again replaces its flags by the defaults.
        if self.resets_flags:
            tokens = [*contents.values(), *map(content_of, extra)]
            inner.add_tokens([AddedToken(text, special=True) for text in tokens])
        self._surround(inner, making)
        return inner

    def _surround(self, inner: tokenizers.Tokenizer, making: Making) -> None:
        vocabulary = making.vocabulary
        # The class's template replaces the post-processor of the file, unless the class keeps it.
        if vocabulary.surrounding is not None and (
            self.around is None or self.keeps_surrounding
        ):
            inner.post_processor = vocabulary.surrounding
            return
        if self.around is None:
            return
        template = self.around(making)
        both = [
            *chain.from_iterable(
                ("$A", "$B") if part == "$A" else (part,) for part in template
            )
        ]
        if self.second is not None:
            both = [*template, *self.second(making)]
        names = (part.removesuffix(":1") for part in both)
        around = [*dict.fromkeys(name for name in names if name not in ("$A", "$B"))]
        missing = [token for token in around if inner.token_to_id(token) is None]
        if missing:
            raise ValueError(
                f"the special token {missing[0]!r} is not in the vocabulary"
            )
        if around:
            inner.post_processor = processors.TemplateProcessing(
                single=[*template],
                pair=both,
                special_tokens=[(token, inner.token_to_id(token)) for token in around],
            )


def is_byte_level(inner: tokenizers.Tokenizer) -> bool:
    """Return True if a tokenizer cuts text into bytes."""
    return "ByteLevel" in f"{inner.pre_tokenizer} {inner.decoder}"


def require_added(inner: tokenizers.Tokenizer, settings: TokenizerSettings) -> None:
    """Check that added tokens have the ids given in the settings."""
    for number, token in settings.added.items():
        if (found := inner.token_to_id(token.content)) != number:
            raise DataError(
                f"{settings.where}: added token {token.content!r} has the id {number} there and {found} in "
                "the vocabulary; give the files of one tokenizer"
            )


def add_tokens(
    inner: tokenizers.Tokenizer,
    settings: TokenizerSettings,
    named: Mapping[str, Token],
    extra: Sequence[Token],
) -> None:
    """Register the special tokens; tokens missing in the vocabulary get the next ids, in order."""
    # Tokens stated in the settings come first, so that they keep their ids.
    present = {token.content for token in inner.get_added_tokens_decoder().values()}
    tokens: list[Token] = [*settings.added.values()]
    present |= {content_of(token) for token in tokens}
    for token in [*named.values(), *extra]:
        if content_of(token) not in present:
            tokens.append(token)
            present.add(content_of(token))
    names = {content_of(token) for token in named.values()}
    made = [
        AddedToken(token, special=True) if isinstance(token, str) else token
        for token in tokens
    ]
    for token in made:
        token.special = token.special or token.content in names
    inner.add_tokens(made)
