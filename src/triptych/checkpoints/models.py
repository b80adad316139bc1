"""Others' checkpoints as models that run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn

from triptych.attention import MultiHeadAttention
from triptych.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.checkpoints.model_map import ModelMap, model_map
from triptych.checkpoints.tensor_maps import Shape
from triptych.errors import DataError, UsageError
from triptych.models.language_model import LanguageModel
from triptych.storage.hub import download_checkpoint, is_hub_id
from triptych.storage.tensors import Tensors


@final
@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model out of another library's checkpoint.

    Attributes:
        model: ready to run, in evaluation mode.
        name: the path or the id that was given.
        family: the architecture that it is written as.
        config: the record in its `config.json`.
        folder: where its files lie, the tokenizer's among them.
    """

    model: LanguageModel
    name: str
    family: str
    config: Mapping[str, Any]
    folder: Path


def load_language_model(
    path: Path | str, device: torch.device | str = "cpu", dtype: torch.dtype | None = None
) -> LoadedModel:
    """The model of a checkpoint, computing what `transformers` computes of it.

    Weights are mapped from safetensors files, not copied, where dtype and layout allow: the files must stay
    as they are while the model is in use.

    Args:
        path: a folder or a tensor file beside its `config.json`; or, if nothing of that name is here,
            `owner/name` on the Hub, with `@revision` or without, of which all is fetched.
        device: where the model is to be.
        dtype: of its numbers; the one that most of the file's numbers have if None.

    Raises:
        DataError: it cannot be read; its family is unknown, or can be read and not run; a field or a tensor
            that is not understood, missing, or of another shape. It is named.
        UsageError: a run of ours, or a dtype that is no floating-point one.
    """
    if dtype is not None and not dtype.is_floating_point:
        raise UsageError(f"dtype {dtype} cannot be run in: give float32, bfloat16 or float16")
    name, on_hub = str(path), not Path(path).exists() and is_hub_id(str(path))
    path = download_checkpoint(name) if on_hub else Path(path)
    checkpoint = open_checkpoint(path, mapped=True)
    if not isinstance(checkpoint, Checkpoint):
        raise UsageError(f"{name} is a run of triptych, and no checkpoint of another library")
    model = read_model(checkpoint, dtype).to(device)
    folder = path if path.is_dir() else path.parent
    return LoadedModel(model, name, checkpoint.family.name, checkpoint.settings.record, folder)


def read_model(checkpoint: Checkpoint, dtype: torch.dtype | None = None) -> LanguageModel:
    """The model of an opened checkpoint.

    Args:
        checkpoint: with tensors that are mapped, the model's are too.
        dtype: of its numbers; the one that most of the checkpoint's have if None.

    Raises:
        DataError: see `load_language_model`.
    """
    found = model_map(checkpoint)
    dtype = _most_common(checkpoint.tensors) if dtype is None else dtype
    attention = [_attention(checkpoint, found, number, dtype) for number in range(len(found.sites))]
    with torch.device("meta"):
        model = LanguageModel(found.architecture, attention)
    for name, tensor in found.tensors.read(_taking(checkpoint.tensors, dtype)).items():
        _hold(model, name, tensor)
    head = model.head
    if head is not None and head.config.tied:
        head.output.weight = model.embeddings.table.weight
    return model.eval()


def _attention(
    checkpoint: Checkpoint, found: ModelMap, number: int, dtype: torch.dtype
) -> MultiHeadAttention:
    weights = checkpoint.read(found.sites[number]).weights.without_norms().to(dtype)
    try:
        return MultiHeadAttention.from_weights(weights, dropout=0.0, adopted=True)
    except ValueError as error:
        raise DataError(f"{checkpoint.name}: {checkpoint.family.name} cannot be run: {error}") from None


def _taking(tensors: Tensors, dtype: torch.dtype) -> Any:
    def take(name: str, shape: Shape | None) -> Tensor:
        return tensors.read(name).to(dtype)

    return take


def _hold(model: nn.Module, name: str, tensor: Tensor) -> None:
    """Make a tensor a parameter of a model, without a copy."""
    *path, own = name.split(".")
    module = model.get_submodule(".".join(path))
    expected = getattr(module, own)
    assert expected.shape == tensor.shape, f"{name}: {expected.shape}, {tensor.shape}"
    setattr(module, own, nn.Parameter(tensor))


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
