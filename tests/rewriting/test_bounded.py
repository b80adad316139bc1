"""Bounds of bounded rewrites: nothing that a model really gives its layers moves them by more."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.oracle import opened
from checkpoints.runs import some
from checkpoints.test_families import in_batch, made, overheard
from checkpoints.tiny_models import TINY
from triptych.core.algebra.function import channels
from triptych.core.algebra.weights import Norm
from triptych.core.attention.steps import for_heads
from triptych.core.checkpoints.stored_layers import AttentionLayer
from triptych.rewriting.certificate import Certificate, Measured
from triptych.rewriting.functions import Truncate
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

# Ways in which norms stand: post, sandwich with 1 + w, before, at the end of the stack that makes a memory.
SAMPLED = ("bert with cross-attention", "gemma2", "t5", "bart", "wav2vec2", "perceiver")


def with_large_norms(name: str, folder: Path, times: float = 4.0, *, only: bool = False) -> Any:
    """A tiny model whose norms have large gains and shifts; or that gain only."""
    model = made(name, folder)
    gains = {name: p for name, p in model.named_parameters() if p.ndim == 1 and name.endswith("weight")}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if only and name in gains:
                parameter.fill_(times)
            elif only:
                parameter.mul_(0.0 if "norm" in name.lower() else 1.0)
            elif name in gains:
                parameter.mul_(times)
            elif name.endswith("bias") and f"{name.removesuffix('bias')}weight" in gains:
                parameter.add_(torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


def normalised(x: Tensor, norm: Norm) -> Tensor:
    shift = 0.0 if norm.bias is None else norm.bias.double()
    return (x - shift) / (norm.weight.double() + norm.offset)


def scores(layer: AttentionLayer, x: Tensor, memory: Tensor | None) -> Tensor:
    """Before what is added to them, as far as a softmax sees them apart."""
    weights = layer.weights.to(torch.float64)
    q, k, _ = channels(weights, x, memory)
    if layer.weights.semantics.rotary is not None:
        q, k = (layer.weights.semantics.rotary(t) for t in (q, k))
    return q @ for_heads(k, weights.num_heads).mT * weights.scale


def values(layer: AttentionLayer, x: Tensor, memory: Tensor | None) -> Tensor:
    weights = layer.weights.to(torch.float64)
    return for_heads(channels(weights, x, memory).v, weights.num_heads) @ weights.W_O


def largest_moves(
    before: AttentionLayer, after: AttentionLayer, x: Tensor, memory: Tensor | None
) -> tuple[float, float]:
    """Half the spread by which a row of scores moves, and the move of what a head adds."""
    moved = scores(after, x, memory) - scores(before, x, memory)
    spread = (moved.amax(-1) - moved.amin(-1)) / 2
    out = values(after, x, memory) - values(before, x, memory)
    return float(spread.max()), float(out.norm(dim=-1).max())


def bounded_rewrite(source: Path, out: Path) -> Certificate:
    steps = Truncate(rank=2, forms=("qk",)), Truncate(rank=2, forms=("ov",))
    recipe = RewriteRecipe(step=steps, skip_refused=True)
    return rewrite_checkpoint(str(source), out, recipe, compare=False)


def measured(certificate: Certificate, module: str) -> Measured | None:
    return next(layer.measured for layer in certificate.layers if layer.module == module)


@pytest.mark.parametrize("name", some(TINY, SAMPLED))
def test_what_a_model_gives_its_layers_moves_them_within_what_is_certified(name: str, tmp_path: Path) -> None:
    model = with_large_norms(name, tmp_path / "source")
    certificate = bounded_rewrite(tmp_path / "source", tmp_path / "out")
    one, other = opened(tmp_path / "source"), opened(tmp_path / "out")
    heard = overheard(model, one)
    for site in one.sites:
        if (site.module, "x") not in heard:
            continue  # the vision stack of a text: it is shown no picture
        before, after = one.read(site), other.read(site)
        x = in_batch(heard[site.module, "x"])
        memory = in_batch(heard[site.module, "memory"]) if site.kind == "cross" else None
        for norm, read in ((before.inputs.x, x), (before.inputs.memory, memory)):
            if norm is not None and read is not None:
                longest = normalised(read, norm).norm(dim=-1).max()
                assert float(longest) <= math.sqrt(read.shape[-1]) * (1 + 1e-5), site.module
        found = measured(certificate, site.module)
        if found is None:
            continue
        assert (found.score_bound is None or found.output_bound is None) == bool(found.no_bound)
        moves = largest_moves(before, after, x, memory)
        for bound, moved in zip((found.score_bound, found.output_bound), moves, strict=True):
            assert bound is None or moved <= bound * (1 + 1e-6), site.module


@pytest.mark.parametrize("name", ["bert", "gemma2"])
def test_a_gain_behind_the_embedding_or_in_a_sandwich_counts(name: str, tmp_path: Path) -> None:
    """With that gain scores move by more than they could without, and by less than is certified."""
    scores_bounds = []
    for number, stored in enumerate((1.0, 5.0)):
        source, out = tmp_path / f"source{number}", tmp_path / f"out{number}"
        model = with_large_norms(name, source, stored, only=True)
        certificate = bounded_rewrite(source, out)
        found = certificate.layers[1].measured
        assert found is not None
        assert found.score_bound is not None
        scores_bounds.append(found.score_bound)
    one, other = opened(source), opened(out)
    site = one.sites[1]
    x = in_batch(overheard(model, one)[site.module, "x"])
    moved, _ = largest_moves(one.read(site), other.read(site), x, None)
    offset = one.read(site).inputs.x.offset  # type: ignore[union-attr]
    without_gain = scores_bounds[0] / (1.0 + offset) ** 2
    assert without_gain < moved <= scores_bounds[1]


NOT_KNOWN = "the input may be of any length: no norm is known that makes it"
REASONS = {
    "albert": (0, NOT_KNOWN),
    "electra": (0, NOT_KNOWN),  # a map stands between the embedding's norm and the first layer
    "marian": (0, NOT_KNOWN),
    "bert with cross-attention": (2, "the memory may be of any length: no norm is known that makes it"),
    "deberta-v2": (0, "distances meet queries and keys in the same channels"),
}


@pytest.mark.parametrize("name", REASONS)
def test_where_no_norm_is_known_there_is_no_bound_and_the_reason_is_told(name: str, tmp_path: Path) -> None:
    layer, reason = REASONS[name]
    made(name, tmp_path / "source")
    certificate = bounded_rewrite(tmp_path / "source", tmp_path / "out")
    found = certificate.layers[layer].measured
    assert found is not None
    assert found.score_bound is None
    assert reason in found.no_bound
    assert (found.output_bound is None) == (name != "deberta-v2")
