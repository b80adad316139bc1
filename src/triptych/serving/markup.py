"""HTML whose text is translated and whose tags stay."""

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import takewhile
from typing import NamedTuple, final

import torch

from triptych.attending.alignment import AlignedWords, Word

# Their text is not translated.
_LEFT_ALONE = frozenset({"script", "style", "code", "pre", "textarea", "svg", "math"})
_VOID = frozenset(
    {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"}
)
# Elements inside a sentence. Every other tag parts what is translated.
_INLINE = frozenset({
    *("a", "abbr", "b", "bdi", "bdo", "big", "cite", "del", "dfn", "em", "font", "i", "ins", "label", "mark"),
    *("q", "s", "small", "span", "strong", "sub", "sup", "tt", "u", "var"),
})  # fmt: skip


class Element(NamedTuple):
    """An element inside a text: its tags, and the characters that it holds."""

    opening: str
    closing: str
    start: int
    stop: int


@final
@dataclass(frozen=True)
class TextRun:
    """A text between two tags that part sentences, and the elements inside it, outer ones first."""

    text: str
    elements: tuple[Element, ...] = ()

    @property
    def needs_words(self) -> bool:
        """Whether some element holds a part of the text, so that words decide where it goes."""
        return any((of.start, of.stop) != (0, len(self.text)) for of in self.elements)

    def html(self, translation: str, words: AlignedWords | None) -> str:
        """The translation with the elements: each of its words is in the elements of its source word.

        An element may be opened several times. Without words, places decide: a word two thirds through the
        translation lies in what is two thirds through the text.
        """
        if words is not None and words.source and words.target:
            return self._tagged(translation, _spans(translation, words.target), self._stacks(words))
        spans = [found.span() for found in re.finditer(r"\S+", translation)]
        scale = len(self.text) / max(1, len(translation))
        middles = [scale * (start + stop) / 2 for start, stop in spans]
        stacks = [
            tuple(number for number, of in enumerate(self.elements) if of.start <= middle < of.stop)
            for middle in middles
        ]
        return self._tagged(translation, spans, stacks)

    def _stacks(self, words: AlignedWords) -> list[tuple[int, ...]]:
        """The elements that each word of the translation lies in."""
        spans = _spans(self.text, words.source)
        own = [
            tuple(
                number
                for number, of in enumerate(self.elements)
                if 2 * (min(stop, of.stop) - max(start, of.start)) > stop - start
            )
            for start, stop in spans
        ]
        is_mark = torch.tensor([_is_mark(word) for word in words.source])
        weights = words.weights.masked_fill(is_mark, -1.0)
        best = weights.argmax(dim=1).tolist()
        stacks = [None if _is_mark(word) else own[i] for word, i in zip(words.target, best, strict=True)]
        found = [_of_mark(stacks, place) if stack is None else stack for place, stack in enumerate(stacks)]
        for number in range(len(self.elements)):
            inside = [place for place, stack in enumerate(own) if number in stack]
            if inside and not any(number in stack for stack in found):
                part = words.weights[:, inside]
                target = int(part.sum(dim=1).argmax())
                found[target] = own[inside[int(part[target].argmax())]]
        return found

    def _tagged(self, text: str, spans: Sequence[tuple[int, int]], stacks: Sequence[tuple[int, ...]]) -> str:
        found, at, before = list[str](), 0, tuple[int, ...]()
        for (start, stop), stack in [*zip(spans, stacks, strict=True), ((len(text), len(text)), ())]:
            shared = len(_shared(before, stack))
            found += [self.elements[number].closing for number in reversed(before[shared:])]
            found.append(html.escape(text[at:start], quote=False))
            found += [self.elements[number].opening for number in stack[shared:]]
            found.append(html.escape(text[start:stop], quote=False))
            at, before = stop, stack
        return "".join(found)


def _is_mark(word: Word) -> bool:
    return not any(map(str.isalnum, word.text))


def _of_mark(stacks: Sequence[tuple[int, ...] | None], place: int) -> tuple[int, ...]:
    """The elements of a punctuation mark: the ones that the words around it share."""
    before = next((stack for stack in reversed(stacks[:place]) if stack is not None), ())
    after = next((stack for stack in stacks[place:] if stack is not None), ())
    return _shared(before, after)


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """The elements that both lie in."""
    return tuple(a for a, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _spans(text: str, words: Sequence[Word]) -> list[tuple[int, int]]:
    """The characters of each word; none for a word that its tokens spell otherwise."""
    spans, at = list[tuple[int, int]](), 0
    for word in words:
        start = text.find(word.text, at)
        spans.append((at, at) if start < 0 else (start, start + len(word.text)))
        at = spans[-1][1]
    return spans


class _Tag(NamedTuple):
    name: str
    raw: str
    opens: bool


@final
class Markup(HTMLParser):
    """The pieces of a document: `runs`, to be translated, and what is between them.

    Text in elements such as `code`, or with `translate="no"`, stays.
    """

    def __init__(self, document: str) -> None:
        super().__init__(convert_charrefs=True)
        self.runs: list[TextRun] = []
        self._pieces: list[str | int] = []
        self._run: list[str | _Tag] = []
        self._open: list[tuple[str, bool]] = []  # elements, and whether each leaves its text alone
        self.feed(document)
        self.close()
        self._end_run()

    def translated(self, runs: Sequence[str]) -> str:
        """The document with HTML in place of its runs."""
        return "".join(runs[piece] if isinstance(piece, int) else piece for piece in self._pieces)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        raw, stays = self.get_starttag_text() or "", self._stays
        if tag not in _VOID:
            stays = stays or tag in _LEFT_ALONE or ("translate", "no") in attrs
            self._open.append((tag, stays))
        self._tag(_Tag(tag, raw, opens=True), cuts=stays)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._piece(self.get_starttag_text() or "")

    def handle_endtag(self, tag: str) -> None:
        self._tag(_Tag(tag, f"</{tag}>", opens=False), cuts=self._stays)
        places = [place for place, (name, _) in enumerate(self._open) if name == tag]
        if places:
            del self._open[places[-1] :]

    def handle_data(self, data: str) -> None:
        if self._stays:
            raw = self._open[-1][0] in ("script", "style")
            self._piece(data if raw else html.escape(data, quote=False))
        else:
            self._run.append(data)

    def handle_comment(self, data: str) -> None:
        self._piece(f"<!--{data}-->")

    def handle_decl(self, decl: str) -> None:
        self._piece(f"<!{decl}>")

    def handle_pi(self, data: str) -> None:
        self._piece(f"<?{data}>")

    def unknown_decl(self, data: str) -> None:
        self._piece(f"<![{data}]>")

    @property
    def _stays(self) -> bool:
        return bool(self._open) and self._open[-1][1]

    def _tag(self, tag: _Tag, *, cuts: bool) -> None:
        if cuts or tag.name not in _INLINE:
            self._piece(tag.raw)
        else:
            self._run.append(tag)

    def _piece(self, raw: str) -> None:
        self._end_run()
        self._pieces.append(raw)

    def _end_run(self) -> None:
        """Take the text since the last piece, in several runs where its tags do not go together."""
        tokens, self._run = self._run, []
        closing = _matching_tags(tokens)
        start = 0
        for place, token in enumerate(tokens):
            if isinstance(token, _Tag) and place not in closing and place not in closing.values():
                self._add_run(tokens[start:place])
                self._pieces.append(token.raw)
                start = place + 1
        self._add_run(tokens[start:])

    def _add_run(self, tokens: Sequence[str | _Tag]) -> None:
        raw = "".join(token for token in tokens if isinstance(token, str))
        core = raw.strip()
        if not core:
            self._pieces.append(html.escape(raw, quote=False))
            return
        text, begun, elements = "", list[int](), list[Element]()
        for token in tokens:
            if isinstance(token, str):
                text += re.sub(r"\s+", " ", token if text and not text.endswith(" ") else token.lstrip())
            elif token.opens:
                begun.append(len(elements))
                elements.append(Element(token.raw, "", len(text), 0))
            else:
                number = begun.pop()
                elements[number] = elements[number]._replace(closing=token.raw, stop=len(text.rstrip()))
        before, after = raw[: raw.index(core)], raw[raw.index(core) + len(core) :]
        self._pieces += [before, len(self.runs), after]
        self.runs.append(TextRun(text.rstrip(), tuple(elements)))


def _matching_tags(tokens: Sequence[str | _Tag]) -> dict[int, int]:
    """Places of opening tags and of the tags that close them, where all between them goes together."""
    found, begun = dict[int, int](), list[int]()
    for place, token in enumerate(tokens):
        if not isinstance(token, _Tag):
            continue
        if token.opens:
            begun.append(place)
            continue
        names = [tokens[at][0] for at in begun]
        while token.name in names and names.pop() != token.name:
            begun.pop()
        if begun and tokens[begun[-1]][0] == token.name:
            found[begun.pop()] = place
    while True:
        paired = {*found, *found.values()}
        parted = [
            start
            for start, stop in found.items()
            if not any(isinstance(token, str) and token.strip() for token in tokens[start:stop])
            or any(isinstance(tokens[at], _Tag) and at not in paired for at in range(start, stop))
        ]
        if not parted:
            return found
        for start in parted:
            del found[start]
