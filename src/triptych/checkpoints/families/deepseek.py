"""DeepSeek's scale under YaRN."""

import math
from typing import final

from triptych.checkpoints.hook import Hook
from triptych.checkpoints.place import Place
from triptych.checkpoints.rope import yarn_magnitude
from triptych.storage.settings import Settings


@final
class DeepSeek(Hook):
    """Multiplies scores by the square of YaRN's magnitude, where `mscale_all_dim` says so."""

    def scale(self, place: Place, width: float) -> float:
        scaling = Settings(place.rope_scaling, f"{place.settings.where}, scaling of rope")
        if not scaling.value("mscale_all_dim") or scaling.value("rope_type | type") in (None, "default"):
            return 1 / math.sqrt(width)
        magnitude = yarn_magnitude(scaling.number("factor"), scaling.number("mscale_all_dim"))
        return magnitude**2 / math.sqrt(width)
