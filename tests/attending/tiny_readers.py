"""Readers of tiny models in float64, with a byte-level tokenizer of their own."""

from functools import cache
from pathlib import Path
from typing import Any

import torch

from triptych.core.models import (
    AttentionConfig,
    DecoderConfig,
    EncoderConfig,
    EncoderDecoder,
    LanguageModel,
    LanguageModelConfig,
    ModelConfig,
    PositionsConfig,
)
from triptych.running.opening import Reader
from triptych.running.opening.run_folder import DecodingConfig
from triptych.running.text import TokenizerPair
from triptych.training.corpora.tokenizer_training import TokenizerSpec, train_tokenizers

BIASED = AttentionConfig.model_validate(dict.fromkeys(("q_bias", "k_bias", "v_bias", "o_bias"), True))
TEXTS = ["the cat sat on the mat", "a dog ran", "where is the cat now, and where is the dog?"]


@cache
def tokenizers() -> TokenizerPair:
    return train_tokenizers(TokenizerSpec(vocab_size=280), TEXTS, TEXTS)


def language_reader(scheme: Any = "learned", kind: Any = "decoder", **options: Any) -> Reader:
    torch.manual_seed(0)
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 4, "d_ff": 16, "context": 32}
    positions = PositionsConfig(scheme=scheme, max_tokens=64)
    config = LanguageModelConfig(**{**sizes, "attention": BIASED, **options}, positions=positions)
    model = LanguageModel.of(config, kind, tokenizers().source.vocab_size).double().eval()
    _stir(model)
    return Reader("tiny", Path("tiny"), model, tokenizers().source)


def pair_reader() -> Reader:
    torch.manual_seed(0)
    config = ModelConfig(
        d_model=16,
        num_heads=4,
        d_ff=16,
        encoder=EncoderConfig(num_layers=2, attention=BIASED),
        decoder=DecoderConfig(num_layers=2, attention=BIASED, cross_attention=BIASED),
    )
    both = tokenizers()
    model = EncoderDecoder.of(config, both.source.vocab_size, both.target.vocab_size, both.source.pad_id)
    _stir(model.double().eval())
    return Reader("tiny", Path("tiny"), model, both, decoding=DecodingConfig())


def _stir(model: torch.nn.Module) -> None:
    """Biases that do something, and heads that look somewhere."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.3)
            elif "q_proj" in name or "k_proj" in name:
                parameter.mul_(3)
            elif "table" in name:
                parameter.mul_(30)
