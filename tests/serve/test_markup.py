"""Markup is read in time that grows with its length, keeps every letter, and holds up nobody."""

import random
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from served import Served
from text.test_sentences import PARAGRAPHS
from triptych.model import Model, load
from triptych.running.text import spans_of_words
from triptych.seeing.attending import AlignedWords, Word
from triptych.serving.limits import RequestError
from triptych.serving.markup import MOST_NESTED, Markup, TextRun

# Beginnings of all that HTML has, and text around them.
PARTS = (
    *("<", ">", "<a ", "<b>", "</b>", "<i", "</", "<!", "<![", "<![CDATA[", "]]>", "<!--", "-->", "<?", "?>"),
    *("&", "&amp;", "&#", "&#x", "&nosuch;", "&notit;", '"', "'", "=", "/", "<br/>", "<p>", "<script>"),
    *(
        "</script>",
        "<textarea>",
        "<svg>",
        "</svg>",
        "<!DOCTYPE ",
        "a",
        " ",
        "\n",
        "\r\n",
        "\r",
        "é",
        "☃",
        "\0",
    ),
)


def same(document: str) -> str:
    """The document with its runs as they are."""
    markup = Markup(document)
    return markup.translated([run.html(run.text, None) for run in markup.runs])


def without_text(document: str) -> str:
    markup = Markup(document)
    return markup.translated(["" for _ in markup.runs])


@pytest.mark.parametrize(
    "document",
    [
        *("<![<!", "<![ ", "<p><![CDATA[a<b]]></p>", "<svg><![CDATA[x<y]]></svg>", "<!-- a -- b -->"),
        *("<?xml version='1.0'?>", "<code>x &lt; y &nbsp;</code>", "<B CLASS=a>Ab</B>", "<p >a</p\n>", "a<b"),
        *("<script>if (a</b) {}</script>", "<td>a<td>b", "<li>one<li>two", "<textarea><b>&amp;</textarea>"),
        "<pre>a\r\nb</pre>\r\n<p>\r\none</p>",
    ],
)
def test_a_document_that_is_not_changed_is_the_same_to_the_letter(document: str) -> None:
    assert same(document) == document


def test_all_that_is_no_text_stays_in_any_document() -> None:
    draw = random.Random(20170612)
    for _ in range(3000):
        document = "".join(draw.choice(PARTS) for _ in range(draw.randint(1, 25)))
        markup = Markup(document)
        assert markup.translated([run.html(run.text, None) for run in markup.runs]) is not None
        kept = "".join(piece for piece in without_text(document) if not piece.isspace())
        letters = iter(document)
        assert all(letter in letters for letter in kept.replace("&lt;", "<").replace("&gt;", ">")), document


ATTACKS = {
    "opened": "<a " * 16_000,
    "declared": "<![<!" * 9_000,
    "commented": "<!--" * 12_000,
    "quoted": "<a b='" * 8_000,
    "processed": "<?" * 24_000,
    "referred": "&#" * 24_000,
    "deep": "<b>" * 7_000,
    "deep and closed": "<b>" * 4_000 + "a" + "</i></b>" * 3_000,
    "nested": "<b>" * 60 + "x y " * 8_000 + "</b>" * 60,
    "many": "<b>x</b>" * 5_000,
    "crossed": "<b><i>x</b></i>" * 3_000,
    "spaced": "<b> </b>" * 5_000,
}


def seconds_of(document: str) -> float:
    started = time.process_time()
    with suppress(RequestError):
        same(document)
    return time.process_time() - started


@pytest.mark.parametrize("kind", ATTACKS)
def test_no_document_takes_long(kind: str) -> None:
    assert seconds_of(ATTACKS[kind]) < 3.0  # the quadratic ones took 4 to 13


def tagged(text: str, draw: random.Random) -> tuple[str, list[str]]:
    """A text with elements around random parts of it, nested or not, and the opening tags."""
    tags = list[str]()
    parts = list[str]()
    at = 0
    while at < len(text):
        start = min(len(text), at + draw.randint(0, 9))
        stop = min(len(text), start + draw.randint(1, 6))
        parts.append(text[at:start])
        if inner := text[start:stop]:
            tag = f'<a href="{len(tags)}">'
            if inner.strip() and draw.random() < 0.8:
                tags.append(tag)
                inner = f"{tag}{inner}</a>"
            if inner.strip() and draw.random() < 0.3:
                tags.append(f'<b id="{len(tags)}">')
                inner = f"{tags[-1]}{inner}</b>"
        parts.append(inner)
        at = stop
    return "".join(parts), tags


def aligned(text: str, translation: str, draw: random.Random) -> AlignedWords | None:
    """Words with random attention; a word in four is unknown to the vocabulary and is none."""
    sides = [
        tuple(Word(one[start:stop], 0, 1) for start, stop in spans_of_words(one) if draw.random() < 0.75)
        for one in (text, translation)
    ]
    weights = torch.rand(len(sides[1]), len(sides[0]), generator=torch.Generator().manual_seed(1))
    return AlignedWords(sides[0], sides[1], weights) if draw.random() < 0.7 else None


# Sentences of ten languages, with emoji and words that no vocabulary has.
SENTENCES = [f"{' '.join(sentences)} 🙂👍🏽 xqzt" for sentences in PARAGRAPHS.values()]


@pytest.mark.parametrize("count", [4, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.parametrize("text", SENTENCES, ids=[*PARAGRAPHS])
def test_no_inline_tag_is_lost_whatever_it_surrounds(text: str, count: int) -> None:
    draw = random.Random(text)
    num_tags = 0
    for _ in range(count):
        translation = draw.choice([*SENTENCES, "", "☺", "一", "a b"])
        document, tags = tagged(text, draw)
        markup = Markup(document)
        (run,) = markup.runs
        found = markup.translated([run.html(translation, aligned(run.text, translation, draw))])
        assert all(tag in found for tag in tags), (document, found)
        assert re.sub(r"<[^>]*>", "", found) == translation
        again = Markup(f"{found}.")  # all tags have partners: they cut no run
        assert len(again.runs) == 1 or "></" in found
        num_tags += len(tags)
    assert num_tags > 5 * count


def test_a_part_of_a_word_is_in_the_element_of_its_word() -> None:
    (run,) = Markup("我喜欢喝<b>茶</b>。").runs
    source = tuple(Word(character, 0, 1) for character in "我喜欢喝茶。")
    target = tuple(Word(word, 0, 1) for word in ("I", "like", "tea", "."))
    weights = torch.eye(6)[[0, 1, 4, 5]]
    assert run.html("I like tea.", AlignedWords(source, target, weights)) == "I like <b>tea</b>."
    (run,) = Markup("un<b>hap</b>pily").runs
    words = AlignedWords((Word("unhappily", 0, 1),), (Word("leider", 0, 1),), torch.ones(1, 1))
    assert run.html("leider", words) == "<b>leider</b>"
    assert run.html("leider", None) == "<b>leider</b>"


@pytest.mark.parametrize(
    ("document", "status"),
    [
        ("<b>x</b>" * 6_000, 413),
        ("<b>" * (MOST_NESTED + 1) + "x" + "</b>" * (MOST_NESTED + 1), 400),
    ],
)
def test_tags_are_limited_in_number_and_in_depth(document: str, status: int) -> None:
    with pytest.raises(RequestError) as refused:
        Markup(document)
    assert refused.value.status == status
    assert Markup("<li>a" * 900).runs[-1].text == "a"  # elements whose end is left out are not deep


@pytest.mark.slow  # `test_attack.py` sends such markup beside honest clients, for eight seconds
def test_a_server_answers_others_while_it_reads_markup(translator: Model) -> None:
    fields = {"source": "en", "target": "de", "format": "html"}
    with Served({"en-de": translator}) as served, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(served.ask, "/translate", {**fields, "q": one}) for one in ATTACKS.values()]
        slowest = 0.0
        while not all(one.done() for one in asked):
            started = time.monotonic()
            assert served.ask("/health").status == 200
            slowest = max(slowest, time.monotonic() - started)
        assert {one.result().status for one in asked} <= {200, 400, 413}
        assert slowest < 2.0  # on busy cores; 12.8 seconds before


@pytest.mark.parametrize(
    ("document", "texts"),
    [
        ("a <b>b <i>c</i></b> d", ["a b c d"]),
        ("a <b>b <i>c</b> d</i>", ["a", "b", "c", "d"]),  # they do not go together
        ("<b>a <p>b</p></b> c", ["a", "b", "c"]),
        ("a <i class='icon'></i> b", ["a", "b"]),
        ("a\n <b>b </b>\nc", ["a b c"]),
        (
            '<!DOCTYPE html><p class="a">one &amp; <b>two</b><br/> three</p><code>x &lt; y</code>'
            '<script>if (a<b) {}</script><i translate="no">Nix</i>',
            ["one & two", "three"],
        ),
    ],
)
def test_a_tag_inside_a_sentence_does_not_part_it(document: str, texts: list[str]) -> None:
    markup = Markup(document)
    assert [run.text for run in markup.runs] == texts
    same = [run.html(run.text, words_of(run.text, run.text)) for run in markup.runs]
    assert " ".join(markup.translated(same).split()) == " ".join(document.replace("b </b>", "b</b> ").split())


def words_of(source: str, target: str, links: Sequence[int] | None = None) -> AlignedWords:
    """Each word of the target with the source word of a number; without numbers, word by word."""
    words = [
        tuple(Word(text, place, place + 1) for place, text in enumerate(re.findall(r"\w+|[^\w\s]", of)))
        for of in (source, target)
    ]
    weights = torch.zeros(len(words[1]), len(words[0]))
    for place, link in enumerate(links or range(len(words[1]))):
        weights[place, link] = 1.0
    return AlignedWords(words[0], words[1], weights)


@pytest.mark.parametrize(
    ("document", "translation", "links", "expected"),
    [
        ("a <b>red</b> car", "une voiture rouge", [0, 2, 1], "une voiture <b>rouge</b>"),
        (
            "I <a href='x'>gave up</a>.",
            "ich gab es auf.",
            [0, 1, 0, 2, 3],
            "ich <a href='x'>gab</a> es <a href='x'>auf</a>.",
        ),
        ("<i>a <b>b</b></i> c", "C B A", [2, 1, 0], "C <i><b>B</b> A</i>"),
        ("<b>yes</b>, no", "nein, ja", [2, 1, 0], "nein, <b>ja</b>"),
        ("<b>of</b> it", "dessen", [1], "<b>dessen</b>"),  # a tag is kept where no word looks at its own
        ("in<b>side</b> it", "drin & so", [0, 1, 1], "<b>drin</b> &amp; so"),
    ],
)
def test_a_word_lies_in_the_tags_of_the_word_that_it_looks_at(
    document: str, translation: str, links: list[int], expected: str
) -> None:
    (run,) = Markup(document).runs
    assert run.html(translation, words_of(run.text, translation, links)) == expected


def test_without_words_places_decide_in_which_tags_a_word_lies() -> None:
    (run,) = Markup("one two <b>three</b>").runs
    assert run.html("eins zwei drei", None) == "eins zwei <b>drei</b>"
    assert TextRun("<1>").html("<2>", None) == "&lt;2&gt;"


CHECKPOINT = Path(__file__).parents[3] / "shared" / "checkpoints" / "marian-multi30k"


@pytest.mark.skipif(not CHECKPOINT.exists(), reason="the trained translator is not there")
def test_a_trained_translator_finds_the_words_of_a_tag() -> None:
    model = load(CHECKPOINT)
    for document, expected in (
        ("A man in a <b>blue</b> shirt.", ["<b>blauen</b>"]),
        ("A <b>dog</b> runs through the <i>snow</i>.", ["<b>Hund</b>", "<i>Schnee</i>"]),
        ("<em>Two women</em> are playing the guitar.", ["<em>Zwei Frauen</em>"]),
    ):
        (run,) = Markup(document).runs
        text = model.translate(run.text).text
        html = run.html(text, model.attend(run.text, text).words())
        assert all(part in html for part in expected), html
