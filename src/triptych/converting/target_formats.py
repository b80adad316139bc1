"""Trained models in the formats of families: Marian, Pegasus, GPT-2 and Llama.

The family file maps stored tensors to the model's tensors; its `[export]` section defines the settings of
`config.json` and the shapes of the stored tensors. This module computes the facts for their expressions.

Source: `modeling_*.py` of marian, pegasus, gpt2 and llama, github.com/huggingface/transformers, version 5.23.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, final

import torch
from torch import Tensor

from triptych.converting.plain import (
    HeadSizes,
    PlainModel,
    head_sizes,
    max_positions,
    padded,
    plain_layers,
    position_table,
    require_plain,
    rotary_base,
)
from triptych.core.algebra.weights import AttentionWeights
from triptych.core.checkpoints.family import family_of
from triptych.core.checkpoints.model_parts import ACTIVATIONS
from triptych.core.checkpoints.stored_models import new_tensors
from triptych.core.models import (
    EncoderDecoder,
    LanguageModel,
    attention_sites,
    find_config,
    has_config,
)
from triptych.core.storage import Settings
from triptych.errors import UsageError
from triptych.running.opening import Reader
from triptych.running.text import TokenizerPair
from triptych.untrusted import read_json

_ACTIVATIONS = {our: their for their, our in reversed([*ACTIVATIONS.items()])}


@final
@dataclass(frozen=True)
class ExportedModel:
    settings: Mapping[str, Any]  # settings of `config.json`
    tensors: Mapping[str, Tensor]  # tensors by their names in the format
    done: tuple[str, ...] = ()  # descriptions of the changes needed to fit the format


def require_recipe(reader: Reader) -> None:
    """Check that a recipe describes a translator, as all formats of translators need."""
    if has_config(reader.encoder_decoder):
        return
    kind = read_json(reader.folder / "config.json").get("model_type")
    if kind == "triptych":
        raise UsageError(
            f"{reader.folder} has layers or an architecture that no recipe describes: it is run here, and "
            "not converted"
        )
    raise UsageError(
        f"{reader.folder} is a checkpoint of {kind}, which is run here, and not converted: of other "
        "libraries' translators only Marian's are, with scaled embeddings and feed-forward layers of one "
        "width"
    )


def _fill_family(
    model: EncoderDecoder | LanguageModel,
    family: str,
    kind: str,
    layers: Sequence[AttentionWeights],
    facts: Mapping[str, Any],
    given: Mapping[str, Tensor],
) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, tuple[str, ...]]]:
    """Evaluate a family's export specification; return settings, tensors and symbolic shapes."""
    known = family_of(family)
    assert known is not None, "it is one of ours"
    spec = known.export
    assert spec is not None, "it writes"
    said = Settings(
        {"kind": kind, "dtype": str(next(model.parameters()).dtype)[6:], **facts},
        family,
    )
    fields = {
        name: said.value(expression) for name, expression in spec.settings.items()
    }
    settings = {"architectures": [spec.classes[kind]], "model_type": kind}
    settings |= {name: value for name, value in fields.items() if value is not None}
    # Shapes are symbolic, such as ("d_model", "d_ff"), and resolved to sizes below.
    shapes = dict[str, tuple[str, ...]]()
    for group in spec.tensors:
        for layer in range(
            said.count(group.layers or "1") if said.holds(group.when) else 0
        ):
            for module, shape in group.maps.items():
                name = (group.at + module).format(layer=layer)
                shapes[name if group.bare else f"{name}.weight"] = shape
                if said.holds(group.biases):
                    shapes[f"{name}.bias"] = (shape[-1 if group.transposed else 0],)
    sizes = {name: tuple(map(said.count, shape)) for name, shape in shapes.items()}
    return settings, new_tensors(model, layers, settings, sizes, given), shapes


def translator_type(model: EncoderDecoder) -> Literal["marian", "pegasus"]:
    """Return the matching architecture of Hugging Face: Marian for post-norm, Pegasus for pre-norm."""
    scheme = find_config(model).positions.scheme
    if find_config(model).norm == "post":
        if scheme != "sinusoidal":
            raise UsageError(
                f"positions.scheme is {scheme!r}: Hugging Face's post-norm model (Marian) has sinusoidal "
                "positions only; a model trained with 'sinusoidal', or with norm = 'pre', fits"
            )
        return "marian"
    if scheme not in ("sinusoidal", "learned", "none"):
        raise UsageError(
            f"positions.scheme is {scheme!r}: Hugging Face's pre-norm model (Pegasus) has no positions "
            "inside attention; 'sinusoidal', 'learned' and 'none' fit"
        )
    if model.src_vocab_size != model.tgt_vocab_size:
        raise UsageError(
            f"the vocabularies have {model.src_vocab_size:,} and {model.tgt_vocab_size:,} tokens: Hugging "
            "Face's pre-norm model (Pegasus) has one size for both; a model with tokenizer.joint = true, or "
            "with norm = 'post', fits"
        )
    return "pegasus"


def translator(
    plain: PlainModel, tokenizers: TokenizerPair, max_extra_tokens: int
) -> ExportedModel:
    """Export a translator with plain heads in the format of Marian or Pegasus."""
    model = plain.model
    config = find_config(plain.model)
    kind = translator_type(model)
    target = tokenizers.target
    length = max_positions(model, max_extra_tokens)
    shared = config.tie_embeddings == "all"
    # Marian's setting ties target table and output layer, Pegasus's setting ties all tables.
    tied = shared or (kind == "marian" and config.tie_embeddings == "target")
    facts: dict[str, Any] = {
        **{
            name: getattr(config, name)
            for name in ("d_model", "d_ff", "dropout", "activation_dropout")
        },
        **{f"{name}_id": getattr(target, f"{name}_id") for name in ("bos", "eos")},
        **{f"{stack}_layers": len(half.blocks) for stack, half in model.stacks.items()},
        **{f"{stack}_heads": count for stack, count in plain.num_heads.items()},
        "heads_size": config.d_model,
        "activation": config.activation,
        "attention_dropout": config.sites("encoder")[0].dropout,
        "num_positions": length,
        "source_size": model.src_vocab_size,
        "target_size": model.tgt_vocab_size,
        "tied": tied,
        "shared": shared,
        "pad_id": model.pad_id,
    }
    if kind == "marian":
        facts |= {"own_target_size": model.tgt_vocab_size, "own_shared": shared}
    given = {
        f"{half}.embeddings.positions.weight": position_table(stack, length)
        for half, stack in model.stacks.items()
    }
    sites = sorted(attention_sites(model), key=lambda site: site.stack == "cross")
    layers = [site.layer.weights() for site in sites]
    settings, tensors, shapes = _fill_family(
        model, "marian", kind, layers, facts, given
    )
    if (
        "lm_head.weight" in tensors
    ):  # Pegasus cannot tie it to the decoder's table alone: copy
        tensors["lm_head.weight"] = tensors["lm_head.weight"].clone()
    # The channels of the residual stream may be permuted freely, if all tensors are permuted alike.
    done: tuple[str, ...] = ()
    if (
        config.positions.scheme == "sinusoidal"
        and config.positions.sinusoidal_layout == "interleaved"
    ):
        done = ("channels of the whole model reordered: sines before cosines",)
        order = torch.cat([torch.arange(start, config.d_model, 2) for start in (0, 1)])
        for name, shape in shapes.items():
            for dim, size in enumerate(shape):
                if size == "d_model":
                    tensors[name] = tensors[name].index_select(dim, order)
    if kind == "pegasus" and not shared:
        tensors["model.shared.weight"] = tensors[
            "model.encoder.embed_tokens.weight"
        ].clone()
    return ExportedModel(settings, tensors, done)


def language_model(model: LanguageModel) -> ExportedModel:
    """Export a language model trained with a recipe in the first format that fits: GPT-2, then Llama."""
    reasons = []
    for kind in ("gpt2", "llama"):
        try:
            return _language_model(model, kind)
        except UsageError as error:
            reasons.append(str(error))
    raise UsageError(
        f"no format of transformers holds this model: {'; '.join(reasons)}"
    )


def _language_model(
    model: LanguageModel, kind: Literal["gpt2", "llama"]
) -> ExportedModel:
    name, norm_kind, gated = (
        ("GPT-2", "layer", False) if kind == "gpt2" else ("Llama", "rms", True)
    )

    def refused(what: str) -> UsageError:
        return UsageError(f"{name}'s format has no place for it: {what}")

    norm, feed_forward = require_plain(model, refused)
    head = model.head
    assert head is not None
    assert model.context is not None, "the model is a recipe's"
    d_model = model.architecture.d_model
    if norm.kind != norm_kind:
        names = {"layer": "LayerNorm", "rms": "RMSNorm"}
        raise refused(f"its norms are {names[norm.kind]}, not {names[norm_kind]}")
    if model.embeddings.config.scale != 1.0:
        raise refused("its embeddings are scaled")
    if head.config.bias or head.config.scale != 1.0:
        raise refused("its logits are more than a product with the output table")
    if feed_forward.gated != gated:
        raise refused(f"its feed-forward layers have {'no' if gated else 'a'} gate")
    layers = plain_layers(model, refused)
    given = dict[str, Tensor]()
    found = sizes = head_sizes(layers, refused)
    facts: dict[str, Any] = {
        "d_model": d_model,
        "d_ff": feed_forward.d_ff,
        "activation": _ACTIVATIONS[feed_forward.activation],
        "eps": norm.eps,
        "num_layers": len(layers),
        "tied": head.config.tied,
        "vocab_size": model.vocab_size,
        "context": model.context,
    }
    # GPT-2 has heads of d_model / num_heads channels, so narrower heads are padded.
    if kind == "gpt2":
        if any(weights.semantics.rotary is not None for weights in layers):
            raise refused("rotary positions")
        width = d_model // found.num_heads
        if d_model % found.num_heads or width < found.width:
            heads = f"{found.num_heads} heads of {found.width} channels"
            raise refused(f"{heads} are more than d_model {d_model}")
        sizes = HeadSizes(found.num_heads, found.num_heads, width)
        positions = position_table(model, model.max_tokens or model.context)
        facts["num_positions"], given["embeddings.positions.weight"] = (
            len(positions),
            positions,
        )
    else:
        rotary = layers[0].semantics.rotary
        if (
            rotary is None
            or rotary.pairing != "halves"
            or model.embeddings.config.positions != "none"
        ):
            raise refused("positions other than rotary ones of two halves")
        if 2 * len(rotary.frequencies) != sizes.width:
            raise refused(
                f"{2 * len(rotary.frequencies)} of {sizes.width} channels of a head are rotated"
            )
        maps = [
            weights.multiplied(side).bias
            for weights in layers
            for side in ("q", "k", "v")
        ]
        facts |= {
            "rope": {
                "rope_type": "default",
                "rope_theta": rotary_base(rotary, refused),
            },
            "biases": any(bias is not None and bool(bias.any()) for bias in maps)
            or any(weights.o_bias is not None for weights in layers),
            "mlp_biases": feed_forward.bias,
        }
    filled = [padded(weights, sizes) for weights in layers]
    settings, tensors, _ = _fill_family(
        model, kind, kind, filled, facts | asdict(sizes), given
    )
    made_of = {site.layer.parameterisation.name for site in attention_sites(model)}
    plain = made_of <= {"factored", "grouped"} and (kind == "llama" or sizes == found)
    return ExportedModel(
        settings,
        tensors,
        () if plain else ("every head written as W_Q, W_K, W_V and W_O",),
    )
