"""Tiny random models of every family, made with `transformers`: their classes and settings.

Widths are all different where they may be, so that a reading with two of them exchanged fails.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import pytest

transformers = pytest.importorskip("transformers")


class Tiny(NamedTuple):
    """A tiny model: the name of its class in `transformers`, and the settings of its configuration."""

    model: str
    settings: Mapping[str, Any]

    @property
    def config(self) -> Any:
        """The class of its configuration."""
        return getattr(transformers, self.model).config_class

    def configured(self, **changes: Any) -> Any:
        """Its configuration, with these settings changed."""
        return self.config(**{**self.settings, **changes})


def tiny(model: str, *bases: Mapping[str, Any], **settings: Any) -> Tiny:
    return Tiny(model, {name: value for base in (*bases, settings) for name, value in base.items()})


# fmt: off
_COMMON: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 40, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_GROUPED = {**_COMMON, "num_key_value_heads": 2}
_NARROW = {**_GROUPED, "head_dim": 10}
_OPT: dict[str, Any] = {
    "hidden_size": 24, "ffn_dim": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 40,
    "max_position_embeddings": 64,
}
_TWO_STACKS: dict[str, Any] = {
    "d_model": 24, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "vocab_size": 40,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
_PICTURES: dict[str, Any] = {
    "hidden_size": 24, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 8,
}
_LATENT_SIZES = {
    "num_key_value_heads": 4, "q_lora_rank": 14, "kv_lora_rank": 12, "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4, "v_head_dim": 5,
}
_LATENT: dict[str, Any] = {
    **_COMMON, **_LATENT_SIZES, "n_routed_experts": 2, "num_experts_per_tok": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
}
_GPT: dict[str, Any] = {"n_embd": 24, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 40}
_XGLM: dict[str, Any] = {
    "d_model": 24, "ffn_dim": 32, "num_layers": 2, "attention_heads": 4, "vocab_size": 40,
    "max_position_embeddings": 64, "pad_token_id": 0,
}
_TWO_EXPERTS = {"num_local_experts": 2, "num_experts_per_tok": 1}
_ROUTED = {"n_routed_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
_FEW_EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
_T5: dict[str, Any] = {
    "d_model": 24, "d_kv": 7, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 40,
    "decoder_start_token_id": 0,
}
_DEBERTA: dict[str, Any] = {**_COMMON, "relative_attention": True, "position_biased_input": False}
_YARN = {
    "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 16,
    "mscale": 0.7, "mscale_all_dim": 0.9,
}
_LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}
_LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.1, 1.2, 1.3],
    "long_factor": [2.0, 3.0, 4.0],
}
_TEMPERATURE = {
    "sliding_window": 4,
    "rope_parameters": {**_YARN, "original_max_position_embeddings": 4, "llama_4_scaling_beta": 0.4},
}
_LLAMA4: dict[str, Any] = {
    **_NARROW, **_TWO_EXPERTS, "intermediate_size_mlp": 32, "interleave_moe_layer_step": 2,
    "num_hidden_layers": 4, "attention_chunk_size": 4, "floor_scale": 3, "attn_scale": 0.5,
}
_PIXTRAL = {**_PICTURES, "model_type": "pixtral", "hidden_size": 16, "head_dim": 4, "num_hidden_layers": 1}

_STEPS = {"time_step_limit": [0.0, 10.0]}  # whose infinity no configuration reads back from a record
_MAMBA: dict[str, Any] = {
    **_STEPS, "mamba_n_heads": 8, "mamba_d_state": 4, "mamba_expand": 2, "mamba_chunk_size": 4,
}
_DELTA_NET = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 4,
    "linear_value_head_dim": 6,
}

_MROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_VISION: dict[str, Any] = {"depth": 1, "num_heads": 2, "patch_size": 4}
_WINDOW_FIRST = {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
_WINDOW_LAST = {"sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}

TINY: dict[str, Tiny] = {
    "bert": tiny("BertModel", _COMMON),
    "bert with cross-attention": tiny("BertLMHeadModel", _COMMON, is_decoder=True, add_cross_attention=True),
    "roberta": tiny("RobertaModel", _COMMON),
    "distilbert": tiny(
        "DistilBertModel", dim=24, hidden_dim=32, n_layers=2, n_heads=4, vocab_size=40,
        max_position_embeddings=64,
    ),
    "albert": tiny("AlbertModel", _COMMON, embedding_size=12),
    "albert in groups": tiny(
        "AlbertModel", _COMMON, embedding_size=12, num_hidden_groups=2, inner_group_num=2,
        num_hidden_layers=4,
    ),
    "electra": tiny("ElectraModel", _COMMON, embedding_size=12),
    "deberta-v2": tiny(
        "DebertaV2Model", _DEBERTA, pos_att_type=["p2c", "c2p"], position_buckets=8,
        norm_rel_ebd="layer_norm", share_att_key=True,
    ),
    "deberta-v2, maps of its own": tiny(
        "DebertaV2Model", _DEBERTA, pos_att_type=["c2p"], share_att_key=False, max_relative_positions=6,
    ),
    "data2vec-text": tiny("Data2VecTextModel", _COMMON),
    "ernie": tiny("ErnieModel", _COMMON),
    "megatron-bert": tiny("MegatronBertModel", _COMMON),
    "roberta-prelayernorm": tiny("RobertaPreLayerNormModel", _COMMON),
    "xlm-roberta-xl": tiny("XLMRobertaXLModel", _COMMON),
    "eurobert": tiny("EuroBertForMaskedLM", _GROUPED),
    "jina_embeddings_v3": tiny("JinaEmbeddingsV3Model", _COMMON),
    "gte": tiny("GteModel", _COMMON),
    "gpt2": tiny("GPT2LMHeadModel", _GPT),
    "gpt_bigcode": tiny("GPTBigCodeForCausalLM", _GPT),
    "gpt_bigcode, a key each": tiny("GPTBigCodeForCausalLM", _GPT, multi_query=False),
    "gpt2, scaled by layer": tiny("GPT2LMHeadModel", _GPT, scale_attn_by_inverse_layer_idx=True),
    "gpt2, not scaled": tiny("GPT2LMHeadModel", _GPT, scale_attn_weights=False),
    "gpt2, scaled by layer alone": tiny(
        "GPT2LMHeadModel", _GPT, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True,
    ),
    "openai-gpt": tiny("OpenAIGPTLMHeadModel", _GPT),
    "biogpt": tiny("BioGptForCausalLM", _COMMON),
    "xglm": tiny("XGLMForCausalLM", _XGLM),
    "xglm with cross-attention": tiny("XGLMForCausalLM", _XGLM, add_cross_attention=True),
    "gpt_neo": tiny(
        "GPTNeoForCausalLM", hidden_size=24, num_layers=2, num_heads=4, vocab_size=40,
        attention_types=[[["global", "local"], 1]], window_size=4, max_position_embeddings=64,
    ),
    "gpt_neox": tiny("GPTNeoXForCausalLM", _COMMON, hidden_size=64),
    "codegen": tiny("CodeGenForCausalLM", _GPT, n_embd=32, n_head=8, rotary_dim=2, n_ctx=64),
    "gptj": tiny("GPTJForCausalLM", _GPT, rotary_dim=4),
    "opt": tiny("OPTForCausalLM", _OPT, word_embed_proj_dim=24),
    "opt, narrow embeddings": tiny(
        "OPTForCausalLM", _OPT, word_embed_proj_dim=16, do_layer_norm_before=False,
    ),
    "bloom": tiny("BloomForCausalLM", hidden_size=24, n_layer=2, n_head=4, vocab_size=40),
    "bloom, six heads": tiny("BloomForCausalLM", hidden_size=24, n_layer=2, n_head=6, vocab_size=40),
    "falcon, one key head": tiny("FalconForCausalLM", _COMMON, multi_query=True),
    "falcon, groups": tiny("FalconForCausalLM", _COMMON, num_kv_heads=2, new_decoder_architecture=True),
    "falcon, a key each": tiny(
        "FalconForCausalLM", _COMMON, multi_query=False, alibi=True, bias=True, parallel_attn=False,
    ),
    "mpt": tiny("MptForCausalLM", d_model=24, n_heads=4, n_layers=2, vocab_size=40, max_seq_len=64),
    "mpt, six heads, clipped": tiny(
        "MptForCausalLM", d_model=24, n_heads=6, n_layers=2, vocab_size=40, max_seq_len=64,
        attn_config={"clip_qkv": 0.05},
    ),
    "mpt, a scale of its own": tiny(
        "MptForCausalLM", d_model=24, n_heads=4, n_layers=2, vocab_size=40, max_seq_len=64,
        attn_config={"softmax_scale": 0.7},
    ),
    "llama": tiny("LlamaForCausalLM", _NARROW),
    "llama 3": tiny("LlamaForCausalLM", _GROUPED, rope_parameters=_LLAMA3),
    "llama, biases": tiny("LlamaForCausalLM", _GROUPED, attention_bias=True),
    "mistral": tiny("MistralForCausalLM", _GROUPED, sliding_window=4),
    "mixtral": tiny("MixtralForCausalLM", _GROUPED, num_local_experts=2),
    "qwen2": tiny("Qwen2ForCausalLM", _GROUPED),
    "qwen2_vl": tiny(
        "Qwen2VLForConditionalGeneration",
        text_config={**_GROUPED, "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 1]}},
        vision_config={**_VISION, "embed_dim": 16, "hidden_size": 24},
    ),
    "qwen2_5_vl": tiny(
        "Qwen2_5_VLForConditionalGeneration",
        text_config={**_GROUPED, "rope_parameters": {**_MROPE, "mrope_section": [1, 1, 1]}},
        vision_config={**_VISION, "hidden_size": 16, "out_hidden_size": 24, "intermediate_size": 16},
    ),
    "qwen3_vl": tiny(
        "Qwen3VLForConditionalGeneration",
        text_config={**_NARROW, "rope_parameters": {**_MROPE, "mrope_section": [1, 2, 2]}},
        vision_config={
            **_VISION, "hidden_size": 16, "out_hidden_size": 24, "intermediate_size": 16,
            "deepstack_visual_indexes": [0],
        },
    ),
    "qwen3": tiny("Qwen3ForCausalLM", _NARROW),
    "qwen3_moe": tiny(
        "Qwen3MoeForCausalLM", _NARROW, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
        mlp_only_layers=[1], use_sliding_window=True, sliding_window=4,
    ),
    "arcee": tiny("ArceeForCausalLM", _GROUPED, attention_bias=True, mlp_bias=True),
    "jais2": tiny("Jais2ForCausalLM", _GROUPED),
    "vaultgemma": tiny(
        "VaultGemmaForCausalLM", _NARROW, sliding_window=4, query_pre_attn_scalar=7,
        attn_logit_softcapping=0.02,
    ),
    "cwm": tiny("CwmForCausalLM", _NARROW, _WINDOW_FIRST, rope_parameters=_LLAMA3),
    "youtu": tiny(
        "YoutuForCausalLM",
        _COMMON,
        _LATENT_SIZES,
        pad_token_id=None,  # whose row `transformers` (5.23) makes zeros when it loads the model
    ),
    "hyperclovax": tiny(
        "HyperCLOVAXForCausalLM", _GROUPED, num_attention_heads=6, residual_multiplier=0.3,
        logits_scaling=2.0,
    ),
    "hyperclovax, no norms after": tiny(
        "HyperCLOVAXForCausalLM", _GROUPED, num_attention_heads=6, use_post_norm=False,
        attention_multiplier=0.7,
    ),
    "qwen2_moe": tiny(
        "Qwen2MoeForCausalLM", _GROUPED, _FEW_EXPERTS, shared_expert_intermediate_size=12,
        mlp_only_layers=[0],
    ),
    "dots1": tiny(
        "Dots1ForCausalLM", _NARROW, _ROUTED, n_shared_experts=1, first_k_dense_replace=1, sliding_window=4,
        max_window_layers=1,
    ),
    "solar_open": tiny("SolarOpenForCausalLM", _NARROW, _ROUTED),
    "ernie4_5_moe": tiny(
        "Ernie4_5_MoeForCausalLM", _GROUPED, moe_num_experts=2, moe_k=1, moe_intermediate_size=8,
        use_bias=True,
    ),
    "minimax_m2": tiny("MiniMaxM2ForCausalLM", _GROUPED, **_TWO_EXPERTS, head_dim=12, rotary_dim=6),
    "hunyuan_v1_moe": tiny("HunYuanMoEV1ForCausalLM", _NARROW, num_experts=2, moe_topk=[1, 1]),
    "flex_olmo": tiny("FlexOlmoForCausalLM", _GROUPED, num_experts=2, num_experts_per_tok=1),
    "exaone_moe": tiny("ExaoneMoeForCausalLM", _GROUPED, _FEW_EXPERTS, _WINDOW_LAST),
    "mellum": tiny(
        "MellumForCausalLM", _NARROW, _FEW_EXPERTS, _WINDOW_LAST, mlp_layer_types=["dense", "sparse"],
    ),
    "hy_v3": tiny("HYV3ForCausalLM", _NARROW, _FEW_EXPERTS),
    "granite_swa": tiny(
        "GraniteSWAForCausalLM", _GROUPED, num_hidden_layers=3, sliding_window=4,
        layer_rope_theta=[0, 200.0, 5000.0], attention_multiplier=0.7, residual_multiplier=0.3,
    ),
    "granitemoe_swa": tiny(
        "GraniteMoeSWAForCausalLM", _GROUPED, **_TWO_EXPERTS, sliding_window=4, shared_intermediate_size=8,
        logits_scaling=2.0,
    ),
    "persimmon": tiny("PersimmonForCausalLM", _COMMON, hidden_size=64),
    "seed_oss": tiny("SeedOssForCausalLM", _NARROW, attention_out_bias=True, mlp_bias=True),
    "granite": tiny(
        "GraniteForCausalLM", _GROUPED, attention_multiplier=0.7, residual_multiplier=0.3, logits_scaling=2.0,
    ),
    "granitemoe": tiny(
        "GraniteMoeForCausalLM", _GROUPED, attention_multiplier=0.7, attention_bias=True, **_TWO_EXPERTS,
    ),
    "granitemoeshared": tiny(
        "GraniteMoeSharedForCausalLM", _GROUPED, attention_multiplier=0.7, shared_intermediate_size=8,
        **_TWO_EXPERTS,
    ),
    "glm": tiny("GlmForCausalLM", _NARROW, head_dim=12),
    "glm4": tiny("Glm4ForCausalLM", _NARROW, head_dim=12),
    "glm4_moe": tiny(
        "Glm4MoeForCausalLM", _GROUPED, head_dim=12, attention_bias=True, use_qk_norm=True,
        n_routed_experts=2, num_experts_per_tok=1, moe_intermediate_size=8,
    ),
    "hunyuan_v1_dense": tiny(
        "HunYuanDenseV1ForCausalLM", _NARROW,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0},
    ),
    "apertus": tiny("ApertusForCausalLM", _GROUPED, head_dim=12),
    "t5gemma": tiny(
        "T5GemmaForConditionalGeneration", {},
        encoder={**_NARROW, "sliding_window": 3, "attn_logit_softcapping": 0.02, "query_pre_attn_scalar": 7},
        decoder={
            **_NARROW, "sliding_window": 4, "attn_logit_softcapping": 0.02, "final_logit_softcapping": 0.5,
        },
        vocab_size=40,
    ),
    "nemotron": tiny("NemotronForCausalLM", _NARROW, head_dim=12, attention_bias=True, mlp_bias=True),
    "exaone4": tiny("Exaone4ForCausalLM", _NARROW, num_hidden_layers=4, sliding_window=4),
    "exaone4, all turned": tiny(
        "Exaone4ForCausalLM", _NARROW, sliding_window=None, layer_types=["full_attention"] * 2,
    ),
    "ministral": tiny("MinistralForCausalLM", _NARROW, _WINDOW_FIRST),
    "ministral3": tiny("Ministral3ForCausalLM", _NARROW, **_TEMPERATURE),
    "mistral3": tiny(
        "Mistral3ForConditionalGeneration",
        text_config={**_NARROW, "model_type": "mistral", "sliding_window": 4}, vision_config=_PIXTRAL,
    ),
    "mistral3, ministral": tiny(
        "Mistral3ForConditionalGeneration",
        text_config={**_NARROW, **_TEMPERATURE, "model_type": "ministral3"}, vision_config=_PIXTRAL,
    ),
    "llama4, text": tiny("Llama4ForCausalLM", _LLAMA4),
    "llama4, stretched": tiny(
        "Llama4ForCausalLM", _LLAMA4, num_hidden_layers=2, attn_temperature_tuning=False,
        rope_parameters=_YARN,
    ),
    "llama4": tiny(
        "Llama4ForConditionalGeneration",
        text_config={**_LLAMA4, "num_hidden_layers": 2, "no_rope_layers": [0, 1], "use_qk_norm": False},
        vision_config={
            **_PICTURES, "num_hidden_layers": 1, "intermediate_size": 96, "vision_output_dim": 8,
            "projector_input_dim": 8, "projector_output_dim": 8,
        },
    ),
    "gemma3n": tiny(
        "Gemma3nForCausalLM", _NARROW, num_hidden_layers=5, num_kv_shared_layers=2,
        layer_types=[f"{kind}_attention" for kind in ("full", "sliding", "full", "sliding", "full")],
        sliding_window=4, hidden_size_per_layer_input=6, vocab_size_per_layer_input=30, laurel_rank=4,
        attention_bias=True, intermediate_size=[20, 24, 20, 24, 28],
        activation_sparsity_pattern=[0.9, 0.0, 0.6, 0.0, 0.0], altup_active_idx=1,
    ),
    "gemma3n, two streams": tiny(
        "Gemma3nForCausalLM", _NARROW, _WINDOW_FIRST, num_kv_shared_layers=0, hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=40, laurel_rank=4, altup_num_inputs=2, altup_correct_scale=False,
    ),
    "gemma4, text": tiny(
        "Gemma4ForCausalLM", _NARROW, num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2, sliding_window=4, global_head_dim=16,
        num_global_key_value_heads=1, attention_k_eq_v=True, num_kv_shared_layers=2,
        hidden_size_per_layer_input=6, vocab_size_per_layer_input=40, use_double_wide_mlp=True,
    ),
    "gemma4, experts": tiny(
        "Gemma4ForCausalLM", _NARROW, _WINDOW_FIRST, global_head_dim=16, hidden_size_per_layer_input=0,
        enable_moe_block=True, num_experts=4, top_k_experts=2, moe_intermediate_size=8, attention_bias=True,
    ),
    "gemma": tiny("GemmaForCausalLM", _NARROW),
    "gemma2": tiny(
        "Gemma2ForCausalLM", _NARROW, sliding_window=4, query_pre_attn_scalar=7, attn_logit_softcapping=0.02,
    ),
    "gemma3, text": tiny(
        "Gemma3ForCausalLM", _NARROW, sliding_window=4, query_pre_attn_scalar=7, num_hidden_layers=6,
    ),
    "gemma3, both ways": tiny(
        "Gemma3TextModel", _NARROW, sliding_window=6, query_pre_attn_scalar=7, num_hidden_layers=6,
        use_bidirectional_attention=True,
    ),
    "gemma3": tiny(
        "Gemma3ForConditionalGeneration", text_config={**_NARROW, "sliding_window": 4},
        vision_config=_PICTURES,
    ),
    "phi": tiny("PhiForCausalLM", _GROUPED, partial_rotary_factor=0.67, qk_layernorm=True),
    "phimoe": tiny(
        "PhimoeForCausalLM", _GROUPED, **_TWO_EXPERTS, attention_bias=True, lm_head_bias=True,
        sliding_window=4,
        rope_parameters={
            **_LONGROPE, "original_max_position_embeddings": 16, "short_mscale": 1.3, "long_mscale": 1.7,
        },
    ),
    "phi3": tiny("Phi3ForCausalLM", _GROUPED),
    "phi3, stretched": tiny(
        "Phi3ForCausalLM", _GROUPED, original_max_position_embeddings=16, rope_parameters=_LONGROPE,
    ),
    "stablelm": tiny(
        "StableLmForCausalLM", _GROUPED, partial_rotary_factor=0.34, use_qkv_bias=True, qk_layernorm=True,
    ),
    "starcoder2": tiny("Starcoder2ForCausalLM", _GROUPED),
    "olmo": tiny("OlmoForCausalLM", _GROUPED),
    "olmo, clipped": tiny("OlmoForCausalLM", _GROUPED, clip_qkv=0.05),
    "olmoe": tiny("OlmoeForCausalLM", _GROUPED, num_experts=2, num_experts_per_tok=1, clip_qkv=0.5),
    "olmo2": tiny("Olmo2ForCausalLM", _GROUPED),
    "olmo3": tiny(
        "Olmo3ForCausalLM", _GROUPED, num_hidden_layers=4, sliding_window=4,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 2000.0},
            "full_attention": {**_YARN, "attention_factor": 1.2},
        },
    ),
    "cohere": tiny("CohereForCausalLM", _GROUPED, use_qk_norm=True),
    "cohere2": tiny("Cohere2ForCausalLM", _GROUPED, num_hidden_layers=4, sliding_window=4),
    "ernie4_5": tiny("Ernie4_5ForCausalLM", _GROUPED, use_bias=True, head_dim=6),
    "helium": tiny("HeliumForCausalLM", _GROUPED, head_dim=6),
    "smollm3": tiny("SmolLM3ForCausalLM", _GROUPED, no_rope_layers=[1, 0]),
    "gpt_oss": tiny(
        "GptOssForCausalLM", _NARROW, num_local_experts=2, num_experts_per_tok=1, sliding_window=4,
    ),
    "qwen3_next": tiny(
        "Qwen3NextForCausalLM", _GROUPED, **_DELTA_NET, num_hidden_layers=4, head_dim=16, num_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=8, shared_expert_intermediate_size=8,
        attention_bias=True,
    ),
    "qwen3_5": tiny(
        "Qwen3_5ForCausalLM", _GROUPED, **_DELTA_NET, head_dim=16,
        layer_types=["full_attention", "linear_attention"],
    ),
    "qwen3_5_moe": tiny(
        "Qwen3_5MoeForCausalLM", _GROUPED, _DELTA_NET, _FEW_EXPERTS, _HYBRID, head_dim=16,
        shared_expert_intermediate_size=8,
    ),
    "lfm2_moe": tiny(
        "Lfm2MoeForCausalLM", _GROUPED, _FEW_EXPERTS, num_dense_layers=1,
        layer_types=["conv", "full_attention"],
    ),
    "olmo_hybrid": tiny("OlmoHybridForCausalLM", _GROUPED, _DELTA_NET, _HYBRID),
    "olmo_hybrid, not turned": tiny(
        "OlmoHybridForCausalLM", _GROUPED, _DELTA_NET, _HYBRID,
        rope_parameters={"rope_type": "default", "rope_theta": None},
    ),
    "minimax": tiny("MiniMaxForCausalLM", _GROUPED, _TWO_EXPERTS, _HYBRID, head_dim=6),
    "kimi_linear": tiny(
        "KimiLinearForCausalLM", _COMMON, _LATENT_SIZES, _FEW_EXPERTS, _HYBRID, q_lora_rank=None,
        linear_num_heads=2, linear_head_dim=4,
    ),
    "minicpm3": tiny("MiniCPM3ForCausalLM", _COMMON, _LATENT_SIZES),
    "deepseek_v32": tiny("DeepseekV32ForCausalLM", _LATENT, index_n_heads=2, index_head_dim=8),
    "glm_moe_dsa": tiny("GlmMoeDsaForCausalLM", _LATENT, index_n_heads=2, index_head_dim=8),
    "afmoe": tiny("AfmoeForCausalLM", _NARROW, _FEW_EXPERTS, _WINDOW_FIRST, mup_enabled=True),
    "granitemoehybrid": tiny(
        "GraniteMoeHybridForCausalLM", _GROUPED, **_MAMBA, **_TWO_EXPERTS, num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"], attention_multiplier=0.7,
        shared_intermediate_size=8,
    ),
    "granitemoehybrid, all attention": tiny(
        "GraniteMoeHybridForCausalLM", _GROUPED, **_MAMBA, layer_types=["full_attention"] * 2,
        position_embedding_type="rope", attention_multiplier=0.7, shared_intermediate_size=8,
        num_local_experts=0,
    ),
    "nanochat": tiny("NanoChatForCausalLM", _GROUPED),
    "lfm2": tiny("Lfm2ForCausalLM", _GROUPED, num_hidden_layers=3, full_attn_idxs=[1]),
    "falcon_h1": tiny(
        "FalconH1ForCausalLM", _GROUPED, **_MAMBA, mamba_d_ssm=48, key_multiplier=0.7,
        attention_in_multiplier=1.3, attention_out_multiplier=0.6,
    ),
    "nemotron_h": tiny(
        "NemotronHForCausalLM",
        {name: value for name, value in _NARROW.items() if name != "num_hidden_layers"}, **_STEPS,
        layers_block_type=["linear_attention", "full_attention", "moe", "mlp"], mamba_num_heads=8,
        mamba_head_dim=6, ssm_state_size=4, n_groups=2, chunk_size=4, n_routed_experts=2,
        num_experts_per_tok=1, moe_intermediate_size=8, moe_shared_expert_intermediate_size=8,
    ),
    "jamba": tiny(
        "JambaForCausalLM", _GROUPED, num_hidden_layers=4, attn_layer_period=3, attn_layer_offset=1,
        num_experts=2, num_experts_per_tok=1, mamba_d_state=4,
    ),
    "bamba": tiny("BambaForCausalLM", _GROUPED, **_MAMBA, attn_layer_indices=[1], hidden_size=32),
    "deepseek_v2": tiny("DeepseekV2ForCausalLM", _LATENT),
    "deepseek_v2, queries whole": tiny("DeepseekV2ForCausalLM", _LATENT, q_lora_rank=None),
    "deepseek_v3": tiny("DeepseekV3ForCausalLM", _LATENT),
    "glm4_moe_lite": tiny("Glm4MoeLiteForCausalLM", _COMMON, _LATENT_SIZES, _ROUTED),
    "deepseek_v3, halves": tiny("DeepseekV3ForCausalLM", _LATENT, rope_interleave=False),
    "deepseek_v2, stretched": tiny("DeepseekV2ForCausalLM", _LATENT, rope_parameters=_YARN),
    "deepseek_v3, stretched": tiny("DeepseekV3ForCausalLM", _LATENT, rope_parameters=_YARN),
    "t5": tiny("T5ForConditionalGeneration", _T5),
    "t5, far": tiny(
        "T5ForConditionalGeneration", _T5, relative_attention_num_buckets=8,
        relative_attention_max_distance=6,
    ),
    "mt5": tiny("MT5ForConditionalGeneration", _T5),
    "bart": tiny("BartForConditionalGeneration", _TWO_STACKS),
    "plbart": tiny("PLBartForConditionalGeneration", _TWO_STACKS),
    "mvp": tiny("MvpForConditionalGeneration", _TWO_STACKS),
    "mbart": tiny("MBartForConditionalGeneration", _TWO_STACKS),
    "pegasus": tiny("PegasusForConditionalGeneration", _TWO_STACKS),
    "m2m_100": tiny("M2M100ForConditionalGeneration", _TWO_STACKS),
    "marian": tiny("MarianMTModel", _TWO_STACKS, decoder_start_token_id=0),
    "fsmt": tiny(
        "FSMTForConditionalGeneration", {**_TWO_STACKS, "pad_token_id": 1, "bos_token_id": 0},
        langs=["en", "de"], src_vocab_size=40, tgt_vocab_size=40,
    ),
    "whisper": tiny(
        "WhisperForConditionalGeneration",
        **{name: value for name, value in _TWO_STACKS.items() if name != "max_position_embeddings"},
        num_mel_bins=8, max_source_positions=16, max_target_positions=32, decoder_start_token_id=1,
    ),
    "vit": tiny("ViTModel", _PICTURES),
    "clip": tiny(
        "CLIPModel", text_config={**_COMMON, "max_position_embeddings": 16},
        vision_config={**_PICTURES, "hidden_size": 16, "num_attention_heads": 2},
    ),
    "dinov2": tiny("Dinov2Model", _PICTURES),
    "wav2vec2": tiny(
        "Wav2Vec2Model", hidden_size=24, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        conv_dim=(8, 8), conv_stride=(2, 2), conv_kernel=(3, 3), num_feat_extract_layers=2,
        num_conv_pos_embeddings=4, num_conv_pos_embedding_groups=2,
    ),
    "perceiver": tiny(
        "PerceiverModel", num_latents=5, d_latents=24, d_model=16, num_blocks=1, num_self_attends_per_block=2,
        num_self_attention_heads=4, num_cross_attention_heads=4,
    ),
    "modernbert": tiny("ModernBertModel", _COMMON, num_hidden_layers=4, local_attention=6),
    "modernbert, biases": tiny(
        "ModernBertModel", _COMMON, local_attention=5, attention_bias=True, norm_bias=True, mlp_bias=True,
    ),
    "modernbert-decoder": tiny(
        "ModernBertDecoderForCausalLM", _COMMON, num_hidden_layers=4, local_attention=6, attention_bias=True,
    ),
    "nomic_bert": tiny("NomicBertModel", _COMMON, head_dim=10),
    "blenderbot": tiny("BlenderbotForConditionalGeneration", _TWO_STACKS),
    "blenderbot-small": tiny("BlenderbotSmallForConditionalGeneration", _TWO_STACKS),
    "longformer": tiny("LongformerModel", _COMMON, attention_window=[4, 8]),
    "led": tiny(
        "LEDForConditionalGeneration",
        **{name: value for name, value in _TWO_STACKS.items() if name != "max_position_embeddings"},
        max_encoder_position_embeddings=64, max_decoder_position_embeddings=64, attention_window=4,
    ),
    "mpnet": tiny("MPNetModel", _COMMON, relative_attention_num_buckets=36),
    "roformer": tiny("RoFormerModel", _COMMON, embedding_size=12),
    "roformer with cross-attention": tiny(
        "RoFormerForCausalLM", _COMMON, is_decoder=True, add_cross_attention=True,
    ),
    "deberta": tiny("DebertaModel", _DEBERTA, pos_att_type=["c2p", "p2c"], max_relative_positions=6),
    "deberta, learned": tiny("DebertaModel", _COMMON),
    "esm": tiny("EsmForMaskedLM", _COMMON, mask_token_id=3),
    "esm, rotary": tiny(
        "EsmForMaskedLM", _COMMON, position_embedding_type="rotary", mask_token_id=3, token_dropout=True,
    ),
    "siglip": tiny(
        "SiglipModel", text_config={**_COMMON, "max_position_embeddings": 16, "projection_size": 16},
        vision_config={**_PICTURES, "hidden_size": 16, "num_attention_heads": 2},
    ),
    "siglip2, vision": tiny(
        "Siglip2VisionModel", **{name: value for name, value in _PICTURES.items() if name != "image_size"},
        num_patches=9,
    ),
    "beit": tiny("BeitModel", _PICTURES, use_absolute_position_embeddings=True),
    "beit, tables": tiny(
        "BeitModel", _PICTURES, image_size=24, use_relative_position_bias=True,
        use_shared_relative_position_bias=True,
    ),
    "dinov3": tiny(
        "DINOv3ViTModel", _PICTURES, image_size=[16, 32], num_attention_heads=3, num_register_tokens=2,
    ),
    "dinov3, gated": tiny(
        "DINOv3ViTModel", _PICTURES, image_size=24, num_attention_heads=2, hidden_size=16, use_gated_mlp=True,
        key_bias=True, query_bias=False,
    ),
    "umt5": tiny("UMT5ForConditionalGeneration", _T5),
    "rembert": tiny("RemBertModel", _COMMON, input_embedding_size=12, output_embedding_size=20),
    "ctrl": tiny("CTRLLMHeadModel", _GPT, dff=32),
    "dbrx": tiny(
        "DbrxForCausalLM", d_model=24, n_heads=4, n_layers=2, max_seq_len=64, vocab_size=40,
        attn_config={"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 500000.0},
        ffn_config={"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1},
    ),
    "idefics3": tiny(
        "Idefics3ForConditionalGeneration", text_config={**_GROUPED, "model_type": "llama"},
        vision_config={**_PICTURES, "model_type": "idefics3_vision"}, image_token_id=39, scale_factor=1,
    ),
}
# fmt: on

# They read and write what another tiny model of the same family does, with a difference in reading.
_VARIANTS = {
    "exaone4, all turned",
    "hyperclovax, no norms after",
    "olmo_hybrid, not turned",
    "mistral3, ministral",
    "llama4, stretched",
    "olmo, clipped",
    "opt, narrow embeddings",
    "modernbert, biases",
    "deberta, learned",
    "roformer with cross-attention",
    "esm",
    "beit",
    "dinov3, gated",
    "blenderbot-small",
    "siglip2, vision",
}


def most(names: Iterable[str] = TINY) -> list[Any]:
    """Names of tiny models as parameters, variants of another in the slow run alone."""
    return [pytest.param(n, marks=pytest.mark.slow if n in _VARIANTS else ()) for n in names]
