"""Reports as one HTML file each that needs no network: style, Vega and all data are inside it.

The layout is in `layout.html`, `report.html` and `heads.html`.
"""

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from triptych.extras import require_extra
from triptych.files import write_text
from triptych.printable import printable
from triptych.reports.charts import (
    bar_chart,
    bleu_chart,
    learning_rate_chart,
    loss_chart,
    plot,
)
from triptych.reports.records import Plot, Report

# In the head of every page, so that one is known again.
GENERATOR = '<meta name="generator" content="triptych">'

_HERE = Path(__file__).parent
_PICTURE_WIDTH = 640  # pixels


def is_page(path: Path) -> bool:
    """Whether a file is a page that triptych made."""
    with path.open("rb") as file:
        return GENERATOR.encode() in file.read(1024)


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

    spec = plot(chart)
    if spec is None:
        return False
    titled = {**spec, "width": _PICTURE_WIDTH, "background": "white", "title": chart.title}
    write_text(path, vl_convert.vegalite_to_svg(titled))
    return True


def render_report(report: Report) -> str:
    """The text of the page that `write_report` writes."""
    loss = loss_chart(report.metrics)
    others = [spec for spec in (bleu_chart(report.metrics), learning_rate_chart(report.metrics)) if spec]
    bars = [(chart, spec) for chart in report.charts if (spec := bar_chart(chart))]
    plots = [(chart, spec) for chart in report.plots if (spec := plot(chart))]
    # The drawing library is most of the file and a second of work: a page without a chart goes without.
    drawn = loss or others or bars or plots
    if drawn:
        require_charts()
    script = Markup(_drawing_script()) if drawn else ""
    return render(
        "report.html",
        title=report.title,
        report=report,
        loss=loss,
        others=others,
        bars=[*bars, *plots],
        script=script,
    )


def render(template: str, **context: Any) -> str:
    """The text of a page whose layout is a template of this room; what is put into it is escaped."""
    return _environment().get_template(template).render(**context, generator=Markup(GENERATOR))


@lru_cache(maxsize=1)
def _environment() -> Environment:
    found = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["embedded"] = _embedded
    found.globals["resource"] = lambda name: Markup((_HERE / name).read_text(encoding="utf-8"))
    return found


def _shown(value: Any) -> Any:
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

    bundle: str = vl_convert.javascript_bundle((_HERE / "page.js").read_text(encoding="utf-8"))
    # Equal in a string or a regular expression, and it cannot end the element.
    return bundle.replace("</script", "<\\/script")
