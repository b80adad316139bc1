"""The libraries that run a model: ours, or CTranslate2."""

from triptych.engines.loading import EngineName, load, load_generator
from triptych.engines.scoring import evaluate_text

__all__ = ["EngineName", "evaluate_text", "load", "load_generator"]
