"""One attention layer of everybody: no biases, no dropout, the same sizes and masks."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import MarianConfig
from transformers.models.marian.modeling_marian import MarianAttention
from x_transformers.x_transformers import Attention

from triptych.core.attention import MultiHeadAttention

KINDS = ("self", "causal", "cross", "padded")
_PADDING = 0.2


@dataclass(frozen=True)
class Inputs:
    """What a layer is given.

    Attributes:
        kind: self-attention, the same under a causal mask, cross-attention to as long a memory, or
            self-attention in which the last fifth of the keys of every second sequence is padding.
        x: `[batch, length, d_model]`.
        memory: for "cross"; None otherwise.
        real: `[batch, length]`, True where a key counts, for "padded"; None otherwise.
    """

    kind: str
    x: Tensor
    memory: Tensor | None
    real: Tensor | None

    @classmethod
    def of(cls, kind: str, batch: int, length: int, d_model: int, dtype: torch.dtype) -> "Inputs":
        """Random ones."""
        x = torch.randn(batch, length, d_model).to(dtype)
        memory = torch.randn(batch, length, d_model).to(dtype) if kind == "cross" else None
        real = None
        if kind == "padded":
            real = torch.ones(batch, length, dtype=torch.bool)
            real[::2, max(1, round(length * (1 - 2 * _PADDING))) :] = False
        return cls(kind, x, memory, real)


class Layer(ABC):
    """Somebody's layer."""

    module: Any

    @abstractmethod
    def load(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        """Take these maps, each `[d_model, d_model]` as torch.nn.Linear stores them."""

    @abstractmethod
    def prepare(self, inputs: Inputs) -> Callable[[Tensor], Tensor]:
        """The call for these inputs, with masks as the package makes them once for all its layers."""


@final
class Ours(Layer):
    def __init__(self, d_model: int, num_heads: int) -> None:
        self.module = MultiHeadAttention(d_model, num_heads)

    def load(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        own = self.module.projections
        _copy((own.q_proj, own.k_proj, own.v_proj, own.o_proj), (q, k, v, o))

    def prepare(self, inputs: Inputs) -> Callable[[Tensor], Tensor]:
        mask = None if inputs.real is None else inputs.real[:, None, None, :]
        causal = inputs.kind == "causal"
        return lambda x: self.module(x, memory=inputs.memory, mask=mask, causal=causal).output


@final
class Torch(Layer):
    def __init__(self, d_model: int, num_heads: int) -> None:
        self.module = nn.MultiheadAttention(d_model, num_heads, bias=False, batch_first=True)

    def load(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        self.module.in_proj_weight.data.copy_(torch.cat([q, k, v]))
        self.module.out_proj.weight.data.copy_(o)

    def prepare(self, inputs: Inputs) -> Callable[[Tensor], Tensor]:
        length, causal = inputs.x.shape[1], inputs.kind == "causal"
        future = torch.ones(length, length, dtype=torch.bool).triu(1) if causal else None
        hidden = None if inputs.real is None else ~inputs.real

        def call(x: Tensor) -> Tensor:
            other = x if inputs.memory is None else inputs.memory
            found, _ = self.module(
                x,
                other,
                other,
                need_weights=False,
                attn_mask=future,
                is_causal=causal,
                key_padding_mask=hidden,
            )
            return found

        return call


@final
class Marian(Layer):
    """Of Hugging Face: fused ("sdpa") or written out ("eager")."""

    def __init__(self, d_model: int, num_heads: int, implementation: str) -> None:
        settings: Any = {"d_model": d_model, "attn_implementation": implementation}
        config = MarianConfig(**settings)
        self.module = MarianAttention(d_model, num_heads, bias=False, config=config)
        self.written_out = implementation == "eager"

    def load(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        own = self.module
        _copy((own.q_proj, own.k_proj, own.v_proj, own.out_proj), (q, k, v, o))

    def prepare(self, inputs: Inputs) -> Callable[[Tensor], Tensor]:
        length = inputs.x.shape[1]
        self.module.is_causal = inputs.kind == "causal" and not self.written_out
        mask: Tensor | None = None if inputs.real is None else inputs.real[:, None, None, :]
        if self.written_out:
            if inputs.kind == "causal":
                mask = torch.ones(length, length, dtype=torch.bool).tril()[None, None]
            if mask is not None:
                lowest = torch.finfo(inputs.x.dtype).min
                mask = torch.zeros(mask.shape, dtype=inputs.x.dtype).masked_fill(~mask, lowest)
        return lambda x: self.module(x, key_value_states=inputs.memory, attention_mask=mask)[0]


@final
class XTransformers(Layer):
    def __init__(self, d_model: int, num_heads: int) -> None:
        size = {"dim": d_model, "heads": num_heads, "dim_head": d_model // num_heads, "flash": True}
        self.modules = {causal: Attention(**size, causal=causal) for causal in (False, True)}
        self.module = nn.ModuleList(self.modules.values())

    def load(self, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> None:
        for own in self.modules.values():
            _copy((own.to_q, own.to_k, own.to_v, own.to_out), (q, k, v, o))

    def prepare(self, inputs: Inputs) -> Callable[[Tensor], Tensor]:
        module = self.modules[inputs.kind == "causal"]

        def call(x: Tensor) -> Tensor:
            found = module(x, context=inputs.memory, mask=inputs.real)
            return found[0] if isinstance(found, tuple) else found

        return call


LAYERS: dict[str, Callable[[int, int], Layer]] = {
    "triptych": Ours,
    "torch.nn.MultiheadAttention": Torch,
    "Hugging Face sdpa": lambda d_model, num_heads: Marian(d_model, num_heads, "sdpa"),
    "Hugging Face eager": lambda d_model, num_heads: Marian(d_model, num_heads, "eager"),
    "x-transformers flash": XTransformers,
}


def _copy(linears: Sequence[nn.Linear], weights: Sequence[Tensor]) -> None:
    for linear, weight in zip(linears, weights, strict=True):
        linear.weight.data.copy_(weight)


def largest_difference(ours: Layer, theirs: Layer, inputs: Inputs) -> float:
    """How far apart the outputs of two layers are, where the query is no padding."""
    with torch.no_grad():
        outputs = [layer.prepare(inputs)(inputs.x) for layer in (ours, theirs)]
    apart = (outputs[0] - outputs[1]).abs()
    return float((apart if inputs.real is None else apart[inputs.real]).max())


def forward(layer: Layer, inputs: Inputs) -> Callable[[], object]:
    """Without gradients."""
    call = layer.prepare(inputs)

    def run() -> None:
        with torch.no_grad():
            call(inputs.x)

    return run


def training(layer: Layer, inputs: Inputs) -> Callable[[], object]:
    """Forward and backward, with the gradient of the input, as inside a network."""
    call, x = layer.prepare(inputs), inputs.x.detach().requires_grad_()
    with torch.no_grad():
        gradient = torch.ones_like(call(x))
    wanted = [x, *layer.module.parameters()]
    return lambda: torch.autograd.grad(call(x), wanted, gradient, allow_unused=True)
