"""The largest attention weights of every head, and its outputs as tokens, as records and tables."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, final, overload

from triptych.printable import shortened, table_html
from triptych.running.measuring import Part
from triptych.seeing.attending.written_tokens import TokenWriter
from triptych.seeing.reports.records import Table

_EACH = 3
_SHOWN, _MOST_ROWS = 7, 100  # rows of a repr, and of a table in a notebook
_token = partial(shortened, most=14)


class Look(NamedTuple):
    """A large attention weight: head, query token and key token."""

    head: str
    query: int
    query_token: str
    key: int
    key_token: str
    weight: float


@final
class Looks(Sequence[Look]):
    """Large attention weights in descending order, shown as a table."""

    def __init__(self, looks: Iterable[Look]) -> None:
        self._looks = tuple(looks)

    def __len__(self) -> int:
        return len(self._looks)

    @overload
    def __getitem__(self, number: int) -> Look: ...

    @overload
    def __getitem__(self, number: slice) -> "Looks": ...

    def __getitem__(self, number: int | slice) -> "Look | Looks":
        return Looks(self._looks[number]) if isinstance(number, slice) else self._looks[number]

    def rows(self) -> list[tuple[str, str, str, str]]:
        """Return head, query token, key token and weight of every entry."""
        return [
            (
                one.head,
                f"{_token(one.query_token)} ({one.query})",
                f"{_token(one.key_token)} ({one.key})",
                f"{one.weight:.3f}",
            )
            for one in self
        ]

    def __repr__(self) -> str:
        shown = self.rows()[: _SHOWN if len(self) <= _SHOWN else _SHOWN - 1]
        widths = [max(map(len, column)) for column in zip(*shown, strict=True)] if shown else []
        lines = [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in shown
        ]
        rest = [] if len(shown) == len(self) else [f"  … {len(self) - len(shown):,} more"]
        title = f"Looks({len(self):,}): head, token that looks, token looked at, weight"
        return "\n".join([title, *lines, *rest])

    def _repr_html_(self) -> str:
        columns = ("head", "token that looks", "token looked at", "weight")
        return table_html(f"{len(self):,} looks", self.rows()[:_MOST_ROWS], columns)


class HeadLooks(NamedTuple):
    """Mean weight of a head on the first token, and its largest weights."""

    first: float
    looks: list[Look]


def strongest_looks(part: Part, count: int, layer: str = "") -> list[HeadLooks]:
    """Return the largest weights of every head in descending order; `layer` is the layer's name.

    Weights on the query's own token and on the first token are omitted if other weights exist: they are large
    in most heads.
    """
    found = []
    stack = part.stack
    for head in part.heads:
        total = 0.0
        best = list[tuple[float, int, int]]()
        # Only a block of the weights is in memory.
        for block in part.layer.blocks([head]):
            weights = block.weights[0]
            total += float(weights[:, 0].sum())
            others = weights.clone()
            others[:, 0] = 0
            if stack.kind != "cross":
                others.diagonal(block.rows.start).zero_()
            values, places = others.flatten().topk(min(count, others.numel()))
            best += [
                (value, block.rows.start + place // others.shape[1], place % others.shape[1])
                for value, place in zip(values.tolist(), places.tolist(), strict=True)
            ]
        best = sorted(best, key=lambda look: (-look[0], look[1:]))[:count]
        looks = [
            Look(f"{layer}.{head}", query, stack.queries[query], key, stack.keys[key], weight)
            for weight, query, key in best
            if weight > 0
        ]
        found.append(HeadLooks(total / len(stack.queries), looks))
    return found


def looks_table(parts: Sequence[Part]) -> Table:
    """Return a row for every head with its three largest weights."""
    rows = []
    for part in parts:
        for head, (first, looks) in zip(part.heads, strongest_looks(part, _EACH), strict=True):
            cells = [f"{_token(one.query_token)} → {_token(one.key_token)} {one.weight:.2f}" for one in looks]
            cells += [""] * (_EACH - len(cells))
            rows.append((part.stack.kind, str(part.layer.number), str(head), f"{first:.2f}", *cells))
    columns = ("kind", "layer", "head", "first token", *(f"look {n + 1}" for n in range(_EACH)))
    return Table("strongest looks: token that looks → token looked at", columns, tuple(rows))


def written_table(parts: Sequence[Part], writer: TokenWriter) -> Table:
    """Return the tokens nearest to each head's output for each attended token."""
    rows = []
    for part in parts:
        for head in part.heads:
            of_head = (part.stack.kind, str(part.layer.number), str(head))
            for key, nearest in zip(part.stack.keys, writer.of(part, head) or (), strict=False):
                rows.append((*of_head, _token(key), "  ".join(map(_token, nearest))))
    title = "what heads write for each token: nearest tokens through the output table"
    return Table(title, ("kind", "layer", "head", "token", "writes"), tuple(rows))
