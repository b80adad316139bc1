"""Rotations for the tests of rotary rewrites."""

from typing import Any

import torch
from torch import Tensor

from heads import gathered, with_semantics
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.weights import AttentionWeights
from triptych.rewriting.functions.moments import Moments


def rotation_of(pairing: Any = "halves", start: int = 0, factor: float = 1.0) -> RotaryEmbedding:
    return RotaryEmbedding(torch.tensor([1.0, 0.31, 0.002], dtype=torch.float64), pairing, start, factor)


def moments_of(weights: AttentionWeights, *texts: Tensor) -> Moments:
    return gathered(with_semantics(weights, rotary=rotation_of()), *texts)
