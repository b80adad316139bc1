"""Inputs of attention layers for a few positions of a text, stored with the certificate.

Layers can then be verified on real inputs without running the model.
"""

from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from triptych.core.algebra.weights import Norm
from triptych.core.checkpoints.stored_layers import AttentionSource
from triptych.core.storage import Safetensors
from triptych.errors import DataError, UsageError
from triptych.files import write_bytes
from triptych.running.opening import Seen, TextReader, Window
from triptych.untrusted import LocalBytes

# Programs do not recognise this ending as tensors of a model.
INPUTS = "certificate.inputs"
_POSITIONS = 16
# Number of pieces of the text; the longest is used.
_LOOKED_AT = 32


def gather_inputs(
    model: TextReader, source: AttentionSource, windows: Iterable[Window]
) -> dict[str, Seen]:
    """Return the inputs of each layer of a model for the first positions of a piece of text."""
    pieces = list(islice(windows, _LOOKED_AT))
    if not pieces:
        raise UsageError("the text is empty: there is nothing to test the layers on")
    window = max(
        pieces, key=lambda window: sum(ids.numel() for ids in window.inputs.values())
    )
    return {
        name: Seen(
            _start(found[-1].x),
            None if found[-1].memory is None else _start(found[-1].memory),
        )
        for name, found in model.inputs(window, source, source.sites).items()
        if found
    }


def _start(x: Tensor) -> Tensor:
    return x[:1, :_POSITIONS].detach().to(torch.float32, copy=True)


def write_inputs(path: Path, inputs: Mapping[str, Seen]) -> None:
    """Write inputs as safetensors: `NAME.x` for each layer, and `NAME.memory` if it has a memory."""
    tensors = {f"{name}.x": found.x.contiguous() for name, found in inputs.items()}
    tensors |= {
        f"{name}.memory": found.memory.contiguous()
        for name, found in inputs.items()
        if found.memory is not None
    }
    write_bytes(path, save(tensors))


def read_inputs(path: Path) -> dict[str, Seen]:
    """Read inputs from a file."""
    if not path.is_file():
        raise DataError(
            f"{path} is missing: layers cannot be tried on what the text gave them"
        )
    file = Safetensors(LocalBytes(path))
    found: dict[str, Seen] = {}
    for name in file.infos:
        layer, _, what = name.rpartition(".")
        if what == "x":
            memory = f"{layer}.memory"
            found[layer] = Seen(
                file.read(name), file.read(memory) if memory in file.infos else None
            )
    return found


def before_gain(x: Tensor, norm: Norm | None) -> Tensor:
    """Return the output of a norm before its weight and bias; 0 where the weight is 0."""
    if norm is None:
        return x
    gain = norm.weight.double() + norm.offset
    x = x if norm.bias is None else x - norm.bias.double()
    return torch.where(gain == 0, 0.0, x / torch.where(gain == 0, 1.0, gain))
