"""The two models of a comparison: their parts under common names, read on demand.

Families, fused or split tensors, layouts of rotary pairs in files, shards and formats differ between two
checkpoints of one model. Models are read through their family files, so that a part has one name in either
model: the name in this library's modules, such as `blocks.3.feed_forward.inner.weight`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple, final

from torch import Tensor

from triptych.core.algebra.weights import SIDES, AttentionWeights
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.model_map import (
    ModelMap,
    encoder_decoder_map,
    has_two_stacks,
    model_map,
)
from triptych.core.checkpoints.module_layers import ModuleLayers
from triptych.core.checkpoints.stored_layers import AttentionSource, Site
from triptych.core.models import (
    BlockConfig,
    EncoderDecoderArchitecture,
    LanguageModelArchitecture,
    model_tensors,
)
from triptych.core.storage import Tensors
from triptych.errors import DataError
from triptych.running.opened_source import Opened

AnyArchitecture = LanguageModelArchitecture | EncoderDecoderArchitecture
StackName = Literal["encoder", "decoder"]
# Last parts of the names of stored constants.
_CONSTANTS = frozenset(
    {
        "inv_freq",
        "masked_bias",
        "position_ids",
        "token_type_ids",
        "relative_position_index",
        "rotary_emb",
    }
)


class AttentionPlace(NamedTuple):
    """The position of an attention layer: its stack, its block and its kind."""

    stack: StackName
    block: int  # number among the blocks with separate weights
    is_cross: bool = False


class Side(ABC):
    """A model in a comparison of two.

    Attributes:
        name: given path or name.
        record: configuration, as in `config.json`; empty for a module of this library.
        stored: tensors of the files by their stored names; None for a module of this library.
        pad_id: padding token of an encoder-decoder, masked in attention.
        architecture: architecture of the model; None if it cannot be run.
        why_no_architecture: reason why it cannot be run; "" if it can.
    """

    name: str
    record: Mapping[str, Any]
    stored: Tensors | None
    architecture: AnyArchitecture | None
    pad_id: int = 0
    why_no_architecture: str = ""

    @property
    @abstractmethod
    def source(self) -> AttentionSource:
        """The attention layers of the model."""

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Common names of all tensors outside attention, except a tied table."""

    @abstractmethod
    def read(self, name: str) -> Tensor:
        """Read a tensor outside attention by its common name, in its stored dtype."""

    @abstractmethod
    def site(self, place: AttentionPlace) -> Site:
        """Return the attention layer of a block."""

    @abstractmethod
    def stored_names(self, name: str) -> tuple[str, ...]:
        """Return the names in the files of a tensor outside attention."""

    @property
    def beside(self) -> tuple[str, ...]:
        """Stored tensors outside the model, except constants."""
        return ()

    @property
    @abstractmethod
    def stored_infos(self) -> dict[str, tuple[object, ...]]:
        """Dtype, shape and packing of every stored tensor, by stored name."""

    @abstractmethod
    def read_stored(self, name: str) -> Tensor:
        """Read a tensor by its stored name."""

    @property
    def stacks(self) -> dict[StackName, LanguageModelArchitecture]:
        """The stacks of the model; empty for a model that cannot be run."""
        match self.architecture:
            case None:
                return {}
            case LanguageModelArchitecture():
                return {self.architecture.kind: self.architecture}
            case _:
                return {
                    "encoder": self.architecture.encoder,
                    "decoder": self.architecture.decoder,
                }

    def prefix(self, stack: StackName) -> str:
        """Return the start of the common names of a stack: "" for a single stack."""
        return f"{stack}." if len(self.stacks) > 1 else ""

    @property
    def places(self) -> tuple[AttentionPlace, ...]:
        """Attention layers of a runnable model, in block order."""
        found = list[AttentionPlace]()
        for stack, made in self.stacks.items():
            for number, block in enumerate(made.blocks):
                found.append(AttentionPlace(stack, number))
                if block.cross is not None:
                    found.append(AttentionPlace(stack, number, is_cross=True))
        return tuple(found)

    def block(self, place: AttentionPlace) -> BlockConfig:
        return self.stacks[place.stack].blocks[place.block]

    def block_name(self, stack: StackName, number: int) -> str:
        """Return the start of the common names of a block; a repeated block is named by its first use."""
        return f"{self.prefix(stack)}blocks.{self.stacks[stack].uses.index(number)}"

    def attention(self, place: AttentionPlace) -> AttentionWeights:
        """Read an attention layer, without the norm before it."""
        return self.source.read(self.site(place)).weights.without_norms()

    def attention_name(self, place: AttentionPlace) -> str:
        """Return the start of the common names of an attention layer."""
        kind = "cross_attention" if place.is_cross else "self_attention"
        return f"{self.block_name(place.stack, place.block)}.{kind}"

    def matrices(self, place: AttentionPlace) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of an attention layer by common names.

        Maps are `[out, in]` with all heads, as in `torch.nn.Linear`; W_O is `[d_out, heads · width]`.
        """
        weights = self.attention(place)
        at = self.attention_name(place)
        for side in SIDES:
            chain = weights.chain(side)
            for number, link in enumerate(chain):
                name = f"{at}.{side}" if len(chain) == 1 else f"{at}.{side}.{number}"
                if link.learned:
                    yield (
                        f"{name}.weight",
                        as_matrix(link.weight, is_output=side == "o"),
                    )
                    if link.bias is not None:
                        yield f"{name}.bias", link.bias.flatten()
        if weights.o_bias is not None:
            yield f"{at}.o.bias", weights.o_bias
        for name, tensor in weights.semantics.learned().items():
            yield f"{at}.{name}", tensor

    @cached_property
    def table_names(self) -> dict[StackName, str]:
        """Common names of the embedding tables of the stacks."""
        found: dict[StackName, str] = {}
        for stack in self.stacks:
            own = f"{self.prefix(stack)}embeddings.table.weight"
            found[stack] = (
                own if own in self.names else "decoder.embeddings.table.weight"
            )
        return found


def as_matrix(weight: Tensor, *, is_output: bool) -> Tensor:
    """Return a map of all heads as `[out, in]`; a diagonal map is returned unchanged."""
    if weight.ndim == 2:
        return weight
    return weight.flatten(0, 1).mT if is_output else weight.mT.flatten(0, 1)


@final
class CheckpointSide(Side):
    """A runnable checkpoint."""

    def __init__(self, checkpoint: Checkpoint, found: ModelMap[Any]) -> None:
        self.name = checkpoint.name
        self.record = checkpoint.settings.record
        self.stored = checkpoint.tensors
        self.architecture = found.architecture
        self.pad_id = found.pad_id
        self.checkpoint = checkpoint
        self._map = found
        # The stored tensors, and the number among them, of each tensor of ours.
        self._entries = dict[str, tuple[tuple[str, ...], int]]()
        for parts in found.tensors.entries:
            for number, ours in enumerate(parts):
                self._entries[ours] = parts, number

    @property
    def source(self) -> AttentionSource:
        return self.checkpoint

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def read(self, name: str) -> Tensor:
        parts, number = self._entries[name]
        tensors = self.checkpoint.tensors
        return self._map.tensors.entries[parts].read(
            lambda stored, _: tensors.read(stored)
        )[number]

    def stored_names(self, name: str) -> tuple[str, ...]:
        parts, _ = self._entries[name]
        return self._map.tensors.entries[parts].names

    def site(self, place: AttentionPlace) -> Site:
        return self._sites[place]

    @cached_property
    def _sites(self) -> dict[AttentionPlace, Site]:
        places = self.places
        # The map lists the encoder, the decoder and the cross-attention one after the other.
        in_order = sorted(
            places, key=lambda place: (place.is_cross, place.stack == "decoder")
        )
        return dict(zip(in_order, self._map.sites, strict=True))

    @property
    def sites_beside(self) -> tuple[Site, ...]:
        """Attention layers outside the model, such as layers of a tower for pictures."""
        return tuple(
            site for site in self.checkpoint.sites if site not in self._map.sites
        )

    @property
    def beside(self) -> tuple[str, ...]:
        used = {*self._map.tensors.names, *self._map.copies}
        for site in self._map.sites:
            used |= self.checkpoint.used_names(site) - self.checkpoint.norm_names(site)
        return tuple(
            name
            for name in self.checkpoint.tensors.infos
            if name not in used and name.rpartition(".")[2] not in _CONSTANTS
        )

    @property
    def stored_infos(self) -> dict[str, tuple[object, ...]]:
        return _infos(self.checkpoint.tensors)

    def read_stored(self, name: str) -> Tensor:
        return self.checkpoint.tensors.read(name)


@final
class ModuleSide(Side):
    """A model of this library, in memory or in the files of a run."""

    def __init__(self, layers: ModuleLayers) -> None:
        self.name = layers.name
        self.record = {}
        self.stored = None
        model = layers.model
        self.architecture = model.architecture
        self.pad_id = getattr(model, "pad_id", 0)
        self._layers = layers
        attention = (".self_attention.", ".cross_attention.")
        kept = model.state_dict().keys()
        named = [
            *model.named_parameters(),
            *((n, b) for n, b in model.named_buffers() if n in kept),
        ]
        self._tensors = {
            name: tensor.detach()
            for name, tensor in named
            if not any(own in name for own in attention)
        }

    @property
    def source(self) -> AttentionSource:
        return self._layers

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._tensors)

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def stored_names(self, name: str) -> tuple[str, ...]:
        return (name,)

    def site(self, place: AttentionPlace) -> Site:
        uses = self.stacks[place.stack].uses
        first = uses.index(place.block)
        for site in self._layers.sites:
            is_here = (
                site.stack == place.stack and (site.kind == "cross") == place.is_cross
            )
            if is_here and first in site.numbers:
                return site
        raise AssertionError(place)

    @property
    def stored_infos(self) -> dict[str, tuple[object, ...]]:
        return {
            name: (part.dtype, tuple(part.shape), "")
            for name, part in self._state.items()
        }

    def read_stored(self, name: str) -> Tensor:
        return self._state[name]

    @cached_property
    def _state(self) -> dict[str, Tensor]:
        return model_tensors(self._layers.model)


@final
class ReadSide(Side):
    """A checkpoint whose attention can be read, and that cannot be run: other tensors have stored names."""

    architecture = None

    def __init__(self, checkpoint: Checkpoint, why: str) -> None:
        self.name = checkpoint.name
        self.record = checkpoint.settings.record
        self.stored = checkpoint.tensors
        self.why_no_architecture = why
        self.checkpoint = checkpoint

    @property
    def source(self) -> AttentionSource:
        return self.checkpoint

    @property
    def sites_beside(self) -> tuple[Site, ...]:
        """All attention layers."""
        return tuple(self.checkpoint.sites)

    @property
    def names(self) -> tuple[str, ...]:
        return self.checkpoint.left_over

    def read(self, name: str) -> Tensor:
        return self.checkpoint.tensors.read(name)

    def stored_names(self, name: str) -> tuple[str, ...]:
        return (name,)

    def site(self, place: AttentionPlace) -> Site:
        raise AssertionError(f"{self.name} has no blocks: {place}")

    @property
    def stored_infos(self) -> dict[str, tuple[object, ...]]:
        return _infos(self.checkpoint.tensors)

    def read_stored(self, name: str) -> Tensor:
        return self.checkpoint.tensors.read(name)


def _infos(tensors: Tensors) -> dict[str, tuple[object, ...]]:
    return {
        name: (info.dtype, tuple(info.shape), tensors.packed_as(name))
        for name, info in tensors.infos.items()
    }


@final
class Pair(NamedTuple):
    """Two models to compare."""

    a: Side
    b: Side

    @property
    def common(self) -> tuple[str, ...]:
        """Common names of the tensors outside attention in A and B, in A's order."""
        there = {*self.b.names}
        return tuple(name for name in self.a.names if name in there)

    @property
    def places(self) -> tuple[AttentionPlace, ...]:
        """Attention layers of A with a counterpart in B, in A's order."""
        there = {*self.b.places}
        return tuple(place for place in self.a.places if place in there)


def open_side(opened: Opened) -> Side:
    """Open a model for a comparison, without its changes."""
    source = opened.attention
    if isinstance(source, ModuleLayers):
        return ModuleSide(source)
    if not isinstance(source, Checkpoint):
        raise DataError(
            f"{source.name} was changed in memory: save it first, and compare what was saved"
        )
    try:
        found: ModelMap[Any] = (
            encoder_decoder_map(source) if has_two_stacks(source) else model_map(source)
        )
    except DataError as error:
        return ReadSide(source, str(error))
    return CheckpointSide(source, found)
