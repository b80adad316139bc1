"""The attention layers of this library's own models: they are read from modules in memory."""

from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, final

from torch import Tensor

from triptych.core.algebra.weights import AttentionWeights
from triptych.core.checkpoints.stored_layers import (
    CONTEXT,
    AttentionLayer,
    AttentionSource,
    InputNorms,
    LayerPlace,
    Site,
)
from triptych.core.models.architecture import EmbeddingsConfig
from triptych.core.models.encoder_decoder import AnyModel
from triptych.core.models.language_model import LanguageModel
from triptych.core.models.sites import (
    AttentionSite,
    attention_sites,
    attention_weights,
    input_norms,
)
from triptych.core.models.storage import read_own_model, stored_parameters


@final
class ModuleLayers(AttentionSource):
    """The attention layers of a model of this library in memory."""

    def __init__(self, model: AnyModel, name: str) -> None:
        self.model = model
        self.name = name
        self.written_as = "triptych"
        self.known_by = "its configuration"
        self._weights, self._inputs = (
            attention_weights(self.model),
            input_norms(self.model),
        )
        self.sites = tuple(_own_sites(model))
        parameters = stored_parameters(self.model)
        # The maps are views of parameters: equal storage identifies the parameters of attention.
        attention = {
            tensor.untyped_storage().data_ptr()
            for tensor in chain.from_iterable(
                _tensors_of(weights) for weights in self._weights.values()
            )
        }
        self.num_tensors = len(parameters)
        self.left_over = tuple(
            name
            for name, tensor in parameters.items()
            if tensor.untyped_storage().data_ptr() not in attention
        )
        self.unread = {}

    @classmethod
    def read_folder(cls, folder: Path, name: str | None = None) -> "ModuleLayers":
        """Read the model in a folder in this library's format; each weight is read when it is used."""
        return cls(read_own_model(folder, mapped=True), name or str(folder))

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def read(self, site: Site) -> AttentionLayer:
        weights = self._weights[site.module]
        # Layers with shared weights read the outputs of several norms, so no single norm is reported.
        inputs = InputNorms() if site.also else InputNorms(*self._inputs[site.module])
        scheme = self._positions.positions
        embedded = (
            scheme
            if scheme in ("sinusoidal", "learned") and site.kind != "cross"
            else "none"
        )
        return AttentionLayer(
            site, weights, (site.module,), inputs=inputs, embedded_positions=embedded
        )

    @cached_property
    def layers(self) -> tuple[LayerPlace, ...]:
        sites = {
            (site.kind, number): site for site in self.sites for number in site.numbers
        }
        return tuple(
            LayerPlace(sites[place.kind, place.block], place.block)
            for place in attention_sites(self.model)
        )

    def bytes_of(self, site: Site) -> int:
        tensors = _tensors_of(self.read(site).weights)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def longest_text(self, site: Site) -> int:
        positions = self._positions
        if positions.positions == "learned":
            return positions.num_positions
        if isinstance(self.model, LanguageModel):
            return self.model.context or CONTEXT
        return (self.model.max_source_tokens or CONTEXT) + 1

    @property
    def _positions(self) -> EmbeddingsConfig:
        return next(iter(self.model.stacks.values())).architecture.embeddings

    def input_modules(self, site: Site) -> tuple[str, str]:
        return site.module, site.module

    def broken(self, layer: AttentionLayer) -> dict[str, int]:
        count = sum(
            int((~tensor.isfinite()).sum()) for tensor in _tensors_of(layer.weights)
        )
        return {layer.site.module: count} if count else {}


def _own_sites(model: AnyModel) -> Iterator[Site]:
    """Yield the attention layers of a model, but layers of a stack with shared parameters only once."""
    together: dict[tuple[Any, ...], list[AttentionSite]] = {}
    for place in attention_sites(model):
        held = [*place.layer.named_parameters(), *place.residual.named_parameters()]
        parameters = tuple((name, id(parameter)) for name, parameter in held)
        together.setdefault((place.stack, parameters), []).append(place)
    for first, *others in together.values():
        stack = "decoder" if first.stack == "cross" else first.stack
        also = tuple(place.block for place in others)
        yield Site(stack, first.block, first.kind, first.name, also)


def _tensors_of(weights: AttentionWeights) -> Iterator[Tensor]:
    """Yield the maps, and the learned parameters between them."""
    yield from weights.tensors()
    yield from weights.semantics.learned().values()
