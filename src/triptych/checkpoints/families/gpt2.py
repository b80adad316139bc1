"""GPT-2's scale by layers (`scale_attn_by_inverse_layer_idx`)."""

import math
from typing import final

from triptych.checkpoints.hook import Hook
from triptych.checkpoints.place import Place


@final
class GPT2(Hook):
    """Divides the scores of layer n by n + 1."""

    fields = ("scale_attn_by_inverse_layer_idx",)

    def scale(self, place: Place, width: float) -> float:
        times = 1 / (place.layer + 1) if place.holds("scale_attn_by_inverse_layer_idx") else 1.0
        return times / math.sqrt(width)
