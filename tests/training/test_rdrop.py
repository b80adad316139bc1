"""Two passes that should agree: the one-pass loss against the formula, and in the loop."""

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tolerances import assert_same
from training.formulas import reference_rdrop_loss
from training.test_resuming import recipe_tree
from triptych.errors import UsageError
from triptych.thresholds import MAX_CHUNK_TOKENS
from triptych.training import Loss, Recipe, rdrop_loss, resolve, runs
from triptych.training.metrics import read_metrics
from triptych.training.progress import LineDisplay

D_MODEL, VOCAB = 8, 37


class Inputs(NamedTuple):
    first: Tensor
    second: Tensor
    weight: Tensor
    targets: Tensor


def make_inputs(num_tokens: int, dtype: torch.dtype = torch.float64, scale: float = 1.0) -> Inputs:
    shape = num_tokens, D_MODEL
    return Inputs(
        (scale * torch.randn(shape, dtype=dtype)).requires_grad_(),
        (scale * torch.randn(shape, dtype=dtype)).requires_grad_(),
        torch.randn(VOCAB, D_MODEL, dtype=dtype, requires_grad=True),
        torch.randint(VOCAB, (num_tokens,)),
    )


def gradients(loss: Loss, inputs: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss.smoothed, inputs[:3])


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
@pytest.mark.parametrize("rdrop", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("num_tokens", [1, 7, MAX_CHUNK_TOKENS + 1])
def test_the_loss_and_its_gradients_are_the_formulas(num_tokens: int, rdrop: float, epsilon: float) -> None:
    inputs = make_inputs(num_tokens)
    ours = rdrop_loss(*inputs, epsilon, rdrop)
    reference = reference_rdrop_loss(*inputs, epsilon, rdrop)
    assert_same(ours.smoothed, reference.smoothed, kind="output")
    assert_same(ours.likelihood, reference.likelihood, kind="output")
    assert not ours.likelihood.requires_grad
    for one, other in zip(gradients(ours, inputs), gradients(reference, inputs), strict=True):
        assert_same(one, other, kind="gradient")


def test_passes_far_apart_do_not_overflow() -> None:
    inputs = make_inputs(5, torch.float32, scale=100.0)
    ours, reference = rdrop_loss(*inputs, 0.1, 5.0), reference_rdrop_loss(*inputs, 0.1, 5.0)
    assert_same(ours.smoothed, reference.smoothed, kind="output")
    for one, other in zip(gradients(ours, inputs), gradients(reference, inputs), strict=True):
        assert_same(one, other, kind="gradient")


def test_under_autocast_it_agrees_within_bfloat16_and_gradients_stay_float32() -> None:
    inputs = make_inputs(600, torch.float32)
    reference = reference_rdrop_loss(*inputs, 0.1, 5.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = rdrop_loss(*inputs, 0.1, 5.0)
    assert ours.smoothed.dtype == torch.float32
    assert not torch.equal(ours.smoothed, reference.smoothed)  # the products were bfloat16's
    assert_same(ours.smoothed.bfloat16(), reference.smoothed.bfloat16(), kind="output")
    for one, other in zip(gradients(ours, inputs), gradients(reference, inputs), strict=True):
        assert one.dtype == torch.float32
        assert_same(one.bfloat16(), other.bfloat16(), kind="gradient")


def recipe(rdrop: float, dropout: float, after: int = 0) -> Recipe:
    tree = recipe_tree(
        **{"max_steps": 20, "accumulate_batches": 1, "clip_norm": 0.0, "log_every_steps": 5},
        **{"rdrop": rdrop, "rdrop_after": after},
    )
    tree["model"] = {**tree["model"], "dropout": dropout, "encoder": {"num_layers": 1}}  # type: ignore[dict-item]
    tree["validation"] = {"every_steps": 20, "bleu": False, "metric": "loss"}
    return resolve(tree)


def losses(folder: Path, rdrop: float, after: int = 0) -> list[float]:
    runs.train(recipe(rdrop, dropout=0.3, after=after), folder, LineDisplay())
    return [line["loss"] for line in read_metrics(folder / "metrics.jsonl") if "loss" in line]


def test_the_loop_pays_for_disagreement_from_its_step_on_and_learns_all_the_same(tmp_path: Path) -> None:
    without, much = losses(tmp_path / "without", 0.0), losses(tmp_path / "much", 30.0)
    late = losses(tmp_path / "late", 30.0, after=10)
    assert much[0] > without[0]
    assert much[-1] < much[0]
    assert late[:2] == without[:2]  # steps 1 to 10
    assert late[2] > without[2]


def test_without_dropout_there_is_nothing_to_agree_on() -> None:
    with pytest.raises(UsageError, match=r"training\.rdrop is 5\.0 but the model has no dropout"):
        recipe(5.0, dropout=0.0)


def test_when_it_begins_says_nothing_without_it() -> None:
    with pytest.raises(UsageError, match=r"training\.rdrop_after says when R-Drop begins"):
        recipe(0.0, dropout=0.3, after=10)
