"""Configurations as people publish them, odd keys and all, and small models of `transformers` made of them.

The file has a line for each: the repository, what becomes of such a model here ("run", or why not), and its
`config.json`, of which long lists are cut. They were written down from public sources. Some sizes are another
model's of the same family, and some keys (`quantization_config`) are missing; the tests run with small sizes.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from checkpoints.oracle import has_experts, saved

FILE = Path(__file__).parents[1] / "data" / "published-configs.jsonl"
LAYERS = 4
LENGTH = 64
VOCABULARY = 80
_WIDTH = 64
_HEADS = 4
_NUMBERS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "n_embed", "dim", "embedding_size"), _WIDTH),
    "pooler_hidden_size": _WIDTH,
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "depth", "conf_num_hidden_layers"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "dff", "d_inner"), 48),
    **dict.fromkeys(("hidden_dim", "ffn_hidden_size", "mlp_intermediate_size", "intermediate_size_mlp"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 40),
    **dict.fromkeys(("shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), LENGTH),
    **dict.fromkeys(("max_encoder_position_embeddings", "max_decoder_position_embeddings"), LENGTH),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "seq_length"), LENGTH),
    **dict.fromkeys(("original_max_position_embeddings", "sliding_window", "local_attention"), 8),
    **dict.fromkeys(("window_size", "attention_chunk_size", "position_buckets", "dim_model_base"), 8),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "experts_per_token", "moe_k", "moe_top_k", "n_group"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "d_head", "attention_head_size", "attention_head_dim"), 16),
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(("vocab_size_per_layer_input", "org_vocab_size"), VOCABULARY),
    **{"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4},
    **{"v_head_dim": 8, "query_pre_attn_scalar": 8, "topk_group": 1, "num_key_value_heads": 2},
    **{"block_dim": _WIDTH, "block_ff_dim": 48, "conv_dim": _WIDTH, "conv_dim_out": _WIDTH},
    **{"rotary_dim": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "laurel_rank": 6},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "hidden_size_per_layer_input": 12},
    **{"num_kv_heads": 2, "kv_n_heads": 2, "num_kv_shared_layers": 1, "moe_layer_end_index": 3},
    **{"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_dt_rank": 8, "mamba_d_state": 4},
    **{"mamba_d_head": 8, "mamba_n_heads": 16},
    **{"image_size": 28, "patch_size": 14, "out_hidden_size": _WIDTH, "projection_dim": 24},
    **{"input_embedding_size": 24, "output_embedding_size": 40, "num_conv_pos_embeddings": 8},
    **{"true_hidden_size": 16, "intra_bottleneck_size": 16, "mm_tokens_per_image": 4},
    **{"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
}  # fmt: skip
_PER_LAYER = ("layer_types", "attention_layers", "no_rope_layers", "attn_type_list", "attention_window")
_PER_LAYER += ("activation_sparsity_pattern",)
_HEAD_COUNTS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
    "decoder_attention_heads", "attention_heads",
)  # fmt: skip
_KEPT = ("task_specific_params", "id2label", "label2id")
# Of files in narrow or packed numbers, and of kernels that this machine lacks.
_OF_MACHINES = ("torch_dtype", "dtype", "quantization_config", "attn_implementation")
# Models whose files have other names of sizes than the class that `transformers` has made of them since.
_OTHER_NAMES = {
    "nomic_bert": {
        "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
        "n_inner": "intermediate_size", "n_positions": "max_position_embeddings",
        "layer_norm_epsilon": "layer_norm_eps",
    },
}  # fmt: skip
_TASKS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class Published(NamedTuple):
    """A configuration, and what becomes of a model of it here."""

    source: str  # repository on the Hub
    outcome: str  # "run", or why such a model is not
    config: Mapping[str, Any]


def published() -> Iterator[Published]:
    for line in FILE.read_text(encoding="utf-8").splitlines():
        yield Published(**json.loads(line))


def shrunk(record: Mapping[str, Any], heads: int = 0, share: float = 1.0) -> dict[str, Any]:
    """A configuration with small sizes that fit each other, and everything else as it is."""
    heads = next((record[field] for field in _HEAD_COUNTS if isinstance(record.get(field), int)), heads)
    share = record.get("partial_rotary_factor", share)
    return {key: _small(key, value, record, heads, share) for key, value in record.items()}


def _small(key: str, value: Any, record: Mapping[str, Any], heads: int, share: float) -> Any:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    match key:
        case "num_key_value_heads" | "num_kv_heads" if is_number:
            return _HEADS if value == heads else min(value, 2)
        case _ if key in _HEAD_COUNTS and is_number:
            return _HEADS
        case "out_features":
            return [f"stage{LAYERS}"]
        case "out_indices":
            return [LAYERS]
        case "embedding_size" | "word_embed_proj_dim" if is_number:
            return _WIDTH if value == record["hidden_size"] else 24
        case _ if key.endswith(("token_id", "token_index", "pad_id")) and is_number:
            return value % VOCABULARY if value >= 0 else value
        case "clip_qkv" if is_number:
            return float(value)  # transformers 5 refuses a whole number
        case "mrope_section":
            return [2, 3, 3]
        case "attention_types":
            return [[value[0][0], LAYERS // 2]]
        case "attention_window":
            return [8] * LAYERS
        case "short_factor" | "long_factor":
            return value[: int(8 * share)]
        case "full_attn_idxs" | "fullatt_block_indexes":
            return [layer for layer in value if layer < LAYERS]
        case "intermediate_size" if isinstance(value, list):
            return [48] * LAYERS
        case _ if key in _PER_LAYER:
            return value[:LAYERS]
        case _ if key in _NUMBERS and is_number and value > 0:
            return min(value, _NUMBERS[key])
        case _ if isinstance(value, dict) and key not in _KEPT:
            return shrunk(value, heads, share)
    return value


def for_transformers(record: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration as `transformers` is given it: what it cannot do without on this machine left out."""
    found = {key: value for key, value in record.items() if key not in _OF_MACHINES}
    found = {key: for_transformers(of) if isinstance(of, dict) else of for key, of in found.items()}
    renamed = _OTHER_NAMES.get(str(record.get("model_type")), {})
    return found | {new: record[old] for old, new in renamed.items() if old in record}


class Built(NamedTuple):
    """A small model of `transformers` with random numbers, saved under its configuration as published."""

    model: Any
    folder: Path
    pairs: bool  # with an encoder and a decoder
    ids: tuple[Tensor, ...]  # what it is given


def built(of: Published, folder: Path) -> Built:
    record = shrunk(of.config)
    # The oldest files leave out the type, which `transformers` then takes from the name of the folder.
    given = {"model_type": "bert", **for_transformers(record)}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(given))

    def configure() -> Any:
        config = transformers.AutoConfig.from_pretrained(folder)
        if config.model_type == "gemma3n":  # whose parts for pictures need a library of their own
            config = config.text_config
        # Falcon's "eager" adds the bias of ALiBi twice (transformers 5.23).
        config._attn_implementation = "sdpa" if config.model_type == "falcon" else "eager"
        if has_experts(config):
            config._experts_implementation = "eager"
        return config

    config = configure()
    leave = "embed_positions" if config.model_type in ("fsmt", "marian", "roformer") else ""
    model = saved(_class_of(record, config), configure, folder / "model", leave=leave)
    (folder / "model" / "config.json").write_text(json.dumps(record))
    ids = (_ids(record, 11),)
    if config.is_encoder_decoder and type(model).__name__.endswith(_TASKS):
        # The head of a task reads the end token of the text, which the decoder reads once more.
        ids[0][:, -1] = config.eos_token_id
        start = torch.full_like(ids[0][:, :1], config.decoder_start_token_id)
        ids = (*ids, torch.cat([start, ids[0][:, :-1]], dim=1))
    elif config.is_encoder_decoder:
        ids = (*ids, _ids(record, 7))
    return Built(model, folder / "model", bool(config.is_encoder_decoder), ids)


def _class_of(record: Mapping[str, Any], config: Any) -> Any:
    """The class of a model; where the file's has none, that for tokens."""
    named = (record.get("architectures") or [""])[0]
    if config.model_type == "gemma3n_text":
        return transformers.Gemma3nForCausalLM
    has_class = hasattr(transformers, named)
    # With the output tied to the table of tokens, a file of a class without a head has all of one with it.
    ends_early = (
        named.endswith("Model") and "LMHead" not in named and getattr(config, "tie_word_embeddings", False)
    )
    mappings = (
        transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        transformers.MODEL_FOR_MASKED_LM_MAPPING,
    )
    with_heads = [mapping[type(config)] for mapping in mappings if type(config) in mapping]
    generates = [made for made in with_heads if "MaskedLM" not in made.__name__]
    is_bert = hasattr(config, "type_vocab_size") or "MaskedLM" in named
    if has_class and not (ends_early and generates and not is_bert):
        return getattr(transformers, named)
    masked = [made for made in with_heads if "MaskedLM" in made.__name__]
    return ((masked or generates) if is_bert else (generates or masked))[0]


def _ids(record: Mapping[str, Any], length: int) -> Tensor:
    """Tokens without a meaning of their own: paddings, pictures and the like."""
    special = {*_special(record)}
    rows = min(VOCABULARY, record.get("vocab_size", VOCABULARY))
    free = torch.tensor([number for number in range(4, rows - 1) if number not in special])
    return free[torch.randint(len(free), (2, length), generator=torch.Generator().manual_seed(1))]


def _special(record: Mapping[str, Any]) -> Iterator[int]:
    for key, value in record.items():
        if isinstance(value, dict):
            yield from _special(value)
        elif key.endswith(("token_id", "token_index")) and isinstance(value, int):
            yield value
