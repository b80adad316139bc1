"""Norms of a checkpoint read by maps outside its attention, and these maps.

Families list them (`other_norms`). All further tensors next to these maps must be known as well, so that no
reader of a norm is overlooked.
"""

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
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
    """A linear map of a norm's output, or several stacked maps of one shape."""

    module: str  # name of the module
    weight: str  # name of the weight, `[out, in]` or `[maps, out, in]`
    bias: str  # name of the bias; "" without a bias
    transposed: bool  # true if the weight is stored `[in, out]`

    @property
    def tensors(self) -> tuple[str, ...]:
        return (self.weight, self.bias) if self.bias else (self.weight,)

    def read(self, tensors: Tensors) -> tuple[Tensor, Tensor | None]:
        """Read weight `[…, out, in]` and bias `[…, out]`; a transposed weight is a view."""
        weight = tensors.read(self.weight)
        return self.in_other_layout(weight), (
            tensors.read(self.bias) if self.bias else None
        )

    def in_other_layout(self, weight: Tensor) -> Tensor:
        """Convert a weight between `[…, out, in]` and its stored layout."""
        return weight.mT if self.transposed else weight


@final
@dataclass(frozen=True)
class NormSite:
    """A norm and its readers outside the attention."""

    module: str  # name of the module
    layers: tuple[
        int, ...
    ]  # numbers of the layers with this norm; empty for a norm after all layers
    own_tensors: tuple[str, str]  # names of gain and shift; the shift may be missing
    spec: NormSpec
    readers: tuple[NormReader, ...]
    attention: Site | None = None  # attention layer with the same norm, if any
    refused: str = ""  # reason against folding, judged by names and configuration; "" if it can be folded

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
        return (
            *self.own_tensors,
            *chain.from_iterable(reader.tensors for reader in self.readers),
        )


def norm_sites(checkpoint: Checkpoint) -> tuple[NormSite, ...]:
    """Return the norms read by maps outside the attention: first norms of layers, then final norms."""
    attention: dict[str, Site] = {}
    for site in checkpoint.sites:
        place = checkpoint.place(site)
        if place.norm_module:
            attention.setdefault(place.norm_module, site)
    found: dict[str, NormSite] = {}
    taken = {
        *chain.from_iterable(checkpoint.read_names(site) for site in checkpoint.sites)
    }
    for site in checkpoint.sites:
        place = checkpoint.place(site)
        for other in place.spec.other_norms:
            if place.holds(other.when) and (spec := place.first(other.norm)):
                module = place.beside(spec.at)
                if module not in found:
                    readers, refused = _readers(checkpoint, place, other, spec)
                    tensors = {
                        *chain.from_iterable(reader.tensors for reader in readers)
                    }
                    # Folding into a map with a second input norm, or into an attention map, would be wrong.
                    if twice := sorted(tensors & taken):
                        readers = ()
                        refused = f"{twice[0]} belongs to attention, or reads another norm as well"
                    taken |= tensors
                    layers = site.numbers if "{layer}" in spec.at else ()
                    own = norm_tensors(checkpoint.tensors, module)
                    found[module] = NormSite(
                        module,
                        layers,
                        own,
                        spec,
                        readers,
                        attention.get(module),
                        refused,
                    )
    return tuple(sorted(found.values(), key=lambda norm: not norm.layers))


def _readers(
    checkpoint: Checkpoint, place: Place, other: OtherNormSpec, spec: NormSpec
) -> tuple[tuple[NormReader, ...], str]:
    """Return the maps of a norm's output, and the reason against folding the norm into them."""
    if spec.place != "pre":
        return (), ""  # `spec.place` is the reason: only a pre-norm can be folded
    # Every reader must absorb the gain: refuse if a reader is not a map of the file.
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
    names = chain.from_iterable(reader.tensors for reader in readers)
    read = {name.removeprefix(f"{module}.") for name in names}
    strange = [
        name for name in below if name not in read and not _matches(name, other.rest)
    ]
    if strange:
        return (), f"it is not known whether {module}.{strange[0]} reads it"
    if not readers:
        return (
            (),
            f"there is no map {' or '.join(other.read_by)} in {module} that reads it",
        )
    return readers, ""


def _maps(
    names: Sequence[str], module: str, other: OtherNormSpec
) -> Iterator[NormReader]:
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
    """Return the output map if it is untied and the only reader of the norm, or else the reason."""
    records = (place.settings.record, checkpoint.settings.record)
    tied = [
        record["tie_word_embeddings"]
        for record in records
        if "tie_word_embeddings" in record
    ]
    if any(tied) or not tied:
        return (
            (),
            "the output map is the embedding (tie_word_embeddings), which would change with it",
        )
    infos = checkpoint.tensors.infos
    module = above(place.prefix, other.output_map, checkpoint.tensors)
    if f"{module}.weight" not in infos:
        return (
            (),
            f"there is no map {other.output_map} that reads it: others take what the model puts out",
        )
    bias = f"{module}.bias"
    reader = NormReader(
        module, f"{module}.weight", bias if bias in infos else "", False
    )
    # A tensor outside the stack may read the norm, unless the family excludes that.
    inside = _inside(checkpoint, place, other)
    strange = [
        name
        for name in infos
        if not name.startswith(inside)
        and name not in reader.tensors
        and not _matches(name, other.rest)
    ]
    if strange:
        return (), f"it is not known whether {strange[0]} reads it"
    return (reader,), ""


def _inside(
    checkpoint: Checkpoint, place: Place, other: OtherNormSpec
) -> tuple[str, ...]:
    """Return the prefixes of the tensors before the output map, including the last norm."""
    if place.prefix:
        return (place.prefix,)
    names = [checkpoint.place(site).spec.at for site in checkpoint.sites] + [
        norm.at for norm in other.norm
    ]
    return tuple({f"{name.partition('.')[0]}." for name in names})


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
