"""Norms of a checkpoint that maps outside its attention read, and which maps those are.

Families say it (`other_norms`). The other tensors next to these maps must be known as well, so that no
reader of a norm is forgotten.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from torch import Tensor

from triptych.core.algebra.weights import Norm
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.layer_map import norm_tensors
from triptych.core.checkpoints.model_parts import above
from triptych.core.checkpoints.specs import NormSpec, OtherNormSpec
from triptych.core.checkpoints.stored_layers import Place, Site
from triptych.core.storage.tensors import Tensors


@final
@dataclass(frozen=True)
class NormReader:
    """A linear map that reads a norm, or several of one shape side by side."""

    module: str  # its name
    weight: str  # the name of its tensor, `[out, in]`, or `[maps, out, in]`
    bias: str  # of that of its bias; "" if it has none
    transposed: bool  # whether the weight is stored `[in, out]`

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.weight, self.bias) if self.bias else (self.weight,)

    def read(self, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """Weight `[…, out, in]` and bias `[…, out]`, as stored; a transposed one is a view."""
        weight = tensors.read(self.weight)
        return self.turned(weight), (tensors.read(self.bias) if self.bias else None)

    def turned(self, weight: Tensor) -> Tensor:
        """A weight `[…, out, in]` as its file has it, or back."""
        return weight.mT if self.transposed else weight


@final
@dataclass(frozen=True)
class NormSite:
    """A norm with the maps outside the attention that read it."""

    module: str  # its name
    layers: tuple[int, ...]  # numbers of the layers of its stack that have it; none for one after all layers
    own_tensors: tuple[str, str]  # names of gain and shift; the shift need not be there
    spec: NormSpec
    readers: tuple[NormReader, ...]
    attention: Site | None = None  # the attention layer that reads it as well; None if none does
    # why it cannot be folded into them, as far as names and configuration tell; "" if it can
    refused: str = ""

    def read(self, tensors: Tensors) -> Norm:
        gain, shift = self.own_tensors
        return Norm(
            tensors.read(gain),
            tensors.read(shift) if shift in tensors.infos else None,
            self.spec.offset,
            centred=self.spec.kind == "layer",
        )

    @property
    def all_tensors(self) -> tuple[str, ...]:
        return (*self.own_tensors, *(name for reader in self.readers for name in reader.tensors))


def norm_sites(checkpoint: Checkpoint) -> tuple[NormSite, ...]:
    """Every norm that maps outside the attention read, as the family says it; norms of layers first."""
    attention: dict[str, Site] = {}
    for site in checkpoint.sites:
        place = checkpoint.place(site)
        if place.norm_module:
            attention.setdefault(place.norm_module, site)
    found: dict[str, NormSite] = {}
    taken = {name for site in checkpoint.sites for name in checkpoint.read_names(site)}
    for site in checkpoint.sites:
        place = checkpoint.place(site)
        for other in place.spec.other_norms:
            if place.holds(other.when) and (spec := place.first(other.norm)):
                module = place.beside(spec.at)
                if module not in found:
                    readers, refused = _readers(checkpoint, place, other, spec)
                    tensors = {name for reader in readers for name in reader.tensors}
                    if twice := sorted(tensors & taken):
                        readers = ()
                        refused = f"{twice[0]} belongs to attention, or reads another norm as well"
                    taken |= tensors
                    layers = site.numbers if "{layer}" in spec.at else ()
                    own = norm_tensors(checkpoint.tensors, module)
                    found[module] = NormSite(
                        module, layers, own, spec, readers, attention.get(module), refused
                    )
    return tuple(sorted(found.values(), key=lambda norm: not norm.layers))


def _readers(
    checkpoint: Checkpoint, place: Place, other: OtherNormSpec, spec: NormSpec
) -> tuple[tuple[NormReader, ...], str]:
    """The maps that read a norm, or why there is nothing to fold it into."""
    if spec.place != "pre":
        return (), ""  # its place is reason enough
    if (also := place.first(other.also_read_by)) is not None:
        return (), f"it is read by {also.value}, which would miss its gain"
    module = place.beside(spec.at)
    gain, _ = norm_tensors(checkpoint.tensors, module)
    if gain not in checkpoint.tensors.infos:
        return (), f"there is no tensor {gain}, its gain"
    if other.output_map:
        return _output_map(checkpoint, place, other)
    return _readers_within(checkpoint.tensors, place.beside(other.within), other)


def _readers_within(
    tensors: Tensors, module: str, other: OtherNormSpec
) -> tuple[tuple[NormReader, ...], str]:
    below = [name.removeprefix(f"{module}.") for name in tensors.below(module)]
    readers = tuple(_maps(below, module, other))
    read = {name.removeprefix(f"{module}.") for reader in readers for name in reader.tensors}
    strange = [name for name in below if name not in read and not _matches(name, other.rest)]
    if strange:
        return (), f"it is not known whether {module}.{strange[0]} reads it"
    if not readers:
        return (), f"there is no map {' or '.join(other.read_by)} in {module} that reads it"
    return readers, ""


def _maps(names: Sequence[str], module: str, other: OtherNormSpec) -> Iterator[NormReader]:
    for name in names:
        own = name.removesuffix(".weight")
        if _matches(own, other.read_by):
            bias = f"{own}.bias" if own != name else f"{own}_bias"
            yield NormReader(
                f"{module}.{own}",
                f"{module}.{name}",
                f"{module}.{bias}" if bias in names else "",
                _matches(own, other.transposed),
            )


def _output_map(
    checkpoint: Checkpoint, place: Place, other: OtherNormSpec
) -> tuple[tuple[NormReader, ...], str]:
    """The map to logits, if it has a tensor of its own and nothing else can read the norm."""
    records = (place.settings.record, checkpoint.settings.record)
    tied = [record["tie_word_embeddings"] for record in records if "tie_word_embeddings" in record]
    if any(tied) or not tied:
        return (), "the output map is the embedding (tie_word_embeddings), which would change with it"
    infos = checkpoint.tensors.infos
    module = above(place.prefix, other.output_map, checkpoint.tensors)
    if f"{module}.weight" not in infos:
        return (), f"there is no map {other.output_map} that reads it: others take what the model puts out"
    bias = f"{module}.bias"
    reader = NormReader(module, f"{module}.weight", bias if bias in infos else "", False)
    inside = _inside(checkpoint, place, other)
    strange = [
        name
        for name in infos
        if not name.startswith(inside) and name not in reader.tensors and not _matches(name, other.rest)
    ]
    if strange:
        return (), f"it is not known whether {strange[0]} reads it"
    return (reader,), ""


def _inside(checkpoint: Checkpoint, place: Place, other: OtherNormSpec) -> tuple[str, ...]:
    """The prefixes of the tensors before the output map, the last norm included."""
    if place.prefix:
        return (place.prefix,)
    names = [checkpoint.place(site).spec.at for site in checkpoint.sites] + [norm.at for norm in other.norm]
    return tuple({f"{name.partition('.')[0]}." for name in names})


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
