"""A Llama of about 100 M random parameters as a checkpoint; models as CTranslate2 and llama.cpp have them.

`python -m benchmarks.workers.generation_checkpoint llama FOLDER` writes the first,
`… ctranslate2 CHECKPOINT FOLDER` and `… gguf CHECKPOINT FOLDER` the others.
"""

import sys
from pathlib import Path
from typing import Any

import torch

VOCAB_SIZE = 32_000


def write_llama(folder: Path) -> None:
    """12 query heads and 4 of keys and values; numbers of a size at which logits differ clearly."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.05,
    )
    torch.manual_seed(1)
    LlamaForCausalLM(config).save_pretrained(folder)


def write_ctranslate2(checkpoint: Path, folder: Path) -> None:
    """By our own converter, which needs no tokenizer; its own would write the same numbers."""
    from triptych.converting.ctranslate2 import write_generator
    from triptych.core.checkpoints.stored_models import load_language_model

    folder.mkdir(parents=True)
    write_generator(load_language_model(checkpoint), folder)


def write_gguf(checkpoint: Path, folder: Path) -> None:
    """A Llama or GPT-2 as `fp32.gguf`, `fp16.gguf` and `q8_0.gguf`; the text of a token is its number."""
    from gguf import GGMLQuantizationType as Kind

    folder.mkdir(parents=True)
    for name, kind in {"fp32": Kind.F32, "fp16": Kind.F16, "q8_0": Kind.Q8_0}.items():
        _write_gguf(checkpoint, folder / f"{name}.gguf", kind)


def _write_gguf(checkpoint: Path, path: Path, kind: Any) -> None:
    import gguf
    from safetensors.numpy import load_file
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(checkpoint)
    architectures = {"llama": gguf.MODEL_ARCH.LLAMA, "gpt2": gguf.MODEL_ARCH.GPT2}
    names = gguf.get_tensor_name_map(architectures[config.model_type], config.num_hidden_layers)
    heads, width = config.num_attention_heads, config.hidden_size
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(width)
    writer.add_head_count(heads)
    if config.model_type == "llama":
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(width // heads)
    else:
        writer.add_feed_forward_length(config.n_inner or 4 * width)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([f"\u2581{token}" for token in range(config.vocab_size)])
    writer.add_token_scores([0.0] * config.vocab_size)
    writer.add_token_types([gguf.TokenType.NORMAL] * config.vocab_size)
    writer.add_eos_token_id(config.eos_token_id)
    writer.add_add_bos_token(False)
    for name, tensor in load_file(checkpoint / "model.safetensors").items():
        if name.endswith((".q_proj.weight", ".k_proj.weight")):  # rotary pairs are neighbours there
            count = heads if ".q_proj" in name else config.num_key_value_heads
            tensor = tensor.reshape(count, 2, -1, width).swapaxes(1, 2).reshape(tensor.shape)
        if name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            tensor = tensor.T
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if found is None:
            raise ValueError(f"{name} of {checkpoint} has no name in GGUF")
        is_plain = tensor.ndim == 1 or found.startswith("position")
        stored = gguf.GGMLQuantizationType.F32 if is_plain else kind
        writer.add_tensor(found, gguf.quants.quantize(tensor, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["llama", target]:
            write_llama(Path(target))
        case ["ctranslate2", source, target]:
            write_ctranslate2(Path(source), Path(target))
        case ["gguf", source, target]:
            write_gguf(Path(source), Path(target))
