import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import altair as alt
import pytest
import vl_convert

from triptych.seeing.reports import (
    Bar,
    BarChart,
    CurveChart,
    Interval,
    MetricPoint,
    Report,
    Table,
    TranslationSample,
    write_report,
)
from triptych.seeing.reports.charts import bar_chart
from triptych.seeing.reports.html import render_report

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


VIEWER = {
    "maps": [{"form": "dense", "kept": 1, "data": ""}],
    "texts": [{"title": "die Bank", "notes": [], "kinds": []}],
}
SINGLE = BarChart("Parameters", (Bar("zebra", 3, "three"), Bar("apple", 0, "none")), caption="of a layer")
PAIRED = BarChart(
    "FLOPs",
    (
        Bar("zebra", 3.0, "3M", "prefill"),
        Bar("zebra", 9.0, "9M", "decode"),
        Bar("apple", 2.0, "2M", "prefill"),
        Bar("apple", 1.0, "1M", "decode"),
    ),
    unit="FLOPs",
)
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
    has_one_answer=True,
    viewer=VIEWER,
    tables=(Table("Certificate", ("claim", "bound"), (("logits", "1e-4"),), numeric=(1,)),),
    commands=("triptych translate run",),
)


def test_the_file_holds_everything_it_was_given(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(replace(FULL, charts=(SINGLE,)), path)
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
    for text in ("Certificate", "logits", "triptych translate run", "✓", "✗", "of a layer"):
        assert text in page.text
    assert '<td class="number">1e-4</td>' in path.read_text(encoding="utf-8")
    assert VIEWER in page.specs


def test_the_page_loads_nothing_from_elsewhere() -> None:
    text = render_report(FULL)
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("img", "iframe", "base", "object", "embed")
        assert not {"src", "srcset", "style"} & set(attributes)
        assert attributes.get("href") in (None, "data:,")
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]
    viewer, module = [script for kind, script in page.scripts if kind == "module"]
    assert "fetch(" not in viewer
    assert not re.search(r"""(?:^|[;}\s])import\s*(?:[\w{*][^;]*from\s*)?["']""", module[:2000])


def test_vega_is_on_the_page_once_however_many_charts() -> None:
    one, four = (Report("r", charts=(SINGLE,) * count) for count in (1, 4))
    pages = [render_report(report) for report in (one, four)]
    assert [len(Page(page).specs) for page in pages] == [1, 4]
    assert [sum(kind == "module" for kind, _ in Page(page).scripts) for page in pages] == [2, 2]
    assert len(pages[1]) - len(pages[0]) < 20_000


def test_charts_are_valid_and_drawable() -> None:
    specs = Page(render_report(replace(FULL, viewer=None, charts=(SINGLE,)))).specs
    assert len(specs) == 3 + 1
    for spec in specs:
        alt.Chart.from_dict(spec)
        spec = {**spec, "width": 300} if spec["width"] == "container" else spec
        assert vl_convert.vegalite_to_svg(spec)


def test_data_cannot_break_out_of_its_place() -> None:
    report = Report(
        title=ATTACK,
        summary=ATTACK,
        facts=((ATTACK, ATTACK),),
        charts=(BarChart(ATTACK, (Bar(ATTACK, 1.0, ATTACK),), ATTACK, ATTACK),),
        samples=(TranslationSample(ATTACK, ATTACK, ATTACK),),
        viewer={"texts": [{"title": "<!--<script>" + ATTACK}]},
        tables=(Table(ATTACK, (ATTACK,), ((ATTACK,),), ATTACK),),
        commands=(ATTACK,),
    )
    page = Page(render_report(report))
    assert sorted(str(kind) for kind, _ in page.scripts) == [
        "None",
        *["application/json"] * 2,
        *["module"] * 2,
    ]
    assert page.text.count(ATTACK) == 15
    assert report.viewer in page.specs
    assert all(ATTACK in json.dumps(spec) for spec in page.specs)


def drawn(chart: BarChart) -> str:
    spec = bar_chart(chart)
    assert spec
    alt.LayerChart.from_dict(spec)
    svg: str = vl_convert.vegalite_to_svg({**spec, "width": 400})
    return svg


def test_bars_keep_their_order_and_say_their_length() -> None:
    assert re.findall(r">(zebra|apple|three|none)</text>", drawn(SINGLE)) == [
        "zebra",
        "apple",
        "three",
        "none",
    ]


def test_bars_of_two_series_stand_together_with_a_legend() -> None:
    svg = drawn(PAIRED)
    assert re.findall(r">(zebra|apple)</text>", svg) == ["zebra", "apple"]
    assert {"prefill", "decode", "3M", "9M", "2M", "1M"} <= set(re.findall(r">([^<>]+)</text>", svg))


def test_the_answer_comes_first_with_its_table_and_its_chart() -> None:
    curve = CurveChart("Curves", "step", "loss", (("one", (Interval(2.0, 1.0, 3.0, x=1.0),)),))
    page = render_report(
        Report(
            "r",
            summary="The answer.",
            lead=(Table("Means", ("variant", "mean"), (("one", "2.0"),)), curve),
            findings=("One of `two` sentences.",),
            facts=(("seeds", "3"),),
            charts=(SINGLE,),
            tables=(Table("Others", ("a",), (("b",),)),),
        )
    )
    places = [
        page.index(text)
        for text in (
            "The answer.",
            ">Means<",
            ">Curves<",
            "<code>two</code>",
            "seeds",
            ">Parameters<",
            ">Others<",
        )
    ]
    assert places == sorted(places)
    assert [spec["description"] for spec in Page(page).specs] == ["Curves", "Parameters"]


def test_columns_without_a_value_are_left_out() -> None:
    table = Table(
        "t", ("a", "b", "c", ""), (("1", "", "3", ""), ("", "", "4", "")), numeric=(2,), shaded=(1, 2)
    )
    shown = table.without_empty_columns()
    assert (shown.columns, shown.rows, shown.numeric, shown.shaded) == (
        ("a", "c"),
        (("1", "3"), ("", "4")),
        (1,),
        (1,),
    )
    assert '<th scope="col">b</th>' not in render_report(Report("r", tables=(table,)))
    assert Table("t", ("a", "b"), ()).without_empty_columns().columns == ("a", "b")


def test_free_translations_are_next_to_their_reference_and_are_not_judged_by_the_letter() -> None:
    page = Page(render_report(replace(FULL, has_one_answer=False)))
    assert "too" in page.text
    assert "two" in page.text
    for text in ("exact", "✓", "✗", "to the letter"):
        assert text not in page.text.replace("exact match", ""), text


def test_no_bars_make_no_chart() -> None:
    assert bar_chart(BarChart("none", ())) is None
    assert "<h2>" not in render_report(Report("r", charts=(BarChart("none", ()),)))


def test_values_that_are_not_finite_are_left_out_of_the_curves() -> None:
    loss = Page(render_report(FULL)).specs[0]
    assert {row["step"] for row in rows(loss)} == {0, 100}


@pytest.mark.parametrize(("lowest", "scale"), [(0.5, "log"), (0.0, None)])
def test_losses_are_on_a_logarithmic_axis_unless_one_is_0(lowest: float, scale: str | None) -> None:
    metrics = (MetricPoint(0, train_loss=6.0), MetricPoint(1, train_loss=lowest))
    (loss,) = Page(render_report(Report("r", metrics=metrics))).specs
    assert loss["encoding"]["y"]["scale"].get("type") == scale


@pytest.mark.parametrize(
    ("report", "num_charts"),
    [
        (Report("empty"), 0),
        (Report("one point", metrics=(MetricPoint(1, train_loss=2.0),)), 1),
        (Report("steps without values", metrics=(MetricPoint(1), MetricPoint(2))), 0),
        (Report("no samples", charts=(SINGLE,)), 1),
        (Report("no curves", samples=(TranslationSample("a", "b"),)), 0),
    ],
)
def test_a_report_may_lack_any_part(report: Report, num_charts: int) -> None:
    page = Page(render_report(report))
    assert len(page.specs) == num_charts
    assert report.title in page.text
    assert sum(kind == "module" for kind, _ in page.scripts) == 1 + bool(num_charts)


def test_writing_again_gives_the_same_bytes(tmp_path: Path) -> None:
    write_report(FULL, tmp_path / "a.html")
    write_report(FULL, tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"a.html", "b.html"}


def test_the_page_gives_no_head_to_a_table_without_names_of_columns() -> None:
    page = render_report(Report("r", tables=(Table("t", ("", ""), (("a", "b"),)),)))
    assert "<table><tbody><tr><td>a</td><td>b</td></tr></tbody></table>" in page
