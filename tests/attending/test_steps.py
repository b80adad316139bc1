"""One row of attention step by step: the steps add up, and say what the model computes."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from attending.models import language_model
from attending.tiny_readers import language_reader, pair_reader
from checkpoints.oracle import saved
from checkpoints.tiny_models import TINY
from checkpoints.tiny_translators import write_tokenizer
from triptych import UsageError, load
from triptych.core.attention.projections import PARAMETERISATIONS
from triptych.seeing.attending import Attention, attend
from triptych.seeing.attending.head_steps import HeadSteps
from triptych.seeing.attending.over import attend_over

TEXT = "to be or not to be"
WORDS = "w4 w9 w5 w9 w6 w30 w31"
# Learned positions; soft caps, windows and sandwiches; sinks; latents; ALiBi; one norm after; scores by
# distance; two stacks with T5's numbers.
IN_EVERY_RUN = ("gpt2", "gemma2", "gpt_oss", "deepseek_v3", "bloom", "bert", "deberta-v2", "t5")
HEADS = {"bert": "BertForMaskedLM", "deberta-v2": "DebertaV2ForMaskedLM"}


# By which sums over heads may differ from what the layer computes, of its largest output or of 1.
MOST = {"projected": 1e-6, "weights": 2e-6, "output": 2e-6, "z": 1e-5}
# By step, layer and row.
Differences = dict[tuple[str, str, int], float]


def differences(attention: Attention, rows: tuple[int, ...] = (0, 3, -1)) -> Differences:
    """What the heads of every layer add up to, against the layer with its own kernels.

    The heads and the output bias against the layer's output, the weights of head 0, what is added to the
    stream, and the shares of the keys against z.
    """
    found = {}
    for stack in attention.stacks:
        for layer in stack.layers:
            call = layer.call
            with torch.no_grad():
                expected = call.layer(
                    call.x, memory=call.memory, mask=call.mask, causal=call.causal, positions=call.positions
                ).output[0]
                added = call.site.residual.added(expected)
                nothing = call.site.residual.added(torch.zeros_like(expected))
            bias = call.layer.weights().o_bias
            place = f"{stack.kind}.{layer.number}"
            scale = max(1.0, float(expected.abs().max()))
            for row in rows:
                steps = [attention.steps(place, head, query=row) for head in range(layer.num_heads)]
                total = torch.stack([one.projected for one in steps]).sum(dim=0)
                total = total if bias is None else total + bias
                pairs = {
                    "projected": [(total / scale, expected[row] / scale)],
                    "weights": [(steps[0].weights + 0, attention[place, 0][row])],
                    "z": [(one.shares.sum(dim=0), one.z) for one in steps],
                }
                if bias is None:
                    parts = torch.stack([one.output for one in steps]).sum(dim=0)
                    pairs["output"] = [(parts / scale, (added - nothing)[row] / scale)]
                for step, values in pairs.items():
                    apart = [float((one - other).abs().max()) for one, other in values]
                    found[step, place, row] = max(apart)
    return found


def beyond(found: Differences) -> Differences:
    """The differences that are larger than rounding."""
    return {place: apart for place, apart in found.items() if not apart <= MOST[place[0]]}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", IN_EVERY_RUN)
def test_heads_and_bias_add_up_to_the_output_of_the_layer(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tiny = TINY[name]
    model_class = getattr(transformers, HEADS.get(name, tiny.model))
    saved(model_class, lambda: tiny.configured(), tmp_path)
    write_tokenizer(tmp_path)
    model = load(tmp_path, dtype=torch.float32)
    two = "translate" in model.can or name.startswith("t5")
    attention = model.attend(WORDS, target=WORDS if two else None)
    found = differences(attention)
    assert {step for step, *_ in found} >= {"projected", "weights", "z"}
    assert beyond(found) == {}


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_heads_add_up_under_every_parameterisation(name: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"latent": {"d_latent": 6}, "grouped": {"num_kv_heads": 2}}.get(name, {})
    opened = language_model(tmp_path, positions="none", attention={"projections": name, **more})
    assert beyond(differences(attend(opened, TEXT))) == {}


def test_gates_and_alibi_add_up(tmp_path: Path) -> None:
    opened = language_model(tmp_path, positions="alibi", attention={"output_gate": True, "qk_norm": True})
    for parameter in opened.model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    attention = attend(opened, TEXT)
    assert beyond(differences(attention)) == {}
    steps = attention.steps(1, 2, query=5)
    assert steps.gate is not None
    assert 0 < steps.gate < 1
    assert steps.biased is not None
    assert float(steps.biased[5]) == float(steps.scaled[5])
    assert float(steps.biased[4]) < float(steps.scaled[4])


def test_the_products_before_positions_are_those_at_the_queries_own_place(tmp_path: Path) -> None:
    steps = attend(language_model(tmp_path), TEXT).steps(1, 0, query=6)
    assert steps.content is not None
    torch.testing.assert_close(steps.content[6], steps.products[6], rtol=0, atol=1e-5)
    assert float((steps.content - steps.products).abs().max()) > 1e-3
    assert steps.visible.tolist() == [True] * 7 + [False] * 11


@torch.no_grad()
def test_the_direct_effect_is_that_of_the_last_norm_and_the_table_under_pre_norm(tmp_path: Path) -> None:
    reader = language_model(tmp_path, norm="pre")
    model: Any = reader.model
    attention = attend(reader, TEXT)
    stream = reader.run(reader.encode([TEXT]), residuals=True).residuals["decoder"][-1][0, 4]
    for layer in (0, 1):
        steps = attention.steps(layer, 1, query=4)
        expected = model.head(model.final_norm(stream)) - model.head(model.final_norm(stream - steps.output))
        assert steps.effect is not None
        torch.testing.assert_close(steps.effect.logits, expected, rtol=0, atol=1e-5)
        assert float(steps.effect.probabilities.sum()) == pytest.approx(0, abs=1e-5)


@torch.no_grad()
def test_the_direct_effect_goes_through_the_norms_of_the_stream_under_post_norm() -> None:
    reader = pair_reader()
    model: Any = reader.model
    attention = attend(reader, "the cat sat", target="a dog ran")
    steps = attention.steps("cross.1", 2, query=1)
    block = model.decoder.blocks[1]
    found: dict[str, torch.Tensor] = {}
    hooks = (
        block.feed_forward.register_forward_hook(lambda module, given, made: found.update(fed=made)),
        block.cross_residual.norm.register_forward_hook(lambda m, given, made: found.update(total=given[0])),
    )
    reader.run(reader.encode(["the cat sat"], ["a dog ran"]))
    for hook in hooks:
        hook.remove()
    logits = []
    for part in (0, steps.projected):
        x = block.cross_residual.norm(found["total"][0, 1] - part)
        x = block.feed_forward_residual.norm(x + found["fed"][0, 1])
        logits.append(reader.logits(model.decoder.final_norm(x)))
    assert steps.effect is not None
    torch.testing.assert_close(steps.effect.logits, logits[0] - logits[1], rtol=0, atol=1e-5)
    assert attention.steps("encoder.1", 0).effect is None


def test_one_row_is_computed_without_the_others(tmp_path: Path) -> None:
    attention = attend(language_model(tmp_path), TEXT)
    call = attention.weights.layers[1].call
    with torch.no_grad():
        whole, row = call.steps(), call.steps(5)
    assert row.products.shape[2] == row.output.shape[1] == 1
    for name in ("q", "products", "scores", "weights", "z"):
        one = getattr(whole, name)[:, :, 5:6]
        torch.testing.assert_close(getattr(row, name), one, rtol=0, atol=1e-6)
    torch.testing.assert_close(row.output, whole.output[:, 5:6], rtol=0, atol=1e-6)


def test_steps_show_what_an_edit_makes_of_them() -> None:
    reader = language_reader()
    before = attend(reader, "the cat sat on the mat").steps(0, 1, query=4)

    def tap(name: str, value: torch.Tensor, first: int | None) -> torch.Tensor:
        return torch.zeros_like(value) if name == "scores" else value

    reader.model.blocks[0].self_attention.tap = tap
    after = attend(reader, "the cat sat on the mat").steps(0, 1, query=4)
    assert after.weights[:5].tolist() == pytest.approx([0.2] * 5)
    assert before.weights[:5].tolist() != pytest.approx([0.2] * 5)
    # One query of an edited layer is a row of the whole, here as in the figures over a text.
    call = attend(reader, "the cat sat on the mat").weights.layers[0].call
    with torch.no_grad():
        whole, row = call.steps(), call.steps(4)
        assert row.products.shape[2] == row.output.shape[1] == 1
        for name in ("q", "products", "scores", "visible", "weights", "z"):
            assert torch.equal(getattr(row, name), getattr(whole, name)[:, :, 4:5]), name
        assert torch.equal(row.output, whole.output[:, 4:5])
        assert torch.equal(call.queries_and_keys().weights(), whole.weights)
        assert torch.equal(call.queries_and_keys().weights(slice(2, 4), [1]), whole.weights[:, [1], 2:4])


def test_figures_over_a_text_are_those_of_the_edited_model() -> None:
    reader = language_reader()
    for block in reader.model.blocks:
        block.self_attention.tap = lambda name, value, first: value * 0.0 if name == "scores" else value
    for layer in attend_over(reader, ["the cat sat on the mat"] * 3).layers:
        for name, figure in layer.figures.items():
            if figure.count and figure.even is not None:
                assert figure.value.tolist() == pytest.approx([figure.even] * layer.num_heads, abs=1e-6), name


def of_a_decoder() -> HeadSteps:
    return attend(language_reader("rotary"), "the cat sat on the mat").steps("0", 1, query=-2)


def test_a_repr_has_at_most_eight_lines_and_a_page_and_a_record_have_the_steps(tmp_path: Path) -> None:
    steps = of_a_decoder()
    for shown in (steps, steps.k, steps.weights, steps.effect):
        assert len(repr(shown).splitlines()) <= 8
    assert steps.weights.tokens == steps.keys
    assert type(steps.weights * 2) is torch.Tensor
    assert "<table>" in steps._repr_html_()
    steps.page(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert "share of output" in page
    assert "Direct effect on the next token" in page
    record = json.loads(json.dumps(steps.record()))
    assert record["weights"] == steps.weights.tolist()
    assert record["head"] == "0.1"
    assert len(record["direct_effect"]["raises"]) == 8


def test_places_are_spelled_as_everywhere_and_others_are_refused() -> None:
    attention = attend(pair_reader(), "the cat sat", target="a dog ran")
    assert torch.equal(attention["cross.1.2"], attention["cross.1", 2])
    assert torch.equal(attention["cross.1"][2], attention["cross.1", 2])
    one = attend(language_reader(), "the cat sat")
    assert torch.equal(one["1.3"], one[1, 3])
    assert torch.equal(one["decoder.1"], one[1])
    for wrong, message in (
        (lambda: attention["1.2"], r"layer 1 could be encoder\.1, decoder\.1, cross\.1"),
        (lambda: one["1.4"], "layer 1 has no head 4"),
        (lambda: one["x"], '"x" is not a place in a model'),
        (lambda: one["cross.1"], r"has no layer cross\.1"),
        (lambda: one.steps(1, 0, query=99), "there is no token 99"),
    ):
        with pytest.raises(UsageError, match=message):
            wrong()
