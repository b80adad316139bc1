"""SentencePiece's way from text to pieces and back, rule by rule as in its own library.

The `tokenizers` library has counterparts, but not to the letter: its `Precompiled` takes a cluster of
characters for one (a full-width "ｅ" with an accent loses the accent), and its merges break ties by
rank, not by place. `triptych.checkpoints` reads the files.

Source: Kudo & Richardson 2018, arXiv 1808.06226; `normalizer.cc`, `bpe_model.cc`, `unigram_model.cc`
and `sentencepiece_processor.cc` of github.com/google/sentencepiece, version 0.2.0.
"""

import ctypes
import heapq
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, Literal, TypeVar, final

import numpy as np
from pydantic import BaseModel, ConfigDict, field_validator, model_validator

SPACE_MARK = "▁"

PieceType = Literal["normal", "unknown", "control", "user_defined", "unused", "byte"]

_Text = TypeVar("_Text", str, bytes)

_ALL_BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_UNKNOWN_PENALTY = 10.0
_SMALLEST_SCORE = 2.0**-126  # where SentencePiece begins to look for the highest score
# Words that are kept once they are merged, so that a text's common words are merged once.
_MAX_KEPT_WORDS = 100_000
_MAX_KEPT_CHARS = 64


@final
class SentencePieceSpec(BaseModel):
    """What decides how a SentencePiece model encodes and decodes.

    Attributes:
        kind: byte-pair encoding, or the unigram language model.
        pieces: text, score (a float32) and type of each.
        rules: what the longest matching prefix of a text is replaced by, before all else: SentencePiece's
            `precompiled_charsmap`; none if empty.
        byte_fallback: unknown characters become their bytes in UTF-8.
        add_dummy_prefix: a space is put in front of a text.
        remove_extra_whitespaces: of several spaces one is left, of those at either end none.
        escape_whitespaces: spaces are written as "▁".
        whitespace_as_suffix: the dummy stands at the end of the text.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")

    kind: Literal["bpe", "unigram"]
    pieces: tuple[tuple[str, float, PieceType], ...]
    rules: bytes = b""
    byte_fallback: bool = False
    add_dummy_prefix: bool = True
    remove_extra_whitespaces: bool = True
    escape_whitespaces: bool = True
    whitespace_as_suffix: bool = False

    @field_validator("rules")
    @classmethod
    def _rules_are_sound(cls, rules: bytes) -> bytes:
        _Rules(rules)
        return rules

    @model_validator(mode="after")
    def _pieces_belong_together(self) -> "SentencePieceSpec":
        counts = Counter(text for text, _, _ in self.pieces)
        if "" in counts:
            raise ValueError("a piece is empty")
        if len(counts) < len(self.pieces):
            raise ValueError(f"there are two pieces {counts.most_common(1)[0][0]!r}")
        if any(score != score for _, score, _ in self.pieces):
            raise ValueError("a score is not a number")
        num_unknown = len(self.of_type("unknown"))
        if num_unknown != 1:
            raise ValueError(f"there are {num_unknown} unknown pieces, not one")
        if not self.of_type("normal"):
            raise ValueError("there is no normal piece")
        if self.of_type("byte") != (_ALL_BYTES if self.byte_fallback else frozenset()):
            raise ValueError(
                f"byte_fallback is {str(self.byte_fallback).lower()}, but there are "
                f"{len(self.of_type('byte'))} byte pieces"
            )
        return self

    def of_type(self, *types: PieceType) -> frozenset[str]:
        """The pieces of these types."""
        return frozenset(text for text, _, own in self.pieces if own in types)


@final
class SentencePiece:
    """Cuts texts into pieces and joins them again."""

    def __init__(self, spec: SentencePieceSpec) -> None:
        self.spec = spec
        symbols = spec.of_type("user_defined")
        self._symbols, self._has_symbols = _Longest(symbol.encode() for symbol in symbols), bool(symbols)
        self._rules = _Rules(spec.rules)
        self._hidden = spec.of_type("control")
        self._bytes = spec.of_type("byte")
        self._mark = SPACE_MARK if spec.escape_whitespaces else " "
        make = _PairMerging if spec.kind == "bpe" else _Unigram
        self._segmentation: _Segmentation = make(spec, _Longest(symbols), self._mark)

    def split(self, text: str) -> list[str]:
        """The pieces of a text.

        A run of unknown characters is one piece, which the model does not have; with byte fallback
        they are byte pieces.
        """
        known, found = self._segmentation.scores, list[str]()
        after_unknown = False
        for piece in self._segmentation.segment(self.normalise(text)):
            unknown = piece not in known
            if unknown and self.spec.byte_fallback:
                found.extend(f"<0x{byte:02X}>" for byte in piece.encode(errors="surrogatepass"))
            elif unknown and after_unknown:
                found[-1] += piece
            else:
                found.append(piece)
            after_unknown = unknown
        return found

    def join(self, pieces: Iterable[str]) -> str:
        """The text of pieces, spaces at its ends taken off.

        Control pieces are nothing, and bytes that are no UTF-8 become one U+FFFD each.
        """
        parts, pending = list[str](), bytearray()
        for piece in pieces:
            if piece in self._bytes:
                pending.append(int(piece[3:5], 16))
                continue
            parts += [_decoded(pending), "" if piece in self._hidden else piece]
            pending.clear()
        parts.append(_decoded(pending))
        return "".join(parts).replace(SPACE_MARK, " ").strip()

    def normalise(self, text: str) -> str:
        """The text as it is cut: rules applied, spaces thinned out and marked."""
        thin = self.spec.remove_extra_whitespaces
        parts = list(self._replaced(text))
        if thin:
            start = next((i for i, part in enumerate(parts) if part != " "), len(parts))
            parts = parts[start:]
        if not parts:
            return ""
        kept, after_space = list[str](), thin
        for part in parts:
            rest = part.lstrip(" ") if after_space else part
            if rest:
                kept.append(rest)
                after_space = thin and rest.endswith(" ")
        normal = "".join(kept)
        if self.spec.escape_whitespaces:
            normal = normal.replace(" ", SPACE_MARK)
        prefix, suffix = (self._mark, "") if not self.spec.whitespace_as_suffix else ("", self._mark)
        if not self.spec.add_dummy_prefix:
            prefix = suffix = ""
        normal = prefix + normal
        return (normal.rstrip(self._mark) if thin else normal) + suffix

    def _replaced(self, text: str) -> Iterator[str]:
        """The text, prefix by prefix, each as its longest rule has it; user-defined symbols as they are."""
        data, start = text.encode(errors="surrogatepass"), 0
        while start < len(data):
            if symbol := self._symbols.at(data, start):
                end, replacement = start + len(symbol), symbol
            elif not self._has_symbols and (run := self._rules.untouched(data, start)):
                end, replacement = start + len(run), run
            else:
                end, replacement = self._rules.at(data, start)
            yield replacement.decode(errors="replace")
            start = end


@final
class _Longest(Generic[_Text]):
    """Finds the longest of some texts that begins at a place."""

    def __init__(self, texts: Iterable[_Text]) -> None:
        self._texts: frozenset[_Text] = frozenset(texts)
        lengths: dict[_Text, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[:1], set()).add(len(text))
        self._lengths: dict[_Text, list[int]] = {
            first: sorted(some, reverse=True) for first, some in lengths.items()
        }

    def at(self, text: _Text, start: int) -> _Text:
        """The longest at this place; empty if none is."""
        for length in self._lengths.get(text[start : start + 1], ()):
            if (found := text[start : start + length]) in self._texts:
                return found
        return text[:0]


@final
class _Rules:
    """Replacements of byte strings by others.

    Four bytes give the size of a trie, then come the trie and the replacements, each with a zero byte
    after it. The trie is a double array, as darts-clone stores it: the children of a node stand at the
    node's place XOR an offset XOR the byte that leads to them. Of a unit's bits, 0 to 7 and 31 are the
    byte that leads to it, 8 says that a key ends there, 9 that the offset, in the bits from 10, is in
    blocks of 256. Where a key ends, the child of byte 0 tells where its replacement begins.

    Source: `DecodePrecompiledCharsMap` in SentencePiece's `normalizer.cc`; github.com/s-yata/darts-clone.
    """

    def __init__(self, blob: bytes) -> None:
        """Look whether nothing in it leads out of it.

        Raises:
            ValueError: something does.
        """
        size = int.from_bytes(blob[:4], "little")
        if blob and (size == 0 or size % 1024 or size > len(blob) - 4):
            raise ValueError(f"the normalisation rules are {len(blob):,} bytes with a trie of {size:,}")
        units = np.frombuffer(blob[4 : 4 + size], dtype="<u4").astype(np.int64)
        inner = units >> 31 == 0
        children = np.arange(len(units)) ^ (units >> 10 << ((units & 1 << 9) >> 6))
        self._replacements = blob[4 + size :]
        ends = inner & (units & 1 << 8 != 0)
        sound = bool((children[inner] < len(units)).all())
        if sound:
            values = units[children[ends]] & 0x7FFFFFFF
            sound = bool((values < len(self._replacements)).all())
        if not sound or (len(units) and not self._replacements.endswith(b"\0")):
            raise ValueError("the normalisation rules lead out of the file")
        self._units: list[int] = units.tolist()
        self._children: list[int] = children.tolist()
        plain = bytes(byte for byte in range(0x21, 0x7F) if self._is_plain(byte))
        self._plain = re.compile(b"[" + re.escape(plain) + rb"]+(?=[\x00-\x7F]|\Z)" if plain else b"")

    def untouched(self, data: bytes, start: int) -> bytes:
        """What no rule has to do with from here on, as far as is seen at a glance: ASCII, without spaces."""
        match = self._plain.match(data, start)
        return match[0] if match else b""

    def at(self, data: bytes, start: int) -> tuple[int, bytes]:
        """Where the longest key at this place ends, and its replacement; without a key, of one character.

        Args:
            data: UTF-8.
            start: where a character begins.
        """
        units, children = self._units, self._children
        end = value = -1
        at = children[0] if children else 0
        for i in range(start, len(data) if children else start):
            at ^= data[i]
            if units[at] & 0x800000FF != data[i]:
                break
            ends = units[at] & 1 << 8
            at = children[at]
            if ends:
                end, value = i + 1, units[at] & 0x7FFFFFFF
        if end == -1:
            first = data[start]
            end = start + (1 if first < 0xC0 else 2 if first < 0xE0 else 3 if first < 0xF0 else 4)
            return end, data[start:end]
        return end, self._replacements[value : self._replacements.index(b"\0", value)]

    def _is_plain(self, byte: int) -> bool:
        """Whether a character of ASCII is no key, nor the beginning of one that goes on in ASCII."""
        if not self._children:
            return True
        at = self._children[0] ^ byte
        if self._units[at] & 0x800000FF != byte:
            return True
        below = self._children[at]
        goes_on = any(
            self._units[below ^ next_byte] & 0x800000FF == next_byte for next_byte in range(1, 0x80)
        )
        return not (self._units[at] & 1 << 8 or goes_on)


class _Segmentation(ABC):
    """A way to cut normalised text.

    Attributes:
        scores: of every piece that it may find; any other that it returns is unknown.
    """

    scores: dict[str, float]

    @abstractmethod
    def segment(self, text: str) -> Sequence[str]:
        """The pieces of a normalised text."""


@final
class _PairMerging(_Segmentation):
    """Byte-pair encoding: of all neighbours that make a piece together, those of the best score first."""

    def __init__(self, spec: SentencePieceSpec, symbols: _Longest[str], mark: str) -> None:
        self.scores = {
            text: score for text, score, own in spec.pieces if own in ("normal", "user_defined", "unused")
        }
        self._symbols = symbols
        self._symbol_texts = spec.of_type("user_defined")
        self._unused = spec.of_type("unused")
        # Where no piece goes past the next mark, neither does a merge: each word stands alone.
        apart = not any(mark in piece[1:] for piece in self.scores)
        self._words = re.compile(f"{mark}[^{mark}]*|[^{mark}]+") if apart else None
        self._kept: dict[str, tuple[str, ...]] = {}

    def segment(self, text: str) -> Sequence[str]:
        """Word by word where that is the same."""
        if self._words is None:
            return self._merged(text)
        return [piece for word in self._words.findall(text) for piece in self._word(word)]

    def _word(self, word: str) -> tuple[str, ...]:
        pieces = self._kept.get(word)
        if pieces is None:
            pieces = tuple(self._merged(word))
            if len(word) <= _MAX_KEPT_CHARS and len(self._kept) < _MAX_KEPT_WORDS:
                self._kept[word] = pieces
        return pieces

    def _merged(self, text: str) -> list[str]:
        parts = self._symbols_and_characters(text)
        frozen = [part in self._symbol_texts for part in parts]
        # Neighbours by index; −1 at both ends. A part that was merged into its neighbour is "".
        before, after = list(range(-1, len(parts) - 1)), [*range(1, len(parts)), -1]
        agenda: list[tuple[float, int, int, int]] = []
        halves: dict[str, tuple[str, str]] = {}

        def offer(left: int, right: int) -> None:
            if left == -1 or right == -1 or frozen[left] or frozen[right]:
                return
            piece = parts[left] + parts[right]
            if (score := self.scores.get(piece)) is not None:
                heapq.heappush(agenda, (-score, left, right, len(piece)))
                if piece in self._unused:
                    halves[piece] = parts[left], parts[right]

        for right in range(1, len(parts)):
            offer(right - 1, right)
        while agenda:
            _, left, right, length = heapq.heappop(agenda)
            if not parts[left] or not parts[right] or len(parts[left]) + len(parts[right]) != length:
                continue  # one of them has been merged since
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            if after[left] != -1:
                before[after[left]] = left
            offer(before[left], left)
            offer(left, after[left])
        return [piece for part in parts if part for piece in self._used(part, halves)]

    def _symbols_and_characters(self, text: str) -> list[str]:
        parts, start = list[str](), 0
        while start < len(text):
            part = self._symbols.at(text, start) or text[start]
            parts.append(part)
            start += len(part)
        return parts

    def _used(self, piece: str, halves: dict[str, tuple[str, str]]) -> Iterator[str]:
        """A piece, or if it is not to be used what it was merged from, and so on."""
        pending = [piece]
        while pending:
            part = pending.pop()
            if part in self._unused and part in halves:
                left, right = halves[part]
                pending += [right, left]
            else:
                yield part


@final
class _Unigram(_Segmentation):
    """The unigram language model: the pieces whose scores have the largest sum, by Viterbi's algorithm.

    Sums are rounded to float32 just as in SentencePiece, where ties and near ties depend on it.
    """

    def __init__(self, spec: SentencePieceSpec, symbols: _Longest[str], mark: str) -> None:
        normal = [score for _, score, own in spec.pieces if own == "normal"]
        highest = max(_SMALLEST_SCORE, *normal)
        self.scores = {text: score for text, score, own in spec.pieces if own == "normal"}
        for symbol in spec.of_type("user_defined"):
            # The one number that SentencePiece takes in double precision.
            self.scores[symbol] = _float32(len(symbol.encode()) * highest) - 0.1
        self._unknown_score = _float32(min(normal) - _UNKNOWN_PENALTY)
        self._beginnings = {piece[:length] for piece in self.scores for length in range(1, len(piece))}

    def segment(self, text: str) -> list[str]:
        """The best way to cut it."""
        # Of every place: the score of the best way there, and where its last piece begins.
        best, starts = [0.0] * (len(text) + 1), [-1] * (len(text) + 1)
        for start in range(len(text)):
            for end in range(start + 1, len(text) + 1):
                piece = text[start:end]
                score = self.scores.get(piece)
                total = None if score is None else score + best[start]
                if total is None and end == start + 1:
                    total = _float32(self._unknown_score + best[start])
                if total is not None and (starts[end] == -1 or total > best[end]):
                    best[end], starts[end] = _float32(total), start
                if piece not in self._beginnings:
                    break
        pieces, end = list[str](), len(text)
        while end > 0:
            pieces.append(text[starts[end] : end])
            end = starts[end]
        return pieces[::-1]


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


def _decoded(raw: bytearray) -> str:
    """Bytes as UTF-8; every byte that is none is a U+FFFD of its own."""
    return re.sub("[\udc80-\udcff]", "\ufffd", raw.decode("utf-8", "surrogateescape"))
