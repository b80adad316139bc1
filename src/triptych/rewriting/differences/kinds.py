"""Names of the kinds of change between two models, with their evidence.

The simplest fitting change explains each tensor with a difference (`tensor_changes.py`), and tensors with
equal explanations make one change. Further kinds are found from whole models: layers dropped, repeated or
reordered, a stale shard, another configuration, training from some layer on.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triptych.core.algebra.weights import SIDES
from triptych.core.storage import Tensors, tensor_hash
from triptych.printable import shortened
from triptych.progress import Progress, untold
from triptych.rewriting.differences.checkpoints_read import OF_NO_EFFECT
from triptych.rewriting.differences.difference_records import (
    Change,
    Difference,
    SettingDifference,
)
from triptych.rewriting.differences.field_differences import different_factors, in_short
from triptych.rewriting.differences.sides import (
    AttentionPlace,
    CheckpointSide,
    Pair,
    ReadSide,
    Side,
)
from triptych.rewriting.differences.tensor_changes import (
    added_one,
    coarsest,
    is_spread,
    is_tiled,
    is_transposed,
    low_rank,
    mixture,
    num_different,
    on_grid,
    pruned,
    relative_change,
    rotary_order,
    rounded_to,
    same_start,
    scaled,
)

# Kinds at the end of the list.
_FINE = ("rounded", "few entries")
# Fewer entries fit many explanations by chance.
_FEWEST_ENTRIES = 16
# Largest relative change by training; unrelated weights have a relative difference of √2.
_NEAR = 0.5
_MOST_WAYS = 3
_FEW = 0.01  # share of the entries of a tensor
# Fields with the number of layers.
_OF_LAYERS = ("blocks", "encoder.blocks", "decoder.blocks")
# Ends of the names of fields for stored tensors; layers have further fields.
_LEARNED = ("_weight", "_bias")
# Words for heads by the names of their settings.
_HEADS = {
    "head": "one that predicts tokens",
    "task": "one for a task",
    "second": "a second one, for a task",
}
_BLOCK = re.compile(r"(?:(encoder|decoder)\.)?blocks\.(\d+)\.")


class _Compared(NamedTuple):
    """One tensor of A and of B."""

    name: str
    before: Tensor
    after: Tensor
    heads: int = 0  # heads of a map of queries, keys or values; 0 for other tensors
    heads_after: int = 0
    turned: int = 0  # number of rotated leading channels of each head
    packed: str = ""  # quantisation format of B's files
    third: Tensor | None = None

    @property
    def stored(self) -> torch.dtype:
        """The dtype of B's entries. Layers of several dtypes are read in the widest of them."""
        return coarsest(self.after)


class _Explained(NamedTuple):
    """A tensor with its explanation."""

    name: str
    entries: int
    kind: str
    detail: str  # tensors with one detail are one change
    figure: float = 0.0
    is_vector: bool = False


def find_changes(
    pair: Pair,
    found: Difference,
    *,
    also: Side | None = None,
    progress: Progress = untold,
) -> tuple[Change, ...]:
    """Name the kinds of change from A to B.

    `pair`: the two models. `found`: their comparison, with everything but its changes. `also`: a third model
    C, which B may be mixed from.
    """
    # Blocks in another order are explained as a whole: only the tensors beside them are compared further.
    moved = _moved_layers(pair)
    changes = [*moved]
    explained = list[_Explained]()
    unexplained = list[_Explained]()
    equal = list[str]()
    kept = [name for name in pair.common if not (moved and _BLOCK.match(name))]
    places = () if moved else pair.places
    total = len(kept) + len(places)
    for number, tensors in enumerate(
        (*_beside(pair, kept, also), *_of_attention(pair, places, also))
    ):
        progress("naming the change", number, total)
        for one in tensors():
            if one.before.shape == one.after.shape and _same(one.before, one.after):
                equal.append(one.name)
                continue
            for own in _experts(one):
                reason = _explain(own)
                (unexplained if reason.kind == "" else explained).append(reason)
    for group in sorted(_groups(explained), key=lambda group: group[0].kind in _FINE):
        if sum(one.entries for one in group) < _FEWEST_ENTRIES:
            unexplained += group
            continue
        changes.append(_change(group, found))
    if unexplained:
        changes += _stale_shard(pair) or _training(unexplained, equal)
    settings = found.settings
    # Maps may have absorbed a factor, and are scaled then.
    if not (moved or unexplained or any(one.kind == "scaled" for one in explained)):
        settings += in_short([*different_factors(pair.a, pair.b)])
    return (*_configuration(pair, settings), *changes)


_Read = Callable[[], Iterator[_Compared]]


def _beside(pair: Pair, names: Iterable[str], also: Side | None) -> Iterator[_Read]:
    """Yield readers of the tensors outside attention."""
    there = {*also.names} if also is not None else set()

    def read(name: str) -> Iterator[_Compared]:
        third = also.read(name) if also is not None and name in there else None
        packed = _packed_as(pair.b.stored, pair.b.stored_names(name))
        yield _Compared(
            name, pair.a.read(name), pair.b.read(name), packed=packed, third=third
        )

    for name in names:
        yield lambda name=name: read(name)  # type: ignore[misc]


def _packed_as(stored: Tensors | None, names: Iterable[str]) -> str:
    if stored is None:
        return ""
    return next(
        (
            how
            for name in names
            if name in stored.infos and (how := stored.packed_as(name))
        ),
        "",
    )


def _of_attention(
    pair: Pair, places: Iterable[AttentionPlace], also: Side | None
) -> Iterator[_Read]:
    """Yield readers of the attention layers."""
    there = {*also.places} if also is not None else set()

    def read(place: AttentionPlace) -> Iterator[_Compared]:
        old = pair.a.attention(place)
        new = pair.b.attention(place)
        third = (
            dict(also.matrices(place)) if also is not None and place in there else {}
        )
        after = dict(pair.b.matrices(place))
        rotary = old.semantics.rotary
        turned = 0 if rotary is None or rotary.start else 2 * len(rotary.frequencies)
        for name, tensor in pair.a.matrices(place):
            if name not in after:
                continue
            side = name.removeprefix(pair.a.attention_name(place)).split(".")[1]
            if side not in SIDES:  # a norm of heads or a table of positions: not a map
                yield _flat(name, tensor, after[name], third.get(name))
                continue
            heads, heads_after = (
                weights.chain(side)[0].copies
                if side != "o" and weights.chain(side)
                else 0
                for weights in (old, new)
            )
            yield _Compared(
                name,
                tensor,
                after[name],
                heads,
                heads_after,
                turned if side in ("q", "k") else 0,
                third=third.get(name),
            )

    for place in places:
        yield lambda place=place: read(place)  # type: ignore[misc]


def _flat(name: str, before: Tensor, after: Tensor, third: Tensor | None) -> _Compared:
    """Return a tensor other than a map as a vector."""
    vector = None if third is None else third.flatten()
    return _Compared(name, before.flatten(), after.flatten(), third=vector)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors have equal entries in the wider of their dtypes."""
    wide = torch.promote_types(one.dtype, other.dtype)
    return torch.equal(one.to(wide), other.to(wide))


# Explanations of one tensor, from the simplest to the most complex.


def _experts(one: _Compared) -> Iterator[_Compared]:
    """Yield the different maps of experts one after another; a tensor of another kind unchanged."""
    if one.before.ndim < 3 or one.before.shape != one.after.shape:
        yield one
        return
    third = one.third
    has_third = third is not None and third.shape == one.after.shape
    for number, (before, after) in enumerate(zip(one.before, one.after, strict=True)):
        if not _same(before, after):
            own = third[number] if third is not None and has_third else None
            yield from _experts(one._replace(before=before, after=after, third=own))


def _explain(one: _Compared) -> _Explained:
    for find in _EXPLANATIONS:
        reason = find(one)
        if reason is not None:
            kind, detail, figure = reason
            return _Explained(one.name, one.after.numel(), kind, detail, figure)
    size = _size_of_training(one)
    is_vector = one.after.ndim < 2
    return _Explained(one.name, one.after.numel(), "", "", size, is_vector)


def _size_of_training(one: _Compared) -> float:
    """Return the relative size of a change that training could have made; infinity for any other."""
    if one.before.shape != one.after.shape:
        return float("inf")
    # Training changes only the rows of a table for tokens in its texts.
    is_map = "blocks." in one.name and one.before.ndim > 1
    if is_map and not is_spread(one.before, one.after, 2 * _NEAR):
        return float("inf")
    return relative_change(one.before, one.after)


_Reason = tuple[str, str, float] | None


def _resized(one: _Compared) -> _Reason:
    is_table = "blocks." not in one.name and one.before.ndim == 2
    if not is_table or (rows := same_start(one.before, one.after)) is None:
        return None
    return (
        "embeddings resized",
        f"{len(one.before):,} → {len(one.after):,} rows, the first {rows:,} equal",
        0.0,
    )


def _tiled(one: _Compared) -> _Reason:
    if one.heads_after <= one.heads or not is_tiled(
        one.before, one.after, one.heads, one.heads_after
    ):
        return None
    return "key-value heads tiled", f"{one.heads} heads became {one.heads_after}", 0.0


def _transposed(one: _Compared) -> _Reason:
    if not is_transposed(one.before, one.after):
        return None
    return "transposed", "", 0.0


def _rotary_layout(one: _Compared) -> _Reason:
    if not one.heads or one.turned < 4 or one.heads != one.heads_after:
        return None
    order = rotary_order(one.before, one.after, one.heads, one.turned)
    return None if order is None else ("rotary layout", order, 0.0)


def _without_one(one: _Compared) -> _Reason:
    if (
        "norm" not in one.name
        or (lost := added_one(one.before, one.after, one.stored)) is None
    ):
        return None
    detail = "1 less in B" if lost < 0 else "1 more in B"
    return "gain without its 1", detail, 0.0


def _rounded(one: _Compared) -> _Reason:
    form = None if one.packed else rounded_to(one.before, one.after)
    return None if form is None else ("rounded", form, 0.0)


def _packed(one: _Compared) -> _Reason:
    if not one.packed or one.before.shape != one.after.shape:
        return None
    size = relative_change(one.before, one.after)
    return ("quantised", f"is stored as {one.packed}", size) if size < _NEAR else None


def _zeros(one: _Compared) -> _Reason:
    gone = pruned(one.before, one.after)
    return None if gone is None else ("pruned", gone.structure, gone.share)


def _scaled(one: _Compared) -> _Reason:
    factor = scaled(one.before, one.after, one.stored)
    return None if factor is None else ("scaled", f"{factor:.6g}", factor)


def _few(one: _Compared) -> _Reason:
    if one.before.shape != one.after.shape:
        return None
    count = num_different(one.before, one.after)
    return (
        ("few entries", "", float(count)) if count <= _FEW * one.after.numel() else None
    )


def _mixed(one: _Compared) -> _Reason:
    if (
        one.third is None
        or (parts := mixture(one.before, one.third, one.after, one.stored)) is None
    ):
        return None
    total = parts.own + parts.other
    if abs(total - 1) > 0.01:
        return "combination of A and C", "", parts.own
    return "mean of A and C", f"{parts.own:.2f}", parts.own


def _quantised(one: _Compared) -> _Reason:
    if one.before.ndim != 2:
        return None
    # Files of some families contain transposed matrices.
    for of, is_turned in (("", False), (" of the transposed matrix", True)):
        before, after = (
            own.mT if is_turned else own for own in (one.before, one.after)
        )
        grid = on_grid(before, after, one.stored)
        if grid is not None:
            size = relative_change(one.before, one.after)
            return "quantised", f"lies on {grid}{of}", size
    return None


def _merged(one: _Compared) -> _Reason:
    change = low_rank(one.before, one.after, one.stored)
    return None if change is None else ("merged LoRA", "", float(change.rank))


_EXPLANATIONS: tuple[Callable[[_Compared], _Reason], ...] = (
    *(
        _resized,
        _tiled,
        _transposed,
        _rotary_layout,
        _without_one,
        _packed,
        _rounded,
        _few,
        _zeros,
        _scaled,
    ),
    *(_mixed, _quantised, _merged),
)


def _groups(explained: Sequence[_Explained]) -> Iterator[list[_Explained]]:
    """Yield the tensors of one kind and one detail; quantisers treat widths in several ways."""
    found: dict[tuple[str, str], list[_Explained]] = {}
    for one in explained:
        detail = "" if one.kind == "quantised" else one.detail
        found.setdefault((one.kind, detail), []).append(one)
    yield from found.values()


_PRUNED_AS = {
    "": "",
    "2 of 4": ", two of each four",
    "rows": ", whole rows",
    "columns": ", whole columns",
}


def _change(group: Sequence[_Explained], found: Difference) -> Change:
    """Put the tensors of one explanation into words."""
    first = group[0]
    names = [one.name for one in group]
    where = names_in_words(names)
    figures = [one.figure for one in group]
    heads: dict[str, tuple[float, float]] = {}
    # Sentences begin with the evidence; the count of tensors follows.
    match first.kind:
        case "rounded":
            said = f"B is A rounded to {first.detail}"
        case "quantised":
            details = Counter(one.detail for one in group)
            ways = " or ".join(detail for detail, _ in details.most_common(_MOST_WAYS))
            said = f"B {ways}, {_range_of(figures)} away from A"
        case "few entries":
            count = int(sum(figures))
            said = f"{count:,} {'entry differs' if count == 1 else 'entries differ'}, all others are A's"
        case "scaled":
            said = f"tensors of B are {first.detail} times A's"
        case "pruned":
            share = f"{100 * median(figures):.3g} % of the entries"
            said = f"{share} are zero in B and not in A{_PRUNED_AS[first.detail]}; all others are A's"
        case "mean of A and C":
            is_even = abs(first.figure - 0.5) < 0.01
            said = (
                "B is (A + C) / 2"
                if is_even
                else f"B is {first.detail} A + {1 - first.figure:.2f} C"
            )
        case "combination of A and C":
            said = f"B is a multiple of A plus a multiple of C, by tensor: {_range_of(figures)} A"
        case "merged LoRA":
            ranks = sorted({int(rank) for rank in figures})
            of = (
                f"rank {ranks[0]}"
                if len(ranks) == 1
                else f"ranks {ranks[0]}–{ranks[-1]}"
            )
            said = f"ΔW has {of}"
            heads = _effects(found)
        case "rotary layout":
            said = f"rows of each head are permuted, {first.detail}, which the configuration does not say"
        case "key-value heads tiled":
            said = f"{first.detail} as 0 1 0 1, where 0 0 1 1 repeats them"
        case "gain without its 1":
            said = f"gains are {first.detail}: one side stores w, and the other 1 + w"
        case "transposed":
            said = "square matrices of B are A's transposed"
        case _:
            said = first.detail
    return Change(first.kind, f"{said} ({_counted(group)})", where, heads)


def _counted(group: Sequence[_Explained]) -> str:
    count = len({one.name for one in group})
    return "1 tensor" if count == 1 else f"{count} tensors"


def _range_of(figures: Sequence[float]) -> str:
    low, high = f"{min(figures):.2g}", f"{max(figures):.2g}"
    return low if low == high else f"{low}–{high}"


def _effects(found: Difference) -> dict[str, tuple[float, float]]:
    """Return the relative changes of W_QK and W_OV of all changed heads."""
    effects: dict[str, tuple[float, float]] = {}
    for part in found.parts:
        for head in part.heads:
            if head.qk or head.ov:
                effects[f"{part.layer}.{head.head}"] = head.qk or 0.0, head.ov or 0.0
    return effects


# Kinds found from whole models.


def _configuration(pair: Pair, found: Iterable[SettingDifference]) -> list[Change]:
    """Return the change of the configuration, if fields that differ change the computation."""
    found = [*found]
    heads = [one for one in found if one.name.rpartition(".")[2] in _HEADS]
    learned = _learned(pair) if found else ()
    settings = [
        one
        for one in found
        if one not in heads
        and one.name not in _OF_LAYERS
        and not one.name.replace(".", "_").endswith(learned)
    ]
    changes = []
    if heads:
        one = _head_in_words({own.name: own.a for own in heads})
        other = _head_in_words({own.name: own.b for own in heads})
        said = f"A has {one}, and B {other}"
        changes = [Change("another head", said, tuple(own.name for own in heads))]
    if not settings:
        return changes
    stated = [*_stated(pair.a.record, pair.b.record, _fields_read(pair.a))]
    sentences = stated or [
        f"{one.name} is {one.a} in A and {one.b} in B" for one in settings
    ]
    where = tuple(one.name for one in settings)
    return [Change("another configuration", "; ".join(sentences), where), *changes]


def _learned(pair: Pair) -> tuple[str, ...]:
    """Return the ends of the names of settings for stored tensors, such as "_bias_table"."""
    found = dict.fromkeys(_LEARNED)
    for side in pair:
        for place in side.places:
            semantics = side.source.outline(side.site(place)).weights.semantics
            found |= dict.fromkeys(f"_{name}" for name in semantics.learned())
    return tuple(found)


def _head_in_words(values: Mapping[str, str]) -> str:
    """Return words for the head of a model, by the values of the settings "head" and "task"."""
    there = (
        name.rpartition(".")[2] for name, value in values.items() if value != "absent"
    )
    return next((_HEADS[name] for name in there), "none")


def _fields_read(side: Side) -> frozenset[str] | None:
    """Return the fields of the configuration that the family of a checkpoint reads; None for a module."""
    if isinstance(side, CheckpointSide | ReadSide):
        return side.checkpoint.fields_read
    return None


def _stated(
    a: Mapping[str, Any],
    b: Mapping[str, Any],
    read: frozenset[str] | None,
    within: str = "",
) -> Iterator[str]:
    """Yield the fields of two configurations of one family that differ and are read."""
    if a.get("model_type") != b.get("model_type"):
        return
    for name in dict.fromkeys((*a, *b)):
        old = a.get(name)
        new = b.get(name)
        path = f"{within}{name}"
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            yield from _stated(old, new, read, f"{path}.")
        elif old != new and name not in OF_NO_EFFECT and _is_read(path, read):
            yield f"{path} is {_value(a, name)} in A and {_value(b, name)} in B"


def _is_read(path: str, read: frozenset[str] | None) -> bool:
    """Return True if a field, a field within it, or the record around it is read."""
    if read is None:
        return True
    parts = path.split(".")
    around = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return bool(around & read) or any(of.startswith(f"{path}.") for of in read)


def _value(record: Mapping[str, Any], name: str) -> str:
    return shortened(str(record[name]), 40) if name in record else "absent"


def _moved_layers(pair: Pair) -> list[Change]:
    """Return the change if every layer of B equals a layer of A, in another order or number."""
    changes = list[Change]()
    if not pair.a.stacks or pair.a.stacks.keys() - pair.b.stacks.keys():
        return []
    kind = _coarser(pair)
    for stack, made in pair.a.stacks.items():
        blocks = range(len(made.blocks))
        blocks_after = range(len(pair.b.stacks[stack].blocks))
        old = [
            _fingerprint(pair.a, AttentionPlace(stack, number), kind)
            for number in blocks
        ]
        new = [
            _fingerprint(pair.b, AttentionPlace(stack, number), kind)
            for number in blocks_after
        ]
        if old == new:
            continue
        came_from = list[int]()
        for number, own in enumerate(new):
            alike = [place for place, other in enumerate(old) if other == own]
            # The layer of the same number is preferred among equal layers of A.
            places = sorted(alike, key=lambda place: (place != number, place))
            source = next(
                (
                    place
                    for place in places
                    if _same_block(pair, stack, (place, number), kind)
                ),
                None,
            )
            if source is None:
                return []
            came_from.append(source)
        if came_from == [*blocks]:
            continue
        changes.append(_moves(came_from, len(blocks), pair.a.prefix(stack)))
    return changes


def _fingerprint(side: Side, place: AttentionPlace, kind: torch.dtype) -> str:
    """Return a hash of one tensor of a block, rounded to a dtype."""
    name, tensor = next(side.matrices(place))
    return f"{name.split('.')[-2]} {tensor_hash(tensor.to(kind))}"


def _coarser(pair: Pair) -> torch.dtype:
    """Return the coarser of the dtypes that attention has in both models."""
    kinds = []
    for side in pair:
        _, tensor = next(side.matrices(side.places[0]))
        kinds.append(tensor.dtype)
    return min(kinds, key=lambda kind: (torch.finfo(kind).bits, -torch.finfo(kind).eps))


def _same_block(
    pair: Pair, stack: str, blocks: tuple[int, int], kind: torch.dtype
) -> bool:
    """Return True if a block of B equals a block of A, both rounded to a dtype."""
    old = dict(_block_tensors(pair.a, stack, blocks[0]))
    new = dict(_block_tensors(pair.b, stack, blocks[1]))
    return old.keys() == new.keys() and all(
        torch.equal(tensor.to(kind), new[name].to(kind)) for name, tensor in old.items()
    )


def _block_tensors(side: Side, stack: str, block: int) -> Iterator[tuple[str, Tensor]]:
    at = f"{stack}." if len(side.stacks) > 1 else ""
    start = f"{at}blocks.{block}."
    for place in side.places:
        if place.stack == stack and place.block == block:
            for name, tensor in side.matrices(place):
                yield name.removeprefix(start), tensor
    for name in side.names:
        if name.startswith(start):
            yield name.removeprefix(start), side.read(name)


def _moves(came_from: Sequence[int], count: int, prefix: str) -> Change:
    """Return the change for the block of A behind each block of B."""
    dropped = [block for block in range(count) if block not in came_from]
    repeated = sorted({block for block in came_from if came_from.count(block) > 1})
    # A repeated layer is not out of order.
    is_ordered = all(one <= other for one, other in pairwise(came_from))
    if repeated:
        kind, said = (
            "layers repeated",
            f"in B more than once: A's layers {_ranges(repeated)}",
        )
    elif dropped:
        kind, said = "layers dropped", f"not in B: A's layers {_ranges(dropped)}"
    else:
        kind, said = "layers reordered", "every layer of A is in B once"
    if repeated and dropped:
        said += f"; not in B: {_ranges(dropped)}"
    if not is_ordered:
        said += ", in another order"
    mapped = ", ".join(map(str, came_from))
    where = tuple(f"{prefix}{block}" for block in (repeated or dropped))
    return Change(
        kind,
        f"{said}; B's layers are A's {prefix.rstrip('.')} {mapped}".replace("  ", " "),
        where,
    )


def _stale_shard(pair: Pair) -> list[Change]:
    """Return the change if the differing tensors are exactly the tensors of one file."""
    one, other = pair.a.stored, pair.b.stored
    if one is None or other is None or one.infos.keys() != other.infos.keys():
        return []
    for side, stored in (("B", other), ("A", one)):
        files: dict[str, set[str]] = {}
        for name in stored.infos:
            files.setdefault(stored.where(name), set()).add(name)
        if len(files) < 2:
            continue
        # Training of the last layers can fill a file as well.
        different = {
            name for name in stored.infos if not _same_stored(one, other, name)
        }
        for file, names in files.items():
            # Constants, such as biases of zeros, are equal in every file.
            equal = names - different
            is_whole = (
                different
                and different <= names
                and all(_is_constant(stored.read(name)) for name in equal)
            )
            if is_whole and not _is_end(names, {*stored.infos}):
                said = f"all {len(different)} tensors of one file of {side} differ, and no others"
                return [Change("stale shard", said, (Path(file).name,))]
    return []


def _is_constant(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or bool((tensor == tensor.flatten()[0]).all())


def _same_stored(one: Tensors, other: Tensors, name: str) -> bool:
    if one.infos[name].shape != other.infos[name].shape:
        return False
    return _same(one.read(name), other.read(name))


def _is_end(names: set[str], all_names: set[str]) -> bool:
    """Return True if tensors are whole layers up to the last: training from a layer on explains them, too."""
    layers = {
        name: int(found[1])
        for name in all_names
        if (found := re.search(r"\.(\d+)\.", name))
    }
    inside = [layers[name] for name in names if name in layers]
    outside = [layers[name] for name in all_names - names if name in layers]
    return bool(inside) and (not outside or max(outside) < min(inside))


def _training(unexplained: Sequence[_Explained], equal: Sequence[str]) -> list[Change]:
    """Return training as the kind of the unexplained changes, if they are small."""
    # Biases and shifts may be near 0 before training, and their change is large then: maps decide.
    judged = [one for one in unexplained if not one.is_vector] or unexplained
    if any(one.figure > _NEAR for one in judged if one.entries >= _FEWEST_ENTRIES):
        return []
    if sum(one.entries for one in unexplained) < _FEWEST_ENTRIES:
        return []
    sizes = [one.figure for one in judged if one.figure < float("inf")]
    # Tensors outside blocks, such as tables and the last norm, count for no layer.
    changed = {block for one in unexplained if (block := _block_of(one.name))}
    same = {block for name in equal if (block := _block_of(name))} - changed
    size = f"relative changes of {_range_of(sizes)} ({_counted(unexplained)})"
    where = names_in_words([one.name for one in unexplained])
    if not changed or not same:
        return [Change("fine-tuned", size, where)]
    first = min(changed)
    before = [block for block in same if block[0] == first[0]]
    is_last = all(block < first for block in before)
    if before and is_last and len({stack for stack, _ in changed}) == 1:
        name = f"{first[0]}.{first[1]}" if first[0] else str(first[1])
        said = f"layers before {name} are equal; {size}"
        return [Change("fine-tuned from a layer on", said, where)]
    stacks: dict[str, list[int]] = {}
    for stack, number in sorted(changed):
        stacks.setdefault(stack, []).append(number)
    layers = ", ".join(
        f"{stack} {_ranges(numbers)}".strip() for stack, numbers in stacks.items()
    )
    return [Change("fine-tuned in some layers", f"layers {layers}; {size}", where)]


def _block_of(name: str) -> tuple[str, int] | None:
    found = _BLOCK.match(name)
    return None if found is None else (found[1] or "", int(found[2]))


def names_in_words(names: Sequence[str]) -> tuple[str, ...]:
    """Return names of tensors or settings, with blocks put together: "blocks.0–5: feed_forward.inner"."""
    numbers: dict[tuple[str, str], list[int]] = {}
    short = list[str]()
    for name in names:
        name = name.removesuffix(".weight")
        if (found := _BLOCK.match(name)) is None:
            short.append(name)
        else:
            numbers.setdefault(
                (name[: found.start(2)], name[found.end() :]), []
            ).append(int(found[2]))
    parts: dict[str, list[str]] = {}
    for (start, part), blocks in numbers.items():
        parts.setdefault(f"{start}{_ranges(sorted({*blocks}))}", []).append(part)
    return (
        *(f"{blocks}: {', '.join(own)}" for blocks, own in parts.items()),
        *dict.fromkeys(short),
    )


def _ranges(numbers: Sequence[int]) -> str:
    """Format ascending integers: "0–3, 7"."""
    parts = list[list[int]]()
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(
        str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts
    )
