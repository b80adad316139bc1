"""A small trained run, and a small checkpoint."""

from small_models import checkpoint, small_run

__all__ = ["checkpoint", "small_run"]
