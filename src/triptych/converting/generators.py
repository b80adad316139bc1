"""A decoder-only model of ours as a folder of CTranslate2's.

Its `TransformerDecoderSpec` holds what GPT-2 and Llama are made of: pre-norm blocks with one kind of norm,
learned or rotary positions, feed-forward layers with or without a gate, and heads that may share keys and
values. Parameterisations are multiplied out. All else is refused by name.

Source: `specs/transformer_spec.py` of github.com/OpenNMT/CTranslate2, version 4.8.
"""

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch

from triptych.algebra.positions import RotaryEmbedding
from triptych.algebra.weights import AttentionWeights
from triptych.converting.checks import (
    ConversionCheck,
    Quantization,
    Written,
    compare_logits,
    rounded_difference,
)
from triptych.converting.ctranslate2_layers import array, set_linear, set_norm
from triptych.converting.plain_layers import HeadSizes, head_sizes, padded_maps, plain_layer, rotary_base
from triptych.errors import UsageError
from triptych.extras import require_extra
from triptych.files import write_text
from triptych.models import LanguageModel
from triptych.models.architecture import FeedForwardConfig, NormConfig, SublayerConfig
from triptych.models.blocks import Block
from triptych.models.feed_forward import FeedForward
from triptych.opening import OpenedModel
from triptych.text import PretrainedTokenizer

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
    from ctranslate2.specs import common_spec, transformer_spec

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
        activation=getattr(common_spec.Activation, _ACTIVATIONS[first.activation]),
        ffn_glu=first.gated,
        rms_norm=norm.kind == "rms",
        num_heads_kv=None if sizes.num_kv_heads == sizes.num_heads else sizes.num_kv_heads,
        head_dim=None if sizes.width * sizes.num_heads == made.d_model else sizes.width,
        **rotary,
    )
    decoder = spec.decoder
    decoder.scale_embeddings = False if made.embeddings.scale == 1.0 else float(made.embeddings.scale)
    decoder.embeddings.weight = array(model.embeddings.table.weight)
    if made.embeddings.positions == "learned":
        rows = model.embeddings.positions.get_parameter("weight")
        decoder.position_encodings.encodings = array(rows[made.embeddings.position_offset :])
    set_norm(decoder.layer_norm, model.final_norm)
    assert model.head is not None
    output, scale = model.head.output, model.head.config.scale
    decoder.projection.weight = array(output.weight * scale if scale != 1.0 else output.weight)
    if output.bias is not None:
        decoder.projection.bias = array(output.bias * scale)
    for layer, block, weights in zip(decoder.layer, blocks, plain, strict=True):
        _set_attention(layer.self_attention, weights, sizes)
        set_norm(layer.self_attention.layer_norm, block.self_residual.norm)
        feed_forward = block.feed_forward
        assert isinstance(feed_forward, FeedForward)
        gate = feed_forward.gate
        set_linear(layer.ffn.linear_0, [feed_forward.inner if gate is None else gate])
        if gate is not None:
            set_linear(layer.ffn.linear_0_noact, [feed_forward.inner])
        set_linear(layer.ffn.linear_1, [feed_forward.outer])
        set_norm(layer.ffn.layer_norm, block.feed_forward_residual.norm)
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
    maps = padded_maps(weights, sizes)
    spec.linear[0].weight = array(torch.cat([maps.weights[side] for side in ("q", "k", "v")]))
    spec.linear[1].weight = array(maps.weights["o"])
    biases = [maps.biases[side] for side in ("q", "k", "v")]
    if any(bool(bias.any()) for bias in biases):
        spec.linear[0].bias = array(torch.cat(biases))
    if weights.o_bias is not None:
        spec.linear[1].bias = array(weights.o_bias)


@torch.no_grad()
def _check(model: LanguageModel, folder: Path, quantization: Quantization) -> ConversionCheck:
    """Logits of random tokens."""
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
