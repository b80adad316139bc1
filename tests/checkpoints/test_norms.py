"""Norms that maps outside the attention read, in every family: folded, the model is the same; or refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints.test_families import made
from checkpoints.test_writing import assert_models_agree, loaded
from checkpoints.tiny_models import TINY, Tiny
from triptych.algebra.rewrites import RewriteRefusedError
from triptych.checkpoints.checkpoint import Checkpoint, open_checkpoint
from triptych.checkpoints.norms import NormSite, norm_sites
from triptych.rewriting.certificate import Certificate
from triptych.rewriting.checkpoint import rewrite_checkpoint
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.steps import FoldNorm, FoldOtherNorms, Step
from triptych.rewriting.verification import verify_certificate

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")


def opened(folder: Path) -> Checkpoint:
    checkpoint = open_checkpoint(folder)
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint


def in_double(name: str, folder: Path) -> tuple[Any, Path]:
    """A tiny model, and the folder where it is saved in float64."""
    model = made(name, folder / "first")
    model.save_pretrained(folder / "source")
    return loaded(model, folder / "source"), folder / "source"


def folded(source: Path, target: Path, *steps: Step, skip_refused: bool = True) -> Certificate:
    recipe = RewriteRecipe.model_construct(
        step=steps or (FoldNorm(), FoldOtherNorms()), skip_refused=skip_refused, calibration=None
    )
    return rewrite_checkpoint(str(source), target, recipe, compare=False)


# What is refused in which family, and what is folded into how many maps.
REFUSED = {
    "post-norm": "bert roberta distilbert albert electra deberta bart marian wav2vec2 olmo2",
}


@pytest.mark.parametrize("name", TINY)
def test_all_norms_folded_leave_the_model_as_it_was(name: str, tmp_path: Path) -> None:
    model, source = in_double(name, tmp_path)
    found = folded(source, tmp_path / "out")
    assert found.norms
    for norm in found.norms:
        print(name, norm.module, norm.maps, norm.steps[0].refused, norm.steps[0].rewrite)
    assert_models_agree(model, loaded(model, tmp_path / "out"))
    assert all(check.held for check in verify_certificate(tmp_path / "out", source))
