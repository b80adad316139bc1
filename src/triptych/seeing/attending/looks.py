"""The largest attention weights of every head, and its outputs as tokens, as records and tables."""

from collections.abc import Iterable, Sequence
from functools import partial
from typing import NamedTuple, final, overload

import torch

from triptych.printable import shortened, table_html
from triptych.running.measuring import Part
from triptych.seeing.attending.telling import Telling
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
        return (
            Looks(self._looks[number])
            if isinstance(number, slice)
            else self._looks[number]
        )

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
        widths = (
            [max(map(len, column)) for column in zip(*shown, strict=True)]
            if shown
            else []
        )
        lines = [
            "  "
            + "  ".join(
                cell.ljust(width) for cell, width in zip(row, widths, strict=True)
            ).rstrip()
            for row in shown
        ]
        rest = (
            [] if len(shown) == len(self) else [f"  … {len(self) - len(shown):,} more"]
        )
        title = f"Looks({len(self):,}): head, token that looks, token looked at, weight"
        return "\n".join([title, *lines, *rest])

    def _repr_html_(self) -> str:
        columns = ("head", "token that looks", "token looked at", "weight")
        return table_html(f"{len(self):,} looks", self.rows()[:_MOST_ROWS], columns)


class HeadLooks(NamedTuple):
    """The largest attention weights of one head."""

    first: float  # mean weight on the first token
    nats: float  # mutual information of query and key, see `Telling`
    looks: list[Look]  # largest weights, in descending order


def strongest_looks(part: Part, count: int, layer: str = "") -> list[HeadLooks]:
    """Return the largest weights of every head in descending order; `layer` is the layer's name.

    Weights on the query's own token and on the first token are omitted if other weights exist: they are large
    in most heads.
    """
    stack = part.stack
    num_heads = len(part.heads)
    first = torch.zeros(num_heads, dtype=torch.float64)
    telling = Telling()
    best: list[list[tuple[float, int, int]]] = [[] for _ in range(num_heads)]
    # Only a block of the weights is in memory.
    for block in part.layer.blocks(part.heads):
        # The caller of `blocks` owns its blocks, so zero the omitted weights in the block itself.
        others = block.weights
        first += others[:, :, 0].double().sum(dim=1).cpu()
        if stack.kind != "cross":
            others.diagonal(block.rows.start, dim1=1, dim2=2).zero_()
        telling.add(others)
        others[:, :, 0] = 0
        # The largest weights lie in the rows of the largest maxima.
        order = others.amax(dim=2).sort(dim=1, descending=True, stable=True).indices
        rows = order[:, :count].sort(dim=1).values
        found = others.gather(
            1, rows[:, :, None].expand(-1, -1, others.shape[2])
        ).flatten(1)
        values, places = found.sort(dim=1, descending=True, stable=True)
        queries = block.rows.start + rows.gather(1, places // others.shape[2])
        kept = zip(values[:, :count].tolist(), queries[:, :count].tolist(), strict=True)
        keys = (places % others.shape[2])[:, :count].tolist()
        for head, (weights, own) in enumerate(kept):
            best[head] += zip(weights, own, keys[head], strict=True)
    heads = []
    nats = telling.nats().tolist()
    for number, head in enumerate(part.heads):
        ordered = sorted(best[number], key=lambda look: (-look[0], look[1:]))[:count]
        looks = [
            Look(
                f"{layer}.{head}",
                query,
                stack.queries[query],
                key,
                stack.keys[key],
                weight,
            )
            for weight, query, key in ordered
            if weight > 0
        ]
        heads.append(
            HeadLooks(float(first[number]) / len(stack.queries), nats[number], looks)
        )
    return heads


def most_telling(parts: Sequence[Part], count: int) -> list[Part]:
    """Return the `count` heads of largest mutual information (`Telling`), in descending order, as parts."""
    found = [
        (own.nats, Part(part.stack, part.layer, (head,)))
        for part in parts
        for head, own in zip(part.heads, strongest_looks(part, 1), strict=True)
    ]
    return [part for _, part in sorted(found, key=lambda one: -one[0])[:count]]


def looks_table(parts: Sequence[Part]) -> Table:
    """Return a row for every head with its three largest weights."""
    rows = []
    for part in parts:
        for head, own in zip(part.heads, strongest_looks(part, _EACH), strict=True):
            stack = part.stack
            looks = [
                f"{_marked(one.query_token, one.query, stack.second_query)} → "
                f"{_marked(one.key_token, one.key, stack.second_key)} {one.weight:.2f}"
                for one in own.looks
            ]
            looks += [""] * (_EACH - len(looks))
            place = (part.stack.kind, str(part.layer.number), str(head))
            rows.append((*place, f"{own.nats:.2f}", f"{own.first:.2f}", *looks))
    columns = (
        "kind",
        "layer",
        "head",
        "tells",
        "first token",
        *(f"look {n + 1}" for n in range(_EACH)),
    )
    is_pair = any(part.stack.second_query is not None for part in parts)
    return Table(
        "strongest looks: token that looks → token looked at",
        columns,
        tuple(rows),
        "¹ token of the first text, ² of the second." if is_pair else "",
    )


def _marked(token: str, number: int, second: int | None) -> str:
    """Return a token with the number of its text, if it is in a pair of texts."""
    if second is None:
        return _token(token)
    return f"{_token(token)}{'¹' if number < second else '²'}"


def written_table(parts: Sequence[Part], writer: TokenWriter) -> Table:
    """Return the tokens nearest to each head's output for each attended token."""
    rows = []
    for part in parts:
        for head in part.heads:
            of_head = (part.stack.kind, str(part.layer.number), str(head))
            for key, nearest in zip(
                part.stack.keys, writer.of(part, head) or (), strict=False
            ):
                rows.append((*of_head, _token(key), "  ".join(map(_token, nearest))))
    title = "what heads write for each token: nearest tokens through the output table"
    return Table(title, ("kind", "layer", "head", "token", "writes"), tuple(rows))
