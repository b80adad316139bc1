"""Reports as self-contained HTML files, with style, Vega and all data.

Every page has the layout of `layout.html`, the style of `page.css`, and the tables of `parts.html`.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from triptych.extras import require_extra
from triptych.files import write_text
from triptych.printable import printable
from triptych.seeing.reports.charts import Spec, bar_chart, learning_charts, plot
from triptych.seeing.reports.records import (
    BarChart,
    Plot,
    Report,
    Table,
    TranslationSample,
)

# Identifying line in the head of every page.
GENERATOR = '<meta name="generator" content="triptych">'

_HERE = Path(__file__).parent
_PICTURE_WIDTH = 640  # pixels


def is_page(path: Path) -> bool:
    """Return True if a file is a page made by triptych."""
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(1024)


def short_name(name: str) -> str:
    """Return a readable name: the last part of a path, or the whole name otherwise.

    A folder of the Hub's cache, `models--owner--name/snapshots/revision`, has the name `owner/name`.
    """
    try:
        path = Path(name).resolve(strict=True)
    except (OSError, ValueError):
        return name
    kept = path.parents[1].name if len(path.parents) > 1 else ""
    if path.parent.name == "snapshots" and kept.startswith("models--"):
        return kept.removeprefix("models--").replace("--", "/", 1)
    return path.name or name


def require_charts() -> None:
    """Check that the library for charts is installed."""
    require_extra("reports", "vl_convert", what="a page with charts")


def write_report(report: Report, path: Path) -> None:
    """Write the report as one self-contained HTML file of about 1 MB, most of it Vega."""
    write_text(path, render_report(report))


def write_picture(chart: Plot, path: Path) -> bool:
    """Write one chart as an SVG file."""
    require_extra("reports", "vl_convert", what="a picture of a chart")
    import vl_convert

    spec = plot(chart, chart.names)
    if spec is None:
        return False
    titled = {
        **spec,
        "width": _PICTURE_WIDTH,
        "background": "white",
        "title": chart.title,
    }
    # The colours of a page are variables of its style. Light colours precede dark colours; a picture uses the
    # light colours.
    light = dict(
        re.findall(r"(--[\w-]+): (#\w+)", _resource("page.css").partition("}")[0])
    )
    svg = re.sub(
        r"var\((--[\w-]+)\)",
        lambda found: light.get(found[1], found[0]),
        vl_convert.vegalite_to_svg(titled),
    )
    write_text(path, svg)
    return True


def render_report(report: Report) -> str:
    """Return the HTML of the page written by `write_report`."""
    learning = learning_charts(report.metrics)
    leading = [one for one in report.lead if not isinstance(one, Table)]
    plots = (*leading, *report.plots)
    # A name has one colour in all charts of the page.
    names = list(dict.fromkeys(chain.from_iterable(one.names for one in plots)))
    lead: list[tuple[Table | Plot, Spec | None]] = [
        (one.without_empty_columns(), None)
        if isinstance(one, Table)
        else (one, plot(one, names))
        for one in report.lead
    ]
    lead = [(one, spec) for one, spec in lead if spec or isinstance(one, Table)]
    charts: list[tuple[BarChart | Plot, Spec]] = [
        *((chart, spec) for chart in report.charts if (spec := bar_chart(chart))),
        *((chart, spec) for chart in report.plots if (spec := plot(chart, names))),
    ]
    # The drawing library is most of the file and takes a second: pages without charts omit it.
    if drawn := bool(learning or charts or any(spec for _, spec in lead)):
        require_charts()
    return make_page(
        "report.html",
        title=report.title,
        report=report,
        lead=lead,
        learning=learning,
        charts=charts,
        tables=[table.without_empty_columns() for table in report.tables],
        samples=_samples(report.samples, is_judged=report.has_one_answer),
        script=Markup(_drawing_script()) if drawn else "",
    )


def _samples(samples: Sequence[TranslationSample], *, is_judged: bool) -> Table:
    """Return the table of samples; if `is_judged`, a column marks translations equal to their reference."""
    judged = [sample.is_exact for sample in samples if sample.is_exact is not None]
    marks = {None: "", True: "✓", False: "✗"}
    found = Table(
        "Translations",
        ("source", "translation", "reference", "exact"),
        tuple(
            (
                one.source,
                one.hypothesis,
                one.reference or "",
                marks[one.is_exact] if is_judged else "",
            )
            for one in samples
        ),
        f"{sum(judged)} of {len(judged)} equal their reference to the letter."
        if judged and is_judged
        else "",
    )
    return found.without_empty_columns()


def make_page(template: str, **context: Any) -> str:
    """Render a page from a template in this folder; inserted values are escaped."""
    return (
        _environment()
        .get_template(template)
        .render(**context, generator=Markup(GENERATOR))
    )


@lru_cache(maxsize=1)
def _environment() -> Environment:
    # Undefined names in templates are errors.
    found = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_safe,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["embedded"] = _embedded
    found.filters["coded"] = lambda text: Markup(
        re.sub("`([^`]+)`", r"<code>\1</code>", str(escape(_safe(text))))
    )
    found.globals["resource"] = lambda name: Markup(_resource(name))
    return found


def _resource(name: str) -> str:
    return (_HERE / name).read_text(encoding="utf-8")


def _safe(value: Any) -> Any:
    """Make a value of a page printable: text may contain names of files and folders."""
    return (
        printable(value, lines=True)
        if isinstance(value, str) and not isinstance(value, Markup)
        else value
    )


def _embedded(data: object) -> Markup:
    # In a script element only "<" is dangerous ("</script>", "<!--"), and JSON can escape it.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(printable(text).replace("<", "\\u003c"))


@lru_cache(maxsize=1)
def _drawing_script() -> str:
    """Return Vega, Vega-Lite, vega-embed and our own lines of code as one ES module.

    The libraries are part of vl-convert: the page does not need a network.
    """
    import vl_convert

    bundle: str = vl_convert.javascript_bundle(_resource("charts.js"))
    # Equivalent in a string or a regular expression, and it cannot end the element.
    return bundle.replace("</script", "<\\/script")
