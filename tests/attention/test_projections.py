"""Every way to write a head under one contract: the layer computes what its two forms say, and no more.

Whatever `PARAMETERISATIONS` names is tested. Options come from the fields of its class: biases are
those that end in `_bias`, sizes those of `OWN_SIZES` or their defaults.
"""

import dataclasses
import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from attention.explained import explain_attention
from heads import with_semantics
from made import Made
from tolerances import assert_same
from triptych.core.algebra.cost import writing_cost
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.positions import alibi_slopes
from triptych.core.algebra.semantics import HeadGate
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention import (
    PARAMETERISATIONS,
    AlibiPositions,
    AttentionPositions,
    Direct,
    Factored,
    FourMatrix,
    Grouped,
    Latent,
    LayerCache,
    MultiHeadAttention,
    Parameterisation,
    RotaryPositions,
    check_sizes,
    parameterisation,
)

Kind = Literal["self", "causal", "cross", "three sequences"]

NAMES = list(PARAMETERISATIONS)
KINDS: list[Kind] = ["self", "causal", "cross", "three sequences"]
PATHS = ("reference", "fast", "auto")
BATCH, LENGTH, MEMORY_LENGTH = 3, 5, 7

# Sizes that only some classes have; a size that is not here keeps its default.
OWN_SIZES = {"num_kv_heads": 2, "d_latent": 10, "d_shared": 14}
# d_model, num_heads, and the widths of a head where they are not d_model / num_heads.
SIZES: dict[str, tuple[int, int, dict[str, int]]] = {
    "shared out": (24, 4, {}),
    "wider values": (24, 4, {"d_k": 5, "d_v": 7}),
    "narrower values, indivisible": (22, 4, {"d_k": 6, "d_v": 3}),
}
# Which kinds of attention are tried at which size.
TRIED: dict[str, list[Kind]] = {
    "shared out": KINDS,
    "wider values": ["cross"],
    "narrower values, indivisible": ["causal"],
}
SCHEMES = {RotaryPositions: "rotary", AlibiPositions: "alibi"}
POSITIONS: dict[str, AttentionPositions | None] = {
    "none": None,
    "rotary": RotaryPositions(),
    "rotary interleaved": RotaryPositions(pairing="interleaved"),
    "rotary partial": RotaryPositions(4),
    "rotary partial interleaved": RotaryPositions(4, "interleaved", 100.0),
    "alibi": AlibiPositions(),
}


def fields_of(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(PARAMETERISATIONS[name])]


def has_free_widths(name: str) -> bool:
    """Whether no width of a head is bound to d_model / num_heads."""
    return "d_k" in fields_of(name) and not name.startswith("identity")


def written(name: str, *, biased: bool, **widths: int) -> Parameterisation:
    """One of the parameterisations: all biases on or off, and those of the sizes that it has."""
    biases = {field: biased for field in fields_of(name) if field.endswith("_bias")}
    sizes = {field: size for field, size in {**OWN_SIZES, **widths}.items() if field in fields_of(name)}
    return parameterisation(name, **sizes, **biases)


def make_layer(
    name: str, size: str = "shared out", *, biased: bool = True, positions: AttentionPositions | None = None
) -> MultiHeadAttention:
    """A float64 layer, its biases as random as the rest."""
    d_model, num_heads, widths = SIZES[size]
    chosen = written(name, biased=biased, **widths)
    layer = MultiHeadAttention(d_model, num_heads, chosen, positions=positions).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


def random_input(layer: MultiHeadAttention, length: int, batch: int = BATCH) -> Tensor:
    return torch.randn(batch, length, layer.d_model, dtype=torch.float64, requires_grad=True)


def make_inputs(layer: MultiHeadAttention, kind: Kind, *, masked: bool) -> tuple[Tensor, dict[str, Any]]:
    """x and the rest; with a mask, the last sentence has nothing that could be attended to."""
    x = random_input(layer, LENGTH)
    given: dict[str, Any] = {}
    if kind in ("cross", "three sequences"):
        given["memory"] = random_input(layer, MEMORY_LENGTH)
    if kind == "three sequences":
        given["value_memory"] = random_input(layer, MEMORY_LENGTH)
    if kind == "causal":
        given["causal"] = True
    if masked:
        key_len = given.get("memory", x).shape[1]
        lengths = torch.tensor([key_len, key_len - 3, 0])
        given["mask"] = (torch.arange(key_len) < lengths[:, None])[:, None, None]
    return x, given


def dense(
    weights: AttentionWeights,
    x: Tensor,
    *,
    memory: Tensor | None = None,
    value_memory: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    positions: AttentionPositions | None = None,
    gate: HeadGate | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and softmax rows from W_QK, W_OV, biases and gates, whatever way they are written in."""
    keys_from = x if memory is None else memory
    values_from = keys_from if value_memory is None else value_memory
    b_q, b_k, b_v = weights.head_bias("q"), weights.head_bias("k"), weights.head_bias("v")
    if isinstance(positions, RotaryPositions):
        q = torch.einsum("bqd,hdc->bhqc", x, weights.W_Q) + (0 if b_q is None else b_q[:, None])
        k = torch.einsum("bkd,hdc->bhkc", keys_from, weights.W_K) + (0 if b_k is None else b_k[:, None])
        scores = turned(q, positions) @ turned(k, positions).mT
    else:
        scores = torch.einsum("bqd,hde,bke->bhqk", x, weights.qk.dense(), keys_from)
        if b_q is not None:
            scores = scores + torch.einsum("hc,hec,bke->bhk", b_q, weights.W_K, keys_from)[:, :, None]
        if b_k is not None:
            scores = scores + torch.einsum("bqd,hdc,hc->bhq", x, weights.W_Q, b_k)[..., None]
        if b_q is not None and b_k is not None:
            scores = scores + (b_q * b_k).sum(-1)[:, None, None]
    scores = scores * weights.scale
    if isinstance(positions, AlibiPositions):
        distance = (torch.arange(x.shape[1])[:, None] - torch.arange(x.shape[1])).abs()
        slopes = torch.tensor(alibi_slopes(weights.num_heads), dtype=x.dtype)
        scores = scores - slopes[:, None, None] * distance
    allowed = torch.ones(scores.shape[-2:], dtype=torch.bool)
    if causal:
        allowed = allowed.tril()
    if mask is not None:
        allowed = allowed & mask
    powers = (scores - scores.detach().amax(-1, keepdim=True)).exp() * allowed
    total = powers.sum(-1, keepdim=True)
    p = powers / total.where(total > 0, 1.0)
    taken = p
    if (gate := gate or weights.semantics.gate) is not None:
        assert gate.bias is None
        opened = torch.einsum("bqd,hd->bhq", x, gate.weight).sigmoid()[..., None]
        taken = torch.stack((p[:, ::2], -opened * p[:, 1::2]), dim=2).flatten(1, 2)  # of pairs of heads
    output = torch.einsum("bhqk,bkd,hde->bqe", taken, values_from, weights.ov.dense())
    if b_v is not None:
        output = output + torch.einsum("bhq,hc,hce->bqe", taken.sum(-1), b_v, weights.W_O)
    return output if weights.o_bias is None else output + weights.o_bias, p


def turned(heads: Tensor, positions: AttentionPositions) -> Tensor:
    """Rotary positions by complex numbers."""
    assert isinstance(positions, RotaryPositions)
    width = positions.rotary_dim or heads.shape[-1]
    halves = torch.arange(width).view(2, width // 2)
    first, second = halves if positions.pairing == "halves" else halves.flatten().view(-1, 2).T
    frequency = positions.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.arange(heads.shape[2])[:, None] * frequency
    z = torch.complex(heads[..., first], heads[..., second]) * torch.exp(1j * angle)
    result = heads.clone()
    result[..., first], result[..., second] = z.real, z.imag
    return result


def cases() -> list[Any]:
    """Every parameterisation with every size and kind that it can have."""
    return [
        pytest.param(name, size, kind, id=f"{name}, {size}, {kind}")
        for name, cls in PARAMETERISATIONS.items()
        for size, (_, _, widths) in SIZES.items()
        for kind in TRIED[size]
        if not widths or has_free_widths(name)
        if kind != "three sequences" or not cls().build(24, 4).no_two_memories
    ]


def positioned() -> list[Any]:
    """Every parameterisation with all positions that it can have."""
    return [
        pytest.param(name, positions, id=f"{name}, {label}")
        for name, cls in PARAMETERISATIONS.items()
        for label, positions in POSITIONS.items()
        if not (isinstance(positions, RotaryPositions) and cls.no_rotary)
    ]


# What it computes


@pytest.mark.parametrize(("name", "size", "kind"), cases())
def test_the_output_is_that_of_the_two_forms(name: str, size: str, kind: Kind) -> None:
    for biased in (False, True):
        layer = make_layer(name, size, biased=biased)
        weights = layer.weights()
        assert weights.scale == 1 / math.sqrt(layer.projections.d_k)
        for masked in (False, True):
            x, given = make_inputs(layer, kind, masked=masked)
            expected, _ = dense(weights, x, **given)
            for path in PATHS:
                assert_same(layer(x, **given, path=path).output, expected, kind="output")


@pytest.mark.parametrize(("name", "size", "kind"), cases())
def test_the_gradients_are_those_of_the_two_forms(name: str, size: str, kind: Kind) -> None:
    layer = make_layer(name, size)
    parameters = dict(layer.named_parameters())
    for masked in (False, True):
        x, given = make_inputs(layer, kind, masked=masked)
        inputs = {"x": x, **{key: value for key, value in given.items() if "memory" in key}}
        sources = [*inputs.values(), *parameters.values()]
        expected_output, _ = dense(layer.projections.weights(), x, **given, gate=layer.semantics.gate)
        upstream = torch.randn_like(expected_output)
        # Key biases cancel in the softmax, and need not be part of the graph at all.
        expected = torch.autograd.grad(expected_output, sources, upstream, materialize_grads=True)
        key_biases = sum(link.bias is not None for link in layer.weights().k)
        assert sum(bool(gradient.abs().max() > 1e-9) for gradient in expected) >= len(sources) - key_biases
        for path in PATHS:
            output = layer(x, **given, path=path).output
            found = torch.autograd.grad(output, sources, upstream, materialize_grads=True)
            for one, other in zip(found, expected, strict=True):
                assert_same(one, other, kind="gradient")


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_maps_of_one_input_as_one_product_are_the_same(
    name: str, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = make_layer(name, biased=biased)
    x, memory, upstream = (random_input(layer, LENGTH) for _ in range(3))

    def computed() -> tuple[int, list[Tensor]]:
        with Made() as made:
            output = layer(x, causal=True).output + layer(x, memory=memory).output
        gradients = torch.autograd.grad(output, [x, memory, *layer.parameters()], upstream)
        return sum(operation in ("mm", "addmm") for operation in made.names), [output, *gradients]

    products, expected = computed()
    monkeypatch.setattr("triptych.thresholds.ONE_PRODUCT_ON", {"cpu"})
    fewer, found = computed()
    if name in ("factored", "grouped"):  # one for q, k and v of `x`, and one for k and v of `memory`
        assert products - fewer == 3
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other, kind="gradient")


@pytest.mark.parametrize(("name", "size", "kind"), cases())
def test_the_weights_are_the_softmax_rows_and_cost_nothing_else(name: str, size: str, kind: Kind) -> None:
    layer = make_layer(name, size)
    for masked in (False, True):
        x, given = make_inputs(layer, kind, masked=masked)
        _, expected = dense(layer.weights(), x, **given)
        asked, unasked = layer(x, **given, need_weights=True), layer(x, **given)
        assert unasked.weights is None
        assert_same(asked.weights, expected, kind="output")
        assert_same(asked.output, unasked.output, kind="output")


@pytest.mark.parametrize(("name", "positions"), positioned())
def test_positions_turn_queries_and_keys_or_lower_scores(
    name: str, positions: AttentionPositions | None
) -> None:
    layer = make_layer(name, positions=positions)
    expected = "none" if positions is None else SCHEMES[type(positions)]
    assert layer.weights().semantics.positions == expected
    for kind in ("self", "causal"):
        x, given = make_inputs(layer, kind, masked=True)
        expected, rows = dense(layer.weights(), x, **given, positions=positions)
        for path in PATHS:
            assert_same(layer(x, **given, path=path).output, expected, kind="output")
        assert_same(layer(x, **given, need_weights=True).weights, rows, kind="output")


@pytest.mark.parametrize("name", NAMES)
def test_more_queries_than_keys_under_a_causal_mask_leave_the_first_blind(name: str) -> None:
    # Small enough a latent that the absorbed route is taken, whose value bias needs rows that sum to 1.
    sizes = {"d_latent": 1} if "d_latent" in fields_of(name) else {}
    layer = MultiHeadAttention(24, 4, written(name, biased=True, **sizes)).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    output = layer(random_input(layer, 8), memory=random_input(layer, 4), causal=True).output
    o_bias = layer.weights().o_bias
    assert o_bias is not None
    assert_same(output[:, :4], o_bias.expand(BATCH, 4, -1), kind="output")
    assert (output[:, 4:] - o_bias).abs().amax(-1).min() > 1e-6


# The forms of design/algebra.md, from the numbers as they are stored


def stored(layer: MultiHeadAttention) -> dict[str, np.ndarray]:
    """The stored maps in the orientation of the paper, `x W`: `[heads, d_in, d_out]` or `[d_in, d_out]`."""
    own = layer.projections
    return {name: p.detach().numpy().T for name, p in own.named_parameters() if p.dim() == 2}


def columns(matrix: np.ndarray, head: int, num_heads: int) -> np.ndarray:
    width = matrix.shape[1] // num_heads
    return matrix[:, head * width : (head + 1) * width]


def rows(matrix: np.ndarray, head: int, num_heads: int) -> np.ndarray:
    width = matrix.shape[0] // num_heads
    return matrix[head * width : (head + 1) * width]


def table(name: str, layer: MultiHeadAttention, i: int) -> tuple[np.ndarray, np.ndarray]:
    """W_QK and W_OV of head i, as the table of parameterisations has them."""
    h, maps = layer.num_heads, stored(layer)
    d_k = layer.projections.d_k
    o = rows(maps["o_proj.weight"], i, h) if "o_proj.weight" in maps else np.empty(0)

    def of(map_name: str, heads: int = h) -> np.ndarray:
        return columns(maps[f"{map_name}.weight"], i * heads // h, heads)

    match name:
        case "factored":
            return of("q_proj") @ of("k_proj").T, of("v_proj") @ o
        case "bilinear":
            return of("q_proj"), of("v_proj") @ o
        case "stacked":
            q, k = maps["q_first.weight"] @ of("q_proj"), maps["k_first.weight"] @ of("k_proj")
            return q @ k.T, maps["v_first.weight"] @ of("v_proj") @ o
        case "symmetric":
            return of("qk_proj") @ of("qk_proj").T, of("v_proj") @ o
        case "shared":
            return of("qkv_proj") @ of("qkv_proj").T, of("qkv_proj") @ o
        case "key_value":
            return of("q_proj") @ of("kv_proj").T, of("kv_proj") @ o
        case "four_matrix":
            fourth = layer.get_parameter("projections.m_weight")[i].detach().numpy()
            return of("q_proj") @ of("k_proj").T, of("v_proj") @ fourth.T @ o / math.sqrt(d_k)
        case "direct":
            selected = columns(np.eye(layer.d_model), i, h)
            return selected @ selected.T, selected @ o
        case "identity_query":
            return columns(np.eye(layer.d_model), i, h) @ of("k_proj").T, of("v_proj") @ o
        case "identity_value":
            return of("q_proj") @ of("k_proj").T, columns(np.eye(layer.d_model), i, h) @ o
        case "identity_output":
            placed = columns(np.eye(layer.d_model), i, h).T
            return of("q_proj") @ of("k_proj").T, of("v_proj") @ placed
        case "identity_ov":
            selected = columns(np.eye(layer.d_model), i, h)
            return of("q_proj") @ of("k_proj").T, selected @ selected.T
        case "grouped":
            return of("q_proj") @ of("k_proj", 2).T, of("v_proj", 2) @ o
        case "latent":
            down = maps["kv_down.weight"]
            return of("q_proj") @ (down @ of("k_up")).T, down @ of("v_up") @ o
        case "collaborative":
            m_i = layer.get_parameter("projections.mixing")[i].detach().numpy()
            return maps["q_proj.weight"] @ np.diag(m_i) @ maps["k_proj.weight"].T, of("v_proj") @ o
        case _:
            raise KeyError(name)


@pytest.mark.parametrize(
    "name",
    [
        "factored", "bilinear", "stacked", "symmetric", "shared", "key_value", "four_matrix", "direct",
        "grouped", "latent", "collaborative", "identity_query", "identity_value", "identity_output",
        "identity_ov",
    ],
)  # fmt: skip
def test_the_forms_are_those_of_the_table(name: str) -> None:
    layer = make_layer(name, "wider values" if has_free_widths(name) else "shared out")
    for i, head in enumerate(layer.heads):
        qk, ov = table(name, layer, i)
        assert_same(head.qk.dense(), torch.from_numpy(qk), kind="output")
        assert_same(head.ov.dense(), torch.from_numpy(ov), kind="output")


# What it holds


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_belongs_to_one_map_and_every_learned_map_has_its_own(name: str) -> None:
    layer = make_layer(name)
    weights = layer.projections.weights()
    used = [
        tensor.untyped_storage().data_ptr()
        for link in weights.links()
        if link.learned
        for tensor in (link.weight, link.bias)
        if tensor is not None
    ]
    assert weights.o_bias is not None
    used.append(weights.o_bias.untyped_storage().data_ptr())
    stored = [parameter.untyped_storage().data_ptr() for parameter in layer.projections.parameters()]
    assert sorted(used) == sorted(stored)
    assert len(set(stored)) == len(stored)
    assert set(layer.state_dict()) == {parameter for parameter, _ in layer.named_parameters()}


@pytest.mark.parametrize("name", NAMES)
def test_every_bias_is_there_exactly_when_it_is_asked_for(name: str) -> None:
    cls = PARAMETERISATIONS[name]
    options = [field for field in fields_of(name) if field.endswith("_bias")]
    for option in options:
        found = cls(**{option: True}).build(24, 4).weights()
        without = cls().build(24, 4).weights()
        assert found.num_parameters > without.num_parameters
        assert found.num_parameters == sum(p.numel() for p in cls(**{option: True}).build(24, 4).parameters())
    bare = cls().build(24, 4).weights()
    assert all(link.bias is None for link in bare.links())
    assert bare.o_bias is None


# From weights and to weights


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "positions"), positioned())
def test_a_layer_comes_back_from_its_weights(name: str, positions: AttentionPositions | None) -> None:
    for size, (_, _, widths) in SIZES.items():
        if positions is not None and (widths or "num_kv_heads" in widths):
            continue  # odd widths do not turn
        if widths and not has_free_widths(name):
            continue
        for biased in (False, True):
            layer = make_layer(name, size, biased=biased, positions=positions)
            back = MultiHeadAttention.from_weights(layer.weights())
            assert type(back.parameterisation) is type(layer.parameterisation)
            assert back.state_dict().keys() == layer.state_dict().keys()
            x, given = make_inputs(layer, "causal", masked=True)
            assert_same(back(x, **given).output, layer(x, **given).output, kind="exact")
            again = MultiHeadAttention.from_weights(back.weights()).parameterisation
            assert again == back.parameterisation
            assert not {p.data_ptr() for p in back.parameters()} & {p.data_ptr() for p in layer.parameters()}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_layer_comes_back_from_weights_of_another_dtype(name: str, dtype: torch.dtype) -> None:
    # d_k = 6: the root of it, which four_matrix holds as a fixed map, is rounded.
    layer = make_layer(name).to(torch.float32)
    back = MultiHeadAttention.from_weights(layer.weights().to(dtype))
    for parameter, value in back.state_dict().items():
        assert_same(value, layer.state_dict()[parameter].to(dtype), kind="exact")
    if dtype == torch.bfloat16:
        up = MultiHeadAttention.from_weights(back.weights().to(torch.float32))
        assert_same(up.weights().scale * torch.ones(1), torch.tensor([layer.weights().scale]), kind="exact")


def test_pairs_of_heads_without_their_gates_leave_no_gate_behind() -> None:
    weights = make_layer("differential").weights()
    ungated = dataclasses.replace(weights, semantics=dataclasses.replace(weights.semantics, gate=None))
    layer = MultiHeadAttention.from_weights(ungated)
    parameters = {f"projections.{name}" for name, _ in layer.projections.named_parameters()}
    assert set(layer.state_dict()) == parameters
    x = torch.randn(BATCH, LENGTH, layer.d_model, dtype=torch.float64)
    assert_same(layer(x).output, dense(ungated, x)[0], kind="output")


@pytest.mark.parametrize("name", NAMES)
def test_the_weights_are_views_without_history(name: str) -> None:
    layer = make_layer(name)
    x, given = make_inputs(layer, "self", masked=False)
    weights = layer.weights()
    assert not any(tensor.requires_grad for tensor in weights.tensors())
    before = layer(x, **given).output
    with torch.no_grad():
        for link in weights.links():
            if link.learned:
                link.weight.mul_(1.5)  # reaches the layer only if nothing was copied
    assert all(p.grad is None for p in layer.parameters())
    expected, _ = dense(weights, x)
    assert_same(layer(x, **given).output, expected, kind="output")
    assert not torch.allclose(expected, before)


def test_the_caller_says_where_queries_and_keys_come_from() -> None:
    layer = MultiHeadAttention(24, 4, dropout=0.25).eval()
    for kind in ("self", "causal", "cross"):
        assert layer.weights(kind).semantics.kind == kind
    assert layer.weights().semantics.dropout == 0.0
    assert layer.train().weights().semantics.dropout == 0.25
    assert MultiHeadAttention.from_weights(layer.train().weights()).dropout == 0.25
    cross = MultiHeadAttention.from_weights(layer.weights("cross"))
    with pytest.raises(ValueError, match="the weights of a cross-attention: give it a memory"):
        cross(torch.randn(1, 3, 24))


# Decoding


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("name", "positions"), positioned())
def test_decoding_with_a_cache_is_attending_without(name: str, positions: AttentionPositions | None) -> None:
    layer = make_layer(name, positions=positions)
    x = random_input(layer, 8).detach()
    for path in PATHS:
        expected = layer(x, causal=True, path="reference").output
        for lengths in ([1] * 8, [3, 1, 2, 2], [8]):
            cache = LayerCache()
            given = {"causal": True, "cache": cache, "path": path}
            parts = [layer(part, **given).output for part in x.split(lengths, dim=1)]
            assert cache.length == 8
            assert_same(torch.cat(parts, dim=1), expected, kind="output")


@pytest.mark.parametrize(("name", "positions"), positioned())
def test_hypotheses_that_change_places_keep_their_past(
    name: str, positions: AttentionPositions | None
) -> None:
    layer = make_layer(name, positions=positions)
    x, cache = random_input(layer, 6), LayerCache()
    for part in x[:, :4].split(1, dim=1):
        layer(part, causal=True, cache=cache)
    kept = torch.tensor([2, 0, 2, 1])
    cache.select(kept)
    after = torch.cat([x[kept, :4], random_input(layer, 2, batch=4)], dim=1)
    parts = [layer(part, causal=True, cache=cache).output for part in after[:, 4:].split(1, dim=1)]
    assert_same(torch.cat(parts, dim=1), layer(after, causal=True).output[:, 4:], kind="output")


@pytest.mark.parametrize("name", NAMES)
def test_a_memory_is_read_once_and_then_remembered(name: str) -> None:
    layer = make_layer(name)
    x, memory, cache = random_input(layer, 4), random_input(layer, MEMORY_LENGTH), LayerCache()
    mask = (torch.arange(MEMORY_LENGTH) < torch.tensor([7, 4, 0])[:, None])[:, None, None]
    expected = layer(x, memory=memory, mask=mask, path="reference").output
    for i in range(4):
        given = memory if i == 0 else torch.full_like(memory, torch.nan)
        step = layer(x[:, i : i + 1], memory=given, mask=mask, cache=cache)
        assert cache.length == MEMORY_LENGTH
        assert_same(step.output, expected[:, i : i + 1], kind="output")


def make_latent(*, biased: bool) -> MultiHeadAttention:
    layer = MultiHeadAttention(32, 4, written("latent", biased=biased)).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer


@pytest.mark.parametrize("biased", [False, True])
def test_latent_decodes_without_rebuilding_keys(biased: bool) -> None:
    layer = make_latent(biased=biased)
    assert layer.explain(1, 64)[0] == "absorbed"
    assert layer.explain(64, 64)[0] == "expanded"
    assert layer.explain(1, 64, path="reference")[0] == "expanded"
    blind = torch.zeros(1, 1, 1, 64, dtype=torch.bool)
    # With a mask a row may see nothing, and the value bias would not be weighted with it.
    assert layer.explain(1, 64, mask=blind)[0] == ("expanded" if biased else "absorbed")

    x, cache = random_input(layer, 12).detach(), LayerCache()
    masks = {"none": None, "some": torch.arange(12) != torch.tensor([[3], [1], [0]])}
    for mask in masks.values():
        cache = LayerCache()
        for i in range(12):
            here = None if mask is None else mask[:, None, None, : i + 1]
            given = {"causal": True, "mask": here}
            step = layer(x[:, i : i + 1], **given, cache=cache).output
            whole = layer(x[:, : i + 1], **given, path="reference").output
            assert_same(step, whole[:, -1:], kind="output")
        assert [tuple(entry.shape) for entry in cache.entries] == [(BATCH, 1, 12, 10)]


def test_dropped_weights_take_the_value_bias_of_latent_with_them() -> None:
    # Absorbed, the value bias would be added whole whatever is dropped.
    layer = MultiHeadAttention(32, 4, Latent(v_bias=True, d_latent=10), dropout=0.5).double()
    nn.init.normal_(layer.get_parameter("projections.v_up.bias"))
    x, memory = random_input(layer, 1), random_input(layer, 64)
    torch.manual_seed(1)
    dropped = layer(x, memory=memory).output
    torch.manual_seed(1)
    assert_same(dropped, layer(x, memory=memory, path="reference").output, kind="output")
    assert layer.explain(1, 64)[0] == "expanded"
    assert layer.eval().explain(1, 64)[0] == "absorbed"


# What it begins with


@pytest.mark.parametrize(("d", "h", "widths"), [(64, 4, {}), (64, 4, {"d_k": 32, "d_v": 24})], ids=str)
def test_scores_and_values_begin_with_the_same_spread(d: int, h: int, widths: dict[str, int]) -> None:
    """For independent normal queries' and keys' inputs, as wide as `factored`'s within 8 %."""
    torch.manual_seed(0)
    draws, length = 16, 40
    spreads: dict[str, tuple[float, float]] = {}
    for name in NAMES:
        if widths and not has_free_widths(name):
            continue
        sizes = {k: v for k, v in widths.items() if k in fields_of(name)}
        if "d_v" not in fields_of(name):  # values as wide as keys: the spread of W_OV is compared there
            sizes = {k: v for k, v in sizes.items() if k == "d_k"}
        scores, values = [], []
        for _ in range(draws):
            layer = MultiHeadAttention(d, h, PARAMETERISATIONS[name](**sizes))
            own, x, y = layer.projections, torch.randn(1, length, d), torch.randn(1, length, d)
            with torch.no_grad():
                k, _ = own.keys_values(own.project_kv(y, y))
                scores.append((own.queries(x) @ k.mT * layer.weights().scale).flatten())
                # A single key has all the weight: what comes out is W_OV of it, summed over heads.
                one_key = layer(x.view(length, 1, d), memory=y.view(length, 1, d))
                values.append(one_key.output.flatten())
        spreads[name] = (float(torch.cat(scores).std()), float(torch.cat(values).std()))
    expected_score = spreads["factored"][0]
    for name, (score, _) in spreads.items():
        if name == "direct":  # no maps that could make its scores smaller
            assert score == pytest.approx(1, rel=0.08)
            continue
        assert score == pytest.approx(expected_score, rel=0.08), (name, spreads)
    for name, (_, value) in spreads.items():
        if name == "identity_ov":  # no map that could make its values smaller
            assert value == pytest.approx(1, rel=0.08)
            continue
        # The width of values decides their spread; where it is tied to d_k, compare with that.
        d_v = widths.get("d_v" if "d_v" in fields_of(name) else "d_k", d // h)
        # Of a pair, half of what the second moves is taken off the first, and one key has both heads' weight.
        maps, left = (h // 2, 0.5) if name == "differential" else (h, 1.0)
        variance = 2 / (d + h * d_v) * 2 / (d + maps * d_v) / 2 * d * maps * d_v
        assert value == pytest.approx(left * math.sqrt(variance), rel=0.08), (name, spreads)


@pytest.mark.parametrize("name", NAMES)
def test_biases_begin_at_zero_and_heads_begin_different(name: str) -> None:
    layer = MultiHeadAttention(24, 4, written(name, biased=True))
    weights = layer.weights()
    assert all(link.bias is None or not link.bias.any() for link in weights.links())
    assert weights.o_bias is not None
    assert not weights.o_bias.any()
    forms = weights.qk.dense()
    assert all(not torch.equal(forms[i], forms[j]) for i in range(4) for j in range(i))


# How it goes about it


@pytest.mark.parametrize("path", ["auto", "reference"])
@pytest.mark.parametrize("name", NAMES)
def test_the_explanation_is_that_of_the_operation_it_calls(
    name: str, path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triptych.core.attention import layer as layer_module

    seen: list[tuple[Any, ...]] = []
    call = layer_module.compute_attention

    def spy(*handed: Any) -> Any:
        seen.append(handed)
        return call(*handed)

    monkeypatch.setattr(layer_module, "compute_attention", spy)
    layer = make_layer(name, biased=False)
    for query_len, key_len, options in [
        (6, 6, {}),
        (6, 6, {"need_weights": True}),
        (1, 9, {"causal": True}),
        (1, 9, {"causal": True, "mask": torch.ones(BATCH, 1, 1, 9, dtype=torch.bool)}),
        (140, 140, {"causal": True}),
    ]:
        for records in (False, True):
            with torch.set_grad_enabled(records):
                x, cache = random_input(layer, key_len), LayerCache()
                if key_len > query_len:
                    layer(x[:, : key_len - query_len], causal=True, cache=cache)
                seen.clear()
                layer(x[:, key_len - query_len :], cache=cache, path=path, **options)
                ((given, need_weights, way),) = seen
                q, k, v, *_ = given
                others = {key: getattr(given, key) for key in ("mask", "bias", "causal", "dropout")}
                others |= {key: getattr(given.semantics, key) for key in ("scale", "soft_cap", "sinks")}
                route, explanation = layer.explain(query_len, key_len, batch=BATCH, path=path, **options)
                expected = explain_attention(q, k, v, **others, need_weights=need_weights, path=way)
                assert explanation == expected
                assert explanation.reason.endswith(".")
                if path == "reference":
                    assert (route, explanation.path) == ("expanded", "written out")


def test_more_queries_than_keys_can_be_explained() -> None:
    _, explanation = MultiHeadAttention(16, 4).explain(8, 3)
    assert "query_len 8, key_len 3" in explanation.reason


@torch.no_grad()
def decoding_step(layer: MultiHeadAttention, key_len: int, batch: int, path: Any) -> Made:
    """What is made in a step that appends to a cache with room for it."""
    cache = LayerCache()
    layer(torch.randn(batch, key_len - 2, layer.d_model), causal=True, cache=cache)
    layer(torch.randn(batch, 1, layer.d_model), causal=True, cache=cache)
    token = torch.randn(batch, 1, layer.d_model)
    with Made() as made:
        layer(token, causal=True, cache=cache, path=path)
    return made


@pytest.mark.parametrize("name", NAMES)
def test_a_decoding_step_copies_neither_cache_nor_maps(name: str) -> None:
    d, h, key_len, batch = 64, 8, 96, 5
    layer = MultiHeadAttention(d, h, PARAMETERISATIONS[name]())
    token = torch.randn(batch, 1, d)
    q = layer.projections.queries(token)
    k, v = layer.projections.keys_values(layer.projections.project_kv(token, token))
    for path in ("auto", "fast") if q.shape[-1] == v.shape[-1] and k.shape[1] == v.shape[1] else ("auto",):
        made = decoding_step(layer, key_len, batch, path)
        # Scores, and queries: the keys of all tokens would be eight times, or (bilinear) 12 times as many.
        allowed = batch * h * max(key_len, q.shape[-1])
        assert made.largest <= allowed, sorted(made.shapes, key=math.prod)[-3:]


def test_what_is_made_is_seen() -> None:
    # The control of the test above: latent on its expanded route does rebuild the keys.
    layer = MultiHeadAttention(64, 8, Latent(d_latent=16))
    assert decoding_step(layer, 96, 2, "reference").largest >= 2 * 8 * 96 * 8
    assert decoding_step(layer, 96, 2, "auto").largest <= 2 * 8 * 96


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_few_queries_of_a_long_memory_repeat_no_head_of_it(name: str) -> None:
    d, h, key_len = 64, 8, 96
    layer = MultiHeadAttention(d, h, PARAMETERISATIONS[name]())
    x, memory, cache = torch.randn(1, 3, d), torch.randn(1, key_len, d), LayerCache()
    layer(x, memory=memory, cache=cache)
    with Made() as made:
        layer(x, memory=memory, cache=cache)
    assert made.largest <= 3 * h * max(key_len, d)
    assert all(math.prod(shape) <= 3 * h * key_len for shape in made.shapes if key_len in shape)  # scores


@pytest.mark.parametrize("name", NAMES)
def test_maps_are_not_copied_for_every_sentence(name: str) -> None:
    d, h, batch = 64, 4, 50
    layer = MultiHeadAttention(d, h, PARAMETERISATIONS[name]())
    x = torch.randn(batch, 1, d)
    with torch.no_grad(), Made() as made:
        layer(x, memory=torch.randn(batch, 4, d))
    assert made.largest < batch * h * 16 * 16


# What is refused


@pytest.mark.parametrize("name", [name for name, cls in PARAMETERISATIONS.items() if cls.no_rotary])
def test_rotary_positions_are_refused_with_the_reason(name: str) -> None:
    reason = PARAMETERISATIONS[name].no_rotary
    with pytest.raises(ValueError, match=f"{name} cannot have rotary positions: ") as refused:
        make_layer(name, positions=RotaryPositions())
    assert str(refused.value).endswith(reason)
    with pytest.raises(ValueError, match="cannot have rotary positions"):
        MultiHeadAttention.from_weights(with_semantics(make_layer(name).weights(), positions="rotary"))


def test_bilinear_and_latent_have_no_rotary_positions() -> None:
    refused = {name for name, cls in PARAMETERISATIONS.items() if cls.no_rotary}
    assert refused >= {"bilinear", "latent"}
    assert not refused & {"factored", "stacked", "symmetric", "shared", "key_value", "direct", "grouped"}


@pytest.mark.parametrize("name", NAMES)
def test_two_memories_are_refused_where_keys_and_values_are_made_at_once(name: str) -> None:
    layer = make_layer(name)
    x, memory = random_input(layer, 3), random_input(layer, 4)
    reason = layer.projections.no_two_memories
    assert bool(reason) == (name in ("shared", "key_value", "direct", "latent")) or name not in NAMES[:11]
    if reason:
        with pytest.raises(ValueError, match=f"value_memory was given, but {reason}: leave it out"):
            layer(x, memory=memory, value_memory=memory)
    else:
        found = layer(x, memory=memory, value_memory=memory).output
        assert_same(found, layer(x, memory=memory).output, kind="output")


@pytest.mark.parametrize("positions", [RotaryPositions(), AlibiPositions()], ids=["rotary", "alibi"])
def test_a_memory_is_refused_where_positions_are_told_apart(positions: AttentionPositions) -> None:
    layer = make_layer("factored", positions=positions)
    with pytest.raises(ValueError, match=f"{SCHEMES[type(positions)]} positions compare places"):
        layer(random_input(layer, 3), memory=random_input(layer, 4))


@pytest.mark.parametrize(
    ("chosen", "positions", "message"),
    [
        (Factored(d_k=5), RotaryPositions(), "rotary_dim is 5: it must be even and at least 2"),
        (Factored(), RotaryPositions(3), "rotary_dim is 3: it must be even and at least 2"),
        (Factored(), RotaryPositions(8), "rotary_dim is 8, but queries and keys are 6 wide: it must fit"),
        (Grouped(num_kv_heads=3), None, "num_kv_heads 3 does not divide num_heads 4"),
        (Grouped(num_kv_heads=8), None, "num_kv_heads 8 does not divide num_heads 4"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(
    chosen: Parameterisation, positions: AttentionPositions | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        MultiHeadAttention(24, 4, chosen, positions=positions)
    with pytest.raises(ValueError, match=message):
        check_sizes(24, 4, chosen, positions)


@pytest.mark.parametrize("name", NAMES)
def test_a_width_that_is_not_divisible_must_be_chosen(name: str) -> None:
    said = r"num_heads 4 does not divide d_model 22: (give|direct gives|identity_.* gives)"
    with pytest.raises(ValueError, match=said):
        MultiHeadAttention(22, 4, written(name, biased=False))


@pytest.mark.parametrize(
    ("name", "size"),
    [
        (name, field.name)
        for name, cls in PARAMETERISATIONS.items()
        for field in dataclasses.fields(cls)
        if field.type in (int, int | None)
    ],
)
@pytest.mark.parametrize("value", [0, -2])
def test_a_size_below_one_is_refused_by_name(name: str, size: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{size} is {value}: it must be at least 1"):
        MultiHeadAttention(24, 4, parameterisation(name, **{size: value}))


@pytest.mark.parametrize("name", NAMES)
def test_no_head_at_all_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="num_heads is 0: at least one head is needed"):
        MultiHeadAttention(24, 0, written(name, biased=False, d_k=4, d_v=4))


@pytest.mark.parametrize("name", NAMES)
def test_a_parameterisation_is_found_by_its_name(name: str) -> None:
    assert parameterisation(name) == PARAMETERISATIONS[name]()
    assert PARAMETERISATIONS[name].name == name
    with pytest.raises(ValueError, match=f"{name} has no d_q: its options are {', '.join(fields_of(name))}"):
        parameterisation(name, d_q=3)


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ValueError, match=r"'latnet' is not one of factored, .*: did you mean 'latent'\?"):
        parameterisation("latnet")
    with pytest.raises(ValueError, match=r"'zzz' is not one of factored, .*: choose one of them"):
        parameterisation("zzz")


def test_the_fourth_matrix_as_data_is_refused_with_the_reason() -> None:
    with pytest.raises(ValueError, match=r"'four_way' is no layer: .*as wide as the sequence is long"):
        parameterisation("four_way")


def test_maps_of_two_dtypes_are_refused() -> None:
    weights = MultiHeadAttention(16, 4).weights()
    with pytest.raises(ValueError, match="the maps are float32 on cpu and float64 on cpu: bring them to one"):
        dataclasses.replace(weights, v=tuple(dataclasses.replace(link, weight=link.weight.double())
                                             for link in weights.v))  # fmt: skip


def test_weights_that_nobody_writes_are_refused_with_each_difference() -> None:
    stacked, factored = make_layer("stacked").weights(), make_layer("factored").weights()
    three = dataclasses.replace(stacked, q=(stacked.q[0], stacked.q[0], stacked.q[1]))
    with pytest.raises(ValueError, match="no parameterisation writes these weights"):
        MultiHeadAttention.from_weights(three, named=True)
    tied = dataclasses.replace(stacked, k=(stacked.q[0], stacked.k[1]))
    with pytest.raises(ValueError, match="stacked: maps are shared there only"):
        MultiHeadAttention.from_weights(tied, named=True)
    gapped = dataclasses.replace(factored, v=(Link(factored.v[0].weight, learned=False),))
    with pytest.raises(ValueError, match="factored: a map of v is learned here only"):
        MultiHeadAttention.from_weights(gapped, named=True)
    x = random_input(make_layer("stacked"), 4)
    for weights in (three, tied, gapped):  # no recipe can ask for them, but a layer holds them
        layer = MultiHeadAttention.from_weights(weights)
        assert layer.parameterisation.name == "as_written"
        assert writing_cost(layer.weights()) == writing_cost(weights)
        assert_same(layer(x).output, run_layer(weights, x), kind="output")
    without = dataclasses.replace(factored, o=(*factored.o, Link(torch.ones(1, 24, dtype=torch.float64))))
    with pytest.raises(ValueError, match="as_written: the heads' outputs need a map of their own at the end"):
        MultiHeadAttention.from_weights(without)


def test_a_fixed_map_with_other_numbers_is_refused() -> None:
    weights = MultiHeadAttention(16, 4, FourMatrix()).weights()
    first, factor, last = weights.o
    other = dataclasses.replace(weights, o=(first, Link(factor.weight * 1.01, learned=False), last))
    with pytest.raises(ValueError, match="four_matrix cannot hold these weights: a fixed map differs"):
        MultiHeadAttention.from_weights(other)
    direct = MultiHeadAttention(16, 4, Direct()).weights()
    swapped = Link(direct.q[0].weight.flip(0), learned=False)
    with pytest.raises(ValueError, match="a fixed map differs"):
        MultiHeadAttention.from_weights(dataclasses.replace(direct, q=(s := (swapped,)), k=s, v=s))


def test_a_scale_that_tied_maps_cannot_take_up_stays_or_is_refused() -> None:
    shared = make_layer("shared")
    tied = with_semantics(shared.weights(), scale=1.0)
    with pytest.raises(ValueError, match=r"scores are multiplied by 1, not 0\.408248"):
        MultiHeadAttention.from_weights(tied, named=True)
    x = random_input(shared, 3)
    stored = MultiHeadAttention.from_weights(tied)
    assert stored.weights().scale == 1.0
    assert_same(stored(x).output, dense(tied, x)[0], kind="output")
    factored = make_layer("factored")
    unscaled = with_semantics(factored.weights(), scale=1.0)
    x = random_input(factored, 3)
    layer = MultiHeadAttention.from_weights(unscaled)
    assert_same(layer(x).output, dense(unscaled, x)[0], kind="output")


def test_heads_that_share_maps_unevenly_get_copies_of_their_own() -> None:
    # Keys of two heads, values of four: no writing of ours has that, factored can hold it.
    weights = make_layer("factored").weights()
    halved = dataclasses.replace(weights.k[0], weight=weights.k[0].weight[::2], bias=weights.k[0].bias[::2])
    layer = MultiHeadAttention.from_weights(given := dataclasses.replace(weights, k=(halved,)))
    assert layer.parameterisation.name == "factored"
    x = random_input(layer, 4)
    assert_same(layer(x).output, dense(given, x)[0], kind="output")


@pytest.mark.parametrize("copies", [(2, 4), (4, 2)])
def test_maps_in_a_row_may_be_shared_by_different_numbers_of_heads(copies: tuple[int, int]) -> None:
    first, second = (
        Link(torch.randn(n, d_in, d_out, dtype=torch.float64), torch.randn(n, d_out, dtype=torch.float64))
        for n, d_in, d_out in zip(copies, (24, 5), (5, 6), strict=True)
    )
    given = dataclasses.replace(make_layer("grouped").weights(), k=(first, second))
    layer = MultiHeadAttention.from_weights(given)
    assert layer.parameterisation.name == "as_written"
    x = random_input(layer, 4)
    for found in (layer(x).output, run_layer(given, x)):
        assert_same(found, dense(given, x)[0], kind="output")


def test_as_many_groups_as_heads_is_the_papers_own() -> None:
    layer = MultiHeadAttention(24, 4, Grouped(num_kv_heads=4))
    assert MultiHeadAttention.from_weights(layer.weights()).parameterisation == Factored(d_k=6, d_v=6)
