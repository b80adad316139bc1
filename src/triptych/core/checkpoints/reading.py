"""Reading of single attention layers from a checkpoint: maps, semantics and norms."""

import fnmatch
import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import final

import torch
from torch import Tensor

from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.semantics import HeadGate, HeadNorm, Semantics, Temperature
from triptych.core.algebra.weights import AttentionWeights, Chain, Link, Norm, Side
from triptych.core.checkpoints.fields import is_made_bidirectional
from triptych.core.checkpoints.hooks import Hook, hook_of
from triptych.core.checkpoints.latents import read_latent
from triptych.core.checkpoints.layer_map import (
    LayerMap,
    Parts,
    Shape,
    layer_map,
    norm_tensors,
    tensor_names,
)
from triptych.core.checkpoints.specs import Choice, NormSpec
from triptych.core.checkpoints.stored_layers import AttentionLayer, InputNorms, Place
from triptych.core.checkpoints.stored_positions import (
    read_bias,
    read_rotary,
    stored_angles,
    table_names,
)
from triptych.core.storage.tensors import Tensors
from triptych.errors import DataError


@final
class LayerReader:
    def __init__(
        self, place: Place, tensors: Tensors, *, outline: bool = False
    ) -> None:
        """Prepare to read a layer.

        `place`: the layer. `tensors`: tensors of the checkpoint. `outline`: make maps and norms on the "meta"
        device, without reading them.
        """
        self.place = place
        self.tensors = tensors
        hook = hook_of(place.spec.hook)
        # Biases of positions made of the maps (`Hook.bias`) need the maps' values.
        self._outline = outline and (hook is None or type(hook).bias is Hook.bias)
        self._read_names: list[str] = []
        self._dtype = self._common_dtype()

    def read(self) -> AttentionLayer:
        place = self.place
        spec = self.place.spec
        sizes = place.sizes
        parts = self.map.read(self.take)
        q, k, v, o = read_latent(place, parts) if spec.latent else _chains(parts)
        o_bias = parts.get("o.bias")
        norm_spec = place.norm
        norm = self._norm(parts)
        if place.lender is not None:
            norm = None  # keys and values read the norm of another layer, so it cannot be folded
        self._require_sizes(q, k, v, o, o_bias, norm)
        biases = {"q": q[-1].bias, "k": k[-1].bias, "v": v[-1].bias, "o": o_bias}
        self._require_biases(biases)
        semantics = self._semantics(parts, q[-1], k[-1])
        weights = AttentionWeights(
            d_model=q[0].d_in,
            num_heads=sizes.heads,
            q=q,
            k=k,
            v=v,
            o=o,
            semantics=semantics,
            o_bias=o_bias,
            norm=norm,
            norm_place=norm_spec.place if norm_spec else "pre",
            other_norm_readers=place.chosen(spec.also_read_by),
            bias_slots=frozenset(
                side for side, bias in biases.items() if bias is not None
            ),
        )
        kind = place.position.kind
        return AttentionLayer(
            place.site,
            weights,
            tuple(self._read_names),
            InputNorms() if self._outline else self._input_norms(q, k, norm),
            embedded_positions=kind if kind in ("sinusoidal", "learned") else "none",
            fixed=spec.unwritten,
            borrows=None if place.lender is None else place.lender.site,
        )

    def read_map(self, side: Side, head: int) -> Link | None:
        """Read the map of one head, and no more bytes; return None if it is not a part of a single tensor."""
        spec = self.place.spec
        infos = self.tensors.infos
        if spec.latent:
            return None
        side = "k" if side == "v" and self.place.holds(spec.key_value) else side
        parts, stored = next(
            (entry for entry in self.map.entries.items() if side in entry[0]),
            ((), None),
        )
        if stored is None or len(stored.names) != 1 or stored.names[0] not in infos:
            return None
        (name,) = stored.names
        shape = infos[name].shape
        if stored.shape is not None:
            require_shape(self._of(name), [*shape], [*stored.shape])
        # The steps only permute rows, or columns. Applied to their indices, they give the indices to read.
        dim = int(spec.transposed != (side == "o"))
        numbers = torch.arange(shape[dim])
        found: Parts = [numbers[None] if dim else numbers[:, None]]
        for step in stored.steps:
            found = step.read(found)
        copies = found[parts.index(side)]
        copy = head * len(copies) // self.place.sizes.heads
        part = self._checked(
            name, self.tensors.read_part(name, dim, copies[copy].flatten().tolist())
        )
        biases = (
            entry for entry in self.map.entries.items() if f"{side}.bias" in entry[0]
        )
        bias = next(
            (own.read(self.take)[names.index(f"{side}.bias")] for names, own in biases),
            None,
        )
        bias = None if bias is None or side == "o" else bias[copy, None]
        return Link((part if spec.transposed else part.mT)[None], bias)

    @cached_property
    def map(self) -> LayerMap:
        own = layer_map(self.place, self.tensors)
        if self.place.lender is None:
            return own
        theirs = layer_map(self.place.lender, self.tensors)
        entries = {
            parts: stored
            for parts, stored in own.entries.items()
            if not _is_of_keys_or_values(parts)
        }
        return LayerMap(
            entries
            | {
                parts: of
                for parts, of in theirs.entries.items()
                if _is_of_keys_or_values(parts)
            }
        )

    def unused(self) -> set[str]:
        """Return the stored, unused tensors of keys and values of a KV-sharing layer."""
        if self.place.lender is None:
            return set()
        return layer_map(self.place, self.tensors).names - self.map.names

    # The maps.

    def _require_sizes(
        self,
        q: Chain,
        k: Chain,
        v: Chain,
        o: Chain,
        o_bias: Tensor | None,
        norm: Norm | None,
    ) -> None:
        place = self.place
        read = q[0].d_in
        written = o[-1].d_out
        said = place.value(place.spec.size) if place.spec.size else None
        widths = {"what queries read": read, "what is written": written}
        if place.spec.kind != "cross":
            widths |= {"what keys read": k[0].d_in, "what values read": v[0].d_in}
        elif k[0].d_in != v[0].d_in:
            raise DataError(
                f"{self._here()}: keys read {k[0].d_in} channels, values {v[0].d_in}"
            )
        if norm is not None:
            widths["the norm"] = len(norm.weight)
        if o_bias is not None and len(o_bias) != written:
            raise DataError(
                f"{self._here()}: the bias of o has width {len(o_bias)}, its map {written}"
            )
        # Without a width in the configuration, all widths must equal that of the queries' input.
        wanted = said if isinstance(said, int) else read
        for what, width in widths.items():
            if width != wanted:
                by = (
                    f"{place.settings.where} says"
                    if isinstance(said, int)
                    else "queries read"
                )
                raise DataError(
                    f"{self._here()}: {what} has width {width}, where {by} {wanted}"
                )

    def _require_biases(self, there: Mapping[str, Tensor | None]) -> None:
        choice = self.place.first(self.place.spec.biases)
        if choice is None:
            return
        words = (word.partition("=") for word in choice.value.split())
        wanted = {side for side, _, field in words if self.place.holds(field)}
        for side, bias in there.items():
            if (bias is not None) != (side in wanted):
                state = "has a bias" if bias is not None else "has no bias"
                raise DataError(
                    f"{self._here()}: the map of {side} {state}, against the configuration"
                )

    def _here(self) -> str:  # words for messages
        return f"{self.tensors.name}: {self.place.site.module}"

    # The semantics.

    def _semantics(self, parts: Mapping[str, Tensor], q: Link, k: Link) -> Semantics:
        place = self.place
        spec = self.place.spec
        width = q.d_out
        # Scores are divided by the root of `under_root`, by default the width of queries.
        under = spec.scale if isinstance(spec.scale, str) else place.chosen(spec.scale)
        under_root = place.positive(under) if under else float(width)
        times = place.chosen(spec.scale_times)
        hook = hook_of(spec.hook)
        if hook is not None:
            scale = hook.scale(place, under_root)
        else:
            scale = (place.number(times) if times else 1.0) / math.sqrt(under_root)
        has_cap = spec.soft_cap and place.value(spec.soft_cap) is not None
        rotary = read_rotary(place, self.tensors, width)
        q_norm, k_norm = self._head_norms(parts, rotary)
        if (
            place.head_norm is not None
            and place.head_norm.turned
            and rotary is not None
        ):
            rotary = replace(
                rotary, factor=1.0
            )  # the norm after the rotation cancels a factor
        bias = (
            None
            if hook is None
            else hook.bias(place, self.tensors, self.take, q, k, scale)
        )
        if bias is None:
            bias = read_bias(place, self.tensors, self.take, place.sizes.heads, scale)
        return Semantics(
            scale=scale,
            kind=place.site.kind,
            rotary=rotary,
            bias=bias,
            q_norm=q_norm,
            k_norm=k_norm,
            v_norm=HeadNorm(place.number(spec.value_norm)) if spec.value_norm else None,
            soft_cap=place.positive(spec.soft_cap) if has_cap else None,
            sinks=parts.get("sinks"),
            window=self._window(),
            chunk=self._chosen_count(spec.chunk),
            temperature=self._temperature(rotary),
            clip=place.optional_number(spec.clip),
            gate=HeadGate(parts["gate"].mT, parts.get("gate.bias"))
            if "gate" in parts
            else None,
        )

    def _norm(self, parts: Mapping[str, Tensor]) -> Norm | None:
        norm = self.place.norm
        if norm is None or "norm" not in parts:
            return None
        return Norm(
            parts["norm"],
            parts.get("norm.bias"),
            norm.offset,
            centred=norm.kind == "layer",
        )

    def _input_norms(self, q: Chain, k: Chain, own: Norm | None) -> InputNorms:
        place = self.place
        spec = self.place.norm
        if spec is None:
            return InputNorms()
        # Values of {previous} and {last} in names of norms.
        layers = place.value(spec.memory_layers) if spec.memory_layers else None
        first = place.spec.first
        last = first + layers - 1 if isinstance(layers, int) else -1
        numbers = {"previous": first + place.layer - 1, "last": last}

        def named(name: str, reader: Chain) -> Norm | None:
            return (
                self._input_norm(place.beside(name, **numbers), spec, reader)
                if name
                else None
            )

        return InputNorms(
            named(spec.at, q) if own is None else own,
            named(spec.memory, k) if place.spec.kind == "cross" else None,
        )

    def _input_norm(self, module: str, spec: NormSpec, reader: Chain) -> Norm | None:
        """Read the norm of a module; return None if it is missing, or its width is not that of the maps."""
        infos = self.tensors.infos
        of_gain, of_shift = norm_tensors(self.tensors, module)
        gain = infos.get(of_gain)
        if (
            gain is None
            or gain.shape != (reader[0].d_in,)
            or not gain.dtype.is_floating_point
        ):
            return None
        shift = self.tensors.read(of_shift) if of_shift in infos else None
        return Norm(
            self.tensors.read(of_gain), shift, spec.offset, centred=spec.kind == "layer"
        )

    def _head_norms(
        self, parts: Mapping[str, Tensor], rotary: RotaryEmbedding | None
    ) -> tuple[HeadNorm | None, HeadNorm | None]:
        spec = self.place.head_norm
        if spec is None or (spec.turned and not rotary):
            return None, None
        eps = self.place.number(spec.eps)
        # The stored norm reads channels times `factor`; without the factor, eps / factor² is the same norm.
        if spec.turned and rotary is not None:
            eps /= rotary.factor**2

        def norm(part: str) -> HeadNorm:
            gain = parts.get(part)
            bias = parts.get(f"{part}.bias")
            turned = spec.turned and gain is not None
            centred = spec.kind == "layer"
            return HeadNorm(
                eps, gain, bias, centred, spec.over, turned=turned, offset=spec.offset
            )

        return norm("q_norm"), norm("k_norm")

    def _window(self) -> int | None:
        width = self._chosen_count(self.place.spec.window)
        if width is None:
            return None
        if self.place.spec.window_around:
            return width // 2 + 1
        if is_made_bidirectional(self.place.spec, self.place.settings):
            return (
                width + 1
            )  # `width` tokens before and after the query, and the query's own
        # In a bidirectional layer of a causal family, half of the window is before and half after the query.
        return width if self.place.site.kind == self.place.spec.kind else width // 2 + 1

    def _chosen_count(self, choices: tuple[Choice, ...]) -> int | None:
        """Evaluate the first choice with a true condition; return None without such a choice or a value."""
        chosen = self.place.chosen(choices)
        return (
            None
            if not chosen or self.place.value(chosen) is None
            else self.place.count(chosen)
        )

    def _temperature(self, rotary: RotaryEmbedding | None) -> Temperature | None:
        place = self.place
        spec = self.place.spec.temperature
        if spec is None or not place.holds(spec.when) or (spec.unturned and rotary):
            return None
        if place.value(spec.strength) is None:
            return None
        return Temperature(
            place.number(spec.strength), place.positive(spec.every), spec.first
        )

    # Tensors.

    def names_beside(self) -> list[str]:
        """Return the names of the layer's tensors outside its module."""
        found = self.norm_names() + table_names(self.place, self.tensors)
        norm = self.place.position.table_norm
        return found + [
            f"{self.place.beside(norm)}.{part}" for part in ("weight", "bias") if norm
        ]

    def norm_names(self) -> list[str]:
        """Return the names of the tensors of the layer's norm, if it may be folded."""
        return (
            [*norm_tensors(self.tensors, self.place.norm_module)]
            if self.place.norm_module
            else []
        )

    def rewritable(self) -> list[str]:
        """Return the tensors that a rewrite may change: maps, norms of heads, sinks, the layer's norm."""
        names = self.map.names
        there = (*self.tensors.below(self.place.site.module), *self.norm_names())
        return [
            name
            for name in dict.fromkeys(there)
            if name in names and name in self.tensors.infos
        ]

    def unknown(self) -> list[str]:
        """Return the tensors within the module unknown to the family."""
        spec = self.place.spec
        below = self.place.site.module + "."
        patterns = [*spec.known]
        if (
            spec.head_norm is not None
        ):  # norms may be in the file even if the configuration disables them
            names = (
                name.replace("{head}", "*")
                for name in (spec.head_norm.q, spec.head_norm.k)
                if name
            )
            patterns += [*chain.from_iterable(tensor_names(module) for module in names)]
        expected = {
            *self.map.names,
            *self.unused(),
            *self.names_beside(),
            *stored_angles(self.place),
        }
        return [
            name
            for name in self.tensors.below(self.place.site.module)
            if name not in expected
            and not any(
                fnmatch.fnmatchcase(name.removeprefix(below), pattern)
                for pattern in patterns
            )
        ]

    def take(self, name: str, shape: Shape | None) -> Tensor:
        """Read a tensor, check its shape and convert it to the layer's common dtype."""
        if name not in self.tensors.infos:
            raise DataError(
                f"{self.tensors.name}: there is no tensor {name}; fetch the checkpoint again"
            )
        if self._outline and name in self.map.names:
            info = self.tensors.infos[name]
            tensor = torch.empty(info.shape, dtype=info.dtype, device="meta")
        else:
            tensor = self.tensors.read(name)
        if shape is not None:
            require_shape(self._of(name), [*tensor.shape], [*shape])
        self._read_names.append(name)
        return self._checked(name, tensor)

    def _checked(self, name: str, tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            raise DataError(
                f"{self._of(name)}: its dtype {tensor.dtype} is an unknown quantisation"
            )
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def _common_dtype(self) -> torch.dtype | None:
        """Return the narrowest dtype for all floating-point tensors: maps and norms may differ in dtype."""
        found = None
        beside = [name for name in self.names_beside() if name in self.tensors.infos]
        for name in (*self.tensors.below(self.place.site.module), *beside):
            info = self.tensors.infos[name]
            if info.dtype.is_floating_point:
                if info.dtype.itemsize == 1:
                    raise DataError(
                        f"{self._of(name)}: float8 without a scale is not supported"
                    )
                found = (
                    info.dtype
                    if found is None
                    else torch.promote_types(found, info.dtype)
                )
        return found

    def _of(self, name: str) -> str:  # words for messages
        return f"{self.tensors.where(name)}, tensor {name}"


def _is_of_keys_or_values(parts: tuple[str, ...]) -> bool:
    return all(part.partition(".")[0].partition("_")[0] in ("k", "v") for part in parts)


def _chains(parts: Mapping[str, Tensor]) -> tuple[Chain, Chain, Chain, Chain]:
    found = {
        side: (Link(parts[side], parts.get(f"{side}.bias")),)
        for side in ("q", "k", "v")
        if side in parts
    }
    return found["q"], found["k"], found.get("v", found["k"]), (Link(parts["o"]),)


def require_shape(of: str, found: list[int], wanted: list[int | None]) -> None:
    """Raise DataError for a wrong shape; None is a free size."""
    if len(wanted) == 2 != len(found):
        raise DataError(f"{of}: shape {found} is not a matrix")
    if len(found) != len(wanted):
        raise DataError(
            f"{of}: shape {found}, where {len(wanted)} dimensions are expected"
        )
    if None not in wanted and found != wanted:
        raise DataError(f"{of}: shape {found}, but the configuration says {wanted}")
    for what, size, right in zip(("rows", "columns"), found, wanted, strict=False):
        if right is not None and size != right:
            raise DataError(f"{of}: {size} {what}, but the configuration says {right}")
