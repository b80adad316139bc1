"""The records of the page as the JSON that its script reads: weights quantised, compressed, in base64.

A weight w is stored as round(4095 √w): small weights keep their digits, and no weight is off by more than
0.00025. A head is decompressed when somebody chooses it.
"""

import base64
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from triptych.attending.maps import DenseMap, HeadMap, TopMap, bin_width
from triptych.attending.page import AttentionPage, ViewedHead, ViewedKind, ViewedText

_LEVELS = 4095
# Where weights have to be left out, this many of each row are tried first.
_MOST_KEPT = 64
_NUM_TRIED = 6
# Small maps of so many heads take half the length and width.
_MANY_HEADS = 256


def pack_page(
    page: AttentionPage,
    limit_bytes: int,
    progress: Callable[[str, int, int], None] = lambda what, done, total: None,
) -> dict[str, Any]:
    """The data of a page, of about `limit_bytes` characters at most.

    Where all weights are too many, every row of every head keeps its k largest, with k as large as fits.
    """
    fixed = [_pack_text(text) for text in page.texts]
    room = limit_bytes - sum(len(kind["overviews"]) for text in fixed for kind in text["kinds"])
    heads = [h for text in page.texts for kind in text.kinds for layer in kind.layers for h in layer.heads]
    packed = _pack_maps([head.map for head in heads], room, partial(progress, "packing heads"))
    return {"texts": fixed, "maps": packed}


def _pack_maps(maps: list[HeadMap], room: int, progress: Callable[[int, int], None]) -> list[dict[str, Any]]:
    whole = sum(of.num_queries * of.num_keys for of in maps if isinstance(of, DenseMap))
    # Random digits compress to one and a half bytes each, and base64 adds a third.
    k = None if whole < room else _MOST_KEPT
    # A few maps tell about how many rows fit; then all are tried.
    few = maps[:: max(1, len(maps) // _NUM_TRIED)]
    for tried in (few, maps):
        while True:
            packed = []
            for of in tried:
                packed.append(_pack_map(_reduced(of, k)))
                progress(len(packed), len(maps))
            size = sum(len(one["data"]) + len(one.get("keys", "")) for one in packed) * len(maps) / len(tried)
            if size <= room or k == 1:
                break
            if k is None:
                k = _MOST_KEPT
            else:
                k = min(k, max(one["kept"] for one in packed))
                k = max(1, min(k - 1, int(k * room / size)))
    return packed


def _reduced(of: HeadMap, k: int | None) -> HeadMap:
    return of if k is None or (isinstance(of, DenseMap) and of.num_keys <= k) else of.largest(k)


def _pack_map(of: HeadMap) -> dict[str, Any]:
    if isinstance(of, TopMap):
        return _pack_rows(of)
    assert isinstance(of, DenseMap)
    return {"form": "dense", "kept": of.num_keys, "data": _compressed(_planes(_quantised(of.weights), 2))}


def _pack_rows(of: TopMap) -> dict[str, Any]:
    """Keys as they are (right for a head that looks at one place) or by distance (at a neighbour)."""
    order = np.argsort(of.keys, axis=1)
    keys = np.take_along_axis(of.keys, order, 1).T.astype(np.int64)
    weights = _quantised(np.take_along_axis(of.weights, order, 1).T)
    distance = np.arange(of.num_queries) - keys
    forms = {
        "rows": keys,
        "distances": np.where(distance < 0, -2 * distance - 1, 2 * distance),  # the sign is the last bit
    }
    packed = {form: _compressed(_planes(numbers, 4)) for form, numbers in forms.items()}
    form = min(packed, key=lambda name: len(packed[name]))
    rest = _compressed(_planes(weights, 2) + _planes(_quantised(of.left_out), 2))
    return {"form": form, "kept": int(of.keys.shape[1]), "keys": packed[form], "data": rest}


def _pack_text(text: ViewedText) -> dict[str, Any]:
    return {"title": text.title, "notes": list(text.notes), "kinds": [_pack_kind(of) for of in text.kinds]}


def _pack_kind(kind: ViewedKind) -> dict[str, Any]:
    heads = [head for layer in kind.layers for head in layer.heads]
    step = 2 if len(heads) > _MANY_HEADS else 1
    overviews = np.stack([_smaller(head.map.overview, step) for head in heads])
    small = np.rint(255 * np.sqrt(np.clip(overviews, 0, 1))).astype(np.uint8)
    return {
        "kind": kind.kind,
        "queries": list(kind.query_tokens),
        "keys": list(kind.key_tokens),
        "generated_query": kind.first_generated_query,
        "generated_key": kind.first_generated_key,
        "layers": [
            {
                "number": place if layer.number is None else layer.number,
                "heads": [_pack_head(place, head) for place, head in enumerate(layer.heads)],
            }
            for place, layer in enumerate(kind.layers)
        ],
        "overview": [*small.shape[1:]],
        "bins": [step * bin_width(len(kind.query_tokens)), step * bin_width(len(kind.key_tokens))],
        "overviews": _compressed(small.tobytes()),
    }


def _smaller(overview: NDArray[np.float32], step: int) -> NDArray[np.float32]:
    """Sum `step` neighbouring columns, and take the mean of as many rows."""
    if step == 1:
        return overview
    columns = np.add.reduceat(overview, np.arange(0, overview.shape[1], step), axis=1)
    starts = np.arange(0, overview.shape[0], step)
    counts = np.diff([*starts, overview.shape[0]])
    return np.asarray(np.add.reduceat(columns, starts, axis=0) / counts[:, None], np.float32)


def _pack_head(place: int, head: ViewedHead) -> dict[str, Any]:
    number = place if head.number is None else head.number
    return {"number": number, "label": head.label, "facts": [list(fact) for fact in head.facts]}


def _quantised(weights: NDArray[np.floating]) -> NDArray[np.int64]:
    return np.asarray(np.rint(_LEVELS * np.sqrt(np.clip(weights, 0, 1))), np.int64)


def _planes(numbers: NDArray[np.int64], num_bytes: int) -> bytes:
    """All lowest bytes, then all second bytes, …: equal ones stand together and compress."""
    little = np.ascontiguousarray(numbers, "<u4").reshape(-1, 1).view(np.uint8)
    return little[:, :num_bytes].T.tobytes()


def _compressed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")
