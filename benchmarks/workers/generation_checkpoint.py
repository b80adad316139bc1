"""A Llama of about 100 M random parameters as a checkpoint, and models as CTranslate2 has them.

`python -m benchmarks.workers.generation_checkpoint llama FOLDER` writes the one,
`… ctranslate2 CHECKPOINT FOLDER` the other.
"""

import sys
from pathlib import Path

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
    from triptych.checkpoints.models import load_language_model
    from triptych.converting.ctranslate2 import write_generator

    folder.mkdir(parents=True)
    write_generator(load_language_model(checkpoint).model, folder)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["llama", target]:
            write_llama(Path(target))
        case ["ctranslate2", source, target]:
            write_ctranslate2(Path(source), Path(target))
