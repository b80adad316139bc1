"""Words of a translation aligned with words of its source by the attention of a head."""

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from triptych.algebra.resampling import ratio_intervals
from triptych.attending.attention import Attention
from triptych.attending.over_text import Told, Windows, read_windows
from triptych.errors import UsageError
from triptych.opening import Reader

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@final
@dataclass(frozen=True)
class Word:
    """A word of a text and the places of its tokens.

    Attributes:
        text: without the space before it.
        start: its first token; `stop` one past its last.
    """

    text: str
    start: int
    stop: int


def words_of(pieces: Sequence[str], special: Sequence[bool]) -> tuple[Word, ...]:
    """The words of a text from its readable tokens; special tokens belong to none.

    A word begins at a token that begins with a space ("▁"), and at punctuation, which is a word of its own.
    """
    found = list[Word]()
    fresh = True
    for place, (piece, is_special) in enumerate(zip(pieces, special, strict=True)):
        text = piece.replace(_SPACE, "")
        if is_special or not text:
            fresh = True
            continue
        mark = all(unicodedata.category(character)[0] == "P" for character in text)
        if fresh or mark or piece.startswith(_SPACE) or not found:
            found.append(Word(text, place, place + 1))
        else:
            found[-1] = Word(found[-1].text + text, found[-1].start, place + 1)
        fresh = mark
    return tuple(found)


def align_words(
    weights: Float[Tensor, "heads tgt_len src_len"], source: Sequence[Word], target: Sequence[Word]
) -> Int[Tensor, "heads tgt_words"]:
    """The source word of each target word: the one with most of the weight of its tokens."""
    by_source = torch.stack([weights[:, :, word.start : word.stop].sum(dim=-1) for word in source], dim=-1)
    by_word = [by_source[:, word.start : word.stop].mean(dim=1) for word in target]
    if not by_word:
        return torch.zeros(len(weights), 0, dtype=torch.long)
    return torch.stack(by_word, dim=1).argmax(dim=-1)


def on_diagonal(num_source: int, num_target: int) -> Int[Tensor, " tgt_words"]:
    """The source word at the same share of the sentence as each target word: what word order alone gives."""
    place = torch.arange(num_target) * (num_source - 1) / max(1, num_target - 1)
    return place.round().long()


def anchors(source: Sequence[Word], target: Sequence[Word]) -> dict[int, int]:
    """Target words that are spelled as a source word, capitals aside, both once: what they must align to.

    Punctuation is none: its place says little.
    """
    sides = [[word.text.casefold() for word in words] for words in (source, target)]
    once = [
        {text: i for i, text in enumerate(texts) if texts.count(text) == 1 and any(map(str.isalnum, text))}
        for texts in sides
    ]
    return {i: once[0][text] for text, i in once[1].items() if text in once[0]}


@final
@dataclass(frozen=True, eq=False)
class LayerAlignment:
    """How the heads of a layer of cross-attention align words, with 95 % intervals over sentences.

    Attributes:
        layer: its number in the stack.
        anchors: `[heads]`, the share of words spelled alike on both sides that align with each other.
        anchors_low: lower end; likewise `anchors_high`.
        order: `[heads]`, mean distance in source words from the diagonal.
        order_low: lower end; likewise `order_high`.
    """

    layer: int
    anchors: Float[Tensor, " heads"]
    anchors_low: Float[Tensor, " heads"]
    anchors_high: Float[Tensor, " heads"]
    order: Float[Tensor, " heads"]
    order_low: Float[Tensor, " heads"]
    order_high: Float[Tensor, " heads"]


@final
@dataclass(frozen=True, eq=False)
class Alignments:
    """How all heads of a translator align words.

    Attributes:
        shifted: whether a target word is aligned where the decoder reads it, one step later, and not where it
            produces it.
        layers: in order.
        by_order: the share of anchors that align on the diagonal, where words are in the same order.
        by_order_low: lower end of its interval; likewise `by_order_high`.
        even: the share that a head would have that picks any source word.
        num_anchors: words spelled alike.
        num_sentences: pairs of sentences.
    """

    shifted: bool
    layers: tuple[LayerAlignment, ...]
    by_order: float
    by_order_low: float
    by_order_high: float
    even: float
    num_anchors: int
    num_sentences: int

    def best(self) -> tuple[int, int]:
        """Layer and number of the head that aligns most anchors."""
        places = [(layer, head) for layer in self.layers for head in range(len(layer.anchors))]
        layer, head = max(places, key=lambda place: float(place[0].anchors[place[1]]))
        return layer.layer, head


@final
class AlignmentCounts:
    """Sums by sentence: anchors found by every head, anchors, distances from the diagonal, words."""

    def __init__(self) -> None:
        self._found: dict[int, list[Tensor]] = {}
        self._away: dict[int, list[Tensor]] = {}
        self._anchors, self._words = list[float](), list[float]()
        self._by_order, self._even = list[float](), list[float]()

    def add(self, source: Sequence[Word], target: Sequence[Word], aligned: dict[int, Tensor]) -> None:
        """Take in the alignments of a pair of sentences, by layer."""
        known = anchors(source, target)
        own, other = torch.tensor(list(known)).long(), torch.tensor(list(known.values())).long()
        order = on_diagonal(len(source), len(target))
        for layer, links in aligned.items():
            self._found.setdefault(layer, []).append((links[:, own] == other).double().sum(dim=1))
            self._away.setdefault(layer, []).append((links - order).abs().double().sum(dim=1))
        self._anchors.append(float(len(known)))
        self._words.append(float(len(target)))
        self._by_order.append(float((order[own] == other).sum()))
        self._even.append(len(known) / len(source))

    @property
    def num_anchors(self) -> int:
        """Words spelled alike."""
        return int(sum(self._anchors))

    def result(self, *, shifted: bool) -> Alignments:
        if not sum(self._anchors):
            raise UsageError(
                "no word is spelled alike on both sides: there is nothing to score alignments by"
            )
        by_anchor, by_word, order, even = (
            torch.tensor(numbers, dtype=torch.float64)[:, None]
            for numbers in (self._anchors, self._words, self._by_order, self._even)
        )
        layers = []
        for layer, parts in self._found.items():
            found, away = torch.stack(parts), torch.stack(self._away[layer])
            layers.append(
                LayerAlignment(
                    layer,
                    found.sum(dim=0) / by_anchor.sum(),
                    *ratio_intervals(found, by_anchor),
                    away.sum(dim=0) / by_word.sum(),
                    *ratio_intervals(away, by_word),
                )
            )
        low, high = map(float, ratio_intervals(order, by_anchor))
        total = float(by_anchor.sum())
        return Alignments(
            shifted,
            tuple(layers),
            float(order.sum()) / total,
            low,
            high,
            float(even.sum()) / total,
            int(total),
            len(self._anchors),
        )


@torch.no_grad()
def measure_alignment(
    reader: Reader, windows: Windows, progress: Told = lambda done, total: None
) -> tuple[Alignments, Alignments] | None:
    """Align the words of a text's translations by every head of the cross-attention.

    Alignments are scored by words that are spelled alike on both sides (names, numbers, loan words), each
    once, and compared with the diagonal, which is word order alone.
    """
    if not reader.opened.translates:
        raise UsageError(f"{reader.name} does not translate: it has no words to align")
    both = AlignmentCounts(), AlignmentCounts()
    for _, attention in read_windows(reader, windows, progress):
        source, target = _sides(reader, attention)
        if not source or not target:
            continue
        aligned: tuple[dict[int, Tensor], dict[int, Tensor]] = {}, {}
        for layer in attention.of("cross").layers:
            weights = layer.weights().cpu()
            read = torch.cat([weights[:, 1:], weights[:, -1:]], dim=1)
            for place, rows in enumerate((weights, read)):
                aligned[place][layer.number] = align_words(rows, source, target)
        for counts, found in zip(both, aligned, strict=True):
            counts.add(source, target, found)
    if not both[0].num_anchors:
        return None
    return both[0].result(shifted=False), both[1].result(shifted=True)


def _sides(reader: Reader, attention: Attention) -> tuple[tuple[Word, ...], tuple[Word, ...]]:
    """The words of the source and of the target."""
    found = []
    sides = (
        (attention.source_tokens or (), attention.source_ids or ()),
        (attention.tokens, attention.ids),
    )
    for (pieces, ids), tokenizer in zip(sides, (reader.source_tokenizer, reader.tokenizer), strict=True):
        special = tokenizer.special_ids
        found.append(words_of(pieces, [token in special for token in ids]))
    return found[0], found[1]
