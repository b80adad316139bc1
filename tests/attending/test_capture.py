"""The weights of layers and models as they run, against the weights that the layer itself returns."""

from collections.abc import Callable

import pytest
import torch

from triptych.core.attention import (
    AlibiPositions,
    Factored,
    Grouped,
    KeyValue,
    Latent,
    MultiHeadAttention,
    RotaryPositions,
)

LAYERS: dict[str, Callable[[], MultiHeadAttention]] = {
    "plain": lambda: MultiHeadAttention(24, 4, Factored()),
    "grouped, rotary": lambda: MultiHeadAttention(
        24, 4, Grouped(num_kv_heads=2), positions=RotaryPositions()
    ),
    "latent": lambda: MultiHeadAttention(24, 4, Latent(d_latent=6)),
    "alibi": lambda: MultiHeadAttention(24, 4, positions=AlibiPositions()),
    "keys are values, rotary": lambda: MultiHeadAttention(24, 4, KeyValue(), positions=RotaryPositions()),
    "qk norm": lambda: MultiHeadAttention(24, 4, qk_norm=True, positions=RotaryPositions()),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_weights_of_rows_and_heads_are_those_of_the_layer(name: str, causal: bool) -> None:
    layer, x = LAYERS[name](), torch.randn(2, 9, 24)
    mask = torch.ones(2, 1, 1, 9, dtype=torch.bool)
    mask[1, ..., 6:] = False
    whole = layer(x, mask=mask, causal=causal, need_weights=True).weights
    found = layer.queries_and_keys(x, mask=mask, causal=causal)
    torch.testing.assert_close(found.weights(), whole, rtol=0, atol=1e-6)
    some = found.weights(slice(2, 5), heads=[3, 1])
    torch.testing.assert_close(some, whole[:, [3, 1], 2:5], rtol=0, atol=1e-6)
    one_by_one = torch.cat([block.weights for block in found.blocks(most_bytes=1)], dim=2)
    torch.testing.assert_close(one_by_one, whole, rtol=0, atol=1e-6)
