"""The losses: against the same formulas through whole arrays of logits, whatever the number of tokens."""

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tolerances import assert_same
from triptych.thresholds import MAX_CHUNK_TOKENS
from triptych.training import Loss, output_loss, rdrop_loss
from triptych.training.losses import teacher_loss

D_MODEL, VOCAB = 8, 37
NUM_TOKENS = (1, MAX_CHUNK_TOKENS - 1, MAX_CHUNK_TOKENS, MAX_CHUNK_TOKENS + 1, 4500)


def reference_loss(x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float) -> Loss:
    logits = x @ weight.T
    smoothed = F.cross_entropy(logits, targets, label_smoothing=label_smoothing, reduction="sum")
    return Loss(smoothed, F.cross_entropy(logits.detach(), targets, reduction="sum"))


def reference_rdrop_loss(
    first: Tensor, second: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, rdrop: float
) -> Loss:
    log_p, log_q = ((x @ weight.T).log_softmax(dim=-1) for x in (first, second))
    pairs = ((log_q, log_p), (log_p, log_q))
    apart = sum(F.kl_div(one, other, log_target=True, reduction="sum") for one, other in pairs)
    one, other = (reference_loss(x, weight, targets, label_smoothing) for x in (first, second))
    smoothed = (one.smoothed + other.smoothed) / 2 + rdrop / 4 * apart
    return Loss(smoothed, (one.likelihood + other.likelihood) / 2)


def logits_of_teacher(targets: Tensor) -> Tensor:
    """Probabilities that differ from the text's, some of them close to 0."""
    return 5 * torch.sin(torch.arange(VOCAB) * (targets[:, None] + 1.0))


def our_teacher_loss(
    x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, share: float
) -> Loss:
    logits = logits_of_teacher(targets)
    return teacher_loss(x, weight, targets, label_smoothing, lambda rows: logits[rows], share)


def reference_teacher_loss(
    x: Tensor, weight: Tensor, targets: Tensor, label_smoothing: float, share: float
) -> Loss:
    of_text = reference_loss(x, weight, targets, label_smoothing)
    wanted = logits_of_teacher(targets).to(x.dtype).softmax(dim=-1)
    of_teacher = F.cross_entropy(x @ weight.T, wanted, reduction="sum")
    return Loss((1 - share) * of_text.smoothed + share * of_teacher, of_text.likelihood)


class Case(NamedTuple):
    """A loss, its formula, how many passes it compares, and its options."""

    ours: Callable[..., Loss]
    reference: Callable[..., Loss]
    passes: int
    options: tuple[float, ...]


PLAIN = Case(output_loss, reference_loss, 1, (0.1,))
RDROP = Case(rdrop_loss, reference_rdrop_loss, 2, (0.1, 5.0))
TEACHER = Case(our_teacher_loss, reference_teacher_loss, 1, (0.1, 0.7))
KINDS = {"one pass": PLAIN, "two passes": RDROP, "a teacher": TEACHER}
CASES = [
    *((PLAIN._replace(options=(epsilon,)), num) for epsilon in (0.0, 0.1, 0.5) for num in NUM_TOKENS),
    *((RDROP._replace(options=(0.1, rdrop)), 7) for rdrop in (0.0, 1.0)),
    *((RDROP._replace(options=(epsilon, 5.0)), num) for epsilon in (0.0, 0.1) for num in (1, NUM_TOKENS[3])),
    *((TEACHER._replace(options=(0.1, share)), NUM_TOKENS[3]) for share in (0.0, 0.7, 1.0)),
]


def make_inputs(
    num_tokens: int, dtype: torch.dtype = torch.float64, passes: int = 1, scale: float = 1.0
) -> list[Tensor]:
    """What the model gives in each pass, the output table, and the targets."""
    outputs = [scale * torch.randn(num_tokens, D_MODEL, dtype=dtype) for _ in range(passes)]
    weight = torch.randn(VOCAB, D_MODEL, dtype=dtype)
    return [*(x.requires_grad_() for x in (*outputs, weight)), torch.randint(VOCAB, (num_tokens,))]


def gradients(loss: Loss, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss.smoothed, inputs[:-1])


@pytest.mark.parametrize(("case", "num_tokens"), CASES)
def test_the_loss_and_its_gradients_are_the_formulas(case: Case, num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, passes=case.passes)
    ours, reference = case.ours(*inputs, *case.options), case.reference(*inputs, *case.options)
    assert_same(ours.smoothed, reference.smoothed, kind="output")
    assert_same(ours.likelihood, reference.likelihood, kind="output")
    assert not ours.likelihood.requires_grad
    for one, other in zip(gradients(ours, inputs), gradients(reference, inputs), strict=True):
        assert_same(one, other, kind="gradient")


def test_a_factor_on_the_loss_is_a_factor_on_its_gradients() -> None:
    inputs = make_inputs(600)
    whole = gradients(output_loss(*inputs, 0.1), inputs)
    seventh = torch.autograd.grad(output_loss(*inputs, 0.1).smoothed / 7, inputs[:-1])
    for one, other in zip(seventh, whole, strict=True):
        assert_same(one, other / 7, kind="gradient")


@pytest.mark.parametrize("kind", KINDS)
def test_large_logits_and_passes_far_apart_do_not_overflow(kind: str) -> None:
    ours, reference, passes, options = KINDS[kind]
    inputs = make_inputs(5, torch.float32, passes, scale=1000.0 if passes == 1 else 100.0)
    loss, expected = ours(*inputs, *options), reference(*inputs, *options)
    assert_same(loss.smoothed, expected.smoothed, kind="output")
    for one, other in zip(gradients(loss, inputs), gradients(expected, inputs), strict=True):
        assert_same(one, other, kind="gradient")


@pytest.mark.parametrize(
    ("kind", "num_tokens"), [("one pass", 3), ("one pass", 600), ("two passes", 600), ("a teacher", 600)]
)
def test_under_autocast_it_agrees_within_bfloat16_and_gradients_stay_float32(
    kind: str, num_tokens: int
) -> None:
    make, reference, passes, options = KINDS[kind]
    inputs = make_inputs(num_tokens, torch.float32, passes)
    whole = reference(*inputs, *options)
    expected = gradients(whole, inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours = make(*inputs, *options)
    assert ours.smoothed.dtype == ours.likelihood.dtype == torch.float32
    assert not torch.equal(ours.smoothed, whole.smoothed)  # the products were bfloat16's
    assert_same(ours.smoothed.bfloat16(), whole.smoothed.bfloat16(), kind="output")
    assert_same(ours.likelihood.bfloat16(), whole.likelihood.bfloat16(), kind="output")
    for one, other in zip(gradients(ours, inputs), expected, strict=True):
        assert one.dtype == torch.float32
        assert_same(one.bfloat16(), other.bfloat16(), kind="gradient")


def test_under_autocast_a_bfloat16_input_is_welcome() -> None:
    x, weight, targets = inputs = make_inputs(5, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = output_loss(x.bfloat16(), weight, targets, 0.1)
    of_x, of_weight = gradients(loss, inputs)
    assert of_x.dtype == of_weight.dtype == torch.float32
    expected = gradients(reference_loss(*inputs, 0.1), inputs)
    assert_same(of_weight.bfloat16(), expected[1].bfloat16(), kind="gradient")


@pytest.mark.parametrize("detached", [False, True])
def test_without_gradients_the_value_is_the_same(detached: bool) -> None:
    inputs = make_inputs(600)
    expected = output_loss(*inputs, 0.1)
    with torch.set_grad_enabled(detached):
        loss = output_loss(*(tensor.detach() if detached else tensor for tensor in inputs), 0.1)
    assert not loss.smoothed.requires_grad
    assert_same(loss.smoothed, expected.smoothed.detach(), kind="output")
    assert_same(loss.likelihood, expected.likelihood, kind="output")


@pytest.mark.parametrize("which", [0, 1])
def test_one_gradient_alone_is_the_same_gradient(which: int) -> None:
    inputs = make_inputs(20)
    expected = gradients(output_loss(*inputs, 0.1), inputs)[which]
    alone = [t if i == which else t.detach() for i, t in enumerate(inputs)]
    (gradient,) = torch.autograd.grad(output_loss(*alone, 0.1).smoothed, inputs[which])
    assert_same(gradient, expected, kind="exact")


def test_the_inputs_are_left_as_they_were() -> None:
    inputs = make_inputs(600)
    before = [t.detach().clone() for t in inputs]
    output_loss(*inputs, 0.1).smoothed.backward()
    for one, other in zip(inputs, before, strict=True):
        assert_same(one.detach(), other, kind="exact")
