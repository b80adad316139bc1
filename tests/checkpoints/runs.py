"""Every model that is run: a tiny one of `transformers` in float64, and ours of its files."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor

from checkpoints.oracle import has_experts, in_float64, saved
from checkpoints.tiny_models import TINY
from triptych.core.checkpoints.family import Family, family_of
from triptych.core.checkpoints.specs import ModelSpec
from triptych.core.checkpoints.stored_models import load_encoder_decoder, load_language_model
from triptych.core.models import EncoderDecoder, LanguageModel
from triptych.core.storage.settings import Settings
from triptych.running.opening import LayerCall

transformers = pytest.importorskip("transformers")

# Of two experts for one choice, little would show.
_SEVERAL_EXPERTS = {
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4),
    "num_experts_per_tok": 2,
}
_IN_GROUPS: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"topk_method": "group_limited_greedy", "n_group": 2, "routed_scaling_factor": 1.5},
    "deepseek_v3": {"n_group": 2, "topk_group": 1},
}
# Of models that are tiny without one.
_WITH_HEAD = {"gemma3, both ways": "Gemma3ForCausalLM"}
# Classes within a class, whose modules are only imported when it is made; `in_float64` must find them.
_WITHIN = {"mistral3": "MistralForCausalLM", "mistral3, ministral": "Ministral3ForCausalLM"}
# Why models of families that are run are not.
REFUSED = {
    "granitemoehybrid": "layer 1 of 3 is attention; the rest are Mamba-2 mixers, which are not",
    "xglm with cross-attention": "layers.0.encoder_attn is no self-attention of its decoder",
}


class Run(NamedTuple):
    """A model: whose configuration it has, settings that differ, and its class if it is another."""

    tiny: str
    settings: Mapping[str, Any] = MappingProxyType({})
    model: str = ""
    kind: Literal["decoder", "encoder", "pairs"] = "decoder"

    @property
    def of_class(self) -> Any:
        return getattr(transformers, self.model or TINY[self.tiny].model)

    def configured(self, **changes: Any) -> Any:
        return self.of_class.config_class(**{**TINY[self.tiny].settings, **self.settings, **changes})


def _encoder(model: str, tiny: str, **settings: Any) -> Run:
    return Run(tiny, settings, model, "encoder")


_OF_ENCODERS = {
    "bert": _encoder("BertForMaskedLM", "bert"),
    "bert, two sentences": _encoder("BertForPreTraining", "bert"),
    "bert, no head": _encoder("BertModel", "bert", hidden_act="gelu_new"),
    "bert, free output": _encoder("BertForMaskedLM", "bert", tie_word_embeddings=False),
    "roberta": _encoder("RobertaForMaskedLM", "roberta", pad_token_id=0),
    "roberta, padding past others": _encoder("RobertaForMaskedLM", "roberta", pad_token_id=2),
    "xlm-roberta": _encoder("XLMRobertaForMaskedLM", "roberta", pad_token_id=0),
    "camembert": _encoder("CamembertForMaskedLM", "roberta"),
    "electra, generator": _encoder("ElectraForMaskedLM", "electra"),
    "electra, one width": _encoder("ElectraForMaskedLM", "electra", embedding_size=24),
    "electra, discriminator": _encoder("ElectraForPreTraining", "electra"),
    "electra, no head": _encoder("ElectraModel", "electra"),
    "distilbert": _encoder("DistilBertForMaskedLM", "distilbert"),
    "distilbert, sinusoidal": _encoder("DistilBertForMaskedLM", "distilbert", sinusoidal_pos_embds=True),
    "albert": _encoder("AlbertForMaskedLM", "albert"),
    "albert, one width": _encoder("AlbertForMaskedLM", "albert", embedding_size=24),
    "albert in groups": _encoder("AlbertForPreTraining", "albert in groups"),
    "deberta": _encoder("DebertaForMaskedLM", "deberta"),
    "deberta, another head": _encoder("DebertaForMaskedLM", "deberta", legacy=False),
    "deberta, learned": _encoder("DebertaForMaskedLM", "deberta, learned"),
    "deberta-v2": _encoder("DebertaV2ForMaskedLM", "deberta-v2"),
    "deberta-v2, all": _encoder(
        "DebertaV2ForMaskedLM", "deberta-v2", legacy=False, position_biased_input=True, type_vocab_size=2
    ),
    "deberta-v2, maps of its own": _encoder("DebertaV2Model", "deberta-v2, maps of its own"),
    "mpnet": _encoder("MPNetForMaskedLM", "mpnet", pad_token_id=1),
    "modernbert": _encoder("ModernBertForMaskedLM", "modernbert"),
    "modernbert, biases": _encoder("ModernBertForMaskedLM", "modernbert, biases", classifier_bias=True),
    "nomic_bert": _encoder("NomicBertForMaskedLM", "nomic_bert"),
    "roformer": _encoder("RoFormerForMaskedLM", "roformer"),
    "roformer, one width": _encoder("RoFormerForMaskedLM", "roformer", embedding_size=24),
    "rembert": _encoder("RemBertForMaskedLM", "rembert"),
    "data2vec-text": _encoder("Data2VecTextForMaskedLM", "data2vec-text"),
    "ernie": _encoder("ErnieForMaskedLM", "ernie"),
    "megatron-bert": _encoder("MegatronBertForMaskedLM", "megatron-bert"),
    "roberta-prelayernorm": _encoder("RobertaPreLayerNormForMaskedLM", "roberta-prelayernorm"),
    "xlm-roberta-xl": _encoder("XLMRobertaXLForMaskedLM", "xlm-roberta-xl"),
    "eurobert": _encoder("EuroBertForMaskedLM", "eurobert", mlp_bias=True),
    "jina_embeddings_v3": _encoder("JinaEmbeddingsV3ForMaskedLM", "jina_embeddings_v3"),
    "gte": _encoder("GteForMaskedLM", "gte"),
    "esm": _encoder("EsmForMaskedLM", "esm"),
    "esm, rotary": _encoder("EsmForMaskedLM", "esm, rotary"),
    "esm, first norm": _encoder("EsmForMaskedLM", "esm, rotary", emb_layer_norm_before=True),
}


def _two(tiny: str, **settings: Any) -> Run:
    return Run(tiny, settings, kind="pairs")


_OF_PAIRS = {
    "bart": _two("bart"),
    "bart, scaled": _two("bart", scale_embedding=True, activation_function="relu", decoder_layers=3),
    "plbart": _two("plbart"),
    "mvp": _two("mvp"),
    "mbart": _two("mbart", scale_embedding=True),
    "pegasus": _two("pegasus", scale_embedding=True),
    "m2m_100": _two("m2m_100", scale_embedding=True, pad_token_id=1),
    "blenderbot": _two("blenderbot"),
    "blenderbot-small": _two("blenderbot-small", scale_embedding=True),
    "marian": _two("marian", scale_embedding=True),
    "fsmt": _two("fsmt", scale_embedding=True),
    **{
        f"{name}, untied": _two(name, tie_word_embeddings=False, scale_embedding=True)
        for name in ("bart", "mbart", "pegasus", "m2m_100", "blenderbot", "blenderbot-small", "marian")
    },
    "marian, not scaled": _two("marian", scale_embedding=False),
    "t5": _two("t5"),
    "t5, silu": _two("t5", feed_forward_proj="silu"),
    "t5, gated": _two("t5", feed_forward_proj="gated-gelu", num_decoder_layers=3),
    "t5, not scaled": _two("t5", feed_forward_proj="gated-silu", tie_word_embeddings=False),
    "mt5": _two("mt5"),
    "umt5": _two("umt5"),
    "t5gemma": _two("t5gemma"),
    "t5gemma, untied": _two("t5gemma", tie_word_embeddings=False),
}


def type_of(name: str) -> str:
    """The `model_type` of a tiny model."""
    return str(TINY[name].config.model_type)


def decoder_of(family: Family | None) -> ModelSpec | None:
    """What decoders without an encoder are made of; None of other families."""
    model = None if family is None else family.model
    return model if model is not None and model.kind == "decoder" and model.encoder is None else None


def _decoder(name: str) -> Run:
    more = {field: value for field, value in _SEVERAL_EXPERTS.items() if field in TINY[name].settings}
    return Run(name, {**more, **_IN_GROUPS.get(name, {})}, _WITH_HEAD.get(name, ""))


def _can_be_run(name: str) -> bool:
    model = decoder_of(family_of(type_of(name)))
    if model is None or name in REFUSED:
        return False
    config = Settings(TINY[name].configured().to_dict(), name)
    return not any(config.holds(choice.when) for choice in model.refused)


DECODERS = [name for name in TINY if _can_be_run(name)]
RUNS: dict[str, Run] = {**{name: _decoder(name) for name in DECODERS}, **_OF_ENCODERS, **_OF_PAIRS}
ENCODERS, PAIRS = [*_OF_ENCODERS], [*_OF_PAIRS]
# Learned positions and fused maps; grouped keys, gates; gains relative to 1; rotary pairs side by side, one
# norm for two readers; ALiBi, a norm of embeddings; norms after sums; sandwiches, gate and inner map in one;
# latents, experts in groups. Then ways to choose experts, a gate of each channel, a base of each layer;
# encoders and encoder-decoders.
IN_EVERY_RUN = (
    *("gpt2", "llama", "gemma", "gptj", "bloom", "openai-gpt", "glm4", "deepseek_v3"),
    *("mixtral", "phimoe", "gpt_oss", "llama4, text", "qwen2_moe", "afmoe", "granite_swa"),
    *("bert", "roberta", "electra, discriminator", "albert in groups", "bart", "bart, untied", "t5, gated"),
)
FEW = tuple(name for name in IN_EVERY_RUN if name in ("gpt2", "llama") or name not in DECODERS)
# RoFormer's angles, and Marian's, are not saved.
NOT_SAVED = {
    "roformer": "encoder.embed_positions",
    **dict.fromkeys(("marian", "fsmt"), "embed_positions"),
}
# BLOOM writes the root of 2/π with eight digits, RoFormer sines and cosines with seven; Marian's are float32.
TOLERANCE = {
    **dict.fromkeys(("bloom", "bloom, six heads"), 1e-9),
    **dict.fromkeys(("roformer", "roformer, one width"), 1e-8),
    **{name: 1e-6 for name, run in RUNS.items() if run.tiny == "marian"},
}


def some(names: Iterable[str], in_every_run: Iterable[str] = IN_EVERY_RUN) -> list[Any]:
    """Names as parameters, of which the normal run has a few."""
    return [pytest.param(name, marks=() if name in in_every_run else pytest.mark.slow) for name in names]


def made(name: str, folder: Path, changes: Mapping[str, Any] | None = None) -> Any:
    """A tiny model with random numbers everywhere, in float64, saved in a folder."""
    run = RUNS.get(name) or _decoder(name)
    _ = getattr(transformers, _WITHIN.get(name, run.model or TINY[run.tiny].model))

    def configure() -> Any:
        config = run.configured(**(changes or {}))
        # Falcon's "eager" adds the bias of ALiBi twice (transformers 5.23).
        config._attn_implementation = "sdpa" if name.startswith("falcon") else "eager"
        if has_experts(config):
            config._experts_implementation = "eager"
        return config

    return saved(run.of_class, configure, folder, leave=NOT_SAVED.get(run.tiny, ""))


Model = LanguageModel | EncoderDecoder


def loaded(name: str, folder: Path, dtype: torch.dtype | None = None) -> Model:
    if RUNS[name].kind == "pairs":
        return load_encoder_decoder(folder, dtype=dtype)
    return load_language_model(folder, dtype=dtype)


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Any, Any]]:
    """A tiny model of `transformers`, and ours of its files; made once."""

    @cache
    def pair(name: str) -> tuple[Any, Any]:
        folder = tmp_path_factory.mktemp("tiny")
        return made(name, folder), loaded(name, folder)

    return pair


def some_ids(batch: int = 2, length: int = 11, seed: int = 1, first: int = 3) -> Tensor:
    return torch.randint(first, 40, (batch, length), generator=torch.Generator().manual_seed(seed))


def read_by(name: str) -> tuple[Tensor, ...]:
    """What a model reads: tokens, of an encoder-decoder on both sides."""
    if RUNS[name].kind == "pairs":
        return some_ids(2, 9, 9, 4), some_ids(2, 7, 7, 4)
    ids = some_ids(first=4) if RUNS[name].kind == "encoder" else some_ids()
    if RUNS[name].kind == "encoder":
        ids[:, 3] = 3  # a masked token, where a model knows one
    return (ids,)


def theirs(model: Any, *ids: Tensor, **given: Any) -> Any:
    """What a model of `transformers` gives; paddings of a source are not read."""
    if len(ids) > 1:
        there = (ids[0] != model.config.pad_token_id).long()
        # FSMT masks no later tokens where it may be asked for them one by one.
        given = {"attention_mask": there, "decoder_input_ids": ids[1], "use_cache": False, **given}
    with in_float64(), torch.no_grad():
        return model(input_ids=ids[0], **given)


def attention_weights(calls: Sequence[LayerCall], found: Any) -> Iterator[tuple[Tensor, Tensor]]:
    """The attention weights of every layer, ours and those of `transformers`."""
    halves = ("encoder", "decoder", "cross")
    layers = found.get("attentions") or [layer for half in halves for layer in found[f"{half}_attentions"]]
    assert len(calls) == len(layers)
    for call, layer in zip(sorted(calls, key=lambda call: halves.index(call.kind)), layers, strict=True):
        yield call.queries_and_keys().weights(), layer


def outputs(found: Any) -> Tensor:
    """Logits, `[batch, length, number]`, or the stream of a model without head."""
    if isinstance(found, Tensor):
        return found
    if getattr(found, "start_logits", None) is not None:
        return torch.stack([found.start_logits, found.end_logits], dim=-1)
    for name in ("logits", "prediction_logits"):
        if (logits := getattr(found, name, None)) is not None:
            return logits if logits.dim() == 3 else logits[..., None]  # type: ignore[no-any-return]
    return found.last_hidden_state  # type: ignore[no-any-return]
