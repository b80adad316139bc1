"""A small study, and a process that stands in for training."""

from studying import place, stand_in

__all__ = ["place", "stand_in"]
