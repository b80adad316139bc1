"""An HTML page with every head of a checkpoint: a map of layers × heads for each measure, and spectra.

The page needs neither a network nor a drawing library. Its script is `reports/heads.js`.
"""

import math
from collections.abc import Sequence
from typing import Any

from triptych.inspection.checkpoint import Inspection
from triptych.inspection.layers import InspectedLayer
from triptych.inspection.measures import MEASURES, Measure
from triptych.inspection.pages import average_lines, summary
from triptych.reports import render


def heads_page(inspections: Sequence[Inspection], command: str) -> str:
    """Make the page of one checkpoint, or of several side by side."""
    names = [inspection.name for inspection in inspections]
    facts = [("command", command)]
    if len(inspections) == 1:
        layers = inspections[0].layers
        facts = [
            ("family", inspections[0].family),
            ("heads", f"{sum(len(layer.heads) for layer in layers):,}"),
            ("numbers of attention", f"{sum(layer.parameters for layer in layers):,}"),
            *facts,
        ]
    said = [
        (title, lines)
        for i in inspections
        for title, lines in ((i.name if len(names) > 1 else "", summary(i)), ("Averages", average_lines(i)))
    ]
    models = [(inspection.name, inspection.layers) for inspection in inspections]
    return render_heads(" and ".join(names), models, said, facts)


def render_heads(
    title: str,
    models: Sequence[tuple[str, Sequence[InspectedLayer]]],
    summary: Sequence[tuple[str, Sequence[str]]] = (),
    facts: Sequence[tuple[str, str]] = (),
    measures: Sequence[Measure] = MEASURES,
) -> str:
    """Render the HTML of a page."""
    groups: dict[str, list[str]] = {}
    for measure in measures:
        groups.setdefault(measure.group, []).append(measure.name)
    data = {
        "measures": [
            {"name": m.name, "title": m.title, "meaning": m.meaning, "of_basis": m.of_basis, "by_qk": m.by_qk}
            for m in measures
        ],
        "groups": list(groups.items()),
        "models": [{"name": name, "layers": [*map(_layer, layers)]} for name, layers in models],
    }
    return render("heads.html", title=title, summary=summary, facts=facts, data=data)


def _layer(layer: InspectedLayer) -> dict[str, Any]:
    pairs = ""
    if layer.rotary_pairs is not None:
        pairs = f", {layer.rotary_pairs[0]} rotary pairs that turn and {layer.rotary_pairs[1]} too slow to"
    # Thousands of the largest value and tenths of a degree: what an eye can tell apart in a picture.
    return {
        "name": layer.name,
        "about": f"{layer.module}: d_model {layer.d_model}, d_k {layer.d_k}, d_v {layer.d_v}, positions "
        f"{layer.positions}, {layer.num_heads} heads on {layer.num_key_heads} of keys{pairs}",
        "qk_of": layer.qk_of,
        "num_heads": layer.num_heads,
        "heads": layer.heads,
        "figures": {name: [*map(_plain, values)] for name, values in layer.figures.items()},
        "spectra": {
            name: [[round(1000 * value / (of[0] or 1)) for value in of] for of in heads]
            for name, heads in layer.spectra.items()
        },
        "angles": {
            name: [[round(10 * a) for a in of] for of in heads] for name, heads in layer.angles.items()
        },
    }


def _plain(value: float | None) -> float | str | None:
    """Round to four digits. Infinity becomes a string, as JSON has no number for it."""
    if value is None:
        return None
    return "Infinity" if math.isinf(value) else float(f"{value:.4g}")
