"""What rounding explains of a difference, and what it does not."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from checkpoints.runs import some
from checkpoints.tiny_models import TINY
from edited import edited_tensors
from rewriting.certificates import failing, failures, seal
from triptych.core.algebra.semantics import Semantics
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.family import read_family
from triptych.rewriting.certificate import Certificate, read_certificate
from triptych.rewriting.functions import EXACT, GaugeFix, PruneHeads, SortHeads
from triptych.rewriting.on_text import compare_outputs
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.rounding import (
    RoundedAgain,
    changed_numbers,
    changed_parameters,
    first_moved,
    judge_rounding,
    unit,
)
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.rewriting.whole_models import FailedRewriteError
from triptych.running.opening import NotFiniteError, open_text_reader

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")

EXACT_RECIPE = RewriteRecipe(step=EXACT, skip_refused=True)
# A Llama whose queries and keys do not turn, it says: then they have a basis to choose.
NOT_TURNED = """
name = "Llama without rotation"
model_types = ["llama"]
[[attention]]
at = "layers.{layer}.self_attn"
norm = [{ at = "layers.{layer}.input_layernorm", kind = "rms" }]
biases = [{ value = "" }]
positions = [{ kind = "none" }]
"""
SHARED = Path(__file__).parents[3] / "shared" / "checkpoints"


def tiny(name: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0) -> Path:
    """A tiny model of a family with biases, gains and shifts that are not those of a fresh one."""
    made = TINY[name]
    torch.manual_seed(seed)
    model = getattr(transformers, made.model)(made.configured())
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:  # RoFormer's table of angles is fixed
                parameter.add_(0.2 * torch.randn_like(parameter))
            parameter.data = parameter.to(dtype)  # of the parameters alone: Llama 4 has a complex buffer
    model.config.dtype = dtype
    model.save_pretrained(folder)
    return folder


def assert_only_rounding(source: Path, out: Path) -> None:
    """Rewrite exactly: the models were run, and are as near as rounding leaves them."""
    found = rewrite_checkpoint(str(source), out, EXACT_RECIPE)
    assert found.tier != "bounded"
    assert found.end_to_end is not None, found.not_compared


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("mt5", torch.bfloat16),
        ("bert with cross-attention", torch.float16),
        ("olmo2", torch.float32),
        ("gpt_oss", torch.bfloat16),
    ],
)
def test_exact_rewrites_of_a_family_are_not_mistaken_for_others(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    assert_only_rounding(tiny(name, tmp_path / "source", dtype), tmp_path / "out")


# Models of pictures and sound are not run on tokens; Marian's are run as ours.
NOT_RUN = {
    *("vit", "clip", "dinov2", "dinov3", "dinov3, gated", "beit", "beit, tables", "siglip"),
    *("siglip2, vision", "marian", "whisper", "wav2vec2", "perceiver"),
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", sorted(TINY.keys() - NOT_RUN))
def test_exact_rewrites_of_no_family_are_mistaken_for_others(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    for seed in range(3):
        source = tiny(name, tmp_path / f"source-{seed}", dtype, seed)
        assert_only_rounding(source, tmp_path / f"out-{seed}")


@pytest.mark.parametrize("name", some(("olmo2", "cohere", "olmo3", "olmoe", "stablelm"), ("olmo2", "cohere")))
def test_pruned_heads_with_norms_of_their_own_are_verified(name: str, tmp_path: Path) -> None:
    source = tiny(name, tmp_path / "source")
    rewrite_checkpoint(str(source), tmp_path / "out", RewriteRecipe(step=(PruneHeads(number=1), SortHeads())))
    assert failing(tmp_path / "out", source) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "llama-gqa", "marian-multi30k"])
def test_exact_rewrites_of_trained_checkpoints_are_not_mistaken_for_others(name: str, tmp_path: Path) -> None:
    if not (SHARED / name / "config.json").is_file():
        pytest.skip(f"{name} is not among the shared checkpoints here")
    assert_only_rounding(SHARED / name, tmp_path / "out")


@pytest.fixture(scope="module")
def misread(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A Llama, and a family that leaves its rotation out."""
    folder = tmp_path_factory.mktemp("misread")
    (folder / "family.toml").write_text(NOT_TURNED)
    return tiny("llama", folder / "source"), folder / "family.toml"


def test_a_family_that_was_misread_fails_the_rewrite_and_the_first_layer_is_named(
    misread: tuple[Path, Path], tmp_path: Path
) -> None:
    source, family = misread
    for recipe, first in (
        (EXACT_RECIPE, "decoder 0"),
        (RewriteRecipe(step=(GaugeFix(layers=(1,)),)), "decoder 1"),
    ):
        with pytest.raises(FailedRewriteError) as failed:
            rewrite_checkpoint(str(source), tmp_path / "out", recipe, family=read_family(family))
        assert f"attention of {first} moves first" in str(failed.value)
        assert "nothing is written" in str(failed.value)
        assert "Llama without rotation" in str(failed.value)
        assert failed.value.exit_code == 1
        assert not list(tmp_path.iterdir())


def test_a_family_that_was_misread_is_noticed_when_the_certificate_is_tried_again(
    misread: tuple[Path, Path], tmp_path: Path
) -> None:
    source, family = misread
    told = read_family(family)
    rewrite_checkpoint(str(source), tmp_path / "out", EXACT_RECIPE, family=told, compare=False)
    one, other = open_text_reader(source), open_text_reader(tmp_path / "out")
    found = compare_outputs(one, other, one.random_windows(2017))
    entry = {
        "by": one.by,
        "text": "random tokens",
        "tokens": found.tokens,
        "worst_logit": found.worst_logit,
        "divergence_nats": found.divergence_nats,
    }
    record = read_certificate(tmp_path / "out").model_dump(mode="json") | {"end_to_end": entry}
    seal(tmp_path / "out", Certificate.model_validate(record))
    (failed,) = failures(tmp_path / "out", source, family=told)
    assert failed.claim == "whole models compared"
    assert "and rounding moves them by" in failed.found
    assert "attention of decoder 0 moves first" in failed.found


@pytest.mark.parametrize("has_targets", [True, False])
def test_models_compared_in_blocks_of_rows_have_the_figures_of_whole_windows(
    has_targets: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = open_text_reader(tiny("llama", tmp_path / "one"))
    other = open_text_reader(tiny("llama", tmp_path / "other", seed=1))
    windows = [*one.random_windows(2017)]
    if has_targets:
        windows = [replace(window, targets=window.inputs["input_ids"][0].roll(1)) for window in windows]
    whole = compare_outputs(one, other, iter(windows))
    outputs = [(one.outputs(window), other.outputs(window)) for window in windows]
    vocab_size = outputs[0][0].shape[1]
    assert whole.tokens == sum(len(rows) for rows, _ in outputs) > 3 * len(windows)
    monkeypatch.setattr("triptych.rewriting.on_text._NUMBERS_AT_A_TIME", 3 * vocab_size)
    blocks = compare_outputs(one, other, iter(windows))
    assert blocks.farthest == whole.farthest
    assert (blocks.loss_after_nats is not None) == has_targets
    figures = [[value for value in part if isinstance(value, float | int)] for part in (blocks, whole)]
    assert len(figures[0]) == (7 if has_targets else 5)
    assert figures[0] == pytest.approx(figures[1], rel=1e-12)


def test_one_wrong_number_beside_the_attention_is_more_than_rounding(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "source")
    rewrite_checkpoint(str(source), tmp_path / "out", EXACT_RECIPE, compare=False)
    with edited_tensors(tmp_path / "out") as tensors:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 5] += 1e-3
    one, other = open_text_reader(source), open_text_reader(tmp_path / "out")
    found = compare_outputs(one, other, one.random_windows(1))
    assert not judge_rounding(found, other, changed_parameters(one, other), torch.float32).is_rounding


def test_the_layer_that_is_named_is_the_first_that_moves_by_more_than_rounding(tmp_path: Path) -> None:
    source = tiny("llama", tmp_path / "source")
    rewrite_checkpoint(str(source), tmp_path / "out", EXACT_RECIPE, compare=False)
    checkpoint, one = open_checkpoint(source), open_text_reader(source)
    window = next(one.random_windows(1))

    def first() -> str:
        return first_moved(one, open_text_reader(tmp_path / "out"), checkpoint, window, torch.float32)

    assert not first()
    with edited_tensors(tmp_path / "out") as tensors:
        tensors["model.layers.1.self_attn.v_proj.weight"] += 0.01
    assert first() == "decoder 1"


def test_numbers_of_a_layer_are_changed_where_one_of_them_is(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny("bert", tmp_path))
    layer = checkpoint.read(checkpoint.sites[0])
    assert changed_numbers(layer, checkpoint.read(checkpoint.sites[0])) == frozenset()
    (link,) = layer.weights.k
    weight = link.weight.clone()
    weight[0, 0, 0] += 1
    other = replace(layer, weights=replace(layer.weights, k=(replace(link, weight=weight),)))
    assert changed_numbers(layer, other) == {("k", "weight")}
    bare = replace(layer, weights=replace(layer.weights, o_bias=None))
    assert changed_numbers(layer, bare) == {("o", "bias")}


def test_outputs_that_are_no_numbers_are_infinitely_far(tmp_path: Path) -> None:
    source = tiny("gpt2", tmp_path / "source")
    one, other = open_text_reader(source), open_text_reader(source)
    with torch.no_grad():
        for parameter in other.model.parameters():
            if parameter.ndim == 1:
                parameter[0] = torch.nan
    assert compare_outputs(one, other, one.random_windows(1)).worst_logit == torch.inf


def test_a_rewritten_model_with_nan_is_refused_by_its_tensor(tmp_path: Path) -> None:
    source = tiny("gpt2", tmp_path / "source")
    rewrite_checkpoint(str(source), tmp_path / "out", EXACT_RECIPE, compare=False)
    with edited_tensors(tmp_path / "out") as tensors:
        tensors["transformer.ln_f.bias"][0] = torch.nan
    with pytest.raises(NotFiniteError, match=r"tensor transformer\.ln_f\.bias has 1 of 24 numbers"):
        open_text_reader(tmp_path / "out")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_unit_is_the_step_to_the_next_number_of_the_dtype(dtype: torch.dtype) -> None:
    numbers = torch.tensor([1.0, -1.0, 0.75, 1.999, 3e-5, 5e-7, 1000.0]).to(dtype)
    steps = unit(numbers.double(), dtype)
    away = torch.nextafter(numbers, torch.sign(numbers) * torch.inf)
    torch.testing.assert_close(steps, (away.double() - numbers.double()).abs(), rtol=0, atol=0)
    assert not unit(torch.zeros(3, dtype=torch.float64), dtype).any()


@pytest.mark.parametrize("lies", ["by rows", "by columns"])
def test_every_number_of_a_large_map_is_rounded_up_or_down(lies: str) -> None:
    torch.manual_seed(0)
    numbers = torch.randn(3, 512, 400, dtype=torch.float64)
    map_ = Link(numbers if lies == "by rows" else numbers.mT.contiguous().mT)
    weights = AttentionWeights(512, 3, (map_,), (map_,), (map_,), (Link(numbers.mT),), Semantics(1.0))
    again = RoundedAgain(frozenset({("q", "weight")}), torch.float16, torch.Generator().manual_seed(0))
    moves = again(weights).W_Q - numbers
    torch.testing.assert_close(moves.abs(), unit(numbers, torch.float16) / 2, rtol=1e-9, atol=0)
    assert 0.49 < moves.gt(0).double().mean() < 0.51
