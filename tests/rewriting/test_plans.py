"""What is planned is done: what is planned can be written, what is refused is refused in both."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from checkpoints.test_families import made
from checkpoints.tiny_models import TINY
from edited import set_fields
from small_checkpoints import HEADS, D, gpt2, llama
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.attention.projections import PARAMETERISATIONS
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.models import EncoderDecoder, ModelConfig, write_model
from triptych.errors import TriptychError, UsageError
from triptych.rewriting.functions import (
    EXACT,
    REWRITES,
    DropKeyBias,
    Expand,
    Factor,
    Fold,
    FoldNorm,
    FoldOtherNorms,
    FoldValueBias,
    GaugeFix,
    MergeKVHeads,
    PermuteHeads,
    PruneHeads,
    RepeatKVHeads,
    SortHeads,
    ToLatent,
    Truncate,
)
from triptych.rewriting.planning import plan_rewrite
from triptych.rewriting.recipe import RewriteRecipe, to_recipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore")


def llama_with_head_dim(folder: Path) -> Path:
    """A configuration that can say fewer heads."""
    set_fields(llama(folder) / "config.json", head_dim=D // HEADS)
    return folder


SMALLER = {
    "llama": "Llama's format: the file gets smaller by fewer heads (prune_heads, with merge_kv_heads) or "
    "fewer key-value heads (merge_kv_heads); anything else is padded with zeros",
    "gpt2": "GPT-2's format: no rewrite makes the file smaller; anything else is padded with zeros",
}
IN_MAPS = "W_Q and W_K (50% of the attention's parameters) get lower ranks and keep all channels"


@pytest.mark.parametrize(
    ("family", "rotary", "expected"),
    [("llama", "maps", [IN_MAPS]), ("llama", "pairs", []), ("gpt2", "maps", [])],
)
def test_a_plan_says_what_a_truncation_does_not_shrink(
    family: str, rotary: Any, expected: list[str], tmp_path: Path
) -> None:
    folder = gpt2(tmp_path) if family == "gpt2" else llama_with_head_dim(tmp_path)
    recipe = RewriteRecipe(step=(SortHeads(), Truncate(budget=0.5, rotary=rotary)))
    plan = plan_rewrite(str(folder), recipe)
    assert [note.partition(", which")[0] for note in plan.notes if "W_Q" in note] == expected
    assert plan.notes[-1] == SMALLER[family]
    assert plan.bytes_after == plan.bytes_before


def test_fewer_heads_are_not_named_where_the_configuration_cannot_say_them(tmp_path: Path) -> None:
    plan = plan_rewrite(str(llama(tmp_path)), RewriteRecipe(step=(Truncate(budget=0.5),)))
    assert "smaller by fewer key-value heads (merge_kv_heads); anything" in plan.notes[-1]


def test_a_plan_of_many_steps_shows_four_and_names_the_others(tmp_path: Path) -> None:
    recipe = RewriteRecipe(step=EXACT, skip_refused=True)
    shown = repr(plan_rewrite(str(gpt2(tmp_path)), recipe)).splitlines()
    assert len(shown) == 8  # with the title, the costs and the bytes
    names = [step.name for step in EXACT if step.name != "fold_other_norms"] + ["fold_other_norms"]
    assert [line.split(":")[0] for line in shown[1:5]] == names[:4]
    assert shown[1] == "fold: 3 of 3, bit-exact"
    assert shown[5] == f"…: {', '.join(names[4:])}"


def test_what_a_plan_names_as_making_the_file_smaller_does(tmp_path: Path) -> None:
    steps = PruneHeads(number=2), MergeKVHeads(num_kv_heads=1)
    plan = plan_rewrite(str(llama_with_head_dim(tmp_path)), RewriteRecipe(step=steps))
    assert plan.bytes_after == plan.bytes_before / 2
    assert plan.notes == ()


RECIPES: dict[str, tuple[Any, ...]] = {
    "fold": (Fold(),),
    "fold, all": (Fold(keep="folded"),),
    "expand": (Expand(),),
    "factor": (Factor(),),
    "fold_norm": (FoldNorm(),),
    "fold_other_norms": (FoldOtherNorms(),),
    "both norms": (FoldNorm(), FoldOtherNorms()),
    "drop_key_bias": (DropKeyBias(),),
    "fold_value_bias": (FoldValueBias(),),
    "prune_heads, dead": (PruneHeads(),),
    "prune_heads, one": (PruneHeads(number=1),),
    "prune_heads, named": (PruneHeads(heads=(0, 1)),),
    "prune_heads, one layer": (PruneHeads(heads=(1,), layers=(0,)),),
    "merge_kv_heads": (MergeKVHeads(num_kv_heads=1),),
    "merge_kv_heads, exact": (MergeKVHeads(num_kv_heads=2, bounded=False),),
    "truncate": (Truncate(rank=2),),
    "truncate, qk": (Truncate(rank=2, forms=("qk",)),),
    "truncate, ov": (Truncate(energy=0.7, forms=("ov",)),),
    "truncate, pairs": (Truncate(energy=0.7, rotary="pairs"),),
    "truncate, budget": (Truncate(budget=0.5),),
    "gauge_fix": (GaugeFix(),),
    "gauge_fix, qk": (GaugeFix(forms=("qk",)),),
    "sort_heads": (SortHeads(),),
    "permute_heads": (PermuteHeads(order=(1, 0, 2, 3)),),
    "repeat_kv_heads": (RepeatKVHeads(),),
    "to_latent": (ToLatent(),),
    "to_latent, narrow": (ToLatent(rank=3),),
    "exact": EXACT,
    "several": (FoldNorm(), PruneHeads(number=1), Truncate(rank=3), GaugeFix(), SortHeads()),
}


# Distances that meet queries and keys; heads whose number the configuration says.
SAMPLED = ("deberta-v2", "gemma3, text")
FEW = ("prune_heads, one", "merge_kv_heads", "truncate", "truncate, pairs", "exact")


def test_every_step_is_tried() -> None:
    assert {type(step) for steps in RECIPES.values() for step in steps} == set(REWRITES)


def disagreements(source: Path, folder: Path, names: Iterable[str] = RECIPES) -> Iterator[str]:
    """Of recipes, with what is refused left out and without."""
    for number, name in enumerate(names):
        steps = RECIPES[name]
        for skip in (False, True):
            recipe = RewriteRecipe(step=steps, skip_refused=skip)
            out = folder / f"{number}{skip}"
            try:
                if wrong := disagreement(source, out, recipe):
                    yield f"{name}{', skipping' * skip}: {wrong}"
            except Exception as error:  # noqa: BLE001 - every one of them is a finding
                yield f"{name}{', skipping' * skip}: {type(error).__name__}: {error}"


def reason_of(refused: TriptychError) -> str:
    """Without the layer: files are written in the order of their tensors, plans made in that of layers."""
    return refused.reason if isinstance(refused, RewriteRefusedError) else str(refused)


def disagreement(source: Path, out: Path, recipe: RewriteRecipe) -> str:
    planned = run = ""
    try:
        plan = plan_rewrite(str(source), recipe)
    except TriptychError as refused:
        planned = reason_of(refused)
    try:
        certificate = rewrite_checkpoint(str(source), out, recipe, compare=False)
    except TriptychError as refused:
        run = reason_of(refused)
    if planned != run:
        return f"planned: {planned or 'done'}; run: {run or 'done'}"
    if run:
        return "a refused rewrite left something" if out.exists() else ""
    for one, other in zip(plan.layers, certificate.layers, strict=True):
        if one.steps != other.steps:
            return f"{one.module}: {one.steps} and {other.steps}"
        if any(not step.refused for step in other.steps) and other.measured is None:
            return f"{one.module} was not measured"
    said = (plan.settings, plan.before, plan.after, plan.unpadded)
    if said != (certificate.settings, certificate.before, certificate.after, certificate.unpadded):
        return f"{said} is not what was done"
    written = open_checkpoint(out)
    layers = [written.read(site) for site in written.sites]
    return "" if len(layers) == len(certificate.layers) else f"{len(layers)} layers are read again"


@pytest.mark.parametrize("name", SAMPLED)
def test_of_some_families_what_is_planned_is_done(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "source")
    assert not list(disagreements(tmp_path / "source", tmp_path, FEW))


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_of_every_family_what_is_planned_is_done(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "source")
    assert not list(disagreements(tmp_path / "source", tmp_path))


def own_run(folder: Path, projections: str, norm: str, scheme: str) -> bool:
    """A model of ours whose layers are all written in one way; whether there is one."""
    site = {"projections": projections} | ({"num_kv_heads": 2} if projections == "grouped" else {})
    stack = {"num_layers": 1, "attention": site}
    sizes = {"d_model": 16, "d_ff": 24, "num_heads": 4, "norm": norm, "positions": {"scheme": scheme}}
    try:
        stacks = {"encoder": stack, "decoder": {**stack, "cross_attention": site}}
        config = ModelConfig.model_validate({**sizes, **stacks})
        model = EncoderDecoder.of(config, 20, 20)
    except ValueError:
        return False
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    folder.mkdir()
    write_model(model, folder)
    return True


OWN = [
    (projections, norm, scheme)
    for projections in PARAMETERISATIONS
    for norm in ("pre", "post")
    for scheme in ("sinusoidal", "rotary", "alibi")
]


def test_of_a_run_of_ours_what_is_planned_is_done(tmp_path: Path) -> None:
    torch.manual_seed(1)
    assert own_run(tmp_path / "source", "grouped", "pre", "rotary")
    assert not list(disagreements(tmp_path / "source", tmp_path, FEW))


@pytest.mark.slow
@pytest.mark.parametrize(("projections", "norm", "scheme"), OWN)
def test_of_every_run_of_ours_what_is_planned_is_done(
    projections: str, norm: str, scheme: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    if not own_run(tmp_path / "source", projections, norm, scheme):
        pytest.skip(f"{projections} cannot have {scheme} positions")
    assert not list(disagreements(tmp_path / "source", tmp_path))


def test_exact_stands_for_every_exact_rewrite_in_recipes_and_in_python(tmp_path: Path) -> None:
    (tmp_path / "rewrite.toml").write_text('do = ["truncate(rank=2)", "exact"]\n')
    for found in (to_recipe(["truncate(rank=2)", "exact"]), to_recipe([tmp_path / "rewrite.toml"])):
        assert {step.name for step in found.step} == {"truncate", *(step.name for step in EXACT)}
        assert [step.place for step in found.step] == sorted(step.place for step in found.step)
        assert found.skip_refused
    with pytest.raises(UsageError, match="exact does fold already"):
        to_recipe(["fold", "exact"])
