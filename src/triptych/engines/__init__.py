"""The libraries that run a model: ours, or CTranslate2."""

from triptych.engines.ctranslate2 import require_ctranslate2
from triptych.engines.loading import EngineName, make_generator, make_translator
from triptych.engines.scoring import evaluate_text

__all__ = ["EngineName", "evaluate_text", "make_generator", "make_translator", "require_ctranslate2"]
