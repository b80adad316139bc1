"""Which of a model's tensors come from which stored ones, as the parts of the model are found."""

from typing import Never, final

import torch

from triptych.checkpoints.layer_map import norm_tensors
from triptych.checkpoints.place import Place
from triptych.checkpoints.reading import require_shape
from triptych.checkpoints.specs import NormSpec
from triptych.checkpoints.tensor_maps import Named, Shape
from triptych.errors import DataError
from triptych.models.architecture import NormConfig
from triptych.storage.tensors import Tensors

Entry = tuple[tuple[str, ...], Named]


@final
class Entries:
    """The tensors of a model, as far as its parts have entered theirs.

    Attributes:
        found: names of ours, and what is stored for them.
        copies: stored tensors that hold the numbers of another one, and that one.
    """

    def __init__(self, name: str, tensors: Tensors) -> None:
        self.name, self.tensors = name, tensors
        self.found: list[Entry] = []
        self.copies: dict[str, str] = {}

    def enter(self, ours: str, name: str, shape: Shape) -> None:
        """Enter a tensor that is stored as it is; errors as of `add`."""
        self.add((ours,), Named((name,), shape))

    def add(self, ours: tuple[str, ...], stored: Named) -> None:
        """Enter tensors."""
        for name in stored.names:
            if name not in self.tensors.infos:
                raise DataError(f"{self.tensors.name}: there is no tensor {name}")
            if stored.shape is not None:
                of = f"{self.tensors.where(name)}, tensor {name}"
                require_shape(of, [*self.tensors.infos[name].shape], [*stored.shape])
        self.found.append((ours, stored))

    def norm(self, ours: str, place: Place, norm: NormSpec, module: str, width: int, eps: str) -> NormConfig:
        """Enter a norm; a LayerNorm has a bias where the file has one, and 0 for it elsewhere, as there."""
        weight, bias = norm_tensors(self.tensors, module)
        has_bias = norm.kind == "layer" and bias in self.tensors.infos
        if norm.weight:
            self.enter(f"{ours}.weight", weight, (width,))
        if has_bias:
            self.enter(f"{ours}.bias", bias, (width,))
        return NormConfig(norm.kind, place.number(norm.eps or eps), norm.weight, has_bias, norm.offset)

    def require_copy(self, name: str, original: str, why: str) -> None:
        """A tensor that the file may have once more, if it holds the same numbers."""
        if name not in self.tensors.infos or name == original:
            return
        if not torch.equal(self.tensors.read(name), self.tensors.read(original)):
            self.refuse(f"{name} is not {original}{why}")
        self.copies[name] = original

    def refuse(self, why: str) -> Never:
        """Say that the checkpoint cannot be run."""
        raise DataError(f"{self.name}: {why}")


def above(prefix: str, name: str, tensors: Tensors) -> str:
    """A module or tensor above the names that attention layers share, as far as some of the prefix is."""
    outer = prefix.split(".")[:-1]
    names = ["".join(f"{part}." for part in outer[:count]) + name for count in range(len(outer), -1, -1)]
    infos = tensors.infos
    return next((found for found in names if found in infos or f"{found}.weight" in infos), names[-1])
