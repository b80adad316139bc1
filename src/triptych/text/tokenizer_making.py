"""What a class of tokenizers is made of: its vocabulary, its ways to cut text, its special tokens."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import tokenizers
from tokenizers import AddedToken, processors

from triptych.text.vocabularies import NAMED_TOKENS, Kind, TokenizerSettings, Vocabulary

Token = str | AddedToken
Marked = Sequence[AddedToken] | None


@final
@dataclass(frozen=True)
class Making:
    """What a class makes its tokenizer of; `tokens` are the named special tokens as text."""

    settings: TokenizerSettings
    vocabulary: Vocabulary
    tokens: Mapping[str, str]

    @property
    def is_spm(self) -> bool:
        return self.vocabulary.marked is not None

    def flag(self, name: str, default: bool) -> bool:
        return self.settings.flag(name, default)

    def token(self, name: str) -> str:
        if name not in self.tokens:
            raise ValueError(f"{self.settings.where} names no {name}")
        return self.tokens[name]


@final
@dataclass(frozen=True)
class TokenizerClass:
    """What `transformers` does for one class of tokenizers."""

    kind: Kind  # of its vocabulary
    # The tokenizer, without added tokens and what surrounds a text.
    build: Callable[[Making], tokenizers.Tokenizer]
    tokens: Mapping[str, str]  # the named special tokens where a checkpoint says nothing else
    # What surrounds a text, "$A"; None for what `tokenizer.json` says, or else `add_bos_token` and
    # `add_eos_token`.
    around: Callable[[Making], Sequence[str]] | None = None
    keeps_surrounding: bool = False  # whether what `tokenizer.json` puts around a text goes before the class
    adds_bos: bool = False  # whether a text begins with `bos_token` where the settings do not say
    # Of named special tokens that the files give as plain text or not at all.
    flags: Mapping[str, Mapping[str, bool]] = field(default_factory=dict)
    # Further special tokens where the files do not speak of any, out of the settings and the tokens that a
    # SentencePiece model marks.
    extra: Callable[[TokenizerSettings, Marked], Sequence[Token]] = lambda settings, marked: marked or ()
    resets_flags: bool = False  # whether special tokens lose their flags

    def _named_tokens(self, settings: TokenizerSettings) -> dict[str, Token]:
        """The named special tokens, those of the class included."""
        found: dict[str, Token] = {}
        for name in (*NAMED_TOKENS, *settings.given):
            # A token that is given as null is none.
            default = None if name in settings.record else self.tokens.get(name)
            if (token := settings.given.get(name, default)) is not None:
                flags = self.flags.get(name)
                found[name] = AddedToken(token, **flags) if isinstance(token, str) and flags else token
        return found

    def make(
        self, settings: TokenizerSettings, vocabulary: Vocabulary, rows: int | None = None
    ) -> tuple[tokenizers.Tokenizer, dict[str, Token]]:
        """The tokenizer with its added tokens and what surrounds a text, and its named special tokens."""
        if vocabulary.kind != self.kind:
            raise ValueError(
                f"its class goes with a vocabulary of {self.kind}, and it has one of {vocabulary.kind}; "
                "tokenizer_class PreTrainedTokenizerFast in tokenizer_config.json takes it as it is"
            )
        named = self._named_tokens(settings)
        extra = self.extra(settings, vocabulary.marked) if settings.extra is None else settings.extra
        inner = self._make(settings, vocabulary, named, extra)
        if rows is not None and max(inner.get_vocab().values(), default=-1) >= rows:
            named = {
                name: token
                for name, token in named.items()
                if name in settings.given or content_of(token) in vocabulary.ids
            }
            if settings.extra is None:
                extra = [token for token in extra if content_of(token) in vocabulary.ids]
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
        if self.resets_flags:
            tokens = [*contents.values(), *map(content_of, extra)]
            inner.add_tokens([AddedToken(text, special=True) for text in tokens])
        self._surround(inner, making)
        return inner

    def _surround(self, inner: tokenizers.Tokenizer, making: Making) -> None:
        vocabulary = making.vocabulary
        if vocabulary.surrounding is not None and (self.around is None or self.keeps_surrounding):
            inner.post_processor = vocabulary.surrounding
            return
        if self.around is not None:
            template = self.around(making)
        else:
            # What is asked for next to a `tokenizer.json`, or where there is no such token, is not added.
            def added(name: str, default: bool = False) -> list[str]:
                asked = default if vocabulary.is_whole else making.flag(f"add_{name}_token", default)
                return [making.tokens[f"{name}_token"]] if asked and f"{name}_token" in making.tokens else []

            template = [*added("bos", self.adds_bos), "$A", *added("eos")]
        around = [token for token in template if token != "$A"]
        missing = [token for token in around if inner.token_to_id(token) is None]
        if missing:
            raise ValueError(f"the special token {missing[0]!r} is not in the vocabulary")
        if around:
            inner.post_processor = processors.TemplateProcessing(
                single=[*template], special_tokens=[(token, inner.token_to_id(token)) for token in around]
            )


def content_of(token: Token) -> str:
    """The text of a token."""
    return token if isinstance(token, str) else token.content


def add_tokens(
    inner: tokenizers.Tokenizer,
    settings: TokenizerSettings,
    named: Mapping[str, Token],
    extra: Sequence[Token],
) -> None:
    """Make special tokens special; those that the vocabulary lacks get the ids behind it, in order."""
    present = {token.content for token in inner.get_added_tokens_decoder().values()}
    tokens: list[Token] = [*settings.added.values()]
    present |= {content_of(token) for token in tokens}
    for token in [*named.values(), *extra]:
        if content_of(token) not in present:
            tokens.append(token)
            present.add(content_of(token))
    names = {content_of(token) for token in named.values()}
    made = [AddedToken(token, special=True) if isinstance(token, str) else token for token in tokens]
    for token in made:
        token.special = token.special or token.content in names
    inner.add_tokens(made)
