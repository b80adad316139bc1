"""Rotary frequencies, against those that `transformers` computes for a Llama with the same configuration."""

from typing import Any

import pytest
import torch

from triptych.core.checkpoints.stored_positions import frequencies

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

WIDTH, LONGEST = 16, 256.0
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {"short_factor": [1.1] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64},
    "proportional": {"partial_rotary_factor": 0.4, "factor": 2.0},
}
SAID = {
    **KINDS,
    "yarn, betas of 0": {**KINDS["yarn"], "rope_type": "yarn", "beta_fast": 0, "beta_slow": 0},
    "proportional, whole": {"rope_type": "proportional"},
}


@pytest.mark.parametrize("name", SAID)
def test_frequencies_are_those_of_transformers(name: str) -> None:
    scaling = {"rope_type": name, "rope_theta": 5000.0, **SAID[name]}
    config = transformers.LlamaConfig(
        hidden_size=4 * WIDTH,
        num_attention_heads=4,
        max_position_embeddings=int(LONGEST),
        rope_parameters=dict(scaling),
        num_hidden_layers=1,
    )
    turns = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    found = frequencies(scaling, WIDTH, 5000.0, LONGEST, scaling.get("partial_rotary_factor", 1.0))
    torch.testing.assert_close(found.per_position, turns.inv_freq.double(), rtol=1e-6, atol=1e-9)
    assert found.factor == pytest.approx(turns.attention_scaling)


def test_every_kind_of_transformers_is_tried() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    assert {*ROPE_INIT_FUNCTIONS, "default"} == {*KINDS}


@pytest.mark.parametrize(
    ("scaling", "reason"),
    [
        ({"rope_type": "axial"}, "rope_type 'axial' is not supported"),
        ({"type": "ntk_alpha", "alpha": 2.0}, "rope_type 'ntk_alpha' is not supported"),
        ({"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}, "alpha"),
    ],
)
def test_other_kinds_are_refused_by_name(scaling: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        frequencies(scaling, WIDTH, 5000.0, LONGEST)
