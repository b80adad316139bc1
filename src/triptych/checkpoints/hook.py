"""What of a family no file can say as data: code of its own, which its file names with `hook`."""

from abc import ABC, abstractmethod

from triptych.algebra.positions import ScoreBias
from triptych.algebra.weights import Link
from triptych.checkpoints.place import Place
from triptych.checkpoints.tensor_maps import Take
from triptych.storage.tensors import Tensors


class Hook(ABC):
    """Code of one family, in `families/NAME.py`."""

    fields: tuple[str, ...] = ()  # of the configuration, those that it reads

    @abstractmethod
    def scale(self, place: Place, width: float) -> float:
        """What scores are multiplied by, in place of 1/√width."""

    def bias(
        self, place: Place, tensors: Tensors, take: Take, q: Link, k: Link, scale: float
    ) -> ScoreBias | None:
        """What positions add to the scores, from the maps of queries and keys."""
        return None
