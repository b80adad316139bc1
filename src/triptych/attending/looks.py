"""The strongest looks of every head, and what it writes, as tables."""

from collections.abc import Sequence

from triptych.attending.attention import Part
from triptych.attending.writing import TokenWriter
from triptych.printable import printable
from triptych.reports import Table

_EACH = 3
_MOST_CHARACTERS = 14


def strongest_looks(parts: Sequence[Part]) -> Table:
    """A row for every head: its three largest weights, and between which tokens.

    Looks at the own token and at the first token are left out where others are there: most heads have them.
    """
    rows = [
        (part.stack.kind, str(part.layer.number), str(head), *looks)
        for part in parts
        for head, looks in zip(part.heads, _strongest(part), strict=True)
    ]
    columns = ("kind", "layer", "head", "first token", *(f"look {n + 1}" for n in range(_EACH)))
    return Table("strongest looks: token that looks → token looked at", columns, tuple(rows))


def written_tokens(parts: Sequence[Part], writer: TokenWriter) -> Table:
    """For every head and token that it may attend to, the tokens nearest to what it writes."""
    rows = [
        (part.stack.kind, str(part.layer.number), str(head), _shown(key), "  ".join(map(_shown, nearest)))
        for part in parts
        for head in part.heads
        for key, nearest in zip(part.stack.keys, writer.of(part, head) or (), strict=False)
    ]
    title = "what heads write for each token: nearest tokens through the output table"
    return Table(title, ("kind", "layer", "head", "token", "writes"), tuple(rows))


def _strongest(part: Part) -> list[tuple[str, ...]]:
    """Of every head, the mean weight of the first token, and the looks."""
    found = []
    is_self = part.stack.kind != "cross"
    for head in part.heads:
        total, best = 0.0, list[tuple[float, int, int]]()
        for block in part.layer.blocks([head]):
            weights = block.weights[0]
            total += float(weights[:, 0].sum())
            others = weights.clone()
            others[:, 0] = 0
            if is_self:
                others.diagonal(block.rows.start).zero_()
            values, places = others.flatten().topk(min(_EACH, others.numel()))
            best += [
                (value, block.rows.start + place // others.shape[1], place % others.shape[1])
                for value, place in zip(values.tolist(), places.tolist(), strict=True)
            ]
        best = sorted(best, key=lambda look: (-look[0], look[1:]))[:_EACH]
        mean = total / len(part.stack.queries)
        found.append((f"{mean:.2f}", *_written(part, best)))
    return found


def _written(part: Part, best: Sequence[tuple[float, int, int]]) -> list[str]:
    looks = [
        f"{_shown(part.stack.queries[query])} → {_shown(part.stack.keys[key])} {weight:.2f}"
        for weight, query, key in best
        if weight > 0
    ]
    return [*looks, *[""] * (_EACH - len(looks))]


def _shown(token: str) -> str:
    token = printable(token)
    return token if len(token) <= _MOST_CHARACTERS else f"{token[: _MOST_CHARACTERS - 1]}…"
