"""The strongest looks of every head, and what it writes, as records and tables."""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

from triptych.attending.layers import Part
from triptych.attending.writing import TokenWriter
from triptych.printable import shortened
from triptych.reports import Table

_EACH = 3
_token = partial(shortened, most=14)


class Look(NamedTuple):
    """A large weight of a head: which token looks at which."""

    head: str
    query: int
    query_token: str
    key: int
    key_token: str
    weight: float


class HeadLooks(NamedTuple):
    """The mean weight that a head gives to the first token, and its strongest looks."""

    first: float
    looks: list[Look]


def strongest_looks(part: Part, count: int, layer: str = "") -> list[HeadLooks]:
    """The largest weights of every head, the largest first; `layer` is the layer's name.

    Looks at the token itself and at the first token are left out if there are others: most heads have them.
    """
    found, stack = [], part.stack
    for head in part.heads:
        total, best = 0.0, list[tuple[float, int, int]]()
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
    """A row for every head: its three strongest looks."""
    rows = []
    for part in parts:
        for head, (first, looks) in zip(part.heads, strongest_looks(part, _EACH), strict=True):
            cells = [f"{_token(one.query_token)} → {_token(one.key_token)} {one.weight:.2f}" for one in looks]
            cells += [""] * (_EACH - len(cells))
            rows.append((part.stack.kind, str(part.layer.number), str(head), f"{first:.2f}", *cells))
    columns = ("kind", "layer", "head", "first token", *(f"look {n + 1}" for n in range(_EACH)))
    return Table("strongest looks: token that looks → token looked at", columns, tuple(rows))


def written_table(parts: Sequence[Part], writer: TokenWriter) -> Table:
    """The tokens nearest to what each head writes for each token that it may attend to."""
    rows = [
        (part.stack.kind, str(part.layer.number), str(head), _token(key), "  ".join(map(_token, nearest)))
        for part in parts
        for head in part.heads
        for key, nearest in zip(part.stack.keys, writer.of(part, head) or (), strict=False)
    ]
    title = "what heads write for each token: nearest tokens through the output table"
    return Table(title, ("kind", "layer", "head", "token", "writes"), tuple(rows))
