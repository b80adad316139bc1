import io
import json
import re
from pathlib import Path

import altair as alt
import pytest
import vl_convert
from rich.console import Console

from triptych.reports import Bar, BarChart, Report, Table, render_table, write_report
from triptych.reports.charts import bar_chart
from triptych.reports.html import render_report

ATTACK = "<script>alert(1)</script>"

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
TABLE = Table("Cost", ("", "number of\nthings"), (("a name", "1.05M"), ("b", "786K")), numeric=(1,))


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


def test_no_bars_make_no_chart() -> None:
    assert bar_chart(BarChart("none", ())) is None
    assert "<h2>" not in render_report(Report("r", charts=(BarChart("none", ()),)))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_a_bar_that_cannot_be_drawn_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="'P': the bar of x is"):
        BarChart("P", (Bar("x", value, "?"),))


def test_the_page_holds_everything_and_loads_nothing(tmp_path: Path) -> None:
    report = Report(
        "side by side", "At one size.", (("heads", "8"),), (SINGLE, PAIRED), (TABLE,), ("triptych cost",)
    )
    write_report(report, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    for part in ("<h1>side by side</h1>", "At one size.", "<dd>8</dd>", "of a layer", "triptych cost"):
        assert part in text
    assert '<td>a name</td><td class="number">1.05M</td>' in text
    assert text.count('type="application/json"') == 2
    assert not re.search(
        r"""<(?:img|iframe)|\s(?:src|href)=["'](?!data:,")""", text.partition('<script type="module"')[0]
    )


def test_data_cannot_break_out_of_its_place() -> None:
    report = Report(
        ATTACK,
        ATTACK,
        ((ATTACK, ATTACK),),
        (BarChart(ATTACK, (Bar(ATTACK, 1.0, ATTACK),), ATTACK, ATTACK),),
        (Table(ATTACK, (ATTACK,), ((ATTACK,),), numeric=(0,)),),
        (ATTACK,),
    )
    page = render_report(report).partition('<script type="module"')[0]
    assert ATTACK not in page
    (spec,) = re.findall(r'<script type="application/json">(.*?)</script>', page)
    assert ATTACK in json.dumps(json.loads(spec))


def shown(table: Table, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    with console.capture() as capture:
        console.print(render_table(table))
    return [line.strip() for line in capture.get().splitlines() if line.strip()]


def test_a_table_sets_numbers_flush_right() -> None:
    lines = shown(TABLE, 60)
    assert lines[-2:] == ["a name      1.05M", "b            786K"]
    assert any("things" in line for line in lines)


def test_a_table_without_names_of_columns_has_no_head() -> None:
    assert shown(Table("t", ("", ""), (("a", "b"),)), 60) == ["a  b"]


def test_the_page_gives_no_head_to_a_table_without_names_of_columns() -> None:
    page = render_report(Report("r", tables=(Table("t", ("", ""), (("a", "b"),)),)))
    assert "<table><tbody><tr><td>a</td><td>b</td></tr></tbody></table>" in page


def test_a_part_of_a_table_keeps_what_is_numeric() -> None:
    table = Table("t", ("a", "b", "c"), (("1", "2", "3"),), "said", numeric=(0, 2))
    assert table.part((2, 1)) == Table("t", ("c", "b"), (("3", "2"),), "said", numeric=(0,))
