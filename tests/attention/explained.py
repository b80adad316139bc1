"""What `attention` would do with arguments, without doing it."""

import math
from typing import Any

from torch import Tensor

from triptych.core.algebra.semantics import Semantics
from triptych.core.attention.operation import Explanation, explain_inputs
from triptych.core.attention.routes import Inputs, Path


def explain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    need_weights: bool = False,
    path: Path = "auto",
    **of_scores: Any,
) -> Explanation:
    semantics = Semantics(1 / math.sqrt(q.shape[-1]) if scale is None else scale, **of_scores)
    return explain_inputs(Inputs(q, k, v, mask, bias, causal, semantics, dropout), need_weights, path)
