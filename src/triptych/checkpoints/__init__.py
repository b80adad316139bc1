"""Others' checkpoints: configuration, weights and tokenizers, read into ours."""

from triptych.checkpoints.marian import MarianCheckpoint, model_type, read_marian
from triptych.checkpoints.marian_tokenizers import read_sentencepiece

__all__ = ["MarianCheckpoint", "model_type", "read_marian", "read_sentencepiece"]
