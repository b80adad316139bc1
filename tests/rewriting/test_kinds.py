"""The kinds of change between two models: named with their evidence, and not where they do not fit."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from checkpoints.runs import some
from rewriting.pairs_of_models import (
    each,
    in_tensors,
    in_two_files,
    noise,
    on_levels,
    small_llama,
    tensors_of,
    write,
)
from triptych import Difference, diff

pytest.importorskip("transformers")
NAMES = (
    *("rounded", "quantised", "merged LoRA", "pruned", "fine-tuned", "fine-tuned from a layer on"),
    *("few entries", "scaled", "layers dropped", "layers repeated", "layers reordered"),
    *("embeddings resized", "rotary layout", "key-value heads tiled", "gain without its 1", "transposed"),
    "another configuration",
)

FAST = (
    *("merged LoRA", "quantised", "fine-tuned from a layer on", "layers dropped", "rotary layout"),
    "another configuration",
)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_llama(tmp_path_factory.mktemp("pairs") / "llama")


@pytest.fixture(scope="module")
def found(llama: Path) -> Callable[[str], Difference]:
    """Return a function that compares with the model of a kind of change."""

    @cache
    def compared(kind: str) -> Difference:
        torch.manual_seed(1)
        made = {kind: (tensors, settings) for kind, tensors, settings in in_tensors(llama)}
        tensors, settings = made[kind]
        return diff(llama, write(llama, llama.parent / kind, tensors, **settings))

    return compared


@pytest.mark.parametrize("kind", some(NAMES, FAST))
def test_a_change_has_its_name_and_no_other(kind: str, found: Callable[[str], Difference]) -> None:
    assert [change.kind for change in found(kind).changes] == [kind]
    assert found(kind).verdict in ("near", "different")


@pytest.mark.slow
def test_the_evidence_has_figures_and_places(found: Callable[[str], Difference]) -> None:
    def said(kind: str) -> tuple[str, tuple[str, ...]]:
        (change,) = found(kind).changes
        return change.evidence, change.where

    places = ("blocks.0–2: self_attention.q, self_attention.v",)
    assert said("merged LoRA") == ("ΔW has rank 2 (6 tensors)", places)
    assert "a grid of at most 16 levels by groups of 32" in said("quantised")[0]
    assert said("rounded")[0] == "B is A rounded to bfloat16 (30 tensors)"
    assert said("layers dropped")[0] == "not in B: A's layers 1; B's layers are A's 0, 2"
    places = ("blocks.1: self_attention.q",)
    assert said("few entries") == ("1 entry differs, all others are A's (1 tensor)", places)
    assert said("another configuration")[0] == "rms_norm_eps is 1e-06 in A and 0.001 in B"
    assert said("embeddings resized")[0].startswith("48 → 53 rows, the first 48 equal")
    assert said("fine-tuned from a layer on")[0].startswith("layers before 2 are equal")


def test_a_change_of_low_rank_says_what_it_does_to_the_forms_of_heads(
    found: Callable[[str], Difference],
) -> None:
    (change,) = found("merged LoRA").changes
    assert change.heads.keys() == {f"{layer}.{head}" for layer in range(3) for head in range(4)}
    assert all(qk > 0 and ov > 0 for qk, ov in change.heads.values())


@pytest.mark.slow
def test_a_mean_needs_the_other_model(llama: Path, tmp_path: Path) -> None:
    own = tensors_of(llama)
    other = small_llama(tmp_path / "other", seed=1)
    theirs = tensors_of(other)
    mean = write(llama, tmp_path / "mean", {name: (own[name] + theirs[name]) / 2 for name in own})
    (change,) = diff(llama, mean, also=other).changes
    assert (change.kind, change.evidence) == ("mean of A and C", "B is (A + C) / 2 (30 tensors)")
    assert "mean of A and C" not in {change.kind for change in diff(llama, mean).changes}
    torch.manual_seed(3)
    third = write(llama, tmp_path / "third", each(own, noise(0.5)))
    assert diff(llama, third, also=other).notes[-1].startswith("B is no mixture of A and ")


@pytest.mark.slow
def test_a_stale_shard_is_named_by_its_file(llama: Path, tmp_path: Path) -> None:
    torch.manual_seed(2)
    stale = in_two_files(llama, tmp_path / "stale", noise(0.1), stale=0)
    (change,) = diff(llama, stale).changes
    assert (change.kind, change.where) == ("stale shard", ("model-00001-of-00002.safetensors",))


@pytest.mark.slow
def test_biases_that_training_moves_far_are_fine_tuned(tmp_path: Path) -> None:
    """Biases begin near 0, so that a small change of them is large relative to them."""
    source = small_llama(tmp_path / "a", attention_bias=True)
    own = {name: 0.01 * t if name.endswith("bias") else t for name, t in tensors_of(source).items()}
    before = write(source, tmp_path / "before", own)
    tuned = each(each(own, noise(0.05)), lambda _, t: t + 0.05 * torch.randn_like(t), ".bias")
    (change,) = diff(before, write(source, tmp_path / "after", tuned)).changes
    assert change.kind == "fine-tuned"
    assert "relative changes of 0.0" in change.evidence


def test_another_head_is_named_and_fields_that_nothing_reads_are_not(tmp_path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, vocab_size=40)
    torch.manual_seed(0)
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "words")
    classes = transformers.BertForSequenceClassification(config)
    classes.load_state_dict(
        transformers.BertForMaskedLM.from_pretrained(tmp_path / "words").state_dict(), strict=False
    )
    classes.config.update({"id2label": {0: "no", 1: "yes"}, "bos_token_id": 7})
    classes.save_pretrained(tmp_path / "classes")
    (change,) = diff(tmp_path / "words", tmp_path / "classes").changes
    assert change.kind == "another head"
    assert change.evidence == "A has one that predicts tokens, and B one for a task"


@pytest.mark.slow
def test_the_same_maps_in_float16_next_to_biases_in_float32_lie_on_a_grid(tmp_path: Path) -> None:
    source = small_llama(tmp_path / "a", attention_bias=True)
    own = tensors_of(source)
    levels = each(own, on_levels(4, 16, torch.float16), "_proj.weight")
    (change,) = diff(source, write(source, tmp_path / "b", levels)).changes
    assert change.kind == "quantised"
    assert "16 levels by groups of 16" in change.evidence


@pytest.mark.slow
def test_constants_in_a_stale_file_do_not_hide_it(tmp_path: Path) -> None:
    source = small_llama(tmp_path / "a", attention_bias=True)
    own = tensors_of(source)
    names = [*sorted(own)[: len(own) // 2]]
    zeros = {name: torch.zeros_like(own[name]) for name in names if name.endswith("bias")}
    assert zeros
    flat = write(source, tmp_path / "flat", own | zeros)
    stale = in_two_files(flat, tmp_path / "stale", noise(0.1), stale=0)
    (change,) = diff(flat, stale).changes
    assert change.kind == "stale shard"


def near_misses(own: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield changes that look like a kind and are none."""
    swapped = own["model.layers.1.self_attn.q_proj.weight"].view(4, 8, -1)[[1, 0, 2, 3]].flatten(0, 1)
    yield own | {"model.layers.1.self_attn.q_proj.weight": swapped}
    basis, _ = torch.linalg.qr(torch.randn(8, 8))
    turned = own["model.layers.0.self_attn.q_proj.weight"].clone()
    turned[:8] = basis @ turned[:8]
    yield own | {"model.layers.0.self_attn.q_proj.weight": turned}
    yield each(own, lambda _, tensor: torch.randn_like(tensor))


@pytest.mark.slow
def test_what_fits_no_kind_has_no_name(llama: Path, tmp_path: Path) -> None:
    torch.manual_seed(4)
    for number, tensors in enumerate(near_misses(tensors_of(llama))):
        different = diff(llama, write(llama, tmp_path / str(number), tensors))
        assert different.changes == (), number
        assert different.verdict in ("near", "different")
