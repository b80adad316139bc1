"""A layer does all that its `Semantics` say: the plain formula, with gradients, caches and positions."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from heads import D_MODEL, NUM_HEADS, make_layer, random_input
from tolerances import assert_same
from triptych.core.algebra.cost import cached_numbers, writing_cost
from triptych.core.algebra.function import run_layer
from triptych.core.algebra.positions import (
    ALiBi,
    DisentangledBias,
    GrowingBase,
    LongTexts,
    OtherFrequencies,
    PatchPositionBias,
    RelativePositionBias,
    RotaryEmbedding,
)
from triptych.core.algebra.semantics import HeadGate, HeadNorm, Semantics, Temperature
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention import PARAMETERISATIONS, LayerCache, MultiHeadAttention, PositionIds
from triptych.core.models import LanguageModel, LanguageModelConfig, ModelConfig
from triptych.running.decoding.fused import FusedAttention
from triptych.running.decoding.linear_maps import Maps

H, N = NUM_HEADS, 7


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def parts(width: int, key_heads: int) -> dict[str, dict[str, Any]]:
    """What a layer may do besides its maps, for heads of this width."""
    rotary = RotaryEmbedding(torch.tensor([0.7, 0.1]))
    of_heads = HeadNorm(1e-6, drawn(width), drawn(width), centred=True)
    return {
        "norms": {"q_norm": of_heads, "k_norm": HeadNorm(1e-5, drawn(width))},
        "norms of all heads, turned": {
            "q_norm": HeadNorm(1e-6, drawn(H * width), over="all heads"),
            "k_norm": HeadNorm(1e-6, drawn(key_heads * width), over="all heads"),
            "rotary": rotary,
            "scale": 0.9,
        },
        "norms, turned first": {
            "q_norm": HeadNorm(1e-6, drawn(width), turned=True),
            "k_norm": HeadNorm(1e-6, drawn(width), turned=True),
            "rotary": rotary,
        },
        "norm of values, turned": {"v_norm": HeadNorm(1e-6), "rotary": rotary},
        "norms of each head": {"q_norm": HeadNorm(1e-6, drawn(H, width)), "k_norm": HeadNorm(1e-6)},
        "soft cap": {"soft_cap": 1.5},
        "sinks": {"sinks": torch.linspace(-1, 2, H, dtype=torch.float64)},
        "sinks, window, turned": {"sinks": drawn(H), "window": 3, "rotary": rotary},
        "clip": {"clip": 0.7, "scale": 0.3},
        "temperature": {"temperature": Temperature(0.5, 2.0), "rotary": rotary},
        "chunk, soft cap": {"chunk": 3, "soft_cap": 2.0},
        "gate": {"gate": HeadGate(drawn(H, D_MODEL), drawn(H))},
        "gate, window, turned": {"gate": HeadGate(drawn(H, D_MODEL)), "window": 3, "rotary": rotary},
        "slopes": {"bias": ALiBi.for_heads(H)},
        "buckets": {"bias": RelativePositionBias(drawn(6, H), both_ways=True, max_distance=16)},
        "buckets, one way": {"bias": RelativePositionBias(drawn(6, H), both_ways=False, max_distance=16)},
        "distances": {
            "bias": DisentangledBias(drawn(H, 6, width), drawn(H, 6, width), 3, None, 0.4),
            "scale": 0.4,
        },
        "distances, one side": {"bias": DisentangledBias(drawn(H, 6, width), None, 3, None, 0.4)},
    }


def written_as(name: str) -> tuple[MultiHeadAttention, int, int]:
    layer = make_layer(name, biased=True)
    weights = layer.weights()
    return layer, weights.multiplied("k").d_out, weights.num_key_heads


def held(name: str, part: dict[str, Any], kind: Any) -> tuple[MultiHeadAttention, AttentionWeights]:
    """A layer and the weights that it was made of."""
    weights = written_as(name)[0].weights(kind)
    weights = replace(weights, semantics=replace(weights.semantics, **part))
    return MultiHeadAttention.from_weights(weights), weights


def cases() -> list[Any]:
    found = []
    for name in ("grouped", "shared", "latent", "bilinear"):
        _, width, key_heads = written_as(name)
        for part, given in parts(width, key_heads).items():
            if "rotary" in given and name in ("latent", "bilinear"):
                continue
            marks = () if name == "grouped" else pytest.mark.slow
            found.append(pytest.param(name, part, id=f"{name}-{part}", marks=marks))
    return found


@pytest.mark.parametrize(("name", "part"), cases())
def test_a_layer_is_the_plain_formula_and_learns_what_it_does_besides(name: str, part: str) -> None:
    _, width, key_heads = written_as(name)
    given = parts(width, key_heads)[part]
    for kind in ("self", "causal"):
        layer, weights = held(name, given, kind)
        x = random_input(N)
        wanted = run_layer(weights, x)
        assert_same(layer(x).output, wanted, kind="output")
        assert_same(layer(x, path="reference", need_weights=True).output, wanted, kind="output")
        own = replace(layer.projections.weights(), semantics=layer.semantics)
        assert sorted(layer.semantics.learned()) == sorted(
            name for name, _ in layer.named_parameters(recurse=False)
        )
        expected = torch.autograd.grad(run_layer(own, x).square().mean(), list(layer.parameters()))
        found = torch.autograd.grad(layer(x).output.square().mean(), list(layer.parameters()))
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other, kind="gradient")

    assert_same(in_pieces(layer, x, 3, 4, 5), run_layer(weights, x), kind="output")


def in_pieces(layer: MultiHeadAttention, x: Tensor, *cuts: int) -> Tensor:
    """The output of pieces of a text, one after the other, with a cache."""
    cache = LayerCache()
    return torch.cat([layer(piece, cache=cache).output for piece in x.tensor_split(cuts, dim=1)], dim=1)


def padded_by(padding: Tensor) -> tuple[Tensor, Tensor]:
    """Which tokens there are of texts with padding on the left, and their positions."""
    places = torch.arange(N) - padding[:, None]
    return places >= 0, places.clamp(min=0)


@pytest.mark.parametrize(("name", "part"), cases())
@pytest.mark.parametrize("cached", [False, True])
def test_padding_on_the_left_changes_nothing(name: str, part: str, cached: bool) -> None:
    _, width, key_heads = written_as(name)
    layer, weights = held(name, parts(width, key_heads)[part], "causal")
    x, padding = random_input(N), torch.tensor([0, 3])
    there, ids = padded_by(padding)
    cache, steps = LayerCache() if cached else None, []
    for i, j in ((0, 5), (5, 6), (6, N)) if cached else ((0, N),):
        seen = there[:, None, None, :j]
        steps.append(layer(x[:, i:j], mask=seen, positions=PositionIds(ids[:, i:j], N), cache=cache).output)
    found = torch.cat(steps, dim=1)
    for row, skipped in enumerate(padding.tolist()):
        alone = run_layer(weights, x[row : row + 1, skipped:])
        assert_same(found[row : row + 1, skipped:], alone, kind="output")


LONG = [OtherFrequencies(4, torch.tensor([0.4, 0.3, 0.02]), 1.7), GrowingBase(4, 100.0, 3.0)]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("long", LONG, ids=lambda long: type(long).__name__)
def test_keys_of_a_text_that_grows_past_the_limit_stay_as_they_were_turned(
    long: LongTexts, normed: bool
) -> None:
    """Also where one map makes keys and values, and what it makes is kept before it turns."""
    weights = written_as("shared")[0].weights("causal")
    norm = HeadNorm(1e-6, drawn(6)) if normed else None
    rotary = replace(RotaryEmbedding.of_width(6, 100.0), long=long)
    semantics = replace(weights.semantics, rotary=rotary, q_norm=norm, k_norm=norm)
    once = replace(weights, semantics=semantics)
    twice = replace(once, v=tuple(replace(link) for link in weights.v))
    maps = Maps("fp32", torch.float64)
    layers = [MultiHeadAttention.from_weights(written) for written in (twice, once)]
    layers += [FusedAttention(written, maps, False, once=True) for written in (twice, once)]  # type: ignore[list-item]
    x, (there, ids) = random_input(N), padded_by(torch.tensor([0, 3]))

    def decoded(layer: MultiHeadAttention, padded: bool) -> Tensor:
        cache, steps = LayerCache(), []
        for i, j in ((0, 3), (3, 4), (4, 5), (5, N)):
            given: dict[str, Any] = {}
            if padded:
                given = {"mask": there[:, None, None, :j], "positions": PositionIds(ids[:, i:j], N)}
            steps.append(layer(x[:, i:j], cache=cache, causal=True, **given).output)
        return torch.cat(steps, dim=1)

    for padded in (False, True):
        expected = decoded(layers[0], padded)
        assert (expected - layers[0](x).output).abs().max() > 1e-3
        for layer in layers[1:]:
            assert_same(decoded(layer, padded)[there], expected[there], kind="output")
    assert_same(layers[1](x).output, run_layer(once, x), kind="output")


@pytest.mark.parametrize(
    "part", ["norms of all heads, turned", "sinks, window, turned", "buckets", "temperature"]
)
def test_texts_beside_each_other_in_a_row_are_texts_alone(part: str) -> None:
    _, width, key_heads = written_as("grouped")
    layer, weights = held("grouped", parts(width, key_heads)[part], "causal")
    x, text = random_input(N), torch.tensor([0, 0, 0, 1, 1, 1, 1])
    for ids in (torch.tensor([0, 1, 2, 0, 1, 2, 3]), torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)):
        found = layer(x, mask=text[:, None] == text, positions=PositionIds(ids, N)).output
        assert_same(found[:, :3], run_layer(weights, x[:, :3]), kind="output")
        assert_same(found[:, 3:], run_layer(weights, x[:, 3:]), kind="output")


def test_rows_of_a_batch_that_change_places_take_their_positions_with_them() -> None:
    layer, _ = held("grouped", {"bias": ALiBi.for_heads(H)}, "causal")
    x, cache = random_input(N), LayerCache()
    ids = torch.arange(N) + torch.tensor([[0], [100]]) * (torch.arange(N) >= 4)
    layer(x[:, :5], positions=PositionIds(ids[:, :5], 200), cache=cache)
    cache.select(torch.tensor([1, 0]))
    found = layer(x.flip(0)[:, 5:], positions=PositionIds(ids.flip(0)[:, 5:], 200), cache=cache).output
    expected = layer(x, positions=PositionIds(ids, 200)).output[:, 5:]
    assert_same(found.flip(0), expected, kind="output")


def test_tokens_with_positions_and_without_do_not_share_a_cache() -> None:
    layer, _ = held("grouped", {"window": 3}, "causal")
    x, given = random_input(2), PositionIds(torch.arange(2), 4)
    for first, second, which in ((None, given, "without positions"), (given, None, "with positions")):
        cache = LayerCache()
        layer(x, positions=first, cache=cache)
        with pytest.raises(ValueError, match=f"in the cache came {which}"):
            layer(x, positions=second, cache=cache)


def test_cross_attention_normalises_caps_and_has_sinks() -> None:
    _, width, key_heads = written_as("grouped")
    found = parts(width, key_heads)
    part = {**found["norms"], **found["soft cap"], **found["sinks"], "clip": 1.2}
    layer, weights = held("grouped", part, "cross")
    x, memory, cache = random_input(3), random_input(N), LayerCache()
    expected = run_layer(weights, x, memory)
    assert_same(layer(x, memory=memory).output, expected, kind="output")
    for _ in range(2):
        assert_same(layer(x, memory=memory, cache=cache).output, expected, kind="output")


def test_patches_of_a_picture_have_places() -> None:
    rotary = RotaryEmbedding(torch.ones(2), places=drawn(N, 2).abs())
    for part in ({"rotary": rotary}, {"bias": PatchPositionBias(drawn(3 * 5 + 3, H), 2, 3)}):
        layer, weights = held("grouped", part, "self")
        x = random_input(N)
        assert_same(layer(x).output, run_layer(weights, x), kind="output")


def test_what_is_learned_moves_is_saved_and_comes_back() -> None:
    _, width, key_heads = written_as("grouped")
    found = parts(width, key_heads)
    part = {**found["norms"], **found["sinks"], **found["buckets"]}
    layer, weights = held("grouped", part, "causal")
    names = {"q_norm_weight", "q_norm_bias", "k_norm_weight", "sinks", "bias_table"}
    assert set(layer.semantics.learned()) == names <= set(layer.state_dict())
    with torch.no_grad():
        layer.sinks.add_(1.0)
    sinks = layer.weights().semantics.sinks
    assert sinks is not None
    assert not sinks.requires_grad
    assert_same(sinks, part["sinks"] + 1.0, kind="exact")
    assert_same(weights.semantics.sinks, part["sinks"], kind="exact")
    again = MultiHeadAttention.from_weights(layer.weights())
    again.load_state_dict(layer.state_dict())
    x = random_input(N)
    assert_same(again(x).output, layer(x).output, kind="exact")
    narrow = layer.to(torch.float32)
    assert {tensor.dtype for tensor in narrow.weights().semantics.learned().values()} == {torch.float32}
    assert narrow(x.float()).output.dtype == torch.float32
    assert not narrow.weights().semantics.sinks.requires_grad


def test_learned_numbers_are_named_and_replaced_by_name() -> None:
    semantics = Semantics(1.0, sinks=drawn(2), q_norm=HeadNorm(1e-6, drawn(3)), bias=ALiBi(drawn(2)))
    assert list(semantics.learned()) == ["q_norm_weight", "sinks"]  # slopes are not learned
    changed = semantics.with_learned({"q_norm_weight": torch.ones(3)})
    assert changed.q_norm is not None
    assert changed.q_norm.weight is not None
    assert changed.q_norm.weight.tolist() == [1, 1, 1]
    assert (changed.sinks, changed.bias) == (semantics.sinks, semantics.bias)


def test_norms_of_heads_are_taken_in_float32_at_least() -> None:
    x = torch.randn(1, 1, 3, 64).bfloat16()
    norm = HeadNorm(1e-6, torch.randn(64))
    assert_same(norm(x), norm(x.float()).bfloat16(), kind="exact")


# Chains that no recipe can ask for.


def latent_with_turned_channels(kind: Any = "causal") -> AttentionWeights:
    """As DeepSeek has them: a normalised latent for all heads, and beside it channels that are turned."""
    rank, turned, plain, value = 6, 4, 3, 5
    first = Link(drawn(1, 24, rank + turned) / 5, norm=HeadNorm(1e-6, channels=rank))
    k_up = torch.zeros(H, rank + turned, plain + turned, dtype=torch.float64)
    k_up[:, :rank, :plain] = drawn(H, rank, plain)
    k_up[:, rank:, plain:] = torch.eye(turned)
    v_up = torch.cat([drawn(H, rank, value), torch.zeros(H, turned, value)], dim=1)
    return AttentionWeights(
        d_model=24,
        num_heads=H,
        q=(Link(drawn(1, 24, 8) / 5, norm=HeadNorm(1e-6, drawn(8))), Link(drawn(H, 8, plain + turned))),
        k=(first, Link(k_up)),
        v=(first, Link(v_up)),
        o=(Link(drawn(H, value, 24) / 5),),
        semantics=Semantics(
            0.4, kind=kind, rotary=RotaryEmbedding(torch.tensor([0.7, 0.1]), "interleaved", plain)
        ),
        o_bias=drawn(24),
    )


def odd_chains(name: str) -> AttentionWeights:
    latent, plain = latent_with_turned_channels(), make_layer("grouped", biased=True).weights("causal")
    eye = Link(torch.eye(6, dtype=torch.float64).expand(2, 6, 6), learned=False)
    mixed = Link(drawn(2, 6), drawn(2, 6), norm=HeadNorm(1e-6, drawn(2, 6), centred=True))
    stacked = make_layer("stacked", biased=True).weights("causal")
    return {
        "latent, turned": latent,
        "latent, turned, capped": replace(latent, semantics=replace(latent.semantics, soft_cap=2.0)),
        "latent, keys normalised": replace(
            latent, semantics=replace(latent.semantics, k_norm=HeadNorm(1e-6, drawn(7)))
        ),
        "values normalised": replace(plain, v=(replace(plain.v[0], norm=HeadNorm(1e-6)), eye)),
        "scaled after the norm": replace(plain, k=(replace(plain.k[0], norm=HeadNorm(1e-6)), mixed)),
        "keys and values share a map": replace(stacked, v=(stacked.k[0], stacked.v[1])),
        "two maps on the way out": replace(plain, o=(Link(drawn(1, 6, 9)), Link(drawn(H, 9, 24)))),
    }[name]


ODD_CHAINS = (
    *("latent, turned", "latent, turned, capped", "latent, keys normalised", "values normalised"),
    *("scaled after the norm", "keys and values share a map", "two maps on the way out"),
)


@pytest.mark.parametrize("name", ODD_CHAINS)
def test_any_chains_are_held_as_they_are_written(name: str) -> None:
    weights = odd_chains(name)
    layer, x = MultiHeadAttention.from_weights(weights), random_input(N)
    assert layer.parameterisation.name == "as_written"
    expected = run_layer(weights, x)
    assert_same(layer(x).output, expected, kind="output")
    assert_same(layer(x, path="reference").output, expected, kind="output")
    assert writing_cost(layer.weights()) == writing_cost(weights)
    assert_same(run_layer(layer.weights(), x), expected, kind="output")

    parameters = list(layer.parameters())
    own = replace(layer.projections.weights(), semantics=layer.semantics)
    gradients = torch.autograd.grad(run_layer(own, x).square().mean(), parameters)
    found = torch.autograd.grad(layer(x).output.square().mean(), parameters)
    for one, other in zip(found, gradients, strict=True):
        assert_same(one, other, kind="gradient")

    assert_same(in_pieces(layer, x, 4, 5, 6), expected, kind="output")
    again = MultiHeadAttention.from_weights(layer.weights())
    again.load_state_dict(layer.state_dict())
    assert_same(again(x).output, layer(x).output, kind="exact")


def test_a_latent_with_turned_channels_is_all_that_is_cached_and_decodes_absorbed() -> None:
    weights = latent_with_turned_channels()
    layer, x, cache = MultiHeadAttention.from_weights(weights), random_input(N), LayerCache()
    layer(x, cache=cache)
    assert sum(entry[0, :, 0].numel() for entry in cache.entries) == cached_numbers(weights) == 10
    assert layer.explain(1, 64)[0] == "absorbed"
    assert layer.explain(64, 64)[0] == "expanded"
    padding = torch.tensor([0, 2])
    there, ids = padded_by(padding)
    cache = LayerCache()
    layer(x[:, :6], mask=there[:, None, None, :6], positions=PositionIds(ids[:, :6], N), cache=cache)
    last = layer(x[:, 6:], mask=there[:, None, None], positions=PositionIds(ids[:, 6:], N), cache=cache)
    for row, skipped in enumerate(padding.tolist()):
        alone = run_layer(weights, x[row : row + 1, skipped:])[:, -1:]
        assert_same(last.output[row : row + 1], alone, kind="output")


def test_channels_that_pass_a_map_still_pass_it_after_training() -> None:
    layer, x = MultiHeadAttention.from_weights(latent_with_turned_channels()), random_input(N)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.1)
    layer(x).output.square().mean().backward()
    optimizer.step()
    k_up, v_up = layer.weights().k[1].weight, layer.weights().v[1].weight
    assert_same(k_up[:, 6:, 3:], torch.eye(4, dtype=torch.float64).expand(H, 4, 4), kind="exact")
    assert not bool(k_up[:, 6:, :3].any() | k_up[:, :6, 3:].any() | v_up[:, 6:].any())


def test_a_memory_of_another_width_is_read() -> None:
    plain = make_layer("factored", biased=True).weights("cross")
    weights = replace(plain, k=(Link(drawn(H, 10, 6)),), v=(Link(drawn(H, 10, 6)),))
    layer, x, memory = MultiHeadAttention.from_weights(weights), random_input(3), drawn(2, N, 10)
    assert_same(layer(x, memory=memory).output, run_layer(weights, x, memory), kind="output")
    assert layer.explain(3, N)[0] == "expanded"
    with pytest.raises(ValueError, match="an input is 24 wide, and the layer's memory width 10"):
        layer(x, memory=x.clone())


@pytest.mark.parametrize("name", [name for name, cls in PARAMETERISATIONS.items() if not cls.no_qk_norm])
def test_a_layer_with_qk_norm_is_the_plain_formula_and_trains_it(name: str) -> None:
    layer = MultiHeadAttention(24, H, PARAMETERISATIONS[name](), qk_norm=True).double()
    assert {"q_norm_weight", "k_norm_weight"} <= dict(layer.named_parameters()).keys()
    x = random_input(N)
    assert_same(layer(x, causal=True).output, run_layer(layer.weights("causal"), x), kind="output")
    layer(x).output.square().mean().backward()
    for parameter in (layer.q_norm_weight, layer.k_norm_weight):
        assert parameter.grad is not None
        assert bool(parameter.grad.any())


@pytest.mark.parametrize("name", [name for name, cls in PARAMETERISATIONS.items() if cls.no_qk_norm])
def test_qk_norm_is_refused_with_the_reason(name: str) -> None:
    reason = re.escape(PARAMETERISATIONS[name].no_qk_norm)
    with pytest.raises(ValueError, match=f"{name} cannot have qk_norm: {reason}"):
        MultiHeadAttention(24, H, PARAMETERISATIONS[name](), qk_norm=True)
    with pytest.raises(ValueError, match=reason):
        LanguageModelConfig.model_validate(
            {"positions": {"scheme": "none"}, "attention": {"projections": name, "qk_norm": True}}
        )


def test_a_recipe_asks_for_qk_norm_of_language_models() -> None:
    config = LanguageModelConfig.model_validate(
        {"d_model": 24, "num_heads": 4, "num_layers": 1, "attention": {"qk_norm": True}}
    )
    model = LanguageModel.of(config, "decoder", 11)
    assert "blocks.0.self_attention.q_norm_weight" in model.state_dict()
    again = LanguageModelConfig.model_validate_json(config.model_dump_json())
    LanguageModel.of(again, "decoder", 11).load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="qk_norm is true, and encoder-decoder models have none"):
        ModelConfig.model_validate({"encoder": {"attention": {"qk_norm": True}}})


def test_a_recipe_asks_for_gates_of_language_models_and_they_begin_half_open() -> None:
    plain: dict[str, Any] = {"d_model": 24, "num_heads": 4, "num_layers": 1}
    config = LanguageModelConfig.model_validate({**plain, "attention": {"output_gate": True}})
    model = LanguageModel.of(config, "decoder", 11).double()
    attention, x = model.blocks[0].self_attention, random_input(N)
    without = replace(attention.weights(), semantics=replace(attention.semantics, gate=None))
    assert_same(attention(x).output, run_layer(without, x) / 2, kind="output")
    with pytest.raises(ValueError, match="output_gate is true, and encoder-decoder models have none"):
        ModelConfig.model_validate({"decoder": {"cross_attention": {"output_gate": True}}})


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 4), (2, 1), (1, 2)])
@pytest.mark.parametrize("over", ["head", "all heads"])
def test_key_heads_that_are_repeated_take_their_norms_along(
    over: Any, key_heads: int, value_heads: int
) -> None:
    q, k, v = (Link(drawn(copies, D_MODEL, 6)) for copies in (H, key_heads, value_heads))
    shapes = [(H, 6), (key_heads, 6)] if over == "head" else [(H * 6,), (key_heads * 6,)]
    q_norm, k_norm = (HeadNorm(1e-6, drawn(*shape), over=over) for shape in shapes)
    semantics = Semantics(0.4, "causal", q_norm=q_norm, k_norm=k_norm)
    weights = AttentionWeights(D_MODEL, H, (q,), (k,), (v,), (Link(drawn(H, 6, D_MODEL)),), semantics)
    x = random_input(N)
    for adopted in (False, True):
        layer = MultiHeadAttention.from_weights(weights, adopted=adopted)
        assert_same(layer(x).output, run_layer(weights, x), kind="output")
    assert_same(in_pieces(layer, x, 3), run_layer(weights, x), kind="output")
