"""A model of ours as a checkpoint to look into."""

from collections.abc import Iterator
from pathlib import Path
from typing import final

from torch import Tensor

from triptych.algebra.weights import AttentionWeights
from triptych.checkpoints.layer import AttentionLayer, AttentionSource, InputNorms, Site
from triptych.models import EncoderDecoder, LanguageModel
from triptych.models.architecture import EmbeddingsConfig, LanguageModelArchitecture
from triptych.models.sites import attention_sites, attention_weights, input_norms
from triptych.models.storage import read_own_model

_LONGEST = 2048  # tokens, where a model says nothing


@final
class OwnModel(AttentionSource):
    """A model of ours in memory."""

    def __init__(self, model: EncoderDecoder | LanguageModel, name: str) -> None:
        self.model = model
        self.name, self.written_as, self.known_by = name, "triptych", "its configuration"
        self._weights, self._inputs = attention_weights(self.model), input_norms(self.model)
        stacks = {"cross": "decoder"}
        found = {
            Site(stacks.get(site.stack, site.stack), site.block, site.kind, site.name): site.name
            for site in attention_sites(self.model)
        }
        self._names = found
        self.sites = tuple(found)
        parameters = dict(self.model.named_parameters())
        # The maps are views of parameters.
        attention = {
            tensor.untyped_storage().data_ptr()
            for weights in self._weights.values()
            for tensor in _tensors_of(weights)
        }
        self.num_tensors = len(parameters)
        self.left_over = tuple(
            name
            for name, tensor in parameters.items()
            if tensor.untyped_storage().data_ptr() not in attention
        )
        self.unread = {}

    @classmethod
    def read_folder(cls, folder: Path, name: str | None = None) -> "OwnModel":
        """The model in a folder of ours, read whole: they are not large."""
        return cls(read_own_model(folder), name or str(folder))

    def read(self, site: Site) -> AttentionLayer:
        weights = self._weights[self._names[site]]
        inputs = InputNorms(*self._inputs[self._names[site]])
        scheme = self._positions.positions
        embedded = scheme if scheme in ("sinusoidal", "learned") and site.kind != "cross" else "none"
        return AttentionLayer(site, weights, (site.module,), inputs=inputs, embedded_positions=embedded)

    def bytes_of(self, site: Site) -> int:
        tensors = _tensors_of(self.read(site).weights)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def longest_text(self, site: Site) -> int:
        positions = self._positions
        if positions.positions == "learned":
            return positions.num_positions
        if isinstance(self.model, LanguageModel):
            return self.model.context or _LONGEST
        return (self.model.max_source_tokens or _LONGEST) + 1

    @property
    def _positions(self) -> EmbeddingsConfig:
        architecture = self.model.architecture
        if isinstance(architecture, LanguageModelArchitecture):
            return architecture.embeddings
        return architecture.source

    def input_modules(self, site: Site) -> tuple[str, str]:
        return site.module, site.module

    def broken(self, layer: AttentionLayer) -> dict[str, int]:
        count = sum(int((~tensor.isfinite()).sum()) for tensor in _tensors_of(layer.weights))
        return {layer.site.module: count} if count else {}


def _tensors_of(weights: AttentionWeights) -> Iterator[Tensor]:
    """Maps, and the learned numbers that stand between them."""
    yield from weights.tensors()
    yield from weights.semantics.learned().values()
