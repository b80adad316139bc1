"""The libraries that run a model: ours, or CTranslate2."""

from triptych.engines.loading import EngineName, load

__all__ = ["EngineName", "load"]
