"""Paragraphs of ten languages through a translator that copies, and through one that has learned their
sentences by heart: nothing is lost, moved or put in."""

import random
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from command import Command
from served import Served
from text.test_sentences import PARAGRAPHS, SPACES
from tiny_recipe import tiny_recipe
from triptych.model import Model, load
from triptych.running.decoding import Hypothesis, SearchOptions
from triptych.running.decoding.sentence_decoder import SentenceDecoder
from triptych.training import resolve, runs
from triptych.training.progress import LineDisplay

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


ENGLISH = [
    "It rained a lot!",
    "Two cats slept.",
    "Who knows?",
    "We left early.",
    "Nobody came.",
    "One dog ran.",
]


def learn_by_heart(language: str, folder: Path) -> dict[str, str]:
    """Train a translator of the sentences of a language, and return them with their translations."""
    learned = dict(zip(PARAGRAPHS[language], ENGLISH, strict=False))
    (folder / "source").write_text("".join(f"{line}\n" for line in learned), encoding="utf-8")
    (folder / "target").write_text("".join(f"{line}\n" for line in learned.values()), encoding="utf-8")
    files = {"source": str(folder / "source"), "target": str(folder / "target")}
    tree = tiny_recipe(
        data={"train": files, "valid": files, "cache": ""},
        model={"d_model": 64, "d_ff": 128, "dropout": 0.0, "norm": "pre"},
        training={"max_steps": 120, "learning_rate": 0.004, "warmup_steps": 10, "label_smoothing": 0.0},
        decoding={"languages": [language, "en"]} if language != "en" else {"languages": ["en", "de"]},
    )
    runs.train(resolve(tree), folder / "run", LineDisplay())
    return learned


def translated(text: str, learned: dict[str, str]) -> str:
    """A text with its sentences replaced by their translations."""
    for sentence in sorted(learned, key=len, reverse=True):
        text = text.replace(sentence, learned[sentence])
    return text


@pytest.mark.slow
@pytest.mark.parametrize("language", PARAGRAPHS)
def test_paragraphs_of_sentences_learned_by_heart_are_translated_whole_everywhere(
    language: str, triptych: Command, tmp_path: Path
) -> None:
    learned = learn_by_heart(language, tmp_path)
    draw = random.Random(language)
    lines = [paragraph(language, draw) for _ in range(10)]
    expected = [translated(line, learned) for line in lines]
    for engine in ("ctranslate2", "triptych"):
        given = "".join(f"{line}\n" for line in lines).encode()
        options = ["--workers", 1, "--engine", engine]
        out = triptych("translate", tmp_path / "run", *options, stdin=given).done().out
        assert out == "".join(f"{line}\n" for line in expected)
    model = load(tmp_path / "run")
    assert [one.text for one in model.translate(lines)] == expected
    linked = [f"<p>{paragraph(language, draw, '<a href={0}>{1}</a>')}</p>" for _ in range(10)]
    source, target = ("en", "de") if language == "en" else (language, "en")
    fields = {"source": source, "target": target}
    with Served({"learned": model}) as served:
        assert served.ask("/translate", {**fields, "q": lines}).body["translatedText"] == expected
        markup = {**fields, "format": "html"}
        plain = [f"<p>{line.strip()}</p>" for line in lines]
        found = served.ask("/translate", {**markup, "q": plain}).body["translatedText"]
        assert [one.split() for one in found] == [f"<p>{one.strip()}</p>".split() for one in expected]
        found = served.ask("/translate", {**markup, "q": linked}).body["translatedText"]
    for document, got in zip(linked, found, strict=True):
        wanted = translated(document, learned)
        assert re.sub("<[^>]*>", "", got).split() == re.sub("<[^>]*>", "", wanted).split()
        assert links(got) == links(wanted)


def links(document: str) -> dict[str, str]:
    """The letters in each link."""
    found = dict[str, str]()
    for target, inside in re.findall("<a href=([0-9]+)>(.*?)</a>", document):
        found[target] = found.get(target, "") + "".join(filter(str.isalpha, inside))
    return found
