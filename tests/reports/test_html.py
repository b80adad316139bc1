import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import altair as alt
import numpy as np
import pytest
import vl_convert

from triptych.reports import (
    AttentionPicture,
    MetricPoint,
    Report,
    Table,
    TranslationSample,
    write_report,
)
from triptych.reports.charts import head_attention_chart, mean_attention_chart
from triptych.reports.html import render_report

ATTACK = "<script>alert(1)</script>"


class Page(HTMLParser):
    """What a browser would see: the elements, their attributes, the text, and the content of scripts."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[tuple[str | None, str]] = []
        self.raw: str | None = None
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))
        self.raw = tag if tag in ("script", "style") else self.raw

    def handle_endtag(self, tag: str) -> None:
        self.raw = None if tag == self.raw else self.raw

    def handle_data(self, data: str) -> None:
        if self.raw == "script":
            kind, text = self.scripts[-1]
            self.scripts[-1] = (kind, text + data)
        elif self.raw is None:
            self.text += data

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [json.loads(text) for kind, text in self.scripts if kind == "application/json"]


def rows(spec: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = spec["data"]["values"]
    return found


def picture(source: tuple[str, ...] = ("die", "Bank", "die"), num_heads: int = 2) -> AttentionPicture:
    weights = np.full((num_heads, 2, len(source)), 1 / len(source), dtype=np.float32)
    return AttentionPicture("layer 1", source, ("zebra", "apple"), weights, "a caption")


METRICS = (
    MetricPoint(0, train_loss=6.0, learning_rate=0.0),
    MetricPoint(100, train_loss=2.0, valid_loss=2.5, bleu=30.0, learning_rate=1e-3),
    MetricPoint(200, train_loss=float("nan"), valid_loss=float("inf")),
)
FULL = Report(
    title="a run",
    summary="It learned.\n\nIt really did.",
    facts=(("exact match", "98.6 %"),),
    metrics=METRICS,
    samples=(TranslationSample("eins", "one", "one"), TranslationSample("zwei", "too", "two")),
    pictures=(picture(),),
    tables=(Table("Certificate", ("claim", "bound"), (("logits", "1e-4"),)),),
    commands=("triptych translate run",),
)


def test_the_file_holds_everything_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(FULL, path)
    page = Page(path.read_text(encoding="utf-8"))
    for text in (
        "It learned.",
        "It really did.",
        "exact match",
        "98.6 %",
        "eins",
        "zwei",
        "too",
        "two",
        "1 of 2",
    ):
        assert text in page.text
    for text in ("layer 1", "a caption", "Certificate", "logits", "1e-4", "triptych translate run", "✓", "✗"):
        assert text in page.text
    shown = json.dumps(page.specs)
    for token in ("die", "Bank", "zebra", "apple"):
        assert token in shown


def test_the_page_loads_nothing_from_elsewhere() -> None:
    text = render_report(FULL)
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "base", "object", "embed")
        assert not {"src", "href", "srcset", "style"} & set(attributes)
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    (module,) = [script for kind, script in page.scripts if kind == "module"]
    assert not re.search(r"""(?:^|[;}\s])import\s*(?:[\w{*][^;]*from\s*)?["']""", module[:2000])


def test_vega_is_on_the_page_once_however_many_charts() -> None:
    one, five = (Report("r", pictures=(picture(num_heads=heads),)) for heads in (1, 4))
    pages = [render_report(report) for report in (one, five)]
    assert [len(Page(page).specs) for page in pages] == [1, 5]
    assert [sum(kind == "module" for kind, _ in Page(page).scripts) for page in pages] == [1, 1]
    assert len(pages[1]) - len(pages[0]) < 20_000


def test_charts_are_valid_and_drawable() -> None:
    specs = Page(render_report(FULL)).specs
    assert len(specs) == 3 + 1 + 2
    for spec in specs:
        alt.Chart.from_dict(spec)
        spec = {**spec, "width": 300} if spec["width"] == "container" else spec
        assert vl_convert.vegalite_to_svg(spec)


def test_tokens_keep_their_order_and_repeated_ones_their_columns() -> None:
    for spec in (mean_attention_chart(picture()), head_attention_chart(picture(), 1)):
        svg = vl_convert.vegalite_to_svg(spec)
        labels = re.findall(r">(die|Bank|zebra|apple)</text>", svg)
        assert labels == ["die", "Bank", "die", "zebra", "apple"]
        assert len(rows(spec)) == 6


def test_weights_are_told_to_the_cell_and_scaled_from_0_to_1() -> None:
    weights = np.array([[[0.25, 0.75], [1.0, 0.0]]])
    spec = head_attention_chart(AttentionPicture("p", ("a", "b"), ("c", "d"), weights), 0)
    assert rows(spec) == [
        {"s": 0, "t": 0, "w": 0.25},
        {"s": 1, "t": 0, "w": 0.75},
        {"s": 0, "t": 1, "w": 1.0},
        {"s": 1, "t": 1, "w": 0.0},
    ]
    assert spec["encoding"]["color"]["scale"]["domain"] == [0, 1]


def test_data_cannot_break_out_of_its_place() -> None:
    weights = np.ones((2, 1, 1))
    report = Report(
        title=ATTACK,
        summary=ATTACK,
        facts=((ATTACK, ATTACK),),
        samples=(TranslationSample(ATTACK, ATTACK, ATTACK),),
        pictures=(AttentionPicture(ATTACK, (ATTACK,), ("<!--<script>",), weights, ATTACK),),
        tables=(Table(ATTACK, (ATTACK,), ((ATTACK,),), ATTACK),),
        commands=(ATTACK,),
    )
    page = Page(render_report(report))
    assert [kind for kind, _ in page.scripts] == ["application/json"] * 3 + ["module"]
    assert page.text.count(ATTACK) == 15
    assert ATTACK in page.specs[0]["encoding"]["x"]["axis"]["labelExpr"]
    assert "<!--<script>" in page.specs[0]["encoding"]["y"]["axis"]["labelExpr"]


def test_tokens_with_quotes_and_backslashes_are_drawn_as_they_are() -> None:
    tokens = ('"', "'", "\\n", "]", "\u2028")
    spec = mean_attention_chart(picture(tokens))
    svg = vl_convert.vegalite_to_svg(spec)
    assert re.search(r">(\"|&quot;)</text>", svg)
    assert r">\n</text>" in svg


def test_values_that_are_not_finite_are_left_out_of_the_curves() -> None:
    loss = Page(render_report(FULL)).specs[0]
    assert {row["step"] for row in rows(loss)} == {0, 100}


@pytest.mark.parametrize(
    ("report", "num_charts"),
    [
        (Report("empty"), 0),
        (Report("one point", metrics=(MetricPoint(1, train_loss=2.0),)), 1),
        (Report("steps without values", metrics=(MetricPoint(1), MetricPoint(2))), 0),
        (Report("no samples", pictures=(picture(num_heads=1),)), 1),
        (Report("no tokens", pictures=(AttentionPicture("p", (), (), np.zeros((2, 0, 0))),)), 0),
        (Report("no pictures", samples=(TranslationSample("a", "b"),)), 0),
    ],
)
def test_a_report_may_lack_any_part(report: Report, num_charts: int) -> None:
    page = Page(render_report(report))
    assert len(page.specs) == num_charts
    assert report.title in page.text
    assert any(kind == "module" for kind, _ in page.scripts) == bool(num_charts)


def test_writing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    write_report(FULL, tmp_path / "a.html")
    write_report(FULL, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.html", "b.html"}
