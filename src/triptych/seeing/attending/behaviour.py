"""Behaviour of heads over a text: the distribution of their weights over kinds of keys.

A figure is a mean over the queries of a text, with an interval over its documents, next to the value of
uniform attention over all visible keys.
"""

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from triptych.core.algebra.semantics import Kind
from triptych.running.measuring import (
    HeadFigures,
    Place,
    Told,
    UnitSums,
    Windows,
    read_windows,
    stack_ids,
)
from triptych.running.opening import Reader

# A head is named after a figure of at least a third of its weight, if it exceeds the figure of uniform
# attention.
NAMED_FROM = 1 / 3
_FARTHEST = 1 << 30


@final
@dataclass(frozen=True)
class Figure:
    """A figure of a head's behaviour."""

    name: str  # column name
    title: str  # readable name
    meaning: str  # definition and applicable queries, in a sentence
    kinds: tuple[Kind, ...] = ("self", "causal")  # applicable kinds of attention
    names_head: bool = False  # whether heads are named after it


_ALL: tuple[Kind, ...] = ("self", "causal", "cross")
_BANDS = ((1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 32), (33, 64), (65, _FARTHEST))


def _band(low: int, high: int) -> Figure:
    said = (
        f"{low}"
        if low == high
        else f"{low} to {high}"
        if high < _FARTHEST
        else f"{low} or more"
    )
    name = (
        f"distance_{low}"
        if low == high
        else f"distance_{low}_{'on' if high == _FARTHEST else high}"
    )
    return Figure(
        name,
        f"distance {said}",
        f"Weight on keys {said} tokens away, of queries that see any.",
    )


FIGURES: tuple[Figure, ...] = (
    Figure(
        "previous",
        "previous token",
        "Weight on the token before the query.",
        names_head=True,
    ),
    Figure("self", "itself", "Weight on the query's own token.", names_head=True),
    Figure(
        "next",
        "next token",
        "Weight on the token after the query.",
        ("self",),
        names_head=True,
    ),
    Figure(
        "first",
        "first token",
        "Weight on the first token of the window.",
        _ALL,
        names_head=True,
    ),
    Figure(
        "last",
        "last token",
        "Weight on the last token.",
        ("self", "cross"),
        names_head=True,
    ),
    Figure(
        "duplicate",
        "same token before",
        "Weight on earlier tokens that are the query's token, of queries that have any.",
        names_head=True,
    ),
    Figure(
        "induction",
        "what followed the same token",
        "Weight on earlier tokens that came right after the query's token, of queries that have any.",
        names_head=True,
    ),
    Figure(
        "diagonal",
        "diagonal",
        "Weight on source tokens at most one from where the query is on a straight line through both texts.",
        ("cross",),
        names_head=True,
    ),
    Figure("elsewhere", "elsewhere", "Weight on keys of no kind above.", _ALL),
    *(_band(low, high) for low, high in _BANDS),
    Figure(
        "distance", "mean distance", "Mean distance in tokens to where the weight is."
    ),
    Figure("entropy", "entropy", "Entropy of a query's weights in nats.", _ALL),
)


def figures_of(kind: Kind) -> tuple[Figure, ...]:
    """Return the figures of a kind of attention."""
    return tuple(figure for figure in FIGURES if kind in figure.kinds)


def key_classes(
    kind: Kind, query_ids: Int[Tensor, " query_len"], key_ids: Int[Tensor, " key_len"]
) -> dict[str, Bool[Tensor, "query_len key_len"]]:
    """Return the keys of each class for every query."""
    rows = len(query_ids)
    columns = len(key_ids)
    query = torch.arange(rows)[:, None]
    key = torch.arange(columns)[None]
    if kind == "cross":
        place = query * (columns - 1) / max(1, rows - 1)
        return {
            "first": (key == 0).expand(rows, columns),
            "last": (key == columns - 1).expand(rows, columns),
            "diagonal": (key - place).abs() <= 1,
        }
    same = query_ids[:, None] == key_ids[None]
    before = key < query
    # Keys following an earlier occurrence of the query's token.
    followed = torch.cat([torch.zeros(rows, 1, dtype=torch.bool), same[:, :-1]], dim=1)
    found = {
        "previous": key == query - 1,
        "self": key == query,
        "next": key == query + 1,
        "first": (key == 0).expand(rows, columns),
        "last": (key == columns - 1).expand(rows, columns),
        "duplicate": same & before,
        "induction": followed & before,
    }
    away = (query - key).abs()
    bands = {
        _band(low, high).name: (away >= low) & (away <= high) for low, high in _BANDS
    }
    names = {figure.name for figure in figures_of(kind)}
    return {name: keys for name, keys in (found | bands).items() if name in names}


@final
class RowFigures:
    """The figures of the queries of one sequence, for the weights of any layer.

    Attributes:
        even: sums over the queries for uniform attention over each query's visible keys, `[figures]`.
        counts: number of queries of each figure, `[figures]`.
    """

    def __init__(
        self,
        kind: Kind,
        visible: Bool[Tensor, "query_len key_len"],
        query_ids: Int[Tensor, " query_len"],
        key_ids: Int[Tensor, " key_len"],
    ) -> None:
        """Find the keys of every class for every query.

        Queries with a single visible key are omitted: all heads are equal there. A figure of a class uses the
        queries with a visible key of the class.
        """
        self.kind = kind
        self.visible = visible
        seen = visible.sum(dim=-1)
        rows = seen > 1
        even = visible.double() / seen.clamp(min=1)[:, None]
        classes = {
            name: keys & visible
            for name, keys in key_classes(kind, query_ids, key_ids).items()
        }
        named = torch.stack(
            [classes[figure.name] for figure in figures_of(kind) if figure.names_head]
        )
        classes["elsewhere"] = visible & ~named.any(dim=0)
        away = (
            torch.arange(len(query_ids))[:, None] - torch.arange(len(key_ids))
        ).abs()
        factors = list[Tensor]()
        counted = list[Tensor]()
        for figure in figures_of(kind)[
            :-1
        ]:  # entropy is the last figure, and not a sum over keys
            keys = classes.get(figure.name)
            factors.append((away if keys is None else keys).float())
            counted.append(
                rows
                if keys is None or figure.name == "elsewhere"
                else rows & keys.any(dim=-1)
            )
        self._factors = torch.stack(factors, dim=-1)  # [query_len, key_len, figures]
        self._counted = torch.stack([*counted, rows])  # [figures, query_len]
        of_even = torch.einsum("qk,qkf->fq", even, self._factors.double())
        of_even = torch.cat([of_even, seen.clamp(min=1).double().log()[None]])
        self.even: Tensor = (of_even * self._counted).sum(dim=-1)
        self.counts: Tensor = self._counted.sum(dim=-1).double()

    def sums(
        self, weights: Float[Tensor, "heads query_len key_len"]
    ) -> Float[Tensor, "figures heads"]:
        """Sum the figures over the queries, given the weights after the softmax."""
        by_query = weights.transpose(0, 1) @ self._factors.to(weights.dtype)
        entropy = -torch.special.xlogy(weights, weights).sum(dim=-1)
        whole = torch.cat([by_query.permute(2, 1, 0), entropy[None]]).double()
        return (whole * self._counted[:, None]).sum(dim=-1)


@final
@dataclass(frozen=True, eq=False)
class LayerFigures:
    """Behaviour of a layer's heads over a text."""

    stack: str  # "encoder", "decoder" or "cross"
    layer: int  # layer number within the stack
    figures: dict[
        str, HeadFigures
    ]  # figures by name: `figures_of(kind)`, and further measurements

    def __repr__(self) -> str:
        return f"LayerFigures {self.name}: {self.num_heads} heads, {', '.join(self.figures)}"

    @property
    def kind(self) -> Kind:
        """Kind of visible tokens: all, previous, or of another text."""
        kinds: dict[str, Kind] = {
            "encoder": "self",
            "decoder": "causal",
            "cross": "cross",
        }
        return kinds[self.stack]

    @property
    def name(self) -> str:
        return f"{self.stack} {self.layer}"

    @property
    def num_heads(self) -> int:
        return len(self.figures["entropy"].value)

    def called(self, head: int) -> str:
        """Return the title of a head's dominant figure, or "".

        A head is named after the largest of its figures of at least a third, if the figure's interval is
        above the value of uniform attention.
        """
        best = NAMED_FROM
        title = ""
        # Only figures with an interval can name a head.
        for figure in figures_of(self.kind):
            found = self.figures[figure.name]
            if not figure.names_head or found.low is None or found.even is None:
                continue
            if float(found.value[head]) >= best and float(found.low[head]) > found.even:
                best = float(found.value[head])
                title = figure.title
        return title

    def rows(self) -> list[dict[str, Any]]:
        """Return one flat record per head; figures without data are None."""
        found = []
        for head in range(self.num_heads):
            row: dict[str, Any] = {
                "stack": self.stack,
                "layer": self.layer,
                "head": head,
                "called": self.called(head),
            }
            for name, figure in self.figures.items():
                ends = {"": figure.value, "_low": figure.low, "_high": figure.high}
                row |= {
                    name + end: float(of[head])
                    for end, of in ends.items()
                    if of is not None
                }
                if figure.even is not None:
                    row[f"{name}_even"] = figure.even
            # JSON cannot represent non-finite values.
            missing = [
                name
                for name, value in row.items()
                if isinstance(value, float) and not math.isfinite(value)
            ]
            found.append(row | dict.fromkeys(missing))
        return found


@torch.no_grad()
def measure_behaviour(
    reader: Reader, windows: Windows, progress: Told
) -> dict[Place, dict[str, HeadFigures]]:
    """Measure the distribution of every head's attention over a text."""
    found = UnitSums(windows.num_units)
    for unit, text, stacks in read_windows(reader, windows, progress):
        for stack in stacks:
            figures: RowFigures | None = None
            kind = stack.layers[0].call.site.kind
            names = tuple(figure.name for figure in figures_of(kind))
            for layer in stack.layers:
                compared = layer.queries_and_keys()
                visible = compared.visible()[0, 0].cpu()
                # Layers usually share visible keys, and then the classes.
                if figures is None or not torch.equal(figures.visible, visible):
                    figures = RowFigures(kind, visible, *stack_ids(text, stack.kind))
                sums = figures.sums(compared.weights()[0].cpu())
                counts = figures.counts[:, None]
                found.add(
                    unit, (stack.kind, layer.number), names, sums, counts, figures.even
                )
    return found.figures()
