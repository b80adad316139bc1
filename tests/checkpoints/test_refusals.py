"""Families whose layers make a rewrite illegal: each refuses it with its reason, and nothing is written."""

from pathlib import Path

import pytest

from checkpoints.test_families import made
from triptych.algebra.rewrites import (
    DropKeyBias,
    Expand,
    FoldNorm,
    FoldValueBias,
    GaugeFix,
    MergeKVHeads,
    Rewrite,
    RewriteRefusedError,
    SortHeads,
    ToLatent,
    Truncate,
)
from triptych.rewriting.checkpoint import rewrite_checkpoint
from triptych.rewriting.recipe import RewriteRecipe

REFUSED: dict[str, tuple[str, Rewrite, str]] = {
    "post-norm": ("bert", FoldNorm(), "post-norm: the residual carries its gain"),
    "sandwich": ("gemma2", FoldNorm(), "norms stand on both sides"),
    "parallel blocks": (
        "falcon, one key head",
        FoldNorm(),
        "feed-forward, which cannot take it up: there is no bias",
    ),
    "rotary, key bias": ("qwen2", DropKeyBias(), "under rotary positions the key bias is turned"),
    "rotary, basis": ("llama", GaugeFix(forms=("qk",)), "commutes with the"),
    "rotary, latent": ("llama", ToLatent(), "under rotary positions"),
    "no slot for the output's bias": ("qwen2", FoldValueBias(), "no bias slot in the target format"),
    "sinks": ("gpt_oss", FoldValueBias(), "a sink"),
    "QK-norm, rank": ("qwen3", Truncate(rank=4, forms=("qk",)), "QK-norm"),
    "QK-norm, merging": ("qwen3", MergeKVHeads(num_kv_heads=1), "QK-norm"),
    "distance tables, order": ("t5", SortHeads(), "relative positions add a bias of each head's own"),
    "ALiBi, order": ("bloom", SortHeads(), "alibi positions add a bias of each head's own"),
    "disentangled, key bias": ("deberta-v2", DropKeyBias(), "distances meet the keys"),
    "latent": ("deepseek_v2", Expand(), "a norm stands after map 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_family_does_not_allow_is_refused_with_its_reason(case: str, tmp_path: Path) -> None:
    name, step, reason = REFUSED[case]
    made(name, tmp_path / "source")
    recipe = RewriteRecipe.model_construct(step=(step,), skip_refused=False, calibration=None)
    with pytest.raises(RewriteRefusedError, match=reason):
        rewrite_checkpoint(str(tmp_path / "source"), tmp_path / "out", recipe, compare=False)
    assert not (tmp_path / "out").exists()
