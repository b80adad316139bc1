"""A model made ready for decoding: the same blocks with fewer and faster maps.

The layers of `attention` serve training, inspection and rewriting; run token by token they spend their time
between the operations. `fused` copies a model and replaces what its blocks are made of: every attention
layer, whatever its parameterisation, by `FusedAttention`, its maps multiplied out and joined
(`AttentionWeights.multiplied`), and every linear map by one in the precision asked for.
"""

import copy
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from triptych import thresholds
from triptych.algebra.positions import RotaryEmbedding
from triptych.algebra.weights import AttentionWeights, Link
from triptych.attention import (
    AttentionCache,
    LayerOutput,
    LearnedPositions,
    MultiHeadAttention,
    PositionIds,
    causal_mask,
)
from triptych.models.blocks import FeedForward

Precision = Literal["fp32", "bf16", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "int8")


def unsupported_precision(precision: Precision, device: torch.device) -> str:
    """Why maps cannot be held in a precision on a device; "" if they can."""
    if precision != "int8":
        return ""
    if device.type != "cpu":
        return f"int8 is for CPUs, and the model is on {device}"
    engines = {"x86", "fbgemm"} & set(torch.backends.quantized.supported_engines)
    if not engines or not hasattr(torch, "quantize_per_channel"):
        return "this build of torch has no int8 products for this CPU"
    return ""


class Maps(ABC):
    """Makes linear maps of a precision.

    Attributes:
        dtype: of what the maps read and write.
    """

    dtype: torch.dtype

    @abstractmethod
    def linear(self, weight: Float[Tensor, "d_out d_in"], bias: Float[Tensor, " d_out"] | None) -> nn.Module:
        """`x Wᵀ + b`."""

    def feed_forward(self, layer: FeedForward) -> None:
        """Replace the maps of a feed-forward layer."""
        layer.inner = self.linear(layer.inner.weight, layer.inner.bias)  # type: ignore[assignment]
        layer.outer = self.linear(layer.outer.weight, layer.outer.bias)  # type: ignore[assignment]

    @staticmethod
    def of(precision: Precision, dtype: torch.dtype) -> "Maps":
        """For a model of this dtype: "fp32" leaves it as it is."""
        if precision == "int8":
            return Int8Maps(dtype)
        return DenseMaps(torch.bfloat16 if precision == "bf16" else dtype)


@final
class DenseMaps(Maps):
    """Maps of a floating dtype, which share memory with the model's own where they can."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        made = nn.Linear(weight.shape[1], weight.shape[0], bias is not None, device="meta")
        made.weight = _constant(weight, self.dtype)
        if bias is not None:
            made.bias = _constant(bias, self.dtype)
        return made


@final
class Int8Maps(Maps):
    """Weights with a scale for each output channel, activations with one found anew at every product.

    Sums are exact.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return Int8Linear(weight.detach(), bias, torch.ops.quantized.linear_dynamic)

    def feed_forward(self, layer: FeedForward) -> None:
        if layer.activation is torch.relu:  # in the operation itself
            relu = Int8Linear(
                layer.inner.weight.detach(), layer.inner.bias, torch.ops.quantized.linear_relu_dynamic
            )
            layer.outer = self.linear(layer.outer.weight, layer.outer.bias)  # type: ignore[assignment]
            layer.inner, layer.activation = relu, _identity  # type: ignore[assignment]
        else:
            super().feed_forward(layer)


@final
class Int8Linear(nn.Module):
    """A map of int8 weights, through one of torch's products with dynamic scales."""

    def __init__(self, weight: Tensor, bias: Tensor | None, product: Callable[..., Tensor]) -> None:
        super().__init__()
        largest = weight.float().abs().amax(dim=1).clamp_min(1e-12)
        scales = (largest / 127).double()
        zeros = torch.zeros_like(scales, dtype=torch.long)
        with warnings.catch_warnings():
            # torch means to replace these tensors; nothing else of it multiplies int8 on CPUs as fast yet.
            warnings.simplefilter("ignore", UserWarning)
            quantized = torch.quantize_per_channel(weight.float().contiguous(), scales, zeros, 0, torch.qint8)
            self.packed = torch.ops.quantized.linear_prepack(
                quantized, None if bias is None else bias.detach().float()
            )
        # Without VNNI the products of CPUs add pairs in 16 bits, which overflow at full range.
        self.narrow = not getattr(torch.cpu, "_is_vnni_supported", lambda: False)()
        self.product = product

    def forward(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        return self.product(x, self.packed, self.narrow)


@final
class FusedAttention(nn.Module):
    """An attention layer multiplied out: one map in, the operation, one map out. Called as the layer it was.

    Keys and values come in `groups` heads; each serves `num_heads / groups` query heads. All have one width:
    the narrower are filled up with zeros. Self-attention makes queries, keys and values in one product;
    cross-attention makes queries only, and reads keys and values from its cache.

    Attributes:
        memory_rows: of cross-attention, the map from the memory to keys and values, and its bias: for one
            product for all layers.
    """

    def __init__(self, layer: MultiHeadAttention, maps: Maps, is_cross: bool) -> None:
        super().__init__()
        weights = layer.weights()
        if foreign := weights.semantics.beyond(("scale", "kind", "dropout", "rotary", "bias")):
            raise ValueError(f"a layer with {', '.join(foreign)} cannot be fused")
        self.num_heads, self.is_cross = weights.num_heads, is_cross
        self.groups = math.lcm(weights.num_key_heads, weights.num_value_heads)
        self.rotary, self.bias = layer.semantics.rotary, layer.semantics.bias
        q, k, v = (weights.multiplied(side) for side in ("q", "k", "v"))
        self.width = max(q.d_out, v.d_out)
        self._parts = self.num_heads, self.groups, self.groups
        scaled = Link(q.weight * weights.scale, None if q.bias is None else q.bias * weights.scale)
        queries = _stacked_rows(scaled.of_heads(self.num_heads), self.width)
        keys, values = (_stacked_rows(link.of_heads(self.groups), self.width) for link in (k, v))
        joined = [queries] if is_cross else [queries, keys, values]
        self.inward = maps.linear(*(torch.cat(parts) for parts in zip(*joined, strict=True)))
        self.outward = maps.linear(*_output_rows(weights, self.width))
        self.memory_rows = torch.cat([keys[0], values[0]]), torch.cat([keys[1], values[1]])

    def forward(
        self,
        x: Float[Tensor, "batch query_len d_model"],
        *,
        memory: None = None,
        mask: Tensor | None = None,
        causal: bool = False,
        cache: AttentionCache | None = None,
        need_weights: bool = False,
        positions: PositionIds | None = None,
    ) -> LayerOutput:
        """As `MultiHeadAttention`; the mask may also be numbers added to the scores. No weights are given."""
        batch, length, _ = x.shape
        heads = self.inward(x).view(batch, length, -1, self.width).transpose(1, 2)
        if self.is_cross:
            assert cache is not None
            k, v = cache.entries
        else:
            heads, k, v = self._of_one_sequence(heads, cache, positions)
        if causal or self.bias is not None or (mask is not None and mask.dtype == torch.bool):
            mask = self._added(mask, length, k, causal, positions)
        # The query heads of a group lie below each other, as rows of one product.
        rows = heads.reshape(batch * self.groups, -1, self.width)
        few = rows.shape[1] <= thresholds.FEW_QUERIES and rows.is_cpu
        mixed = (
            self._by_products(rows, k, v, mask, length) if few else self._by_kernel(rows, k, v, mask, length)
        )
        joined = mixed.view(batch, self.num_heads, length, self.width).transpose(1, 2)
        return LayerOutput(self.outward(joined.reshape(batch, length, -1)), None)

    def _of_one_sequence(
        self, heads: Tensor, cache: AttentionCache | None, positions: PositionIds | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = torch.split_with_sizes(heads, self._parts, 1)
        if self.rotary is not None:
            start = 0 if cache is None else cache.length
            q, k = (self._rotated(self.rotary, part, start, positions) for part in (q, k))
        if cache is not None:
            k, v = cache.append((k, v))
        return q, k, v

    def _rotated(
        self, rotary: RotaryEmbedding, heads: Tensor, start: int, positions: PositionIds | None
    ) -> Tensor:
        if positions is None:
            return rotary(heads, start)
        # All of a step stand at its one position.
        return rotary(heads.flatten(1, 2)[:, :, None], positions.end - 1).view(heads.shape)

    def _added(
        self, mask: Tensor | None, length: int, k: Tensor, causal: bool, positions: PositionIds | None
    ) -> Tensor | None:
        """All that is added to the scores, broadcasting to `[batch, num_heads, query_len, key_len]`."""
        if mask is not None and mask.dtype == torch.bool:
            mask = _as_numbers(mask, k)
        if causal and length > 1:
            triangle = _as_numbers(causal_mask(length, k.shape[2], k.device), k)
            mask = triangle if mask is None else mask + triangle
        if self.bias is None:
            return mask
        places = torch.arange(k.shape[2] if positions is None else positions.end, device=k.device)
        queries = places[-length:] if positions is None else places[-1:]
        bias = self.bias(k, k, queries, places)
        if positions is not None:
            bias = bias.repeat_interleave(positions.sharing, dim=2)
        return bias if mask is None else mask + bias

    def _by_products(self, rows: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, length: int) -> Tensor:
        k, v = k.reshape(len(rows), -1, self.width), v.reshape(len(rows), -1, self.width)
        if k.dtype == torch.bfloat16:
            k = k.contiguous()  # a product would copy a part of a cache itself, at a third of the speed
        scores = torch.bmm(rows, k.mT)
        if mask is not None:
            scores.view(-1, self.num_heads, length, k.shape[1]).add_(mask)
        return torch.bmm(scores.softmax(dim=-1), v)

    def _by_kernel(self, rows: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, length: int) -> Tensor:
        q = rows.view(len(k), self.groups, -1, self.width)
        if mask is not None and self.groups < self.num_heads and max(mask.shape[1], mask.shape[2]) > 1:
            whole = mask.expand(len(mask), self.num_heads, length, k.shape[2])
            mask = whole.reshape(len(mask), self.groups, -1, k.shape[2])
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0)


def fused(model: nn.Module, maps: Maps) -> nn.Module:
    """A copy of a model for evaluation, its layers replaced; it shares memory with the model where it can.

    The embeddings are the caller's to replace, and the output layer.
    """
    copied = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()}).eval()
    for parent in list(copied.modules()):
        if isinstance(parent, FeedForward):
            maps.feed_forward(parent)
        for name, layer in parent.named_children():
            if isinstance(layer, MultiHeadAttention):
                setattr(parent, name, FusedAttention(layer, maps, is_cross=name == "cross_attention"))
            elif isinstance(layer, nn.LayerNorm):
                layer.weight, layer.bias = (_constant(own, maps.dtype) for own in (layer.weight, layer.bias))
            elif isinstance(layer, LearnedPositions):
                layer.weight = _constant(layer.weight, maps.dtype)
    return copied


def call_directly(model: nn.Module) -> None:
    """Make calls between the modules of a model go straight to `forward`.

    A step of decoding is so short that the hooks which `Module.__call__` looks for, and the look-up of every
    sub-module and parameter by name, would be a tenth of it.
    """
    for parent in model.modules():
        direct = parent.__dict__
        direct.update(parent._parameters)
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList):
                direct[name] = [each.forward for each in child]
            else:
                direct[name] = child.forward if type(child).forward is not nn.Module.forward else child


def _constant(tensor: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(tensor.detach().to(dtype).contiguous(), requires_grad=False)


def _identity(x: Tensor) -> Tensor:
    return x


def _as_numbers(allowed: Tensor, like: Tensor) -> Tensor:
    """0 where a query may look and −inf where it may not."""
    return torch.zeros(allowed.shape, dtype=like.dtype, device=like.device).masked_fill_(~allowed, -math.inf)


def _stacked_rows(link: Link, width: int) -> tuple[Tensor, Tensor]:
    """A link's copies below each other, `[copies · width, d_in]`, each filled up to `width`; and the bias."""
    missing = width - link.d_out
    weight = F.pad(link.weight.mT, (0, 0, 0, missing)).flatten(0, 1)
    bias = link.weight.new_zeros(link.copies, link.d_out) if link.bias is None else link.bias
    return weight, F.pad(bias, (0, missing)).flatten()


def _output_rows(weights: AttentionWeights, width: int) -> tuple[Tensor, Tensor | None]:
    """The output map as `[d_model, heads · width]`, and its bias."""
    per_head = weights.W_O
    filled = F.pad(per_head, (0, 0, 0, width - per_head.shape[1]))
    return filled.flatten(0, 1).mT, weights.o_bias
