"""Every head of a checkpoint on one page: a map of layers × heads for each measure, and each head's spectra.

The page needs no network and no drawing library: its script is in `heads.js`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.files import write_text
from triptych.reports.html import render


@dataclass(frozen=True)
class HeadMeasure:
    """A figure of every head: its name in `HeadLayer.figures`, how people call it, what it means."""

    name: str
    title: str
    meaning: str
    group: str
    of_basis: bool = False
    by_qk: bool = False


@dataclass(frozen=True)
class HeadLayer:
    """The heads of a layer.

    Attributes:
        name: for people.
        about: sizes and the like, in a line.
        num_heads: there are.
        heads: numbers of those shown.
        figures: by measure, a number of each, None where there is none; one may be infinite.
        spectra: by name, for each head singular values, descending; shown relative to the first.
        angles: by name, for each head angles in degrees, ascending.
        qk_of: what figures of W_QK are of; measures with `by_qk` have a scale for each.
    """

    name: str
    about: str
    num_heads: int
    heads: tuple[int, ...]
    figures: Mapping[str, Sequence[float | None]]
    spectra: Mapping[str, Sequence[Sequence[float]]]
    angles: Mapping[str, Sequence[Sequence[float]]]
    qk_of: str = "form"


@dataclass(frozen=True)
class HeadsReport:
    """What the page shows.

    Attributes:
        title: its heading.
        summary: of each model its name and sentences about it; the name may be empty.
        facts: name and value.
        measures: that may be chosen.
        models: name and layers of each checkpoint, side by side.
    """

    title: str
    summary: tuple[tuple[str, tuple[str, ...]], ...]
    facts: tuple[tuple[str, str], ...]
    measures: tuple[HeadMeasure, ...]
    models: tuple[tuple[str, tuple[HeadLayer, ...]], ...]


def write_heads_report(report: HeadsReport, path: Path) -> None:
    """Write the page; what `path` held stays if that fails.

    Raises:
        OSError: the file cannot be written.
    """
    write_text(path, render_heads_report(report))


def render_heads_report(report: HeadsReport) -> str:
    return render("heads.html", report=report, data=_record(report))


def _record(report: HeadsReport) -> dict[str, Any]:
    groups: dict[str, list[str]] = {}
    for measure in report.measures:
        groups.setdefault(measure.group, []).append(measure.name)
    return {
        "measures": [
            {"name": m.name, "title": m.title, "meaning": m.meaning, "of_basis": m.of_basis, "by_qk": m.by_qk}
            for m in report.measures
        ],
        "groups": list(groups.items()),
        "models": [{"name": name, "layers": list(map(_layer, layers))} for name, layers in report.models],
    }


def _layer(layer: HeadLayer) -> dict[str, Any]:
    # Thousands of the largest value and tenths of a degree: what an eye can tell apart in a picture.
    return {
        "name": layer.name,
        "about": layer.about,
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
    """Four digits; JSON has no number for what is infinite."""
    if value is None:
        return None
    return "Infinity" if math.isinf(value) else float(f"{value:.4g}")
