"""A layer made of what was read of a checkpoint computes what `transformers` does, or is refused by name."""

import re
from pathlib import Path

import pytest
import torch

from checkpoints.test_families import TOLERANCE, in_batch, made, overheard
from checkpoints.tiny_models import TINY
from triptych.attention import MultiHeadAttention
from triptych.checkpoints.checkpoint import open_checkpoint
from triptych.checkpoints.layer import AttentionLayer

# What a layer of ours has not yet, and the families with some such layer.
MISSING: dict[str, tuple[str, ...]] = {}
# The others take longer than they tell.
IN_EVERY_RUN = ("bert", "bloom", "gpt2", "gpt_neo", "llama", "marian", "mistral", "qwen3", "t5")
NAMES = [
    pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow, id=name)
    for name in sorted(TINY)
]
REFUSED = re.compile(
    r"the weights are of a layer with (.+), which MultiHeadAttention does "
    r"not support|no parameterisation|cannot hold"
)


def made_of(layer: AttentionLayer) -> MultiHeadAttention | str:
    """The layer, or what stands in its way."""
    weights = layer.weights.without_norms().mapped(lambda tensor: tensor.double())
    try:
        return MultiHeadAttention.from_weights(weights).eval()
    except ValueError as error:
        found = REFUSED.search(str(error))
        return (found[1] or found[0]) if found else f"other than its own words: {error}"


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_made_of_what_was_read_is_the_models_own_or_refused(name: str, tmp_path: Path) -> None:
    model = made(name, tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    heard = overheard(model, checkpoint)
    refused: set[str] = set()
    for site in checkpoint.sites:
        ours = made_of(checkpoint.read(site))
        if isinstance(ours, str):
            refused.add(ours)
            continue
        if (site.module, "out") not in heard:
            continue
        memory = in_batch(heard[site.module, "memory"]) if site.kind == "cross" else None
        expected = in_batch(heard[site.module, "out"])
        x = in_batch(heard[site.module, "x"])
        x = x if len(x) == len(expected) else x.transpose(0, 1)
        with torch.no_grad():
            found = ours(x.double(), memory=memory).output
        apart = float((found - expected).abs().max() / expected.abs().max())
        assert apart < TOLERANCE, f"{site.module}: {apart:.2e}"
    assert refused == {what for what, families in MISSING.items() if name in families}
