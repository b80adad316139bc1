"""The tensors of an attention layer and the names that ours have there, as one invertible map.

Nothing is computed: `write` of what `read` gave is what was stored, to the bit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from triptych.checkpoints.layer import MapSizes, Place
from triptych.checkpoints.specs import FusedLayout
from triptych.errors import DataError
from triptych.storage.tensors import Tensors

_SIDES = ("q", "k", "v")

Shape = tuple[int | None, ...]
Parts = Sequence[Tensor]
# Gives the stored tensor of a name; the shape it must have, None for a size that is free.
Take = Callable[[str, Shape | None], Tensor]
_QUARTERS = 4  # CodeGen's rows are as four processors held them


class TensorMap(ABC):
    """One step from stored tensors to ours (`read`), and back (`write`)."""

    @abstractmethod
    def read(self, parts: Parts) -> Parts: ...

    @abstractmethod
    def write(self, parts: Parts) -> Parts: ...


@final
@dataclass(frozen=True)
class Named:
    """Some of our tensors by the names of the stored ones that they come from."""

    names: tuple[str, ...]  # of the stored ones
    shape: Shape | None = None  # that each of them must have
    steps: tuple[TensorMap, ...] = ()  # from them to ours

    def then(self, *steps: TensorMap) -> "Named":
        """The same with more steps."""
        return Named(self.names, self.shape, (*self.steps, *steps))

    def read(self, take: Take) -> Parts:
        """Ours."""
        parts: Parts = [take(name, self.shape) for name in self.names]
        for step in self.steps:
            parts = step.read(parts)
        return parts

    def write(self, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        """The stored ones."""
        for step in reversed(self.steps):
            parts = step.write(parts)
        return zip(self.names, parts, strict=True)


@final
class StackRows(TensorMap):
    """Tensors of one shape as the rows of one."""

    def read(self, parts: Parts) -> Parts:
        return [torch.stack([*parts])]

    def write(self, parts: Parts) -> Parts:
        return parts[0].unbind()


@final
class Transposed(TensorMap):
    """`[in, out]` as `[out, in]`."""

    def read(self, parts: Parts) -> Parts:
        return [part.mT.contiguous() for part in parts]

    def write(self, parts: Parts) -> Parts:
        return [part.mT for part in parts]


@final
class OnlyRow(TensorMap):
    """The one row of a matrix as a vector."""

    def read(self, parts: Parts) -> Parts:
        return [part[0] for part in parts]

    def write(self, parts: Parts) -> Parts:
        return [part[None] for part in parts]


@final
@dataclass(frozen=True)
class Halves(TensorMap):
    """One tensor as two of the same size, one after the other along a dimension."""

    dim: int

    def read(self, parts: Parts) -> Parts:
        return parts[0].chunk(2, self.dim)

    def write(self, parts: Parts) -> Parts:
        return [torch.cat([*parts], self.dim)]


@final
@dataclass(frozen=True)
class Alternating(TensorMap):
    """One tensor as two of the same size, in turns along a dimension."""

    dim: int

    def read(self, parts: Parts) -> Parts:
        return [part.contiguous() for part in parts[0].unflatten(self.dim, (-1, 2)).unbind(self.dim + 1)]  # type: ignore[no-untyped-call]

    def write(self, parts: Parts) -> Parts:
        return [torch.stack([*parts], self.dim + 1).flatten(self.dim, self.dim + 1)]


@final
@dataclass(frozen=True)
class Split(TensorMap):
    """The rows of one tensor as rows of queries, of keys and of values, in the order of a layout."""

    layout: FusedLayout
    sizes: MapSizes

    def read(self, parts: Parts) -> Parts:
        heads, groups, width, value_width, *_ = self.sizes
        rows = (heads * width, groups * width, groups * value_width)
        match self.layout:
            case "q k v":
                return parts[0].split([*rows])  # type: ignore[no-untyped-call, no-any-return]
            case "by group":
                return _from_blocks(parts[0], groups, *rows)
            case "q v k in four parts":
                if heads % _QUARTERS or groups % _QUARTERS:
                    raise DataError(f"{heads} heads cannot lie in {_QUARTERS} parts")
                q, v, k = _from_blocks(parts[0], _QUARTERS, rows[0], rows[2], rows[1])
                return q, k, v

    def write(self, parts: Parts) -> Parts:
        q, k, v = parts
        match self.layout:
            case "q k v":
                return [torch.cat([q, k, v])]
            case "by group":
                return [_in_blocks(self.sizes.groups, q, k, v)]
            case "q v k in four parts":
                return [_in_blocks(_QUARTERS, q, v, k)]


def _from_blocks(rows: Tensor, blocks: int, *counts: int) -> Parts:
    of_blocks = rows.reshape(blocks, sum(counts) // blocks, *rows.shape[1:])
    split = torch.split(of_blocks, [count // blocks for count in counts], dim=1)
    return [part.flatten(0, 1) for part in split]


def _in_blocks(blocks: int, *parts: Tensor) -> Tensor:
    return torch.cat([part.reshape(blocks, -1, *part.shape[1:]) for part in parts], dim=1).flatten(0, 1)


@final
@dataclass(frozen=True)
class QueriesAndGates(TensorMap):
    """The rows of one tensor, head by head queries and then gates, as all queries and all gates."""

    heads: int

    def read(self, parts: Parts) -> Parts:
        half = parts[0].shape[0] // 2
        return _from_blocks(parts[0], self.heads, half, half)

    def write(self, parts: Parts) -> Parts:
        return [_in_blocks(self.heads, *parts)]


@final
class SplitHeads(TensorMap):
    """`[copies · width, d_in]` as `[copies, d_in, width]`, `[copies · width]` as `[copies, width]`."""

    def __init__(self, *copies: int) -> None:
        self.copies = copies

    def read(self, parts: Parts) -> Parts:
        split = (part.unflatten(0, (n, -1)) for n, part in zip(self.copies, parts, strict=True))  # type: ignore[no-untyped-call]
        return [part.transpose(1, -1) for part in split]

    def write(self, parts: Parts) -> Parts:
        return [part.transpose(1, -1).flatten(0, 1) for part in parts]


@final
@dataclass(frozen=True)
class HeadColumns(TensorMap):
    """`[d_out, heads · width]` as `[heads, width, d_out]`."""

    heads: int

    def read(self, parts: Parts) -> Parts:
        return [part.mT.reshape(self.heads, -1, part.shape[0]) for part in parts]

    def write(self, parts: Parts) -> Parts:
        return [part.flatten(0, 1).mT for part in parts]


@final
@dataclass(frozen=True)
class LayerMap:
    """Between a layer's tensors in the file and ours, by name.

    Ours are
        q, k, v         no v where keys are values; `[copies, d_in, width]`, with q.bias, … `[copies, width]`
        o               `[heads, width, d_out]`, with o.bias `[d_out]`
        norm            gain of the norm that is read, norm.bias its shift; likewise q_norm, k_norm of heads
        sinks           `[heads]`
        gate            of each channel, `[heads, d_in, width]`, with gate.bias `[heads, width]`
        q_down, q_gain, q_up, kv_down, kv_gain, kv_up    through a latent, `[out, in]`, instead of q, k and v
    """

    entries: Mapping[tuple[str, ...], Named]  # which of ours come from which stored ones

    @property
    def names(self) -> set[str]:
        """The stored tensors."""
        return {name for stored in self.entries.values() for name in stored.names}

    @property
    def parts(self) -> set[str]:
        """Our tensors."""
        return {part for parts in self.entries for part in parts}

    def read(self, take: Take) -> dict[str, Tensor]:
        """Ours, from the stored ones."""
        read = ((parts, stored.read(take)) for parts, stored in self.entries.items())
        return {part: tensor for parts, tensors in read for part, tensor in zip(parts, tensors, strict=True)}

    def write(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The stored ones with their names, one after the other: a layer may be large.

        Stored tensors of which nothing is given are left out.
        """
        for parts, stored in self.entries.items():
            if parts[0] in ours:
                yield from stored.write([ours[part] for part in parts])


def layer_map(place: Place, tensors: Tensors, sizes: MapSizes | None = None) -> LayerMap:
    """How a layer is written."""
    sizes = place.sizes if sizes is None else sizes
    spec = place.spec
    read = _latent if spec.latent else _joined if spec.qkv else _apart
    entries = dict(read(place, tensors, sizes))
    o = dict(module_map(place, tensors, "o", spec.o, (None, sizes.heads * sizes.value_width)))
    entries |= {
        (part,): stored.then(HeadColumns(sizes.heads)) if part == "o" else stored
        for part, stored in o.items()
    }
    if spec.sinks:
        entries[("sinks",)] = Named((place.within(spec.sinks),), (sizes.heads,))
    return LayerMap({**entries, **dict(_norms(place, tensors, sizes))})


_Entries = Iterator[tuple[tuple[str, ...], Named]]


def _rows(sizes: MapSizes) -> tuple[tuple[str, int, int], ...]:
    """Rows and copies of the maps of queries, keys and values."""
    heads, groups, width, value_width, *_ = sizes
    return (
        ("q", heads * width, heads),
        ("k", groups * width, groups),
        ("v", groups * value_width, groups),
    )


def _apart(place: Place, tensors: Tensors, sizes: MapSizes) -> _Entries:
    spec = place.spec
    modules = (spec.q, spec.k) if place.holds(spec.key_value) else (spec.q, spec.k, spec.v)
    for module, (side, rows, copies) in zip(modules, _rows(sizes), strict=False):
        gated = spec.gated_queries and side == "q"
        for part, stored in module_map(place, tensors, side, module, (2 * rows if gated else rows, None)):
            if gated:
                parts = (part, part.replace("q", "gate"))
                yield parts, stored.then(QueriesAndGates(copies), SplitHeads(copies, copies))
            else:
                yield (part,), stored.then(SplitHeads(copies))


def _joined(place: Place, tensors: Tensors, sizes: MapSizes) -> _Entries:
    spec, sides = place.spec, _rows(sizes)
    split = Split(spec.layout, sizes), SplitHeads(*(copies for _, _, copies in sides))
    for part, stored in module_map(place, tensors, "", spec.qkv, (sum(rows for _, rows, _ in sides), None)):
        if not part or not (spec.q_bias or spec.v_bias):
            yield tuple(f"{side}{part}" for side in _SIDES), stored.then(*split)
    for name, (side, rows, copies) in zip((spec.q_bias, "", spec.v_bias), sides, strict=True):
        if name:
            yield (f"{side}.bias",), Named((place.within(name),), (rows,), (SplitHeads(copies),))


def _latent(place: Place, tensors: Tensors, sizes: MapSizes) -> _Entries:
    latent, (heads, _, width, value_width, rank, q_rank) = place.spec.latent, sizes
    assert latent is not None
    assert rank is not None
    turned = place.count(latent.turned)
    maps: dict[str, tuple[str, Shape]] = {
        "kv_down": (latent.kv_down, (rank + turned, None)),
        "kv_up": (latent.kv_up, (heads * (width - turned + value_width), rank)),
    }
    gains = {"kv_gain": (latent.kv_norm, rank)}
    if q_rank is None:
        maps["q_up"] = place.spec.q, (heads * width, None)
    else:
        maps |= {"q_down": (latent.q_down, (q_rank, None)), "q_up": (latent.q_up, (heads * width, q_rank))}
        gains["q_gain"] = latent.q_norm, q_rank
    for side, (module, shape) in maps.items():
        yield from (((part,), stored) for part, stored in module_map(place, tensors, side, module, shape))
    for side, (module, width) in gains.items():
        yield (side,), Named((place.within(f"{module}.weight"),), (width,))


def _norms(place: Place, tensors: Tensors, sizes: MapSizes) -> _Entries:
    if place.norm_module:
        gain, shift = norm_tensors(tensors, place.norm_module)
        yield ("norm",), Named((gain,), (None,))
        if shift in tensors.infos:
            yield ("norm.bias",), Named((shift,))
    norm = place.head_norm
    if norm is None or (norm.turned and place.position.kind != "rotary"):
        return
    for part, module, heads in (("q_norm", norm.q, sizes.heads), ("k_norm", norm.k, sizes.groups)):
        for stored, kind in ((part, "weight"), (f"{part}.bias", "bias")) if module else ():
            names = _of_heads(f"{place.within(module)}.{kind}", heads, tensors)
            first = tensors.infos.get(names[0])
            if kind == "weight" or first is not None:
                each = Named(names, None if first is None else tuple(first.shape))
                yield (stored,), each.then(StackRows()) if "{head}" in module else each


def _of_heads(name: str, heads: int, tensors: Tensors) -> tuple[str, ...]:
    """The name for each head, up to the first that is not there: a configuration may say any number."""
    if "{head}" not in name:
        return (name,)
    names = []
    for head in range(heads):
        names.append(name.format(head=head))
        if names[-1] not in tensors.infos:
            break
    return tuple(names)


def module_map(
    place: Place, tensors: Tensors, part: str, module: str, shape: Shape
) -> Iterator[tuple[str, Named]]:
    """A weight as `[out, in]`, by the name of a part of ours, and its bias if it has one."""
    weight, bias = tensor_names(place.within(module))
    stored = Named((weight,), shape)
    yield part, Named((weight,), shape[::-1], (Transposed(),)) if place.spec.transposed else stored
    if bias in tensors.infos:
        yield f"{part}.bias", Named((bias,), shape[:1])


def tensor_names(module: str) -> tuple[str, str]:
    """Names of weight and bias of a map."""
    if "*" in module:
        return module.replace("*", "weight"), module.replace("*", "bias")
    return f"{module}.weight", f"{module}.bias"


def norm_tensors(tensors: Tensors, module: str) -> tuple[str, str]:
    """Names of gain and shift of a norm, as the file has them: files from TensorFlow say gamma and beta."""
    if f"{module}.weight" not in tensors.infos and f"{module}.gamma" in tensors.infos:
        return f"{module}.gamma", f"{module}.beta"
    return f"{module}.weight", f"{module}.bias"
