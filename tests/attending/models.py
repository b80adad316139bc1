"""Small models with tokenizers, for what reads texts."""

from pathlib import Path
from typing import Any

import torch

from small_checkpoints import byte_tokenizer
from triptych.core.models import EncoderDecoder, LanguageModel, LanguageModelConfig, ModelConfig
from triptych.running.opening import Reader
from triptych.running.text import Tokenizer, load_tokenizer


def letters(folder: Path) -> Tokenizer:
    """A token for every byte, and one for the end."""
    byte_tokenizer(folder, "<end>", eos_token="<end>")
    return load_tokenizer(folder)


def language_model(folder: Path, kind: Any = "decoder", positions: Any = "rotary", **more: Any) -> Reader:
    """A model of two layers with random numbers, and its tokenizer."""
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 4, "d_ff": 16, "context": 40}
    config = LanguageModelConfig.model_validate(
        {**sizes, "positions": {"scheme": positions, "max_tokens": 40}, **more}
    )
    model = LanguageModel.of(config, kind, 257).eval()
    with torch.no_grad():
        model.embeddings.table.weight.mul_(20)  # so that heads differ in where they look
    return Reader("tiny", folder, model, letters(folder))


def translator_model() -> EncoderDecoder:
    """An encoder of two layers and a decoder of one, with random numbers."""
    torch.manual_seed(0)
    stacks = {"encoder": {"num_layers": 2}, "decoder": {"num_layers": 1}}
    config = ModelConfig.model_validate({"d_model": 16, "num_heads": 4, "d_ff": 16, **stacks})
    return EncoderDecoder.of(config, 257, 257, pad_id=256).eval()
