"""The contents of a report, as plain records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MetricPoint:
    """Metrics at one step of training; None if not measured."""

    step: int
    """Number of optimizer steps, ≥ 0."""
    train_loss: float | None = None
    """Nats per target token."""
    valid_loss: float | None = None
    """Nats per target token, without label smoothing or dropout."""
    bleu: float | None = None
    """Corpus BLEU on the validation part, 0–100."""
    learning_rate: float | None = None


@dataclass(frozen=True)
class TranslationSample:
    """A sentence, its translation by the model, and the reference translation, if known."""

    source: str
    hypothesis: str
    reference: str | None = None

    @property
    def is_exact(self) -> bool | None:
        """Return True if the translation equals the reference exactly; None without a reference."""
        return None if self.reference is None else self.hypothesis == self.reference


@dataclass(frozen=True, eq=False)
class AttentionPicture:
    """The attention of every head of one layer over one pair of sentences."""

    title: str
    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    weights: NDArray[np.floating]
    """Weights `[num_heads, tgt_len, src_len]`; every row is a distribution over the source."""
    caption: str = ""

    def __post_init__(self) -> None:
        expected = (len(self.target_tokens), len(self.source_tokens))
        shape = self.weights.shape
        if len(shape) != 3 or shape[0] == 0 or shape[1:] != expected:
            raise ValueError(
                f"{self.title!r}: weights have shape {list(shape)}; {expected[0]} target and {expected[1]} "
                f"source tokens want [num_heads ≥ 1, {expected[0]}, {expected[1]}]"
            )
        # Sums of a softmax in half precision may exceed 1 slightly; NaN also fails the comparison.
        if not np.all((self.weights >= 0) & (self.weights <= 1.001)):
            raise ValueError(
                f"{self.title!r}: attention weights must lie in 0–1 and be finite"
            )

    @property
    def num_heads(self) -> int:
        return int(self.weights.shape[0])

    def mean_over_heads(self) -> NDArray[np.floating]:
        """Return the mean of the heads' weights, `[tgt_len, src_len]`."""
        mean: NDArray[np.floating] = self.weights.astype(np.float64).mean(axis=0)
        return mean


@dataclass(frozen=True)
class Table:
    """Any tabular data: a certificate's claims, the spectra of the heads."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    numeric: tuple[int, ...] = ()
    """Numeric columns, counted from 0: they are right-aligned."""
    shaded: tuple[int, ...] = ()
    """Numeric columns shaded from the lowest to the highest value of the column."""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"{self.title!r}: row {number} has {len(row)} cells for {len(self.columns)} columns"
                )

    def part(self, columns: Sequence[int]) -> "Table":
        """Return the table restricted to these columns, counted from 0, in this order."""
        return replace(
            self,
            columns=tuple(self.columns[i] for i in columns),
            rows=tuple(tuple(row[i] for i in columns) for row in self.rows),
            numeric=tuple(
                place for place, i in enumerate(columns) if i in self.numeric
            ),
            shaded=tuple(place for place, i in enumerate(columns) if i in self.shaded),
        )

    def without_empty_columns(self) -> "Table":
        """Return the table without the columns in which every cell is empty; the first column stays."""
        filled = [
            number
            for number in range(len(self.columns))
            if number == 0 or not self.rows or any(row[number] for row in self.rows)
        ]
        return self if len(filled) == len(self.columns) else self.part(filled)


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its length, and its label."""

    name: str
    value: float | int
    label: str
    series: str = ""
    """Series of the bar, for several bars with the same name."""


@dataclass(frozen=True)
class BarChart:
    """Bars from top to bottom, in the given order."""

    title: str
    bars: tuple[Bar, ...]
    unit: str = ""
    caption: str = ""

    def __post_init__(self) -> None:
        for bar in self.bars:
            if not 0 <= bar.value < float("inf"):
                raise ValueError(
                    f"{self.title!r}: the bar of {bar.name} is {bar.value}: give 0 or more"
                )


@dataclass(frozen=True)
class Interval:
    """A mean with its interval; ends are NaN without an interval."""

    mean: float
    low: float
    high: float
    name: str = ""
    """Name of a dot, or of an estimate."""
    x: float = 0.0
    """x coordinate of a dot, or of a point of a curve."""


@dataclass(frozen=True)
class CurveChart:
    """Lines with bands over one axis."""

    title: str
    x_title: str
    y_title: str
    lines: tuple[tuple[str, tuple[Interval, ...]], ...]
    """Name of each line, and its points from left to right."""
    caption: str = ""
    is_log: bool = False
    """Whether the y axis is logarithmic, if all values are above 0."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.lines)


@dataclass(frozen=True)
class ScatterChart:
    """Named points with vertical intervals."""

    title: str
    x_title: str
    y_title: str
    dots: tuple[Interval, ...]
    caption: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dot.name for dot in self.dots)


@dataclass(frozen=True)
class IntervalChart:
    """Estimates below each other with their intervals, and a line at 0."""

    title: str
    x_title: str
    intervals: tuple[Interval, ...]
    caption: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.intervals)


# Input of `plot`.
Plot = CurveChart | ScatterChart | IntervalChart


@dataclass(frozen=True)
class Report:
    """One page: a training run, or a comparison; all parts except the title may be empty."""

    title: str
    summary: str = ""
    """The answer in a few sentences; a blank line begins a new paragraph."""
    lead: tuple[Table | Plot, ...] = ()
    """Tables and charts that carry the answer, before everything else."""
    findings: tuple[str, ...] = ()
    """Further sentences, as a list."""
    maps: Mapping[str, Any] | None = None
    """Maps of layers × heads: the data of `maps.html`."""
    facts: tuple[tuple[str, str], ...] = ()
    """Name and value: size, time, scores."""
    charts: tuple[BarChart, ...] = ()
    tables: tuple[Table, ...] = ()
    commands: tuple[str, ...] = ()
    """Suggested command lines."""
    metrics: tuple[MetricPoint, ...] = ()
    samples: tuple[TranslationSample, ...] = ()
    has_one_answer: bool = False
    """True if the reference is the only right translation, so that samples are marked as exact or not."""
    viewer: Mapping[str, Any] | None = None
    """Attention: the data of `viewer.html`, made by `viewer_data`."""
    plots: tuple[Plot, ...] = ()
