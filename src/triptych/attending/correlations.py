"""What heads do beside what their weights look like: which spectral figures go with which behaviour."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from triptych.algebra.significance import holm
from triptych.attending.behaviour import FIGURES, Behaviour
from triptych.inspection import MEASURES, Inspection
from triptych.reports import Table

_FEWEST_HEADS = 8
_RESAMPLES = 1000
_SURE = 0.05
_MOST_SHOWN = 16


@final
@dataclass(frozen=True)
class Correlation:
    """How a measure of the weights of heads goes with a figure of what they do.

    Attributes:
        measure: of the weights, a name of `MEASURES`.
        figure: of what heads do, a name of `FIGURES`.
        kind: the stack whose heads are compared: "encoder", "decoder" or "cross".
        value: Spearman's rank correlation over the heads.
        low: lower end of its 95 % bootstrap interval over heads; likewise `high`.
        within: the same, of ranks within each layer: what is left when layers may differ.
        p_value: of no correlation, two-sided.
        heads: how many there are.
        sure: whether it is significant after Holm's correction for all pairs that were looked at.
    """

    measure: str
    figure: str
    kind: str
    value: float
    low: float
    high: float
    within: float
    p_value: float
    heads: int
    sure: bool


@final
@dataclass(frozen=True)
class Beside:
    """An inspection and a behaviour, head by head.

    Attributes:
        rows: a flat record per head, with the figures of both.
        correlations: the strongest first.
    """

    rows: tuple[dict[str, Any], ...]
    correlations: tuple[Correlation, ...]


def correlations_table(beside: Beside) -> Table:
    """The strongest correlations that are significant."""
    titles = {measure.name: measure.title for measure in MEASURES} | {f.name: f.title for f in FIGURES}
    sure = [one for one in beside.correlations if one.sure]
    rows = tuple(
        (
            titles[one.measure],
            titles[one.figure],
            f"{one.kind}, {one.heads} heads",
            f"{one.value:+.2f}",
            f"{one.low:+.2f} to {one.high:+.2f}",
            f"{one.within:+.2f}",
        )
        for one in sure[:_MOST_SHOWN]
    )
    caption = (
        f"{len(sure):,} of {len(beside.correlations):,} rank correlations over heads are significant at 5 % "
        "after Holm's correction; the last column compares heads within their layers alone."
    )
    return Table(
        title="Weights beside behaviour",
        columns=("measure of weights", "what heads do", "heads", "correlation", "interval", "within layers"),
        rows=rows,
        numeric=(3, 5),
        caption=caption,
    )


def put_beside(inspection: Inspection, behaviour: Behaviour) -> Beside:
    """Join what heads do on a text with the measures of their weights, and correlate them."""
    does = {(row["stack"], row["layer"], row["head"]): row for row in behaviour.rows()}
    rows = []
    for row in inspection.rows():
        stack = "cross" if row["kind"] == "cross" else row["stack"]
        other = does.get((stack, row["layer"], row["head"]))
        if other is not None:
            more = {name: value for name, value in other.items() if name not in row}
            rows.append({**row, "stack": stack, **more})
    columns = dict.fromkeys(name for row in rows for name in row)
    whole = tuple({name: row.get(name) for name in columns} for row in rows)
    return Beside(whole, tuple(correlate(whole)))


def correlate(rows: Sequence[Mapping[str, Any]]) -> list[Correlation]:
    """Correlate every measure of weights with every figure of behaviour, over the heads of each stack.

    Measures of the basis within a head are left out, and whatever fewer than 8 heads have or all have alike.
    """
    found = list[Correlation]()
    measures = [measure.name for measure in MEASURES if not measure.of_basis]
    for stack in dict.fromkeys(str(row["stack"]) for row in rows):
        own = [row for row in rows if row["stack"] == stack]
        columns = _Columns(own)
        for measure in measures:
            for figure in FIGURES:
                one = columns.correlated(measure, figure.name, stack)
                if one is not None:
                    found.append(one)
    return sorted(_corrected(found), key=lambda one: -abs(one.value))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@final
class _Columns:
    """The columns of a table of heads, with the ranks of their resamples."""

    def __init__(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._rows = rows
        self._layers = np.array([int(row["layer"]) for row in rows])
        self._values: dict[str, np.ndarray] = {}
        self._resampled: dict[tuple[str, bytes], np.ndarray] = {}

    def correlated(self, measure: str, figure: str, stack: str) -> Correlation | None:
        """Two columns, over the heads that have both; None for too few of them."""
        one, other = self._column(measure), self._column(figure)
        both = np.isfinite(one) & np.isfinite(other)
        x, y, layers = one[both], other[both], self._layers[both]
        if min(len(np.unique(x)), len(np.unique(y))) < _FEWEST_HEADS:
            return None
        resampled = _cosines(self._ranks(measure, both), self._ranks(figure, both))
        low, high = np.nanpercentile(resampled, [2.5, 97.5])
        whole, within = (
            float(_cosines(*(_ranks_within(values, groups) for values in (x, y)))[0])
            for groups in (np.zeros_like(layers), layers)
        )
        return Correlation(
            measure,
            figure,
            stack,
            whole,
            float(low),
            float(high),
            within,
            _p_value(whole, len(x)),
            len(x),
            sure=False,
        )

    def _column(self, name: str) -> np.ndarray:
        if name not in self._values:
            found = (row.get(name) for row in self._rows)
            self._values[name] = np.array([float(v) if _is_number(v) else math.nan for v in found])  # type: ignore[arg-type]
        return self._values[name]

    def _ranks(self, name: str, rows: np.ndarray) -> np.ndarray:
        """Centred ranks of a column's resamples, `[resamples, heads]`: the same heads for every column."""
        key = name, rows.tobytes()
        if key not in self._resampled:
            values = self._column(name)[rows]
            drawn = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
            self._resampled[key] = _centred_ranks(values, drawn)
        return self._resampled[key]


def _centred_ranks(values: np.ndarray, drawn: np.ndarray) -> np.ndarray:
    """Ranks of the values in every resample, ties at their mean, less their mean; `[resamples, heads]`."""
    _, codes = np.unique(values, return_inverse=True)
    own = codes[drawn]
    counts = np.zeros((len(drawn), codes.max() + 1))
    np.add.at(counts, (np.arange(len(drawn))[:, None], own), 1)
    ranks = np.take_along_axis(counts.cumsum(axis=1) - (counts - 1) / 2, own, axis=1)
    return ranks - ranks.mean(axis=1, keepdims=True)  # type: ignore[no-any-return]


def _ranks_within(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Ranks among the heads of a group, less their mean, `[1, heads]`."""
    ranks = np.zeros((1, len(values)))
    for group in np.unique(groups):
        own = np.flatnonzero(groups == group)
        ranks[:, own] = _centred_ranks(values[own], np.arange(len(own))[None])
    return ranks


def _p_value(correlation: float, heads: int) -> float:
    """Two-sided, of no correlation: Fisher's transformation is nearly normal, of variance 1.06 / (heads - 3).

    Source: Fieller, Hartley & Pearson 1957, doi 10.1093/biomet/44.3-4.470.
    """
    if abs(correlation) >= 1:
        return 0.0
    return math.erfc(abs(math.atanh(correlation)) / math.sqrt(2 * 1.06 / (heads - 3)))


def _cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Of every pair of rows; NaN where one is 0."""
    sizes = np.sqrt((one**2).sum(axis=1) * (other**2).sum(axis=1))
    with np.errstate(invalid="ignore"):
        return (one * other).sum(axis=1) / sizes  # type: ignore[no-any-return]


def _corrected(found: Sequence[Correlation]) -> list[Correlation]:
    """Mark what is significant after Holm's correction."""
    corrected = holm([one.p_value for one in found])
    return [replace(one, sure=p <= _SURE) for one, p in zip(found, corrected, strict=True)]
