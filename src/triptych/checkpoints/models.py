"""Load checkpoints of other libraries as models."""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from triptych.attention import MultiHeadAttention
from triptych.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.checkpoints.layer import Site
from triptych.checkpoints.model_map import ModelMap, encoder_decoder_map, model_map
from triptych.checkpoints.source import Source, find_source
from triptych.errors import DataError, UsageError
from triptych.models.encoder_decoder import EncoderDecoder
from triptych.models.language_model import LanguageModel
from triptych.storage.tensors import Tensors

_Model = TypeVar("_Model", LanguageModel, EncoderDecoder)


@final
@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model loaded from another library's checkpoint."""

    model: LanguageModel  # ready to run, in evaluation mode
    name: str  # the path or the id that was given
    family: str  # the architecture that it is written as
    config: Mapping[str, Any]  # the record in its `config.json`.
    folder: Path  # where its files lie, the tokenizer's among them


def load_language_model(
    path: Source | Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> LoadedModel:
    """The model of a checkpoint, computing what `transformers` computes of it.

    Weights are mapped from safetensors files, not copied, where dtype and layout allow: the files must stay
    as they are while the model is in use.
    """
    checkpoint, folder = _opened(path, dtype)
    model = read_model(checkpoint, dtype).to(device)
    return LoadedModel(model, checkpoint.name, checkpoint.family.name, checkpoint.settings.record, folder)


def _opened(path: Source | Path | str, dtype: torch.dtype | None) -> tuple[Checkpoint, Path]:
    """A checkpoint whose tensors are mapped, and where its files lie."""
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"dtype {dtype} cannot be run in: give float32, bfloat16 or float16")
    source = find_source(path)
    folder = source.settings_folder  # what is on the Hub is fetched whole: all of it is read
    checkpoint = open_checkpoint(source, mapped=True)
    if not isinstance(checkpoint, Checkpoint):
        raise UsageError(f"{source.name} is a run of triptych, and no checkpoint of another library")
    return checkpoint, folder


def read_model(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> LanguageModel:
    """The model of an opened checkpoint."""
    found = model_map(checkpoint)
    model = _read(checkpoint, dtype, found, lambda layers: LanguageModel(found.architecture, layers))
    if model.head is not None and model.head.config.tied:
        model.head.output.weight = model.embeddings.table.weight
    return model


def load_encoder_decoder(
    path: Source | Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> EncoderDecoder:
    """The encoder and the decoder of a checkpoint, computing what `transformers` computes of them."""
    checkpoint, _ = _opened(path, dtype)
    return read_encoder_decoder(checkpoint, dtype).to(device)


def read_encoder_decoder(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> EncoderDecoder:
    """The encoder and the decoder of an opened checkpoint; see `read_model`."""
    found = encoder_decoder_map(checkpoint)
    made, start = found.architecture, len(found.architecture.encoder)

    def make(layers: list[MultiHeadAttention]) -> EncoderDecoder:
        own, cross = layers[start : start + len(made.decoder)], layers[start + len(made.decoder) :]
        return EncoderDecoder(made, layers[:start], zip(own, cross, strict=True), found.pad_id)

    model = _read(checkpoint, dtype, found, make)
    if made.tied:
        model.output.weight = model.tgt_embedding.weight
    return model


def _read(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None,
    found: ModelMap[Any],
    make: Callable[[list[MultiHeadAttention]], _Model],
) -> _Model:
    """A model made around the attention layers of a checkpoint, with its other tensors in it."""
    dtype = _most_common(checkpoint.tensors) if dtype is None else dtype
    attention = [read_attention(checkpoint, site, dtype) for site in found.sites]
    with torch.device("meta"), Undrawn():
        model = make(attention)
    for name, tensor in found.tensors.read(lambda name, _: checkpoint.tensors.read(name).to(dtype)).items():
        _hold(model, name, tensor)
    return off_meta(model).eval()


def read_attention(checkpoint: Checkpoint, site: Site, dtype: torch.dtype) -> MultiHeadAttention:
    """An attention layer of a checkpoint's model."""
    weights = checkpoint.read(site).weights.without_norms().to(dtype)
    try:
        return MultiHeadAttention.from_weights(weights, dropout=0.0, adopted=True)
    except ValueError as error:
        raise DataError(f"{checkpoint.name}: {checkpoint.family.name} cannot be run: {error}") from None


@final
class Undrawn(TorchFunctionMode):
    """Draws no initial numbers: on the "meta" device that would import 800 modules of torch, 70 MB."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", "") == nn.init.__name__:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


def _hold(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make a tensor a parameter of a model, without a copy."""
    *path, own = name.split(".")
    module = model.get_submodule(".".join(path))
    expected = getattr(module, own)
    assert expected.shape == tensor.shape, f"{name}: {expected.shape}, {tensor.shape}"
    setattr(module, own, tensor if own in module._buffers else nn.Parameter(tensor))


def off_meta(model: _Model) -> _Model:
    """The model, with buffers that begin empty, as tables of sines that grow, where tensors have memory."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta and not buffer.numel():
                setattr(module, name, torch.empty_like(buffer, device="cpu"))
    return model


def _most_common(tensors: Tensors) -> torch.dtype:
    """The dtype of most numbers."""
    counts: Counter[torch.dtype] = Counter()
    for info in tensors.infos.values():
        if info.dtype.is_floating_point:
            counts[info.dtype] += info.num_bytes
    if not counts:
        raise DataError(f"{tensors.name}: it holds no floating-point numbers")
    ((dtype, _),) = counts.most_common(1)
    return dtype
