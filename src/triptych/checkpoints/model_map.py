"""What a family file makes of a checkpoint: a model's architecture, and where its tensors come from.

The attention layers have their own map (`layer_map`); this is the rest: embeddings, norms, feed-forward
layers, head. Both together account for every tensor of the file.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Never, final

import torch

from triptych.checkpoints.checkpoint import Checkpoint
from triptych.checkpoints.feed_forward_map import Entry, FeedForwardMap, activation
from triptych.checkpoints.fields import listed, not_understood_of_model
from triptych.checkpoints.layer import Site
from triptych.checkpoints.layer_map import LayerMap, norm_tensors
from triptych.checkpoints.model_spec import EmbeddedPositionsSpec, HeadSpec, ModelSpec
from triptych.checkpoints.place import Place
from triptych.checkpoints.positions import stored_angles
from triptych.checkpoints.reading import LayerReader, require_shape
from triptych.checkpoints.specs import NormSpec
from triptych.checkpoints.tensor_maps import Named, OnlyRow, Shape
from triptych.errors import DataError
from triptych.models.architecture import (
    BlockConfig,
    EmbeddingsConfig,
    EncoderDecoderArchitecture,
    ExpertsConfig,
    FeedForwardConfig,
    HeadConfig,
    LanguageModelArchitecture,
    MaskedTokens,
    NormConfig,
    SublayerConfig,
)


@final
@dataclass(frozen=True)
class ModelMap:
    """A model as it lies in a checkpoint.

    Attributes:
        architecture: what it is made of.
        sites: the attention layer of every block.
        tensors: from the stored tensors to the others of `LanguageModel`, by their names there.
        copies: stored tensors that hold the numbers of another one, and that one.
    """

    architecture: LanguageModelArchitecture
    sites: tuple[Site, ...]
    tensors: LayerMap
    copies: Mapping[str, str]


def model_map(checkpoint: Checkpoint) -> ModelMap:
    """What a checkpoint's model is made of.

    Raises:
        DataError: its family cannot be run; a field of the configuration that is not understood; a tensor
            that is missing, left over or of another shape. It is named.
    """
    spec = checkpoint.family.model
    if spec is None:
        raise DataError(
            f"{checkpoint.name}: checkpoints of {checkpoint.family.name} can be read, and not run"
        )
    if spec.encoder is not None:
        raise DataError(
            f"{checkpoint.name}: a model of {checkpoint.family.name} has an encoder and a decoder, and is no "
            "language model"
        )
    mapping = _Mapping(checkpoint, spec, checkpoint.sites)
    architecture = mapping.architecture()
    found = ModelMap(architecture, checkpoint.sites, LayerMap(dict(mapping.entries)), mapping.copies)
    _account(checkpoint, found.tensors, (mapping,))
    return found


@final
@dataclass(frozen=True)
class EncoderDecoderMap:
    """An encoder and a decoder as they lie in a checkpoint.

    Attributes:
        architecture: what they are made of.
        encoder: the attention layers of the encoder's blocks.
        decoder: the self-attention of the decoder's blocks.
        cross: their cross-attention.
        pad_id: the token that attention must not see.
        tensors: from the stored tensors to the others of `EncoderDecoder`, by their names there.
        copies: stored tensors that hold the numbers of another one, and that one.
    """

    architecture: EncoderDecoderArchitecture
    encoder: tuple[Site, ...]
    decoder: tuple[Site, ...]
    cross: tuple[Site, ...]
    pad_id: int
    tensors: LayerMap
    copies: Mapping[str, str]


def encoder_decoder_map(checkpoint: Checkpoint) -> EncoderDecoderMap:
    """What a checkpoint's encoder and decoder are made of.

    Raises:
        DataError: see `model_map`; or the family has no models of both, or one half is missing.
    """
    spec = checkpoint.family.model
    if spec is None or spec.encoder is None:
        raise DataError(
            f"{checkpoint.name}: {checkpoint.family.name} is not run as an encoder with a decoder"
        )
    sites = checkpoint.sites
    encoder = tuple(site for site in sites if site.stack == spec.encoder.stack)
    decoder = tuple(site for site in sites if site.stack == spec.stack and site.kind != "cross")
    cross = tuple(site for site in sites if site.stack == spec.stack and site.kind == "cross")
    if not encoder or not decoder or len(decoder) != len(cross):
        raise DataError(f"{checkpoint.name}: it has one half of an encoder and a decoder, and cannot be run")
    read, write = _Mapping(checkpoint, spec.encoder, encoder), _Mapping(checkpoint, spec, decoder)
    source, target = read.architecture(), write.architecture()
    head = target.head
    assert head is not None
    shared = read.table == write.table
    entries = [
        (tuple(_renamed(name, _SOURCE) for name in ours), stored)
        for ours, stored in read.entries
        if not (shared and ours == ("embeddings.table.weight",))
    ]
    entries += [(tuple(_renamed(name, _TARGET) for name in ours), stored) for ours, stored in write.entries]
    architecture = EncoderDecoderArchitecture(
        d_model=target.d_model,
        source=source.embeddings,
        target=target.embeddings,
        shared=shared,
        encoder=source.blocks,
        decoder=target.blocks,
        encoder_norm=source.final_norm,
        decoder_norm=target.final_norm,
        tied=head.tied,
        output_bias=head.bias,
        logit_scale=head.scale,
    )
    tensors = LayerMap(dict(entries))
    _account(checkpoint, tensors, (read, write))
    pad_id = write.settings.whole("pad_token_id | 0")
    copies = {**read.copies, **write.copies}
    return EncoderDecoderMap(architecture, encoder, decoder, cross, pad_id, tensors, copies)


_SOURCE = {
    "embeddings.table.": "src_embedding.",
    "embeddings.positions.": "src_positions.",
    "embeddings.norm.": "src_norm.",
    "blocks.": "encoder.",
    "final_norm.": "encoder_norm.",
}
_TARGET = {
    "embeddings.table.": "tgt_embedding.",
    "embeddings.positions.": "tgt_positions.",
    "embeddings.norm.": "tgt_norm.",
    "blocks.": "decoder.",
    "final_norm.": "decoder_norm.",
    "head.output.": "output.",
}


def _renamed(name: str, names: Mapping[str, str]) -> str:
    return next(new + name.removeprefix(old) for old, new in names.items() if name.startswith(old))


@final
class _Mapping:
    """One stack of a checkpoint, with the layers of these sites."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec, sites: tuple[Site, ...]) -> None:
        self.checkpoint, self.spec, self.tensors = checkpoint, spec, checkpoint.tensors
        if others := [site for site in sites if site.stack != spec.stack or site.kind == "cross"]:
            self._refuse(f"{others[0].module} is no self-attention of its {spec.stack}: it cannot be run")
        further = [s for s in sites if (p := checkpoint.place(s)).layer >= p.settings.count(p.spec.layers)]
        if further:
            self._refuse(f"{further[0].module} predicts further tokens: such layers cannot be run")
        self.sites = sites
        self.first = checkpoint.place(sites[0])
        self.settings = self.first.settings
        for choice in spec.refused:
            if self.settings.holds(choice.when):
                self._refuse(f"{checkpoint.family.name} cannot be run: {choice.value}")
        if strange := not_understood_of_model(checkpoint.family, self.settings):
            self._refuse_field(strange)
        self.entries: list[Entry] = []
        self.copies: dict[str, str] = {}  # tensors that are others as well

    # The parts, each of which also enters its tensors.

    def architecture(self) -> LanguageModelArchitecture:
        """What it is made of; also makes `entries`."""
        spec, both_ways = self.spec, {site.kind == "self" for site in self.sites}
        if spec.kind == "decoder" and len(both_ways) > 1:
            self._refuse("some of its layers see later tokens and some do not: it cannot be run")
        embeddings = self._embeddings()
        blocks = tuple(self._block(number, site) for number, site in enumerate(self.sites))
        final_norm = self._norm("final_norm", self.first, spec.final_norm)
        return LanguageModelArchitecture(
            kind="encoder" if True in both_ways else "decoder",
            d_model=self.d_model,
            embeddings=embeddings,
            blocks=blocks,
            final_norm=final_norm,
            head=self._head() if spec.kind == "decoder" else self._head_of_encoder(),
            order=self._order(),
        )

    def _order(self) -> tuple[int, ...]:
        """The blocks in the order of their use, where layers share them."""
        spec, place = self.first.spec, self.first
        uses, inner = place.number(spec.uses), place.count(spec.inner)
        if uses == 1:
            return ()
        layers = round(uses * len(self.sites) / inner)
        return tuple(int(layer / uses) * inner + number for layer in range(layers) for number in range(inner))

    @cached_property
    def d_model(self) -> int:
        return self.settings.count(self.first.spec.size)

    def _embeddings(self) -> EmbeddingsConfig:
        spec, place = self.spec, self.first
        table = f"{place.beside(spec.embedding)}.weight"
        said = self.settings.value("vocab_size")
        self._enter("embeddings.table.weight", table, (said if isinstance(said, int) else None, self._width))
        for copy in spec.copies:
            self._require_same(f"{place.beside(copy)}.weight")
        found = EmbeddingsConfig(
            self.tensors.infos[table].shape[0],
            scale=self._number(spec.embedding_scale) * self._number(place.chosen(spec.root_scale)) ** 0.5,
            width=self._width if self._embedding_map() else None,
            map_bias=f"{self._embedding_map()}.bias" in self.tensors.infos,
            map_first=spec.map_first and bool(self._embedding_map()),
            num_types=self._types(),
            masked=self._masked(),
            norm=self._norm("embeddings.norm", place, spec.embedding_norm, self._width),
            norm_first=spec.norm_first,
        )
        positions = place.first(spec.positions)
        kind = "none" if positions is None else positions.kind
        embedded = place.position.kind
        added = embedded in ("learned", "sinusoidal")
        beside = ("distance table", "disentangled")  # which attention may have besides
        if kind == "none" if added else kind != "none" and embedded not in beside:
            self._refuse(f"its attention says that positions are {embedded}, its embeddings {kind}")
        return found if positions is None else self._with_positions(found, positions)

    @cached_property
    def _width(self) -> int:
        """Of the table of tokens."""
        width = self.spec.embedding_width
        return self.settings.count(width) if width else self.d_model

    def _embedding_map(self) -> str:
        """The map from the table's width to the model's; "" without one."""
        module = self.first.beside(self.spec.embedding_map)
        if not self.spec.embedding_map or f"{module}.weight" not in self.tensors.infos:
            if self._width != self.d_model:
                self._refuse(f"embeddings are {self._width} wide, and no map leads to {self.d_model}")
            return ""
        if all(ours != ("embeddings.map.weight",) for ours, _ in self.entries):
            self._enter("embeddings.map.weight", f"{module}.weight", (self.d_model, self._width))
            if f"{module}.bias" in self.tensors.infos:
                self._enter("embeddings.map.bias", f"{module}.bias", (self.d_model,))
        return module

    def _masked(self) -> MaskedTokens | None:
        spec, settings = self.spec.masked, self.settings
        if spec is None or not settings.holds(spec.when):
            return None
        return MaskedTokens(settings.whole(spec.token), settings.whole(spec.padding))

    def _types(self) -> int:
        """How many segments there are rows for."""
        if not self.spec.types or not self.settings.value(self.spec.num_types):
            return 0
        count = self.settings.count(self.spec.num_types)
        name = f"{self.first.beside(self.spec.types)}.weight"
        self._enter("embeddings.types.weight", name, (count, self._width))
        return count

    def _with_positions(self, found: EmbeddingsConfig, spec: EmbeddedPositionsSpec) -> EmbeddingsConfig:
        rows, offset = self.settings.count(spec.rows), self.settings.whole(spec.offset_rows)
        padding = None
        if spec.padding:
            padding = self.settings.whole(spec.padding)
            offset = padding + 1
            rows -= offset
        kind, name = spec.kind, f"{self.first.beside(spec.table)}.weight"
        if kind == "sinusoidal" and spec.table and name in self.tensors.infos:
            kind = "learned"  # as they are stored
        if kind == "learned":
            width = self.d_model if self.spec.map_first else self._width
            self._enter("embeddings.positions.weight", name, (rows + offset, width))
        return replace(
            found,
            positions=kind,
            num_positions=rows,
            position_offset=offset,
            padding_id=padding,
            sinusoidal_layout=spec.layout,
        )

    def _block(self, number: int, site: Site) -> BlockConfig:
        spec, place, at = self.spec, self.checkpoint.place(site), f"blocks.{number}"
        own, parallel = place.norm, place.chosen(spec.parallel)
        norms = spec.attention_norm or ((own,) if own is not None and own.place != "post" else ())
        return BlockConfig(
            self._frame(f"{at}.self_residual", place, norms, spec.attention_out_norm),
            self._feed_forward(f"{at}.feed_forward", place),
            self._frame(
                f"{at}.feed_forward_residual", place, spec.feed_forward_norm, spec.feed_forward_out_norm
            ),
            cross=self._frame(f"{at}.cross_residual", place, spec.cross_norm, ())
            if spec.cross_norm
            else None,
            parallel=bool(parallel) and place.holds(parallel),
        )

    def _frame(
        self, ours: str, place: Place, norms: tuple[NormSpec, ...], out_norms: tuple[NormSpec, ...]
    ) -> SublayerConfig:
        norm = place.first(norms)
        return SublayerConfig(
            self._norm(f"{ours}.norm", place, norms),
            "post" if norm is not None and norm.place == "post" else "pre",
            self._norm(f"{ours}.out_norm", place, out_norms),
            self._number(self.spec.residual_scale, place),
            from_norm=place.holds(self.spec.from_norm),
        )

    def _norm(
        self, ours: str, place: Place, norms: tuple[NormSpec, ...], width: int | None = None
    ) -> NormConfig | None:
        norm = place.first(norms)
        if norm is None or (norm.weight and not norm.at):
            return None
        return self._norm_at(ours, place, norm, place.beside(norm.at), width or self.d_model)

    def _norm_at(self, ours: str, place: Place, norm: NormSpec, module: str, width: int) -> NormConfig:
        """A norm; a LayerNorm has a bias where the file has one, and 0 for it elsewhere, as there."""
        eps = place.number(norm.eps or self.spec.eps)
        weight, bias = norm_tensors(self.tensors, module)
        has_bias = norm.kind == "layer" and bias in self.tensors.infos
        if norm.weight:
            self._enter(f"{ours}.weight", weight, (width,))
        if has_bias:
            self._enter(f"{ours}.bias", bias, (width,))
        return NormConfig(norm.kind, eps, norm.weight, has_bias, norm.offset)

    def _feed_forward(self, ours: str, place: Place) -> FeedForwardConfig | ExpertsConfig:
        found = FeedForwardMap(ours, place, self.spec.feed_forward, self.d_model, self.tensors)
        for parts, stored in found.entries:
            self._add(parts, stored)
        return found.config

    def _head(self) -> HeadConfig:
        spec, vocab_size = self.spec.head, self.tensors.infos[self.table].shape[0]
        module, width, transform = self._above(spec.at), self.d_model, self._above(spec.transform)
        has_map = bool(spec.transform) and f"{transform}.weight" in self.tensors.infos
        if has_map:
            width = self.tensors.infos[f"{transform}.weight"].shape[0]
            self._enter("head.map.weight", f"{transform}.weight", (width, self.d_model))
        tied, bias = self.settings.holds(spec.tied), self.settings.holds(spec.bias)
        if spec.tied_if_missing:
            tied = f"{module}.weight" not in self.tensors.infos
        if tied and width != self._width:
            self._refuse(f"{self.table} is {self._width} wide, and what reads it as output table {width}")
        if tied:
            self._require_same(f"{module}.weight")
        else:
            self._enter("head.output.weight", f"{module}.weight", (vocab_size, width))
        names = [name for name in map(self._above, spec.bias_at) if name in self.tensors.infos]
        if names:
            bias = True
            self._add(("head.output.bias",), Named((names[0],), (1, vocab_size), (OnlyRow(),)))
        elif bias:
            self._enter("head.output.bias", f"{module}.bias", (vocab_size,))
        over_root = self._number(self.first.chosen(spec.over_root))
        cap = self.settings.value(spec.soft_cap) if spec.soft_cap else None
        return HeadConfig(
            tied=tied,
            bias=bias,
            width=width if has_map else None,
            transform=has_map,
            map_bias=not has_map,
            scale=self._number(spec.scale) * over_root**-0.5,
            soft_cap=None if cap is None else self.settings.number(spec.soft_cap),
        )

    def _head_of_encoder(self) -> HeadConfig | None:
        for spec in self.spec.heads:
            first = self._above(spec.transform or spec.at)
            if self.settings.holds(spec.when) and f"{first}.weight" in self.tensors.infos:
                return self._head_with_transform(spec, first if spec.transform else "")
        return None

    def _head_with_transform(self, spec: HeadSpec, transform: str) -> HeadConfig:
        place, infos, width = self.first, self.tensors.infos, self.d_model
        if transform:
            width = infos[f"{transform}.weight"].shape[0]
            self._enter("head.map.weight", f"{transform}.weight", (width, self.d_model))
            if map_bias := place.holds(spec.map_bias):
                self._enter("head.map.bias", f"{transform}.bias", (width,))
        norm = place.first(spec.norm)
        outputs = self.settings.count(spec.outputs) if spec.outputs else None
        count, output = outputs or infos[self.table].shape[0], self._above(spec.at)
        tied = outputs is None and self.settings.holds(spec.tied)
        if tied:
            if width != self._width:
                self._refuse(
                    f"{transform}.weight leads to {width} channels, and {self.table} has {self._width}"
                )
            self._require_same(f"{output}.weight")
        else:
            self._enter("head.output.weight", f"{output}.weight", (count, width))
        return HeadConfig(
            tied=tied,
            bias=self._output_bias(spec, output, count, tied=tied),
            width=width,
            transform=bool(transform),
            outputs=outputs,
            map_bias=bool(transform) and map_bias,
            activation=activation(place, spec.activation) if spec.activation else None,
            norm=None
            if norm is None
            else self._norm_at("head.norm", place, norm, self._above(norm.at), width),
        )

    def _output_bias(self, spec: HeadSpec, output: str, count: int, *, tied: bool) -> bool:
        """Enter the bias of the output, which files may have under two names; one if tied."""
        if not self.settings.holds(spec.bias):
            return False
        infos, own = self.tensors.infos, f"{output}.bias"
        names = [self._above(name) for name in spec.bias_at] or [own]
        if not tied and own in infos:
            names = [own, *(name for name in names if name != own)]
        found = [name for name in names if name in infos] or names[:1]
        self._enter("head.output.bias", found[0], (count,))
        for other in found[1:]:
            if tied and not torch.equal(self.tensors.read(other), self.tensors.read(found[0])):
                self._refuse(f"{other} is not {found[0]}: both are the bias of {output}")
            self.copies[other] = found[0]
        return True

    def _above(self, name: str) -> str:
        """A module or tensor of the head: above the names that attention layers share, as far as some are."""
        outer = self.first.prefix.split(".")[:-1]
        above = ["".join(f"{part}." for part in outer[:count]) for count in range(len(outer), -1, -1)]
        names = [f"{at}{name}" for at in above]
        infos = self.tensors.infos
        return next((found for found in names if found in infos or f"{found}.weight" in infos), names[-1])

    def _require_same(self, output: str) -> None:
        """A tied output map may be in the file as well, if it is the table.

        Raises:
            DataError: it is another.
        """
        if output not in self.tensors.infos:
            return
        if not torch.equal(self.tensors.read(output), self.tensors.read(self.table)):
            self._refuse(f"{output} is not {self.table}, though {self.spec.head.tied} says so")
        self.copies[output] = self.table

    @property
    def table(self) -> str:
        return f"{self.first.beside(self.spec.embedding)}.weight"

    # Tensors.

    def _enter(self, ours: str, name: str, shape: Shape) -> None:
        self._add((ours,), Named((name,), shape))

    def _add(self, ours: tuple[str, ...], stored: Named) -> None:
        for name in stored.names:
            if name not in self.tensors.infos:
                raise DataError(f"{self.tensors.name}: there is no tensor {name}")
            if stored.shape is not None:
                of = f"{self.tensors.where(name)}, tensor {name}"
                require_shape(of, [*self.tensors.infos[name].shape], [*stored.shape])
        self.entries.append((ours, stored))

    # What is refused.

    def _number(self, expression: str, place: Place | None = None) -> float:
        """A factor; 1 for an empty expression."""
        return (self.first if place is None else place).number(expression) if expression else 1.0

    def _refuse(self, why: str) -> Never:
        raise DataError(f"{self.checkpoint.name}: {why}")

    def _refuse_field(self, names: list[str]) -> Never:
        raise DataError(
            f"{self.settings.where}: it is not known what {listed(names)} changes in a model of "
            f"{self.checkpoint.family.name}: delete what changes nothing"
        )


def _account(checkpoint: Checkpoint, found: LayerMap, mappings: tuple[_Mapping, ...]) -> None:
    """Every tensor is read, or changes nothing.

    Raises:
        DataError: one is neither.
    """
    tensors, used = checkpoint.tensors, {*found.names}
    patterns: list[str] = []
    for mapping in mappings:
        used |= mapping.copies.keys()
        patterns += mapping.spec.rest
    for site in checkpoint.sites:
        place = checkpoint.place(site)
        reader = LayerReader(place, tensors)
        used |= reader.map.names | {*reader.names_beside()} - {*reader.norm_names()}
        used |= {*stored_angles(place)}
        patterns += [place.within(known) for known in place.spec.known]
    strange = [
        name
        for name in tensors.infos
        if name not in used and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    if strange:
        what = "tensor" if len(strange) == 1 else "tensors"
        raise DataError(
            f"{checkpoint.name}: unknown {what} {listed(strange)}: models of {checkpoint.family.name} have "
            "none of this name"
        )
