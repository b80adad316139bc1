"""Conversion to CTranslate2.

CTranslate2's specifications are filled directly with the plain matrices of each head, without `transformers`
and without a checkpoint format in between. Language models fit if they have only features of GPT-2 and Llama:
pre-norm blocks with a single kind of norm, learned or rotary positions, feed-forward layers with or without a
gate, and multi-head, grouped-query or multi-query attention. Other features are refused by name.

Source: `specs/transformer_spec.py` of github.com/OpenNMT/CTranslate2, version 4.8.
"""

import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from triptych.converting.output_checks import (
    ConversionCheck,
    WrittenModel,
    compare_logits,
    compute_logits,
    random_pairs,
    rounded_difference,
)
from triptych.converting.plain import (
    head_sizes,
    max_positions,
    padded,
    plain_layers,
    plain_model,
    position_table,
    require_plain,
    rotary_base,
)
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.models import (
    Block,
    EncoderDecoder,
    FeedForward,
    LanguageModel,
    OffsetNorm,
    attention_weights,
    find_config,
)
from triptych.errors import UsageError
from triptych.files import write_text
from triptych.literals import Quantization
from triptych.running.opening import Reader, write_tokenizers
from triptych.running.options import require_ctranslate2
from triptych.running.text import PretrainedTokenizer, SentencePieceTokenizer

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


def write_ct2_translator(
    run: Reader, folder: Path, quantization: Quantization
) -> WrittenModel:
    """Write a folder for `ctranslate2.Translator`."""
    require_ctranslate2()
    special = {
        run.tokenizers.target.pad_id,
        run.tokenizers.target.bos_id,
        run.tokenizers.target.eos_id,
    }
    if run.shortlist is not None and special != set(range(len(special))):
        # Version 4.8 keeps the output columns of special tokens from an earlier batch
        # (`Decoder::update_output_layer`); columns of the first tokens never change.
        raise UsageError(
            "with a shortlist CTranslate2 mixes up special tokens between batches, where they are not the "
            "first of the vocabulary: leave the shortlist out, or translate with triptych"
        )
    plain = plain_model(run.encoder_decoder, "CTranslate2")
    length = max_positions(run.encoder_decoder, run.decoding.max_extra_tokens)
    spec = _translator_spec(plain.model.float(), plain.num_heads, length)
    source = run.tokenizers.source
    target = run.tokenizers.target
    spec.register_source_vocabulary(list(source.vocabulary))
    spec.register_target_vocabulary(list(target.vocabulary))
    tokens = target.vocabulary
    spec.config.bos_token = tokens[target.bos_id]
    spec.config.eos_token = tokens[target.eos_id]
    spec.config.decoder_start_token = tokens[target.bos_id]
    # The padding token, which texts do not contain, serves if no token can be unknown.
    unknown = (
        source.record.unk_id
        if isinstance(source, SentencePieceTokenizer)
        else source.pad_id
    )
    spec.config.unk_token = source.vocabulary[unknown]
    spec.config.add_source_eos = True
    _save(spec, folder, quantization, 1e-5)
    write_tokenizers(
        run.tokenizers, find_config(run.encoder_decoder).max_source_tokens + 1, folder
    )
    if run.shortlist is not None:
        write_text(folder / "vmap.txt", run.shortlist.as_text(run.tokenizers))
    (folder / "README.md").write_text(_translator_readme(run, length), encoding="utf-8")
    parameters = sum(parameter.numel() for parameter in plain.model.parameters())
    check = _check_translator(run, folder, quantization)
    return WrittenModel(
        f"Transformer, {quantization}", parameters, plain.done, (check,)
    )


def _translator_spec(
    model: EncoderDecoder, num_heads: dict[str, int], length: int
) -> Any:
    from ctranslate2.specs import transformer_spec

    classes = {
        "encoder": transformer_spec.TransformerEncoderSpec,
        "decoder": transformer_spec.TransformerDecoderSpec,
    }
    pre_norm = find_config(model).norm == "pre"
    activation = _activation(find_config(model).activation)
    specs = []
    weights = attention_weights(model)
    for name, stack in model.stacks.items():
        spec = classes[name](
            len(stack.blocks), num_heads[name], pre_norm=pre_norm, activation=activation
        )
        _fill(spec, stack, weights, position_table(stack, length))
        specs.append(spec)
    return transformer_spec.TransformerSpec(*specs)


def _save(spec: Any, folder: Path, quantization: Quantization, eps: float) -> None:
    spec.config.layer_norm_epsilon = eps
    spec.validate()
    spec.optimize(quantization=quantization)
    spec.save(str(folder))


def _fill(
    spec: Any,
    stack: LanguageModel,
    weights: Mapping[str, AttentionWeights],
    positions: Tensor | None,
) -> None:
    """Fill a specification from a stack and its plain attention weights."""
    config = stack.embeddings.config
    kind = stack.architecture.kind
    table = spec.embeddings[0] if kind == "encoder" else spec.embeddings
    table.weight = _array(stack.embeddings.table.weight)
    spec.scale_embeddings = False if config.scale == 1.0 else float(config.scale)
    if positions is not None:
        spec.position_encodings.encodings = _array(positions)
    if stack.architecture.final_norm is not None:
        _set_norm(spec.layer_norm, stack.final_norm)
    if stack.head is not None:
        output = stack.head.output
        # The specification lacks a scale of logits, so the output layer absorbs it.
        scale = stack.head.config.scale
        _set_linear(
            spec.projection,
            output.weight * scale,
            None if output.bias is None else output.bias * scale,
        )
    for number, (layer, block) in enumerate(zip(spec.layer, stack.blocks, strict=True)):
        assert isinstance(block, Block)  # for the type checker
        _set_attention(layer.self_attention, weights[f"{kind}.{number}"], ("qkv", "o"))
        _set_norm(layer.self_attention.layer_norm, block.self_residual.norm)
        if block.has_cross:
            _set_attention(
                layer.attention, weights[f"cross.{number}"], ("q", "kv", "o")
            )
            _set_norm(layer.attention.layer_norm, block.cross_residual.norm)
        feed_forward = block.feed_forward
        assert isinstance(
            feed_forward, FeedForward
        )  # mixtures of experts are refused before
        gate = feed_forward.gate
        inner = feed_forward.inner
        outer = feed_forward.outer
        first = inner if gate is None else gate
        _set_linear(layer.ffn.linear_0, first.weight, first.bias)
        if gate is not None:
            _set_linear(layer.ffn.linear_0_noact, inner.weight, inner.bias)
        _set_linear(layer.ffn.linear_1, outer.weight, outer.bias)
        _set_norm(layer.ffn.layer_norm, block.feed_forward_residual.norm)


def _set_attention(spec: Any, weights: AttentionWeights, maps: Sequence[str]) -> None:
    for linear, sides in zip(spec.linear, maps, strict=True):
        if sides == "o":
            rows = weights.o[0].weight.flatten(0, 1).T
            bias = weights.o_bias
        else:
            links = [weights.chain(side)[0] for side in sides]  # type: ignore[arg-type]
            rows = torch.cat([link.weight.mT.flatten(0, 1) for link in links])
            bias = torch.cat(
                [link.bias.flatten() for link in links if link.bias is not None]
            )
        _set_linear(
            linear, rows, bias if bias is not None and bool(bias.any()) else None
        )


def _check_translator(
    run: Reader, folder: Path, quantization: Quantization
) -> ConversionCheck:
    """Compare the log-probability of each token of random outputs."""
    import ctranslate2

    source = run.tokenizers.source
    target = run.tokenizers.target
    pairs = random_pairs(run.encoder_decoder, target.bos_id, target.eos_id)
    translator = ctranslate2.Translator(
        str(folder), device="cpu", inter_threads=1, intra_threads=1
    )
    sources = [
        [
            source.vocabulary[token]
            for token in row
            if token not in (source.eos_id, run.encoder_decoder.pad_id)
        ]
        for row in pairs.src.tolist()
    ]
    outputs = [
        [target.vocabulary[token] for token in row[1:]] for row in pairs.tgt_in.tolist()
    ]
    scores = translator.score_batch(sources, outputs)
    found = torch.tensor([score.log_probs for score in scores])
    what = "log-probabilities of tokens by CTranslate2 and by the model"
    # CTranslate2 scores the tokens of an output and the end of sentence after them.
    following = torch.cat(
        [pairs.tgt_in[:, 1:], torch.full_like(pairs.tgt_in[:, :1], target.eos_id)],
        dim=1,
    )
    log_probs = compute_logits(run.encoder_decoder, pairs).double().log_softmax(dim=-1)
    expected = log_probs.gather(2, following[:, :, None])[:, :, 0].float()
    return _check_close(what, expected, found, quantization)


def _translator_readme(run: Reader, length: int) -> str:
    pieces = isinstance(run.tokenizers.source, SentencePieceTokenizer)
    target = run.tokenizers.target
    alpha = run.decoding.alpha
    beam = run.decoding.beam_size
    never = [
        [target.vocabulary[token]]
        for token in dict.fromkeys((target.pad_id, target.bos_id))
    ]
    if pieces:
        setup = """import sentencepiece

source = sentencepiece.SentencePieceProcessor(model_file="path/to/this/folder/source.spm")
target = sentencepiece.SentencePieceProcessor(model_file="path/to/this/folder/target.spm")
tokens = source.encode("A sentence.", out_type=str)"""
        text = "target.decode(found[0].hypotheses[0])"
    else:
        file = (
            "tokenizer.json"
            if run.tokenizers.joint
            else "target_tokenizer/tokenizer.json"
        )
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

Sources have at most {run.encoder_decoder.max_source_tokens} tokens, and there are {length} positions.
triptych divides log-probabilities by ((5 + n) / 6)^α, CTranslate2 by n^α: with the length penalty off (0)
both search alike.
"""


def write_ct2_generator(
    opened: Reader, folder: Path, quantization: Quantization
) -> WrittenModel:
    """Write a folder for `ctranslate2.Generator` with a language model and its tokenizer."""
    require_ctranslate2()
    model = opened.language_model
    tokenizer = opened.tokenizer
    check = write_generator(model, folder, quantization)
    if isinstance(tokenizer, PretrainedTokenizer):
        tokenizer.save_files(folder)
    else:
        tokenizer.save(folder / "tokenizer.json")
    write_text(folder / "README.md", _generator_readme(opened.end_ids))
    count = sum(parameter.numel() for parameter in model.parameters())
    return WrittenModel(f"TransformerDecoder, {quantization}", count, (), (check,))


def _generator_readme(end_ids: Sequence[int]) -> str:
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
    """Write a folder for `ctranslate2.Generator`, with the token ids "0", "1", … as tokens."""
    require_ctranslate2()
    spec = _generator_spec(model)
    vocabulary = [str(token) for token in range(model.vocab_size)]
    spec.register_vocabulary(vocabulary)
    # Every token id is in the vocabulary, and end tokens are given at generation: these settings are unused.
    spec.config.bos_token = spec.config.eos_token = spec.config.unk_token = vocabulary[
        0
    ]
    norm = model.architecture.final_norm
    assert norm is not None  # models without a final norm are refused
    _save(spec, folder, quantization, norm.eps)
    return _check_generator(model, folder, quantization)


def _refused(what: str) -> UsageError:
    return UsageError(f"CTranslate2 cannot hold this model: {what}")


def _generator_spec(model: LanguageModel) -> Any:
    from ctranslate2.specs import transformer_spec

    norm, feed_forward = require_plain(model, _refused)
    if feed_forward.activation not in _ACTIVATIONS:
        raise _refused(f"the activation {feed_forward.activation}")
    made = model.architecture
    if made.embeddings.positions == "sinusoidal":
        raise _refused("sinusoidal positions of the embeddings")
    plain = plain_layers(model, _refused)
    sizes = head_sizes(plain, _refused)
    # The specification has a single set of rotary settings for all layers.
    rotary, *others = (
        _rotary_args(weights.semantics.rotary, sizes.width) for weights in plain
    )
    if any(other != rotary for other in others):
        raise _refused("its layers have different rotary positions")
    if not rotary and made.embeddings.positions == "none":
        raise _refused("it has no positions")
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        len(plain),
        sizes.num_heads,
        pre_norm=True,
        activation=_activation(feed_forward.activation),
        ffn_glu=feed_forward.gated,
        rms_norm=norm.kind == "rms",
        num_heads_kv=None
        if sizes.num_kv_heads == sizes.num_heads
        else sizes.num_kv_heads,
        head_dim=None if sizes.width * sizes.num_heads == made.d_model else sizes.width,
        **rotary,
    )
    weights = {
        f"decoder.{number}": padded(layer, sizes) for number, layer in enumerate(plain)
    }
    positions = None if rotary else position_table(model, made.embeddings.num_positions)
    _fill(spec.decoder, model, weights, positions)
    return spec


def _rotary_args(rotary: RotaryEmbedding | None, width: int) -> dict[str, Any]:
    """Return the specification's arguments for rotary positions, or an empty dict without them."""
    if rotary is None:
        return {}
    count = len(rotary.frequencies)
    return {
        "rotary_dim": 0 if 2 * count == width else 2 * count,
        "rotary_interleave": rotary.pairing == "interleaved",
        "rotary_base": rotary_base(rotary, _refused),
    }


@torch.no_grad()
def _check_generator(
    model: LanguageModel, folder: Path, quantization: Quantization
) -> ConversionCheck:
    import ctranslate2

    length = min(12, model.max_tokens or 12)
    ids = torch.randint(
        model.vocab_size, (3, length), generator=torch.Generator().manual_seed(0)
    )
    some = next(model.parameters())
    exact = (
        model
        if some.dtype in (torch.float32, torch.float64)
        else copy.deepcopy(model).float()
    )
    expected = exact.eval()(ids.to(some.device)).logits.cpu()
    generator = ctranslate2.Generator(
        str(folder), device="cpu", inter_threads=1, intra_threads=1
    )
    tokens = [[str(token) for token in row] for row in ids.tolist()]
    found = torch.as_tensor(numpy.asarray(generator.forward_batch(tokens)))
    what = "logits by CTranslate2 and by the model"
    return _check_close(what, expected, found, quantization)


def _check_close(
    what: str, expected: Tensor, found: Tensor, quantization: Quantization
) -> ConversionCheck:
    if quantization == "int8":
        return rounded_difference(what, expected, found)
    return compare_logits(what, expected, found, _TOLERANCE)


def _array(tensor: Tensor) -> Any:
    """Convert a tensor to a contiguous float32 array."""
    return tensor.detach().float().cpu().contiguous().numpy()


def _set_linear(spec: Any, weight: Tensor, bias: Tensor | None) -> None:
    spec.weight = _array(weight)
    if bias is not None:
        spec.bias = _array(bias)


def _set_norm(spec: Any, norm: nn.Module) -> None:
    """Fill in a norm; a missing gain becomes 1, and a LayerNorm's missing bias 0."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm | OffsetNorm)
    if isinstance(norm, OffsetNorm):
        weight = norm.weight + norm.offset
    else:
        weight = (
            torch.ones(norm.normalized_shape) if norm.weight is None else norm.weight
        )
    spec.gamma = _array(weight)
    if isinstance(norm, nn.LayerNorm) or (
        isinstance(norm, OffsetNorm) and norm.kind == "layer"
    ):
        spec.beta = _array(torch.zeros_like(weight) if norm.bias is None else norm.bias)
