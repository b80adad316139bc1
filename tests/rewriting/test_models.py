"""Rewrites lifted to layers and whole models."""

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import triptych
from decoding.plain_search import search
from heads import with_semantics
from tolerances import assert_same
from triptych import EncoderDecoder, ModelConfig, MultiHeadAttention
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.semantics import HeadGate, HeadNorm, Temperature
from triptych.core.algebra.weights import Norm
from triptych.core.attention import PARAMETERISATIONS, LayerCache, RotaryPositions, Stacked
from triptych.core.attention.requirements import HELD
from triptych.core.models import (
    LanguageModel,
    LanguageModelConfig,
    attention_sites,
    attention_weights,
    find_config,
    read_model,
    with_attention,
    write_model,
)
from triptych.rewriting import functions as rewrites
from triptych.running.decoding import Engine, SearchOptions
from triptych.running.text import OutputRules

VOCAB, PAD, BOS, EOS = 40, 0, 1, 2
RULES = OutputRules((BOS,), EOS, (PAD, BOS))
BIASES = {"q_bias": True, "k_bias": True, "v_bias": True, "o_bias": True}


def changed(name: str, target: Any, **options: Any) -> Any:
    """Weights, a layer or a model after one function of weights."""
    return triptych.rewrite(target, partial(getattr(rewrites, name), **options)).result


LIFTED: dict[str, Callable[[Any], Any]] = {
    "fold": partial(changed, "fold"),
    "fold, whatever it costs": partial(changed, "fold", keep="folded"),
    "factor": partial(changed, "factor"),
    "expand": partial(changed, "expand"),
    "gauge_fix": partial(changed, "gauge_fix"),
    "drop_key_bias": partial(changed, "drop_key_bias"),
    "fold_value_bias": partial(changed, "fold_value_bias"),
    "fold_norm": partial(changed, "fold_norm"),
    "permute_heads": partial(changed, "permute_heads", order=[2, 3, 1, 0]),
    "repeat_kv_heads": partial(changed, "repeat_kv_heads"),
    "to_latent": partial(changed, "to_latent"),
}
# What each of these may rightly refuse on some of the models below, and why.
REFUSED = {
    ("factor", "mixed"): "the form is a product already",
    ("factor", "tied"): "the form is a product already",
    ("gauge_fix", "one matrix"): "no gauge",
    ("to_latent", "one matrix"): "the input itself",
}


def make_model(kind: str, norm: str = "pre", **changes: Any) -> EncoderDecoder:
    sites = {
        "mixed": (
            {"projections": "stacked", **BIASES, "first_bias": True},
            {"projections": "grouped", "num_kv_heads": 2, **BIASES},
            {"projections": "four_matrix", **BIASES},
        ),
        "tied": (
            {"projections": "symmetric", "qk_bias": True, "v_bias": True},
            {"projections": "key_value", "q_bias": True, "kv_bias": True, "o_bias": True},
            {"projections": "shared", "qkv_bias": True},
        ),
        "one matrix": (
            {"projections": "bilinear", "q_bias": True, "v_bias": True},
            {"projections": "bilinear"},
            {"projections": "bilinear", "o_bias": True},
        ),
    }[kind]
    tree = {
        **{"d_model": 24, "d_ff": 32, "num_heads": 4, "norm": norm, "dropout": 0.0},
        "encoder": {"num_layers": 2, "attention": sites[0]},
        "decoder": {"num_layers": 2, "attention": sites[1], "cross_attention": sites[2]},
        **changes,
    }
    model = EncoderDecoder.of(ModelConfig.model_validate(tree), VOCAB, VOCAB, PAD).eval()
    for name, parameter in model.named_parameters():  # biases and norms that do something
        if "bias" in name or "norm" in name:
            nn.init.normal_(parameter, mean=float("norm.weight" in name), std=0.3)
    return model


def make_language_model(attention: dict[str, Any], **changes: Any) -> LanguageModel:
    tree = {"d_model": 24, "d_ff": 32, "num_heads": 4, "attention": attention, **changes}
    return LanguageModel.of(LanguageModelConfig.model_validate(tree), "decoder", VOCAB)


def sentences() -> tuple[Tensor, Tensor]:
    src, tgt_in = torch.randint(3, VOCAB, (3, 7)), torch.randint(3, VOCAB, (3, 6))
    src[1, 5:], src[:, 0] = PAD, 5
    tgt_in[:, 0] = BOS
    return src, tgt_in


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", ["mixed", "tied", "one matrix"])
@pytest.mark.parametrize("name", LIFTED)
def test_a_rewritten_model_computes_the_same(name: str, kind: str) -> None:
    model = make_model(kind).double()
    src, tgt_in = sentences()
    expected = model(src, tgt_in).detach()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    if (name, kind) in REFUSED:
        with pytest.raises(RewriteRefusedError, match=REFUSED[name, kind]):
            LIFTED[name](model)
        return
    new = LIFTED[name](model)
    assert not new.training
    atol = 1e-10 * float(expected.abs().max())
    torch.testing.assert_close(new(src, tgt_in), expected, rtol=1e-10, atol=atol)
    for key, value in model.state_dict().items():
        assert_same(value, before[key], kind="exact")
    own = {parameter.data_ptr() for parameter in model.parameters()}
    assert not own & {parameter.data_ptr() for parameter in new.parameters()}


@pytest.mark.parametrize("name", ["fold", "permute_heads", "fold_norm", "repeat_kv_heads"])
def test_norms_of_queries_and_keys_and_gates_stay_with_a_rewritten_model(name: str) -> None:
    attention = {"projections": "stacked", "qk_norm": True, "output_gate": True}
    if name == "repeat_kv_heads":
        attention |= {"projections": "grouped", "num_kv_heads": 2}
    model = make_language_model(attention, num_layers=2, norm_kind="rms").double()
    for parameter_name, parameter in model.named_parameters():
        if "gate" in parameter_name or "norm" in parameter_name:
            nn.init.normal_(parameter, mean=float("norm" in parameter_name), std=0.3)
    ids = torch.randint(VOCAB, (2, 9))
    new = LIFTED[name](model)
    assert find_config(new).attention.qk_norm
    assert find_config(new).attention.output_gate
    assert_same(new(ids).logits, model(ids).logits, kind="output")


def test_a_scale_that_no_query_map_can_take_up_stays_in_a_models_layer() -> None:
    model = make_language_model({"qk_norm": True}, num_layers=1)
    weights = attention_weights(model)["decoder.0"]
    other = replace(weights, semantics=replace(weights.semantics, scale=weights.scale * 3))
    one_norm = replace(weights, semantics=replace(weights.semantics, k_norm=None))
    for given in (other, one_norm):
        new = with_attention(model, {"decoder.0": given})
        held = attention_weights(new)["decoder.0"].semantics
        assert held.scale == given.scale
        assert (held.k_norm is None) == (given.semantics.k_norm is None)
        with pytest.raises(ValueError, match="no recipe describes the model"):
            find_config(new)


def test_a_gate_of_other_heads_makes_no_layer() -> None:
    weights, gate = MultiHeadAttention(8, 2).weights(), HeadGate(torch.zeros(1, 8))
    with pytest.raises(ValueError, match="a gate on the output of each head: there are numbers for 1 heads"):
        MultiHeadAttention.from_weights(replace(weights, semantics=replace(weights.semantics, gate=gate)))


def test_gates_that_are_no_numbers_are_refused_by_name() -> None:
    layer = MultiHeadAttention(8, 2, output_gate=True)
    with torch.no_grad():
        layer.gate_weight[1, 3] = float("nan")
    with pytest.raises(RewriteRefusedError, match="1 of 16 numbers in gate_weight are NaN or infinite"):
        changed("fold", layer)


def test_a_folded_model_decodes_the_same_translations_with_fewer_parameters() -> None:
    model = make_model("mixed")
    src, _ = sentences()
    options = SearchOptions(beam_size=3, num_best=2)
    folded = changed("fold", model)
    old, new = (
        [[found.ids for found in hypotheses] for hypotheses in search(Engine(m), src, options, RULES)]
        for m in (model, folded)
    )
    assert new == old
    assert sum(p.numel() for p in folded.parameters()) < sum(p.numel() for p in model.parameters())
    assert find_config(folded).encoder.attention.projections == "factored"
    assert find_config(folded).decoder.cross_attention.projections == "factored"
    assert find_config(folded).decoder.attention.projections == "grouped"


def test_a_rewritten_model_is_saved_and_read_like_any_other(tmp_path: Any) -> None:
    folded = triptych.rewrite(make_model("mixed"), rewrites.fold, sites=["encoder.1"]).result
    assert find_config(folded).sites("encoder")[0].projections == "stacked"
    assert find_config(folded).sites("encoder")[1].projections == "factored"
    write_model(folded, tmp_path)
    again = read_model(tmp_path)
    assert find_config(again) == find_config(folded)
    src, tgt_in = sentences()
    assert_same(again(src, tgt_in), folded(src, tgt_in), kind="exact")


def test_every_site_has_its_records_in_the_order_of_the_steps() -> None:
    outcome = triptych.rewrite(make_model("mixed"), rewrites.drop_key_bias, rewrites.fold)
    assert set(outcome.records) == {f"{at}.{i}" for at in ("encoder", "decoder", "cross") for i in range(2)}
    for records in outcome.records.values():
        assert [record.name for record in records] == ["drop_key_bias", "fold"]
    first = outcome.records["encoder.0"][1]
    assert first.after.parameters < first.before.parameters
    assert "parameters" in first.choice


def test_a_refusal_names_the_site() -> None:
    model = make_model("mixed", positions={"scheme": "rotary"})
    with pytest.raises(RewriteRefusedError, match=r"drop_key_bias at encoder\.0 refused: .*rotary"):
        changed("drop_key_bias", model)
    done = triptych.rewrite(model, rewrites.drop_key_bias, sites=["cross.0"])
    assert find_config(done.result).decoder.cross_attention_in_layer


def test_folded_norms_have_gain_one_and_no_shift() -> None:
    folded = changed("fold_norm", make_model("mixed"))
    norms = [site.residual.norm for site in attention_sites(folded)] + [folded.encoder.final_norm]
    for norm in norms:
        assert (norm.weight == 1).all()
        assert (norm.bias == 0).all()
    others = [block.feed_forward_residual.norm for block in (*folded.encoder.blocks, *folded.decoder.blocks)]
    assert all((norm.weight != 1).any() for norm in [*others, folded.decoder.final_norm])


def test_the_norm_of_the_memory_is_folded_everywhere_or_nowhere() -> None:
    with pytest.raises(RewriteRefusedError, match=r"cross\.1 read the encoder's last norm too"):
        triptych.rewrite(make_model("mixed"), rewrites.fold_norm, sites=["cross.0"])


def test_a_value_bias_stays_while_attention_weights_are_dropped() -> None:
    site = {"projections": "factored", "v_bias": True, "dropout": 0.2}
    model = make_model("mixed", encoder={"num_layers": 1, "attention": site})
    assert not find_config(changed("fold_value_bias", model)).encoder.attention.options.get("v_bias")
    with pytest.raises(RewriteRefusedError, match=r"encoder\.0 .*dropout"):
        changed("fold_value_bias", model.train())


CALLS = {
    "fold": "fold(keep='folded')",
    "drop_key_bias": "drop_key_bias",
    "permute_heads": "permute_heads(order=[2, 3, 0, 1])",
    "truncate": "truncate(rank=5)",
    "to_latent": "to_latent",
}


@pytest.mark.parametrize("name", CALLS)
def test_a_call_a_record_and_a_function_mean_the_same(name: str) -> None:
    model = changed("expand", changed("fold", make_model("mixed"), keep="folded"))
    record = rewrites.read_rewrite(CALLS[name])
    options = record.model_dump(exclude={"layers", "ranks"}, exclude_defaults=True)
    function = partial(getattr(rewrites, name), **options)
    if name == "truncate":
        function = partial(rewrites.truncate, qk_rank=5, ov_rank=5)
    calls, records, functions = (triptych.rewrite(model, step) for step in (CALLS[name], record, function))
    assert calls.records == records.records
    assert calls.records.keys() == functions.records.keys()
    parameters = (found.result.parameters() for found in (calls, records, functions))
    for one, other, third in zip(*parameters, strict=True):
        assert_same(one, other, kind="exact")
        torch.testing.assert_close(one, third)


def test_a_budget_is_shared_out_over_the_layers_of_a_model() -> None:
    model = changed("expand", changed("fold", make_model("mixed"), keep="folded"))
    kept = triptych.rewrite(model, "truncate(budget=0.5)")
    widths = {weights.W_Q.shape[-1] for weights in attention_weights(kept.result).values()}
    assert len(widths) > 1
    assert sum(p.numel() for p in kept.result.parameters()) < sum(p.numel() for p in model.parameters())


def test_rotary_heads_of_a_model_are_cut_as_rotary_heads() -> None:
    model = make_model("mixed", positions={"scheme": "rotary"})
    outcome = triptych.rewrite(model, "truncate(rank=2, forms=['qk'])", sites=["decoder.0"])
    assert outcome.records["decoder.0"][0].choice.startswith("W_Q and W_K: rank 2 of ")


def test_layers_of_a_call_are_those_of_every_stack() -> None:
    records = triptych.rewrite(make_model("mixed"), "drop_key_bias(layers=[1])").records
    assert [name for name, found in records.items() if found] == ["encoder.1", "decoder.1", "cross.1"]


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("fold_other_norms", "it is of more than attention layers"),
        ("truncate(rank=3, criterion='centred')", "it looks at a text"),
        ("prune_heads(heads=[7])", "there is no head 7"),
    ],
)
def test_a_call_that_a_model_cannot_take_is_refused(call: str, reason: str) -> None:
    with pytest.raises(RewriteRefusedError, match=reason):
        triptych.rewrite(make_model("mixed"), call)
    with pytest.raises(triptych.UsageError, match="there is no rewrite melt"):
        triptych.rewrite(make_model("mixed"), "melt(rank=3)")


def test_a_site_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"no attention site encoder\.7: there are encoder\.0"):
        triptych.rewrite(make_model("mixed"), rewrites.fold, sites=["encoder.7"])
    with pytest.raises(ValueError, match="sites name the layers of a model"):
        triptych.rewrite(MultiHeadAttention(8, 2), rewrites.fold, sites=["encoder.0"])


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_a_layer_is_rewritten_into_a_layer(name: str) -> None:
    chosen = PARAMETERISATIONS[name]
    rotary = None if chosen.no_rotary else RotaryPositions()
    layer = MultiHeadAttention(24, 4, chosen(), dropout=0.1, positions=rotary).double().eval()
    x = torch.randn(2, 6, 24, dtype=torch.float64)
    expected = layer(x, causal=True).output.detach()
    for new in (
        changed("fold", layer, keep="folded"),
        changed("expand", layer),
        changed("repeat_kv_heads", changed("expand", layer)),
        changed("permute_heads", layer, order=[3, 2, 1, 0]),
    ):
        assert isinstance(new, MultiHeadAttention)
        assert (new.dropout, new.semantics.rotary, new.training) == (0.1, layer.semantics.rotary, False)
        torch.testing.assert_close(new(x, causal=True).output, expected, rtol=1e-10, atol=1e-12)


def test_rewriting_leaves_the_random_numbers_alone() -> None:
    model = make_model("mixed")
    state = torch.get_rng_state()
    changed("fold", model)
    assert torch.equal(torch.get_rng_state(), state)


def test_numbers_are_rounded_once() -> None:
    layer = MultiHeadAttention(24, 4, Stacked())
    folded = changed("fold", layer)
    q_first, q_proj = (layer.get_parameter(f"projections.{n}.weight").double() for n in ("q_first", "q_proj"))
    exact = (q_proj @ q_first).float()
    assert_same(folded.get_parameter("projections.q_proj.weight").detach(), exact.detach(), kind="exact")


def test_weights_are_rewritten_into_weights() -> None:
    weights = attention_weights(make_model("mixed"))["encoder.0"]
    folded = changed("fold", weights)
    assert len(weights.q) == 2
    assert len(folded.q) == 1
    assert folded.dtype == weights.dtype


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_bounded_rewrites_move_a_model_and_say_how_far(norm: str) -> None:
    model = make_model("mixed", norm=norm)
    src, tgt_in = sentences()
    model = changed("fold", model, keep="folded")
    outcome = triptych.rewrite(model, partial(rewrites.truncate, qk_rank=3, ov_rank=4))
    assert all(record.tier == "bounded" and record.bound > 0 for (record,) in outcome.records.values())
    assert not torch.allclose(outcome.result(src, tgt_in), model(src, tgt_in), rtol=1e-3)
    assert {weights.W_Q.shape[-1] for weights in attention_weights(outcome.result).values()} == {3}
    merged = changed("merge_kv_heads", model, num_kv_heads=1, bounded=True)
    assert find_config(merged).encoder.attention.projections == "grouped"
    prune = partial(rewrites.prune_heads, heads=[1], bounded=True)
    pruned = triptych.rewrite(model, prune, sites=["encoder.0"]).result
    assert find_config(pruned).sites("encoder")[0].num_heads == 3
    assert pruned(src, tgt_in).shape == (3, 6, VOCAB)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", LIFTED)
def test_weights_that_are_no_numbers_are_refused_with_the_map_and_the_site(name: str, value: float) -> None:
    model = make_model("mixed")
    with torch.no_grad():
        model.get_parameter("decoder.blocks.1.cross_attention.projections.k_proj.weight")[2, 3] = value
    with pytest.raises(RewriteRefusedError, match=r"at cross\.1 refused: 1 of 576 numbers in a map of k are"):
        LIFTED[name](model)


def test_frozen_parameters_stay_frozen() -> None:
    model = make_model("mixed")
    model.get_parameter("decoder.embeddings.table.weight").requires_grad_(False)
    attention_sites(model)[0].layer.requires_grad_(False)
    folded = changed("fold", model)
    first, second = (site.layer for site in attention_sites(folded)[:2])
    assert not folded.get_parameter("decoder.embeddings.table.weight").requires_grad
    assert not any(parameter.requires_grad for parameter in first.parameters())
    assert all(parameter.requires_grad for parameter in second.parameters())
    frozen = MultiHeadAttention(8, 2, Stacked()).requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in changed("fold", frozen).parameters())
    frozen.projections.requires_grad_(True)
    next(frozen.parameters()).requires_grad_(False)  # one of several: what is made of them all is trained
    assert all(parameter.requires_grad for parameter in changed("fold", frozen).parameters())


@pytest.mark.parametrize(
    "traits",
    [
        {"qk_norm": True},
        {"soft_cap": 5.0},
        {"sinks": True},
        {"temperature": Temperature(0.1, 4.0)},
        {"rotary": RotaryEmbedding(torch.ones(1), places=torch.zeros(4, 1))},
        {"clip": 6.0},
        {"positions": "relative"},
        {"positions": "disentangled"},
        {"window": 3},
    ],
    ids=lambda traits: next(iter(traits)),
)
def test_a_model_holds_layers_that_no_recipe_describes(traits: dict[str, Any], tmp_path: Path) -> None:
    model = make_model("mixed")
    foreign = with_semantics(attention_weights(model)["encoder.0"], **traits)
    write_model(with_attention(model, {"encoder.0": foreign}), tmp_path)
    read = read_model(tmp_path)
    x = torch.randn(2, 4, foreign.d_model)
    found = read.encoder.blocks[0].self_attention(x).output
    assert_same(found, run_layer(foreign.without_norms(), x), kind="output")
    with pytest.raises(ValueError, match="no recipe describes the model"):
        find_config(read)


def test_a_part_that_is_new_is_refused_until_a_layer_holds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = MultiHeadAttention(8, 2).weights()
    monkeypatch.setattr("triptych.core.attention.requirements.HELD", HELD - {"window"})
    with pytest.raises(ValueError, match="a layer with a window, which MultiHeadAttention does not support"):
        MultiHeadAttention.from_weights(with_semantics(weights, window=3))


@pytest.mark.parametrize("part", [{"window": 2}, {"chunk": 3}, {"window": 3, "positions": "alibi"}])
@pytest.mark.parametrize("kind", ["self", "causal"])
def test_a_layer_sees_the_keys_that_its_weights_say(part: dict[str, Any], kind: Any) -> None:
    weights = with_semantics(MultiHeadAttention(8, 2).double().weights(kind), **part)
    made = MultiHeadAttention.from_weights(weights)
    x, causal = torch.randn(2, 7, 8, dtype=torch.float64), kind == "causal"
    expected = run_layer(weights, x)
    assert_same(made(x).output, expected, kind="output")
    assert_same(made(x, causal=causal, path="reference").output, expected, kind="output")
    if causal:
        cache = LayerCache()
        steps = [made(x[:, i : i + 1], causal=True, cache=cache).output for i in range(7)]
        assert_same(torch.cat(steps, dim=1), expected, kind="output")
    with pytest.raises(ValueError, match="places in one sequence, and memory is another"):
        made(x, memory=x)


def test_the_norm_that_weights_carry_is_not_dropped() -> None:
    weights = MultiHeadAttention(8, 2).weights()
    norm = Norm(torch.full((8,), 2.0))
    for carried in (replace(weights, norm=norm), replace(weights, memory_norm=norm)):
        with pytest.raises(ValueError, match=r"carry the norm before the layer.*without_norms"):
            MultiHeadAttention.from_weights(carried)
        held = MultiHeadAttention.from_weights(carried.without_norms())
        for one, other in zip(held.weights().tensors(), weights.tensors(), strict=True):
            assert_same(one, other, kind="exact")


def test_what_stands_between_two_maps_is_not_lost() -> None:
    weights = MultiHeadAttention(8, 2, Stacked()).double().weights()
    first, second = weights.q
    foreign = replace(weights, q=(replace(first, norm=HeadNorm(1e-6)), second))
    with pytest.raises(ValueError, match="stacked: the norms after a map of q differ"):
        MultiHeadAttention.from_weights(foreign, named=True)
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    assert_same(MultiHeadAttention.from_weights(foreign)(x).output, run_layer(foreign, x), kind="output")


def test_a_fold_that_no_recipe_can_ask_for_makes_a_layer_but_no_model() -> None:
    layer = MultiHeadAttention(24, 2, Stacked()).double()
    folded = changed("fold", layer, sides=("qk",), keep="folded")
    assert folded.parameterisation.name == "as_written"
    x = torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(folded(x).output, layer(x).output, rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="maps in a row: q 1, k 0, v 2, o 1"):
        MultiHeadAttention.from_weights(folded.weights(), named=True)


def test_a_model_of_layers_without_a_name_is_saved_and_rewritten_again(tmp_path: Path) -> None:
    model = make_model("mixed").double()
    src, tgt = sentences()
    expected = model(src, tgt)
    qk_alone = partial(rewrites.fold, sides=("qk",), keep="folded")
    folded = triptych.rewrite(model, qk_alone, sites=["encoder.0"]).result
    write_model(folded, tmp_path)
    read = read_model(tmp_path)
    layer = read.encoder.blocks[0].self_attention
    assert layer.parameterisation.name == "as_written"
    assert_same(read(src, tgt), folded(src, tgt), kind="exact")
    assert_same(read(src, tgt), expected, kind="output")
    again = triptych.rewrite(read, "fold_value_bias", sites=["encoder.0"]).result
    assert_same(again(src, tgt), expected, kind="output")


def test_bytes_are_counted_in_the_dtype_of_what_is_folded() -> None:
    for dtype, size in ((torch.float32, 4), (torch.bfloat16, 2)):
        layer = MultiHeadAttention(16, 2, Stacked()).to(dtype)
        step = partial(rewrites.fold, by="bytes", number_bytes=size)
        (record,) = triptych.rewrite(layer, step).records["layer"]
        assert f"q: folded, {16 * 16 * size:,} bytes" in record.choice


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keep": "foldd"}, "keep is 'foldd': choose from cheaper, folded, product"),
        ({"by": "time"}, "by is 'time': choose from parameters, flops, bytes"),
        ({"sides": ("x",)}, "sides is 'x': choose from q, k, v, o, qk"),
        ({"sides": "qk"}, "sides is 'qk': choose from q, k, v, o, qk"),
    ],
)
def test_a_choice_there_is_not_is_refused_with_those_there_are(wrong: dict[str, Any], message: str) -> None:
    weights = MultiHeadAttention(8, 2).weights()
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(rewrites.fold)(weights, **wrong)  # past the checks of types that tests run under


@pytest.mark.parametrize("rank", [2.0, True, "2"])
def test_a_rank_that_is_no_whole_number_is_refused_as_such(rank: Any) -> None:
    with pytest.raises(RewriteRefusedError, match=f"is {rank!r}: it must be a whole number"):
        inspect.unwrap(rewrites.to_latent)(MultiHeadAttention(8, 2).weights(), rank=rank)


def test_an_input_of_another_width_is_refused_with_both() -> None:
    layer = MultiHeadAttention(16, 4)
    with pytest.raises(ValueError, match="an input is 8 wide, and the layer's d_model 16"):
        layer(torch.zeros(1, 3, 8))
