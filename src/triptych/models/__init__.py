"""Configuration, blocks, the encoder-decoder, and its files."""

from triptych.models.configuration import (
    PRESETS,
    AttentionConfig,
    DecoderConfig,
    EncoderConfig,
    ModelConfig,
)
from triptych.models.encoder_decoder import AttentionMaps, EncoderDecoder
from triptych.models.storage import read_model, write_model

__all__ = [
    "PRESETS",
    "AttentionConfig",
    "AttentionMaps",
    "DecoderConfig",
    "EncoderConfig",
    "EncoderDecoder",
    "ModelConfig",
    "read_model",
    "write_model",
]
