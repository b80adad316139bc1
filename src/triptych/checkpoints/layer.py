"""Attention layers of a checkpoint, however it is written: where they are, and one at a time."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

from triptych.algebra.weights import AttentionWeights, Link, Norm, Side


@final
@dataclass(frozen=True)
class Site:
    """One attention layer of a checkpoint."""

    stack: str  # "encoder", "decoder", "vision", …
    layer: int  # its number within the stack, from 0
    kind: Literal["self", "causal", "cross"]  # where queries and keys come from
    module: str  # the name of its module, in the checkpoint's own words

    @property
    def name(self) -> str:
        """For reports: stack, layer, and "cross" where it is that."""
        return f"{self.stack} {self.layer}" + (" cross" if self.kind == "cross" else "")


@final
@dataclass(frozen=True, eq=False)
class InputNorms:
    """The norms whose outputs an attention layer reads: they bound its inputs' length."""

    # of the norm that makes what queries read (and keys and values, but for cross-attention); None where
    # there is none, or none is known
    x: Norm | None = None
    memory: Norm | None = None  # likewise, of what keys and values of cross-attention read


@final
@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """What was read of one layer."""

    site: Site
    weights: AttentionWeights  # its maps, in the checkpoint's dtype, and what it does besides
    tensors: tuple[str, ...]  # the names of all that was read for it
    uses: int = 1  # how often the model applies it, one time after the other
    # the norms whose outputs it reads, those included that `fold_norm` must leave alone (post-norm, sandwich)
    # and `weights` therefore does not have
    inputs: InputNorms = InputNorms()
    # how the embeddings, before all layers, tell positions apart
    embedded_positions: Literal["none", "sinusoidal", "learned"] = "none"
    fixed: str = ""  # why it cannot be rewritten; it can if empty
    # the earlier layer whose keys and values it uses, made of what that one reads; None if it has its own
    borrows: Site | None = None

    @property
    def cache_bytes(self) -> int:
        """Bytes of a number that is kept of a token while decoding; 0 outside decoders, which keep none."""
        cached = self.site.stack == "decoder" and self.site.kind != "self" and self.borrows is None
        return self.weights.dtype.itemsize if cached else 0


class AttentionSource(ABC):
    """Something with attention layers, of which one is read at a time."""

    name: str  # its path, or its id on the Hub
    written_as: str  # the family it is written as
    known_by: str  # what that is known by
    sites: tuple[Site, ...]  # its attention layers, in order
    num_tensors: int  # there are in all
    left_over: tuple[str, ...]  # tensors that are no attention, as far as their names tell
    unread: dict[str, str]  # tensors of attention that is known and not read, and why
    absent: tuple[str, ...] = ()  # stacks that the configuration has and the tensors have not
    warnings: tuple[str, ...] = ()  # sentences on fields of the configuration that are set and not followed

    @abstractmethod
    def read(self, site: Site) -> AttentionLayer:
        """Read one attention layer."""

    def outline(self, site: Site) -> AttentionLayer:
        """What `read` gives, with weights without numbers where these would have to be fetched."""
        return self.read(site)

    def lender(self, site: Site) -> Site | None:
        """The layer whose keys and values a layer uses, where these are not its own."""
        return None

    def read_map(self, site: Site, side: Side, head: int) -> Link | None:
        """The map of one head; None where all of the layer has to be read for it."""
        return None

    @abstractmethod
    def bytes_of(self, site: Site) -> int:
        """How many bytes the tensors of a layer take."""

    @abstractmethod
    def longest_text(self, site: Site) -> int:
        """Positions that the model is made for, as far as the configuration says."""

    @abstractmethod
    def input_modules(self, site: Site) -> tuple[str, str]:
        """Names of the modules that read what queries and what keys of a layer are made of."""

    @abstractmethod
    def broken(self, layer: AttentionLayer) -> Mapping[str, int]:
        """Of tensors read for a layer, how many entries are not finite, where some are."""
