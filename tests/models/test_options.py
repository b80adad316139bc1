"""Options that checkpoints of others need: another activation, order of channels and output."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from tiny_recipe import generated
from tolerances import assert_same
from triptych.core.attention import SinusoidalPositions
from triptych.core.models import DecoderConfig, EncoderConfig, EncoderDecoder, ModelConfig, PositionsConfig
from triptych.core.models.feed_forward import FeedForward
from triptych.errors import UsageError
from triptych.training import resolve

DATA = generated()
SRC, TGT = torch.tensor([[4, 5, 2]]), torch.tensor([[1, 7, 3]])


def make(**options: Any) -> ModelConfig:
    stacks = {"encoder": EncoderConfig(num_layers=1), "decoder": DecoderConfig(num_layers=1)}
    return ModelConfig(d_model=8, d_ff=12, num_heads=2, **stacks, **options)


def activated(name: str, x: Tensor) -> Tensor:
    normal = torch.distributions.Normal(torch.zeros((), dtype=x.dtype), torch.ones((), dtype=x.dtype))
    return {"relu": x.clamp(min=0), "gelu": x * normal.cdf(x), "swish": x / (1 + (-x).exp())}[name]


@pytest.mark.parametrize("name", ["relu", "gelu", "swish"])
def test_the_feed_forward_layer_has_the_activation_that_was_chosen(name: str) -> None:
    layer = FeedForward(make(activation=name).block(cross=False).feed_forward, 8).double().eval()
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    inner = x @ layer.inner.weight.T + layer.inner.bias
    expected = activated(name, inner) @ layer.outer.weight.T + layer.outer.bias
    assert_same(layer(x), expected, kind="output")
    assert_same(copy.deepcopy(layer)(x), layer(x), kind="exact")


@pytest.mark.parametrize("option", [{"activation": "tanh"}, {"output_bias": "maybe"}])
def test_what_there_is_not_is_refused(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=f"model.{next(iter(option))}"):
        resolve({"data": DATA, "model": option})


def test_the_layout_of_the_positions_reaches_both_sides() -> None:
    config = make(positions=PositionsConfig(sinusoidal_layout="halves"))
    model = EncoderDecoder.of(config, 11, 11)
    for positions in (model.encoder.embeddings.positions, model.decoder.embeddings.positions):
        assert isinstance(positions, SinusoidalPositions)
        assert positions.layout == "halves"


@pytest.mark.parametrize("tie", ["all", "target", "none"])
def test_the_output_bias_is_added_to_the_logits_and_begins_as_zeros(tie: str) -> None:
    model = EncoderDecoder.of(make(tie_embeddings=tie, output_bias=True), 11, 11).eval()
    before = model(SRC, TGT)
    assert_same(model.head.output.bias.detach(), torch.zeros(11), kind="exact")
    bias = torch.randn(11)
    with torch.no_grad():
        model.head.output.bias.copy_(bias)
    assert_same(model(SRC, TGT), before + bias, kind="output")


def test_there_is_no_training_with_an_output_bias() -> None:
    said = r"model\.output_bias is only for imported checkpoints: leave it out"
    with pytest.raises(UsageError, match=said):
        resolve({"data": DATA, "model": {"output_bias": True}})
