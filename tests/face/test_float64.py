"""Models in float64 compute in float64 to the last figure, against `transformers` and finite differences."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from face.tiny import write_checkpoint
from triptych import Model, load

transformers = pytest.importorskip("transformers", reason="it comes with the extra [dev]")
pytestmark = pytest.mark.filterwarnings("ignore")

TEXT, OTHER = "the cat sat on", "the dog ran to"
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


class Both(NamedTuple):
    ours: Model
    theirs: Any  # in float64 too


# `transformers` takes norms, angles or weights of others through float32.
@pytest.fixture(scope="module", params=["gpt2", "openai-gpt"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    folder: Path = tmp_path_factory.mktemp("float64") / request.param
    theirs = write_checkpoint(request.param, folder).double()
    return Both(load(folder, device="cpu", dtype="float64"), theirs)


def log_probs(both: Both, text: str) -> tuple[Tensor, Tensor]:
    """The logits of `transformers`, and of every token that is predicted its log-probability."""
    ids = torch.tensor([both.ours.run(text).ids])
    with torch.no_grad():
        logits = both.theirs(ids, use_cache=False).logits[0]
    return logits, logits[:-1].log_softmax(dim=-1).gather(1, ids[0, 1:, None])[:, 0]


def test_logits_loss_and_scores_are_those_of_transformers_in_float64(both: Both) -> None:
    logits, expected = log_probs(both, TEXT)
    run = both.ours.run(TEXT)
    assert run.logits.dtype == run.losses.dtype == torch.float64
    torch.testing.assert_close(run.logits, logits, **CLOSE)
    torch.testing.assert_close(run.losses, -expected, **CLOSE)
    scores = torch.tensor([score for _, score in both.ours.score(TEXT)], dtype=torch.float64)
    torch.testing.assert_close(scores, expected, **CLOSE)
    nats = both.ours.evaluate(TEXT).figures()["nats_per_token"]
    assert nats == pytest.approx(-float(expected.mean()), rel=1e-10)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_a_gradient_of_the_loss_is_its_derivative(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "model")
    model = load(tmp_path / "model", device="cpu", dtype="float64")
    run = model.run(TEXT, grad=True)
    gradient = run.gradient("1.1", "z")
    assert gradient.dtype == torch.float64
    draw = torch.Generator().manual_seed(0)
    step = torch.randn(gradient.shape, generator=draw, dtype=torch.float64)

    def loss(by: float) -> float:
        return float(model.edit("1.1", "z", lambda z: z + by * step).run(TEXT).loss)

    # Of the fourth order; float32 on the way would leave an error of 1e-4.
    h = 1e-3
    slope = (8 * (loss(h) - loss(-h)) - (loss(2 * h) - loss(-2 * h))) / (12 * h)
    assert float((gradient * step).sum()) == pytest.approx(slope, rel=1e-8, abs=1e-10)


def test_a_sweep_and_a_patch_keep_every_figure(both: Both) -> None:
    found = both.ours.sweep(TEXT, OTHER, lambda run: run.loss)
    assert found.values.dtype == torch.float64
    _, clean = log_probs(both, TEXT)
    _, corrupted = log_probs(both, OTHER)
    torch.testing.assert_close(found.clean, -clean.mean()[None], **CLOSE)
    torch.testing.assert_close(found.corrupted, -corrupted.mean()[None], **CLOSE)
    run = both.ours.run(TEXT)
    for head, values in zip(found.heads, found.values, strict=True):
        own = both.ours.patch(head, run, "z").run(OTHER).loss
        torch.testing.assert_close(values, own[None], **CLOSE)


def test_weights_of_attention_are_those_of_transformers_in_float64(both: Both) -> None:
    run = both.ours.run(TEXT)
    with torch.no_grad():
        of_layers = both.theirs(torch.tensor([run.ids]), output_attentions=True, use_cache=False).attentions
    for layer, weights in enumerate(of_layers):
        for head in range(4):
            torch.testing.assert_close(run[layer, head].weights, weights[0, head], **CLOSE)
        steps = both.ours.attend(TEXT).steps(layer, 1)
        torch.testing.assert_close(torch.as_tensor(steps.weights), weights[0, 1, -1], **CLOSE)
