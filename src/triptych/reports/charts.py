"""Vega-Lite specifications of the charts of a report: plain dictionaries, ready to be embedded."""

import json
import math
from collections.abc import Sequence
from typing import Any

import altair as alt
import numpy as np
from numpy.typing import NDArray

from triptych.reports.records import AttentionPicture, BarChart, MetricPoint

Spec = dict[str, Any]

_INK = "#1f3a5f"
_ACCENT = "#c8642d"
_MUTED = "#5c6670"
_GRID = "#e8e6e1"
_FONT = "system-ui, -apple-system, 'Segoe UI', 'Helvetica Neue', Arial, sans-serif"

# From paper to ink: darker is more attention, and prints in black and white.
_ATTENTION_COLOURS = ["#f6f7f9", "#c9d8e6", "#7fa3c4", "#3f6c9a", "#1f3a5f", "#0f1f36"]

# Past this many points a mark on each only thickens the line.
_MAX_MARKED_POINTS = 40


def loss_chart(metrics: Sequence[MetricPoint]) -> Spec | None:
    """Training and validation loss against the step; None when neither was measured."""
    rows = _rows(metrics, "train_loss", "training") + _rows(metrics, "valid_loss", "validation")
    return _line_chart(rows, "loss (nats per token)", height=260) if rows else None


def bleu_chart(metrics: Sequence[MetricPoint]) -> Spec | None:
    """BLEU against the step; None when it was not measured."""
    rows = _rows(metrics, "bleu", "BLEU")
    return _line_chart(rows, "BLEU", height=150) if rows else None


def learning_rate_chart(metrics: Sequence[MetricPoint]) -> Spec | None:
    """Learning rate against the step; None when it was not recorded."""
    rows = _rows(metrics, "learning_rate", "learning rate")
    return _line_chart(rows, "learning rate", height=150) if rows else None


def mean_attention_chart(picture: AttentionPicture) -> Spec:
    """The mean over the heads, large, with a scale."""
    return _heat_map(picture, picture.mean_over_heads(), cell_pixels=34, is_large=True)


def head_attention_chart(picture: AttentionPicture, head: int) -> Spec:
    """One head, small: 0 ≤ head < num_heads."""
    return _heat_map(picture, picture.weights[head], cell_pixels=14, is_large=False)


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
    across = alt.X("value:Q", axis=None, scale=alt.Scale(domain=[0, longest * 1.25], nice=False))
    down = alt.Y(
        "name:N",
        sort=None,
        title=None,
        axis=alt.Axis(domain=False, ticks=False, labelFontSize=12, labelLimit=160, labelPadding=6),
        scale=alt.Scale(paddingInner=0.3),
    )
    base = alt.Chart(
        alt.InlineData(values=rows), width="container", height=alt.Step(15 if together else 22)
    ).encode(
        x=across,
        y=down,
        tooltip=[
            alt.Tooltip("name:N", title="of"),
            *([alt.Tooltip("series:N", title="when")] if together else []),
            alt.Tooltip("label:N", title=chart.unit or "value"),
        ],
    )
    bars = base.mark_bar(color=_INK)
    words = base.mark_text(align="left", dx=4, fontSize=11, color=_MUTED).encode(text="label:N")
    if together:
        colours = alt.Scale(domain=series, range=[_INK, "#9db4c8", _ACCENT][: len(series)])
        offset = alt.YOffset("series:N", sort=series)
        legend = alt.Legend(title=None, orient="top")
        bars = bars.encode(yOffset=offset, color=alt.Color("series:N", scale=colours, legend=legend))
        words = words.encode(yOffset=offset)
    return _finish(alt.layer(bars, words))


def _rows(metrics: Sequence[MetricPoint], field: str, series: str) -> list[dict[str, Any]]:
    points = ((point.step, getattr(point, field)) for point in metrics)
    # A diverged run has NaN or infinite losses, which JSON cannot say.
    return [
        {"step": step, "value": float(value), "series": series}
        for step, value in points
        if value is not None and math.isfinite(value)
    ]


def _line_chart(rows: list[dict[str, Any]], title: str, height: int) -> Spec:
    series = list(dict.fromkeys(row["series"] for row in rows))
    colours = {"training": "#9db4c8", "validation": _ACCENT}
    marked = len(rows) <= _MAX_MARKED_POINTS
    chart = (
        alt.Chart(alt.InlineData(values=rows), width="container", height=height)
        .mark_line(
            strokeWidth=2, point=alt.OverlayMarkDef(size=28) if marked else False, interpolate="linear"
        )
        .encode(
            x=alt.X(
                "step:Q",
                title="step",
                scale=alt.Scale(nice=False, zero=False),
                axis=alt.Axis(format=",d", tickMinStep=1, grid=False),
            ),
            y=alt.Y("value:Q", title=title, axis=alt.Axis(tickCount=5), scale=alt.Scale(zero=False)),
            color=alt.Color(
                "series:N",
                scale=alt.Scale(domain=series, range=[colours.get(name, _INK) for name in series]),
                legend=alt.Legend(title=None, orient="top") if len(series) > 1 else None,
            ),
            tooltip=[
                alt.Tooltip("series:N", title="of"),
                alt.Tooltip("step:Q", format=","),
                alt.Tooltip("value:Q", title=title, format=".4~g"),
            ],
        )
    )
    return _finish(chart)


def _heat_map(
    picture: AttentionPicture, weights: NDArray[np.floating], *, cell_pixels: int, is_large: bool
) -> Spec:
    """Draw weights `[tgt_len, src_len]`: a row for each target token, a column for each source token.

    The axes run over positions and only their labels show tokens; tokens as the axes' values would be
    sorted, and two equal ones would fall into one column.
    """
    source = _label_expression(picture.source_tokens)
    target = _label_expression(picture.target_tokens)
    rows = [
        {"s": s, "t": t, "w": round(min(float(weight), 1.0), 4)} for (t, s), weight in np.ndenumerate(weights)
    ]
    label_size = 13 if is_large else 9
    axis: dict[str, Any] = {
        "title": None,
        "labelFontSize": label_size,
        "labelLimit": 160 if is_large else 70,
        "labelOverlap": False,
        "domain": False,
        "ticks": False,
        "labelPadding": 5 if is_large else 3,
    }
    chart = (
        alt.Chart(alt.InlineData(values=rows), width=alt.Step(cell_pixels), height=alt.Step(cell_pixels))
        .transform_calculate(source=f"{source}[datum.s]", target=f"{target}[datum.t]")
        .mark_rect(stroke="#ffffff", strokeWidth=1 if is_large else 0.5)
        .encode(
            x=alt.X(
                "s:O",
                axis=alt.Axis(orient="top", labelAngle=-50, labelExpr=f"{source}[datum.value]", **axis),
            ),
            y=alt.Y("t:O", axis=alt.Axis(labelExpr=f"{target}[datum.value]", **axis)),
            color=alt.Color(
                "w:Q",
                scale=alt.Scale(domain=[0, 1], range=_ATTENTION_COLOURS, clamp=True),
                legend=alt.Legend(title="weight", gradientLength=120, tickCount=3) if is_large else None,
            ),
            tooltip=[
                alt.Tooltip("target:N", title="writing"),
                alt.Tooltip("source:N", title="looks at"),
                alt.Tooltip("w:Q", title="weight", format=".3f"),
            ],
        )
    )
    return _finish(chart)


def _label_expression(tokens: Sequence[str]) -> str:
    # A JSON list of strings is also a Vega expression, whatever the tokens hold.
    return json.dumps(list(tokens))


def _finish(chart: alt.Chart | alt.LayerChart | alt.FacetChart) -> Spec:
    spec: Spec = (
        # `configure` replaces what the other configure_… set: it comes first.
        chart.configure(font=_FONT)
        .configure_view(stroke=None)
        .configure_axis(
            gridColor=_GRID,
            domainColor="#c9c5bc",
            tickColor="#c9c5bc",
            labelColor="#333b44",
            titleColor=_MUTED,
            titleFontWeight="normal",
            labelFontSize=11,
            titleFontSize=12,
        )
        .configure_legend(labelColor="#333b44", titleColor=_MUTED, titleFontWeight="normal", labelFontSize=12)
        .properties(background="transparent")
        .to_dict()
    )
    return spec
