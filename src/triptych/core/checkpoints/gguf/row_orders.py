"""Conversion of tensors between the layouts of llama.cpp and `transformers`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from triptych.core.checkpoints.gguf.architectures import Architecture, Joined
from triptych.core.storage.settings import Settings


@final
@dataclass(frozen=True)
class Heads:
    """Numbers of heads of a model's attention layers."""

    queries: int
    keys: int


@final
@dataclass(frozen=True)
class Layout:
    """The difference between the two ways to store a tensor."""

    permuted: int = 0  # number of heads with interleaved rotary channels, or 0
    fused: Heads | None = (
        None  # heads of a fused map that `transformers` orders by group
    )
    transposed: bool = False
    from_one: bool = False  # True for gains, which `transformers` stores less 1
    times: float = 1.0  # factor of the values that `transformers` stores

    @property
    def keeps_rows(self) -> bool:
        """True if rows are the same in both layouts."""
        return not (self.permuted or self.fused or self.transposed)

    def read(self, tensor: Tensor) -> Tensor:
        """Return a tensor of llama.cpp as `transformers` stores it."""
        if self.permuted:
            tensor = _swapped(tensor, self.permuted, "pairs")
        if self.fused is not None:
            tensor = _by_group(tensor, self.fused)
        if self.transposed:
            tensor = tensor.mT.contiguous()
        if self.times != 1:
            tensor = tensor.float() * self.times
        return tensor - 1 if self.from_one else tensor

    def write(self, tensor: Tensor) -> Tensor:
        """Return a tensor of `transformers` as llama.cpp stores it."""
        if self.permuted:
            tensor = _swapped(tensor, self.permuted, "halves")
        if self.fused is not None:
            tensor = _apart(tensor, self.fused)
        if self.transposed:
            tensor = tensor.mT.contiguous()
        if self.times != 1:
            tensor = tensor.float() / self.times
        return tensor.float() + 1 if self.from_one else tensor


def layout_of(
    architecture: Architecture, name: str, heads: Heads, settings: Settings
) -> Layout:
    """Return the layout of a tensor by its name in a GGUF file.

    `settings`: configuration in `transformers`.
    """
    own = name.split(".", 2)[2] if name.startswith("blk.") else name
    permuted = 0
    if architecture.permuted and own.startswith(("attn_q.", "attn_k.")):
        permuted = heads.queries if own.startswith("attn_q.") else heads.keys
    of_logits = architecture.over_root if own == "output.weight" else ""
    return Layout(
        permuted=permuted,
        fused=heads if architecture.fused and own.startswith("attn_qkv.") else None,
        transposed=own in architecture.transposed,
        from_one=architecture.gains_from_one and own.endswith("norm.weight"),
        times=settings.number(of_logits) ** 0.5 if of_logits else 1.0,
    )


def split(
    joined: Joined, whole: Tensor, heads: Heads, settings: Settings
) -> tuple[Tensor, ...]:
    """Return the parts of a tensor of `transformers` that a file has."""
    if joined.transposed:
        whole = whole.mT
    axis = _outputs(joined)
    match joined.order:
        case "halves":
            return whole.chunk(2, axis)
        case "alternating":
            return torch.unbind(torch.unflatten(whole, axis, (-1, 2)), axis)
        case "by group":
            width = len(whole) // (heads.queries + 2 * heads.keys)
            num_rows = [heads.queries * width, heads.keys * width, heads.keys * width]
            return torch.split(_apart(whole, heads), num_rows)
        case "latents":
            # llama.cpp applies the maps of keys to queries: they are transposed.
            width = settings.count("qk_nope_head_dim | 128")
            apart = whole.reshape(heads.queries, -1, whole.shape[1])
            return apart[:, :width].mT, apart[:, width:]
    return (whole,)


def join(joined: Joined, parts: Sequence[Tensor], heads: Heads) -> Tensor:
    """Undo `split`. Raises RuntimeError if the shapes of the parts do not fit each other."""
    axis = _outputs(joined)
    whole = parts[0]
    match joined.order:
        case "halves":
            whole = torch.cat(list(parts), axis)
        case "alternating":
            whole = torch.stack(list(parts), axis).flatten(axis - 1, axis)
        case "by group":
            whole = _by_group(torch.cat(list(parts)), heads)
        case "latents":
            keys, values = parts
            whole = torch.cat([keys.mT, values], dim=1).flatten(0, 1)
    return whole.mT.contiguous() if joined.transposed else whole


def _outputs(joined: Joined) -> int:
    """Return the dimension of outputs, in maps and biases of one expert or of all."""
    return -1 if joined.parts[0].endswith(".bias") else -2


def _swapped(tensor: Tensor, heads: int, stored: Literal["halves", "pairs"]) -> Tensor:
    """Exchange the two orders of the rotary channels of each head: halves after each other, or pairs."""
    width = len(tensor) // heads
    shape = (heads, 2, width // 2) if stored == "halves" else (heads, width // 2, 2)
    return (
        tensor.reshape(*shape, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)
    )


def _by_group(tensor: Tensor, heads: Heads) -> Tensor:
    """Order rows "all queries, all keys, all values" by group: its queries, its key, its value."""
    width = len(tensor) // (heads.queries + 2 * heads.keys)
    rows = tensor.shape[1:]
    num_rows = [heads.queries * width, heads.keys * width, heads.keys * width]
    queries, keys, values = torch.split(tensor, num_rows)
    parts = [
        queries.reshape(heads.keys, -1, width, *rows),
        keys.reshape(heads.keys, 1, width, *rows),
        values.reshape(heads.keys, 1, width, *rows),
    ]
    return torch.cat(parts, dim=1).reshape(tensor.shape)


def _apart(tensor: Tensor, heads: Heads) -> Tensor:
    """Undo `_by_group`."""
    width = len(tensor) // (heads.queries + 2 * heads.keys)
    rows = tensor.shape[1:]
    grouped = tensor.reshape(heads.keys, -1, width, *rows)
    parts = [grouped[:, :-2], grouped[:, -2], grouped[:, -1]]
    return torch.cat([part.reshape(-1, *rows) for part in parts])
