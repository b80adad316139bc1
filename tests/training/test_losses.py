"""The loss: against torch, whatever the number of tokens."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from tolerances import assert_same
from training.formulas import reference_loss
from triptych.thresholds import MAX_CHUNK_TOKENS
from triptych.training import output_loss

D_MODEL, VOCAB = 8, 37
NUM_TOKENS = (1, MAX_CHUNK_TOKENS - 1, MAX_CHUNK_TOKENS, MAX_CHUNK_TOKENS + 1, 4500)


class Inputs(NamedTuple):
    x: Tensor
    weight: Tensor
    targets: Tensor


def make_inputs(num_tokens: int, dtype: torch.dtype = torch.float64) -> Inputs:
    return Inputs(
        torch.randn(num_tokens, D_MODEL, dtype=dtype, requires_grad=True),
        torch.randn(VOCAB, D_MODEL, dtype=dtype, requires_grad=True),
        torch.randint(VOCAB, (num_tokens,)),
    )


def gradients(loss: Tensor, inputs: Inputs) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss, inputs[:2])


@pytest.mark.parametrize("epsilon", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("num_tokens", NUM_TOKENS)
def test_the_loss_and_its_gradients_are_torchs(num_tokens: int, epsilon: float) -> None:
    inputs = make_inputs(num_tokens)
    ours, torchs = output_loss(*inputs, epsilon), reference_loss(*inputs, epsilon)
    assert_same(ours.smoothed, torchs.smoothed, kind="output")
    assert_same(ours.likelihood, torchs.likelihood, kind="output")
    assert not ours.likelihood.requires_grad
    for one, other in zip(gradients(ours.smoothed, inputs), gradients(torchs.smoothed, inputs), strict=True):
        assert_same(one, other, kind="gradient")


def test_a_factor_on_the_loss_is_a_factor_on_its_gradients() -> None:
    inputs = make_inputs(600)
    whole = gradients(output_loss(*inputs, 0.1).smoothed, inputs)
    for one, other in zip(gradients(output_loss(*inputs, 0.1).smoothed / 7, inputs), whole, strict=True):
        assert_same(one, other / 7, kind="gradient")


def test_large_logits_do_not_overflow() -> None:
    x, weight, targets = make_inputs(5, torch.float32)
    inputs = Inputs((x * 1000).detach().requires_grad_(), weight, targets)
    loss = output_loss(*inputs, 0.1)
    assert_same(loss.smoothed, reference_loss(*inputs, 0.1).smoothed, kind="output")
    assert all(gradient.isfinite().all() for gradient in gradients(loss.smoothed, inputs))


@pytest.mark.parametrize("num_tokens", [3, 600])
def test_under_autocast_it_agrees_within_bfloat16_and_gradients_stay_float32(num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, torch.float32)
    reference = reference_loss(*inputs, 0.1)
    expected = gradients(reference.smoothed, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = output_loss(*inputs, 0.1)
    assert ours.smoothed.dtype == ours.likelihood.dtype == torch.float32
    assert not torch.equal(ours.smoothed, reference.smoothed)  # the products were bfloat16's
    assert_same(ours.smoothed.bfloat16(), reference.smoothed.bfloat16(), kind="output")
    assert_same(ours.likelihood.bfloat16(), reference.likelihood.bfloat16(), kind="output")
    for one, other in zip(gradients(ours.smoothed, inputs), expected, strict=True):
        assert one.dtype == torch.float32
        assert_same(one.bfloat16(), other.bfloat16(), kind="gradient")


def test_under_autocast_a_bfloat16_input_is_welcome() -> None:
    inputs = make_inputs(5, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = output_loss(inputs.x.bfloat16(), inputs.weight, inputs.targets, 0.1)
    of_x, of_weight = gradients(loss.smoothed, inputs)
    assert of_x.dtype == of_weight.dtype == torch.float32
    expected = gradients(reference_loss(*inputs, 0.1).smoothed, inputs)
    assert_same(of_weight.bfloat16(), expected[1].bfloat16(), kind="gradient")


@pytest.mark.parametrize("detached", [False, True])
def test_without_gradients_the_value_is_the_same(detached: bool) -> None:
    inputs = make_inputs(600)
    expected = output_loss(*inputs, 0.1)
    if detached:
        loss = output_loss(inputs.x.detach(), inputs.weight.detach(), inputs.targets, 0.1)
    else:
        with torch.no_grad():
            loss = output_loss(*inputs, 0.1)
    assert not loss.smoothed.requires_grad
    assert_same(loss.smoothed, expected.smoothed.detach(), kind="output")
    assert_same(loss.likelihood, expected.likelihood, kind="output")


@pytest.mark.parametrize("which", [0, 1])
def test_one_gradient_alone_is_the_same_gradient(which: int) -> None:
    inputs = make_inputs(20)
    expected = gradients(output_loss(*inputs, 0.1).smoothed, inputs)[which]
    alone = [t if i == which else t.detach() for i, t in enumerate(inputs)]
    (gradient,) = torch.autograd.grad(output_loss(*alone, 0.1).smoothed, inputs[which])
    assert_same(gradient, expected, kind="exact")


def test_the_inputs_are_left_as_they_were() -> None:
    inputs = make_inputs(600)
    before = [t.detach().clone() for t in inputs]
    output_loss(*inputs, 0.1).smoothed.backward()
    for one, other in zip(inputs, before, strict=True):
        assert_same(one.detach(), other, kind="exact")
