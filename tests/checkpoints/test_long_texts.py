"""Long texts next to float64: `transformers` makes the angles of rotary positions in float32 all the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.stored_models import read_language_model

transformers = pytest.importorskip("transformers")


class _ExactRotary(nn.Module):
    """Cosines and sines of position times base^(−2i/d), all of it in float64."""

    def __init__(self, width: int, base: float) -> None:
        super().__init__()
        self.frequencies = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids.double()[..., None] * self.frequencies
        angles = torch.cat([angles, angles], dim=-1)
        return angles.cos(), angles.sin()


@torch.no_grad()
def _differences(folder: Path, d_model: int, layers: int, length: int) -> dict[str, float]:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=d_model,
        intermediate_size=2 * d_model,
        num_hidden_layers=layers,
        num_attention_heads=d_model // 64,
        num_key_value_heads=max(1, d_model // 128),
        max_position_embeddings=4096,
    )
    theirs: Any = transformers.LlamaForCausalLM(config).eval()
    for parameter in theirs.parameters():
        if parameter.ndim == 2:
            parameter.mul_(2.0)  # so that heads differ in where they look
    theirs.save_pretrained(folder)
    ours = read_language_model(open_checkpoint(folder)).eval()
    ids = torch.randint(2048, (1, length))
    logits = {"ours": ours(ids).logits, "transformers": theirs(ids).logits}
    theirs.double()
    logits["transformers in float64"] = theirs(ids).logits
    theirs.model.rotary_emb = _ExactRotary(64, 10_000.0)
    exact = theirs(ids).logits
    found = {name: float((one - exact).abs().max()) for name, one in logits.items()}
    return {**found, "largest": float(exact.abs().max())}


def test_the_logits_of_a_long_text_are_those_of_float64(tmp_path: Path) -> None:
    found = _differences(tmp_path, 64, 1, 1500)
    assert found["ours"] < 2e-6 * found["largest"]


@pytest.mark.slow
def test_how_far_2000_tokens_at_width_1024_are_from_float64(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    found = _differences(tmp_path, 1024, 2, 2000)
    record_property("differences", found)
    print({name: f"{value:.2g}" for name, value in found.items()})
    assert found["ours"] < 1e-5 * found["largest"]
    assert found["ours"] < found["transformers"] / 5, found
