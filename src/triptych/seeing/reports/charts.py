"""Vega-Lite specifications of the charts of a report, as plain dictionaries."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from triptych.seeing.reports.records import (
    BarChart,
    CurveChart,
    Interval,
    IntervalChart,
    MetricPoint,
    Plot,
    ScatterChart,
)

Spec = dict[str, Any]

# Colours are variables of `page.css`, light or dark. A name keeps its colour on a page; grey is neutral.
_INK, _MUTED, _LINE, _TRAINING, _VALIDATION = (
    f"var(--{name})" for name in ("ink", "muted", "line", "s1", "s2")
)
_SERIES = [f"var(--s{number})" for number in range(1, 9)]
_LABELS = {"labelColor": _INK, "titleColor": _MUTED, "titleFontWeight": "normal"}
_LOOK: Spec = {
    "background": "transparent",
    "config": {
        "font": "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif",
        "view": {"stroke": None},
        "axis": {
            "gridColor": _LINE,
            "domainColor": _LINE,
            "tickColor": _LINE,
            "labelFontSize": 11,
            "titleFontSize": 12,
            "titlePadding": 8,
            # Labels that would touch a neighbour are left out.
            "labelOverlap": "greedy",
            "labelSeparation": 8,
            **_LABELS,
        },
        "legend": {"labelFontSize": 12, "symbolOpacity": 1, **_LABELS},
    },
}
_LEGEND: Spec = {
    "title": None,
    "orient": "top",
    "columns": 2,
}
# Shapes of the first names with a colour, of the next names with the same colours, …
_SHAPES = ("circle", "square", "diamond", "triangle-up", "cross")
# 2,500 in full, and 240,000,000,000 as 240G.
_SHORT = "abs(datum.value) < 1e5 ? format(datum.value, ',.6~g') : format(datum.value, '.4~s')"
# Number of labels along the bottom of a chart of any width.
_BY_WIDTH = {"expr": "max(2, floor(width / 90))"}
# Marks of more points only thicken the line.
_MAX_MARKED_POINTS = 40


def learning_charts(metrics: Sequence[MetricPoint]) -> list[Spec]:
    """Return charts of loss, BLEU and learning rate by step; missing metrics are omitted."""
    both = {"train_loss": "training", "valid_loss": "validation"}
    charts = (
        _line_chart(
            "Loss", metrics, both, "loss (nats per token)", height=260, is_log=True
        ),
        _line_chart("BLEU", metrics, {"bleu": "validation"}, "BLEU", height=150),
        _line_chart(
            "Learning rate",
            metrics,
            {"learning_rate": "training"},
            "learning rate",
            height=150,
        ),
    )
    return [chart for chart in charts if chart]


def plot(chart: Plot, names: Sequence[str]) -> Spec | None:
    """Return curves with bands, or points with intervals; None for an empty chart.

    Each name has the colour of its index in `names`, in all charts.
    """
    match chart:
        case CurveChart():
            return _curve_chart(chart, names)
        case ScatterChart():
            return _scatter(chart, names)
        case IntervalChart():
            return _intervals(chart, names)


def bar_chart(chart: BarChart) -> Spec | None:
    """Return horizontal bars labelled with their values; None for an empty chart."""
    if not chart.bars:
        return None
    rows = [
        {
            "name": bar.name,
            "value": float(bar.value),
            "label": bar.label,
            "series": bar.series,
        }
        for bar in chart.bars
    ]
    series = list(dict.fromkeys(bar.series for bar in chart.bars))
    together = len(series) > 1
    # The longest bar leaves space for its label.
    longest = max(bar.value for bar in chart.bars) or 1.0
    shared: Spec = {
        "x": _of(
            "value:Q", axis=None, scale={"domain": [0, longest * 1.25], "nice": False}
        ),
        "y": _of(
            "name:N",
            sort=None,
            title=None,
            axis={
                "domain": False,
                "ticks": False,
                "labelFontSize": 12,
                "labelLimit": 160,
                "labelPadding": 6,
            },
            scale={"paddingInner": 0.3},
        ),
        "tooltip": [
            _of("name:N", title="of"),
            *([_of("series:N", title="when")] if together else []),
            _of("label:N", title=chart.unit or "value"),
        ],
    }
    colour: Spec = {}
    if together:
        shared["yOffset"] = _of("series:N", sort=series)
        scale = {"domain": series, "range": _SERIES[: len(series)]}
        colour["color"] = _of(
            "series:N", scale=scale, legend={"title": None, "orient": "top"}
        )
    words = {"type": "text", "align": "left", "dx": 4, "fontSize": 11, "color": _MUTED}
    return _drawn(
        chart.title,
        rows,
        # Height in pixels: Vega-Lite warns about steps with a container width.
        len({bar.name for bar in chart.bars}) * (21 * len(series) if together else 22),
        layer=[
            {
                "mark": {"type": "bar", "color": _MUTED},
                "encoding": {**shared, **colour},
            },
            {"mark": words, "encoding": {**shared, "text": _of("label:N")}},
        ],
    )


def _drawn(title: str, rows: Sequence[Spec], height: int, **parts: Any) -> Spec:
    """Return a chart as wide as its container; screen readers read its title."""
    return {
        "description": title,
        "data": {"values": rows},
        "width": "container",
        "height": height,
        **parts,
        **_LOOK,
    }


def _of(field: str, **how: Any) -> Spec:
    """Return an encoding of a field given as `name:T`, with the first letter of its type."""
    name, _, letter = field.partition(":")
    types = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}
    return {"field": name, "type": types[letter], **how}


def _line_chart(
    title: str,
    metrics: Sequence[MetricPoint],
    fields: Mapping[str, str],
    y_title: str,
    height: int,
    *,
    is_log: bool = False,
) -> Spec | None:
    points = [
        (point.step, getattr(point, field), name)
        for field, name in fields.items()
        for point in metrics
    ]
    # A diverged run has NaN or infinite losses, which JSON cannot represent.
    rows: list[Spec] = [
        {"step": step, "value": float(value), "series": name}
        for step, value, name in points
        if value is not None and math.isfinite(value)
    ]
    if not rows:
        return None
    series = list(dict.fromkeys(row["series"] for row in rows))
    colours = {"training": _TRAINING, "validation": _VALIDATION}
    marked = {"size": 28} if len(rows) <= _MAX_MARKED_POINTS else False
    return _drawn(
        f"{title} by step",
        rows,
        height,
        mark={
            "type": "line",
            "strokeWidth": 2,
            "point": marked,
            "interpolate": "linear",
        },
        encoding={
            "x": _of(
                "step:Q",
                title="step",
                scale={"nice": False, "zero": False},
                axis={
                    "labelExpr": _SHORT,
                    "tickMinStep": 1,
                    "tickCount": _BY_WIDTH,
                    "grid": False,
                },
            ),
            "y": _of(
                "value:Q",
                title=y_title,
                axis={"tickCount": 5},
                scale=_scale(is_log, [row["value"] for row in rows]),
            ),
            "color": _of(
                "series:N",
                scale={"domain": series, "range": [colours[name] for name in series]},
                legend={"title": None, "orient": "top"} if len(series) > 1 else None,
            ),
            "tooltip": [
                _of("series:N", title="of"),
                _of("step:Q", format=","),
                _of("value:Q", title=y_title, format=".4~g"),
            ],
        },
    )


def _scale(is_log: bool, values: Sequence[float]) -> Spec:
    if is_log and min(values) > 0:
        return {"type": "log", "nice": False, "padding": 4}
    return {"zero": False}


def _curve_chart(chart: CurveChart, names: Sequence[str]) -> Spec | None:
    rows = [
        {"name": name, "x": point.x, **_height(point)}
        for name, points in chart.lines
        for point in points
        if math.isfinite(point.mean)
    ]
    if not rows:
        return None
    colour = _by_name(chart.names, names)
    axis = {"grid": False, "tickCount": _BY_WIDTH, "labelExpr": _SHORT}
    x = _of("x:Q", title=chart.x_title, scale={"nice": False, "zero": False}, axis=axis)
    scale = _scale(chart.is_log, [row["low"] for row in rows])
    y = {"title": chart.y_title, "scale": scale, "axis": {"tickCount": 6}}
    # The band is drawn below the line.
    band = {"y": _of("low:Q", **y), "y2": {"field": "high"}}
    line = {"y": _of("mean:Q", **y), "tooltip": _told(chart.x_title, chart.y_title)}
    return _drawn(
        chart.title,
        rows,
        260,
        encoding={"x": x, "color": colour},
        layer=[
            {"mark": {"type": "area", "opacity": 0.18}, "encoding": band},
            {
                "mark": {"type": "line", "strokeWidth": 2, "point": {"size": 24}},
                "encoding": line,
            },
        ],
    )


def _scatter(chart: ScatterChart, names: Sequence[str]) -> Spec | None:
    rows = [
        {"name": dot.name, "x": dot.x, **_height(dot)}
        for dot in chart.dots
        if math.isfinite(dot.mean) and math.isfinite(dot.x)
    ]
    if not rows:
        return None
    axis = {"tickCount": _BY_WIDTH, "labelExpr": _SHORT}
    x = _of("x:Q", title=chart.x_title, scale={"zero": False, "padding": 30}, axis=axis)
    y = {"title": chart.y_title, "scale": {"zero": False, "padding": 10}}
    dot = {"y": _of("mean:Q", **y), "tooltip": _told(chart.x_title, chart.y_title)}
    # A legend instead of names at the dots, which would cover each other.
    domain = list(dict.fromkeys(chart.names))
    shapes = [
        _SHAPES[names.index(name) // len(_SERIES) % len(_SHAPES)] for name in domain
    ]
    legend = _LEGEND if len(domain) > 1 else None
    shape = _of("name:N", scale={"domain": domain, "range": shapes}, legend=legend)
    return _drawn(
        chart.title,
        rows,
        240,
        encoding={"x": x, "color": _by_name(chart.names, names)},
        layer=[
            {
                "mark": "rule",
                "encoding": {"y": _of("low:Q", **y), "y2": {"field": "high"}},
            },
            {
                "mark": {"type": "point", "filled": True, "opacity": 1, "size": 60},
                "encoding": {**dot, "shape": shape},
            },
        ],
    )


def _intervals(chart: IntervalChart, names: Sequence[str]) -> Spec | None:
    rows = [
        {"name": one.name, **_height(one)}
        for one in chart.intervals
        if math.isfinite(one.mean)
    ]
    if not rows:
        return None
    # The rule at 0 spans the height of all rows.
    height = 24 * len(rows)
    colour = _by_name(chart.names, names, legend=False)
    told = [_of("name:N", title="of"), *_tooltips(chart.x_title, "+.4~g")]
    return _drawn(
        chart.title,
        rows,
        height,
        encoding={"y": _of("name:N", title=None, sort=[row["name"] for row in rows])},
        layer=[
            {
                "mark": {"type": "rule", "color": _MUTED},
                "encoding": {
                    "x": {"datum": 0},
                    "y": {"value": 0},
                    "y2": {"value": height},
                },
            },
            {
                "mark": {"type": "rule", "strokeWidth": 2},
                "encoding": {
                    "color": colour,
                    "x": _of(
                        "low:Q",
                        title=chart.x_title,
                        axis={"format": ".3~g", "tickCount": _BY_WIDTH},
                    ),
                    "x2": {"field": "high"},
                },
            },
            {
                "mark": {"type": "circle", "size": 60, "opacity": 1},
                "encoding": {
                    "color": colour,
                    "x": _of("mean:Q", title=chart.x_title),
                    "tooltip": told,
                },
            },
        ],
    )


def _height(point: Interval) -> Spec:
    """Return mean and interval of a point; missing ends become the mean, as JSON cannot represent NaN."""
    return {
        "mean": point.mean,
        "low": point.low if math.isfinite(point.low) else point.mean,
        "high": point.high if math.isfinite(point.high) else point.mean,
    }


def _by_name(
    shown: Sequence[str], names: Sequence[str], *, legend: bool = True
) -> Spec:
    """Return the colours of a chart's names; `names` are all names of the page."""
    domain = list(dict.fromkeys(shown))
    colours = [_SERIES[names.index(name) % len(_SERIES)] for name in domain]
    key = _LEGEND if legend and len(domain) > 1 else None
    return _of("name:N", scale={"domain": domain, "range": colours}, legend=key)


def _told(x_title: str, y_title: str) -> list[Spec]:
    return [
        _of("name:N", title="of"),
        _of("x:Q", title=x_title, format=".4~g"),
        *_tooltips(y_title, ".5~g"),
    ]


def _tooltips(title: str, digits: str) -> list[Spec]:
    fields = {"mean:Q": title, "low:Q": "95 % from", "high:Q": "to"}
    return [_of(field, title=name, format=digits) for field, name in fields.items()]
