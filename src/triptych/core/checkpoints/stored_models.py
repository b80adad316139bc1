"""Models of other libraries, loaded from their checkpoints and written back in their formats.

`LayerMap` is invertible, and all other computations of reading are undone on writing. Tensors with unchanged
values remain as stored, to the bit.
"""

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn

from triptych.core.algebra.forms import are_finite
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.attention.layer import MultiHeadAttention
from triptych.core.attention.shapes import shapes_only
from triptych.core.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.core.checkpoints.family import family_of
from triptych.core.checkpoints.fields import list_names
from triptych.core.checkpoints.latents import latent_parts
from triptych.core.checkpoints.layer_map import LayerMap, Shape, layer_map
from triptych.core.checkpoints.model_map import ModelMap, encoder_decoder_map, model_map
from triptych.core.checkpoints.reading import LayerReader
from triptych.core.checkpoints.source import Source, find_source
from triptych.core.checkpoints.stored_layers import Place, Site, in_order
from triptych.core.checkpoints.stored_positions import table_names
from triptych.core.models.encoder_decoder import AnyModel, EncoderDecoder
from triptych.core.models.language_model import LanguageModel
from triptych.core.models.sites import attention_sites
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import InMemory, Tensors, of_one
from triptych.errors import ConfigurationWarning, DataError, UsageError

_Stored = Iterator[tuple[str, Tensor]]

_Model = TypeVar("_Model", LanguageModel, EncoderDecoder)


def load_language_model(
    path: Source | Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> LanguageModel:
    """Load the language model of a checkpoint, with the same outputs as in `transformers`.

    Weights are memory-mapped from safetensors files where dtype and layout allow: the files must not change
    while the model is in use.

    `path`: source, path, or name on the Hub. `device`: device of the model. `dtype`: floating-point dtype of
    the model; None for the checkpoint's most common dtype.
    """
    return read_language_model(_open_mapped(path, dtype), dtype).to(device)


def _open_mapped(path: Source | Path | str, dtype: torch.dtype | None) -> Checkpoint:
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(
            f"dtype {dtype} cannot be run in: give float32, bfloat16 or float16"
        )
    source = find_source(path)
    assert (
        source.settings_folder
    )  # fetches a repository on the Hub as a whole, since all of it is read
    checkpoint = open_checkpoint(source, mapped=True)
    if not isinstance(checkpoint, Checkpoint):
        raise UsageError(
            f"{source.name} is a run of triptych, and no checkpoint of another library"
        )
    # A merged map is rounded to the dtype of the base; the requested dtype may be wider.
    if dtype in (torch.float32, torch.float64):
        pair = source.without_and_with_adapters()
        if pair is not None:
            return checkpoint.with_tensors(pair.adapted)
    return checkpoint


def read_language_model(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None
) -> LanguageModel:
    found = model_map(checkpoint)
    return _build_model(
        checkpoint,
        dtype,
        found,
        lambda layers: LanguageModel(found.architecture, layers),
    )


def load_encoder_decoder(
    path: Source | Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
) -> EncoderDecoder:
    """Load the encoder and the decoder of a checkpoint; see `load_language_model`."""
    return read_encoder_decoder(_open_mapped(path, dtype), dtype).to(device)


def read_encoder_decoder(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None
) -> EncoderDecoder:
    found = encoder_decoder_map(checkpoint)
    made = found.architecture

    def make(layers: list[MultiHeadAttention]) -> EncoderDecoder:
        start = len(made.encoder.blocks)
        count = len(made.decoder.blocks)
        own = layers[start : start + count]
        cross = layers[start + count :]
        return EncoderDecoder(made, layers[:start], own, cross, found.pad_id)

    return _build_model(checkpoint, dtype, found, make)


def _build_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    found: ModelMap[Any],
    make: Callable[[list[MultiHeadAttention]], _Model],
) -> _Model:
    """Build a model from a checkpoint: `make` of its attention layers, with its other tensors set."""
    if found.unread:
        kept = f"{checkpoint.name}: {list_names(found.unread, most=4)} of the head of its class"
        warnings.warn(
            f"{kept} are not run here: run gives the last hidden states",
            ConfigurationWarning,
            stacklevel=4,
        )
    dtype = _most_common(checkpoint.tensors) if dtype is None else dtype
    attention = [read_attention_layer(checkpoint, site, dtype) for site in found.sites]
    with shapes_only():  # parameters are not initialised: stored tensors replace them
        model = make(attention)
    _set_tensors(
        model,
        found.tensors.read(lambda name, _: checkpoint.tensors.read(name).to(dtype)),
    )
    *_, last = model.stacks.values()
    if last.head is not None and last.head.config.tied:
        last.head.output.weight = last.embeddings.table.weight
    return off_meta(model).eval()


def read_attention_layer(
    checkpoint: Checkpoint, site: Site, dtype: torch.dtype
) -> MultiHeadAttention:
    weights = checkpoint.read(site).weights.without_norms().to(dtype)
    try:
        return MultiHeadAttention.from_weights(weights, dropout=0.0, adopted=True)
    except ValueError as error:
        raise DataError(
            f"{checkpoint.name}: {checkpoint.family.name} cannot be run: {error}"
        ) from None


def _set_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Set parameters and buffers of a model without copying, in all sharing modules."""
    # Several modules may share a parameter: replace it by identity.
    instead: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        path, _, own = name.rpartition(".")
        module = model.get_submodule(path)
        expected = getattr(module, own)
        assert expected.shape == tensor.shape, (
            f"{name}: {expected.shape}, {tensor.shape}"
        )
        instead[id(expected)] = (
            tensor if own in module._buffers else nn.Parameter(tensor)
        )
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for own, before in held.items():
                held[own] = instead.get(id(before), before)  # type: ignore[assignment]


def off_meta(model: _Model) -> _Model:
    """Move empty buffers, such as growing tables of sines, from the "meta" device to memory."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and not buffer.numel():
                setattr(module, name, torch.empty(buffer.shape, dtype=buffer.dtype))
    return model


def _most_common(tensors: Tensors) -> torch.dtype:
    """Return the floating-point dtype with the most bytes."""
    counts: Counter[torch.dtype] = Counter()
    for info in tensors.infos.values():
        if info.dtype.is_floating_point:
            counts[info.dtype] += info.num_bytes
    if not counts:
        raise DataError(f"{tensors.name}: it holds no floating-point numbers")
    ((dtype, _),) = counts.most_common(1)
    return dtype


def changed_tensors(model: AnyModel, checkpoint: Checkpoint) -> _Stored:
    """Yield the name and new value of each stored tensor that changed in a model, in its stored dtype."""
    found = _StoredModel.of(model, checkpoint)
    written: dict[str, Tensor] = {}
    for name, tensor in found.changed(checkpoint):
        if name not in written:
            written[name] = tensor
            # Values are compared in the stored dtype, where a small change may vanish by rounding.
            for same in (
                name,
                *(copy for copy, of in found.copies.items() if of == name),
            ):
                stored = _as_stored(checkpoint, same, tensor)
                if not torch.equal(stored, checkpoint.tensors.read(same)):
                    yield same, stored
        elif not torch.equal(written[name], tensor):
            raise DataError(
                f"{checkpoint.name}: layers share {name}, and its numbers differ between them now"
            )


def new_tensors(
    model: AnyModel,
    layers: Sequence[AttentionWeights],
    settings: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    given: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the tensors of a model in a family's format.

    `model`: the model. `layers`: weights of its attention layers, sorted like `in_order`. `settings`:
    contents of `config.json`. `shapes`: shapes of all tensors of the new file, by name. `given`: further
    tensors besides the model's parameters, by names in the model.
    """
    name = "the new checkpoint"
    family = family_of(settings["model_type"])
    assert family is not None, "it is one of ours"
    zero = torch.zeros((), dtype=next(model.parameters()).dtype)
    # The checkpoint to be written, with zeros for values: its layers and maps follow from names and shapes.
    empty = of_one(
        InMemory(name, {stored: zero.expand(shape) for stored, shape in shapes.items()})
    )
    checkpoint = Checkpoint(name, family, Settings(settings, "config.json"), empty)
    parts = _StoredModel.of(model, checkpoint)
    found = dict[str, Tensor]()
    now = {**dict(model.named_parameters(remove_duplicate=False)), **given}
    for ours, stored in parts.beside.entries.items():
        if now.keys() >= {*ours}:
            found |= stored.write([now[part].detach().cpu() for part in ours])
    for (site, _), weights in zip(parts.layers, layers, strict=True):
        place = checkpoint.place(site)
        found |= layer_map(place, empty).write(_layer_tensors(place, weights))
    # Biases of a format that the model lacks are zero.
    missing = [stored for stored in shapes if stored not in found]
    assert all(stored.endswith("bias") for stored in missing), missing
    return found | {stored: empty.read(stored).clone() for stored in missing}


def why_not_written(checkpoint: Checkpoint) -> str:
    """Return the reason why a changed model of this checkpoint cannot be written back; "" if it can."""
    for name in checkpoint.tensors.infos:
        if how := checkpoint.tensors.packed_as(name):
            return f"tensor {name} is stored as {how}, which cannot take other numbers"
    for site in checkpoint.sites:
        if checkpoint.place(site).position.kind == "disentangled":
            return f"its tables of positions ({site.module}) are products of several tensors"
    return ""


def tie_shared(model: AnyModel, checkpoint: Checkpoint) -> None:
    """Tie the tables of distances of layers with the same stored table to one parameter."""
    tables: dict[tuple[str, ...], nn.Parameter] = {}
    for site, layer in _StoredModel.of(model, checkpoint).layers:
        own = dict(layer.named_parameters(recurse=False)).get("bias_table")
        if own is not None:
            names = tuple(table_names(checkpoint.place(site), checkpoint.tensors))
            layer.bias_table = tables.setdefault(names, own)


@final
@dataclass(frozen=True)
class _StoredModel:
    """A model, and the map of its parts to a checkpoint."""

    model: nn.Module
    beside: LayerMap  # map of the tensors outside attention
    copies: Mapping[str, str]  # duplicate stored tensors, with the name of the original
    layers: Sequence[
        tuple[Site, MultiHeadAttention]
    ]  # attention layers with their sites, for every use

    @classmethod
    def of(cls, model: AnyModel, checkpoint: Checkpoint) -> "_StoredModel":
        found: ModelMap[Any]
        found = (
            model_map(checkpoint)
            if isinstance(model, LanguageModel)
            else encoder_decoder_map(checkpoint)
        )
        sites = sorted(attention_sites(model), key=lambda site: site.stack == "cross")
        layers = [site.layer for site in sites]
        stored = [place.site for place in in_order(found.sites)]
        return cls(
            model, found.tensors, found.copies, [*zip(stored, layers, strict=True)]
        )

    def changed(self, checkpoint: Checkpoint) -> _Stored:
        """Yield the stored tensors with changed values; shared tensors may be yielded several times."""
        dtype = next(self.model.parameters()).dtype
        # The stored values are read as for loading, so that only changes of the model count.
        now = {
            **dict(self.model.named_buffers()),
            **dict(self.model.named_parameters(remove_duplicate=False)),
        }

        def take(name: str, shape: Shape | None) -> Tensor:
            return checkpoint.tensors.read(name).to(dtype)

        for parts, stored in self.beside.entries.items():
            new = [now[part].detach().cpu() for part in parts]
            if not all(map(torch.equal, stored.read(take), new)):
                yield from stored.write(new)
        for site, layer in self.layers:
            yield from _changed_in_layer(
                checkpoint, site, read_attention_layer(checkpoint, site, dtype), layer
            )


def _changed_in_layer(
    checkpoint: Checkpoint,
    site: Site,
    before: MultiHeadAttention,
    after: MultiHeadAttention,
) -> _Stored:
    place = checkpoint.place(site)
    stored = LayerReader(checkpoint.place(site), checkpoint.tensors).map
    # The reader's scale is fixed by the configuration: a changed scale is moved into the maps.
    scale = before.semantics.scale
    old, new = (
        _layer_tensors(place, layer.weights().with_scale(scale))
        for layer in (before, after)
    )
    different = {
        part for part, numbers in new.items() if not torch.equal(old[part], numbers)
    }
    for parts, named in stored.entries.items():
        if different & {*parts}:
            yield from named.write([new[part] for part in parts])
    if different & {"bias_keys", "bias_queries"}:
        raise DataError(
            f"{checkpoint.name}: tables of positions of {site.module} changed, which are products of several "
            "stored tensors: they cannot be written"
        )
    if (
        "bias_table" in new
    ):  # even if unchanged, to detect differences between layers with the same table
        yield from _stored_table(
            checkpoint, place, new["bias_table"], changed="bias_table" in different
        )


def _layer_tensors(place: Place, weights: AttentionWeights) -> dict[str, Tensor]:
    """Return all parameters of a layer by their names in its `LayerMap`, or else in the model."""
    found = latent_parts(weights) if place.spec.latent else _of_maps(weights)
    found["o"] = weights.o[-1].weight
    if weights.o_bias is not None:
        found["o.bias"] = weights.o_bias
    norm = place.head_norm
    # The names of norms and gates differ between modules and `LayerMap`.
    for name, numbers in weights.semantics.learned().items():
        match name.rpartition("_"):
            case (("q_norm" | "k_norm") as side, _, "weight") if norm is not None:
                found[side] = numbers
            case (("q_norm" | "k_norm") as side, _, "bias"):
                found[f"{side}.bias"] = numbers
            case "gate", _, "weight":
                found["gate"] = numbers.mT
            case "gate", _, "bias":
                found["gate.bias"] = numbers
            case _:
                found[name] = numbers
    return {part: numbers.detach().cpu() for part, numbers in found.items()}


def _of_maps(weights: AttentionWeights) -> dict[str, Tensor]:
    found = {}
    for side, chain in (("q", weights.q), ("k", weights.k), ("v", weights.v)):
        link = chain[0]  # normalised values also have a second, fixed map
        found[side] = link.weight
        if link.bias is not None:
            found[f"{side}.bias"] = link.bias
    return found


def _stored_table(
    checkpoint: Checkpoint, place: Place, table: Tensor, *, changed: bool
) -> _Stored:
    """Yield the stored table of distances; its unread rows are unchanged."""
    names = table_names(place, checkpoint.tensors)
    if len(names) > 1:
        if changed:
            raise DataError(
                f"{checkpoint.name}: the sum of {' and '.join(names)} changed: how much each did is not known"
            )
        return
    stored = checkpoint.tensors.read(names[0]).to(table.dtype, copy=True)
    stored[: len(table)] = table
    yield names[0], stored


def _as_stored(checkpoint: Checkpoint, name: str, tensor: Tensor) -> Tensor:
    dtype = checkpoint.tensors.infos[name].dtype
    if how := checkpoint.tensors.packed_as(name):
        raise DataError(
            f"{checkpoint.name}: tensor {name} is stored as {how}, which cannot take other numbers"
        )
    stored = tensor.to(dtype).contiguous()
    if not are_finite(stored):
        raise DataError(
            f"{checkpoint.name}: numbers for {name} do not fit {dtype}".replace(
                "torch.", ""
            )
        )
    return stored
