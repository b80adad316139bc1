"""What every way to write a head has in common.

A `Parameterisation` is the choice (a small frozen record, fit for a recipe): it names the chains of maps to
queries, keys, values and output, and gives their sizes. `Projections` (`module`) holds the maps. The
layer asks its projections for queries, for what to cache of each token, for keys and values made of it, and
for the output: it never knows which parameterisation it holds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, final

from triptych.core.algebra.semantics import HeadGate
from triptych.core.algebra.weights import SIDES, AttentionWeights, Link, Side
from triptych.core.attention.projections.maps import FromHeads, HeadMap, ToHeads
from triptych.core.attention.projections.module import Projections
from triptych.core.attention.shapes import shapes_only

_READ_OFF = {"d_k": "q_proj", "d_v": "v_proj"}
Maps = dict[str, HeadMap]


@final
@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a layer, as the maps of a parameterisation read them.

    Attributes:
        of: the parameterisation, whose fields `d_k` and `d_v` give widths; a class without such a field has
            slices of the stream.
        d: width of input and output.
        h: number of query heads.
    """

    of: "Parameterisation"
    d: int
    h: int

    @property
    def d_k(self) -> int:
        """Width of queries and keys."""
        return self.width("d_k")

    @property
    def d_v(self) -> int:
        """Width of values."""
        return self.width("d_v")

    @property
    def slice_width(self) -> int:
        """The width of a head's slice of the stream."""
        if self.d % self.h:
            raise ValueError(
                f"num_heads {self.h} does not divide d_model {self.d}: {self.of.name} gives each head a "
                "slice of it"
            )
        return self.d // self.h

    def width(self, name: str) -> int:
        """A width that the parameterisation gives, or d_model shared out among the heads."""
        if not hasattr(self.of, name):
            return self.slice_width
        if (width := getattr(self.of, name)) is not None:
            return at_least_one(width, name)
        if self.d % self.h:
            raise ValueError(f"num_heads {self.h} does not divide d_model {self.d}: give {name} explicitly")
        return self.d // self.h

    def variance(self, width: int) -> float:
        """Variance of a channel of the queries as `ToHeads` draws them, for inputs of variance 1.

        Every parameterisation is initialised so that one score, and one value on the way out, vary as much
        as with maps of this variance, at the same size and for inputs drawn independently; but where no map
        is left to do so (scores of `Direct`, values of `IdentityOV`).
        """
        return self.d / (self.d + self.h * width)


@dataclass(frozen=True)
class Parameterisation:
    """A way to write the two forms, without sizes of a particular model.

    A subclass is a frozen dataclass: its fields are the options that a recipe may give.

    Attributes:
        name: as in a recipe; of a class in a file of one's own, `FILE.py:CLASS`.
        parameters_formula: parameters of a layer without biases, in `d`, `h`, `d_k`, `d_v` and
            the class's own sizes, as a Python expression; "" for none. `cache_formula` is
            the same for the numbers cached per token.
        q: names of the maps to queries; `k` and `v` are to keys and values, `o` from the heads to the output.
            A name that is in two chains is one map that they share. An empty chain takes the input itself.
        read_off: the maps that options are read off when weights are given: whether there is a bias, a width
            (`d_…`) or a number of copies (`num_…`); "scale" is the scale. If left out, `x_bias` is read
            off `x_proj`, `d_k` off `q_proj` and `d_v` off `v_proj`.
        no_rotary: why rotary positions make no sense with it; "" if they do. `no_qk_norm` is the same
            for QK-norm.
    """

    name: ClassVar[str] = ""
    parameters_formula: ClassVar[str] = ""
    cache_formula: ClassVar[str] = ""
    q: ClassVar[tuple[str, ...]] = ("q_proj",)
    k: ClassVar[tuple[str, ...]] = ("k_proj",)
    v: ClassVar[tuple[str, ...]] = ("v_proj",)
    o: ClassVar[tuple[str, ...]] = ("o_proj",)
    read_off: ClassVar[Mapping[str, str]] = {}
    no_rotary: ClassVar[str] = ""
    no_qk_norm: ClassVar[str] = ""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" not in vars(cls):
            cls.name = cls.__name__

    def maps(self, s: LayerSizes) -> Maps:
        """The maps of a layer by name, in the order in which they are drawn.

        These are the usual ones of the sides that have them: `q_proj`, `k_proj` and `v_proj`, each to a
        stream for every head, and `o_proj`; with a bias where the option `q_bias`, … says so.
        """
        named = {name for side in SIDES for name in self.chain(side)}
        found: dict[str, HeadMap] = {}
        for side in SIDES:
            name = f"{side}_proj"
            bias = bool(getattr(self, f"{side}_bias", False))
            if name not in named:
                continue
            if side == "o":
                found[name] = FromHeads(s.d_v, s.d, s.h, bias)
            else:
                found[name] = ToHeads(s.d, s.d_v if side == "v" else s.d_k, s.h, bias)
        return found

    def sizes(self, d_model: int, num_heads: int) -> tuple[int, Maps]:
        """The width whose root the scores are divided by, and the maps, at the sizes of a layer."""
        sizes = LayerSizes(self, d_model, at_least_one_head(num_heads))
        return sizes.d_k, self.maps(sizes)

    def build(self, d_model: int, num_heads: int) -> Projections:
        """Make the maps of a layer of this size, freshly initialised.

        Raises:
            ValueError: sizes that do not fit, with the numbers.
        """
        d_k, maps = self.sizes(d_model, num_heads)
        chains = {side: self.chain(side) for side in SIDES}
        return Projections(self.name, d_model, num_heads, d_k, maps, chains)

    def gate(self, d_model: int, num_heads: int) -> HeadGate | None:
        """The gate that its heads need; None if they need none."""
        return None

    def chain(self, side: Side) -> tuple[str, ...]:
        """The names of the maps of one side."""
        return {"q": self.q, "k": self.k, "v": self.v, "o": self.o}[side]

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "Parameterisation | None":
        """The options with which this parameterisation might hold a writing; None if it never could.

        Only widths and biases have to be read off: whether the structure really is the same is
        checked afterwards, on what `build` makes.
        """
        found: dict[str, list[Link]] = {}
        for side in SIDES:
            names = {"q": cls.q, "k": cls.k, "v": cls.v, "o": cls.o}[side]
            links = weights.chain(side)
            if len(names) != len(links):
                return None
            for name, link in zip(names, links, strict=True):
                found.setdefault(name, []).append(link)
        if any(link is not links[0] for name, links in found.items() if name != "o_proj" for link in links):
            return None
        options: dict[str, int | bool] = {}
        for option in (field.name for field in fields(cls)):
            usual = _READ_OFF.get(option, option.replace("_bias", "_proj"))
            maps = cls.read_off.get(option, usual)
            if maps == "scale":
                options[option] = max(1, round(weights.scale**-2))
            elif option == "o_bias":
                options[option] = weights.o_bias is not None
            elif option.endswith("_bias"):
                options[option] = any(found[name][0].bias is not None for name in maps.split())
            else:
                link = found[maps][0]
                options[option] = link.copies if option.startswith("num_") else link.d_out
        return cls(**options)

    def skeleton(self, d_model: int, num_heads: int) -> AttentionWeights:
        """The writing of a layer of this size, shapes without numbers (on the "meta" device).

        Raises:
            ValueError: sizes that do not fit.
        """
        with shapes_only():
            weights = self.build(d_model, num_heads).weights()
            gate = self.gate(d_model, num_heads)
            return replace(weights, semantics=replace(weights.semantics, gate=gate))


def at_least_one_head(num_heads: int) -> int:
    """The number of heads, if it can be one."""
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}: at least one head is needed")
    return num_heads


def at_least_one(value: int, name: str) -> int:
    """The value, if it can be a size."""
    if value < 1:
        raise ValueError(f"{name} is {value}: it must be at least 1")
    return value
