"""The tensors of an attention layer and the names that ours have there, as one invertible map."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from triptych.checkpoints.place import MapSizes, Place
from triptych.checkpoints.tensor_maps import (
    HeadColumns,
    Named,
    Shape,
    Split,
    SplitHeads,
    StackRows,
    Take,
    Transposed,
)
from triptych.storage.tensors import Tensors

_SIDES = ("q", "k", "v")


@final
@dataclass(frozen=True)
class LayerMap:
    """Between a layer's tensors in the file and ours, by name.

    Ours are
        q, k, v         `[copies, d_in, width]`, with q.bias, … `[copies, width]`
        o               `[heads, width, d_out]`, with o.bias `[d_out]`
        norm            gain of the norm that is read, norm.bias its shift; likewise q_norm, k_norm of heads
        sinks           `[heads]`
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
    heads, groups, width, value_width = sizes
    return (
        ("q", heads * width, heads),
        ("k", groups * width, groups),
        ("v", groups * value_width, groups),
    )


def _apart(place: Place, tensors: Tensors, sizes: MapSizes) -> _Entries:
    modules = (place.spec.q, place.spec.k, place.spec.v)
    for module, (side, rows, copies) in zip(modules, _rows(sizes), strict=True):
        for part, stored in module_map(place, tensors, side, module, (rows, None)):
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
    latent, (heads, _, width, value_width) = place.spec.latent, sizes
    assert latent is not None
    rank, turned = place.count(latent.rank), place.count(latent.turned)
    maps: dict[str, tuple[str, Shape]] = {
        "kv_down": (latent.kv_down, (rank + turned, None)),
        "kv_up": (latent.kv_up, (heads * (width - turned + value_width), rank)),
    }
    gains = {"kv_gain": (latent.kv_norm, rank)}
    if place.value(latent.q_rank) is None:
        maps["q_up"] = place.spec.q, (heads * width, None)
    else:
        q_rank = place.count(latent.q_rank)
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
