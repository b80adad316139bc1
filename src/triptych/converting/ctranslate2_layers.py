"""Layers of ours as the parts of CTranslate2's specifications, which hold NumPy arrays."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from triptych.models.blocks import OffsetNorm


def array(tensor: Tensor) -> Any:
    """A tensor as a specification holds it, in float32."""
    return tensor.detach().float().cpu().contiguous().numpy()


def set_linear(spec: Any, linears: Sequence[nn.Linear]) -> None:
    """Fill in one map, or several below each other."""
    spec.weight = array(_below([linear.weight for linear in linears]))
    if linears[0].bias is not None:
        spec.bias = array(_below([linear.bias for linear in linears]))


def set_norm(spec: Any, norm: nn.Module) -> None:
    """Fill in a norm; a gain that it does not have is 1, and a LayerNorm's bias 0."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm | OffsetNorm)
    if isinstance(norm, OffsetNorm):
        weight = norm.weight + norm.offset
    else:
        weight = torch.ones(norm.normalized_shape) if norm.weight is None else norm.weight
    spec.gamma = array(weight)
    if isinstance(norm, nn.LayerNorm) or (isinstance(norm, OffsetNorm) and norm.kind == "layer"):
        spec.beta = array(torch.zeros_like(weight) if norm.bias is None else norm.bias)


def _below(tensors: Sequence[Tensor]) -> Tensor:
    # `torch.cat` would copy a single one.
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])
