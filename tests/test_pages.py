"""Every kind of page in a browser: it fits a telephone, is dark where the system is, and asks for nothing."""

import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attending.tiny_readers import language_reader
from attending.viewed import translation_page
from browser import Page
from small_checkpoints import gpt2, llama
from triptych import Difference
from triptych.rewriting.differences.difference_records import (
    ChainStep,
    Change,
    HeadDifference,
    PartDifference,
    SettingDifference,
)
from triptych.rewriting.differences.difference_records import Difference as Found
from triptych.seeing.attending.attention_page import AttentionPage, attention_html, viewer_data
from triptych.seeing.attending.over import attend_over
from triptych.seeing.inspection import heads_page, inspect
from triptych.seeing.inspection.drawing import render_heads
from triptych.seeing.reports import (
    Bar,
    BarChart,
    CurveChart,
    Interval,
    IntervalChart,
    MetricPoint,
    Report,
    ScatterChart,
    Table,
    TranslationSample,
)
from triptych.seeing.reports.html import render_report

LONG = "/home/somebody/" + "a-folder-with-a-long-name/" * 6 + "model"
POINTS = tuple(Interval(4 / x, 3 / x, 5 / x, x=x) for x in (1.0, 2.0, 3.0))
CHARTS = (
    CurveChart("Loss", "updates", "loss", (("factored", POINTS), ("shared", POINTS)), is_log=True),
    ScatterChart("Loss and cost", "cost", "loss", (Interval(2.0, 1.5, 2.5, "shared", 1.0),)),
    IntervalChart("Differences", "difference", (Interval(1.0, 0.5, 1.5, "shared"),)),
)
TEXTS = tuple(replace(text, title=LONG) for text in translation_page().texts)
LONG_NAMES = AttentionPage(LONG, TEXTS, (("a", LONG),), (LONG,))
OVER = ["the cat sat on the mat. the cat sat on the hat. " * 4] * 2
TABLE = Table(
    "Costs",
    ("name", "bytes", "time"),
    (("3.2", "1.05M", "41.2 µs"), ("3.10", "786K", "1.30 ms"), ("b", "2.15G", ""), ("a", "512", "0.2 s")),
    LONG,
    numeric=(1, 2),
    shaded=(1,),
)
FULL = Report(
    title="a run",
    summary=LONG,
    facts=(("model", LONG), ("steps", "3")),
    charts=(BarChart("FLOPs", (Bar("one", 2.0, "two", "prefill"), Bar("one", 1.0, "one", "decode"))),),
    tables=(TABLE, replace(TABLE, columns=("", "", ""), shaded=())),
    commands=(f"triptych translate {LONG}",),
    metrics=tuple(
        MetricPoint(step, 4 / step, 5 / step, bleu=float(step), learning_rate=1 / step) for step in (1, 2, 3)
    ),
    samples=(TranslationSample("eins " * 30, "one " * 30, "one"), TranslationSample("zwei", "two", "two")),
    plots=CHARTS,
    viewer=viewer_data(LONG_NAMES),
)


def over() -> str:
    return render_report(attend_over(language_reader(), OVER, context=16).report())


def heads(folder: Path) -> str:
    torch.manual_seed(0)
    inspect(gpt2(folder)).page(folder / "heads.html")
    return (folder / "heads.html").read_text(encoding="utf-8")


def difference(folder: Path) -> str:
    """A page with every section, long names and more heads than fit a telephone."""
    heads = tuple(HeadDifference(head, 31 - head, "near", 0.1, 0.5 / (head + 1)) for head in range(32))
    parts = (
        PartDifference("embeddings", "embeddings", "same numbers"),
        PartDifference("encoder.0 attention", "attention", "near", "encoder.0", (), (LONG,), 0.1, heads),
        PartDifference(
            "encoder.0 feed-forward", "feed-forward", "different", "encoder.0", relative=float("inf")
        ),
        PartDifference(
            "decoder.0 attention", "attention", "same function", "decoder.0", (LONG,), heads=heads[:8]
        ),
    )
    found = Found(
        LONG,
        LONG,
        "near",
        parts,
        (ChainStep(LONG, layers=("0",)),),
        (LONG, "`a` differs"),
        (SettingDifference(LONG, "1", "2"),),
        (Change("merged LoRA", "ΔW has rank 2 (6 tensors)", (LONG,), {"encoder.0.1": (0.1, float("inf"))}),),
        texts=(f"the tokenizer differs: {LONG}",),
        notes=(LONG,),
    )
    Difference(found).page(folder / "difference.html")
    return (folder / "difference.html").read_text(encoding="utf-8")


def shown(tab: Page, page: str, path: Path, *, theme: str = "dark", width: int = 400) -> None:
    """Open a page on a screen of that width, with the system's choice of colours."""
    path.write_text(page, encoding="utf-8")
    tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": theme}])
    tab.call("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
    tab.open(path)
    ready = "[...document.querySelectorAll('.chart')].every((chart) => chart.querySelector('svg'))"
    for _ in range(100):
        if tab.value(ready):
            return
        time.sleep(0.05)
    raise AssertionError("a chart is not drawn")


def place(tab: Page, selector: str) -> dict[str, float]:
    """Where something is on the screen."""
    found = tab.value(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")
    return dict(found)


@pytest.mark.parametrize("width", [400, 900, 1400])
def test_labels_of_axes_do_not_touch(tab: Page, tmp_path: Path, width: int) -> None:
    pytest.importorskip("vl_convert")
    large = [(2e5 + 1e5 * number, 1 + 0.01 * number) for number in range(9)]
    points = tuple(Interval(y, y - 0.01, y + 0.01, x=x) for x, y in large)
    steps = tuple(MetricPoint(int(x), y, y) for x, y in large)
    charts = (*CHARTS, CurveChart("Narrow", "tokens", "loss", (("factored", points),), is_log=True))
    page = render_report(Report("axes", metrics=steps, plots=charts, lead=(charts[-1],)))
    shown(tab, page, tmp_path / "page.html", width=width)
    touching = """
    [...document.querySelectorAll(".chart svg")].flatMap((svg) => {
      const isSeen = (text) => text.textContent && getComputedStyle(text).opacity !== "0";
      const words = [...svg.querySelectorAll("text")].filter(isSeen);
      const boxes = words.map((text) => [text.textContent, text.getBoundingClientRect()]);
      const meet = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
      const touched = (a, i) => boxes.slice(i + 1).filter(([, b]) => meet(a, b)).map(([other]) => other);
      return boxes.flatMap(([one, a], i) => touched(a, i).map((other) => `${one} | ${other}`));
    })
    """
    assert tab.value(touching) == []
    assert tab.value("document.querySelectorAll('.chart svg').length") == 2 + len(charts)


def test_the_page_of_heads_begins_with_its_findings(tab: Page, tmp_path: Path) -> None:
    shown(tab, heads(tmp_path), tmp_path / "page.html", width=1400)
    first = tab.value("document.querySelector('main li').textContent")
    assert first.startswith("W_Q and W_K overlap: ")
    assert place(tab, "main ul")["bottom"] < place(tab, "#maps")["top"] < 800


def test_two_checkpoints_are_side_by_side(tab: Page, tmp_path: Path) -> None:
    found = [inspect(gpt2(tmp_path / "one")), inspect(llama(tmp_path / "other"))]
    shown(tab, heads_page(found, "triptych inspect one other"), tmp_path / "page.html", width=1400)
    boxes = "[...document.querySelectorAll({})].map((box) => box.getBoundingClientRect().toJSON())"
    for selector in (".found section", "#maps .map"):
        one, other = tab.value(boxes.format(repr(selector)))
        assert one["right"] <= other["left"]
        assert one["top"] == other["top"] < 800
    cells = "[...row.cells].map((cell) => cell.textContent)"
    together, means = tab.value(f"[...document.querySelectorAll('thead tr')].map((row) => {cells})")[-2:]
    assert together[:3] == ["figure", "one", "other"]
    assert means[:3] == ["mean over the heads", "one", "other"]
    assert tab.complaints == []


def test_the_page_over_a_text_names_heads_on_a_map_of_layers(tab: Page, tmp_path: Path) -> None:
    shown(tab, over(), tmp_path / "page.html", width=1400)
    found = attend_over(language_reader(), OVER, context=16)
    calls = [layer.called(head) for layer in found.layers for head in range(layer.num_heads)]
    answer = tab.value("document.querySelector('.summary').textContent")
    assert answer.startswith(
        f"{len(calls) - calls.count('')} of {len(calls)} heads give a third of the weight"
    )
    labels = tab.value("[...document.querySelectorAll('#maps [data-at]')].map((cell) => cell.ariaLabel)")
    assert labels == [
        f"decoder {i // 4}, head {i % 4}: {called or 'no name'}" for i, called in enumerate(calls)
    ]
    assert place(tab, "#maps")["bottom"] < 800
    # Other figures are on the same map; a head that is chosen has all of them with intervals.
    tab.value("const one = document.getElementById('measure'); one.value = 'previous'; "
              "one.dispatchEvent(new Event('change'))")  # fmt: skip
    previous = found.layers[1].figures["previous"]
    labels = tab.value("[...document.querySelectorAll('#maps [data-at]')].map((cell) => cell.ariaLabel)")
    assert labels[6] == f"decoder 1, head 2: {float(previous.value[2]):.3f}"
    tab.point_at("[data-at='0 1 2']", click=True)
    row = "[...document.querySelectorAll('#detail tbody tr')][0].textContent"
    low, high = (float(end[2]) for end in (previous.low, previous.high))  # type: ignore[index]
    assert tab.value(row).startswith(f"previous token{float(previous.value[2]):.3f}[{low:.3f}, {high:.3f}]")
    assert tab.complaints == []


def colour(tab: Page, selector: str, name: str = "color") -> list[int]:
    """Red, green and blue of what is in effect."""
    found = f"getComputedStyle(document.querySelector({selector!r})).{name}"
    return [int(part) for part in tab.value(f"{found}.match(/\\d+/g)")[:3]]


@pytest.mark.parametrize("kind", ["report", "over", "attention", "heads", "difference"])
def test_a_page_fits_a_telephone_is_dark_where_the_system_is_and_asks_for_nothing(
    kind: str, tab: Page, tmp_path: Path
) -> None:
    if kind == "report":
        pytest.importorskip("vl_convert")
    make = {
        "report": lambda: render_report(FULL),
        "over": over,
        "attention": lambda: attention_html(LONG_NAMES),
        "heads": lambda: heads(tmp_path),
        "difference": lambda: difference(tmp_path),
    }
    tab.complaints.clear()
    tab.requests.clear()
    shown(tab, make[kind](), tmp_path / "page.html")
    assert tab.value("document.documentElement.scrollWidth") <= 400
    assert max(colour(tab, "body", "backgroundColor")) < 64
    for selector in ("h1", "p", "dt"):
        assert min(colour(tab, selector)) > 128, selector
    tab.point_at("#theme", click=True)
    assert min(colour(tab, "body", "backgroundColor")) > 192
    assert max(colour(tab, "h1")) < 64
    assert tab.value("[...document.querySelectorAll('thead th')].every((head) => head.scope === 'col')")
    assert tab.complaints == []
    assert {url.split(":")[0] for url in tab.requests} <= {"file", "data"}


def test_charts_are_named_and_take_the_colours_of_the_page(tab: Page, tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    shown(tab, render_report(replace(FULL, viewer=None)), tmp_path / "page.html")
    names = (
        "[...document.querySelectorAll('.chart [role=\"graphics-document\"]')].map((one) => one.ariaLabel)"
    )
    assert tab.value(names) == [
        *("Loss by step", "BLEU by step", "Learning rate by step", "FLOPs"),
        *("Loss", "Loss and cost", "Differences"),
    ]
    fills = "[...document.querySelectorAll('.chart text')].map((text) => getComputedStyle(text).fill)"
    assert set(tab.value(fills)) <= {"rgb(232, 230, 225)", "rgb(160, 168, 176)", "rgb(63, 207, 159)"}
    # "shared" has one colour in all three charts of variants.
    marks = "[...document.querySelectorAll('.chart .mark-symbol.role-mark path')]"
    assert tab.value(f"new Set({marks}.slice(-2).map((mark) => getComputedStyle(mark).fill)).size") == 1


def test_commands_in_sentences_are_code_and_nothing_else_is_markup() -> None:
    page = render_heads("t", [], [("Findings", "", ("`triptych rewrite --exact` of `<b>` & more",))])
    assert "<li><code>triptych rewrite --exact</code> of <code>&lt;b&gt;</code> &amp; more</li>" in page


COLUMN = (
    "[...document.querySelector('.table:not(.samples) tbody').rows].map((row) => row.cells[{}].textContent)"
)


def test_a_table_sorts_by_numbers_and_names_and_goes_back(tab: Page, tmp_path: Path) -> None:
    shown(tab, render_report(Report("a table", tables=(TABLE,))), tmp_path / "page.html")
    heads = ".table th:nth-child({}) button"
    as_it_was = tab.value(COLUMN.format(1))
    orders = {
        1: (["3.2", "3.10", "a", "b"], ["b", "a", "3.10", "3.2"]),
        2: (["2.15G", "1.05M", "786K", "512"], ["512", "786K", "1.05M", "2.15G"]),
        3: (["0.2 s", "1.30 ms", "41.2 µs", ""], ["41.2 µs", "1.30 ms", "0.2 s", ""]),
    }
    for column, expected in orders.items():
        for order in expected:
            tab.point_at(heads.format(column), click=True)
            assert tab.value(COLUMN.format(column - 1)) == order
        tab.point_at(heads.format(column), click=True)
        assert tab.value(COLUMN.format(1)) == as_it_was
    assert tab.value("document.querySelectorAll('[aria-sort]').length") == 0
    shares = (
        "[...document.querySelectorAll('td:nth-child(2)')].map((td) => td.style.getPropertyValue('--share'))"
    )
    assert sorted(map(float, tab.value(shares)))[::3] == [0.0, 1.0]
