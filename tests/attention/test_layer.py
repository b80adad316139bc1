"""The layer: its shapes, what it drops, what it begins with, its refusals."""

import pytest
import torch

from tolerances import assert_same
from triptych.core.attention import Factored, MultiHeadAttention

D_MODEL, NUM_HEADS = 16, 4


def test_attention_weights_are_dropped_while_training_only() -> None:
    layer = MultiHeadAttention(D_MODEL, NUM_HEADS, dropout=0.5)
    x = torch.randn(2, 6, D_MODEL)
    assert not torch.equal(layer(x).output, layer(x).output)
    layer.eval()
    assert_same(layer(x).output, layer(x).output, kind="exact")


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
