"""Vega-Lite specifications of the charts of a report: plain dictionaries, ready to be embedded."""

import math
from collections.abc import Sequence
from typing import Any

from triptych.reports.records import (
    BarChart,
    CurveChart,
    CurvePoint,
    Dot,
    Interval,
    IntervalChart,
    MetricPoint,
    Plot,
    ScatterChart,
)

Spec = dict[str, Any]

_INK, _ACCENT, _PALE, _MUTED = "#1f3a5f", "#c8642d", "#9db4c8", "#5c6670"
_LABELS = {"labelColor": "#333b44", "titleColor": _MUTED, "titleFontWeight": "normal"}
_LOOK: Spec = {
    "background": "transparent",
    "config": {
        "font": "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif",
        "view": {"stroke": None},
        "axis": {
            "gridColor": "#e8e6e1",
            "domainColor": "#c9c5bc",
            "tickColor": "#c9c5bc",
            "labelFontSize": 11,
            "titleFontSize": 12,
            **_LABELS,
        },
        "legend": {"labelFontSize": 12, **_LABELS},
    },
}
# Past this many points a mark on each only thickens the line.
_MAX_MARKED_POINTS = 40


def loss_chart(metrics: Sequence[MetricPoint]) -> Spec | None:
    """Training and validation loss against the step; None when neither was measured."""
    rows = _rows(metrics, "train_loss", "training") + _rows(metrics, "valid_loss", "validation")
    return _line_chart(rows, "loss (nats per token)", height=260)


def bleu_chart(metrics: Sequence[MetricPoint]) -> Spec | None:
    """BLEU against the step; None when it was not measured."""
    return _line_chart(_rows(metrics, "bleu", "BLEU"), "BLEU", height=150)


def learning_rate_chart(metrics: Sequence[MetricPoint]) -> Spec | None:
    """Learning rate against the step; None when it was not recorded."""
    return _line_chart(_rows(metrics, "learning_rate", "learning rate"), "learning rate", height=150)


def plot(chart: Plot) -> Spec | None:
    """Curves with bands, or points with intervals; None if there is nothing to draw."""
    match chart:
        case CurveChart():
            return _curves(chart)
        case ScatterChart():
            return _scatter(chart)
        case IntervalChart():
            return _intervals(chart)


def bar_chart(chart: BarChart) -> Spec | None:
    """Bars from left to right with their lengths in words; None if there are none."""
    if not chart.bars:
        return None
    rows = [
        {"name": bar.name, "value": float(bar.value), "label": bar.label, "series": bar.series}
        for bar in chart.bars
    ]
    series = list(dict.fromkeys(bar.series for bar in chart.bars))
    together = len(series) > 1
    # The longest bar leaves room for its own words.
    longest = max(bar.value for bar in chart.bars) or 1.0
    shared: Spec = {
        "x": _of("value:Q", axis=None, scale={"domain": [0, longest * 1.25], "nice": False}),
        "y": _of(
            "name:N",
            sort=None,
            title=None,
            axis={"domain": False, "ticks": False, "labelFontSize": 12, "labelLimit": 160, "labelPadding": 6},
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
        scale = {"domain": series, "range": [_INK, _PALE, _ACCENT][: len(series)]}
        colour["color"] = _of("series:N", scale=scale, legend={"title": None, "orient": "top"})
    words = {"type": "text", "align": "left", "dx": 4, "fontSize": 11, "color": _MUTED}
    return {
        "data": {"values": rows},
        "width": "container",
        # As many pixels as steps would take: Vega-Lite warns of steps beside a width that is the container's.
        "height": len({bar.name for bar in chart.bars}) * (21 * len(series) if together else 22),
        "layer": [
            {"mark": {"type": "bar", "color": _INK}, "encoding": {**shared, **colour}},
            {"mark": words, "encoding": {**shared, "text": _of("label:N")}},
        ],
        **_LOOK,
    }


def _of(field: str, **how: Any) -> Spec:
    """An encoding of a field, written `name:T` with the first letter of its type."""
    name, _, letter = field.partition(":")
    types = {"Q": "quantitative", "N": "nominal", "O": "ordinal"}
    return {"field": name, "type": types[letter], **how}


def _rows(metrics: Sequence[MetricPoint], field: str, series: str) -> list[Spec]:
    points = ((point.step, getattr(point, field)) for point in metrics)
    # A diverged run has NaN or infinite losses, which JSON cannot say.
    return [
        {"step": step, "value": float(value), "series": series}
        for step, value in points
        if value is not None and math.isfinite(value)
    ]


def _line_chart(rows: list[Spec], title: str, height: int) -> Spec | None:
    if not rows:
        return None
    series = list(dict.fromkeys(row["series"] for row in rows))
    colours = {"training": _PALE, "validation": _ACCENT}
    points = {"size": 28} if len(rows) <= _MAX_MARKED_POINTS else False
    return {
        "data": {"values": rows},
        "width": "container",
        "height": height,
        "mark": {"type": "line", "strokeWidth": 2, "point": points, "interpolate": "linear"},
        "encoding": {
            "x": _of(
                "step:Q",
                title="step",
                scale={"nice": False, "zero": False},
                axis={"format": ",d", "tickMinStep": 1, "grid": False},
            ),
            "y": _of("value:Q", title=title, axis={"tickCount": 5}, scale={"zero": False}),
            "color": _of(
                "series:N",
                scale={"domain": series, "range": [colours.get(name, _INK) for name in series]},
                legend={"title": None, "orient": "top"} if len(series) > 1 else None,
            ),
            "tooltip": [
                _of("series:N", title="of"),
                _of("step:Q", format=","),
                _of("value:Q", title=title, format=".4~g"),
            ],
        },
        **_LOOK,
    }


# Told apart without colour vision (Okabe and Ito 2008); after these they repeat.
_MANY = ["#1f3a5f", "#c8642d", "#009e73", "#56b4e9", "#cc79a7", "#e69f00", "#000000", "#8c6bb1"]


# 2,500 is written out, and 240,000,000,000 is 240G.
_SHORT = "abs(datum.value) < 1e5 ? format(datum.value, ',.6~g') : format(datum.value, '.4~s')"


def _curves(chart: CurveChart) -> Spec | None:
    rows = [
        {"name": name, "x": point.x, **_height(point)}
        for name, points in chart.lines
        for point in points
        if math.isfinite(point.mean)
    ]
    if not rows:
        return None
    colour = _by_name([name for name, _ in chart.lines])
    axis = {"grid": False, "tickCount": 8, "labelExpr": _SHORT}
    x = _of("x:Q", title=chart.x_title, scale={"nice": False, "zero": False}, axis=axis)
    y = {"title": chart.y_title, "scale": {"zero": False}}
    band = {"y": _of("low:Q", **y), "y2": {"field": "high"}}
    line = {"y": _of("mean:Q", **y), "tooltip": _told(chart.x_title, chart.y_title)}
    return {
        "data": {"values": rows},
        "width": "container",
        "height": 260,
        "encoding": {"x": x, "color": colour},
        "layer": [
            {"mark": {"type": "area", "opacity": 0.18}, "encoding": band},
            {"mark": {"type": "line", "strokeWidth": 2, "point": {"size": 24}}, "encoding": line},
        ],
        **_LOOK,
    }


def _scatter(chart: ScatterChart) -> Spec | None:
    rows = [
        {"name": dot.name, "x": dot.x, **_height(dot)}
        for dot in chart.dots
        if math.isfinite(dot.mean) and math.isfinite(dot.x)
    ]
    if not rows:
        return None
    axis = {"tickCount": 8, "labelExpr": _SHORT}
    x = _of("x:Q", title=chart.x_title, scale={"zero": False, "padding": 30}, axis=axis)
    y = {"title": chart.y_title, "scale": {"zero": False, "padding": 10}}
    label = {"text": {"field": "name"}, "y": _of("mean:Q", **y)}
    dot = {"y": _of("mean:Q", **y), "tooltip": _told(chart.x_title, chart.y_title)}
    return {
        "data": {"values": rows},
        "width": "container",
        "height": 240,
        "encoding": {"x": x, "color": _by_name([dot.name for dot in chart.dots], legend=False)},
        "layer": [
            {"mark": "rule", "encoding": {"y": _of("low:Q", **y), "y2": {"field": "high"}}},
            {"mark": {"type": "circle", "size": 60}, "encoding": dot},
            {"mark": {"type": "text", "align": "left", "dx": 6, "dy": -6, "fontSize": 11}, "encoding": label},
        ],
        **_LOOK,
    }


def _intervals(chart: IntervalChart) -> Spec | None:
    rows = [{"name": one.name, **_height(one)} for one in chart.intervals if math.isfinite(one.mean)]
    if not rows:
        return None
    names, height = [row["name"] for row in rows], 24 * len(rows)
    told = [
        _of("name:N", title="of"),
        _of("mean:Q", title=chart.x_title, format="+.4~g"),
        _of("low:Q", title="95 % from", format="+.4~g"),
        _of("high:Q", title="to", format="+.4~g"),
    ]
    return {
        "data": {"values": rows},
        "width": "container",
        "height": height,
        "encoding": {"y": _of("name:N", title=None, sort=names)},
        "layer": [
            {
                "mark": {"type": "rule", "color": _PALE},
                "encoding": {"x": {"datum": 0}, "y": {"value": 0}, "y2": {"value": height}},
            },
            {
                "mark": {"type": "rule", "strokeWidth": 2, "color": _INK},
                "encoding": {
                    "x": _of("low:Q", title=chart.x_title, axis={"format": ".3~g"}),
                    "x2": {"field": "high"},
                },
            },
            {
                "mark": {"type": "circle", "size": 60, "color": _ACCENT, "opacity": 1},
                "encoding": {"x": _of("mean:Q", title=chart.x_title), "tooltip": told},
            },
        ],
        **_LOOK,
    }


def _height(point: CurvePoint | Dot | Interval) -> Spec:
    """Where there is no interval it is the mean alone: JSON has no NaN."""
    return {
        "mean": point.mean,
        "low": point.low if math.isfinite(point.low) else point.mean,
        "high": point.high if math.isfinite(point.high) else point.mean,
    }


def _by_name(names: Sequence[str], *, legend: bool = True) -> Spec:
    domain = list(dict.fromkeys(names))
    colours = [_MANY[i % len(_MANY)] for i in range(len(domain))]
    shown = {"title": None, "orient": "top", "columns": 4} if legend and len(domain) > 1 else None
    return _of("name:N", scale={"domain": domain, "range": colours}, legend=shown)


def _told(x_title: str, y_title: str) -> list[Spec]:
    return [
        _of("name:N", title="of"),
        _of("x:Q", title=x_title, format=".4~g"),
        _of("mean:Q", title=y_title, format=".5~g"),
        _of("low:Q", title="95 % from", format=".5~g"),
        _of("high:Q", title="to", format=".5~g"),
    ]
