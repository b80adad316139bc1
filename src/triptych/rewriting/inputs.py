"""What attention layers are given on a text: a few positions of it, kept beside the certificate.

With them the layers can be tried on real inputs again without running, or even having, the model around them.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from triptych.algebra.weights import Norm
from triptych.checkpoints.layer import AttentionSource
from triptych.errors import DataError, UsageError
from triptych.files import write_bytes
from triptych.rewriting.running import RunnableModel, Seen, Window
from triptych.storage.tensors import LocalBytes, Safetensors

# No ending that programs look for tensors of a model by.
INPUTS = "certificate.inputs"
_POSITIONS = 16
# Pieces of the text of which the longest is taken.
_LOOKED_AT = 32


def gather_inputs(
    model: RunnableModel, source: AttentionSource, windows: Iterable[Window]
) -> dict[str, Seen]:
    """What each layer of a model is given for the first positions of a piece of text.

    Args:
        model: the original, which makes the inputs with its own forward.
        source: the same checkpoint.
        windows: pieces of the text; the longest of the first ones is taken.

    Returns:
        By the name of the layer, float32, `[1, positions, width]`; of a layer that the model applies several
        times what it is given the last time.

    Raises:
        DataError: the model has no modules by which a layer's inputs can be told.
        UsageError: the text is empty.
    """
    pieces = list(islice(windows, _LOOKED_AT))
    if not pieces:
        raise UsageError("the text is empty: there is nothing to test the layers on")
    window = max(pieces, key=lambda window: sum(ids.numel() for ids in window.inputs.values()))
    with model.watch(source, source.sites):
        model.outputs(window)
    return {
        name: Seen(_first(found[-1].x), None if found[-1].memory is None else _first(found[-1].memory))
        for name, found in model.seen.items()
        if found
    }


def _first(x: Tensor) -> Tensor:
    return x[:1, :_POSITIONS].detach().to(torch.float32, copy=True)


def write_inputs(path: Path, inputs: Mapping[str, Seen]) -> None:
    """Keep inputs, as safetensors: of each layer `NAME.x`, and `NAME.memory` if it has one."""
    tensors = {f"{name}.x": found.x.contiguous() for name, found in inputs.items()}
    tensors |= {
        f"{name}.memory": found.memory.contiguous()
        for name, found in inputs.items()
        if found.memory is not None
    }
    write_bytes(path, save(tensors))


def read_inputs(path: Path) -> dict[str, Seen]:
    """Inputs that were kept.

    Raises:
        DataError: the file is not there, or damaged.
    """
    if not path.is_file():
        raise DataError(f"{path} is missing: layers cannot be tried on what the text gave them")
    file = Safetensors(LocalBytes(path))
    found: dict[str, Seen] = {}
    for name in file.infos:
        layer, _, what = name.rpartition(".")
        if what == "x":
            memory = f"{layer}.memory"
            found[layer] = Seen(file.read(name), file.read(memory) if memory in file.infos else None)
    return found


def before_gain(x: Tensor, norm: Norm | None) -> Tensor:
    """What a norm made before its gain and shift; 0 where the gain is, which no map sees."""
    if norm is None:
        return x
    gain = norm.weight.double() + norm.offset
    x = x if norm.bias is None else x - norm.bias.double()
    return torch.where(gain == 0, 0.0, x / torch.where(gain == 0, 1.0, gain))
