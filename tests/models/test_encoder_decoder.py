"""The model: against torch's, its ties, what may and may not move its output."""

from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from tolerances import assert_same
from triptych.core.attention import sinusoidal
from triptych.core.models import (
    PRESETS,
    AttentionConfig,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoder,
    ModelConfig,
)
from triptych.core.models.blocks import Residual
from triptych.core.models.feed_forward import Dropout
from triptych.core.models.storage import stored_parameters

Norm = Literal["post", "pre"]
BIASED = AttentionConfig(q_bias=True, k_bias=True, v_bias=True, o_bias=True)
PAD, VOCAB = 0, 20
SRC = torch.tensor([[5, 6, 7, 8, 2], [9, 10, 2, PAD, PAD], [11, 2, PAD, PAD, PAD]])
TGT = torch.tensor([[1, 4, 5, 6], [1, 7, 8, 9], [1, 3, 3, 3]])


def make_config(attention: AttentionConfig | None = None, **changes: Any) -> ModelConfig:
    site = attention or AttentionConfig()
    sizes: dict[str, Any] = {
        **{"d_model": 16, "d_ff": 24, "num_heads": 4, "dropout": 0.1},
        "encoder": EncoderConfig(num_layers=2, attention=site),
        "decoder": DecoderConfig(num_layers=3, attention=site, cross_attention=site),
    }
    return ModelConfig(**{**sizes, **changes})


def make_model(**changes: Any) -> EncoderDecoder:
    return EncoderDecoder.of(make_config(**changes), VOCAB, VOCAB, PAD).double().eval()


def copy_attention(ours: nn.Module, torchs: nn.MultiheadAttention) -> None:
    with torch.no_grad():
        for kind in ("weight", "bias"):
            for name, part in zip("qkv", getattr(torchs, f"in_proj_{kind}").chunk(3), strict=True):
                ours.get_parameter(f"projections.{name}_proj.{kind}").copy_(part)
            ours.get_parameter(f"projections.o_proj.{kind}").copy_(getattr(torchs.out_proj, kind))


def copy_stack(model: EncoderDecoder, encoder: nn.TransformerEncoder, decoder: nn.TransformerDecoder) -> None:
    for block, layer in zip(model.encoder.blocks, encoder.layers, strict=True):
        copy_attention(block.self_attention, layer.self_attn)
        block.self_residual.norm.load_state_dict(layer.norm1.state_dict())
        block.feed_forward_residual.norm.load_state_dict(layer.norm2.state_dict())
    for block, layer in zip(model.decoder.blocks, decoder.layers, strict=True):
        copy_attention(block.self_attention, layer.self_attn)
        copy_attention(block.cross_attention, layer.multihead_attn)
        block.self_residual.norm.load_state_dict(layer.norm1.state_dict())
        block.cross_residual.norm.load_state_dict(layer.norm2.state_dict())
        block.feed_forward_residual.norm.load_state_dict(layer.norm3.state_dict())
    blocks, layers = [*model.encoder.blocks, *model.decoder.blocks], [*encoder.layers, *decoder.layers]
    for block, layer in zip(blocks, layers, strict=True):
        block.feed_forward.inner.load_state_dict(layer.linear1.state_dict())
        block.feed_forward.outer.load_state_dict(layer.linear2.state_dict())
    if encoder.norm is not None:
        model.encoder.final_norm.load_state_dict(encoder.norm.state_dict())
        model.decoder.final_norm.load_state_dict(decoder.norm.state_dict())


def embed(table: nn.Embedding, ids: Tensor) -> Tensor:
    return table.weight[ids] * 16**0.5 + sinusoidal(ids.shape[1], 16)


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_encoder_and_decoder_are_torchs_with_the_same_weights(norm: Norm) -> None:
    pre = norm == "pre"
    options: dict[str, Any] = {"batch_first": True, "norm_first": pre, "dtype": torch.float64}
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(16, 4, 24, **options),
        2,
        norm=nn.LayerNorm(16, dtype=torch.float64) if pre else None,
        enable_nested_tensor=False,
    ).eval()
    decoder = nn.TransformerDecoder(
        nn.TransformerDecoderLayer(16, 4, 24, **options),
        3,
        norm=nn.LayerNorm(16, dtype=torch.float64) if pre else None,
    ).eval()
    for parameter in [*encoder.parameters(), *decoder.parameters()]:
        nn.init.normal_(parameter, std=0.4)
    model = make_model(norm=norm, attention=BIASED, tie_embeddings="none")
    copy_stack(model, encoder, decoder)

    padding = SRC == PAD
    triangle = torch.ones(4, 4, dtype=torch.bool).triu(1)
    expected_memory = encoder(embed(model.encoder.embeddings.table, SRC), src_key_padding_mask=padding)
    expected = decoder(
        embed(model.decoder.embeddings.table, TGT),
        expected_memory,
        tgt_mask=triangle,
        memory_key_padding_mask=padding,
        tgt_is_causal=True,
    )
    memory = model.encode(SRC)
    decoded = model.decode(TGT, memory, model.memory_mask(SRC))
    assert_same(memory[~padding], expected_memory[~padding], kind="output")
    assert_same(decoded, expected, kind="output")
    assert_same(model(SRC, TGT), expected @ model.head.output.weight.T, kind="output")


@pytest.mark.parametrize(("tie", "num_tables"), [("all", 1), ("target", 2), ("none", 3)])
def test_a_tie_is_one_storage_and_no_tie_is_none(
    tie: Literal["all", "target", "none"], num_tables: int
) -> None:
    model = make_model(tie_embeddings=tie)
    own = (stack.embeddings.table.weight for stack in model.stacks.values())
    tables = [*own, model.head.output.weight]
    assert len({table.data_ptr() for table in tables}) == num_tables
    names = [name for name in stored_parameters(model) if "embedding" in name or "output." in name]
    assert len(names) == num_tables


def test_one_table_for_two_vocabularies_is_refused_with_their_sizes() -> None:
    with pytest.raises(ValueError, match=r"not 30 source and 20 target tokens: make the tokenizer joint"):
        EncoderDecoder.of(make_config(), 30, 20)


@pytest.mark.parametrize("tie", ["target", "none"])
def test_untied_vocabularies_may_differ(tie: Literal["target", "none"]) -> None:
    model = EncoderDecoder.of(make_config(tie_embeddings=tie), 30, 20, PAD)
    assert (model.src_vocab_size, model.tgt_vocab_size) == (30, 20)
    assert model(torch.tensor([[29, 2]]), TGT[:1]).shape == (1, 4, 20)


def test_hypotheses_of_a_sentence_share_its_memory() -> None:
    model = make_model()
    memory, mask = model.encode(SRC), model.memory_mask(SRC)
    rows = torch.randint(3, VOCAB, (6, 4))
    shared = model.decode(rows, memory, mask)
    copied = model.decode(rows, memory.repeat_interleave(2, 0), mask.repeat_interleave(2, 0))
    assert_same(shared, copied, kind="output")


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_builds_and_runs(preset: str) -> None:
    # base and big are built without storage: shapes are checked, memory is not filled
    device = torch.device("cpu" if preset in ("tiny", "small") else "meta")
    with device:
        model = EncoderDecoder.of(PRESETS[preset], VOCAB, VOCAB)
    logits = model(SRC.to(device), TGT.to(device))
    assert logits.shape == (3, 4, VOCAB)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    if device.type == "cpu":
        assert logits.isfinite().all()
        # A key bias apart (there is none here), every weight moves the output.
        assert all(bool((p.grad != 0).any()) for p in model.parameters())


def test_a_fresh_model_is_near_chance() -> None:
    model = EncoderDecoder.of(PRESETS["tiny"], 1000, 1000).eval()
    logits = model(torch.randint(3, 1000, (8, 12)), torch.randint(3, 1000, (8, 12))).detach()
    # Logits of variance about 1 over 1000 tokens: ln 1000 + 1/2.
    surprise = logits.logsumexp(-1) - logits.mean(-1)
    assert float(surprise.mean()) == pytest.approx(7.4, abs=0.3)


def test_dropout_acts_while_training_only() -> None:
    model = make_model()
    assert_same(model(SRC, TGT), model(SRC, TGT), kind="exact")
    model.train()
    assert not torch.equal(model(SRC, TGT), model(SRC, TGT))


def test_dropout_stands_on_embeddings_and_on_every_sub_layer() -> None:
    model = EncoderDecoder.of(make_config(dropout=0.25, activation_dropout=0.5), VOCAB, VOCAB)
    at = {name: module.p for name, module in model.named_modules() if isinstance(module, Dropout)}
    residual = [p for name, p in at.items() if name.endswith("residual.dropout")]
    activation = [p for name, p in at.items() if name.endswith("feed_forward.dropout")]
    assert at["encoder.embeddings.dropout"] == at["decoder.embeddings.dropout"] == 0.25
    assert residual == [0.25] * (2 * 2 + 3 * 3)
    assert activation == [0.5] * 5


@pytest.mark.parametrize("norm", ["post", "pre"])
def test_dropout_falls_on_what_a_sub_layer_adds_and_not_on_the_stream(norm: Norm) -> None:
    residual = Residual(make_config(norm=norm, dropout=0.5).block(cross=False).attention, 16).train()
    x, change = torch.randn(5, 7, 16), torch.ones(5, 7, 16)
    unchanged = residual.leave(x, torch.zeros_like(x))
    assert_same(unchanged, x if norm == "pre" else residual.norm(x), kind="exact")
    if norm == "pre":
        assert_same((residual.leave(x, change) - x).round().unique(), torch.tensor([0.0, 2.0]), kind="exact")
