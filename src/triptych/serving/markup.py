"""Translation of the text of HTML, with its tags unchanged."""

import html
import re
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice, pairwise, takewhile
from typing import NamedTuple, final

import torch
from turbohtml import Token, TokenType, tokenize

from triptych.running.text import graphemes, spans_of_words
from triptych.seeing.attending import (
    AlignedWords,
    Word,
)
from triptych.serving.limits import RequestError

# Largest depth of nested elements inside a sentence: every word may be put into all of them.
MOST_NESTED = 64

# Elements with untranslated text.
_LEFT_ALONE = frozenset({"script", "style", "code", "pre", "textarea", "svg", "math"})
_VOID = frozenset(
    {
        "area",
        "base",
        "br",
        "col",
        "embed",
        "hr",
        "img",
        "input",
        "link",
        "meta",
        "source",
        "track",
        "wbr",
    }
)
# Elements inside a sentence. Every other tag separates texts.
_INLINE = frozenset({
    *("a", "abbr", "b", "bdi", "bdo", "big", "cite", "del", "dfn", "em", "font", "i", "ins", "label", "mark"),
    *("q", "s", "small", "span", "strong", "sub", "sup", "tt", "u", "var"),
})  # fmt: skip


# Words tried for an element without a word.
_MOST_TRIED = 8
_CHARACTER = re.compile(r"\r\n|.", re.DOTALL)


class Element(NamedTuple):
    """Element inside a text: its tags, and its range of characters."""

    opening: str
    closing: str
    start: int
    stop: int


@final
@dataclass(frozen=True)
class TextRun:
    """Text between two separating tags, and the elements inside it in order of their opening tags."""

    text: str
    elements: tuple[Element, ...] = ()

    @property
    def needs_words(self) -> bool:
        """True if an element contains only a part of the text: its position requires aligned words."""
        return any((of.start, of.stop) != (0, len(self.text)) for of in self.elements)

    def html(self, translation: str, words: AlignedWords | None) -> str:
        """Insert the elements into the translation: each word is in the elements of its source word.

        An element may be opened several times; all are kept. If words are not aligned, relative positions
        decide: a word two thirds through the translation gets the elements two thirds through the text.
        """
        num_elements = len(self.elements)
        if words is not None and words.source and len(words.target) >= num_elements:
            spans = _spans(translation, words.target)
            return self._tagged(translation, spans, self._stacks(words, spans))
        spans = spans_of_words(translation)
        if len(spans) < num_elements:
            ends = [0, *accumulate(map(len, graphemes(translation)))]
            spans = [*pairwise(ends)] or [(0, 0)]
        scale = len(self.text) / max(1, len(translation))
        middles = [scale * (start + stop) / 2 for start, stop in spans]
        stacks = self._elements_at(middles)

        def nearest(number: int) -> list[int]:
            of = self.elements[number]
            place = bisect(middles, (of.start + of.stop) / 2)
            near = range(
                max(0, place - _MOST_TRIED), min(len(middles), place + _MOST_TRIED)
            )
            return sorted(
                near, key=lambda at: abs(middles[at] - (of.start + of.stop) / 2)
            )

        self._place_missing(stacks, nearest)
        return self._tagged(translation, spans, stacks)

    def _stacks(
        self, words: AlignedWords, spans: Sequence[tuple[int, int]]
    ) -> list[tuple[int, ...]]:
        """Return the elements around each word of the translation, given the words' ranges."""
        # A word takes the elements of the source word with the largest attention weight; punctuation marks
        # are neither source words nor target words here.
        sources = _spans(self.text, words.source)
        own = self._elements_of(sources)
        is_mark = torch.tensor([_is_mark(word) for word in words.source])
        weights = words.weights.masked_fill(is_mark, -1.0)
        best = weights.argmax(dim=1).tolist()
        stacks = [
            None if _is_mark(word) else own[i]
            for word, i in zip(words.target, best, strict=True)
        ]
        found = [
            _of_mark(stacks, place) if stack is None else stack
            for place, stack in enumerate(stacks)
        ]
        is_empty = torch.tensor([start == stop for start, stop in spans])

        def most_attending(number: int) -> list[int]:
            inside = self._words_of(number, sources)
            attention = words.weights[:, inside].sum(dim=1).masked_fill(is_empty, -1.0)
            places: list[int] = attention.topk(
                min(_MOST_TRIED, len(attention))
            ).indices.tolist()
            return places

        self._place_missing(found, most_attending)
        return found

    def _words_of(self, number: int, spans: Sequence[tuple[int, int]]) -> list[int]:
        """Return the words that overlap an element, or the nearest word if the element contains no word."""
        of = self.elements[number]
        shared = [min(stop, of.stop) - max(start, of.start) for start, stop in spans]
        return [place for place, length in enumerate(shared) if length > 0] or [
            shared.index(max(shared))
        ]

    def _place_missing(
        self, stacks: list[tuple[int, ...]], candidates: Callable[[int], Sequence[int]]
    ) -> None:
        """Put every element without a word around the best of its candidate words.

        Surplus elements get stacks without a word.
        """
        kept = Counter(chain.from_iterable(stacks))
        outer = self._outer_elements()
        for number in range(len(self.elements)):
            if kept[number]:
                continue
            stack = (*outer[number], number)
            places = candidates(number)
            # A word is preferred if all its other elements keep another word.
            free = (
                place
                for place in places
                if all(kept[of] > 1 or of in stack for of in stacks[place])
            )
            place = next(free, None)
            if place is None:
                place = places[0]
                stack = (
                    *stacks[place],
                    *(of for of in stack if of not in stacks[place]),
                )
            if len(stack) > MOST_NESTED:
                stacks.append(
                    (*outer[number], number)
                )  # surplus elements follow the text
                continue
            kept.subtract(stacks[place])
            stacks[place] = stack
            kept.update(stack)

    def _outer_elements(self) -> list[tuple[int, ...]]:
        """Return the elements around each element."""
        found = list[tuple[int, ...]]()
        open_ = list[int]()
        for number, of in enumerate(self.elements):
            while open_ and self.elements[open_[-1]].stop < of.stop:
                open_.pop()
            found.append(tuple(open_))
            open_.append(number)
        return found

    def _elements_at(self, places: Sequence[float]) -> list[tuple[int, ...]]:
        """Return the elements around each position, outer before inner; positions are ascending."""
        # One pass: an element is opened at its start and dropped at its stop.
        found = list[tuple[int, ...]]()
        open_ = list[int]()
        upcoming = 0
        for place in places:
            while (
                upcoming < len(self.elements) and self.elements[upcoming].start <= place
            ):
                open_.append(upcoming)
                upcoming += 1
            open_ = [number for number in open_ if self.elements[number].stop > place]
            found.append(tuple(open_))
        return found

    def _elements_of(self, spans: Sequence[tuple[int, int]]) -> list[tuple[int, ...]]:
        """Return the elements with more than half of each span, outer before inner; spans are ascending."""
        # One pass, the same as in `_elements_at`.
        found = list[tuple[int, ...]]()
        open_ = list[int]()
        upcoming = 0
        for start, stop in spans:
            while (
                upcoming < len(self.elements) and self.elements[upcoming].start < stop
            ):
                open_.append(upcoming)
                upcoming += 1
            open_ = [number for number in open_ if self.elements[number].stop > start]
            parts = [(number, self.elements[number]) for number in open_]
            found.append(
                tuple(
                    number
                    for number, of in parts
                    if 2 * (min(stop, of.stop) - max(start, of.start)) > stop - start
                )
            )
        return found

    def _tagged(
        self,
        text: str,
        spans: Sequence[tuple[int, int]],
        stacks: Sequence[tuple[int, ...]],
    ) -> str:
        found = list[str]()
        at = 0
        before = tuple[int, ...]()
        end = len(text), len(text)
        without_text = [end] * (len(stacks) - len(spans))
        for (start, stop), stack in [
            *zip([*spans, *without_text], stacks, strict=True),
            (end, ()),
        ]:
            shared = len(_shared(before, stack))
            found += [
                self.elements[number].closing for number in reversed(before[shared:])
            ]
            found.append(html.escape(text[at:start], quote=False))
            found += [self.elements[number].opening for number in stack[shared:]]
            found.append(html.escape(text[start:stop], quote=False))
            at = stop
            before = stack
        return "".join(found)


def _is_mark(word: Word) -> bool:
    return not any(map(str.isalnum, word.text))


def _of_mark(stacks: Sequence[tuple[int, ...] | None], place: int) -> tuple[int, ...]:
    """Return the elements of a punctuation mark: the common elements of the words around it."""
    before = next(
        (stack for stack in reversed(stacks[:place]) if stack is not None), ()
    )
    after = next((stack for stack in stacks[place:] if stack is not None), ())
    return _shared(before, after)


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common outer elements of two words."""
    return tuple(
        a
        for a, _ in takewhile(
            lambda pair: pair[0] == pair[1], zip(one, other, strict=False)
        )
    )


def _spans(text: str, words: Sequence[Word]) -> list[tuple[int, int]]:
    """Return the range of characters of each word; empty for a word not found in the text."""
    spans = list[tuple[int, int]]()
    at = 0
    for word in words:
        start = text.find(word.text, at)
        spans.append((at, at) if start < 0 else (start, start + len(word.text)))
        at = spans[-1][1]
    return spans


class _Tag(NamedTuple):
    name: str
    raw: str
    opens: bool


class _Open(NamedTuple):
    name: str
    stays: bool  # True if the text is not translated


@final
class Markup:
    """Parsed document: `runs` of text to translate, and the unchanged pieces between them.

    Text in elements such as `code`, or with `translate="no"`, is not translated. Untranslated pieces stay
    exactly the same. The tokenizer is that of the HTML standard, with time linear in the document's length.
    """

    def __init__(self, document: str, most_tags: int = 10_000) -> None:
        """Parse a document; raise `RequestError` for too many tags or too deeply nested inline elements."""
        # With captured sources, the raw text of every token is known to the character.
        self.runs: list[TextRun] = []
        self._most_tags = most_tags
        self._pieces: list[str | int] = []
        self._run: list[str | _Tag] = []
        self._open: list[_Open] = []
        self._names: Counter[str] = Counter()  # names of the open elements
        self._num_tags = 0
        at = 0
        for token in tokenize(document, resolve_references=False, capture_source=True):
            source = token.source
            text = token.data or ""
            stop = (
                at + len(source) if source is not None else _end_of(document, at, text)
            )
            self._take(token, document[at:stop])
            at = stop
        self._end_run()
        self._pieces.append(document[at:])  # an incomplete tag

    def translated(self, runs: Sequence[str]) -> str:
        """Return the document with its runs replaced by HTML."""
        return "".join(
            runs[piece] if isinstance(piece, int) else piece for piece in self._pieces
        )

    def _take(self, token: Token, raw: str) -> None:
        match token.type:
            case TokenType.START_TAG:
                self._take_opening(token, raw)
            case TokenType.END_TAG:
                self._take_closing(token, raw)
            case TokenType.TEXT if not self._stays:
                self._run.append(raw)
            case TokenType.CHARACTER_REFERENCE if not self._stays:
                self._run.append(token.data or "")
            case _:
                self._piece(raw)

    def _take_opening(self, token: Token, raw: str) -> None:
        self._count_tag()
        stays = self._stays
        name = token.tag or ""
        if token.self_closing and name not in _LEFT_ALONE:
            self._piece(raw)
            return
        if name not in _VOID:
            within = (
                stays
                or name in _LEFT_ALONE
                or ("translate", "no") in (token.attrs or ())
            )
            self._open.append(_Open(name, within))
            self._names[name] += 1
        self._tag(_Tag(name, raw, opens=True), cuts=stays)

    def _take_closing(self, token: Token, raw: str) -> None:
        self._count_tag()
        name = token.tag or ""
        self._tag(_Tag(name, raw, opens=False), cuts=self._stays)
        while self._names[name]:
            closed = self._open.pop().name
            self._names[closed] -= 1
            if closed == name:
                break

    def _count_tag(self) -> None:
        self._num_tags += 1
        if self._num_tags > self._most_tags:
            raise RequestError(413, f"the HTML has more than {self._most_tags:,} tags")

    @property
    def _stays(self) -> bool:
        return bool(self._open) and self._open[-1].stays

    def _tag(self, tag: _Tag, *, cuts: bool) -> None:
        if cuts or tag.name not in _INLINE:
            self._piece(tag.raw)
        else:
            self._run.append(tag)

    def _piece(self, raw: str) -> None:
        self._end_run()
        self._pieces.append(raw)

    def _end_run(self) -> None:
        """Add the text since the last piece as runs, split at tags without a partner."""
        tokens = self._run
        self._run = []
        paired = _paired_tags(tokens)
        start = 0
        for place, token in enumerate(tokens):
            if isinstance(token, _Tag) and place not in paired:
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
        # White space becomes one space; a space before the end of an element is moved after it.
        parts, length = list[str](), 0
        begun = list[int]()
        elements = list[Element]()
        last = " "
        for token in tokens:
            if isinstance(token, str):
                part = re.sub(r"\s+", " ", token.lstrip() if last == " " else token)
                parts.append(part)
                length += len(part)
                last = part[-1:] or last
            elif token.opens:
                begun.append(len(elements))
                if len(begun) > MOST_NESTED:
                    raise RequestError(
                        400,
                        f"the HTML has text in more than {MOST_NESTED} inline elements",
                    )
                elements.append(Element(token.raw, "", length, 0))
            else:
                number = begun.pop()
                stop = length - (last == " " and length > 0)
                elements[number] = elements[number]._replace(
                    closing=token.raw, stop=stop
                )
        before = raw[: raw.index(core)]
        after = raw[raw.index(core) + len(core) :]
        self._pieces += [before, len(self.runs), after]
        self.runs.append(TextRun("".join(parts).rstrip(), tuple(elements)))


def _end_of(document: str, start: int, data: str) -> int:
    """Return the end of the text `data` in the document; the tokenizer has normalised its line ends."""
    if "\r" not in document[start : start + len(data) + 1]:
        return start + len(data)
    ends = (found.end() for found in _CHARACTER.finditer(document, start))
    return next(islice(ends, len(data) - 1, None))


@dataclass
class _Pair:
    """Opening tag without its closing tag so far."""

    place: int
    name: str
    has_text: bool = False
    is_whole: bool = True  # True if all tags inside are in pairs


def _paired_tags(tokens: Sequence[str | _Tag]) -> set[int]:
    """Return the indices of paired tags with text, if all tags between them form such pairs too."""
    found = set[int]()
    begun = list[_Pair]()
    names = Counter[str]()
    for place, token in enumerate(tokens):
        outer = begun[-1] if begun else None
        if isinstance(token, str):
            if outer is not None and token.strip():
                outer.has_text = True
        elif token.opens:
            begun.append(_Pair(place, token.name))
            names[token.name] += 1
        elif names[token.name]:
            while (last := begun.pop()).name != token.name:  # never closed
                names[last.name] -= 1
                begun[-1].is_whole = False
                begun[-1].has_text |= last.has_text
            names[last.name] -= 1
            is_pair = last.has_text and last.is_whole
            if is_pair:
                found |= {last.place, place}
            if begun:
                begun[-1].has_text |= last.has_text
                begun[-1].is_whole &= is_pair
        elif outer is not None:
            outer.is_whole = False
    return found
