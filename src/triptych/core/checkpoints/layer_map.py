"""Invertible maps between the stored tensors of an attention layer and the tensors of this library.

The maps only split, stack, reorder and transpose: `write(read(stored))` equals the stored tensors to the bit.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import final

import torch
from torch import Tensor

from triptych.core.checkpoints.specs import FusedLayout
from triptych.core.checkpoints.stored_layers import MapSizes, Place
from triptych.core.storage.tensors import Tensors
from triptych.errors import DataError

_SIDES = ("q", "k", "v")

Shape = tuple[int | None, ...]
Parts = Sequence[Tensor]
# Returns the stored tensor of a name; the second argument is its required shape, with None for a free size.
Take = Callable[[str, Shape | None], Tensor]


@final
@dataclass(frozen=True)
class TensorMap:
    """One step from stored tensors to tensors of this library, and back."""

    read: Callable[[Parts], Parts]
    write: Callable[[Parts], Parts]

    @classmethod
    def of_each(
        cls, read: Callable[[Tensor], Tensor], write: Callable[[Tensor], Tensor]
    ) -> "TensorMap":
        return cls(
            lambda parts: [read(part) for part in parts],
            lambda parts: [write(part) for part in parts],
        )


@final
@dataclass(frozen=True)
class Named:
    """Names of stored tensors, and the steps that convert them."""

    names: tuple[str, ...]  # names of the stored tensors
    shape: Shape | None = (
        None  # required shape of each stored tensor; None for any shape
    )
    steps: tuple[
        TensorMap, ...
    ] = ()  # steps from stored tensors to tensors of this library

    def then(self, *steps: TensorMap) -> "Named":
        return Named(self.names, self.shape, (*self.steps, *steps))

    def read(self, take: Take) -> Parts:
        parts: Parts = [take(name, self.shape) for name in self.names]
        for step in self.steps:
            parts = step.read(parts)
        return parts

    def write(self, parts: Parts) -> Iterator[tuple[str, Tensor]]:
        for step in reversed(self.steps):
            parts = step.write(parts)
        return zip(self.names, parts, strict=True)


# Stacks tensors of one shape as rows.
STACK_ROWS = TensorMap(
    lambda parts: [torch.stack([*parts])], lambda parts: parts[0].unbind()
)
# Transposes `[in, out]` to `[out, in]`.
TRANSPOSED = TensorMap.of_each(lambda part: part.mT.contiguous(), lambda part: part.mT)
# Converts a matrix `[1, n]` to a vector `[n]`.
ONLY_ROW = TensorMap.of_each(lambda part: part[0], lambda part: part[None])


def halves(dim: int) -> TensorMap:
    """Return the map of a tensor to its two halves along a dimension."""
    return TensorMap(
        lambda parts: parts[0].chunk(2, dim), lambda parts: [torch.cat([*parts], dim)]
    )


def alternating(dim: int) -> TensorMap:
    """Return the map of a tensor to its even and odd entries along a dimension."""
    return TensorMap(
        lambda parts: [
            part.contiguous()
            for part in parts[0].unflatten(dim, (-1, 2)).unbind(dim + 1)  # type: ignore[no-untyped-call]
        ],
        lambda parts: [torch.stack([*parts], dim + 1).flatten(dim, dim + 1)],
    )


def split_rows(layout: FusedLayout, sizes: MapSizes) -> TensorMap:
    """Return the map of a fused tensor's rows to rows of queries, keys and values."""
    heads, groups, width, value_width, *_ = sizes
    # Every layout is a number of blocks of equal size, with a share of queries, keys and values in every
    # block.
    blocks = {"q k v": 1, "by group": groups, "q v k in four parts": 4}[layout]
    order = (
        (0, 2, 1) if layout == "q v k in four parts" else (0, 1, 2)
    )  # its own inverse
    counts = (heads * width, groups * width, groups * value_width)

    def read(parts: Parts) -> Parts:
        if heads % blocks or groups % blocks:
            raise DataError(f"{heads} heads cannot lie in {blocks} parts")
        found = _from_blocks(parts[0], blocks, *(counts[side] for side in order))
        return [found[side] for side in order]

    return TensorMap(
        read, lambda parts: [_to_blocks(blocks, *(parts[side] for side in order))]
    )


# Splits rows of equal blocks that contain a share of every part; returns the parts, collected from all
# blocks.
def _from_blocks(rows: Tensor, blocks: int, *counts: int) -> Parts:
    of_blocks = rows.reshape(blocks, sum(counts) // blocks, *rows.shape[1:])
    split = torch.split(of_blocks, [count // blocks for count in counts], dim=1)
    return [part.flatten(0, 1) for part in split]


def _to_blocks(blocks: int, *parts: Tensor) -> Tensor:  # the inverse of `_from_blocks`
    return torch.cat(
        [part.reshape(blocks, -1, *part.shape[1:]) for part in parts], dim=1
    ).flatten(0, 1)


def queries_and_gates(heads: int) -> TensorMap:
    """Return the map of rows `[heads · (queries, gates)]` to all queries and all gates."""
    return TensorMap(
        lambda parts: _from_blocks(parts[0], heads, *[parts[0].shape[0] // 2] * 2),
        lambda parts: [_to_blocks(heads, *parts)],
    )


def head_rows(*copies: int) -> TensorMap:
    """Return the map of weights to `[heads, d_in, width]`, and of biases to `[heads, width]`.

    `copies`: number of heads or key-value heads of each tensor, `[heads · width, d_in]` or a bias.
    """

    def read(parts: Parts) -> Parts:
        apart = (
            part.unflatten(0, (n, -1))  # type: ignore[no-untyped-call]
            for n, part in zip(copies, parts, strict=True)
        )
        return [part.transpose(1, -1) for part in apart]

    return TensorMap(
        read, lambda parts: [part.transpose(1, -1).flatten(0, 1) for part in parts]
    )


def head_columns(heads: int) -> TensorMap:
    """Return the map of `[d_out, heads · width]` to `[heads, width, d_out]`."""
    return TensorMap.of_each(
        lambda part: part.mT.reshape(heads, -1, part.shape[0]),
        lambda part: part.flatten(0, 1).mT,
    )


@final
@dataclass(frozen=True)
class LayerMap:
    """The map between a layer's stored tensors and the tensors of this library, by name.

    Tensors of this library:
        q, k, v         maps `[heads, d_in, width]`, and q.bias, … `[heads, width]`; no v if keys are values
        o               map `[heads, width, d_out]`, and o.bias `[d_out]`
        norm            gain of the input norm, and norm.bias, its shift
        q_norm, k_norm  gain of the norms of queries and keys, and q_norm.bias, k_norm.bias
        sinks           scores `[heads]`
        gate            map `[heads, d_in, width]` to a gate of each channel, and gate.bias `[heads, width]`
        q_down, q_gain, q_up, kv_down, kv_gain, kv_up    maps `[out, in]` and gains of latents, for q, k and v
    """

    entries: Mapping[
        tuple[str, ...], Named
    ]  # stored tensors, by names of tensors of this library

    @property
    def names(self) -> set[str]:  # names of stored tensors
        return {*chain.from_iterable(stored.names for stored in self.entries.values())}

    @property
    def parts(self) -> set[str]:  # names of this library's tensors
        return {*chain.from_iterable(self.entries)}

    def read(self, take: Take) -> dict[str, Tensor]:
        read = ((parts, stored.read(take)) for parts, stored in self.entries.items())
        return dict(
            chain.from_iterable(
                zip(parts, tensors, strict=True) for parts, tensors in read
            )
        )

    def write(self, ours: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values of stored tensors lazily, since a layer may be large.

        Stored tensors without a counterpart in `ours` are left out.
        """
        for parts, stored in self.entries.items():
            if parts[0] in ours:
                yield from stored.write([ours[part] for part in parts])


def layer_map(
    place: Place, tensors: Tensors, sizes: MapSizes | None = None
) -> LayerMap:
    """Return the map of a layer's tensors; `sizes` default to the sizes in the configuration."""
    sizes = place.sizes if sizes is None else sizes
    spec = place.spec
    read = _latent_maps if spec.latent else _fused_maps if spec.qkv else _separate_maps
    entries = dict(read(place, tensors, sizes))
    o = dict(
        module_map(place, tensors, "o", spec.o, (None, sizes.heads * sizes.value_width))
    )
    entries |= {
        (part,): stored.then(head_columns(sizes.heads)) if part == "o" else stored
        for part, stored in o.items()
    }
    if spec.sinks:
        entries[("sinks",)] = Named((place.within(spec.sinks),), (sizes.heads,))
    return LayerMap({**entries, **dict(_norms(place, tensors, sizes))})


_Entries = Iterator[tuple[tuple[str, ...], Named]]


def _map_sizes(sizes: MapSizes) -> tuple[tuple[str, int, int], ...]:
    """Return (name, number of rows, number of heads) of the maps of queries, keys and values."""
    heads, groups, width, value_width, *_ = sizes
    return (
        ("q", heads * width, heads),
        ("k", groups * width, groups),
        ("v", groups * value_width, groups),
    )


def _separate_maps(place: Place, tensors: Tensors, sizes: MapSizes) -> _Entries:
    spec = place.spec
    # Where keys are values, there is only the map of keys.
    modules = (
        (spec.q, spec.k) if place.holds(spec.key_value) else (spec.q, spec.k, spec.v)
    )
    for module, (side, rows, copies) in zip(modules, _map_sizes(sizes), strict=False):
        gated = spec.gated_queries and side == "q"
        for part, stored in module_map(
            place, tensors, side, module, (2 * rows if gated else rows, None)
        ):
            if gated:
                parts = (part, part.replace("q", "gate"))
                yield (
                    parts,
                    stored.then(queries_and_gates(copies), head_rows(copies, copies)),
                )
            else:
                yield (part,), stored.then(head_rows(copies))
    if spec.gate:
        rows = sizes.heads * sizes.value_width
        for part, stored in module_map(place, tensors, "gate", spec.gate, (rows, None)):
            yield (part,), stored.then(head_rows(sizes.heads))


def _fused_maps(place: Place, tensors: Tensors, sizes: MapSizes) -> _Entries:
    spec = place.spec
    sides = _map_sizes(sizes)
    steps = (
        split_rows(spec.layout, sizes),
        head_rows(*(copies for _, _, copies in sides)),
    )
    for part, stored in module_map(
        place, tensors, "", spec.qkv, (sum(rows for _, rows, _ in sides), None)
    ):
        if not part or not (spec.q_bias or spec.v_bias):
            yield tuple(f"{side}{part}" for side in _SIDES), stored.then(*steps)
    for name, (side, rows, copies) in zip(
        (spec.q_bias, "", spec.v_bias), sides, strict=True
    ):
        if name:
            yield (
                (f"{side}.bias",),
                Named((place.within(name),), (rows,), (head_rows(copies),)),
            )


def _latent_maps(place: Place, tensors: Tensors, sizes: MapSizes) -> _Entries:
    latent, (heads, _, width, value_width, rank, q_rank) = place.spec.latent, sizes
    assert latent is not None
    assert rank is not None
    turned = place.count(latent.turned)
    # The map down also makes the rotated key, shared by all heads; the map up makes each head's unrotated key
    # and value.
    maps: dict[str, tuple[str, Shape]] = {
        "kv_down": (latent.kv_down, (rank + turned, None)),
        "kv_up": (latent.kv_up, (heads * (width - turned + value_width), rank)),
    }
    gains = {"kv_gain": (latent.kv_norm, rank)}
    if q_rank is None:
        maps["q_up"] = place.spec.q, (heads * width, None)
    else:
        maps |= {
            "q_down": (latent.q_down, (q_rank, None)),
            "q_up": (latent.q_up, (heads * width, q_rank)),
        }
        gains["q_gain"] = latent.q_norm, q_rank
    for side, (module, shape) in maps.items():
        yield from (
            ((part,), stored)
            for part, stored in module_map(place, tensors, side, module, shape)
        )
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
        return  # norms after the rotation do not exist in layers without it
    for part, module, heads in (
        ("q_norm", norm.q, sizes.heads),
        ("k_norm", norm.k, sizes.groups),
    ):
        for stored, kind in (
            ((part, "weight"), (f"{part}.bias", "bias")) if module else ()
        ):
            names = _of_heads(f"{place.within(module)}.{kind}", heads, tensors)
            first = tensors.infos.get(names[0])
            if kind == "weight" or first is not None:
                each = Named(names, None if first is None else tuple(first.shape))
                yield (stored,), each.then(STACK_ROWS) if "{head}" in module else each


def _of_heads(name: str, heads: int, tensors: Tensors) -> tuple[str, ...]:
    """Return a name for each head, up to the first missing tensor: any number of heads may be stated."""
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
    """Yield a module's weight `[out, in]` as `part`, and its bias as `part.bias` if the file has a bias."""
    weight, bias = tensor_names(place.within(module))
    stored = Named((weight,), shape)
    yield (
        part,
        Named((weight,), shape[::-1], (TRANSPOSED,))
        if place.spec.transposed
        else stored,
    )
    if bias in tensors.infos:
        yield f"{part}.bias", Named((bias,), shape[:1])


def tensor_names(module: str) -> tuple[str, str]:
    if "*" in module:
        return module.replace("*", "weight"), module.replace("*", "bias")
    return f"{module}.weight", f"{module}.bias"


def norm_tensors(tensors: Tensors, module: str) -> tuple[str, str]:
    """Return the names of a norm's gain and shift; files converted from TensorFlow use gamma and beta."""
    if f"{module}.weight" not in tensors.infos and f"{module}.gamma" in tensors.infos:
        return f"{module}.gamma", f"{module}.beta"
    return f"{module}.weight", f"{module}.bias"
