"""Models of ours as folders of CTranslate2's.

Its specifications are filled directly, with plainly written heads, so neither `transformers` nor the
conventions of another library's checkpoint are needed. Language models fit if they are made of what GPT-2 and
Llama have: pre-norm blocks with one kind of norm, learned or rotary positions, feed-forward layers with or
without a gate, and heads that may share keys and values. Everything else is refused by name.

Source: `specs/transformer_spec.py` of github.com/OpenNMT/CTranslate2, version 4.8.
"""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from triptych.algebra.positions import RotaryEmbedding
from triptych.algebra.weights import AttentionWeights
from triptych.attention import MultiHeadAttention
from triptych.checkpoints.marian_tokenizers import write_tokenizers
from triptych.converting.checks import (
    ConversionCheck,
    Quantization,
    Written,
    compare_logits,
    logits_of,
    random_pairs,
    rounded_difference,
)
from triptych.converting.plain import (
    HeadSizes,
    head_sizes,
    max_positions,
    padded,
    plain_layer,
    plain_model,
    position_table,
    rotary_base,
)
from triptych.errors import UsageError
from triptych.extras import require_extra
from triptych.files import write_text
from triptych.models import EncoderDecoder, LanguageModel
from triptych.models.architecture import FeedForwardConfig, NormConfig, SublayerConfig
from triptych.models.blocks import Block, OffsetNorm
from triptych.models.feed_forward import FeedForward
from triptych.opening import OpenedModel
from triptych.text import PretrainedTokenizer, SentencePieceTokenizer

_TOLERANCE = 1e-4
_ACTIVATIONS = {
    "relu": "RELU",
    "gelu": "GELU",
    "gelu_tanh": "GELUTanh",
    "gelu_sigmoid": "GELUSigmoid",
    "swish": "SWISH",
    "tanh": "Tanh",
    "sigmoid": "Sigmoid",
}


def _activation(name: str) -> Any:
    from ctranslate2.specs import common_spec

    return getattr(common_spec.Activation, _ACTIVATIONS[name])


def write_translator(run: OpenedModel, folder: Path, quantization: Quantization) -> Written:
    """Fill a folder that `ctranslate2.Translator` reads."""
    require_extra("convert", "ctranslate2", what="--to ctranslate2")
    special = {run.tokenizers.target.pad_id, run.tokenizers.target.bos_id, run.tokenizers.target.eos_id}
    if run.shortlist is not None and special != set(range(len(special))):
        # Version 4.8 keeps the places that tokens had in an earlier batch (`Decoder::update_output_layer`);
        # of the first tokens they never change.
        raise UsageError(
            "with a shortlist CTranslate2 mixes up special tokens between batches, where they are not the "
            "first of the vocabulary: leave the shortlist out, or use --engine triptych"
        )
    plain = plain_model(run.encoder_decoder, "CTranslate2")
    length = max_positions(run.encoder_decoder, run.decoding.max_extra_tokens)
    spec = _translator_spec(plain.model.float(), plain.num_heads, length)
    source, target = run.tokenizers.source, run.tokenizers.target
    spec.register_source_vocabulary(list(source.vocabulary))
    spec.register_target_vocabulary(list(target.vocabulary))
    tokens = target.vocabulary
    spec.config.bos_token, spec.config.eos_token = tokens[target.bos_id], tokens[target.eos_id]
    spec.config.decoder_start_token = tokens[target.bos_id]
    # A token that no text has if nothing can be unknown.
    unknown = source.record.unk_id if isinstance(source, SentencePieceTokenizer) else source.pad_id
    spec.config.unk_token = source.vocabulary[unknown]
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = 1e-5
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))
    write_tokenizers(run.tokenizers, run.encoder_decoder.config.max_source_tokens + 1, folder)
    if run.shortlist is not None:
        write_text(folder / "vmap.txt", run.shortlist.as_text(run.tokenizers))
    (folder / "README.md").write_text(_readme_of_translator(run, length), encoding="utf-8")
    parameters = sum(parameter.numel() for parameter in plain.model.parameters())
    check = _check_translator(run, folder, quantization)
    return Written(f"Transformer, {quantization}", parameters, plain.done, (check,))


def _translator_spec(model: EncoderDecoder, num_heads: dict[str, int], length: int) -> Any:
    from ctranslate2.specs import transformer_spec

    config = model.config
    same: dict[str, Any] = {"pre_norm": config.norm == "pre", "activation": _activation(config.activation)}
    encoder = transformer_spec.TransformerEncoderSpec(config.encoder.num_layers, num_heads["encoder"], **same)
    decoder = transformer_spec.TransformerDecoderSpec(config.decoder.num_layers, num_heads["decoder"], **same)
    for stack in (encoder, decoder):
        stack.scale_embeddings = float(config.d_model**0.5)
    encoder.embeddings[0].weight = _array(model.encoder.embeddings.table.weight)
    decoder.embeddings.weight = _array(model.decoder.embeddings.table.weight)
    encoder.position_encodings.encodings = _array(position_table(model.encoder, length))
    decoder.position_encodings.encodings = _array(position_table(model.decoder, length))
    if config.norm == "pre":
        _set_norm(encoder.layer_norm, model.encoder.final_norm)
        _set_norm(decoder.layer_norm, model.decoder.final_norm)
    _set_linear(decoder.projection, [model.head.output])
    for layer, block in zip([*encoder.layer, *decoder.layer], model.blocks, strict=True):
        assert isinstance(block, Block)  # a ModuleList does not tell
        _set_linear(layer.self_attention.linear[0], _maps(block.self_attention, "qkv"))
        _set_linear(layer.self_attention.linear[1], _maps(block.self_attention, "o"))
        _set_norm(layer.self_attention.layer_norm, block.self_residual.norm)
        _set_feed_forward(layer.ffn, block)
        if block.has_cross:
            for place, sides in enumerate(("q", "kv", "o")):
                _set_linear(layer.attention.linear[place], _maps(block.cross_attention, sides))
            _set_norm(layer.attention.layer_norm, block.cross_residual.norm)
    return transformer_spec.TransformerSpec(encoder, decoder)


def _maps(attention: MultiHeadAttention, sides: str) -> list[torch.nn.Linear]:
    """Maps of the paper's own parameterisation, as `plain_model` writes them."""
    found = [attention.projections.get_submodule(f"{side}_proj") for side in sides]
    return [linear for linear in found if isinstance(linear, torch.nn.Linear)]


def _set_feed_forward(spec: Any, block: Block) -> None:
    feed_forward = block.feed_forward
    assert isinstance(feed_forward, FeedForward)  # others are refused
    gate = feed_forward.gate
    _set_linear(spec.linear_0, [feed_forward.inner if gate is None else gate])
    if gate is not None:
        _set_linear(spec.linear_0_noact, [feed_forward.inner])
    _set_linear(spec.linear_1, [feed_forward.outer])
    _set_norm(spec.layer_norm, block.feed_forward_residual.norm)


def _check_translator(run: OpenedModel, folder: Path, quantization: Quantization) -> ConversionCheck:
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
    following = torch.cat([pairs.tgt_in[:, 1:], torch.full_like(pairs.tgt_in[:, :1], target.eos_id)], dim=1)
    log_probs = logits_of(run.encoder_decoder, pairs).double().log_softmax(dim=-1)
    expected = log_probs.gather(2, following[:, :, None])[:, :, 0].float()
    if quantization == "int8":
        return rounded_difference(what, expected, found)
    return compare_logits(what, expected, found, _TOLERANCE)


def _readme_of_translator(run: OpenedModel, length: int) -> str:
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
    use_vmap={run.shortlist is not None},
)
print({text})
```

Sources have at most {run.encoder_decoder.config.max_source_tokens} tokens, and there are {length} positions.
triptych divides log-probabilities by ((5 + n) / 6)^α, CTranslate2 by n^α: with the length penalty off (0)
both search alike.
"""


def write_text_generator(opened: OpenedModel, folder: Path, quantization: Quantization) -> Written:
    """Fill a folder that `ctranslate2.Generator` reads with a language model and its tokenizer."""
    model, tokenizer = opened.language_model, opened.tokenizer
    check = write_generator(model, folder, quantization)
    if isinstance(tokenizer, PretrainedTokenizer):
        tokenizer.save_files(folder)
    else:
        tokenizer.save(folder / "tokenizer.json")
    write_text(folder / "README.md", _readme(opened.end_ids))
    count = sum(parameter.numel() for parameter in model.parameters())
    return Written(f"TransformerDecoder, {quantization}", count, (), (check,))


def _readme(end_ids: Sequence[int]) -> str:
    return f"""# A language model for CTranslate2, converted with triptych

Its tokens are the numbers of the tokenizer's, as text.

```python
import ctranslate2
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("path/to/this/folder/tokenizer.json")
generator = ctranslate2.Generator("path/to/this/folder")
prompt = [str(token) for token in tokenizer.encode("Once upon", add_special_tokens=False).ids]
(found,) = generator.generate_batch([prompt], max_length=40, end_token={list(end_ids)})
print(tokenizer.decode(found.sequences_ids[0]))
```
"""


def write_generator(
    model: LanguageModel, folder: Path, quantization: Quantization = "float32"
) -> ConversionCheck:
    """Fill a folder that `ctranslate2.Generator` reads; its tokens are the numbers "0", "1", … of ours."""
    require_extra("ctranslate2", "ctranslate2", what="--engine ctranslate2")
    spec = _spec(model)
    vocabulary = [str(token) for token in range(model.vocab_size)]
    spec.register_vocabulary(vocabulary)
    # Every token of ours is known, and the engine names the tokens that end a text.
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = vocabulary[0]
    spec.config.layer_norm_epsilon = _norm_of(model).eps
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))
    return _check(model, folder, quantization)


def _refused(what: str) -> UsageError:
    return UsageError(f"CTranslate2 cannot hold this model: {what}")


def _norm_of(model: LanguageModel) -> NormConfig:
    """The norm that all of the model's are alike."""
    norm = model.architecture.final_norm
    if norm is None:
        raise _refused("there is no norm after the last block")
    return norm


def _require_fit(model: LanguageModel) -> None:
    """All but the attention layers is what a spec holds."""
    made, norm = model.architecture, _norm_of(model)
    embeddings, head = made.embeddings, made.head
    reasons: dict[str, bool] = {
        "it is an encoder": made.kind != "decoder",
        "it has no output table": head is None,
        "blocks serve several times": bool(made.order) and made.order != tuple(range(len(made.blocks))),
        "embeddings have another width than the stream": embeddings.width not in (None, made.d_model),
        f"{embeddings.positions} positions of the embeddings": embeddings.positions == "sinusoidal",
        "token types": embeddings.num_types > 0,
        "a norm of the embeddings": embeddings.norm is not None,
    }
    if head is not None:
        reasons |= {
            "a map before the output table": head.transform or head.norm is not None or bool(head.activation),
            "the output table has another width than the stream": head.width not in (None, made.d_model),
            "a soft cap of the logits": head.soft_cap is not None,
        }
    first = _feed_forward(model, 0)
    for number, block in enumerate(made.blocks):
        for frame in (block.attention, block.feed_forward_frame):
            reasons |= {f"block {number} {reason}": holds for reason, holds in _of_frame(frame, norm)}
        reasons[f"block {number} computes attention and feed-forward layer side by side"] = block.parallel
        feed_forward = _feed_forward(model, number)
        reasons[f"block {number} has another feed-forward layer than the first"] = (
            feed_forward.activation,
            feed_forward.gated,
        ) != (first.activation, first.gated)
        reasons[f"the activation {feed_forward.activation}"] = feed_forward.activation not in _ACTIVATIONS
    for reason, holds in reasons.items():
        if holds:
            raise _refused(reason)


def _feed_forward(model: LanguageModel, number: int) -> FeedForwardConfig:
    config = model.architecture.blocks[number].feed_forward
    if not isinstance(config, FeedForwardConfig):
        raise _refused(f"block {number} has a mixture of experts")
    return config


def _of_frame(frame: SublayerConfig, norm: NormConfig) -> Iterator[tuple[str, bool]]:
    yield "has no norm before a sub-layer", frame.norm is None or frame.place != "pre"
    yield "has a norm after a sub-layer", frame.out_norm is not None
    yield "scales what a sub-layer adds", frame.scale != 1.0
    yield "adds to the normalised stream", frame.from_norm
    alike = frame.norm is None or (frame.norm.kind, frame.norm.eps) == (norm.kind, norm.eps)
    yield "has another norm than the last one", not alike


def _spec(model: LanguageModel) -> Any:
    from ctranslate2.specs import transformer_spec

    _require_fit(model)
    made, norm = model.architecture, _norm_of(model)
    blocks = [block for block in model.blocks if isinstance(block, Block)]
    plain = [plain_layer(block, number, _refused) for number, block in enumerate(blocks)]
    sizes = head_sizes(plain, _refused)
    rotary, *others = (_rotary(weights.semantics.rotary, sizes.width) for weights in plain)
    if any(other != rotary for other in others):
        raise _refused("its layers have different rotary positions")
    if not rotary and made.embeddings.positions == "none":
        raise _refused("it has no positions")
    first = _feed_forward(model, 0)
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        len(blocks),
        sizes.num_heads,
        pre_norm=True,
        activation=_activation(first.activation),
        ffn_glu=first.gated,
        rms_norm=norm.kind == "rms",
        num_heads_kv=None if sizes.num_kv_heads == sizes.num_heads else sizes.num_kv_heads,
        head_dim=None if sizes.width * sizes.num_heads == made.d_model else sizes.width,
        **rotary,
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False if made.embeddings.scale == 1.0 else float(made.embeddings.scale)
    decoder.embeddings.weight = _array(model.embeddings.table.weight)
    if made.embeddings.positions == "learned":
        rows = model.embeddings.positions.get_parameter("weight")
        decoder.position_encodings.encodings = _array(rows[made.embeddings.position_offset :])
    _set_norm(decoder.layer_norm, model.final_norm)
    assert model.head is not None
    output, scale = model.head.output, model.head.config.scale
    decoder.projection.weight = _array(output.weight * scale if scale != 1.0 else output.weight)
    if output.bias is not None:
        decoder.projection.bias = _array(output.bias * scale)
    for layer, block, weights in zip(decoder.layer, blocks, plain, strict=True):
        _set_attention(layer.self_attention, weights, sizes)
        _set_norm(layer.self_attention.layer_norm, block.self_residual.norm)
        _set_feed_forward(layer.ffn, block)
    return spec


def _rotary(rotary: RotaryEmbedding | None, width: int) -> dict[str, Any]:
    """Arguments of the spec for rotary positions; none without them."""
    if rotary is None:
        return {}
    count = len(rotary.frequencies)
    return {
        "rotary_dim": 0 if 2 * count == width else 2 * count,
        "rotary_interleave": rotary.pairing == "interleaved",
        "rotary_base": rotary_base(rotary, _refused),
    }


def _set_attention(spec: Any, weights: AttentionWeights, sizes: HeadSizes) -> None:
    plain = padded(weights, sizes)
    (q,), (k,), (v,), (o,) = plain.q, plain.k, plain.v, plain.o
    spec.linear[0].weight = _array(torch.cat([link.weight.mT.flatten(0, 1) for link in (q, k, v)]))
    spec.linear[1].weight = _array(o.weight.flatten(0, 1).T)
    biases = torch.cat([link.bias.flatten() for link in (q, k, v) if link.bias is not None])
    if bool(biases.any()):
        spec.linear[0].bias = _array(biases)
    if weights.o_bias is not None:
        spec.linear[1].bias = _array(weights.o_bias)


@torch.no_grad()
def _check(model: LanguageModel, folder: Path, quantization: Quantization) -> ConversionCheck:
    import ctranslate2

    length = min(12, model.max_tokens or 12)
    ids = torch.randint(model.vocab_size, (3, length), generator=torch.Generator().manual_seed(0))
    some = next(model.parameters())
    exact = model if some.dtype in (torch.float32, torch.float64) else copy.deepcopy(model).float()
    expected = exact.eval()(ids.to(some.device)).logits.cpu()
    generator = ctranslate2.Generator(str(folder), device="cpu", inter_threads=1, intra_threads=1)
    tokens = [[str(token) for token in row] for row in ids.tolist()]
    found = torch.as_tensor(numpy.asarray(generator.forward_batch(tokens)))
    what = "logits by CTranslate2 and by the model"
    if quantization == "int8":
        return rounded_difference(what, expected, found)
    return compare_logits(what, expected, found, _TOLERANCE)


def _array(tensor: Tensor) -> Any:
    """A tensor as a specification holds it, in float32."""
    return tensor.detach().float().cpu().contiguous().numpy()


def _set_linear(spec: Any, linears: Sequence[nn.Linear]) -> None:
    """Fill in one map, or several below each other."""
    spec.weight = _array(_below([linear.weight for linear in linears]))
    if linears[0].bias is not None:
        spec.bias = _array(_below([linear.bias for linear in linears]))


def _set_norm(spec: Any, norm: nn.Module) -> None:
    """Fill in a norm; a gain that it does not have is 1, and a LayerNorm's bias 0."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm | OffsetNorm)
    if isinstance(norm, OffsetNorm):
        weight = norm.weight + norm.offset
    else:
        weight = torch.ones(norm.normalized_shape) if norm.weight is None else norm.weight
    spec.gamma = _array(weight)
    if isinstance(norm, nn.LayerNorm) or (isinstance(norm, OffsetNorm) and norm.kind == "layer"):
        spec.beta = _array(torch.zeros_like(weight) if norm.bias is None else norm.bias)


def _below(tensors: Sequence[Tensor]) -> Tensor:
    # `torch.cat` would copy a single one.
    return tensors[0] if len(tensors) == 1 else torch.cat([*tensors])
