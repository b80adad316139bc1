"""The attention layers of a model by name, what is known of their weights, and a model with some changed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tolerances import assert_same
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.attention import Factored, MultiHeadAttention, RotaryPositions, parameterisation
from triptych.core.models import (
    AttentionConfig,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoder,
    ModelConfig,
    PositionsConfig,
    attention_sites,
    attention_weights,
    find_config,
    read_model,
    with_attention,
    write_model,
)
from triptych.core.models.architecture import (
    BlockConfig,
    EmbeddingsConfig,
    FeedForwardConfig,
    LanguageModelArchitecture,
    NormConfig,
    SublayerConfig,
)
from triptych.core.models.language_model import LanguageModel
from triptych.core.models.sites import input_norms

PAD, VOCAB = 0, 20
SRC = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, PAD, PAD], [11, 2, PAD, PAD, PAD]])
TGT = torch.tensor([[1, 4, 5, 6], [1, 7, 8, 9], [1, 3, 3, 3]])
NAMES = ["encoder.0", "encoder.1", "decoder.0", "cross.0", "decoder.1", "cross.1", "decoder.2", "cross.2"]


def make_config(**changes: Any) -> ModelConfig:
    sizes: dict[str, Any] = {"d_model": 16, "d_ff": 24, "num_heads": 4}
    stacks = {"encoder": EncoderConfig(num_layers=2), "decoder": DecoderConfig(num_layers=3)}
    return ModelConfig(**{**sizes, **stacks, **changes})


def make_model(vocab_size: int = VOCAB, **changes: Any) -> EncoderDecoder:
    """A model whose norms and biases are as random as the rest."""
    model = EncoderDecoder.of(make_config(**changes), vocab_size, VOCAB, PAD).double().eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            nn.init.normal_(parameter, mean=1.0 if "norm.weight" in name else 0.0, std=0.3)
    return model


def of_all_kinds() -> ModelConfig:
    """Sites of several parameterisations, some of them of one layer only."""
    return make_config(
        encoder=EncoderConfig(
            num_layers=2,
            attention=AttentionConfig(projections="grouped", num_kv_heads=2, q_bias=True),
            attention_in_layer={1: AttentionConfig(projections="four_matrix", d_v=3)},
        ),
        decoder=DecoderConfig(
            num_layers=3,
            attention=AttentionConfig(projections="latent", v_bias=True, dropout=0.2),
            attention_in_layer={0: AttentionConfig(projections="symmetric", num_heads=2)},
            cross_attention_in_layer={2: AttentionConfig(projections="bilinear", o_bias=True)},
        ),
    )


def snapshot(model: EncoderDecoder) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


# Names, semantics, norms


def test_every_layer_has_a_name_and_is_named_once() -> None:
    model = make_model()
    sites = attention_sites(model)
    assert [site.name for site in sites] == NAMES
    layers = [module for module in model.modules() if isinstance(module, MultiHeadAttention)]
    assert {id(site.layer) for site in sites} == {id(layer) for layer in layers}
    by_name = {site.name: site for site in sites}
    assert by_name["cross.1"].layer is model.decoder.blocks[1].cross_attention
    assert by_name["cross.1"].residual is model.decoder.blocks[1].cross_residual
    assert by_name["decoder.2"].layer is model.decoder.blocks[2].self_attention
    assert by_name["decoder.2"].residual is model.decoder.blocks[2].self_residual
    assert by_name["encoder.1"].layer is model.encoder.blocks[1].self_attention
    assert by_name["encoder.1"].residual is model.encoder.blocks[1].self_residual
    kinds = {site.stack: site.kind for site in sites}
    assert kinds == {"encoder": "self", "decoder": "causal", "cross": "cross"}


@pytest.mark.parametrize("scheme", ["none", "sinusoidal", "learned", "rotary", "alibi"])
@pytest.mark.parametrize("norm", ["post", "pre"])
def test_weights_carry_what_the_model_knows_of_them(norm: Any, scheme: Any) -> None:
    model = make_model(norm=norm, positions=PositionsConfig(scheme=scheme))
    found = attention_weights(model)
    assert list(found) == NAMES
    for site in attention_sites(model):
        weights = found[site.name]
        assert weights.semantics.kind == site.kind
        assert weights.norm_place == norm
        inside = scheme in ("rotary", "alibi") and site.stack != "cross"
        assert weights.semantics.positions == (scheme if inside else "none")
        expected = site.layer.projections.q_proj.weight
        assert weights.q[0].weight.untyped_storage().data_ptr() == expected.untyped_storage().data_ptr()
        if norm == "post":
            assert weights.norm is None
            assert weights.memory_norm is None
            continue
        assert weights.norm is not None
        assert_same(weights.norm.weight, site.residual.norm.weight.detach(), kind="exact")
        assert weights.norm.bias is not None
        assert_same(weights.norm.bias, site.residual.norm.bias.detach(), kind="exact")
        assert weights.norm.offset == 0
        assert (weights.memory_norm is not None) == (site.stack == "cross")
        if weights.memory_norm is not None:
            assert isinstance(model.encoder.final_norm, nn.LayerNorm)
            assert_same(weights.memory_norm.weight, model.encoder.final_norm.weight.detach(), kind="exact")
    assert not any(tensor.requires_grad for weights in found.values() for tensor in weights.tensors())


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_the_norms_that_layers_are_said_to_read_make_their_inputs(norm: Any) -> None:
    model = make_model(norm=norm)
    heard: dict[str, tuple[torch.Tensor, torch.Tensor | None]] = {}

    def listen(name: str) -> Any:
        return lambda module, given, more: heard.update({name: (given[0], more.get("memory"))})

    for site in attention_sites(model):
        site.layer.register_forward_pre_hook(listen(site.name), with_kwargs=True)
    model(SRC, TGT)
    read = input_norms(model)
    assert list(read) == list(heard) == NAMES
    unknown = {name for name, (own, _) in read.items() if own is None}
    assert unknown == (set() if norm == "pre" else {"encoder.0", "decoder.0"})
    for name, norms in read.items():
        assert (norms[1] is not None) == name.startswith("cross")
        for norm_of, x in zip(norms, heard[name], strict=True):
            if norm_of is not None and x is not None:
                assert norm_of.bias is not None
                squares = ((x - norm_of.bias) / norm_of.weight).square().sum(dim=-1)
                torch.testing.assert_close(squares, torch.full_like(squares, x.shape[-1]), rtol=1e-2, atol=0)


# Copies


@pytest.mark.parametrize("tie", ["all", "target", "none"])
@pytest.mark.parametrize("config", ["plain", "of all kinds", "learned, pre"])
def test_a_model_with_nothing_changed_is_a_copy(tie: Any, config: str) -> None:
    chosen = {
        "plain": make_config(),
        "of all kinds": of_all_kinds(),
        "learned, pre": make_config(norm="pre", positions=PositionsConfig(scheme="learned")),
    }[config]
    tied = chosen.model_copy(update={"tie_embeddings": tie})
    model = EncoderDecoder.of(tied, VOCAB, VOCAB, PAD).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    state, before = torch.random.get_rng_state(), snapshot(model)
    copy = with_attention(model, {})
    assert torch.equal(torch.random.get_rng_state(), state)
    assert copy is not model
    assert not copy.training
    assert_same(copy(SRC, TGT), model(SRC, TGT), kind="exact")
    assert copy.state_dict().keys() == before.keys()
    for name, value in before.items():
        assert_same(model.state_dict()[name], value, kind="exact")
        assert_same(copy.state_dict()[name], value, kind="exact")
    pointers = [{p.data_ptr() for p in one.parameters()} for one in (model, copy)]
    assert not pointers[0] & pointers[1]
    for one in (model, copy):
        assert (one.head.output.weight is one.decoder.embeddings.table.weight) == (tie != "none")
        assert (one.encoder.embeddings.table is one.decoder.embeddings.table) == (tie == "all")
    for one, other in zip(attention_sites(copy), attention_sites(model), strict=True):
        assert one.layer is not other.layer
        assert one.layer.num_heads == other.layer.num_heads
        assert one.layer.dropout == other.layer.dropout
        assert one.layer.semantics.positions == other.layer.semantics.positions
        assert one.layer.parameterisation == other.layer.parameterisation


def test_a_copy_takes_dtype_and_mode_along() -> None:
    model = EncoderDecoder.of(make_config(), VOCAB, VOCAB, PAD).bfloat16().train()
    copy = with_attention(model, {})
    assert copy.training
    assert {p.dtype for p in copy.parameters()} == {torch.bfloat16}
    assert with_attention(model.eval(), {}).training is False


def test_a_changed_site_stands_alone_in_the_configuration() -> None:
    model = make_model()
    before, config = snapshot(model), find_config(model)
    changed = changed_weights()
    state = torch.random.get_rng_state()
    new = with_attention(model, {"decoder.1": changed})
    assert torch.equal(torch.random.get_rng_state(), state)
    assert find_config(new).decoder.attention_in_layer.keys() == {1}
    own = find_config(new).decoder.attention_in_layer[1]
    assert own.parameterisation() == parameterisation("grouped", num_kv_heads=2, d_k=3, d_v=5, o_bias=True)
    assert find_config(new).encoder.attention_in_layer == {}
    assert find_config(new).decoder.cross_attention_in_layer == {}
    both = [one.model_dump(exclude={"encoder", "decoder"}) for one in (find_config(new), config)]
    assert both[0] == both[1]
    sites = {site.name: site.layer for site in attention_sites(new)}
    for side in ("q", "k", "v", "o"):
        found = sites["decoder.1"].weights().chain(side)[0].weight
        assert_same(found, changed.chain(side)[0].weight, kind="exact")
    for site in attention_sites(model):
        if site.name != "decoder.1":
            for name, value in site.layer.state_dict().items():
                assert_same(sites[site.name].state_dict()[name], value, kind="exact")
    for name, value in before.items():
        assert_same(model.state_dict()[name], value, kind="exact")
    assert find_config(model) == config
    # The weights are copies: what is done to the new model does not reach those given.
    kept = changed.q[0].weight.clone()
    with torch.no_grad():
        sites["decoder.1"].get_parameter("projections.q_proj.weight").zero_()
    assert_same(changed.q[0].weight, kept, kind="exact")


def changed_weights() -> AttentionWeights:
    chosen = parameterisation("grouped", num_kv_heads=2, d_k=3, d_v=5, o_bias=True)
    layer = MultiHeadAttention(16, 4, chosen).double()
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.3)
    return layer.weights()


def test_the_new_model_computes_with_the_changed_weights() -> None:
    model = make_model()
    changed = changed_weights()
    new = with_attention(model, {"cross.0": changed})
    model.decoder.blocks[0].cross_attention = MultiHeadAttention.from_weights(changed)
    assert_same(new(SRC, TGT), model(SRC, TGT), kind="exact")


def test_a_whole_stack_that_changes_is_the_stacks_new_usual() -> None:
    model = make_model()
    changed = {name: changed_weights() for name in ("decoder.0", "decoder.1", "decoder.2")}
    new = with_attention(model, changed)
    assert find_config(new).decoder.attention_in_layer == {}
    assert find_config(new).decoder.attention.projections == "grouped"
    assert find_config(new).decoder.cross_attention.projections == "factored"
    assert find_config(new).encoder.attention.projections == "factored"


def test_another_writing_of_the_same_maps_leaves_the_logits() -> None:
    model = make_model(encoder=EncoderConfig(num_layers=2, attention=AttentionConfig(projections="shared")))
    separate: dict[str, AttentionWeights] = {}
    for name, weights in attention_weights(model).items():
        if name.startswith("encoder"):  # three maps with the numbers of the one
            q, k, v = ((Link(weights.q[0].weight),) for _ in range(3))
            separate[name] = replace(weights, q=q, k=k, v=v)
    new = with_attention(model, separate)
    assert find_config(new).encoder.attention.projections == "factored"
    assert find_config(new).encoder.attention_in_layer == {}
    assert_same(new(SRC, TGT), model(SRC, TGT), kind="output")


def test_positions_and_dropout_stay_with_a_site_that_changes() -> None:
    positions = PositionsConfig(scheme="rotary", rotary_dim=2)
    site = AttentionConfig(dropout=0.3)
    model = make_model(positions=positions, decoder=DecoderConfig(num_layers=3, attention=site), d_k=4)
    layer = MultiHeadAttention(16, 2, Factored(d_k=6, d_v=5)).double()
    new = with_attention(model, {"decoder.0": layer.weights()})
    changed = new.decoder.blocks[0].self_attention
    assert changed.semantics.rotary is not None
    assert changed.semantics.rotary.frequencies.tolist() == [1.0]
    turned = MultiHeadAttention(16, 2, positions=RotaryPositions(4)).double()
    others = with_attention(model, {"decoder.0": turned.weights()})
    of_weights = others.decoder.blocks[0].self_attention.semantics.rotary
    assert of_weights is not None
    assert len(of_weights.frequencies) == 2
    assert (changed.dropout, changed.num_heads) == (0.3, 2)
    assert changed.parameterisation == Factored(d_k=6, d_v=5)
    assert find_config(new).decoder.attention_in_layer[0].dropout == 0.3


def test_a_site_there_is_not_is_refused_with_those_there_are() -> None:
    model = make_model()
    weights = changed_weights()
    with pytest.raises(ValueError, match=r"there is no attention site decoder\.3: there are encoder\.0, "):
        with_attention(model, {"decoder.3": weights})


def test_weights_of_another_width_are_refused_with_both() -> None:
    wider = MultiHeadAttention(24, 4).double().weights()
    with pytest.raises(ValueError, match=r"the weights for encoder\.0 read 24 channels, the model has 16"):
        with_attention(make_model(), {"encoder.0": wider})


def test_weights_that_cannot_turn_are_refused_under_rotary_positions() -> None:
    model = make_model(positions=PositionsConfig(scheme="rotary"))
    latent = MultiHeadAttention(16, 4, parameterisation("latent")).double().weights()
    with pytest.raises(ValueError, match="latent cannot have rotary positions"):
        with_attention(model, {"encoder.0": latent})
    assert find_config(with_attention(model, {"cross.0": latent})).sites("cross")[0].projections == "latent"


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_a_norm_without_weights_leaves_no_norm_to_fold(kind: str) -> None:
    bare = NormConfig(kind, weight=False, bias=False)  # type: ignore[arg-type]
    frame = SublayerConfig(bare)
    blocks = (BlockConfig(frame, FeedForwardConfig(24), frame),)
    made = LanguageModelArchitecture("decoder", 16, EmbeddingsConfig(VOCAB), blocks, bare)
    model = LanguageModel(made, [MultiHeadAttention(16, 4)])
    assert attention_weights(model)["decoder.0"].norm is None
    assert input_norms(model) == {"decoder.0": (None, None)}


# Files


def test_a_model_with_layers_of_their_own_is_read_as_it_was_written(tmp_path: Path) -> None:
    model = EncoderDecoder.of(of_all_kinds(), VOCAB, VOCAB, PAD).eval()
    changed = MultiHeadAttention(16, 4, parameterisation("collaborative", d_shared=9, k_bias=True)).weights()
    model = with_attention(model, {"decoder.1": changed})
    write_model(model, tmp_path)
    read = read_model(tmp_path)
    assert find_config(read) == find_config(model)
    written = {site.name: site.layer.parameterisation for site in attention_sites(model)}
    assert {site.name: site.layer.parameterisation for site in attention_sites(read)} == written
    assert len({type(chosen) for chosen in written.values()}) == 7
    assert_same(read(SRC, TGT), model(SRC, TGT), kind="exact")
