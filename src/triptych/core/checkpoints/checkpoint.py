"""Open checkpoints: their attention layers, read one at a time.

Every tensor of an attention layer is read or known to its family. Missing tensors, unknown tensors and shapes
that contradict the configuration are errors.
"""

import copy
import fnmatch
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, final

from torch import Tensor

from triptych.core.algebra.weights import Link, Side
from triptych.core.checkpoints.family import Family, family_of, half_of
from triptych.core.checkpoints.fields import (
    fields_read,
    not_followed,
    require_known_kinds,
    sees_both_ways,
)
from triptych.core.checkpoints.model_types import LOOKS_LIKE_ATTENTION
from triptych.core.checkpoints.reading import LayerReader as LayerReader
from triptych.core.checkpoints.source import Source, find_source
from triptych.core.checkpoints.specs import AttentionSpec
from triptych.core.checkpoints.stored_layers import (
    CONTEXT,
    AttentionLayer,
    AttentionSource,
    Place,
    Site,
)
from triptych.core.checkpoints.stored_positions import stored_angles
from triptych.core.storage.settings import MOST_LAYERS, Settings
from triptych.core.storage.tensors import SAFETENSORS, Tensors
from triptych.core.storage.unreadable import refuse_adapters
from triptych.errors import ConfigurationWarning, DataError, UsageError
from triptych.untrusted import shown

_BORROWS = "maps of a layer that uses keys and values of an earlier one"
_LONGEST_SAID = 1 << 40
_ATTENTION = "attention"  # word for attention layers in `AttentionSpec.mixers`
_HALVES = ("encoder", "decoder")
_LONGEST_TEXT = "max_position_embeddings | n_positions | max_seq_len | seq_length"


@final
class Checkpoint(AttentionSource):
    """A checkpoint of a known family."""

    def __init__(
        self,
        name: str,
        family: Family,
        settings: Settings,
        tensors: Tensors,
        known_by: str = "as told",
        source: Source | None = None,
    ) -> None:
        self._source = source
        self.name = name
        self.family = family
        self.settings = settings
        self.tensors = tensors
        self.written_as = family.name
        self.known_by = known_by
        self.absent = ()
        self.others = ""
        # Finding the layers also sets `absent` and `others`.
        self._places = {place.site: place for place in self._find()}
        self.not_followed = self._not_followed()
        notes = () if source is None else source.notes
        self.warnings = (*notes, *self.not_followed, *self._further_layers())
        self.sites = tuple(self._places)
        self.unread = {}
        self.num_tensors = len(tensors.infos)
        self.left_over = self._account()

    @property
    def source(self) -> Source | None:
        return self._source

    @property
    def fields_read(self) -> frozenset[str]:
        """The fields of the configuration that the family reads, or knows to ignore."""
        return fields_read(self.family)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(info.shape) for info in self.tensors.infos.values())

    def read(self, site: Site) -> AttentionLayer:
        return LayerReader(self._places[site], self.tensors).read()

    def outline(self, site: Site) -> AttentionLayer:
        return LayerReader(self._places[site], self.tensors, outline=True).read()

    def read_map(self, site: Site, side: Side, head: int) -> Link | None:
        return LayerReader(self._places[site], self.tensors).read_map(side, head)

    def lender(self, site: Site) -> Site | None:
        lender = self._places[site].lender
        return None if lender is None else lender.site

    def holding(self, tensors: Mapping[str, Tensor]) -> "Checkpoint":
        """Return the checkpoint with stored tensors replaced by tensors in memory of the same names."""
        return self.with_tensors(self.tensors.holding(tensors))

    def with_tensors(self, tensors: Tensors) -> "Checkpoint":
        """Return the checkpoint with all its tensors read from elsewhere."""
        found = copy.copy(self)
        found.tensors = tensors
        return found

    def place(self, site: Site) -> Place:
        return self._places[site]

    def is_run(self, site: Site) -> bool:
        """Return True if the model applies a layer, except to predict further tokens."""
        place = self._places[site]
        return place.is_run and not place.is_further

    def read_names(self, site: Site) -> tuple[str, ...]:
        """Return the names of the tensors within a layer's module, and of its norm."""
        beside = LayerReader(self._places[site], self.tensors).norm_names()
        beside = [name for name in beside if name in self.tensors.infos]
        # Perceiver's norms are within the module: list them once.
        return tuple(dict.fromkeys((*self.tensors.below(site.module), *beside)))

    def used_names(self, site: Site) -> set[str]:
        """Return the names of all tensors that a layer reads or has for a known reason."""
        reader = LayerReader(self._places[site], self.tensors)
        norms = {*reader.norm_names()}
        used = reader.map.names | reader.unused() | ({*reader.names_beside()} - norms)
        return used | {*stored_angles(reader.place)}

    def norm_names(self, site: Site) -> set[str]:
        """Return the names of the tensors of norms around a layer."""
        return {*LayerReader(self._places[site], self.tensors).norm_names()}

    def rewritable_names(self, site: Site) -> tuple[str, ...]:
        """Return the names of the tensors that a rewrite of a layer may change."""
        return tuple(LayerReader(self._places[site], self.tensors).rewritable())

    def bytes_of(self, site: Site) -> int:
        return sum(
            self.tensors.infos[name].num_bytes
            for name in self.tensors.below(site.module)
        )

    def longest_text(self, site: Site) -> int:
        found = self._places[site].settings.value(_LONGEST_TEXT)
        return (
            found if isinstance(found, int) and 0 < found <= _LONGEST_SAID else CONTEXT
        )

    def input_modules(self, site: Site) -> tuple[str, str]:
        spec = self._places[site].spec
        names = spec.qkv or spec.q, spec.qkv or spec.k
        if spec.latent:
            through = f"{site.module}.{spec.latent.q_down}.weight" in self.tensors.infos
            names = spec.latent.q_down if through else spec.q, spec.latent.kv_down
        if "*" in "".join(names):
            raise DataError(
                f"{self.name}: {site.module} has no modules for its maps, whose input could be seen"
            )
        return f"{site.module}.{names[0]}", f"{site.module}.{names[1]}"

    def broken(self, layer: AttentionLayer) -> dict[str, int]:
        counts = {
            name: int((~self.tensors.read(name).isfinite()).sum())
            for name in layer.tensors
        }
        return {name: count for name, count in counts.items() if count}

    def _find(self) -> Iterator[Place]:
        for choice in self.family.refused:
            if self.settings.holds(choice.when):
                raise DataError(
                    f"{self.name}: {self.family.name} cannot be read: {choice.value}"
                )
        found_any = False
        present = set[str]()
        wanted = dict[str, None]()
        unnumbered = dict[
            str, int
        ]()  # modules without a number in their names, by stack
        for spec in self.family.attention:
            settings = self._settings_of(spec)
            if settings is None or not settings.holds(spec.when):
                continue
            layers = settings.count(spec.layers)
            require_known_kinds(spec, settings, min(layers, MOST_LAYERS))
            mixers = self._mixers(spec, settings, layers)
            first = next(
                (layer for layer, mixer in enumerate(mixers) if mixer == _ATTENTION), 0
            )
            prefix = self._prefix(spec, first)
            wanted[spec.stack] = None
            if prefix is None:
                self._require_no_stack(spec)
                continue
            present.add(spec.stack)
            if spec.needs and settings.value(spec.needs) is None:
                raise DataError(
                    f"{settings.where}: {spec.needs} is missing, and no other field tells it"
                )
            inner = settings.count(spec.inner)
            uses = self._uses(spec, settings, layers)
            more = spec.more_layers and settings.value(spec.more_layers) is not None
            borrowing = self._num_borrowing(spec, settings, layers)
            lenders = dict[Any, Place]()
            for layer in range(
                layers + (settings.whole(spec.more_layers) if more else 0)
            ):
                if layer < len(mixers) and mixers[layer] != _ATTENTION:
                    continue
                if layer >= layers and not self.tensors.below(
                    prefix + _module(spec, layer)
                ):
                    break  # further layers may be missing
                for within in range(inner):
                    module = prefix + _module(spec, layer, within)
                    if not self.tensors.below(module):
                        raise DataError(
                            f"{self.name}: no tensor is below {module}, attention layer {layer} of {layers:,}"
                        )
                    kind = (
                        "self" if sees_both_ways(spec, settings, layer) else spec.kind
                    )
                    own = uses.get(layer, ()) if uses else (layer,)
                    # Layers without a use are numbered after all layers of the model.
                    after = sum(map(len, uses.values())) + layer
                    before = (
                        0 if "{layer}" in spec.at else unnumbered.get(spec.stack, 0)
                    )
                    number, *also = (
                        before + use * inner + within for use in own or (after,)
                    )
                    site = Site(spec.stack, number, kind, module, tuple(also))
                    place = Place(
                        site, spec, settings, prefix, layer, within, is_run=bool(own)
                    )
                    # A KV-sharing layer uses the keys and values of the last earlier layer alike.
                    alike = place.value(spec.lender) if spec.lender else None
                    if layer < layers - borrowing:
                        lenders[alike] = place
                    elif borrowing and layer < layers:
                        if alike not in lenders:
                            raise DataError(
                                f"{settings.where}: no earlier layer has keys of layer {layer}"
                            )
                        place = replace(place, lender=lenders[alike])
                    yield place
                    found_any = True
            if "{layer}" not in spec.at and spec.kind != "cross":
                unnumbered[spec.stack] = unnumbered.get(spec.stack, 0) + layers * inner
        self.absent = tuple(stack for stack in wanted if stack not in present)
        if not found_any:
            looks = [
                name for name in self.tensors.infos if self._looks_like_attention(name)
            ]
            raise DataError(
                f"{self.name}: no tensor has a name of the family {self.family.name}; "
                f"what looks like attention: {', '.join(looks[:6]) or 'nothing'}; describe it in a "
                "family file (triptych inspect --family my.toml)"
            )

    def _uses(
        self, spec: AttentionSpec, settings: Settings, layers: int
    ) -> dict[int, list[int]]:
        """Return the uses of each stored layer, in the model's order; empty if every layer is used once."""
        times = settings.number(spec.uses)
        rounds = settings.count(spec.rounds)
        if times == 1 and rounds == 1:
            return {}
        count = round(times * layers) * rounds
        if not 1 <= count <= MOST_LAYERS:
            raise DataError(
                f"{settings.where}: {spec.uses if rounds == 1 else spec.rounds} makes {count:,} layers: at "
                f"least 1 and at most {MOST_LAYERS:,} are read"
            )
        # A round applies every layer `times` times in succession. With a fraction (ALBERT), layers differ in
        # their number of uses.
        found: dict[int, list[int]] = {}
        for use in range(count):
            found.setdefault(int(use % (count // rounds) / times), []).append(use)
        return found

    def _mixers(
        self, spec: AttentionSpec, settings: Settings, layers: int
    ) -> list[str]:
        """Return the token mixer of each layer, in words; empty if all layers have attention."""
        if not spec.mixers:
            return []
        if layers > MOST_LAYERS:
            raise DataError(
                f"{settings.where}: {spec.layers} is {layers:,}: at most {MOST_LAYERS:,} are read"
            )
        found = []
        for layer in range(layers):
            # No default: a layer without a stated mixer might not have attention.
            choice = next(
                (
                    choice
                    for choice in spec.mixers
                    if settings.holds(choice.when, layer)
                ),
                None,
            )
            if choice is None:
                raise DataError(
                    f"{settings.where}: it does not say what layer {layer} of {layers} is"
                )
            found.append(str(settings.value(choice.value)))
        attention = [
            str(layer) for layer, mixer in enumerate(found) if mixer == _ATTENTION
        ]
        rest = " and ".join(
            dict.fromkeys(mixer for mixer in found if mixer != _ATTENTION)
        )
        if not attention:
            raise DataError(
                f"{self.name}: none of its {layers} layers is attention: they are {rest}"
            )
        if rest:
            some = (
                f"layers {', '.join(attention)}"
                if len(attention) > 1
                else f"layer {attention[0]}"
            )
            are = "are" if len(attention) > 1 else "is"
            self.others = f"{some} of {layers} {are} attention; the rest are {rest}, which are not"
        return found

    def _not_followed(self) -> tuple[str, ...]:
        found = {id(place.spec): place for place in self._places.values()}
        said = dict.fromkeys(
            chain.from_iterable(
                not_followed(self.family, place.spec, place.settings)
                for place in found.values()
            )
        )
        return tuple(said)

    def _further_layers(self) -> tuple[str, ...]:
        """Return sentences on stored layers that the model does not run."""
        places = self._places.values()
        further = [
            f"{place.site.module} predicts further tokens: it is read, and not run"
            for place in places
            if place.is_further
        ]
        unused = [
            f"{place.site.module} is in no layer of the model: it is read, and not run"
            for place in places
            if not place.is_run
        ]
        return (*further, *unused)

    def _num_borrowing(
        self, spec: AttentionSpec, settings: Settings, layers: int
    ) -> int:
        if not spec.borrowing or settings.value(spec.borrowing) in (None, 0):
            return 0
        count = settings.count(spec.borrowing)
        if count >= layers:
            raise DataError(
                f"{settings.where}: {spec.borrowing} is {count:,}, and {layers:,} layers are too few for that"
            )
        return count

    def _settings_of(self, spec: AttentionSpec) -> Settings | None:
        for path in spec.settings.split("|"):
            try:
                found = self.settings.below(path.strip())
            except DataError:
                continue
            kinds = (
                str(settings.value("model_type")) for settings in (found, self.settings)
            )
            defaults = self.family.defaults_of(spec.settings)
            of_class = next((defaults[kind] for kind in kinds if kind in defaults), {})
            return found.over(_with_older_record(found, of_class))
        return None

    def _prefix(self, spec: AttentionSpec, first: int) -> str | None:
        """Return the prefix of the family's names ("model.", "bert.", ""); None if the names are missing."""
        at = _module(spec, first)
        pattern = re.compile(rf"^(|.*\.){re.escape(at)}\.")
        found = {
            match[1] for name in self.tensors.infos if (match := pattern.match(name))
        }
        found = {
            prefix
            for prefix in found
            if not any(word in prefix for word in spec.outside)
        }
        if len(found) > 1:
            raise DataError(
                f"{self.name}: {at} is there {len(found)} times, below {', '.join(sorted(found))}: "
                "it is not clear which one is meant"
            )
        return found.pop() if found else None

    def _require_no_stack(self, spec: AttentionSpec) -> None:
        """Check that a stack without attention is missing as a whole."""
        stack, _, _ = spec.at.partition("{layer}")
        pattern = re.compile(rf"^(|.*\.){re.escape(stack)}{spec.first}\.")
        for name in self.tensors.infos:
            match = pattern.match(name)
            if (
                "{layer}" in spec.at
                and match
                and not any(word in match[1] for word in spec.outside)
            ):
                raise DataError(
                    f"{self.name}: {name} is in the file, but its attention is not: {_module(spec, 0)}"
                )

    def _looks_like_attention(self, name: str) -> bool:
        """Return True for a matrix named like attention: vectors may be norms named after the attention."""
        return len(self.tensors.infos[name].shape) > 1 and bool(
            LOOKS_LIKE_ATTENTION.search(name)
        )

    def _account(self) -> tuple[str, ...]:
        """Return the tensors outside attention; raise DataError for unknown tensors of attention."""
        readers = [LayerReader(place, self.tensors) for place in self._places.values()]
        # Every tensor is unread with a reason, or belongs to a layer, or is outside attention. The last is an
        # error for a name like attention's, unless the family knows the tensor.
        modules = {site.module + "." for site in self.sites}
        beside = {
            *chain.from_iterable(
                (*r.names_beside(), *stored_angles(r.place)) for r in readers
            )
        }
        known = [
            *self.family.rest,
            *chain.from_iterable(spec.known for spec in self.family.attention),
        ]
        unused = {*chain.from_iterable(reader.unused() for reader in readers)}
        others = []
        strange = []
        for name in self.tensors.infos:
            why = next(
                (
                    u.why
                    for u in self.family.unread
                    if fnmatch.fnmatchcase(name, u.names)
                ),
                None,
            )
            if name in unused:
                why = _BORROWS
            if why is not None:
                self.unread[name] = why
                continue
            if name in beside or any(name.startswith(module) for module in modules):
                continue
            others.append(name)
            if self._looks_like_attention(name) and not any(
                fnmatch.fnmatchcase(name, k) for k in known
            ):
                strange.append(name)
        if strange:
            raise DataError(
                f"{self.name}: {len(strange)} tensors look like attention and are in no layer that "
                f"{self.family.name} has: {', '.join(strange[:4])}{' …' if len(strange) > 4 else ''}"
            )
        for reader in readers:
            elsewhere = modules - {reader.place.site.module + "."}
            for name in reader.unknown():
                if name not in self.unread and not any(
                    name.startswith(module) for module in elsewhere
                ):
                    raise DataError(
                        f"{self.name}: tensor {name} is in an attention layer, but the family "
                        f"{self.family.name} does not know it"
                    )
        return tuple(others)


def _module(spec: AttentionSpec, layer: int, inner: int = 0) -> str:
    """Return the name of a layer's attention, without the prefix of the checkpoint."""
    return spec.at.format(layer=layer + spec.first, inner=inner)


def open_checkpoint(
    source: Source | Path | str, family: Family | None = None, *, mapped: bool = False
) -> AttentionSource:
    """Open the attention layers of a source.

    `source`: source, path, or name on the Hub. `family`: family to read the checkpoint with, instead of the
    family of its `model_type`. `mapped`: map local files into memory instead of copying from them.

    Raises DataError if the checkpoint is of an unknown family, or contradicts its family or configuration.
    Raises UsageError if the source does not exist, or `family` is given for a run, or the source is strict
    and its configuration has fields without effect.
    """
    found = find_source(source)
    opened = _open(found, family or found.family, mapped)
    if found.strict and isinstance(opened, Checkpoint) and opened.not_followed:
        raise UsageError(f"{opened.not_followed[0]}; strict takes this for an error")
    for said in opened.warnings:
        warnings.warn(said, ConfigurationWarning, stacklevel=2)
    return opened


def _open(source: Source, family: Family | None, mapped: bool) -> AttentionSource:
    if source.module is not None:
        # Only models of this library need its modules.
        from triptych.core.checkpoints.module_layers import ModuleLayers

        return ModuleLayers(source.module, source.name)
    if source.is_own:
        if family is not None:
            raise UsageError(f"{source.name} is a run: leave out --family")
        if source.path.is_file() and source.path.name != SAFETENSORS:
            raise UsageError(
                f"{source.name}: the weights of a run are in {SAFETENSORS}: give its folder"
            )
        from triptych.core.checkpoints.module_layers import ModuleLayers

        return ModuleLayers.read_folder(source.folder, source.name)
    tensors = source.tensors(mapped=mapped)
    # Refuse adapters before the family: their tensors alone are not a model of any family.
    refuse_adapters(source.name, tensors.infos)
    settings = Settings(dict(source.record), source.where)
    from triptych.core.storage.quantised import (
        dequantised,
    )  # formats of other libraries

    tensors = dequantised(tensors, settings)
    how_known = "as told"
    if family is None:
        model_type = settings.value("model_type")
        family = family_of(str(model_type))
        how_known = f"model_type {model_type!r}"
        if family is None:
            from triptych.core.checkpoints.unknown_families import (
                refuse_unknown,
            )  # it drafts a family file

            refuse_unknown(settings, tensors, source.name)
    family = _with_half_alone(family, settings, tensors, source.name)
    return Checkpoint(source.name, family, settings, tensors, how_known, source)


def _with_half_alone(
    family: Family, settings: Settings, tensors: Tensors, name: str
) -> Family:
    """Return the family, or its half if the file contains only the encoder or only the decoder of a model."""

    def are_there(layers: Iterable[str]) -> set[str]:
        modules = {layer: layer.format(layer=0, inner=0) for layer in layers}
        return {layer for layer, module in modules.items() if tensors.below(module)}

    # A file with one half has names without the prefix "encoder." or "decoder.".
    whole = [spec.at for spec in family.attention]
    halves = {
        half: {at.removeprefix(f"{half}.") for at in whole if at.startswith(f"{half}.")}
        for half in _HALVES
    }
    there = are_there(halves["encoder"] | halves["decoder"])
    fitting = [half for half, layers in halves.items() if layers and layers == there]
    if len(fitting) != 1 or there & {*whole}:
        return family
    classes = settings.value("architectures")
    named = str(classes[0]) if isinstance(classes, list) and classes else ""
    if any(
        named.endswith(half.capitalize()) for half in _HALVES if half not in fitting
    ):
        raise DataError(
            f"{name}: the tensors are of the {fitting[0]} of {family.name}, "
            f"and architectures says {shown(named)}"
        )
    return half_of(family, fitting[0])


def _with_older_record(settings: Settings, defaults: dict[str, Any]) -> dict[str, Any]:
    """Return the defaults; a record `rope_scaling` of the file replaces the default `rope_parameters`."""
    older = settings.record.get("rope_scaling")
    default = defaults.get("rope_parameters")
    if not (isinstance(older, dict) and older and isinstance(default, dict)):
        return defaults
    if any(
        isinstance(record, dict) for record in default.values()
    ):  # a record for each kind of layer
        return defaults
    theta = settings.value("rope_theta") or defaults.get("rope_theta", 10000.0)
    return {
        **defaults,
        "rope_theta": theta,
        "rope_parameters": {"rope_theta": theta, **older},
    }
