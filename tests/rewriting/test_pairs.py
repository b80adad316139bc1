"""Named kinds of change over families: recognised, named, and never with a false name."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from checkpoints.tiny_models import TINY
from rewriting.pairs_of_models import (
    each,
    in_layers,
    noise,
    of_rank,
    on_levels,
    save_model,
    tensors_of,
    without_small,
    write,
)
from triptych import diff, load

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
FAMILIES = (
    *("gpt2", "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "phi", "gpt_neox", "opt", "olmo2"),
    *("starcoder2", "granite", "bloom", "gptj"),
)
# Norms, which some kinds leave alone.
VECTORS = ("norm", "bias", "ln_")


def maps_of(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the matrices of layers."""
    return [
        name
        for name, tensor in tensors.items()
        if tensor.ndim == 2 and (".0." in name or ".1." in name) and not any(word in name for word in VECTORS)
    ]


def kinds(own: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor], dict[str, Any]]]:
    """Yield changes that every family has, by their kinds."""
    maps = maps_of(own)
    yield "rounded", each(own, lambda _, tensor: tensor.bfloat16()), {"dtype": "bfloat16"}
    yield "rounded", each(own, lambda _, tensor: tensor.half(), *maps), {}
    yield "rounded", each(own, lambda _, tensor: tensor.to(torch.float8_e4m3fn).float(), *maps), {}
    yield "quantised", each(own, on_levels(4, None), *maps), {}
    yield "merged LoRA", each(own, of_rank(2), *maps), {}
    yield "pruned", each(own, without_small(0.4), *maps), {}
    yield "fine-tuned", each(own, noise(0.03)), {}
    yield "scaled", each(own, lambda _, tensor: 3 * tensor, maps[0]), {}
    yield "", each(own, lambda _, tensor: torch.randn_like(tensor), *maps), {}
    start = maps[0].partition(".0.")[0].partition(".1.")[0]
    yield "layers reordered", in_layers(own, [1, 0], f"{start}."), {}


def result(source: Path, kind: str, tensors: dict[str, Tensor], settings: dict[str, Any], place: Path) -> str:
    found = diff(source, write(source, place, tensors, **settings))
    assert found.verdict in ("near", "different"), (source.name, kind, found)
    named = {change.kind for change in found.changes}
    if named - {kind}:
        return "false"
    return "named" if named == ({kind} if kind else set()) else "missed"


def test_kinds_are_named_over_families_and_no_name_is_false(tmp_path: Path) -> None:
    counts = Counter[str]()
    wrong = []
    for family in (name for name in FAMILIES if name in TINY):
        torch.manual_seed(5)
        source = save_model(tmp_path / family, TINY[family].configured(tie_word_embeddings=False))
        load(source)
        for number, (kind, tensors, settings) in enumerate(kinds(tensors_of(source))):
            outcome = result(source, kind, tensors, settings, tmp_path / f"{family}-{number}")
            counts[outcome] += 1
            if outcome != "named":
                wrong.append(f"{family}, {kind}: {outcome}")
    print(dict(counts), wrong)
    assert counts["false"] == 0, wrong
    assert counts["named"] >= 0.9 * counts.total(), wrong
    assert counts.total() >= 100
