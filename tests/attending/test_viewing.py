"""What the page of attention carries, without a browser."""

import base64
import html
import re
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from attending.viewed import first, layers_of, long_page, previous, translation_page
from triptych.running.measuring.weight_maps import HeadWeights
from triptych.seeing.attending.attention_page import (
    AttentionPage,
    ViewedKind,
    ViewedText,
    attention_html,
    notebook_html,
    viewer_data,
    write_attention_page,
)

ATTACK = "</script><script>alert(1)</script>"


def numbers(packed: str, start: int, count: int, num_bytes: int) -> np.ndarray[Any, Any]:
    data = np.frombuffer(zlib.decompress(base64.b64decode(packed)), np.uint8).astype(np.int64)
    planes = data[start : start + count * num_bytes].reshape(num_bytes, count)
    return (planes * 256 ** np.arange(num_bytes)[:, None]).sum(0)


def test_weights_on_a_page_are_off_by_less_than_a_quarter_of_a_thousandth() -> None:
    weights = np.random.default_rng(0).dirichlet(np.full(40, 0.1), 30).astype(np.float32)
    kind = ViewedKind("cross", ("q",) * 30, ("k",) * 40, layers_of([[HeadWeights.whole(weights)]]))
    (packed,) = viewer_data(AttentionPage("p", (ViewedText("t", (kind,)),)))["maps"]
    found = (numbers(packed["data"], 0, 1200, 2).reshape(30, 40) / 4095) ** 2
    assert packed["form"] == "dense"
    assert np.abs(found - weights).max() < 0.00025
    assert np.abs(found - weights)[weights < 1e-4].max() < 1e-5


@pytest.mark.parametrize("limit", [1_065_000, 1_080_000])
def test_a_page_keeps_as_many_weights_of_a_row_as_fit(limit: int) -> None:
    page = long_page(1, 3, 600)
    packed = viewer_data(page, limit)
    size = sum(len(one["keys"]) + len(one["data"]) for one in packed["maps"])
    room = limit - 1_000_000 - len(packed["texts"][0]["kinds"][0]["overviews"])
    assert 0.6 * room < size <= room
    assert max(one["kept"] for one in packed["maps"]) < 16
    kept = packed["maps"][0]["kept"]
    count = 600 * kept
    weights = (numbers(packed["maps"][0]["data"], 0, count, 2) / 4095) ** 2
    left = (numbers(packed["maps"][0]["data"], 2 * count, 600, 2) / 4095) ** 2
    np.testing.assert_allclose(weights.reshape(kept, 600).sum(0) + left, 1, atol=3e-3)


@pytest.mark.parametrize("weights", [first(300, 300), previous(300, 300)])
def test_keys_are_stored_as_places_or_distances_and_come_back(weights: Any) -> None:
    top = HeadWeights.whole(weights).largest(2)
    kind = ViewedKind("encoder", ("q",) * 300, ("k",) * 300, layers_of([[top]]))
    (packed,) = viewer_data(AttentionPage("p", (ViewedText("t", (kind,)),)))["maps"]
    stored = numbers(packed["keys"], 0, 600, 4).reshape(2, 300)
    if packed["form"] == "distances":
        stored = np.arange(300) - np.where(stored % 2, -(stored + 1) // 2, stored // 2)
    np.testing.assert_array_equal(np.sort(stored.T, 1), np.sort(top.keys, 1))


def test_the_head_that_tells_most_is_the_one_whose_looks_follow_the_token_that_looks() -> None:
    own = np.eye(4, dtype=np.float32)
    even = np.full((4, 4), 0.25, np.float32)
    heads = [
        [HeadWeights.whole(one) for one in ones] for ones in ((first(4, 4), own), (even, previous(4, 4)))
    ]
    kinds = (ViewedKind(kind, ("a",) * 4, ("a",) * 4, layers_of(heads)) for kind in ("decoder", "cross"))
    data = viewer_data(AttentionPage("p", (ViewedText("t", tuple(kinds)),)))
    # A token that looks at itself tells nothing, unless it is the word of another language.
    assert [kind["telling"] for kind in data["texts"][0]["kinds"]] == [[1, 1], [0, 1]]


class Scripts(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_the_page_loads_nothing_and_text_cannot_break_out_of_its_place() -> None:
    kind = ViewedKind("encoder", (ATTACK,), ("<!--<script>",), layers_of([[HeadWeights.whole(first(1, 1))]]))
    page = AttentionPage(ATTACK, (ViewedText(ATTACK, (kind,)),), ((ATTACK, ATTACK),), (ATTACK,))
    text = attention_html(page)
    elements = Scripts(text).elements
    assert [dict(attrs).get("type") for tag, attrs in elements if tag == "script"] == [
        None,
        "application/json",
        "module",
    ]
    assert {dict(attrs).get("href") for tag, attrs in elements if tag == "link"} == {"data:,"}
    assert not [attrs for _, attrs in elements if {"src", "srcset"} & set(attrs)]
    assert not re.search(r"url\(|@import|fetch\(|XMLHttpRequest|https?://", text)


def test_a_notebook_shows_the_same_page_in_a_frame_of_its_own() -> None:
    page = translation_page()
    shown = notebook_html(page)
    (frame,) = re.findall(r'srcdoc="([^"]*)"', shown)
    assert html.unescape(frame) == attention_html(page)
    assert "allow-same-origin" not in shown


def test_a_page_is_written_as_one_file(tmp_path: Path) -> None:
    write_attention_page(translation_page(), tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == attention_html(translation_page())
