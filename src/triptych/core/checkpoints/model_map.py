"""A checkpoint's architecture and the map of its tensors outside attention, as its family describes them.

The map covers embeddings, norms, feed-forward layers and head; `layer_map` covers attention layers. Together,
they account for every tensor of the file.
"""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar, final

from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.fields import list_names, not_understood_of_model
from triptych.core.checkpoints.layer_map import LayerMap
from triptych.core.checkpoints.model_parts import (
    Entries,
    FeedForwardMap,
    OutputHeadMap,
    TaskHeadMap,
    above,
    activation,
    task_of_class,
)
from triptych.core.checkpoints.specs import EmbeddedPositionsSpec, ModelSpec, NormSpec
from triptych.core.checkpoints.stored_layers import Place, Site
from triptych.core.models.architecture import (
    BlockConfig,
    BlockInputConfig,
    BlockInputsConfig,
    EmbeddingsConfig,
    EncoderDecoderArchitecture,
    LanguageModelArchitecture,
    MaskedTokens,
    NormConfig,
    StreamsConfig,
    SublayerConfig,
)
from triptych.errors import DataError

_Architecture = TypeVar(
    "_Architecture", LanguageModelArchitecture, EncoderDecoderArchitecture
)


@final
@dataclass(frozen=True)
class ModelMap(Generic[_Architecture]):
    """A model's architecture, and its tensors in a checkpoint."""

    architecture: _Architecture
    # the attention layer of every block: self-attention of an encoder, of a decoder, then cross-attention
    sites: tuple[Site, ...]
    tensors: LayerMap  # map from stored tensors to tensors outside attention, by their names in the model
    copies: Mapping[str, str]  # duplicate stored tensors, with the name of the original
    pad_id: int = 0  # padding token, masked in attention
    # tensors of a task's head that the family does not describe: they read the model's output
    unread: tuple[str, ...] = ()


def model_map(checkpoint: Checkpoint) -> ModelMap[LanguageModelArchitecture]:
    """Return the architecture and tensors of a checkpoint's language model.

    Raises DataError if the model cannot be run, or a tensor is missing, unknown or of a wrong shape.
    """
    spec = checkpoint.family.model
    if checkpoint.others:
        raise DataError(
            f"{checkpoint.name}: {checkpoint.others}: it can be read, and not run"
        )
    if spec is None:
        raise DataError(
            f"{checkpoint.name}: checkpoints of {checkpoint.family.name} can be read, and not run"
        )
    if has_two_stacks(checkpoint):
        raise DataError(
            f"{checkpoint.name}: a model of {checkpoint.family.name} has an encoder and a decoder, and is no "
            "language model"
        )
    if spec.encoder is not None:
        # The encoder alone may store its table under any of the names in the whole model.
        spec = spec.encoder.model_copy(update={"copies": spec.copies})
    sites = tuple(site for site in checkpoint.sites if site.stack not in spec.aside)
    mapping = _Mapping(checkpoint, spec, sites)
    architecture = mapping.architecture()  # also fills the entries
    entries = mapping.entries
    tensors = LayerMap(dict(entries.found))
    unread = _account(checkpoint, tensors, (mapping,))
    return ModelMap(architecture, mapping.sites, tensors, entries.copies, unread=unread)


def has_two_stacks(checkpoint: Checkpoint) -> bool:
    """Return True for an encoder with a decoder, False for the encoder alone (`T5EncoderModel`)."""
    spec = checkpoint.family.model
    return (
        spec is not None
        and spec.encoder is not None
        and checkpoint.absent != (spec.stack,)
    )


def encoder_decoder_map(checkpoint: Checkpoint) -> ModelMap[EncoderDecoderArchitecture]:
    """Return the architecture and tensors of a checkpoint's encoder and decoder.

    Raises DataError if the model cannot be run, or a tensor is missing, unknown or of a wrong shape.
    """
    spec = checkpoint.family.model
    if spec is None or spec.encoder is None:
        raise DataError(
            f"{checkpoint.name}: {checkpoint.family.name} is not run as an encoder with a decoder"
            + (
                ""
                if spec is None
                else ": triptych generate and fill run language models"
            )
        )
    sites = checkpoint.sites
    encoder = tuple(site for site in sites if site.stack == spec.encoder.stack)
    decoder = tuple(
        site for site in sites if site.stack == spec.stack and site.kind != "cross"
    )
    cross = tuple(
        site for site in sites if site.stack == spec.stack and site.kind == "cross"
    )
    if not encoder or not decoder or len(decoder) != len(cross):
        raise DataError(
            f"{checkpoint.name}: it has one half of an encoder and a decoder, and cannot be run"
        )
    read = _Mapping(checkpoint, spec.encoder, encoder)
    write = _Mapping(checkpoint, spec, decoder)
    source = read.architecture()
    target = write.architecture()
    head = target.head
    if head is None and not task_of_class(write.settings):
        write.entries.refuse(
            "its decoder has no output table and predicts no tokens: it cannot be run"
        )
    if source.d_model != target.d_model:
        write.entries.refuse(
            f"its encoder is {source.d_model} wide and its decoder {target.d_model}: it cannot be run"
        )
    architecture = EncoderDecoderArchitecture(
        replace(source, kind="encoder", head=None),
        # In `transformers`, encoder-decoder models scale the input of the output map instead of its logits.
        replace(
            target,
            kind="decoder",
            head=head and replace(head, scale=1.0, input_scale=head.scale),
        ),
        shared=read.table == write.table,
    )
    entries = {}
    for half, mapping in (("encoder", read), ("decoder", write)):
        for ours, stored in mapping.entries.found:
            # A shared table is written once, as the decoder's.
            if (
                architecture.shared
                and half == "encoder"
                and ours == ("embeddings.table.weight",)
            ):
                continue
            entries[tuple(f"{half}.{name}" for name in ours)] = stored
    tensors = LayerMap(entries)
    unread = _account(checkpoint, tensors, (read, write))
    pad_id = write.settings.whole("pad_token_id | 0")
    copies = {**read.entries.copies, **write.entries.copies}
    return ModelMap(
        architecture, (*encoder, *decoder, *cross), tensors, copies, pad_id, unread
    )


@final
class _Mapping:
    """A builder of the architecture and the entries of one stack of a checkpoint."""

    def __init__(
        self, checkpoint: Checkpoint, spec: ModelSpec, sites: tuple[Site, ...]
    ) -> None:
        self.checkpoint = checkpoint
        self.spec = spec
        self.tensors = checkpoint.tensors
        self.entries = Entries(checkpoint.name, checkpoint.tensors)
        if others := [
            site for site in sites if site.stack != spec.stack or site.kind == "cross"
        ]:
            self.entries.refuse(
                f"{others[0].module} is no self-attention of its {spec.stack}: it cannot be run"
            )
        # As in `transformers`, layers for the prediction of further tokens are left aside; so are layers
        # without a use in the model.
        self.aside = tuple(site for site in sites if not checkpoint.is_run(site))
        self.sites = tuple(site for site in sites if site not in self.aside)
        self.first = checkpoint.place(sites[0])
        self.settings = self.first.settings
        for choice in spec.refused:
            if self.settings.holds(choice.when):
                self.entries.refuse(
                    f"{checkpoint.family.name} cannot be run: {choice.value}"
                )
        if strange := not_understood_of_model(checkpoint.family, self.settings):
            are = "is" if len(strange) == 1 else "are"
            of_user = (
                ""
                if checkpoint.family.model_types
                else ", or name it in `harmless` of [model]"
            )
            raise DataError(
                f"{self.settings.where}: {list_names(strange)} may change what a model of "
                f"{checkpoint.family.name} computes, and {are} not followed here: delete what changes "
                f"nothing{of_user}"
            )

    # The parts; every method also enters the tensors of its part.

    def architecture(self) -> LanguageModelArchitecture:
        """Return the architecture; also fill `entries`."""
        spec = self.spec
        # Layers of kind "self" see later tokens: they make the stack an encoder, whatever the family's kind.
        both_ways = {site.kind == "self" for site in self.sites}
        if spec.kind == "decoder" and len(both_ways) > 1:
            self.entries.refuse(
                "some of its layers see later tokens and some do not: it cannot be run"
            )
        embeddings = self._embeddings()
        blocks = tuple(self._block(site) for site in self.sites)
        self._enter_streams()
        final_norm = self._norm("final_norm", self.first, spec.final_norm)
        task, second = (
            TaskHeadMap(self.first, spec, self.entries, self.d_model, head).config
            for head in ("task", "second")
        )
        return LanguageModelArchitecture(
            kind="encoder" if True in both_ways else "decoder",
            d_model=self.d_model,
            embeddings=embeddings,
            blocks=blocks,
            final_norm=final_norm,
            head=OutputHeadMap(
                self.first, spec, self.entries, self.d_model, self.table, self._width
            ).config,
            task=task,
            second=second,
            order=self._order(),
            inputs=self._block_inputs(),
        )

    def _block_inputs(self) -> BlockInputsConfig | None:
        spec = self.spec.input
        place = self.first
        if spec is None or not place.holds(spec.when):
            return None
        width = place.count(spec.width)
        rows = place.count(spec.rows)
        # One table and one map make the concatenated inputs of all blocks.
        all_blocks = width * len(self.sites)
        self.entries.enter(
            "inputs.table.weight",
            f"{place.beside(spec.table)}.weight",
            (rows, all_blocks),
        )
        self.entries.enter(
            "inputs.map.weight",
            f"{place.beside(spec.map)}.weight",
            (all_blocks, self.d_model),
        )
        at = place.beside(spec.norm.at)
        norm = self.entries.norm(
            "inputs.norm", place, spec.norm, at, width, self.spec.eps
        )
        return BlockInputsConfig(rows, width, norm)

    def _block_input(self, ours: str, place: Place) -> BlockInputConfig | None:
        spec = self.spec.input
        if spec is None or not place.holds(spec.when):
            return None
        width = place.count(spec.width)
        self.entries.enter(
            f"{ours}.gate.weight",
            f"{place.beside(spec.gate)}.weight",
            (width, self.d_model),
        )
        self.entries.enter(
            f"{ours}.outer.weight",
            f"{place.beside(spec.outer)}.weight",
            (self.d_model, width),
        )
        at = place.beside(spec.out_norm.at)
        norm = self.entries.norm(
            f"{ours}.norm", place, spec.out_norm, at, self.d_model, self.spec.eps
        )
        return BlockInputConfig(width, activation(place, spec.activation), norm)

    @cached_property
    def _streams(self) -> StreamsConfig | None:
        spec = self.spec.streams
        place = self.first
        if spec is None or not place.holds(spec.when):
            return None
        count = place.count(spec.number)
        active = self.settings.whole(spec.active)
        if not 0 <= active < count:
            self.entries.refuse(
                f"its blocks compute with stream {active}, and it has {count}, from 0 on"
            )
        eps = place.number(self.spec.eps)
        return StreamsConfig(
            count, active, place.holds(spec.scaled), place.count(spec.rank), eps
        )

    def _enter_streams(self) -> None:
        if self.spec.streams is None or self._streams is None:
            return
        for name, stored in self.spec.streams.around.items():
            for number in range(self._streams.number - 1):
                ours = f"streams.{name.format(stream=number)}"
                shape = (self.d_model, self.d_model)
                self.entries.enter(
                    ours, self.first.beside(stored, stream=number), shape
                )

    def _block_streams(self, ours: str, place: Place) -> StreamsConfig | None:
        spec = self.spec.streams
        config = self._streams
        if spec is None or config is None:
            return None
        count = config.number
        rank = config.rank
        width = self.d_model
        # Shapes of matrices; all further tensors are vectors of the model's width.
        shapes = {
            "router.weight": (count, width),
            "predictions.weight": (count * count, count),
            "corrections.weight": (count, count),
            "left.weight": (rank, width),
            "right.weight": (width, rank),
        }
        for name, stored in spec.block.items():
            if name != "scale" or config.scaled:
                self.entries.enter(
                    f"{ours}.{name}", place.beside(stored), shapes.get(name, (width,))
                )
        return config

    def _order(self) -> tuple[int, ...]:
        """Return the blocks in the order of their use; empty if every block is used once."""
        if not any(site.also for site in self.sites):
            return ()
        blocks = dict[int, int]()
        for block, site in enumerate(self.sites):
            blocks |= dict.fromkeys(site.numbers, block)
        return tuple(blocks[number] for number in sorted(blocks))

    def _first_use(self, site: Site) -> int:
        """Return the number of the model's first block with the parameters of a layer."""
        order = self._order()
        return order.index(self.sites.index(site)) if order else self.sites.index(site)

    @cached_property
    def _lenders(self) -> set[Site]:
        """Layers with keys and values used by KV-sharing layers."""
        return {
            place.lender.site
            for site in self.sites
            if (place := self.checkpoint.place(site)).lender
        }

    @cached_property
    def d_model(self) -> int:
        return self.settings.count(self.first.spec.size)

    def _embeddings(self) -> EmbeddingsConfig:
        spec = self.spec
        place = self.first
        table = self.table
        said = place.value(place.chosen(spec.num_tokens) or "vocab_size")
        rows = said if isinstance(said, int) else None
        self.entries.enter("embeddings.table.weight", table, (rows, self._width))
        # Tied tables are stored several times in some files; a difference between them is an error.
        for copy in () if self._is_untied else spec.copies:
            why = f", though {spec.head.tied} says so"
            self.entries.require_copy(f"{place.beside(copy)}.weight", self.table, why)
        masked = None
        if spec.masked is not None and place.holds(spec.masked.when):
            said_of = self.settings.whole
            masked = MaskedTokens(
                said_of(spec.masked.token), said_of(spec.masked.padding)
            )
        found = EmbeddingsConfig(
            self.tensors.infos[table].shape[0],
            scale=place.factor(spec.embedding_scale)
            * place.factor(place.chosen(spec.root_scale)) ** 0.5,
            width=self._width if self._embedding_map() else None,
            map_bias=f"{self._embedding_map()}.bias" in self.tensors.infos,
            map_first=spec.map_first and bool(self._embedding_map()),
            num_types=self._types(),
            masked=masked,
            norm=self._norm("embeddings.norm", place, spec.embedding_norm, self._width),
            norm_first=spec.norm_first,
        )
        positions = place.first(spec.positions)
        kind = "none" if positions is None else positions.kind
        embedded = place.position.kind
        added = embedded in ("learned", "sinusoidal")
        beside = (
            "distance table",
            "disentangled",
        )  # compatible with positions in the embeddings
        if kind == "none" if added else kind != "none" and embedded not in beside:
            self.entries.refuse(
                f"its attention says that positions are {embedded}, its embeddings {kind}"
            )
        return found if positions is None else self._with_positions(found, positions)

    @cached_property
    def _width(self) -> int:
        """Width of the table of tokens."""
        width = self.spec.embedding_width
        return self.settings.count(width) if width else self.d_model

    def _embedding_map(self) -> str:
        """Return the module of the map from the table's width to the model's width; "" if it is absent."""
        module = self.first.beside(self.spec.embedding_map)
        if not self.spec.embedding_map or f"{module}.weight" not in self.tensors.infos:
            if self._width != self.d_model:
                self.entries.refuse(
                    f"embeddings are {self._width} wide, and no map leads to {self.d_model}"
                )
            return ""
        if all(ours != ("embeddings.map.weight",) for ours, _ in self.entries.found):
            self.entries.enter(
                "embeddings.map.weight", f"{module}.weight", (self.d_model, self._width)
            )
            if f"{module}.bias" in self.tensors.infos:
                self.entries.enter(
                    "embeddings.map.bias", f"{module}.bias", (self.d_model,)
                )
        return module

    def _types(self) -> int:
        """Return the number of segments with embeddings."""
        if not self.spec.types or not self.settings.value(self.spec.num_types):
            return 0
        count = self.settings.count(self.spec.num_types)
        name = f"{self.first.beside(self.spec.types)}.weight"
        self.entries.enter("embeddings.types.weight", name, (count, self._width))
        return count

    def _with_positions(
        self, found: EmbeddingsConfig, spec: EmbeddedPositionsSpec
    ) -> EmbeddingsConfig:
        rows = self.settings.count(spec.rows)
        offset = self.settings.whole(spec.offset_rows)
        padding = None
        if spec.padding:
            padding = self.settings.whole(spec.padding)
            offset = (
                padding + 1
            )  # the row of position 0 follows that of the padding token
            if offset >= rows:
                name = spec.padding.partition(" ")[0]
                self.entries.refuse(
                    f"{name} is {padding}: of {rows} rows of positions none is left"
                )
            rows -= offset
        kind = spec.kind
        name = f"{self.first.beside(spec.table)}.weight"
        if kind == "sinusoidal" and spec.table and name in self.tensors.infos:
            kind = "learned"  # use the stored sines and cosines as a table
        if kind == "learned":
            width = self.d_model if self.spec.map_first else self._width
            self.entries.enter(
                "embeddings.positions.weight", name, (rows + offset, width)
            )
        return replace(
            found,
            positions=kind,
            num_positions=rows,
            position_offset=offset,
            padding_id=padding,
            sinusoidal_layout=spec.layout,
        )

    def _block(self, site: Site) -> BlockConfig:
        spec = self.spec
        place = self.checkpoint.place(site)
        at = f"blocks.{self._first_use(site)}"
        own = place.norm
        parallel = place.chosen(spec.parallel)
        # A post-norm read by the attention belongs to the frame of the sub-layer before.
        norms = spec.attention_norm or (
            (own,) if own is not None and own.place != "post" else ()
        )
        keys = place.lender.site if place.lender else site
        if spec.block_scale:
            self.entries.enter(f"{at}.scale", place.beside(spec.block_scale), (1,))
        return BlockConfig(
            self._frame(f"{at}.self_residual", place, norms, spec.attention_out_norm),
            FeedForwardMap(
                f"{at}.feed_forward",
                place,
                spec.feed_forward,
                self.entries,
                self.d_model,
            ).config,
            self._frame(
                f"{at}.feed_forward_residual",
                place,
                spec.feed_forward_norm,
                spec.feed_forward_out_norm,
            ),
            cross=self._frame(
                f"{at}.cross_residual", place, spec.cross_norm, spec.cross_out_norm
            )
            if spec.cross_norm
            else None,
            parallel=bool(parallel) and place.holds(parallel),
            keys=self.sites.index(keys) if keys in self._lenders else None,
            input=self._block_input(f"{at}.input", place),
            scaled=bool(spec.block_scale),
            streams=self._block_streams(f"{at}.streams", place),
        )

    def _frame(
        self,
        ours: str,
        place: Place,
        norms: tuple[NormSpec, ...],
        out_norms: tuple[NormSpec, ...],
    ) -> SublayerConfig:
        norm = place.first(norms)
        return SublayerConfig(
            self._norm(f"{ours}.norm", place, norms),
            "post" if norm is not None and norm.place == "post" else "pre",
            self._norm(f"{ours}.out_norm", place, out_norms),
            place.factor(self.spec.residual_scale),
            from_norm=place.holds(self.spec.from_norm),
        )

    def _norm(
        self,
        ours: str,
        place: Place,
        norms: tuple[NormSpec, ...],
        width: int | None = None,
    ) -> NormConfig | None:
        norm = place.first(norms)
        if norm is None or (norm.weight and not norm.at):
            return None
        module = place.beside(norm.at)
        width = width or self.d_model
        return self.entries.norm(ours, place, norm, module, width, self.spec.eps)

    @cached_property
    def table(self) -> str:  # name of the stored table of tokens
        names = [
            f"{self.first.beside(module)}.weight"
            for module in (self.spec.embedding, *self.spec.copies)
        ]
        own = f"{self.first.beside(self.spec.untied_embedding)}.weight"
        if self._is_untied and own in self.tensors.infos:
            return own
        if not self._is_untied:
            names += [
                f"{above(self.first.prefix, self.spec.head.at, self.tensors)}.weight"
            ]
        return next((name for name in names if name in self.tensors.infos), names[0])

    @property
    def _is_untied(self) -> bool:
        """True if the stacks may have separate tables."""
        spec = self.spec
        holds = self.settings.holds
        return bool(spec.untied_embedding) and (
            holds(spec.apart) or not holds(spec.head.tied)
        )


def _account(
    checkpoint: Checkpoint, found: LayerMap, mappings: tuple[_Mapping, ...]
) -> tuple[str, ...]:
    """Check that every tensor of the file is read, or known to change no hidden state.

    Returns the tensors of a task's head that the family does not describe.
    """
    tensors = checkpoint.tensors
    used = {*found.names}
    patterns: list[str] = []
    for mapping in mappings:
        used |= mapping.entries.copies.keys()
        patterns += mapping.spec.rest
        patterns += [f"{site.module.rpartition('.')[0]}.*" for site in mapping.aside]
    for site in checkpoint.sites:
        place = checkpoint.place(site)
        used |= checkpoint.used_names(site)
        patterns += [place.within(known) for known in place.spec.known]
    # An unknown tensor may change the output, so the model is refused rather than run without it.
    strange = [
        name
        for name in tensors.infos
        if name not in used
        and not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
    ]
    # The prefix of the layers is that of the model without its head: tensors beside it read its output.
    *_, last = mappings
    prefix = last.first.prefix
    if (
        prefix
        and task_of_class(last.settings)
        and not any(name.startswith(prefix) for name in strange)
    ):
        return tuple(strange)
    if strange:
        what = "tensor" if len(strange) == 1 else "tensors"
        raise DataError(
            f"{checkpoint.name}: unknown {what} {list_names(strange, most=6)}: models of "
            f"{checkpoint.family.name} have none of this name"
        )
    return ()
