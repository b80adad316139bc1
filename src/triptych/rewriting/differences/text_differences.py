"""Differences between two models in how texts are read and continued: tokenizers and generation settings.

They are independent of the weights: two models of one function answer a text differently if their tokenizers
differ.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

from triptych.core.checkpoints.source import Source
from triptych.errors import TriptychError
from triptych.printable import printable, shortened
from triptych.running.opening import TextSettings, read_text_settings
from triptych.running.text import SentenceTokenizer, Tokenizer

# Texts that common tokenizers read differently: spaces, numbers, cases, forms of characters, scripts, special
# tokens.
PROBES = (
    "Hello, world! It's 2026, isn't it?",
    "  two  spaces,\ta tab,\n\na line\r\n  and an indent",
    "12345 3.14159 1,000,000 ½ ² ٣",
    "UPPER lower MiXeD naïve naïve café ﬁne Ångström",
    "größer, straße, Île, señor, Čeština, ığdır",
    "Привет, как дела? Καλημέρα",
    "你好，世界。こんにちは、世界。안녕하세요",
    "مرحبا بالعالم שלום नमस्ते दुनिया สวัสดีชาวโลก",
    "👩‍👩‍👧 🎉 — “quoted” … €5 \u00a0\u200b",
    "def f(x):\n    return x**2  # ▁ Ġ </s> <s>",
    "<|im_start|>user\n<|endoftext|>[CLS] [MASK] [INST] <pad> <unk>",
    "https://example.org/a_b?c=d&e=f%20g  foo_bar.fooBar()",
    "",
    " ",
)
_WIDTH = 40
_MOST_SETTINGS = 4
_MOST_PIECES = 6


class TextsCompared(NamedTuple):
    """Sentences on two models' tokenizers, chat templates and generation settings."""

    found: tuple[str, ...] = ()  # differences
    notes: tuple[str, ...] = ()  # sentences on the scope of the comparison


def compare_text_settings(a: Source, b: Source) -> TextsCompared:
    """Compare tokenizers, chat templates and generation settings of two models."""
    sides = []
    for name, source in (("A", a), ("B", b)):
        try:
            sides.append(read_text_settings(source))
        except TriptychError as error:  # such as a file of the Hub out of reach
            return TextsCompared(
                notes=(f"tokenizers are not compared: of {name}, {error}",)
            )
    return _Comparison(sides[0], sides[1]).difference()


@final
class _Comparison:
    """The comparison of the text settings of two models."""

    def __init__(self, one: TextSettings, other: TextSettings) -> None:
        self.one = one
        self.other = other
        self.found = list[str]()
        self.notes = list[str]()
        self.same = list[str]()  # names of compared, equal settings

    def difference(self) -> TextsCompared:
        self._tokenizers()
        self._generation()
        if self.same:
            self.notes.append(f"{_listed(self.same)} {_are(self.same)} the same")
        return TextsCompared(tuple(self.found), tuple(self.notes))

    def _tokenizers(self) -> None:
        is_unreadable = self.one.unreadable and self.other.unreadable
        if is_unreadable and self.one.files == self.other.files:
            self.same.append("files of the tokenizer")
            return
        for name, side in (("A", self.one), ("B", self.other)):
            if side.unreadable:
                self.notes.append(
                    f"tokenizers are not compared: that of {name} cannot be read: {side.unreadable}"
                )
                return
        one = self.one.tokenizers
        other = self.other.tokenizers
        if not one and not other:
            self.notes.append("there are no tokenizers to compare")
            return
        if not one or not other:
            self.found.append(f"only {'A' if one else 'B'} has a tokenizer")
            return
        if one.keys() != other.keys():
            self.found.append(f"A has a {_listed([*one])}, and B a {_listed([*other])}")
            return
        for use in one:
            self._tokenizer(use, one[use], other[use])

    def _tokenizer(self, use: str, one: Tokenizer, other: Tokenizer) -> None:
        records = [json.loads(side.to_json()) for side in (one, other)]
        templates = [record.pop("chat_templates", None) or {} for record in records]
        if reasons := [*_differences(one, other, records)]:
            self.found.append(f"the {use} differs: {'; '.join(reasons)}")
        elif parts := _different_parts(*records):
            said = f"the {use} is stored differently ({', '.join(parts)})"
            self.notes.append(f"{said}; {len(PROBES)} texts are read alike")
        else:
            self.same.append(use)
        self._templates(*templates)

    def _templates(self, one: Mapping[str, str], other: Mapping[str, str]) -> None:
        if one == other:
            if one:
                self.same.append("chat template")
            return
        for name in dict.fromkeys((*one, *other)):
            of = "" if name == "default" else f" {printable(name)}"
            if name not in one or name not in other:
                self.found.append(
                    f"only {'A' if name in one else 'B'} has a chat template{of}"
                )
            elif one[name] != other[name]:
                line = _first_line_apart(one[name], other[name])
                self.found.append(f"the chat template{of} differs, from line {line} on")

    def _generation(self) -> None:
        one = self.one
        other = self.other
        if one.generation_in != other.generation_in:
            if one.generation and other.generation:
                self.notes.append(
                    "generation settings are stored in other forms, and are not compared"
                )
            return
        if one.generation == other.generation:
            if one.generation:
                self.same.append("generation settings")
            return
        said = [*_settings_apart(one.generation, other.generation)]
        shown = said[:_MOST_SETTINGS]
        if len(said) > len(shown):
            shown.append(f"{len(said) - len(shown)} more")
        self.found.append(f"generation settings differ: {'; '.join(shown)}")


def _settings_apart(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys((*one, *other)):
        if name not in one or name not in other or one[name] != other[name]:
            values = [
                _shown(str(side[name])) if name in side else "absent"
                for side in (one, other)
            ]
            yield f"{printable(name)} is {values[0]} in A and {values[1]} in B"


def _differences(
    one: Tokenizer, other: Tokenizer, records: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the differences of two tokenizers, in tokens, named tokens and texts."""
    if records[0] == records[1]:
        return
    if type(one) is type(other):
        yield from _tokens_apart(one.vocabulary, other.vocabulary)
        named = [record.get("tokens") or {} for record in records]
        yield from _settings_apart(named[0], named[1])
    else:  # classes write tokens in their own ways
        tokens = [side.pieces(range(side.vocab_size)) for side in (one, other)]
        yield from _tokens_apart(tokens[0], tokens[1])
    # Readers of sentences add their special tokens themselves.
    is_plain = not any(isinstance(side, SentenceTokenizer) for side in (one, other))
    for text in PROBES:
        ids = [
            side.encode([text], add_special=is_plain, parse_special=True)[0]
            for side in (one, other)
        ]
        if ids[0] != ids[1]:
            said = _from_first_apart(one.pieces(ids[0]), other.pieces(ids[1]))
            yield f"{_quoted(text)} is {said[0]} in A and {said[1]} in B"
            return
        written = [side.decode([ids[0]])[0] for side in (one, other)]
        if written[0] != written[1]:
            yield f"{_quoted(text)} is decoded to {_quoted(written[0])} by A and {_quoted(written[1])} by B"
            return


def _from_first_apart(one: Sequence[str], other: Sequence[str]) -> list[str]:
    """Return some tokens of both texts, from the first different token on."""
    pairs = zip(one, other, strict=False)
    shared = min(len(one), len(other))
    start = next((n for n, (a, b) in enumerate(pairs) if a != b), shared)
    said = []
    for pieces in (one, other):
        shown = " ".join(pieces[start : start + _MOST_PIECES]) or "no more tokens"
        said.append(f"{'… ' if start else ''}{_shown(shown)}")
    return said


def _tokens_apart(one: Sequence[str], other: Sequence[str]) -> Iterator[str]:
    if one == other:
        return
    both = min(len(one), len(other))
    apart = [token for token in range(both) if one[token] != other[token]]
    if apart:
        first = apart[0]
        names = f"{_quoted(one[first])} in A and {_quoted(other[first])} in B"
        yield f"{len(apart):,} of {both:,} ids are other tokens, first {first} ({names})"
    if len(one) != len(other):
        yield f"A has {len(one):,} tokens, and B {len(other):,}"


def _different_parts(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """Return the names of the stored parts that differ."""
    records = []
    for record in (one, other):
        inner = record.get("inner")
        parts = json.loads(inner) if isinstance(inner, str) else {}
        model = parts.pop("model", None) or {}
        rest = {name: value for name, value in record.items() if name != "inner"}
        records.append({**rest, **parts, **model})
    return [
        name
        for name in dict.fromkeys((*records[0], *records[1]))
        if records[0].get(name) != records[1].get(name)
    ]


def _first_line_apart(one: str, other: str) -> int:
    """Return the number of the first different line, counted from 1."""
    lines = [text.splitlines() for text in (one, other)]
    pairs = zip(*lines, strict=False)
    shared = min(map(len, lines))
    return next((n for n, (a, b) in enumerate(pairs, 1) if a != b), shared + 1)


def _quoted(text: str) -> str:
    return f"“{_shown(text)}”"


def _shown(text: str) -> str:
    return shortened(printable(text), _WIDTH)


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def _are(names: Sequence[str]) -> str:
    return "is" if len(names) == 1 and not names[0].endswith("s") else "are"
