"""Layers of torch as layers of triptych, and back: outputs and weights are the same."""

from typing import Any

import pytest
import torch
from torch import nn

from heads import make_layer
from triptych.core.attention import MultiHeadAttention, RotaryPositions, parameterisation

D, HEADS = 24, 4
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no biases": {"bias": False},
    "batch in the second dimension": {"batch_first": False},
    "dropout": {"dropout": 0.3},
    "keys of another width": {"kdim": 10},
    "values of another width": {"vdim": 7, "bias": False},
    "keys and values of other widths": {"kdim": 10, "vdim": 7},
    "one memory of another width": {"kdim": 10, "vdim": 10},
}


def made(**options: Any) -> nn.MultiheadAttention:
    layer = nn.MultiheadAttention(D, HEADS, **{"batch_first": True, **options}, dtype=torch.float64)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_()
    return layer.eval()


def inputs(layer: nn.MultiheadAttention) -> list[torch.Tensor]:
    widths = (5, D), (6, layer.kdim), (6, layer.vdim)
    return [torch.randn(3, length, width, dtype=torch.float64) for length, width in widths]


def by_torch(layer: nn.MultiheadAttention, given: list[torch.Tensor], mask: Any) -> tuple[Any, Any]:
    given = given if layer.batch_first else [one.transpose(0, 1) for one in given]
    output, weights = layer(*given, attn_mask=~mask, average_attn_weights=False)
    return output if layer.batch_first else output.transpose(0, 1), weights


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_layer_of_torch_and_ours_compute_the_same_both_ways(options: dict[str, Any]) -> None:
    theirs = made(**options)
    ours = MultiHeadAttention.from_torch(theirs)
    x, keys, values = inputs(theirs)
    mask = torch.rand(5, 6) < 0.7
    mask[:, 0] = True
    output, weights, _ = ours(x, memory=keys, value_memory=values, mask=mask, need_weights=True)
    wanted = by_torch(theirs, [x, keys, values], mask)
    torch.testing.assert_close(output, wanted[0])
    torch.testing.assert_close(weights, wanted[1])
    back = ours.to_torch(batch_first=theirs.batch_first)
    found = by_torch(back, [x, keys, values], mask)
    torch.testing.assert_close(found[0], wanted[0])
    torch.testing.assert_close(found[1], wanted[1])
    assert back.state_dict().keys() == theirs.state_dict().keys()
    assert (ours.dropout, back.dropout, back.training) == (theirs.dropout, theirs.dropout, False)


def test_self_attention_and_gradients_are_the_same() -> None:
    theirs = made()
    ours = MultiHeadAttention.from_torch(theirs)
    x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
    gradients = [torch.autograd.grad(of.square().sum(), x)[0] for of in (ours(x).output, theirs(x, x, x)[0])]
    torch.testing.assert_close(*gradients)
    # The parameters are copies.
    with torch.no_grad():
        theirs.out_proj.weight.zero_()
    assert ours.projections.o_proj.weight.any()


@pytest.mark.parametrize("option", ["add_bias_kv", "add_zero_attn"])
def test_keys_of_no_token_are_refused_by_their_option(option: str) -> None:
    with pytest.raises(ValueError, match=f"^{option} adds a key"):
        MultiHeadAttention.from_torch(made(**{option: True}))


def test_a_memory_of_a_wrong_width_is_refused() -> None:
    ours = MultiHeadAttention.from_torch(made(kdim=10, vdim=7))
    x, keys, _ = inputs(made(kdim=10, vdim=7))
    with pytest.raises(ValueError, match="an input is 10 wide, and the layer's value memory width 7"):
        ours(x, memory=keys)
    with pytest.raises(ValueError, match="give it a memory"):
        ours(x)


@pytest.mark.parametrize("name", ["grouped", "stacked", "key_value", "four_matrix", "identity_output"])
def test_other_parameterisations_become_one_map_each(name: str) -> None:
    layer = make_layer(name, biased=name != "four_matrix").eval()
    x = torch.randn(2, 5, layer.d_model, dtype=torch.float64)
    theirs = layer.to_torch()
    torch.testing.assert_close(theirs(x, x, x)[0], layer(x).output)


def test_what_torchs_layer_does_not_have_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="has no rotary"):
        MultiHeadAttention(D, HEADS, positions=RotaryPositions()).to_torch()
    with pytest.raises(ValueError, match=r"has no .*norm"):
        MultiHeadAttention(D, HEADS, qk_norm=True).to_torch()
    narrow = MultiHeadAttention(D, HEADS, parameterisation("factored", d_k=5))
    with pytest.raises(ValueError, match="keys of 5 and values of 6"):
        narrow.to_torch()
