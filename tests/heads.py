"""Attention by its definition, head by head in NumPy, and layers with random numbers to compare with it."""

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor, nn

from triptych.core.algebra.positions import (
    ALiBi,
    DisentangledBias,
    RelativePositionBias,
    RotaryEmbedding,
    apply_rotary,
)
from triptych.core.algebra.semantics import HeadNorm, Semantics
from triptych.core.algebra.weights import AttentionWeights, Chain, Norm
from triptych.core.attention import MultiHeadAttention
from triptych.core.attention.position_modules import AttentionPositions
from triptych.core.attention.projections import PARAMETERISATIONS, Parameterisation
from triptych.rewriting.functions.moments import Moments, MomentsGatherer

Array = NDArray[np.float64]
Form = Literal["qk", "ov"]
NAMES = tuple(PARAMETERISATIONS)
KINDS = ("self", "causal", "cross")
_SEMANTICS = {field.name for field in dataclasses.fields(Semantics)}
D_MODEL, NUM_HEADS, BATCH, LENGTH, MEMORY_LENGTH = 24, 4, 2, 5, 7


def make_parameterisation(name: str, *, biased: bool, **options: int) -> Parameterisation:
    """One of the parameterisations, all its biases on or off; two groups where there are groups."""
    cls = PARAMETERISATIONS[name]
    fields = {field.name for field in dataclasses.fields(cls)}
    if name in ("grouped", "differential"):
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


def make(name: str, kind: Any = "self", *, biased: bool = True, **options: int) -> AttentionWeights:
    """The weights of such a layer."""
    return make_layer(name, biased=biased, **options).weights(kind)


def dense(weights: AttentionWeights, form: Form) -> Array:
    """A form of every head, by NumPy."""
    left, right = (weights.W_Q, weights.W_K.mT) if form == "qk" else (weights.W_V, weights.W_O)
    return np.stack([a @ b for a, b in zip(left.numpy(), right.numpy(), strict=True)])


def with_later_part(weights: AttentionWeights, value: float | None) -> AttentionWeights:
    """Weights of a layer with a field of `Semantics`, `quantised`, that nothing knows yet."""
    extra = [("quantised", float | None, dataclasses.field(default=None))]
    later = dataclasses.make_dataclass("Later", extra, bases=(Semantics,), frozen=True, eq=False)
    own = {one.name: getattr(weights.semantics, one.name) for one in dataclasses.fields(Semantics)}
    return dataclasses.replace(weights, semantics=later(**own, quantised=value))


def with_semantics(
    weights: AttentionWeights, *, positions: str = "", qk_norm: bool = False, sinks: Any = None, **others: Any
) -> AttentionWeights:
    """Weights of a layer that does something else besides its maps.

    Args:
        weights: of the layer.
        positions: "rotary", "alibi", "relative" or "disentangled", of some numbers; "none" for none.
        qk_norm: whether queries and keys are normalised.
        sinks: True for sinks of some numbers.
        **others: fields of `Semantics` and of the weights themselves.
    """
    heads, width = weights.num_heads, weights.multiplied("q").d_out
    zeros = torch.zeros(heads, 6, width, dtype=torch.float64)
    found: dict[str, dict[str, Any]] = {
        "": {},
        "none": {},
        "rotary": {"rotary": RotaryEmbedding.of_width(width // 2 * 2)},
        "alibi": {"bias": ALiBi.for_heads(heads)},
        "relative": {"bias": RelativePositionBias(zeros[0, :, :1].expand(6, heads), True, 16)},
        "disentangled": {"bias": DisentangledBias(zeros, zeros, 3, None, weights.scale)},
    }
    without = {"rotary": None, "bias": None} if positions else {}
    changes = (
        without | found[positions] | {name: other for name, other in others.items() if name in _SEMANTICS}
    )
    if qk_norm:
        changes |= {"q_norm": HeadNorm(1e-6), "k_norm": HeadNorm(1e-6)}
    if sinks is not None:
        changes["sinks"] = torch.zeros(heads, dtype=torch.float64) if sinks is True else sinks
    return dataclasses.replace(
        weights,
        semantics=dataclasses.replace(weights.semantics, **changes),
        **{name: other for name, other in others.items() if name not in _SEMANTICS},
    )


def turned_by(
    rotary: RotaryEmbedding, x: Float[Tensor, "*batch length width"], position: int
) -> Float[Tensor, "*batch length width"]:
    """Queries or keys rotated as if each stood at this position."""
    angles = (position * rotary.frequencies).expand(x.shape[-2], -1)
    cos, sin = angles.cos() * rotary.factor, angles.sin() * rotary.factor
    return apply_rotary(x, cos, sin, rotary.pairing, rotary.start)


def make_norm(offset: float = 0.0, *, shifted: bool = True) -> Norm:
    shift = torch.randn(D_MODEL, dtype=torch.float64) if shifted else None
    return Norm(torch.randn(D_MODEL, dtype=torch.float64) + 1.0, shift, offset)


def random_input(length: int) -> Tensor:
    return torch.randn(BATCH, length, D_MODEL, dtype=torch.float64)


def output_of(weights: AttentionWeights, x: Tensor, memory: Tensor | None = None) -> Array:
    """`Σ_i softmax(scale · q_i k_iᵀ) v_i W_i^O + b_O` of normalised inputs, loops in place of batches."""
    causal, cross = weights.semantics.kind == "causal", weights.semantics.kind == "cross"
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
        moved = np.einsum("bqk,bkc->bqc", p, v) * gate_of(weights, queries_from, head)
        output = output + _through(weights.o, moved, head, weights.num_heads)
    assert isinstance(output, np.ndarray)
    return output


def gate_of(weights: AttentionWeights, x: Array, head: int) -> Array | float:
    """What each query multiplies a head's output by: `σ(x w + b)`, and −λ or 1 of the heads of pairs."""
    gate = weights.semantics.gate
    if gate is None or (gate.whole and gate.whole[head]):
        return 1.0
    row = sum(not whole for whole in gate.whole[:head]) if gate.whole else head
    open_by = x @ gate.weight[row].detach().numpy() + (0.0 if gate.bias is None else gate.bias[row].item())
    return np.asarray((-1 if gate.whole else 1) / (1 + np.exp(-open_by)))[..., None]


def _after_norm(norm: Norm | None, x: Array) -> Array:
    if norm is None:
        return x
    return x * (norm.offset + norm.weight.numpy()) + (0.0 if norm.bias is None else norm.bias.numpy())


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
    memory = random_input(MEMORY_LENGTH) if one.semantics.kind == "cross" else None
    expected = output_of(one, x, memory)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(output_of(other, x, memory), expected, rtol=1e-12, atol=1e-12 * scale)


def outputs(layer: MultiHeadAttention, kind: str, x: Tensor, memory: Tensor) -> Tensor:
    """What a layer gives to inputs of the kind of its attention."""
    if kind == "cross":
        return layer(x, memory=memory).output.detach()
    return layer(x, causal=kind == "causal").output.detach()


def assert_layers_agree(before: AttentionWeights, after: AttentionWeights) -> None:
    """Real layers made of both give the same output."""
    x, memory = random_input(LENGTH), random_input(MEMORY_LENGTH)
    one, two = (
        outputs(MultiHeadAttention.from_weights(w), before.semantics.kind, x, memory) for w in (before, after)
    )
    torch.testing.assert_close(two, one, rtol=1e-10, atol=1e-10 * float(one.abs().max()))


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


def gathered(weights: AttentionWeights, *batches: Tensor) -> Moments:
    gatherer = MomentsGatherer()
    for x in batches:
        gatherer.add(weights, x)
    return gatherer.result()
