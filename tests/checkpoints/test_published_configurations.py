"""Configurations as people publish them, odd keys and all: with small sizes they run as in `transformers`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from checkpoints.oracle import has_experts, saved  # noqa: E402
from checkpoints.runs import outputs, some, theirs  # noqa: E402
from triptych.core.checkpoints.checkpoint import open_checkpoint  # noqa: E402
from triptych.core.checkpoints.stored_models import load_encoder_decoder, load_language_model  # noqa: E402
from triptych.errors import DataError  # noqa: E402

FOLDER = Path(__file__).parents[3] / "shared" / "data" / "published-configs"
NAMES = [path.stem for path in sorted(FOLDER.glob("*.json"))]
pytestmark = [
    pytest.mark.skipif(not NAMES, reason="needs ../shared/data/published-configs"),
    pytest.mark.filterwarnings("ignore"),
]
IN_EVERY_RUN = {
    "SmolLM2-135M",
    "Qwen2.5-0.5B",
    "gemma-2-2b",
    "falcon-40b",
    "bge-small-en-v1.5",
    "bart-large-cnn",
}
TOLERANCE = {"bloom-560m": 1e-9}
# Why those that are not run are not.
REFUSED = {
    "Qwen3-Next-80B-A3B": "the rest are gated delta nets, which are not: it can be read, and not run",
    "LFM2-350M": "the rest are short convolutions, which are not: it can be read, and not run",
    "deberta-v2-xlarge": "nothing here has a convolution between its blocks",
    "wav2vec2-base-960h": "checkpoints of Wav2Vec2 can be read, and not run",
    "vit-base-patch16-224": "checkpoints of ViT can be read, and not run",
    "whisper-tiny": "checkpoints of Whisper can be read, and not run",
}
_WIDTH, _HEADS, _LAYERS, _LENGTH, _VOCABULARY = 64, 4, 4, 64, 80
_NUMBERS: dict[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "embedding_size"), _WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers"), _LAYERS),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), _HEADS),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), _HEADS),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "d_ff", "hidden_dim", "ffn_hidden_size"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "moe_intermediate_size"), 40),
    **dict.fromkeys(("shared_expert_intermediate_size", "moe_layer_freq"), 24),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), _LENGTH),
    **dict.fromkeys(("original_max_position_embeddings", "sliding_window", "local_attention"), 8),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "attention_head_size"), 16),
    **{"vocab_size": _VOCABULARY, "q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6},
    **{"qk_rope_head_dim": 4, "v_head_dim": 8, "num_experts_per_tok": 2, "query_pre_attn_scalar": 8},
    **{"n_shared_experts": 1, "block_dim": _WIDTH, "block_ff_dim": 48, "conv_dim": _WIDTH},
    **{"conv_dim_out": _WIDTH, "rotary_dim": 4, "position_buckets": 8, "dim_model_base": 8},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2},
    **{"linear_num_value_heads": 4, "n_group": 1, "topk_group": 1},
}  # fmt: skip


def shrunk(record: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with small sizes that fit each other, and everything else as it is."""
    found: dict[str, Any] = {}
    fields = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads")
    heads = next(record[field] for field in fields if field in record)
    share = record.get("partial_rotary_factor", 1.0)
    for key, value in record.items():
        is_number = isinstance(value, int) and not isinstance(value, bool)
        if key in ("num_key_value_heads", "num_kv_heads") and is_number:
            found[key] = _HEADS if value == heads else 1 if value == 1 else 2
        elif key in _NUMBERS and is_number and value > 0:
            found[key] = _NUMBERS[key]
        elif key.endswith(("token_id", "token_index")) and is_number:
            found[key] = value % _VOCABULARY if value >= 0 else value
        elif key == "layer_types":
            found[key] = value[:_LAYERS]
        elif key == "full_attn_idxs":
            found[key] = [layer for layer in value if layer < _LAYERS]
        elif key == "clip_qkv" and is_number:
            found[key] = float(value)  # transformers 5 refuses a whole number
        elif key in ("short_factor", "long_factor"):
            found[key] = value[: int(8 * share)]
        elif isinstance(value, dict) and key not in ("task_specific_params", "id2label", "label2id"):
            within = shrunk({"num_heads": heads, "partial_rotary_factor": share, **value})
            found[key] = {name: within[name] for name in value}
        else:
            found[key] = value
    return found


def class_of(record: Mapping[str, Any], configuration: Any) -> Any:
    """The class of a model; where the file's has a head for a task, that without it."""
    named = (record.get("architectures") or [""])[0]
    if named.endswith(("ForSequenceClassification", "ForTokenClassification")) or not hasattr(
        transformers, named
    ):
        generated = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        other = generated if named.endswith("CausalLM") else transformers.MODEL_FOR_MASKED_LM_MAPPING
        return other[type(configuration)]
    return getattr(transformers, named)


@pytest.mark.parametrize("name", some(NAMES, IN_EVERY_RUN))
def test_a_published_configuration_runs_as_in_transformers(name: str, tmp_path: Path) -> None:
    published = shrunk(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))
    (tmp_path / "config.json").write_text(json.dumps(published))
    configuration = transformers.AutoConfig.from_pretrained(tmp_path)
    of_class = class_of(published, configuration)

    def configure() -> Any:
        again = transformers.AutoConfig.from_pretrained(tmp_path)
        again._attn_implementation = "sdpa" if name.startswith("falcon") else "eager"
        if has_experts(again):
            again._experts_implementation = "eager"
        return again

    folder = tmp_path / "model"
    model = saved(of_class, configure, folder)
    (folder / "config.json").write_text(json.dumps(published))  # as it is published
    assert open_checkpoint(folder).sites
    if name in REFUSED:
        with pytest.raises(DataError, match=REFUSED[name]):
            load_language_model(folder)
        return
    ids = torch.randint(4, _VOCABULARY - 1, (2, 11), generator=torch.Generator().manual_seed(1))
    if configuration.is_encoder_decoder:
        given = (ids, ids[:, :7])
        ours = load_encoder_decoder(folder)
    else:
        given = (ids,)
        ours = load_language_model(folder).model
    with torch.no_grad():
        found = ours(*given)
    wanted = outputs(theirs(model, *given))
    apart = float((outputs(found) - wanted).abs().max() / wanted.abs().max())
    assert apart < TOLERANCE.get(name, 1e-10)
