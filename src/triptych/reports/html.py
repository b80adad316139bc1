"""Reports as one HTML file each that needs no network: style, Vega and all data are inside it."""

import json
from functools import lru_cache
from html import escape
from importlib.resources import files
from pathlib import Path

import altair as alt
import vl_convert

from triptych.files import write_text
from triptych.reports.charts import (
    Spec,
    bar_chart,
    bleu_chart,
    head_attention_chart,
    learning_rate_chart,
    loss_chart,
    mean_attention_chart,
)
from triptych.reports.records import (
    AttentionPicture,
    BarChart,
    ComparisonReport,
    MetricPoint,
    RunReport,
    Table,
    TranslationSample,
)

_MARKS = {
    None: '<td class="mark"></td>',
    True: '<td class="mark right" title="equals the reference">✓</td>',
    False: '<td class="mark wrong" title="differs from the reference">✗</td>',
}


# In the head of every page, so that one is known again.
GENERATOR = '<meta name="generator" content="triptych">'


def is_page(path: Path) -> bool:
    """Whether a file is a page that triptych made."""
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(1024)


def write_run_report(report: RunReport, path: Path) -> None:
    """Write the report as one self-contained HTML file of about 1 MB, most of it Vega.

    Args:
        report: what to show; empty parts are left out.
        path: the file to make or replace; its folder must exist.

    Raises:
        OSError: the file cannot be written; what `path` held stays.
    """
    write_text(path, render_run_report(report))


def render_run_report(report: RunReport) -> str:
    """The text of the page that `write_run_report` writes."""
    sections = [
        _heading(report.title, report.summary, report.facts),
        _metrics(report.metrics),
        _samples(report.samples),
        _pictures(report.pictures),
        *(_table(table) for table in report.tables),
        _commands(report.commands),
    ]
    return _page(report.title, sections)


def write_comparison_report(report: ComparisonReport, path: Path) -> None:
    """Write the report as one self-contained HTML file of about 1 MB, most of it Vega.

    Args:
        report: what to show; empty parts are left out.
        path: the file to make or replace; its folder must exist.

    Raises:
        OSError: the file cannot be written; what `path` held stays.
    """
    write_text(path, render_comparison_report(report))


def render_comparison_report(report: ComparisonReport) -> str:
    """The text of the page that `write_comparison_report` writes."""
    sections = [
        _heading(report.title, report.summary, report.facts),
        "".join(_bars(chart) for chart in report.charts),
        *(_table(table) for table in report.tables),
        _commands(report.commands),
    ]
    return _page(report.title, sections)


def _page(title: str, sections: list[str]) -> str:
    body = "\n".join(section for section in sections if section)
    # The drawing library is most of the file and a second of work: a page without a chart goes without.
    script = f'<script type="module">{_drawing_script()}</script>' if 'class="chart' in body else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
{GENERATOR}
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{_resource("page.css")}</style>
</head>
<body>
<main>
{body}
<footer>Made by triptych. This file is complete in itself and works offline.</footer>
</main>
{script}
</body>
</html>
"""


def _heading(title: str, summary: str, facts: tuple[tuple[str, str], ...]) -> str:
    paragraphs = [part for part in summary.split("\n\n") if part.strip()]
    text = "".join(f'<p class="summary">{escape(part)}</p>' for part in paragraphs)
    known = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in facts)
    return f"<h1>{escape(title)}</h1>{text}" + (f'<dl class="facts">{known}</dl>' if known else "")


def _bars(chart: BarChart) -> str:
    spec = bar_chart(chart)
    if spec is None:
        return ""
    caption = f'<p class="caption">{escape(chart.caption)}</p>' if chart.caption else ""
    return f'<h2>{escape(chart.title)}</h2>{caption}<div class="card">{_chart(spec, "wide")}</div>'


def _metrics(metrics: tuple[MetricPoint, ...]) -> str:
    loss = loss_chart(metrics)
    others = [spec for spec in (bleu_chart(metrics), learning_rate_chart(metrics)) if spec]
    cards = f'<div class="card">{_chart(loss, "wide")}</div>' if loss else ""
    if others:
        charts = "".join(f'<div class="card">{_chart(spec, "wide")}</div>' for spec in others)
        cards += f'<div class="pair">{charts}</div>'
    return f"<h2>Learning</h2>{cards}" if cards else ""


def _samples(samples: tuple[TranslationSample, ...]) -> str:
    if not samples:
        return ""
    verdicts = [sample.is_exact for sample in samples]
    judged = sum(verdict is not None for verdict in verdicts)
    note = ""
    if judged:
        note = f'<p class="note">{verdicts.count(True)} of {judged} equal their reference to the letter.</p>'
    rows = "".join(
        f'<tr><td>{escape(sample.source)}</td><td data-name="translation">{escape(sample.hypothesis)}</td>'
        f'<td data-name="reference">{escape(sample.reference or "")}</td>{_MARKS[sample.is_exact]}</tr>'
        for sample in samples
    )
    head = '<tr><th>source</th><th>translation</th><th>reference</th><th class="mark">exact</th></tr>'
    return f'<h2>Translations</h2>{note}<div class="table samples"><table>{head}{rows}</table></div>'


def _pictures(pictures: tuple[AttentionPicture, ...]) -> str:
    if not pictures:
        return ""
    note = (
        '<p class="note">A row for each token as it was written, a column for each token of the source; '
        "the darker, the more the row looked there. Point at a cell for its weight.</p>"
    )
    return f"<h2>Attention</h2>{note}" + "".join(_picture(picture) for picture in pictures)


def _picture(picture: AttentionPicture) -> str:
    caption = f'<p class="caption">{escape(picture.caption)}</p>' if picture.caption else ""
    title = f"<h3>{escape(picture.title)}</h3>{caption}"
    if 0 in picture.weights.shape:
        return f'<div class="card">{title}<p class="note">There is no token to show.</p></div>'
    mean = f"<h4>mean of {picture.num_heads} heads</h4>" if picture.num_heads > 1 else ""
    mean += f'<div class="scroll">{_chart(mean_attention_chart(picture))}</div>'
    heads = ""
    if picture.num_heads > 1:
        heads = "".join(
            f'<div class="scroll"><h4>head {head}</h4>{_chart(head_attention_chart(picture, head))}</div>'
            for head in range(picture.num_heads)
        )
        heads = f'<div class="heads">{heads}</div>'
    return f'<div class="card">{title}{mean}{heads}</div>'


def _table(table: Table) -> str:
    caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
    numeric = [' class="number"' if i in table.numeric else "" for i in range(len(table.columns))]

    def cells(tag: str, texts: tuple[str, ...]) -> str:
        return "".join(
            f"<{tag}{kind}>{escape(text)}</{tag}>" for kind, text in zip(numeric, texts, strict=True)
        )

    head = f"<tr>{cells('th', table.columns)}</tr>" if any(table.columns) else ""
    rows = "".join(f"<tr>{cells('td', row)}</tr>" for row in table.rows)
    body = f'<div class="table"><table>{head}{rows}</table></div>'
    return f"<h2>{escape(table.title)}</h2>{caption}{body}"


def _commands(commands: tuple[str, ...]) -> str:
    if not commands:
        return ""
    lines = "\n".join(f'<span class="prompt">$ </span>{escape(command)}' for command in commands)
    return f"<h2>Going on</h2><pre>{lines}</pre>"


def _chart(spec: Spec, kind: str = "") -> str:
    # Inside a script element only "<" can do harm ("</script>", "<!--"), and JSON may spell it otherwise.
    data = json.dumps(spec, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace(
        "<", "\\u003c"
    )
    classes = f"chart {kind}".strip()
    return f'<div class="{classes}"><script type="application/json">{data}</script></div>'


def _resource(name: str) -> str:
    return (files("triptych.reports") / name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _drawing_script() -> str:
    """Vega, Vega-Lite, vega-embed and our few lines that use them, as one ES module.

    The libraries come with vl-convert: nothing is fetched, now or when the page is opened.
    """
    # altair writes for one Vega-Lite version; the page must carry the same ("v6.4.1" → "6.4").
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    bundle: str = vl_convert.javascript_bundle(_resource("page.js"), vl_version=version)
    # Equal in a string or a regular expression, and it cannot end the element.
    return bundle.replace("</script", "<\\/script")
