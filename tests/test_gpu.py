"""On a GPU: what a processor computes, through the paths that only a GPU takes."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from decoding.plain_search import plain_search, search
from decoding.test_engine import BOS, EOS, PAD, RULES, SOURCES, assert_alike, make_model, pad
from face.tiny import write_checkpoint
from heads import D_MODEL, make_layer
from interrupting import SignalAt, assert_same_run
from tiny_recipe import tiny_recipe
from tolerances import assert_same
from triptych import UsageError, load
from triptych.core.attention import attention
from triptych.core.attention.projections import PARAMETERISATIONS
from triptych.running.decoding import Engine, SearchOptions
from triptych.training import resolve, runs
from triptych.training.metrics import read_metrics
from triptych.training.progress import LineDisplay

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TEXTS = ["two young men are playing", "a dog", "the old woman is sitting on a bench and reads"]
GIVEN = ["no mask", "causal", "padding", "bias", "soft cap", "sinks"]
HEADS = {"one to one": (4, 4, 8, 8), "grouped": (2, 2, 8, 8), "unlike": (2, 4, 8, 8), "wide": (4, 4, 8, 24)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("query_len", [1, 40])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("given", GIVEN)
def test_attention_and_its_gradients(given: str, heads: str, query_len: int, dtype: torch.dtype) -> None:
    key_heads, value_heads, d_k, d_v = HEADS[heads]
    shapes = [(3, 4, query_len, d_k), (3, key_heads, 40, d_k), (3, value_heads, 40, d_v)]
    inputs = [torch.randn(shape, dtype=dtype) for shape in shapes]
    options: dict[str, Any] = {"causal": given == "causal"}
    if given == "padding":
        options["mask"] = (torch.arange(40) < torch.tensor([40, 13, 1])[:, None])[:, None, None]
    elif given == "bias":
        options["bias"] = torch.randn(4, query_len, 40, dtype=dtype)
    elif given == "soft cap":
        options["soft_cap"] = 3.0
    elif given == "sinks":
        options["sinks"] = torch.randn(4, dtype=dtype)

    def computed(path: Any, **to: Any) -> tuple[Tensor, Tensor]:
        there = {
            name: value.to(**({"device": to["device"]} if value.dtype == torch.bool else to))
            if isinstance(value, Tensor)
            else value
            for name, value in options.items()
        }
        moved = [x.to(**to).requires_grad_() for x in inputs]
        output = attention(*moved, **there, path=path).output
        gradients = torch.autograd.grad(output.double().square().sum(), moved)
        # A kernel rounds to the size of the numbers that it subtracts for the gradient of one query.
        return output.cpu(), torch.cat([gradient.flatten() for gradient in gradients]).cpu()

    exact = computed("reference", device="cpu", dtype=torch.float64)
    for kind, found, expected in zip(
        ("output", "gradient"), computed("auto", device="cuda"), exact, strict=True
    ):
        assert_same(found, expected.to(dtype), kind=kind)


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_layers_of_every_parameterisation(name: str) -> None:
    layer, x = make_layer(name, biased=True), torch.randn(2, 7, D_MODEL, dtype=torch.float64)
    expected = layer(x, causal=True)
    there = layer.cuda()(x.cuda(), causal=True)
    assert_same(getattr(there, "output", there).cpu(), getattr(expected, "output", expected), kind="output")


@pytest.mark.parametrize("beam_size", [1, 4])
@pytest.mark.parametrize("projections", ["factored", "grouped", "stacked", "differential"])
def test_recorded_steps_search_as_the_modules_do(projections: str, beam_size: int) -> None:
    model, src = make_model(projections).cuda(), pad(SOURCES).cuda()
    # Past the first room of the cache, where the steps are recorded again.
    options = SearchOptions(beam_size=beam_size, num_best=beam_size, max_extra_tokens=70)
    engine = Engine(model, never=(PAD, BOS))
    assert engine.fixed
    fast = search(engine, src, options, RULES)
    assert_alike(fast, plain_search(model, src, options, BOS, EOS))


@pytest.mark.parametrize("name", ["marian", "t5"])
def test_translations(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "model")
    for options in ({"beam_size": 1}, {"beam_size": 3, "num_best": 2}):
        found, expected = (
            load(tmp_path / "model", device=device).translate(TEXTS, **options) for device in ("cuda", "cpu")
        )
        assert [one.text for one in found] == [one.text for one in expected]
        scores = [[each.score for one in of for each in one.candidates] for of in (found, expected)]
        assert scores[0] == pytest.approx(scores[1], rel=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_generated_texts_and_what_reads_them(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path / "model")
    here, there = (load(tmp_path / "model", device=device) for device in ("cpu", "cuda"))
    for options in ({}, {"beam_size": 3}):
        texts = [
            [one.text for one in model.generate(TEXTS, max_new_tokens=9, **options)]
            for model in (here, there)
        ]
        assert texts[0] == texts[1]
    sampled = [
        [one.text for one in there.generate(TEXTS, max_new_tokens=9, temperature=1.0, seed=3)]
        for _ in range(2)
    ]
    assert sampled[0] == sampled[1]
    one, other = here.run(TEXTS[2]), there.run(TEXTS[2])
    torch.testing.assert_close(other.logits.cpu(), one.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(other["1.0"].weights.cpu(), one["1.0"].weights, rtol=1e-4, atol=1e-5)
    ablated = [float(model.ablate("1.0").run(TEXTS[2]).loss) for model in (here, there)]
    patched = [float(model.patch("1.1", model.run(TEXTS[0])).run(TEXTS[2]).loss) for model in (here, there)]
    assert ablated[0] == pytest.approx(ablated[1], rel=1e-4)
    assert patched[0] == pytest.approx(patched[1], rel=1e-4)
    with pytest.raises(UsageError, match="int8"):
        load(tmp_path / "model", device="cuda", precision="int8").generate(TEXTS)


def recipe(dropout: float = 0.1, **training: object) -> Any:
    rates = {"warmup_steps": 3, "learning_rate": 0.01, "save_every_steps": 3, "log_every_steps": 1}
    return resolve(
        tiny_recipe(
            100,
            12,
            model={"dropout": dropout, "encoder": {"num_layers": 1, "attention": {"dropout": dropout}}},
            training={"max_steps": 9, "batch_tokens": 400, **rates, **training},
            validation={"every_steps": 4, "max_sentences": 3},
        )
    )


def losses(folder: Path) -> list[float]:
    return [float(record["loss"]) for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16"}, {"precision": "bf16", "compile": True}], ids=str
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch._inductor
def test_training_learns_and_goes_on_after_a_signal_to_the_same_bits(
    options: dict[str, Any], tmp_path: Path
) -> None:
    runs.train(recipe(device="cuda", **options), tmp_path / "whole", LineDisplay())
    found = losses(tmp_path / "whole")
    assert found[-1] < found[0]
    runs.train(recipe(device="cuda", **options), tmp_path / "cut", SignalAt(5, signal.SIGTERM))
    runs.resume(tmp_path / "cut", (), LineDisplay())
    assert_same_run(tmp_path / "cut", tmp_path / "whole")


def test_training_without_dropout_follows_the_processor(tmp_path: Path) -> None:
    for device in ("cuda", "cpu"):
        runs.train(recipe(0.0, device=device), tmp_path / device, LineDisplay())
    assert losses(tmp_path / "cuda") == pytest.approx(losses(tmp_path / "cpu"), rel=1e-3)
