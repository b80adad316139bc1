"""Training in bfloat16: the twin computes, the float32 model is what is learned."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import triptych
from tiny_recipe import tiny_recipe
from training.ranks import language
from triptych.core.models import DecoderConfig, EncoderConfig, EncoderDecoder, ModelConfig
from triptych.training import read_recipe, resolve
from triptych.training.computing import Whole
from triptych.training.losses import output_loss
from triptych.training.precision import NarrowTwin

SRC = torch.tensor([[4, 5, 6, 2, 0, 0], [7, 8, 9, 10, 11, 2], [3, 2, 0, 0, 0, 0]])
TGT_IN = torch.tensor([[1, 6, 5, 4], [1, 11, 10, 9], [1, 3, 3, 0]])
TGT_OUT = torch.tensor([[6, 5, 4, 2], [11, 10, 9, 2], [3, 3, 2, 0]])
TIES = ("all", "target", "none")


def make_model(tie: str = "all", norm: str = "post", seed: int = 2, num_layers: int = 2) -> EncoderDecoder:
    torch.manual_seed(seed)
    config = ModelConfig(
        d_model=32,
        d_ff=64,
        num_heads=4,
        dropout=0.0,
        norm=norm,
        tie_embeddings=tie,
        encoder=EncoderConfig(num_layers=num_layers),
        decoder=DecoderConfig(num_layers=num_layers),
    )
    return EncoderDecoder.of(config, 12, 12)


def loss_of(model: EncoderDecoder) -> Tensor:
    x = model.decode(TGT_IN, model.encode(SRC), model.memory_mask(SRC))
    real = TGT_OUT != 0
    return output_loss(x[real], model.head.output.weight, TGT_OUT[real], 0.1).smoothed


def gradients_of(model: EncoderDecoder) -> Tensor:
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


@pytest.mark.parametrize("tie", TIES)
def test_the_twin_holds_the_weights_rounded_and_shares_the_tables(tie: str) -> None:
    model = make_model(tie)
    twin = NarrowTwin(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1)
    twin.follow()
    assert twin.model.decoder.embeddings.table.weight is model.decoder.embeddings.table.weight
    assert twin.model.encoder.embeddings.table.weight is model.encoder.embeddings.table.weight
    assert (twin.model.head.output.weight is twin.model.decoder.embeddings.table.weight) == (tie != "none")
    rounded = 0
    for own, master in zip(twin.model.parameters(), model.parameters(), strict=True):
        assert torch.equal(own, master.to(own.dtype))
        rounded += own.dtype == torch.bfloat16
    assert rounded >= 40
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("tie", "norm"), [("all", "pre"), ("target", "post"), ("none", "pre")])
def test_gradients_are_not_much_further_from_float32_than_with_autocast(tie: str, norm: str) -> None:
    errors, by_autocast, sizes = [], [], []
    for seed in range(8):  # one draw alone may be off by either factor
        exact, cast, model = (make_model(tie, norm, seed) for _ in range(3))
        twin = NarrowTwin(model)
        twin.follow()
        expected, loss = loss_of(exact), loss_of(twin.model)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            of_cast = loss_of(cast)
        assert loss.item() == pytest.approx(expected.item(), rel=0.02)
        assert loss.item() != expected.item()  # it was bfloat16 that computed
        for one in (expected, loss, of_cast):
            one.backward()  # type: ignore[no-untyped-call]
        twin.hand_over_gradients()
        reference = gradients_of(exact)
        errors.append((gradients_of(model) - reference).norm())
        by_autocast.append((gradients_of(cast) - reference).norm())
        sizes.append(reference.norm())
        assert errors[-1] < 0.1 * sizes[-1]
        assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {
            torch.float32
        }
    # The residual stream itself is rounded, which autocast leaves in float32.
    assert sum(errors) < 2.5 * sum(by_autocast)


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
def test_the_twin_of_a_language_model_gives_the_gradients_of_float32(kind: str) -> None:
    found = []
    for precision in ("fp32", "bf16"):
        torch.manual_seed(2)
        objective = language(kind)
        computing = Whole(objective, precision)
        computing.set_mode(training=True)
        batch = objective.train.collate(np.arange(5))
        computing.learn(batch, 1, batch.num_target_tokens, last=True)
        weights = objective.model.parameters()
        found.append(torch.cat([w.grad.flatten() for w in weights if w.grad is not None]))
    exact, rounded = found
    assert exact.shape == rounded.shape
    assert 0 < (rounded - exact).norm() < 0.1 * exact.norm()


def test_gradients_of_several_batches_are_added_up_in_float32() -> None:
    model = make_model()
    twin = NarrowTwin(model)
    twin.follow()
    weight = model.encoder.blocks[0].feed_forward.inner.weight
    sums = []
    for _ in range(3):
        loss_of(twin.model).backward()  # type: ignore[no-untyped-call]
        twin.hand_over_gradients()
        assert weight.grad is not None
        sums.append(weight.grad.clone())
    assert torch.equal(sums[1], sums[0] * 2)
    assert torch.equal(sums[2], sums[0] * 3)  # a multiple that bfloat16 would have to round
    assert not torch.equal(sums[2], sums[2].bfloat16().float())


# The type checks of the tests cannot be traced, so this runs without them.
COMPILED = """
import sys, torch
sys.path.insert(0, {tests!r})
from training.test_precision import loss_of, make_model
from triptych import thresholds
from triptych.training.machine import compile_blocks
from triptych.training.precision import NarrowTwin
models = [make_model(num_layers=1), make_model(num_layers=1)]
if {narrow}:
    thresholds.ONE_PRODUCT_ON = {{"cpu"}}  # as on a GPU
    twins = [NarrowTwin(model) for model in models]
    for twin in twins:
        twin.follow()
    models = [twin.model for twin in twins]
# Traced and differentiated, but no code generated.
compile_blocks(models[1].decoder.blocks, torch.device("cpu"), backend="aot_eager")
losses = [loss_of(model) for model in models]
weights = [model.decoder.blocks[0].feed_forward.inner.weight for model in models]
gradients = [torch.autograd.grad(*pair)[0].float() for pair in zip(losses, weights)]
assert models[1].state_dict().keys() == models[0].state_dict().keys()
assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1  # a block is whole
print(float((losses[1] - losses[0]).detach().abs() / losses[0].detach()))
print(float((gradients[1] - gradients[0]).norm() / gradients[0].norm()))
"""


@pytest.mark.slow
@pytest.mark.parametrize("narrow", [False, True])
def test_compiled_blocks_compute_the_same(narrow: bool) -> None:
    script = COMPILED.format(tests=str(Path(__file__).parents[1]), narrow=narrow)
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    of_loss, of_gradient = map(float, ran.stdout.split())
    assert of_loss < (2e-2 if narrow else 1e-6)
    assert of_gradient < (5e-2 if narrow else 1e-5)


@pytest.mark.parametrize(
    ("asked", "is_fast", "computed"),
    [
        ("auto", True, "bf16"),
        ("auto", False, "fp32"),
        ("bf16", True, "bf16"),
        ("bf16", False, "bf16"),
    ],
)
def test_a_run_computes_in_what_its_processor_has_or_says_that_it_is_slow(
    asked: str,
    is_fast: bool,
    computed: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for place in ("choices", "runs"):
        monkeypatch.setattr(f"triptych.training.{place}.has_fast_bf16", lambda kind: is_fast)
    recipe = resolve(tiny_recipe(training={"max_steps": 1, "precision": asked, "threads": 1}))
    triptych.train(recipe, tmp_path / "run")
    said = capsys.readouterr().err
    assert f"threads, {computed}, cpu" in said
    assert ("no products in bfloat16" in said) == (computed == "bf16" and not is_fast)
    assert read_recipe(tmp_path / "run" / "recipe.toml").training.precision == computed
