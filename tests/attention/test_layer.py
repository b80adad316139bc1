"""The layer: against torch's own, its shapes, its biases, its refusals."""

import pytest
import torch
from torch import Tensor, nn

from tolerances import assert_same
from triptych.attention import Factored, MultiHeadAttention, padding_mask

D_MODEL, NUM_HEADS, BATCH, LENGTH, MEMORY_LENGTH = 16, 4, 3, 5, 7
MAPS = ("q", "k", "v", "o")
BIASED = Factored(q_bias=True, k_bias=True, v_bias=True, o_bias=True)


def make_pair(bias: bool) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Our layer and torch's, float64, with the same weights."""
    ours = MultiHeadAttention(D_MODEL, NUM_HEADS, BIASED if bias else Factored()).double()
    torchs = nn.MultiheadAttention(D_MODEL, NUM_HEADS, bias=bias, batch_first=True, dtype=torch.float64)
    for parameter in torchs.parameters():
        nn.init.normal_(parameter, std=0.5)
    with torch.no_grad():
        for name, value in of_torch(dict(torchs.named_parameters())).items():
            ours.get_parameter(f"projections.{name}").copy_(value)
    return ours, torchs


def of_torch(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """torch's tensors under our names; it stacks query, key and value maps into one."""
    ours: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        if f"in_proj_{kind}" in tensors:
            for name, part in zip(MAPS[:3], tensors[f"in_proj_{kind}"].chunk(3), strict=True):
                ours[f"{name}_proj.{kind}"] = part
            ours[f"o_proj.{kind}"] = tensors[f"out_proj.{kind}"]
    return ours


def random_input(length: int) -> Tensor:
    return torch.randn(BATCH, length, D_MODEL, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["self", "causal", "cross", "three sequences"])
def test_the_layer_is_torchs_with_the_same_weights(kind: str, masked: bool, bias: bool) -> None:
    ours, torchs = make_pair(bias)
    x = random_input(LENGTH)
    is_self = kind in ("self", "causal")
    memory = None if is_self else random_input(MEMORY_LENGTH)
    value_memory = random_input(MEMORY_LENGTH) if kind == "three sequences" else None
    keys = x if memory is None else memory
    values = keys if value_memory is None else value_memory
    lengths = torch.tensor([keys.shape[1], keys.shape[1] - 2, 1])
    held = torch.arange(keys.shape[1]) < lengths[:, None]
    triangle = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1) if kind == "causal" else None

    expected, expected_weights = torchs(
        x,
        keys,
        values,
        key_padding_mask=~held if masked else None,
        attn_mask=triangle,
        average_attn_weights=False,
    )
    given = {
        "memory": memory,
        "value_memory": value_memory,
        "mask": held[:, None, None, :] if masked else None,
        "causal": kind == "causal",
    }
    with_weights = ours(x, **given, need_weights=True)
    assert_same(with_weights.output, expected, kind="output")
    assert_same(with_weights.weights, expected_weights, kind="output")
    for path in ("auto", "reference", "fast"):
        result = ours(x, **given, path=path)
        assert result.weights is None
        assert_same(result.output, expected, kind="output")

        upstream = torch.randn_like(expected)
        inputs = [t for t in (x, memory, value_memory) if t is not None]
        names = list(dict(ours.projections.named_parameters()))
        of_ours = torch.autograd.grad(result.output, [*inputs, *ours.parameters()], upstream)
        theirs = torch.autograd.grad(expected, [*inputs, *torchs.parameters()], upstream, retain_graph=True)
        for one, other in zip(of_ours[: len(inputs)], theirs[: len(inputs)], strict=True):
            assert_same(one, other, kind="gradient")
        torch_names = [name for name, _ in torchs.named_parameters()]
        expected_gradients = of_torch(dict(zip(torch_names, theirs[len(inputs) :], strict=True)))
        assert sorted(names) == sorted(expected_gradients)
        for name, gradient in zip(names, of_ours[len(inputs) :], strict=True):
            assert_same(gradient, expected_gradients[name], kind="gradient")


@pytest.mark.parametrize(
    ("d_model", "num_heads", "d_k", "d_v"),
    [(16, 4, 4, 6), (16, 4, 6, 4), (16, 3, 5, 7), (16, 1, 16, 16), (8, 4, 8, 8), (16, 8, 1, 2)],
)
def test_widths_of_keys_and_values_are_free(d_model: int, num_heads: int, d_k: int, d_v: int) -> None:
    layer = MultiHeadAttention(d_model, num_heads, Factored(d_k=d_k, d_v=d_v)).double()
    shapes = {name: tuple(p.shape) for name, p in layer.projections.named_parameters()}
    assert shapes == {
        "q_proj.weight": (num_heads * d_k, d_model),
        "k_proj.weight": (num_heads * d_k, d_model),
        "v_proj.weight": (num_heads * d_v, d_model),
        "o_proj.weight": (d_model, num_heads * d_v),
    }
    x = torch.randn(2, 5, d_model, dtype=torch.float64)
    result = layer(x, need_weights=True)
    maps = layer.state_dict()
    expected = torch.zeros_like(x)
    for head in range(num_heads):  # out = Σ_i softmax(q_i k_iᵀ / √d_k) v_i W_i^O
        keys, values = slice(head * d_k, (head + 1) * d_k), slice(head * d_v, (head + 1) * d_v)
        q = x @ maps["projections.q_proj.weight"][keys].T
        k = x @ maps["projections.k_proj.weight"][keys].T
        v = x @ maps["projections.v_proj.weight"][values].T
        weights = (q @ k.mT / d_k**0.5).softmax(dim=-1)
        assert_same(result.weights[:, head], weights, kind="output")
        expected += weights @ v @ maps["projections.o_proj.weight"][:, values].T
    assert_same(result.output, expected, kind="output")


def test_attention_weights_are_dropped_while_training_only() -> None:
    layer = MultiHeadAttention(D_MODEL, NUM_HEADS, dropout=0.5)
    x = torch.randn(2, 6, D_MODEL)
    assert not torch.equal(layer(x).output, layer(x).output)
    layer.eval()
    assert_same(layer(x).output, layer(x).output, kind="exact")


def test_padding_does_not_reach_the_tokens() -> None:
    layer = MultiHeadAttention(D_MODEL, NUM_HEADS).double()
    ids = torch.tensor([[4, 5, 6, 0, 0]])
    x = torch.randn(1, 5, D_MODEL, dtype=torch.float64)
    changed = x.clone()
    changed[:, 3:] = 100.0
    mask = padding_mask(ids, 0)
    for path in ("reference", "fast"):
        padded = layer(changed, mask=mask, path=path).output[:, :3]
        assert_same(padded, layer(x[:, :3], path=path).output, kind="output")


def test_a_number_of_heads_that_does_not_divide_the_width_is_refused_with_both() -> None:
    with pytest.raises(ValueError, match=r"num_heads 3 does not divide d_model 16: give d_k explicitly"):
        MultiHeadAttention(16, 3)
    with pytest.raises(ValueError, match=r"num_heads 3 does not divide d_model 16: give d_v explicitly"):
        MultiHeadAttention(16, 3, Factored(d_k=4))


@pytest.mark.parametrize("dropout", [-0.5, 1.0])
def test_a_layers_dropout_out_of_range_is_refused_with_its_value(dropout: float) -> None:
    with pytest.raises(ValueError, match=f"dropout is {dropout}"):
        MultiHeadAttention(16, 4, dropout=dropout)(torch.randn(1, 2, 16))


@pytest.mark.parametrize("d_model", [16, 48])
def test_a_fresh_output_map_is_drawn_evenly_as_glorot_and_bengio_have_it(d_model: int) -> None:
    layer = MultiHeadAttention(d_model, 4)
    (o,) = layer.weights("self").o
    limit = (6 / (d_model + d_model)) ** 0.5
    assert 0.95 * limit < float(o.weight.abs().max()) <= limit
    assert float(o.weight.std()) == pytest.approx(limit / 3**0.5, rel=0.1)
