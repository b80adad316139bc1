"""A model of ours as a folder of CTranslate2's.

Its `TransformerSpec` is filled directly, with the numbers of the plainly written model, so neither
transformers nor the conventions of a Marian checkpoint are needed: pre-norm, learned positions and any
special tokens fit too.

Source: `specs/transformer_spec.py` of github.com/OpenNMT/CTranslate2, version 4.8.
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triptych.attention import MultiHeadAttention
from triptych.checkpoints.marian_tokenizers import write_tokenizers
from triptych.checkpoints.marian_writing import max_positions, position_table
from triptych.converting.checks import (
    ConversionCheck,
    Pairs,
    Quantization,
    Written,
    compare_logits,
    logits_of,
    random_pairs,
    rounded_difference,
)
from triptych.converting.ctranslate2_layers import array, set_linear, set_norm
from triptych.converting.plain_heads import plain_model
from triptych.extras import require_extra
from triptych.models import EncoderDecoder
from triptych.models.blocks import Block, Residual
from triptych.models.feed_forward import FeedForward
from triptych.opening import OpenedModel
from triptych.text import SentencePieceTokenizer

_TOLERANCE = 1e-4


def write_ctranslate2(run: OpenedModel, folder: Path, quantization: Quantization) -> Written:
    """Fill a folder that `ctranslate2.Translator` reads."""
    require_extra("convert", "ctranslate2", what="--to ctranslate2")
    plain = plain_model(run.encoder_decoder, "CTranslate2")
    length = max_positions(run.encoder_decoder, run.decoding.max_extra_tokens)
    spec = _spec(plain.model.float(), plain.num_heads, length)
    source, target = run.tokenizers.source, run.tokenizers.target
    spec.register_source_vocabulary(list(source.vocabulary))
    spec.register_target_vocabulary(list(target.vocabulary))
    tokens = target.vocabulary
    spec.config.bos_token, spec.config.eos_token = tokens[target.bos_id], tokens[target.eos_id]
    spec.config.decoder_start_token = tokens[target.bos_id]
    spec.config.unk_token = _unknown(run)
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = 1e-5
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))
    write_tokenizers(run.tokenizers, run.encoder_decoder.config.max_source_tokens + 1, folder)
    (folder / "README.md").write_text(_readme(run, length), encoding="utf-8")
    parameters = sum(parameter.numel() for parameter in plain.model.parameters())
    check = _check(run, folder, quantization)
    return Written(f"Transformer, {quantization}", parameters, plain.done, (check,))


def _unknown(run: OpenedModel) -> str:
    """The token for unknown text; a token that no text has if nothing can be unknown."""
    source = run.tokenizers.source
    token = source.record.unk_id if isinstance(source, SentencePieceTokenizer) else source.pad_id
    return source.vocabulary[token]


def _spec(model: EncoderDecoder, num_heads: dict[str, int], length: int) -> Any:
    from ctranslate2.specs import common_spec, transformer_spec

    config = model.config
    activations = {
        "relu": common_spec.Activation.RELU,
        "gelu": common_spec.Activation.GELU,
        "swish": common_spec.Activation.SWISH,
    }
    same: dict[str, Any] = {"pre_norm": config.norm == "pre", "activation": activations[config.activation]}
    encoder = transformer_spec.TransformerEncoderSpec(config.encoder.num_layers, num_heads["encoder"], **same)
    decoder = transformer_spec.TransformerDecoderSpec(config.decoder.num_layers, num_heads["decoder"], **same)
    for stack in (encoder, decoder):
        stack.scale_embeddings = float(config.d_model**0.5)
    encoder.embeddings[0].weight = array(model.src_embedding.weight)
    decoder.embeddings.weight = array(model.tgt_embedding.weight)
    encoder.position_encodings.encodings = array(position_table(model, "src", length))
    decoder.position_encodings.encodings = array(position_table(model, "tgt", length))
    if config.norm == "pre":
        set_norm(encoder.layer_norm, model.encoder_norm)
        set_norm(decoder.layer_norm, model.decoder_norm)
    set_linear(decoder.projection, [model.output])
    for layer, block in zip(encoder.layer, model.encoder, strict=True):
        assert isinstance(block, Block)  # a ModuleList does not tell
        _set_self_attention(layer.self_attention, block.self_attention, block.self_residual)
        _set_feed_forward(layer.ffn, block.feed_forward, block.feed_forward_residual)
    for layer, block in zip(decoder.layer, model.decoder, strict=True):
        assert isinstance(block, Block)
        _set_self_attention(layer.self_attention, block.self_attention, block.self_residual)
        set_linear(layer.attention.linear[0], _maps(block.cross_attention, "q"))
        set_linear(layer.attention.linear[1], _maps(block.cross_attention, "kv"))
        set_linear(layer.attention.linear[2], _maps(block.cross_attention, "o"))
        set_norm(layer.attention.layer_norm, block.cross_residual.norm)
        _set_feed_forward(layer.ffn, block.feed_forward, block.feed_forward_residual)
    return transformer_spec.TransformerSpec(encoder, decoder)


def _maps(attention: MultiHeadAttention, sides: str) -> list[torch.nn.Linear]:
    """Maps of the paper's own parameterisation, as `plain_model` writes them."""
    found = [attention.projections.get_submodule(f"{side}_proj") for side in sides]
    return [linear for linear in found if isinstance(linear, torch.nn.Linear)]


def _set_self_attention(spec: Any, attention: MultiHeadAttention, residual: Residual) -> None:
    set_linear(spec.linear[0], _maps(attention, "qkv"))
    set_linear(spec.linear[1], _maps(attention, "o"))
    set_norm(spec.layer_norm, residual.norm)


def _set_feed_forward(spec: Any, feed_forward: torch.nn.Module, residual: Residual) -> None:
    assert isinstance(feed_forward, FeedForward)  # recipes have no other
    set_linear(spec.linear_0, [feed_forward.inner])
    set_linear(spec.linear_1, [feed_forward.outer])
    set_norm(spec.layer_norm, residual.norm)


def _check(run: OpenedModel, folder: Path, quantization: Quantization) -> ConversionCheck:
    """Compare log-probabilities of random outputs, token by token."""
    import ctranslate2

    source, target = run.tokenizers.source, run.tokenizers.target
    pairs = random_pairs(run.encoder_decoder, target.bos_id, target.eos_id)
    translator = ctranslate2.Translator(str(folder), device="cpu", inter_threads=1, intra_threads=1)
    sources = [
        [
            source.vocabulary[token]
            for token in row
            if token not in (source.eos_id, run.encoder_decoder.pad_id)
        ]
        for row in pairs.src.tolist()
    ]
    outputs = [[target.vocabulary[token] for token in row[1:]] for row in pairs.tgt_in.tolist()]
    scores = translator.score_batch(sources, outputs)
    found = torch.tensor([score.log_probs for score in scores])
    what = "log-probabilities of tokens by CTranslate2 and by the model"
    expected = _log_probs(run.encoder_decoder, pairs, target.eos_id)
    if quantization == "int8":
        return rounded_difference(what, expected, found)
    return compare_logits(what, expected, found, _TOLERANCE)


def _log_probs(model: EncoderDecoder, pairs: Pairs, eos_id: int) -> Tensor:
    following = torch.cat([pairs.tgt_in[:, 1:], torch.full_like(pairs.tgt_in[:, :1], eos_id)], dim=1)
    log_probs = logits_of(model, pairs).double().log_softmax(dim=-1)
    return log_probs.gather(2, following[:, :, None])[:, :, 0].float()


def _readme(run: OpenedModel, length: int) -> str:
    pieces = isinstance(run.tokenizers.source, SentencePieceTokenizer)
    target = run.tokenizers.target
    alpha, beam = run.decoding.alpha, run.decoding.beam_size
    never = [[target.vocabulary[token]] for token in dict.fromkeys((target.pad_id, target.bos_id))]
    if pieces:
        setup = """import sentencepiece

source = sentencepiece.SentencePieceProcessor(model_file="path/to/this/folder/source.spm")
target = sentencepiece.SentencePieceProcessor(model_file="path/to/this/folder/target.spm")
tokens = source.encode("A sentence.", out_type=str)"""
        text = "target.decode(found[0].hypotheses[0])"
    else:
        file = "tokenizer.json" if run.tokenizers.joint else "target_tokenizer/tokenizer.json"
        setup = f"""from tokenizers import Tokenizer

source = Tokenizer.from_file("path/to/this/folder/tokenizer.json")
source.encode_special_tokens = True
target = Tokenizer.from_file("path/to/this/folder/{file}")
tokens = source.encode("A sentence.", add_special_tokens=False).tokens"""
        text = "target.decode([target.token_to_id(token) for token in found[0].hypotheses[0]])"
    return f"""# A translation model for CTranslate2, converted with triptych

```python
import ctranslate2
{setup}
translator = ctranslate2.Translator("path/to/this/folder")
found = translator.translate_batch(
    [tokens],
    beam_size={beam},
    length_penalty={alpha},
    suppress_sequences={never},
    max_decoding_length={length},
)
print({text})
```

Sources have at most {run.encoder_decoder.config.max_source_tokens} tokens, and there are {length} positions.
triptych divides log-probabilities by ((5 + n) / 6)^α, CTranslate2 by n^α: with the length penalty off (0)
both search alike.
"""
