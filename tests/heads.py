"""Attention by its definition, head by head in NumPy, and layers with random numbers to compare with it."""

import dataclasses
from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from triptych.algebra.weights import AttentionWeights, Chain, Norm
from triptych.attention import MultiHeadAttention
from triptych.attention.positions import AttentionPositions
from triptych.attention.projections import PARAMETERISATIONS, Parameterisation

Array = NDArray[np.float64]
D_MODEL, NUM_HEADS, BATCH, LENGTH, MEMORY_LENGTH = 24, 4, 2, 5, 7


def make_parameterisation(name: str, *, biased: bool, **options: int) -> Parameterisation:
    """One of the parameterisations, all its biases on or off; two groups where there are groups."""
    cls = PARAMETERISATIONS[name]
    fields = {field.name for field in dataclasses.fields(cls)}
    if name == "grouped":
        options.setdefault("num_kv_heads", 2)
    return cls(**options, **{field: biased for field in fields if field.endswith("_bias")})


def make_layer(
    name: str, *, biased: bool, positions: AttentionPositions | None = None, **options: int
) -> MultiHeadAttention:
    """A float64 layer, biases as random as the rest."""
    written = make_parameterisation(name, biased=biased, **options)
    layer = MultiHeadAttention(D_MODEL, NUM_HEADS, written, positions=positions).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer


def make_norm(offset: float = 0.0, *, shifted: bool = True) -> Norm:
    shift = torch.randn(D_MODEL, dtype=torch.float64) if shifted else None
    return Norm(torch.randn(D_MODEL, dtype=torch.float64) + 1.0, shift, offset)


def random_input(length: int) -> Tensor:
    return torch.randn(BATCH, length, D_MODEL, dtype=torch.float64)


def output_of(weights: AttentionWeights, x: Tensor, memory: Tensor | None = None) -> Array:
    """`Σ_i softmax(scale · q_i k_iᵀ) v_i W_i^O + b_O` of normalised inputs, loops in place of batches."""
    causal, cross = weights.traits.kind == "causal", weights.traits.kind == "cross"
    assert cross == (memory is not None)
    queries_from = _after_norm(weights.norm, x.numpy())
    keys_from = queries_from if memory is None else _after_norm(weights.memory_norm, memory.numpy())
    output = 0.0 if weights.o_bias is None else weights.o_bias.numpy()
    for head in range(weights.num_heads):
        q = _through(weights.q, queries_from, head, weights.num_heads)
        k = _through(weights.k, keys_from, head, weights.num_heads)
        v = _through(weights.v, keys_from, head, weights.num_heads)
        scores = weights.scale * np.einsum("bqc,bkc->bqk", q, k)
        if causal:
            scores[:, ~np.tri(*scores.shape[1:], dtype=bool)] = -np.inf
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        p = powers / powers.sum(axis=-1, keepdims=True)
        output = output + _through(weights.o, np.einsum("bqk,bkc->bqc", p, v), head, weights.num_heads)
    assert isinstance(output, np.ndarray)
    return output


def _after_norm(norm: Norm | None, x: Array) -> Array:
    if norm is None:
        return x
    return x * (norm.offset + norm.gain.numpy()) + (0.0 if norm.shift is None else norm.shift.numpy())


def _through(chain: Chain, x: Array, head: int, num_heads: int) -> Array:
    for link in chain:
        place = head * link.weight.shape[0] // num_heads
        matrix = link.weight[place].numpy()
        x = x * matrix if matrix.ndim == 1 else x @ matrix
        if link.bias is not None:
            x = x + link.bias[place].numpy()
    return x


def assert_same_function(one: AttentionWeights, other: AttentionWeights) -> None:
    """Both give the same output to random inputs, by the definition."""
    x = random_input(LENGTH)
    memory = random_input(MEMORY_LENGTH) if one.traits.kind == "cross" else None
    expected = output_of(one, x, memory)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(output_of(other, x, memory), expected, rtol=1e-12, atol=1e-12 * scale)


class Untouched:
    """Within it, no number of some weights changes: `with Untouched(weights): …`."""

    def __init__(self, weights: AttentionWeights) -> None:
        self.weights = weights

    def __enter__(self) -> None:
        self.before = [tensor.clone() for tensor in self.weights.tensors()]

    def __exit__(self, *_: object) -> None:
        after = list(self.weights.tensors())
        assert len(after) == len(self.before)
        assert all(torch.equal(one, other) for one, other in zip(self.before, after, strict=True))


def storages(weights: AttentionWeights) -> Iterator[int]:
    """Where the numbers of each distinct map lie."""
    return (link.weight.untyped_storage().data_ptr() for link in weights.links())
