"""The libraries that run a model: ours, or CTranslate2."""

from triptych.engines.loading import EngineName, load, load_generator

__all__ = ["EngineName", "load", "load_generator"]
