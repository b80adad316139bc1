"""Configuration, blocks, the models made of them, and their files."""

from triptych.models.configuration import (
    PRESETS,
    AttentionConfig,
    DecoderConfig,
    EncoderConfig,
    LanguageModelConfig,
    ModelConfig,
    PositionsConfig,
)
from triptych.models.encoder_decoder import AttentionMaps, EncoderDecoder
from triptych.models.language_model import LanguageModel, LanguageModelOutput
from triptych.models.sites import AttentionSite, attention_sites, attention_weights, with_attention
from triptych.models.storage import read_model, write_model

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "AttentionMaps",
    "AttentionSite",
    "DecoderConfig",
    "EncoderConfig",
    "EncoderDecoder",
    "LanguageModel",
    "LanguageModelConfig",
    "LanguageModelOutput",
    "ModelConfig",
    "PositionsConfig",
    "attention_sites",
    "attention_weights",
    "read_model",
    "with_attention",
    "write_model",
]
