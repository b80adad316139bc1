"""One attention layer of a family, out of a checkpoint's tensors: its maps, and what stands beside them."""

import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from triptych.algebra.positions import (
    ALiBi,
    DisentangledBias,
    PatchPositionBias,
    RelativePositionBias,
    RotaryEmbedding,
    ScoreBias,
    alibi_slopes,
)
from triptych.algebra.semantics import HeadNorm, Semantics, Temperature
from triptych.algebra.weights import AttentionWeights, Chain, Link, Norm
from triptych.checkpoints.family import (
    AttentionSpec,
    Choice,
    HeadNormSpec,
    NormSpec,
    PatchesSpec,
    PositionSpec,
)
from triptych.checkpoints.fields import is_turned_round
from triptych.checkpoints.fused import parted
from triptych.checkpoints.layer import AttentionLayer, InputNorms, Site
from triptych.checkpoints.rope import frequencies, rope_type, yarn_magnitude
from triptych.errors import DataError
from triptych.storage.settings import Settings
from triptych.storage.tensors import Tensors


@final
@dataclass(frozen=True)
class Place:
    """Where a layer lies, and how it is written there.

    Attributes:
        site: the layer.
        spec: how it is written.
        settings: what the configuration says of its stack.
        prefix: what stands before the names that the family gives.
        layer: the number that these names hold.
        inner: its place within that layer, where one holds several.
    """

    site: Site
    spec: AttentionSpec
    settings: Settings
    prefix: str
    layer: int
    inner: int


@final
class LayerReader:
    """Reads one layer of a family.

    Args:
        where: the layer's place, and how it is written.
        tensors: of the checkpoint.
    """

    def __init__(self, where: "Place", tensors: Tensors) -> None:
        self.where, self.tensors = where, tensors
        self.site, self.spec, self.settings, self.layer = where.site, where.spec, where.settings, where.layer
        self.read_names: list[str] = []
        self._dtype = self._common_dtype()

    def read(self) -> AttentionLayer:
        """Read it.

        Raises:
            DataError: a tensor that is missing or has another shape than the configuration says.
        """
        spec, settings, layer = self.spec, self.settings, self.layer
        heads = settings.count(spec.heads, layer)
        q, k, v, o, o_bias = self._latent(heads) if spec.latent else self._maps(heads)
        width = q[-1].d_out
        position = self._position()
        choices = (Choice(value=spec.scale),) if isinstance(spec.scale, str) else spec.scale
        scale = self._chosen_number(spec.scale_times, 1.0) / math.sqrt(
            self._chosen_number(choices, float(width))
        )
        if position.kind == "disentangled":
            scale /= math.sqrt(1 + len(self._distance_parts()))
        norm_spec, norm = self._norm()
        self._require_sizes(q, k, v, o, norm)
        self._require_biases(q, k, v, o_bias)
        rotary = self._rotary(position, width)
        q_norm, k_norm = self._head_norms(heads, rotary)
        if spec.head_norm is not None and spec.head_norm.turned and rotary is not None:
            rotary = replace(rotary, factor=1.0)  # which the norm takes off again
        slots = {side for side, chain in (("q", q), ("k", k), ("v", v)) if chain[-1].bias is not None}
        slots |= {"o"} if o_bias is not None else set()
        if spec.value_norm:
            v = self._normalised_values(v)
        semantics = Semantics(
            scale=scale,
            kind=self.site.kind,
            rotary=rotary,
            bias=self._bias(position, heads, scale, q[-1], k[-1]),
            q_norm=q_norm,
            k_norm=k_norm,
            soft_cap=self._optional_number(spec.soft_cap),
            sinks=self._take(f"{self.site.module}.{spec.sinks}", (heads,)) if spec.sinks else None,
            window=self._window(),
            chunk=self._chunk(),
            temperature=self._temperature(rotary),
            clip=self._optional_number(spec.clip),
        )
        weights = AttentionWeights(
            d_model=q[0].d_in,
            num_heads=heads,
            q=q,
            k=k,
            v=v,
            o=o,
            semantics=semantics,
            o_bias=o_bias,
            norm=norm,
            norm_place=norm_spec.place if norm_spec else "pre",
            other_norm_readers=self._chosen_text(spec.also_read_by),
            bias_slots=frozenset(slots),
        )
        return AttentionLayer(
            self.site,
            weights,
            tuple(self.read_names),
            max(1, int(self.settings.number(spec.uses, self.layer))),
            self._inputs(q, k, norm),
            embedded_positions=position.kind if position.kind in ("sinusoidal", "learned") else "none",
            fixed=spec.unwritten,
        )

    def _require_sizes(self, q: Chain, k: Chain, v: Chain, o: Chain, norm: Norm | None) -> None:
        """What is read, what is written and the norm are as wide as each other and as the configuration says.

        Raises:
            DataError: they are not.
        """
        read, written = q[0].d_in, o[-1].d_out
        said = self.settings.value(self.spec.size, self.layer) if self.spec.size else None
        widths = {"what queries read": read, "what is written": written}
        if self.spec.kind != "cross":
            widths |= {"what keys read": k[0].d_in, "what values read": v[0].d_in}
        elif k[0].d_in != v[0].d_in:
            raise DataError(f"{self._here()}: keys read {k[0].d_in} channels, values {v[0].d_in}")
        if norm is not None:
            widths["the norm"] = len(norm.gain)
        wanted = said if isinstance(said, int) else read
        for what, width in widths.items():
            if width != wanted:
                by = f"{self.settings.where} says" if isinstance(said, int) else "queries read"
                raise DataError(f"{self._here()}: {what} has width {width}, where {by} {wanted}")

    def _require_biases(self, q: Chain, k: Chain, v: Chain, o_bias: Tensor | None) -> None:
        """The biases are there that the family has.

        Raises:
            DataError: one is missing, or one too many is there.
        """
        choices = [c for c in self.spec.biases if self.settings.holds(c.when, self.layer)]
        if not choices:
            return
        there = {"q": q[-1].bias, "k": k[-1].bias, "v": v[-1].bias, "o": o_bias}
        wanted = {
            side
            for side, _, field in (word.partition("=") for word in choices[0].value.split())
            if self.settings.holds(field, self.layer)
        }
        for side, bias in there.items():
            if (bias is not None) != (side in wanted):
                state = "has a bias" if bias is not None else "has no bias"
                raise DataError(f"{self._here()}: the map of {side} {state}, against the configuration")

    def _here(self) -> str:
        return f"{self.tensors.name}: {self.site.module}"

    # The maps.

    def _maps(self, heads: int) -> tuple[Chain, Chain, Chain, Chain, Tensor | None]:
        spec, layer = self.spec, self.layer
        groups = self._groups(heads)
        width = self.settings.count(spec.width, layer)
        value_width = self.settings.count(spec.value_width, layer) if spec.value_width else width
        if heads % groups:
            raise DataError(f"{self.settings.where}: {groups} key heads do not divide {heads} heads")
        if spec.qkv:
            joined, bias = self._map(spec.qkv, (heads + groups) * width + groups * value_width)
            sizes = heads, groups, width, value_width
            try:
                q, k, v = parted(spec.layout, joined, *sizes)
                q_bias, k_bias, v_bias = (
                    (None, None, None) if bias is None else parted(spec.layout, bias, *sizes)
                )
            except DataError as error:
                raise DataError(f"{self.settings.where}: {error}") from None
            if spec.q_bias:
                q_bias = self._take(f"{self.site.module}.{spec.q_bias}", (len(q),))
            if spec.v_bias:
                v_bias = self._take(f"{self.site.module}.{spec.v_bias}", (len(v),))
        else:
            q, q_bias = self._map(spec.q, heads * width)
            k, k_bias = self._map(spec.k, groups * width)
            v, v_bias = self._map(spec.v, groups * value_width)
        o, o_bias = self._map(spec.o, None, heads * value_width)
        return (
            (_to_heads(q, q_bias, heads),),
            (_to_heads(k, k_bias, groups),),
            (_to_heads(v, v_bias, groups),),
            (_from_heads(o, heads),),
            o_bias,
        )

    def _latent(self, heads: int) -> tuple[Chain, Chain, Chain, Chain, Tensor | None]:
        spec = self.spec.latent
        assert spec is not None
        count = self.settings.count
        rank, plain, turned = (count(e, self.layer) for e in (spec.rank, spec.plain, spec.turned))
        value, eps = count(spec.value, self.layer), self.settings.number(spec.eps, self.layer)
        if self.settings.value(spec.q_rank, self.layer) is not None:
            q_rank = count(spec.q_rank, self.layer)
            down, down_bias = self._map(spec.q_down, q_rank)
            up, up_bias = self._map(spec.q_up, heads * (plain + turned), q_rank)
            gain = self._take(f"{self.site.module}.{spec.q_norm}.weight", (q_rank,))
            first = replace(_to_heads(down, down_bias, 1), norm=HeadNorm(eps))
            q: Chain = (first, _to_heads(up * gain, up_bias, heads))
        else:
            q = (_to_heads(*self._map(self.spec.q, heads * (plain + turned)), heads),)
        down, down_bias = self._map(spec.kv_down, rank + turned)
        up, up_bias = self._map(spec.kv_up, heads * (plain + value), rank)
        gain = self._take(f"{self.site.module}.{spec.kv_norm}.weight", (rank,))
        first = replace(_to_heads(down, down_bias, 1), norm=HeadNorm(eps, channels=rank))
        of_heads = (up * gain).view(heads, plain + value, rank).mT
        through = torch.eye(turned, dtype=up.dtype).expand(heads, turned, turned)
        k_up = torch.zeros(heads, rank + turned, plain + turned, dtype=up.dtype)
        k_up[:, :rank, :plain], k_up[:, rank:, plain:] = of_heads[..., :plain], through
        v_up = torch.cat([of_heads[..., plain:], up.new_zeros(heads, turned, value)], dim=1)
        o, o_bias = self._map(self.spec.o, None, heads * value)
        return q, (first, Link(k_up)), (first, Link(v_up)), (_from_heads(o, heads),), o_bias

    def _map(self, name: str, d_out: int | None, d_in: int | None = None) -> tuple[Tensor, Tensor | None]:
        """A map `[d_out, d_in]` and its bias, if it has one."""
        weight_name, bias_name = tensor_names(f"{self.site.module}.{name}")
        weight = self._take(weight_name)
        if weight.ndim != 2:
            raise DataError(f"{self._of(weight_name)}: shape {list(weight.shape)} is not a matrix")
        weight = weight.mT if self.spec.transposed else weight
        for what, wanted, found in (("rows", d_out, weight.shape[0]), ("columns", d_in, weight.shape[1])):
            if wanted is not None and wanted != found:
                raise DataError(
                    f"{self._of(weight_name)}: {found} {what}, where the configuration makes it {wanted}"
                )
        bias = None
        if bias_name in self.tensors.infos:
            bias = self._take(bias_name, (weight.shape[0],))
        return weight.contiguous(), bias

    def _groups(self, heads: int) -> int:
        for choice in self.spec.groups:
            if self.settings.holds(choice.when, self.layer):
                return self.settings.count(choice.value, self.layer)
        return heads

    # What stands beside them.

    def _norm(self) -> tuple[NormSpec | None, Norm | None]:
        for spec in self.spec.norm:
            if not self.settings.holds(spec.when, self.layer):
                continue
            if spec.place != "pre" or not spec.at:
                return spec, None
            gain_name, shift_name = norm_tensors(self.tensors, self._beside(spec.at))
            if gain_name not in self.tensors.infos:
                raise DataError(f"{self.tensors.name}: there is no tensor {gain_name}, the gain of a norm")
            gain = self._take(gain_name)
            if gain.ndim != 1:
                raise DataError(f"{self._of(gain_name)}: shape {list(gain.shape)} is not that of a gain")
            has_shift = shift_name in self.tensors.infos
            return spec, Norm(gain, self._take(shift_name) if has_shift else None, spec.offset)
        return None, None

    def _inputs(self, q: Chain, k: Chain, own: Norm | None) -> InputNorms:
        """The norms whose outputs are read, wherever they stand, as far as the family tells.

        Args:
            q: chain of the queries.
            k: likewise, of the keys.
            own: the norm that belongs to the layer, if that is the one: it is not read twice.
        """
        holds = (spec for spec in self.spec.norm if self.settings.holds(spec.when, self.layer))
        if (spec := next(holds, None)) is None:
            return InputNorms()
        layers = self.settings.value(spec.memory_layers, self.layer) if spec.memory_layers else None
        places = {"previous": self.layer - 1, "last": layers - 1 if isinstance(layers, int) else -1}
        memory = spec.memory if self.spec.kind == "cross" else ""
        at = spec.at.format(layer=self.layer, inner=self.where.inner, **places)
        return InputNorms(
            self._input_norm(at, spec, q) if own is None else own,
            self._input_norm(memory.format(layer=self.layer, inner=self.where.inner, **places), spec, k),
        )

    def _input_norm(self, name: str, spec: NormSpec, reader: Chain) -> Norm | None:
        """A norm by its name; None if there is none, or the maps read another width."""
        infos = self.tensors.infos
        of_gain, of_shift = norm_tensors(self.tensors, self.where.prefix + name)
        gain = infos.get(of_gain)
        if not name or gain is None or gain.shape != (reader[0].d_in,) or not gain.dtype.is_floating_point:
            return None
        shift = self.tensors.read(of_shift) if of_shift in infos else None
        return Norm(self.tensors.read(of_gain), shift, spec.offset)

    def _normalised_values(self, v: Chain) -> Chain:
        """Values that are normalised head by head: a norm between their map and one that changes nothing."""
        (link,) = v
        eye = torch.eye(link.d_out, dtype=link.weight.dtype).expand(link.copies, -1, -1)
        norm = HeadNorm(self.settings.number(self.spec.value_norm, self.layer))
        return replace(link, norm=norm), Link(eye, learned=False)

    def _head_norms(
        self, heads: int, rotary: RotaryEmbedding | None
    ) -> tuple[HeadNorm | None, HeadNorm | None]:
        spec = self.spec.head_norm
        if spec is None or not self.settings.holds(spec.when, self.layer) or (spec.turned and not rotary):
            return None, None
        norms = self._head_norm(spec, spec.q, heads), self._head_norm(spec, spec.k, self._groups(heads))
        if not spec.turned or rotary is None:
            return norms
        q, k = (replace(norm, eps=norm.eps / rotary.factor**2) for norm in norms)
        return q, k

    def _head_norm(self, spec: HeadNormSpec, name: str, heads: int) -> HeadNorm:
        eps = self.settings.number(spec.eps, self.layer)
        if not name:
            return HeadNorm(eps, centred=spec.kind == "layer", over=spec.over)
        if "{head}" in name:
            names = [f"{self.site.module}.{name.format(head=head)}" for head in range(heads)]
            shape = (
                self.tensors.infos[f"{names[0]}.weight"].shape if self._has(f"{names[0]}.weight") else None
            )
            gain = torch.stack([self._take(f"{n}.weight", shape) for n in names])
            shift = None
            if self._has(f"{names[0]}.bias"):
                shift = torch.stack([self._take(f"{n}.bias", shape) for n in names])
        else:
            at = f"{self.site.module}.{name}"
            gain = self._take(f"{at}.weight")
            shift = self._take(f"{at}.bias") if f"{at}.bias" in self.tensors.infos else None
        return HeadNorm(eps, gain + spec.offset, shift, spec.kind == "layer", spec.over)

    def _position(self) -> PositionSpec:
        for spec in self.spec.positions:
            if self.settings.holds(spec.when, self.layer):
                return spec
        return PositionSpec(kind="none")

    def _rotary(self, spec: PositionSpec, width: int) -> RotaryEmbedding | None:
        if spec.kind != "rotary":
            return None
        settings, layer = self.settings, self.layer
        whole = settings.count(spec.width, layer) if spec.width else width
        if spec.patches is not None:
            return self._rotary_of_patches(spec, spec.patches, whole)
        scaling = self._rope_scaling(spec)
        share, start = settings.number(spec.share, layer), int(settings.number(spec.start, layer))
        # "proportional" turns a share of the planes of whole heads, and not all planes of a share of them.
        turned = whole if rope_type(scaling) == "proportional" else int(whole * share)
        if not 0 <= share <= 1 or start < 0 or turned + start > width:
            raise DataError(
                f"{settings.where}: rotary positions would turn more than the {width} channels of a head"
            )
        if turned % 2:
            raise DataError(
                f"{settings.where}: rotary positions would turn {turned} channels of a head, an odd number"
            )
        first = settings.value("original_max_position_embeddings", layer)
        if scaling and first is not None:  # some have it beside the record, which counts for more
            scaling = {**scaling, "original_max_position_embeddings": first}
        longest = settings.number("max_position_embeddings | 2048", layer)
        base = settings.number(spec.base, layer)
        if "rope_theta" in spec.base and scaling.get("rope_theta") is not None:
            base = Settings(scaling, settings.where).number(
                "rope_theta"
            )  # a record takes another's place whole
        try:
            found = frequencies(scaling, turned, base, longest, share)
        except (ValueError, TypeError, ArithmeticError) as error:
            raise DataError(f"{settings.where}: rotary positions cannot be scaled so: {error}") from None
        self._require_stored(spec, found.per_position)
        factor = found.factor
        if spec.factor and rope_type(scaling) != "default":
            factor = settings.number(spec.factor, layer)
        return RotaryEmbedding(found.per_position, spec.pairing, start, factor)

    def _rotary_of_patches(self, spec: PositionSpec, patches: PatchesSpec, width: int) -> RotaryEmbedding:
        """DINOv3's: half of the planes turn by rows and half by columns, of which a picture has 2."""
        settings, layer = self.settings, self.layer
        if width % 4:
            raise DataError(
                f"{settings.where}: rotary positions in two directions need 4 channels, not {width}"
            )
        plain = frequencies({}, width // 2, settings.number(spec.base, layer), 0.0).per_position
        rows, columns = self._grid(patches)
        before = sum(settings.whole(part, layer) for part in patches.before)
        centres = [(2 * torch.arange(n, dtype=torch.float64) + 1) / n - 1 for n in (rows, columns)]
        of_patches = torch.stack(torch.meshgrid(*centres, indexing="ij"), dim=-1).flatten(0, 1)
        places = torch.cat([torch.zeros(before, 2, dtype=torch.float64), of_patches])
        of_planes = places.repeat_interleave(len(plain), dim=1)
        return RotaryEmbedding(2 * math.pi * plain.repeat(2), spec.pairing, places=of_planes)

    def _grid(self, patches: PatchesSpec) -> tuple[int, int]:
        """Rows and columns of patches."""
        image, patch = (self._two(expression) for expression in (patches.image, patches.patch))
        rows, columns = (whole // part for whole, part in zip(image, patch, strict=True))
        if not rows or not columns:
            raise DataError(f"{self.settings.where}: no patch of {patch} is in a picture of {image}")
        return rows, columns

    def _two(self, expression: str) -> tuple[int, int]:
        found = self.settings.value(expression, self.layer)
        two = found if isinstance(found, list | tuple) and len(found) == 2 else (found, found)
        record = Settings({"height": two[0], "width": two[1]}, f"{self.settings.where}, {expression}")
        return record.count("height"), record.count("width")

    def _require_stored(self, spec: PositionSpec, per_position: Tensor) -> None:
        """Angles that the file holds are those of the configuration.

        Raises:
            DataError: they are others.
        """
        for pattern in spec.stored:
            name = self._beside(pattern)
            if name not in self.tensors.infos:
                continue
            stored = self.tensors.read(name).double()
            expected = per_position
            if stored.ndim == 2:
                angles = torch.arange(len(stored), dtype=torch.float64)[:, None] * per_position
                expected = torch.cat([angles.sin(), angles.cos()], dim=-1)
            # Rounded once to what it is stored in, perhaps after angles were computed in float32.
            rounding = 4 * (torch.finfo(self.tensors.infos[name].dtype).eps + 1e-7 * len(stored))
            if stored.shape != expected.shape or float((stored - expected).abs().max()) > rounding:
                raise DataError(
                    f"{self._of(name)}: the rotary positions stored here are not those of the configuration"
                )

    def _rope_scaling(self, spec: PositionSpec) -> dict[str, Any]:
        found = (self.settings.value(path, self.layer) for path in spec.scaling)
        return next((record for record in found if record and isinstance(record, dict)), {})

    def _bias(self, spec: PositionSpec, heads: int, scale: float, q: Link, k: Link) -> ScoreBias | None:
        match spec.kind:
            case "alibi":
                of_heads = alibi_slopes(heads) if spec.slopes == "authors" else _mpt_slopes(heads)
                times = scale if spec.times == "scale" else self.settings.number(spec.times, self.layer)
                return ALiBi(torch.tensor(of_heads, dtype=torch.float64) * times)
            case "distance table":
                return self._distance_table(spec, heads)
            case "disentangled":
                return self._disentangled(spec, heads, scale, q, k)
            case _:
                return None

    def _distance_table(self, spec: PositionSpec, heads: int) -> ScoreBias:
        tables = [self._take(name) for name in self._tables(spec)]
        table = tables[0]
        for more in tables[1:]:
            table = table + more
        if spec.patches is not None:
            rows, columns = self._grid(spec.patches)
            if rows != columns:
                raise DataError(
                    f"{self.settings.where}: {rows} rows and {columns} columns of patches: tables of "
                    "distances are read for square pictures alone"
                )
            shape = ((2 * rows - 1) * (2 * columns - 1) + 3, heads)
            if tuple(table.shape) != shape:
                raise DataError(
                    f"{self._of(self._tables(spec)[0])}: shape {list(table.shape)}, "
                    f"where the configuration makes it {list(shape)}"
                )
            return PatchPositionBias(table, rows, columns)
        if spec.buckets:
            buckets = self.settings.count(spec.buckets, self.layer)
            if len(table) < buckets:
                raise DataError(
                    f"{self._of(self._tables(spec)[0])}: {len(table)} rows, where {buckets} are used"
                )
            table = table[:buckets]
        longest = int(self.settings.number(spec.max_distance, self.layer))
        return RelativePositionBias(table, spec.both_ways, longest)

    def _tables(self, spec: PositionSpec) -> list[str]:
        more = [c.value for c in spec.more_tables if self.settings.holds(c.when, self.layer)]
        return [self._table(name) for name in (spec.table, *more)] if spec.table else []

    def _table(self, name: str) -> str:
        """A table's name. `BeitBackbone` saves one that layers share below another prefix than the layers."""
        usual = self._beside(name)
        if usual in self.tensors.infos:
            return usual
        found = [other for other in self.tensors.infos if other.endswith(f".{name}")]
        return found[0] if len(found) == 1 else usual

    def _disentangled(
        self, spec: PositionSpec, heads: int, scale: float, q: Link, k: Link
    ) -> DisentangledBias:
        """DeBERTa's: distances go through maps of their own, or through those of queries and keys."""
        settings, parts = self.settings, self._distance_parts()
        longest = settings.value("max_relative_positions")
        longest = (
            longest if isinstance(longest, int) and longest > 0 else settings.count("max_position_embeddings")
        )
        buckets: Any = settings.value(spec.buckets) if spec.buckets else None
        in_buckets = isinstance(buckets, int) and buckets > 0
        span: int = buckets if in_buckets else longest
        table = self._take(self._beside(spec.table))
        if table.ndim != 2 or table.shape[1] != k.d_in:
            raise DataError(
                f"{self._of(self._beside(spec.table))}: shape {list(table.shape)} is no table of vectors of "
                f"width {k.d_in}"
            )
        table = table[: 2 * span]
        if spec.table_norm and "layer_norm" in str(settings.value("norm_rel_ebd") or ""):
            gain, shift = (
                self._take(self._beside(f"{spec.table_norm}.{part}"), (k.d_in,))
                for part in ("weight", "bias")
            )
            eps = settings.number("layer_norm_eps | 1e-7")
            table = torch.nn.functional.layer_norm(table, gain.shape, gain, shift, eps)
        shared = bool(spec.shared_maps) and settings.holds(spec.shared_maps)

        def through(link: Link, own: str) -> Tensor:
            used = link if shared else _to_heads(*self._map(own, heads * link.d_out), heads)
            return used(table[None, None])[0]

        return DisentangledBias(
            keys=through(k, spec.key_map) if "c2p" in parts else None,
            queries=through(q, spec.query_map) if "p2c" in parts else None,
            span=span,
            max_distance=longest if in_buckets else None,
            scale=scale,
            through_maps=shared,
        )

    def _distance_parts(self) -> list[str]:
        found = self.settings.value("pos_att_type")
        found = found.split("|") if isinstance(found, str) else found
        return [part for part in ("c2p", "p2c") if isinstance(found, list) and part in found]

    def _window(self) -> int | None:
        for choice in self.spec.window:
            if self.settings.holds(choice.when, self.layer):
                found = self.settings.value(choice.value, self.layer)
                if found is None:
                    return None
                width = self.settings.count(choice.value, self.layer)
                if self.spec.window_around:
                    return width // 2 + 1
                if is_turned_round(self.spec, self.settings):
                    return width + 1  # so many on either side, and its own place
                # Half of a window that was written for keys on one side is on either.
                return width if self.site.kind == self.spec.kind else width // 2 + 1
        return None

    def _chunk(self) -> int | None:
        for choice in self.spec.chunk:
            if self.settings.holds(choice.when, self.layer):
                found = self.settings.value(choice.value, self.layer)
                return None if found is None else self.settings.count(choice.value, self.layer)
        return None

    def _temperature(self, rotary: RotaryEmbedding | None) -> Temperature | None:
        spec, settings = self.spec.temperature, self.settings
        if spec is None or not settings.holds(spec.when, self.layer) or (spec.unturned and rotary):
            return None
        if settings.value(spec.strength, self.layer) is None:
            return None
        every = settings.number(spec.every, self.layer)
        if every <= 0:
            raise DataError(f"{settings.where}: {spec.every} is {every:g}: a number above 0 is needed")
        return Temperature(settings.number(spec.strength, self.layer), every, spec.first)

    def _chosen_number(self, choices: Sequence[Choice], otherwise: float) -> float:
        for choice in choices:
            if self.settings.holds(choice.when, self.layer):
                if choice.value == "1 / (layer + 1)":
                    return 1 / (self.layer + 1)
                if choice.value == "yarn":
                    return self._yarn_scale()
                return self.settings.number(choice.value, self.layer)
        return otherwise

    def _yarn_scale(self) -> float:
        scaling = Settings(self._rope_scaling(self._position()), f"{self.settings.where}, scaling of rope")
        if not scaling.value("mscale_all_dim") or scaling.value("rope_type | type") in (None, "default"):
            return 1.0
        return yarn_magnitude(scaling.number("factor"), scaling.number("mscale_all_dim")) ** 2

    def _chosen_text(self, choices: Sequence[Choice]) -> str:
        return next((c.value for c in choices if self.settings.holds(c.when, self.layer)), "")

    def _optional_number(self, expression: str) -> float | None:
        if not expression or self.settings.value(expression, self.layer) is None:
            return None
        return self.settings.number(expression, self.layer)

    # Tensors.

    def names_beside(self) -> list[str]:
        """Tensors outside the module that belong to the layer."""
        found = self.norm_names()
        position = self._position()
        found += self._tables(position)
        if position.table_norm:
            found += [f"{self._beside(position.table_norm)}.{part}" for part in ("weight", "bias")]
        return found

    def stored_names(self) -> list[str]:
        """Tensors that hold angles of rotary positions."""
        return [self._beside(name) for name in self._position().stored]

    def norm_names(self) -> list[str]:
        """Tensors of the norm that the layer reads, if it may be folded."""
        found: list[str] = []
        for spec in self.spec.norm:
            if spec.at and spec.place == "pre" and self.settings.holds(spec.when, self.layer):
                found += norm_tensors(self.tensors, self._beside(spec.at))
        return found

    def rewritable(self) -> list[str]:
        """Tensors that a rewrite of the layer may change: maps, norms of heads, sinks, its norm."""
        below, patterns = self.site.module + ".", self._patterns()
        within = [
            name
            for name in self.tensors.below(self.site.module)
            if any(fnmatch.fnmatchcase(name.removeprefix(below), pattern) for pattern in patterns)
        ]
        return [*within, *(name for name in self.norm_names() if name in self.tensors.infos)]

    def _patterns(self) -> list[str]:
        """Names within the module of what a rewrite may change."""
        spec = self.spec
        modules = [spec.qkv] if spec.qkv else [spec.q, spec.k, spec.v]
        own = [name for name in (spec.sinks, spec.q_bias, spec.v_bias) if name]
        if spec.latent:
            latent = spec.latent
            modules = [spec.q, latent.q_down, latent.q_norm, latent.q_up]
            modules += [latent.kv_down, latent.kv_norm, latent.kv_up]
        modules.append(spec.o)
        if spec.head_norm:
            modules += [name for name in (spec.head_norm.q, spec.head_norm.k) if name]
        patterns = [name.replace("{head}", "*") for module in modules for name in tensor_names(module)]
        return [*patterns, *own]

    def unknown(self) -> list[str]:
        """Tensors within the module that have no place in the family."""
        patterns = [*self._patterns(), *self.spec.known]
        below, beside = self.site.module + ".", self.names_beside() + self.stored_names()
        return [
            name
            for name in self.tensors.below(self.site.module)
            if name not in beside
            and not any(fnmatch.fnmatchcase(name.removeprefix(below), pattern) for pattern in patterns)
        ]

    def _beside(self, name: str) -> str:
        return self.where.prefix + name.format(layer=self.layer, inner=self.where.inner)

    def _take(self, name: str, shape: tuple[int, ...] | None = None) -> Tensor:
        if name not in self.tensors.infos:
            raise DataError(f"{self.tensors.name}: there is no tensor {name}")
        tensor = self.tensors.read(name)
        if shape is not None and tuple(tensor.shape) != shape:
            raise DataError(
                f"{self._of(name)}: shape {list(tensor.shape)}, "
                f"where the configuration makes it {list(shape)}"
            )
        if not tensor.is_floating_point():
            raise DataError(
                f"{self._of(name)}: its entries are {tensor.dtype}, quantised in a way not known here"
            )
        self.read_names.append(name)
        return tensor if self._dtype is None else tensor.to(self._dtype)

    def _common_dtype(self) -> torch.dtype | None:
        """The narrowest that holds all floating numbers of the layer: maps and norms may differ.

        Raises:
            DataError: some are in float8, and nothing says what they are multiplied by.
        """
        found = None
        beside = [name for name in self.names_beside() if name in self.tensors.infos]
        for name in (*self.tensors.below(self.site.module), *beside):
            info = self.tensors.infos[name]
            if info.dtype.is_floating_point:
                if info.dtype.itemsize == 1:
                    raise DataError(f"{self._of(name)}: float8 without a scale, which is not read")
                found = info.dtype if found is None else torch.promote_types(found, info.dtype)
        if found is not None and self.spec.latent is not None:
            return torch.promote_types(found, torch.float32)  # maps take up the gains of norms between them
        return found

    def _has(self, name: str) -> bool:
        return name in self.tensors.infos

    def _of(self, name: str) -> str:
        return f"{self.tensors.where(name)}, tensor {name}"


def _to_heads(weight: Tensor, bias: Tensor | None, heads: int) -> Link:
    """`[heads · width, d_in]` as a link with a map a head."""
    return Link(weight.view(heads, -1, weight.shape[1]).mT, None if bias is None else bias.view(heads, -1))


def _from_heads(weight: Tensor, heads: int) -> Link:
    """`[d_out, heads · width]` as a link with a map a head."""
    return Link(weight.mT.reshape(heads, -1, weight.shape[0]))


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


def _mpt_slopes(heads: int) -> list[float]:
    """As MPT finds them: by the power of two above, every second first."""
    above = 1 << (heads - 1).bit_length()
    slopes = [2 ** (-8 * (i + 1) / above) for i in range(above)]
    return slopes if above == heads else (slopes[1::2] + slopes[::2])[:heads]
