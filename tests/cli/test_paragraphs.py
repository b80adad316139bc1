"""Paragraphs of ten languages through a translator that copies: nothing is lost, moved or put in."""

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from command import Command
from served import Served
from text.test_sentences import PARAGRAPHS, SPACES
from triptych.model import Model, load
from triptych.running.decoding import Hypothesis, SearchOptions
from triptych.running.decoding.sentence_decoder import SentenceDecoder

_GAPS = (" ", "  ", "\t", " \u3000", "\u00a0")
COUNTS = [1, pytest.param(10, marks=pytest.mark.slow)]


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[int]]:
    """Sentences, as token ids, that translators have copied instead of translating them."""
    found = list[Sequence[int]]()

    def copy(
        self: SentenceDecoder,
        texts: Sequence[Sequence[int]],
        options: SearchOptions | None = None,
        ends: object = None,
    ) -> list[list[Hypothesis]]:
        found.extend(texts)
        return [[Hypothesis(tuple(ids), 0.0)] for ids in texts]

    monkeypatch.setattr(SentenceDecoder, "decode", copy)
    monkeypatch.setattr(SentenceDecoder, "loop", lambda *_: None)
    monkeypatch.setattr(SentenceDecoder, "workers", 1, raising=False)
    return found


def paragraph(language: str, draw: random.Random, tag: str = "") -> str:
    """Two to six sentences with white space between and around them, each within an element of its own."""
    parts = [draw.choice(["", " ", "\t "])]
    for number in range(draw.randint(2, 6)):
        gap = SPACES.get(language) if draw.random() < 0.5 else None
        sentence = draw.choice(PARAGRAPHS[language])
        parts.append(tag.format(number, sentence) if tag else sentence)
        parts.append(draw.choice(_GAPS) if gap is None else gap)
    return "".join(parts)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("language", PARAGRAPHS)
def test_every_sentence_comes_in_order_with_its_white_space(
    language: str, count: int, copied: list[Sequence[int]], triptych: Command, small_run: Path
) -> None:
    lines = [paragraph(language, random.Random(f"{language} {number}")) for number in range(count)]
    given = "".join(f"{line}\n" for line in lines)
    assert (
        triptych("translate", small_run, "--workers", 1, "--engine", "triptych", stdin=given.encode()).out
        == given
    )
    assert len(copied) >= 2 * count  # the sentences are translated one by one
    assert [one.text for one in load(small_run, engine="triptych").translate(lines)] == lines


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.usefixtures("copied")
def test_every_sentence_and_every_link_comes_by_http(count: int, translator: Model) -> None:
    fields = {"source": "en", "target": "de"}
    with Served({"small-en-de": translator}) as served:
        for language in PARAGRAPHS:
            draw = random.Random(language)
            texts = [paragraph(language, draw) for _ in range(count)]
            assert served.ask("/translate", {**fields, "q": texts}).body["translatedText"] == texts
            linked = [paragraph(language, draw, '<a href="{}">{}</a>') for _ in range(count)]
            found = served.ask("/translate", {**fields, "q": linked, "format": "html"}).body["translatedText"]
            for document, got in zip(linked, found, strict=True):
                words = re.sub(r"<[^>]*>", "", document).split()
                assert re.sub(r"<[^>]*>", "", got).split() == words
                assert {*re.findall("<a[^>]*>", got)} == {*re.findall("<a[^>]*>", document)}
