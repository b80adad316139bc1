"""Maps of layers × heads for a terminal, and the page of heads with its script `seeing/reports/heads.js`.

The maps of the page are in `seeing/reports/maps.html` and `maps.js`.
"""

import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

from triptych.seeing.inspection.layer_records import InspectedLayer
from triptych.seeing.inspection.measures import MEASURES, Measure
from triptych.seeing.reports.html import make_page
from triptych.seeing.reports.records import Table

_SHADES = " ░▒▓█"


def shaded_map(layers: Sequence[InspectedLayer], measure: str) -> list[str]:
    """Draw a map of layers × heads in shades of the finite values; a dot is a missing value."""
    if all(
        value is None
        for value in chain.from_iterable(layer.figures[measure] for layer in layers)
    ):
        return []
    # Figures of W_QK of different kinds are not comparable, so each kind has its scale.
    about = next(m for m in MEASURES if m.name == measure)
    kinds = [layer.qk_of if about.by_qk else "" for layer in layers]
    scales: dict[str, tuple[float, float]] = {}
    for kind in dict.fromkeys(kinds):
        of = [
            layer.figures[measure]
            for layer, own in zip(layers, kinds, strict=True)
            if own == kind
        ]
        finite = [
            value
            for value in chain.from_iterable(of)
            if value is not None and math.isfinite(value)
        ]
        scales[kind] = min(finite, default=0.0), max(finite, default=0.0)
    width = max(len(layer.name) for layer in layers)
    chosen = {layer.heads for layer in layers if len(layer.heads) < layer.num_heads}
    which = (
        f"; heads {', '.join(map(str, sorted({*chain.from_iterable(chosen)})))}"
        if chosen
        else ""
    )
    said = "; ".join(
        f"{_SHADES[0]!r} {low:.3g} to {_SHADES[-1]!r} {high:.3g}"
        + (f" ({kind})" if len(scales) > 1 else "")
        for kind, (low, high) in scales.items()
    )
    lines = [f"{about.title}: {said}{which}"]
    for layer, kind in zip(layers, kinds, strict=True):
        cells = "".join(
            _shade_character(value, *scales[kind]) * 2
            for value in layer.figures[measure]
        )
        lines.append(f"{layer.name:>{width}} │{cells}│")
    return lines


def _shade_character(value: float | None, low: float, high: float) -> str:
    if value is None:
        return "·"
    if math.isinf(value):
        return "∞"
    share = (value - low) / (high - low) if high > low else 0.5
    return _SHADES[min(len(_SHADES) - 1, int(share * len(_SHADES)))]


def render_heads(
    title: str,
    models: Sequence[tuple[str, Sequence[InspectedLayer]]],
    summary: Sequence[tuple[str, str, Sequence[str]]] = (),
    facts: Sequence[tuple[str, str]] = (),
    tables: Sequence[Table] = (),
    measures: Sequence[Measure] = MEASURES,
    *,
    more_tables: Sequence[Table] = (),
    notes: Sequence[tuple[str, Sequence[str]]] = (),
) -> str:
    """Render the HTML of a page.

    `summary` has a heading, a description and the findings of each checkpoint, in columns above the maps;
    `tables` are next to the maps, `more_tables` and `notes` (heading and sentences) below the chosen head.
    """
    groups: dict[str, list[str]] = {}
    for measure in measures:
        groups.setdefault(measure.group, []).append(measure.name)
    data = {
        "first": measures[0].name,
        "measures": [
            {
                "name": m.name,
                "title": m.title,
                "meaning": m.meaning,
                "of_basis": m.of_basis,
                "by_qk": m.by_qk,
            }
            for m in measures
        ],
        "groups": list(groups.items()),
        "models": [
            {"name": name, "layers": [*map(_layer_data, layers)]}
            for name, layers in models
        ],
    }
    return make_page(
        "heads.html",
        title=title,
        summary=summary,
        facts=facts,
        tables=tables,
        more_tables=more_tables,
        notes=notes,
        data=data,
    )


def _layer_data(layer: InspectedLayer) -> dict[str, Any]:
    pairs = ""
    if layer.rotary_pairs is not None:
        pairs = f", {layer.rotary_pairs[0]} rotary pairs that turn and {layer.rotary_pairs[1]} too slow to"
    # Thousandths of the largest value and tenths of a degree: the resolution visible in a picture.
    return {
        "name": layer.name,
        "about": f"{layer.module}: d_model {layer.d_model}, d_k {layer.d_k}, d_v {layer.d_v}, positions "
        f"{layer.positions}, {layer.num_heads} heads on {layer.num_key_heads} of keys{pairs}",
        "qk_of": layer.qk_of,
        "num_heads": layer.num_heads,
        "heads": layer.heads,
        "figures": {
            name: [*map(_json_number, values)] for name, values in layer.figures.items()
        },
        "spectra": {
            name: [[round(1000 * value / (of[0] or 1)) for value in of] for of in heads]
            for name, heads in layer.spectra.items()
        },
        "pictures": layer.pictures,
        "angles": {
            name: [[round(10 * a) for a in of] for of in heads]
            for name, heads in layer.angles.items()
        },
    }


def _json_number(value: float | None) -> float | str | None:
    """Round to four digits. Infinity becomes a string, which JSON can represent."""
    if value is None:
        return None
    return "Infinity" if math.isinf(value) else float(f"{value:.4g}")
