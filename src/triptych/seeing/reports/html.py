"""Reports as one HTML file each that needs no network: style, Vega and all data are inside it.

Every page has the layout of `layout.html`, the style of `page.css`, and the tables of `parts.html`.
"""

import json
import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from triptych.extras import require_extra
from triptych.files import write_text
from triptych.printable import printable
from triptych.seeing.reports.charts import Spec, bar_chart, learning_charts, plot
from triptych.seeing.reports.records import BarChart, Plot, Report, Table, TranslationSample

# A line in the head of every page by which one is recognised.
GENERATOR = '<meta name="generator" content="triptych">'

_HERE = Path(__file__).parent
_PICTURE_WIDTH = 640  # pixels


def is_page(path: Path) -> bool:
    """Whether a file is a page that triptych made."""
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(1024)


def short_name(name: str) -> str:
    """A name to read: of a path its last part, of other names all."""
    try:
        return Path(name).resolve(strict=True).name or name
    except (OSError, ValueError):
        return name


def require_charts() -> None:
    """Check that pages with charts can be written."""
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
    titled = {**spec, "width": _PICTURE_WIDTH, "background": "white", "title": chart.title}
    # The colours of a page are variables of its style; a picture has the light ones, which are the first.
    light = dict(re.findall(r"(--[\w-]+): (#\w+)", _resource("page.css").partition("}")[0]))
    svg = re.sub(
        r"var\((--[\w-]+)\)", lambda found: light.get(found[1], found[0]), vl_convert.vegalite_to_svg(titled)
    )
    write_text(path, svg)
    return True


def render_report(report: Report) -> str:
    """The text of the page that `write_report` writes."""
    learning = learning_charts(report.metrics)
    names = list(dict.fromkeys(name for chart in report.plots for name in chart.names))
    charts: list[tuple[BarChart | Plot, Spec]] = [
        *((chart, spec) for chart in report.charts if (spec := bar_chart(chart))),
        *((chart, spec) for chart in report.plots if (spec := plot(chart, names))),
    ]
    # The drawing library is most of the file and a second of work: a page without a chart goes without.
    if drawn := bool(learning or charts):
        require_charts()
    return make_page(
        "report.html",
        title=report.title,
        report=report,
        learning=learning,
        charts=charts,
        samples=_samples(report.samples),
        script=Markup(_drawing_script()) if drawn else "",
    )


def _samples(samples: Sequence[TranslationSample]) -> Table:
    judged = [sample.is_exact for sample in samples if sample.is_exact is not None]
    marks = {None: "", True: "✓", False: "✗"}
    return Table(
        "Translations",
        ("source", "translation", "reference", "exact"),
        tuple((one.source, one.hypothesis, one.reference or "", marks[one.is_exact]) for one in samples),
        f"{sum(judged)} of {len(judged)} equal their reference to the letter." if judged else "",
    )


def make_page(template: str, **context: Any) -> str:
    """The text of a page whose layout is a template of this room; what is put into it is escaped."""
    return _environment().get_template(template).render(**context, generator=Markup(GENERATOR))


@lru_cache(maxsize=1)
def _environment() -> Environment:
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
    """A value of a page; text may be of files and folders."""
    return printable(value, lines=True) if isinstance(value, str) and not isinstance(value, Markup) else value


def _embedded(data: object) -> Markup:
    # Inside a script element only "<" can do harm ("</script>", "<!--"), and JSON may spell it otherwise.
    text = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(printable(text).replace("<", "\\u003c"))


@lru_cache(maxsize=1)
def _drawing_script() -> str:
    """Vega, Vega-Lite, vega-embed and our few lines that use them, as one ES module.

    The libraries come with vl-convert: nothing is fetched, now or when the page is opened.
    """
    import vl_convert

    bundle: str = vl_convert.javascript_bundle(_resource("charts.js"))
    # Equal in a string or a regular expression, and it cannot end the element.
    return bundle.replace("</script", "<\\/script")
