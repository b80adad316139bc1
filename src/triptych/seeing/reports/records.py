"""What a report shows, as plain records."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class MetricPoint:
    """What was measured at one step of training; None where nothing was."""

    step: int
    """Optimizer steps done, ≥ 0."""
    train_loss: float | None = None
    """Nats per target token."""
    valid_loss: float | None = None
    """Nats per target token, without label smoothing or dropout."""
    bleu: float | None = None
    """Corpus BLEU on the validation part, 0–100."""
    learning_rate: float | None = None


@dataclass(frozen=True)
class TranslationSample:
    """A sentence, what the model made of it, and, where one is known, the right translation."""

    source: str
    hypothesis: str
    reference: str | None = None

    @property
    def is_exact(self) -> bool | None:
        """Whether the translation is the reference to the letter; None without a reference."""
        return None if self.reference is None else self.hypothesis == self.reference


@dataclass(frozen=True, eq=False)
class AttentionPicture:
    """The attention of every head of one layer over one pair of sentences."""

    title: str
    source_tokens: tuple[str, ...]
    target_tokens: tuple[str, ...]
    weights: NDArray[np.floating]
    """`[num_heads, tgt_len, src_len]`; every row a distribution over the source."""
    caption: str = ""

    def __post_init__(self) -> None:
        expected = (len(self.target_tokens), len(self.source_tokens))
        shape = self.weights.shape
        if len(shape) != 3 or shape[0] == 0 or shape[1:] != expected:
            raise ValueError(
                f"{self.title!r}: weights have shape {list(shape)}; {expected[0]} target and {expected[1]} "
                f"source tokens want [num_heads ≥ 1, {expected[0]}, {expected[1]}]"
            )
        # Softmax in half precision may miss 1 by a little; NaN fails the comparison too.
        if not np.all((self.weights >= 0) & (self.weights <= 1.001)):
            raise ValueError(f"{self.title!r}: attention weights must lie in 0–1 and be finite")

    @property
    def num_heads(self) -> int:
        return int(self.weights.shape[0])

    def mean_over_heads(self) -> NDArray[np.floating]:
        """The mean of the heads' weights, `[tgt_len, src_len]`."""
        mean: NDArray[np.floating] = self.weights.astype(np.float64).mean(axis=0)
        return mean


@dataclass(frozen=True)
class Table:
    """Anything else worth a table: a certificate's claims, the spectra of the heads."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""
    numeric: tuple[int, ...] = ()
    """Columns of numbers, counted from 0: they are set flush right."""
    shaded: tuple[int, ...] = ()
    """Columns of numbers that a page shades, from the lowest to the highest of the column."""

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ValueError(
                    f"{self.title!r}: row {number} has {len(row)} cells for {len(self.columns)} columns"
                )

    def part(self, columns: Sequence[int]) -> "Table":
        """The same table with these columns, counted from 0, in this order."""
        return replace(
            self,
            columns=tuple(self.columns[i] for i in columns),
            rows=tuple(tuple(row[i] for i in columns) for row in self.rows),
            numeric=tuple(place for place, i in enumerate(columns) if i in self.numeric),
            shaded=tuple(place for place, i in enumerate(columns) if i in self.shaded),
        )


@dataclass(frozen=True)
class Bar:
    """One bar: its name, its length, and the length in words."""

    name: str
    value: float | int
    label: str
    series: str = ""
    """Which of several bars with the same name it is."""


@dataclass(frozen=True)
class BarChart:
    """Bars one under the other, in the order given."""

    title: str
    bars: tuple[Bar, ...]
    unit: str = ""
    caption: str = ""

    def __post_init__(self) -> None:
        for bar in self.bars:
            if not 0 <= bar.value < float("inf"):
                raise ValueError(f"{self.title!r}: the bar of {bar.name} is {bar.value}: give 0 or more")


@dataclass(frozen=True)
class Interval:
    """A mean with its interval; NaN ends where there is none."""

    mean: float
    low: float
    high: float
    name: str = ""
    """The name of a dot, or of an estimate."""
    x: float = 0.0
    """The place of a dot, or of a point of a curve."""


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
    """Whether heights are on a logarithmic axis, where all are above 0."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.lines)


@dataclass(frozen=True)
class ScatterChart:
    """Named points, each with the interval of its height."""

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
    """Estimates below each other, each with its interval, and a line at 0."""

    title: str
    x_title: str
    intervals: tuple[Interval, ...]
    caption: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(one.name for one in self.intervals)


# What `plot` draws.
Plot = CurveChart | ScatterChart | IntervalChart


@dataclass(frozen=True)
class Report:
    """One page: a training run, or things of one kind side by side; every part but the title may be empty."""

    title: str
    summary: str = ""
    """A few sentences; a blank line begins a new paragraph."""
    facts: tuple[tuple[str, str], ...] = ()
    """Name and value: size, time, scores."""
    charts: tuple[BarChart, ...] = ()
    tables: tuple[Table, ...] = ()
    commands: tuple[str, ...] = ()
    """Command lines to go on with, one each."""
    metrics: tuple[MetricPoint, ...] = ()
    samples: tuple[TranslationSample, ...] = ()
    viewer: Mapping[str, Any] | None = None
    """Attention: the data of `viewer.html`, which `attending/viewing.py` makes."""
    plots: tuple[Plot, ...] = ()
