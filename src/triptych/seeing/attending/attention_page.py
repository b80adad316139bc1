"""The page of attention: its data as plain records, packed for its script, as HTML.

Its template, style and script are `seeing/reports/viewer.html`, `viewer.css` and `viewer.js`. A weight w is
stored as round(4095 √w), compressed, in base64: small weights keep their digits, and the error of a weight is
at most 0.00025. A head is decompressed when it is selected.
"""

import base64
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from html import escape
from itertools import chain
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from triptych.files import write_text
from triptych.progress import Progress, untold
from triptych.running.measuring import (
    HeadWeights,
    bin_width,
)
from triptych.seeing.attending.telling import Telling
from triptych.seeing.reports.html import make_page

Kind = Literal["encoder", "decoder", "cross"]
PAGE_LIMIT_BYTES = 15_000_000
"""Maximum size of a page. Larger pages contain the largest weights of each row, with a note."""

# Reserved for tokens, style and script; the remaining bytes are for the weights.
_FOR_THE_REST = 1_000_000
_NOTEBOOK_HEIGHT_PIXELS = 900
_LEVELS = 4095
# Initial number of weights per row if weights must be omitted.
_MOST_KEPT = 64
_NUM_TRIED = 6
# With more heads, small maps have half the length and width.
_MANY_HEADS = 256


class HeadNote(NamedTuple):
    """Notes on a head for the page: a label next to its number, and names with values."""

    label: str = ""
    facts: tuple[tuple[str, str], ...] = ()


@final
@dataclass(frozen=True, eq=False)
class ViewedHead:
    """One head."""

    number: int  # head number within its layer
    map: HeadWeights  # attention weights
    note: HeadNote  # notes on the page


@final
@dataclass(frozen=True, eq=False)
class ViewedLayer:
    """The heads of one layer, in order."""

    number: int  # layer number
    heads: tuple[ViewedHead, ...]  # non-empty


@final
@dataclass(frozen=True, eq=False)
class ViewedKind:
    """All layers of one kind of attention over one text."""

    kind: Kind  # "encoder" (source attends to source), "decoder" or "cross" (target attends to source)
    query_tokens: tuple[str, ...]  # readable query tokens
    key_tokens: tuple[str, ...]  # readable key tokens
    layers: tuple[ViewedLayer, ...]  # non-empty
    # index of the first generated query token; None without generated tokens
    first_generated_query: int | None = None
    first_generated_key: int | None = None  # the same for key tokens
    # index of the first query token of a pair's second text; None for a single text
    second_query: int | None = None
    second_key: int | None = None  # the same for key tokens
    # first token of each word of the queries; None without words
    query_words: tuple[int, ...] | None = None
    key_words: tuple[int, ...] | None = None  # the same for key tokens

    @property
    def marked(self) -> tuple[int | None, int | None]:
        """The first generated query and key, or else the first query and key of a pair's second text."""
        if self.first_generated_query is not None:
            return self.first_generated_query, self.first_generated_key
        return self.second_query, self.second_key


@final
@dataclass(frozen=True, eq=False)
class ViewedText:
    """One text, or one pair of source and target."""

    title: str  # the text itself, or its line number
    kinds: tuple[ViewedKind, ...]  # kinds of attention of the model, non-empty


@final
@dataclass(frozen=True, eq=False)
class AttentionPage:
    """Contents of the page."""

    title: str  # heading
    texts: tuple[ViewedText, ...]  # selectable texts, non-empty
    facts: tuple[
        tuple[str, str], ...
    ] = ()  # names and values, such as the model and the command
    notes: tuple[str, ...] = ()  # sentences below the heading


def join_pages(pages: Sequence[AttentionPage]) -> AttentionPage:
    """Join the texts of at least one page into a page; all else is taken from the first page."""
    return replace(
        pages[0], texts=tuple(chain.from_iterable(page.texts for page in pages))
    )


def attention_html(page: AttentionPage, progress: Progress = untold) -> str:
    """Return the HTML of a self-contained page."""
    data = viewer_data(page, progress=progress)
    return make_page(
        "attention.html",
        title=page.title,
        facts=page.facts,
        notes=page.notes,
        data=data,
    )


def write_attention_page(
    page: AttentionPage, path: Path, progress: Progress = untold
) -> None:
    """Write one self-contained HTML file of at most 15 MB."""
    write_text(path, attention_html(page, progress))


def notebook_html(page: AttentionPage) -> str:
    """Return the page as output of a notebook cell: a sandboxed frame."""
    return (
        f'<iframe title="{escape(page.title)}" sandbox="allow-scripts allow-downloads" '
        f'style="width: 100%; height: {_NOTEBOOK_HEIGHT_PIXELS}px; border: 0" '
        f'srcdoc="{escape(attention_html(page))}"></iframe>'
    )


def viewer_data(
    page: AttentionPage,
    limit_bytes: int = PAGE_LIMIT_BYTES,
    progress: Progress = untold,
) -> dict[str, Any]:
    """Return the data of `seeing/reports/viewer.html`, for a page of about `limit_bytes` characters.

    If all weights are too many, every row of every head keeps its k largest weights, with the largest
    possible k.
    """
    fixed: list[dict[str, Any]] = [
        {"title": text.title, "kinds": [*map(_pack_kind, text.kinds)]}
        for text in page.texts
    ]
    # Overviews are always included; the remaining bytes are for the weights.
    kinds = chain.from_iterable(text["kinds"] for text in fixed)
    room = limit_bytes - _FOR_THE_REST - sum(len(kind["overviews"]) for kind in kinds)
    stacks = chain.from_iterable(text.kinds for text in page.texts)
    layers = chain.from_iterable(stack.layers for stack in stacks)
    heads = [*chain.from_iterable(layer.heads for layer in layers)]
    packed = _pack_maps(
        [head.map for head in heads], room, partial(progress, "packing heads")
    )
    return {"texts": fixed, "maps": packed}


def _pack_maps(
    maps: list[HeadWeights], room: int, progress: Callable[[int, int], None]
) -> list[dict[str, Any]]:
    whole = sum(of.num_queries * of.num_keys for of in maps if of.keys is None)
    # A random digit compresses to 1.5 bytes, and base64 adds a third of the size.
    k = None if whole < room else _MOST_KEPT
    # Estimate the number of rows from a few maps, then pack all maps.
    few = maps[:: max(1, len(maps) // _NUM_TRIED)]
    for tried in (few, maps):
        while True:
            packed = []
            for of in tried:
                packed.append(_pack_map(of, k))
                progress(len(packed), len(maps))
            size = (
                sum(len(one["data"]) + len(one.get("keys", "")) for one in packed)
                * len(maps)
                / len(tried)
            )
            if size <= room or k == 1:
                break
            if k is None:
                k = _MOST_KEPT
            else:
                k = min(k, max(one["kept"] for one in packed))
                k = max(1, min(k - 1, int(k * room / size)))
    return packed


def _pack_map(of: HeadWeights, k: int | None) -> dict[str, Any]:
    """Pack the weights of a head: all weights, or the k largest of every row."""
    if k is not None and (of.keys is not None or of.num_keys > k):
        of = of.largest(k)
    if of.keys is not None and of.left_out is not None:
        return _pack_rows(of, of.keys, of.left_out)
    return {
        "form": "dense",
        "kept": of.num_keys,
        "data": _compressed(_planes(_quantised(of.weights), 2)),
    }


def _pack_rows(
    of: HeadWeights, keys: NDArray[np.integer], left_out: NDArray[np.float32]
) -> dict[str, Any]:
    """Pack keys by position (best for attention to a fixed key) or by distance (to a neighbour)."""
    order = np.argsort(keys, axis=1)
    sorted_keys = np.take_along_axis(keys, order, 1).T.astype(np.int64)
    weights = _quantised(np.take_along_axis(of.weights, order, 1).T)
    distance = np.arange(of.num_queries) - sorted_keys
    forms = {
        "rows": sorted_keys,
        "distances": np.where(
            distance < 0, -2 * distance - 1, 2 * distance
        ),  # the sign is the last bit
    }
    packed = {form: _compressed(_planes(numbers, 4)) for form, numbers in forms.items()}
    # Keep the smaller form.
    form = min(packed, key=lambda name: len(packed[name]))
    rest = _compressed(_planes(weights, 2) + _planes(_quantised(left_out), 2))
    return {
        "form": form,
        "kept": int(keys.shape[1]),
        "keys": packed[form],
        "data": rest,
    }


def _pack_kind(kind: ViewedKind) -> dict[str, Any]:
    heads = [*chain.from_iterable(layer.heads for layer in kind.layers)]
    step = 2 if len(heads) > _MANY_HEADS else 1
    # Overviews in 8 bits, by the square root of the weight.
    overviews = np.stack([_smaller(head.map.overview, step) for head in heads])
    small = np.rint(255 * np.sqrt(np.clip(overviews, 0, 1))).astype(np.uint8)
    return {
        "kind": kind.kind,
        "queries": list(kind.query_tokens),
        "keys": list(kind.key_tokens),
        "generated_query": kind.first_generated_query,
        "generated_key": kind.first_generated_key,
        "second_query": kind.second_query,
        "second_key": kind.second_key,
        "query_words": kind.query_words,
        "key_words": kind.key_words,
        "layers": [
            {
                "number": layer.number,
                "heads": [
                    {"number": head.number, **head.note._asdict()}
                    for head in layer.heads
                ],
            }
            for layer in kind.layers
        ],
        "telling": _telling(kind, overviews),
        "overview": [*small.shape[1:]],
        "bins": [
            step * bin_width(len(kind.query_tokens)),
            step * bin_width(len(kind.key_tokens)),
        ],
        "overviews": _compressed(small.tobytes()),
    }


def _telling(kind: ViewedKind, overviews: NDArray[np.float32]) -> list[int]:
    """Return indices of the layer and the head with the most information about the query token."""
    weights = torch.from_numpy(overviews.astype(np.float64))
    if kind.kind != "cross":
        weights.diagonal(dim1=1, dim2=2).zero_()
    found = Telling()
    found.add(weights)
    best = int(found.nats().argmax())
    places = [
        [layer, head]
        for layer, of in enumerate(kind.layers)
        for head in range(len(of.heads))
    ]
    return places[best]


def _smaller(overview: NDArray[np.float32], step: int) -> NDArray[np.float32]:
    """Sum `step` neighbouring columns, and average as many rows."""
    if step == 1:
        return overview
    columns = np.add.reduceat(overview, np.arange(0, overview.shape[1], step), axis=1)
    starts = np.arange(0, overview.shape[0], step)
    counts = np.diff([*starts, overview.shape[0]])
    return np.asarray(
        np.add.reduceat(columns, starts, axis=0) / counts[:, None], np.float32
    )


def _quantised(weights: NDArray[np.floating]) -> NDArray[np.int64]:
    return np.asarray(np.rint(_LEVELS * np.sqrt(np.clip(weights, 0, 1))), np.int64)


def _planes(numbers: NDArray[np.int64], num_bytes: int) -> bytes:
    """Reorder bytes: all lowest bytes, then all second bytes, …: equal bytes become adjacent and compress."""
    little = np.ascontiguousarray(numbers, "<u4").reshape(-1, 1).view(np.uint8)
    return little[:, :num_bytes].T.tobytes()


def _compressed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")
