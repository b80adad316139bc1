"""A fused language model computes what the model does, whatever its layers do besides their maps."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from algebra.rewrites.random_layers import draw_layer
from heads import D_MODEL, NUM_HEADS, make_layer, with_later_part
from made import Made
from tolerances import assert_same
from triptych import thresholds
from triptych.core.algebra.positions import ALiBi, DisentangledBias, RelativePositionBias, RotaryEmbedding
from triptych.core.algebra.semantics import HeadGate, HeadNorm, Semantics, Temperature
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention import MultiHeadAttention, PositionIds
from triptych.core.attention.projections import PARAMETERISATIONS
from triptych.core.models import LanguageModel, LanguageModelConfig
from triptych.core.models.architecture import (
    BlockConfig,
    EmbeddingsConfig,
    FeedForwardConfig,
    HeadConfig,
    LanguageModelArchitecture,
    NormConfig,
    SublayerConfig,
)
from triptych.running.decoding.engine import Engine
from triptych.running.decoding.fused import FusedAttention, _as_cached, evaluating_copy, fuse
from triptych.running.decoding.linear_maps import Maps, PackedLinear
from triptych.seeing.costing import CostSpec, cost

VOCAB, LENGTH, WIDTH = 11, 24, 6  # so long that many rows are computed by the kernel
ROTARY = RotaryEmbedding(torch.tensor([0.7, 0.1]))


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def parts() -> dict[str, dict[str, Any]]:
    norms = {"q_norm": HeadNorm(1e-6, drawn(WIDTH)), "k_norm": HeadNorm(1e-6, drawn(WIDTH), centred=True)}
    of_all = {"q_norm": HeadNorm(1e-6, drawn(24), over="all heads"), "rotary": ROTARY}
    return {
        "rotary": {"rotary": ROTARY},
        "norms, turned": {**norms, "rotary": ROTARY},
        "norms of all heads": {**of_all, "k_norm": HeadNorm(1e-6, drawn(12), over="all heads")},
        "norms, clip": {**norms, "clip": 0.8},
        "norms, turned first": {
            "q_norm": HeadNorm(1e-6, drawn(WIDTH), turned=True),
            "k_norm": HeadNorm(1e-6, drawn(WIDTH), turned=True),
            "rotary": ROTARY,
        },
        "norm of values": {"v_norm": HeadNorm(1e-6), "rotary": ROTARY},
        "norms of each head": {"q_norm": HeadNorm(1e-6, drawn(4, 6)), "k_norm": HeadNorm(1e-6, drawn(2, 6))},
        "slopes": {"bias": ALiBi.for_heads(NUM_HEADS)},
        "buckets": {"bias": RelativePositionBias(drawn(6, NUM_HEADS), both_ways=False, max_distance=16)},
        "distances": {"bias": DisentangledBias(drawn(4, 6, 6), drawn(4, 6, 6), 3, None, 0.4), "scale": 0.3},
        "window, turned": {"window": 3, "rotary": ROTARY},
        "chunk, temperature": {"chunk": 3, "temperature": Temperature(0.5, 2.0)},
        "soft cap": {"soft_cap": 1.5, "rotary": ROTARY},
        "gate, turned": {"gate": HeadGate(drawn(NUM_HEADS, D_MODEL), drawn(NUM_HEADS)), "rotary": ROTARY},
        "sinks, window": {"sinks": drawn(NUM_HEADS), "window": 3, "rotary": ROTARY},
    }


def model_with(weights: AttentionWeights, kind: Any = "decoder", **frame: Any) -> LanguageModel:
    norm = NormConfig("rms", offset=1.0, bias=False) if frame else NormConfig("rms", bias=False)
    sublayer = SublayerConfig(norm=norm, out_norm=norm if frame else None)
    feed_forward = FeedForwardConfig(20, "swish", gated=True, bias=bool(frame))
    block = BlockConfig(sublayer, feed_forward, sublayer, parallel=False)
    architecture = LanguageModelArchitecture(
        kind=kind,
        d_model=D_MODEL,
        embeddings=EmbeddingsConfig(VOCAB, scale=2.0),
        blocks=(block, block),
        final_norm=norm,
        head=HeadConfig(tied=not frame, bias=bool(frame), soft_cap=5.0 if frame else None),
    )
    layers = [MultiHeadAttention.from_weights(weights) for _ in architecture.blocks]
    model = LanguageModel(architecture, layers).double().eval()
    for name, parameter in model.named_parameters():
        if "attention" not in name:
            nn.init.normal_(parameter, std=0.3)
    return model


def decoder(part: str) -> LanguageModel:
    weights = make_layer("grouped", biased=True).weights("causal")
    return model_with(replace(weights, semantics=replace(weights.semantics, **parts()[part])))


def fused(model: LanguageModel, *, small_cache: bool = False) -> nn.Module:
    return fuse(evaluating_copy(model), Maps("fp32", torch.float64), small_cache=small_cache)


def assert_same_token_by_token(quick: nn.Module, model: LanguageModel) -> None:
    ids = torch.randint(VOCAB, (2, LENGTH))
    assert_same(logits_of(quick, ids), model(ids).logits, kind="output")


def logits_of(model: nn.Module, ids: Tensor, padding: Tensor | None = None) -> Tensor:
    """A prompt whole, then token by token."""
    cache, found = model.new_cache(), []
    for i, j in ((0, 20), (20, 21), (21, 22), (22, LENGTH)):
        given: dict[str, Any] = {}
        if padding is not None:
            places = torch.arange(j)
            given["mask"] = (places >= padding[:, None])[:, None, None, :]
            given["positions"] = PositionIds((places[i:] - padding[:, None]).clamp(min=0), j)
        found.append(model(ids[:, i:j], cache=cache, **given).logits)
    return torch.cat(found, dim=1)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("way", ["whole", "in blocks", "by the kernel"])
@pytest.mark.parametrize("part", parts())
@torch.no_grad()
def test_a_fused_model_is_the_model_token_by_token(
    part: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way == "in blocks":
        monkeypatch.setattr(thresholds, "SCORES_AT_A_TIME", 100)
    model = decoder(part)
    quick = fused(model)
    for block in quick.blocks:
        assert isinstance(block.self_attention, FusedAttention)
        if way == "by the kernel" and "sinks" not in part and "cap" not in part:  # as on a GPU
            block.self_attention.by_products = False
    ids = torch.randint(VOCAB, (2, LENGTH))
    expected = model(ids).logits
    assert_same(logits_of(quick, ids), expected, kind="output")
    assert_same(quick(ids).logits, expected, kind="output")
    padding = torch.tensor([0, 3])
    found = logits_of(quick, ids, padding)
    for row, skipped in enumerate(padding.tolist()):
        alone = model(ids[row : row + 1, skipped:]).logits
        assert_same(found[row : row + 1, skipped:], alone, kind="output")


@pytest.mark.parametrize("part", ["rotary", "slopes", "sinks, window"])
@torch.no_grad()
def test_a_long_text_is_read_in_memory_linear_in_its_length(
    part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thresholds, "SCORES_AT_A_TIME", 1 << 10)
    monkeypatch.setattr(thresholds, "BYTES_OF_A_PIECE", 1 << 13)
    quick = fused(decoder(part))

    largest = {}
    for length in (256, 1024):
        with Made() as made:
            quick.hidden(torch.randint(VOCAB, (1, length)), cache=quick.new_cache())
        largest[length] = made.largest
    assert largest[1024] <= 4 * largest[256]
    assert largest[1024] < 1024 * 1024 // 4


@pytest.mark.parametrize("part", ["norms of each head", "norms of all heads"])
@torch.no_grad()
def test_key_heads_that_are_repeated_for_more_values_take_their_norms_along(part: str) -> None:
    weights = make_layer("grouped", biased=True).weights("causal")
    values = (weights.v[0].repeat(NUM_HEADS),)
    model = model_with(replace(weights, v=values, semantics=replace(weights.semantics, **parts()[part])))
    assert_same_token_by_token(fused(model), model)


@torch.no_grad()
def test_sandwich_norms_relative_to_one_and_a_capped_head_are_fused() -> None:
    weights = make_layer("factored", biased=False).weights("causal")
    model = model_with(weights, framed=True)
    assert_same_token_by_token(fused(model), model)


@torch.no_grad()
def test_a_layer_with_norms_between_its_maps_stays_as_it_is_written() -> None:
    first = Link(drawn(1, 24, 8) / 5, norm=HeadNorm(1e-6, channels=4))
    k_up = torch.zeros(4, 8, 7, dtype=torch.float64)
    k_up[:, :4, :3], k_up[:, 4:, 3:] = drawn(4, 4, 3), torch.eye(4)
    v_up = torch.cat([drawn(4, 4, 5), torch.zeros(4, 4, 5)], dim=1)
    semantics = Semantics(0.4, "causal", rotary=RotaryEmbedding(torch.tensor([0.7, 0.1]), start=3))
    q, o = (Link(drawn(4, 24, 7) / 5),), (Link(drawn(4, 5, 24) / 5),)
    weights = AttentionWeights(24, 4, q, (first, Link(k_up)), (first, Link(v_up)), o, semantics)
    model = model_with(weights)
    with pytest.raises(ValueError, match="a layer with a norm between two maps cannot be fused"):
        fused(model)
    assert_same_token_by_token(fused(model, small_cache=True), model)


@torch.no_grad()
def test_an_encoder_is_fused() -> None:
    weights = make_layer("factored", biased=True).weights("self")
    bias = RelativePositionBias(drawn(6, NUM_HEADS), both_ways=True, max_distance=16)
    model = model_with(replace(weights, semantics=replace(weights.semantics, bias=bias)), "encoder")
    quick = fused(model)
    ids = torch.randint(VOCAB, (2, LENGTH))
    seen = torch.arange(LENGTH) < torch.tensor([[LENGTH], [14]])
    for mask in (None, seen[:, None, None, :]):
        assert_same(quick(ids, mask=mask).logits, model(ids, mask=mask).logits, kind="output")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_packed_map_computes_what_the_map_does_for_any_number_of_rows(dtype: torch.dtype) -> None:
    if not PackedLinear.serves(torch.device("cpu"), dtype):
        pytest.skip("this processor has no such products")
    weight, bias = torch.randn(70, 33).to(dtype), torch.randn(70).to(dtype)
    maps = Maps("fp32", dtype, packed=True)
    for given in (bias, None):
        made = maps.linear(weight, given)
        assert isinstance(made, PackedLinear)
        for rows in (1, 3, 40):
            x = torch.randn(2, rows, 33).to(dtype)
            assert_same(made(x), nn.functional.linear(x, weight, given), kind="output")
    assert not isinstance(Maps("fp32", torch.float64, packed=True).linear(weight, bias), PackedLinear)


def drawn_anew(written: str, scheme: str) -> LanguageModel:
    """A model of a recipe with attention written so, in float64, biases included."""
    options = {"key_value": {"kv_bias": True}, "shared": {"qkv_bias": True}, "grouped": {"num_kv_heads": 2}}
    latent = {"d_latent": 7, "k_bias": True, "v_bias": True, "down_bias": True, "o_bias": True}
    site = {"projections": written, **{**options, "latent": latent}.get(written, {})}
    sizes = {"num_layers": 2, "d_model": 24, "num_heads": 4, "d_ff": 20, "context": LENGTH}
    positions = {"scheme": scheme, "max_tokens": LENGTH}
    config = LanguageModelConfig.model_validate({**sizes, "attention": site, "positions": positions})
    model = LanguageModel.of(config, "decoder", VOCAB).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


SMALL = [("grouped", "rotary"), ("key_value", "learned"), ("key_value", "rotary"), ("key_value", "alibi")]
SMALL += [("shared", "rotary"), ("latent", "learned"), ("latent", "alibi")]


@pytest.mark.parametrize(("written", "scheme"), SMALL)
@torch.no_grad()
def test_a_small_cache_holds_what_cost_counts_and_gives_the_same_logits(written: str, scheme: str) -> None:
    model = drawn_anew(written, scheme)
    quick = fused(model, small_cache=True)
    assert all(isinstance(block.self_attention, FusedAttention) for block in quick.blocks)
    ids = torch.randint(VOCAB, (2, LENGTH))
    assert_same(logits_of(quick, ids), model(ids).logits, kind="output")
    assert_same(quick(ids).logits, model(ids).logits, kind="output")


@pytest.mark.parametrize("part", ["gate", "sinks"])
@pytest.mark.parametrize("biased", [False, True])
@torch.no_grad()
def test_latents_are_kept_where_no_bias_of_values_is_weighed(part: str, biased: bool) -> None:
    weights = make_layer("latent", biased=biased, d_latent=7).weights("causal")
    weights = replace(weights, k=(weights.k[0], replace(weights.k[1], bias=None)))
    value = HeadGate(drawn(NUM_HEADS, D_MODEL), drawn(NUM_HEADS)) if part == "gate" else drawn(NUM_HEADS)
    model = model_with(replace(weights, semantics=replace(weights.semantics, **{part: value})))
    quick = fused(model, small_cache=True)
    assert isinstance(quick.blocks[0].self_attention, FusedAttention) is not biased
    assert_same_token_by_token(quick, model)


def test_no_map_is_absorbed_where_a_layer_has_a_part_that_the_needs_of_rewrites_do_not_know() -> None:
    weights = make_layer("latent", biased=False, d_latent=7).weights("causal")
    plain, changed = (with_later_part(weights, value) for value in (None, 0.5))
    assert _as_cached(plain) is not plain
    assert _as_cached(changed) is changed


@torch.no_grad()
def test_groups_with_a_latent_each_keep_their_latents_alone() -> None:
    weights, latent = make_layer("grouped", biased=False).weights("causal"), Link(drawn(2, 24, 5) / 5)
    model = model_with(replace(weights, k=(latent, Link(drawn(2, 5, 6))), v=(latent, Link(drawn(2, 5, 6)))))
    quick = fused(model, small_cache=True)
    layer = quick.blocks[0].self_attention
    assert (layer.groups, layer.width, layer.same) == (2, 5, True)
    assert_same_token_by_token(quick, model)


@pytest.mark.parametrize("written", ["key_value", "shared"])
@torch.no_grad()
def test_queries_alone_are_normalised_where_keys_are_the_values(written: str) -> None:
    weights = make_layer(written, biased=True).weights("causal")
    norms = {"q_norm": HeadNorm(1e-6, drawn(NUM_HEADS, WIDTH))}
    model = model_with(replace(weights, semantics=replace(weights.semantics, rotary=ROTARY, **norms)))
    quick = fused(model, small_cache=True)
    assert quick.blocks[0].self_attention.same
    assert_same_token_by_token(quick, model)


@pytest.mark.parametrize("written", PARAMETERISATIONS)
def test_the_bytes_of_a_cache_are_those_that_cost_counts(written: str) -> None:
    model = drawn_anew(written, "learned").float()
    opened, _ = Engine(model).read([[1] * LENGTH] * 3)
    held = sum(entry.nbytes // entry.shape[2] * LENGTH for entry in opened.layers.own[0].entries)
    sizes = {"grouped": {"num_kv_heads": 2}, "latent": {"d_latent": 7}}.get(written, {})
    spec = CostSpec(d_model=24, num_heads=4, context=LENGTH, batch=3, parameterisations=(written,), **sizes)
    (row,) = cost(spec).rows
    assert held == row.cache_bytes


def assert_decodes_alike(weights: AttentionWeights, seed: int = 0) -> None:
    """A model of one such layer gives, decoding, the logits that it gives when it reads a whole text."""
    config = LanguageModelConfig(num_layers=1, d_model=weights.d_model, num_heads=2)
    layer = MultiHeadAttention.from_weights(weights)
    model = LanguageModel(config.architecture("decoder", 30), [layer]).double().eval()
    ids = torch.randint(0, 30, (1, 7), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected = model(ids).logits[0, -1]
        found = Engine(model).read(ids.tolist())[1][0, :30]
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9 * scale, msg=f"seed {seed}")


@pytest.mark.parametrize("whole", [False, True], ids=["of channels", "of heads"])
@pytest.mark.parametrize("values", ["latent", "narrower than keys", "wider than keys", "those of keys"])
def test_gates_go_with_values_of_any_width_and_writing(values: str, whole: bool) -> None:
    d_k = 8 if values == "narrower than keys" else 4
    down = Link(drawn(1, 16, 7) / 4)
    k = (down, Link(drawn(4, 7, d_k))) if values == "latent" else (Link(drawn(4, 16, d_k) / 4),)
    own = (Link(drawn(4, 16, 6 if values == "wider than keys" else 4) / 4),)
    v = (down, Link(drawn(4, 7, 4))) if values == "latent" else k if values == "those of keys" else own
    d_v = v[-1].d_out
    gate = HeadGate(drawn(4, 16) if whole else drawn(4, d_v, 16), drawn(4) if whole else drawn(4, d_v))
    semantics = Semantics(0.5, "causal", gate=gate)
    q, o = (Link(drawn(4, 16, d_k) / 4),), (Link(drawn(4, d_v, 16)),)
    assert_decodes_alike(AttentionWeights(16, 4, q, k, v, o, semantics))


@pytest.mark.parametrize("seeds", [range(80), pytest.param(range(1_000, 12_000), marks=pytest.mark.slow)])
def test_drawn_layers_decode_as_they_read(seeds: range) -> None:
    tried = 0
    for seed in seeds:
        weights = draw_layer(seed).without_norms()
        if weights.semantics.kind != "causal":
            continue
        try:
            MultiHeadAttention.from_weights(weights)
        except ValueError:  # no layer of ours is written so
            continue
        assert_decodes_alike(weights, seed)
        tried += 1
    assert tried > len(seeds) / 8
