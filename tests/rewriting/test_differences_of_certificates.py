"""What a certificate says, found again by a comparison of the two folders alone."""

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from checkpoints.test_families import made
from checkpoints.tiny_models import TINY
from rewriting.test_plans import OWN, RECIPES, own_run
from triptych import diff
from triptych.errors import TriptychError
from triptych.rewriting.certificate import Certificate, LayerRecord, NormRecord
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.seeing.difference import Difference

pytestmark = pytest.mark.filterwarnings("ignore")

SAME = ("same bytes", "same numbers", "same function")
# Beginnings of the words in a chain, by rewrites. Copies of shared maps and unused heads may need no step.
WORDS: dict[str, tuple[str, ...]] = {
    "fold": ("chains of maps",),
    "expand": ("",),
    "factor": ("chains of maps", "queries and keys have another basis"),
    "fold_norm": ("gain and shift",),
    "fold_other_norms": ("gain and shift of other norms",),
    "drop_key_bias": ("key biases",),
    "fold_value_bias": ("value biases",),
    "prune_heads": ("heads that add nothing",),
    "merge_kv_heads": ("key and value heads",),
    "gauge_fix": ("queries and keys have another basis", "values and outputs have another basis", "factors"),
    "sort_heads": ("heads are in another order",),
    "permute_heads": ("heads are in another order",),
    "repeat_kv_heads": ("key and value heads",),
    "to_latent": ("chains of maps",),
}
FEW = ("exact", "sort_heads", "repeat_kv_heads", "prune_heads, one", "truncate")


def not_found(certificate: Certificate, found: Difference) -> str:
    """What the comparison does not find again of a certificate; "" if it finds all."""
    said = f"{certificate.tier}, and the comparison says {found.verdict}: {'; '.join(found.reasons[:3])}"
    layers: list[LayerRecord | NormRecord] = [*certificate.layers, *certificate.norms]
    measured = [layer.measured for layer in layers if layer.measured is not None]
    if certificate.tier == "bounded":
        moved = max((one.relative for one in measured), default=0.0)
        return "" if found.verdict == "near" or (moved < 1e-4 and found.verdict in SAME) else said
    if found.verdict not in SAME:
        return said
    steps = {step.rewrite for layer in layers for step in layer.steps if not step.refused}
    if found.verdict != "same function" or len(steps) != 1:
        return ""
    (step,) = steps
    names = [link.words for link in found.chain]
    return "" if any(name.startswith(WORDS[step]) for name in names) else f"{step}, and the chain is {names}"


def not_found_of(source: Path, folder: Path, names: Iterable[str] = RECIPES) -> tuple[int, list[str]]:
    """The number of certificates, and what is not found again of them."""
    missed = []
    count = 0
    for number, name in enumerate(names):
        recipe = RewriteRecipe(step=RECIPES[name], skip_refused=True)
        out = folder / f"{number}"
        try:
            certificate = rewrite_checkpoint(str(source), out, recipe, compare=False)
        except TriptychError:
            continue
        count += 1
        if said := not_found(certificate, diff(source, out)):
            missed.append(f"{name}: {said}")
    return count, missed


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_certificates_are_found_again_from_two_folders(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "source")
    count, missed = not_found_of(tmp_path / "source", tmp_path, FEW)
    assert count == len(FEW)
    assert not missed


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_certificates_of_every_family_are_found_again(name: str, tmp_path: Path) -> None:
    made(name, tmp_path / "source")
    _, missed = not_found_of(tmp_path / "source", tmp_path)
    assert not missed


@pytest.mark.slow
@pytest.mark.parametrize(("projections", "norm", "scheme"), OWN)
def test_certificates_of_every_run_of_ours_are_found_again(
    projections: str, norm: str, scheme: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    if not own_run(tmp_path / "source", projections, norm, scheme):
        pytest.skip(f"{projections} cannot have {scheme} positions")
    _, missed = not_found_of(tmp_path / "source", tmp_path)
    assert not missed
