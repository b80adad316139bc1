"""The base class of parameterisations.

A `Parameterisation` is a small frozen record, as in a recipe: it names the chains of maps to queries, keys,
values and output, and gives their sizes. `Projections` (`module.py`) stores the maps. A layer calls its
projections for queries, for cached tensors, for keys and values from cached tensors, and for the output,
without knowledge of the parameterisation.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import ClassVar, final

from triptych.core.algebra.semantics import HeadGate
from triptych.core.algebra.weights import SIDES, AttentionWeights, Link, Side
from triptych.core.attention.projections.maps import FromHeads, HeadMap, ToHeads
from triptych.core.attention.projections.module import Projections
from triptych.core.attention.shapes import shapes_only

# Defaults of `Parameterisation.read_off`.
_READ_OFF = {"d_k": "q_proj", "d_v": "v_proj"}
Maps = dict[str, HeadMap]


@final
@dataclass(frozen=True)
class LayerSizes:
    """The sizes of a layer, from which a parameterisation sizes its maps.

    Attributes:
        of: parameterisation with fields `d_k` and `d_v` for the widths. A class that lacks such a field uses
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
        """Width of a head's slice of the stream."""
        if self.d % self.h:
            raise ValueError(
                f"num_heads {self.h} does not divide d_model {self.d}: {self.of.name} gives each head a "
                "slice of it"
            )
        return self.d // self.h

    def width(self, name: str) -> int:
        """Return the parameterisation's field of this name; d_model / num_heads if it is None or missing."""
        if not hasattr(self.of, name):
            return self.slice_width
        if (width := getattr(self.of, name)) is not None:
            return at_least_one(width, name)
        if self.d % self.h:
            raise ValueError(
                f"num_heads {self.h} does not divide d_model {self.d}: give {name} explicitly"
            )
        return self.d // self.h

    def variance(self, width: int) -> float:
        """Return the variance of a query channel of `ToHeads` by default, for inputs of variance 1.

        Every parameterisation is initialised so that scores and outputs have the same variance as with maps
        of this variance, at the same sizes and for independent inputs. The scores of `Direct` and the values
        of `IdentityOV` are exceptions: a map to scale is missing.
        """
        return self.d / (self.d + self.h * width)


@dataclass(frozen=True)
class Parameterisation:
    """A parameterisation of the two forms, without the sizes of a particular model.

    A subclass is a frozen dataclass; its fields are the options in recipes.

    Attributes:
        name: name in recipes; `FILE.py:CLASS` for a class in a user's file.
        parameters_formula: number of parameters of a layer without biases, as a Python expression in `d`,
            `h`, `d_k`, `d_v` and further sizes of the class; "" without a formula. `cache_formula`
            is the same for the number of cached values per token.
        q: names of the maps to queries; `k` and `v` are the maps to keys and values, `o` the maps from the
            heads to the output. A name in two chains is one shared map. An empty chain is the input itself.
        read_off: names of the maps from which `fitting` reads an option, separated by spaces: a bias
            (`…_bias`), a width (`d_…`) or a count of heads (`num_…`). The name "scale" is the scale of the
            scores. By default `x_bias` is read from `x_proj`, `d_k` from `q_proj` and `d_v` from `v_proj`.
        no_rotary: reason against rotary positions; "" if rotary positions are supported. `no_qk_norm` is the
            same for QK-norm.
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
        """Return the maps of a layer by name, in the order of their initial draws.

        By default these are the maps of the chains among `q_proj`, `k_proj` and `v_proj`, each `ToHeads` with
        all heads, and `o_proj`, with biases by the options `q_bias`, ….
        """
        named = {*itertools.chain.from_iterable(self.chain(side) for side in SIDES)}
        # Only names in the chains: a subclass adds the other maps of its chains.
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
        """Return the width for the scale (scores are divided by its root), and the maps of a layer."""
        sizes = LayerSizes(self, d_model, at_least_one_head(num_heads))
        return sizes.d_k, self.maps(sizes)

    def build(self, d_model: int, num_heads: int) -> Projections:
        """Build the freshly initialised maps of a layer of this size.

        Raises:
            ValueError: sizes do not fit; the message names them.
        """
        d_k, maps = self.sizes(d_model, num_heads)
        chains = {side: self.chain(side) for side in SIDES}
        return Projections(self.name, d_model, num_heads, d_k, maps, chains)

    def gate(self, d_model: int, num_heads: int) -> HeadGate | None:
        """Return the gate that the parameterisation requires; None without a gate."""
        return None

    def chain(self, side: Side) -> tuple[str, ...]:
        """Return the names of the maps of a chain."""
        return {"q": self.q, "k": self.k, "v": self.v, "o": self.o}[side]

    @classmethod
    def fitting(cls, weights: AttentionWeights) -> "Parameterisation | None":
        """Return the candidate parameterisation for given weights; None if no options can fit.

        Only widths, head counts, biases and the scale are read from the weights. The caller compares the
        structure afterwards, on the result of `skeleton`.
        """
        found: dict[str, list[Link]] = {}
        for side in SIDES:
            names = {"q": cls.q, "k": cls.k, "v": cls.v, "o": cls.o}[side]
            links = weights.chain(side)
            if len(names) != len(links):
                return None
            for name, link in zip(names, links, strict=True):
                found.setdefault(name, []).append(link)
        # A name stands for one map: the links of a shared name must be one object.
        for name, same in found.items():
            if name != "o_proj" and any(link is not same[0] for link in same):
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
                options[option] = any(
                    found[name][0].bias is not None for name in maps.split()
                )
            else:
                link = found[maps][0]
                options[option] = (
                    link.copies if option.startswith("num_") else link.d_out
                )
        return cls(**options)

    def skeleton(self, d_model: int, num_heads: int) -> AttentionWeights:
        """Return the weights of a layer of this size as shapes without values (on the "meta" device).

        Raises:
            ValueError: sizes do not fit.
        """
        with shapes_only():
            weights = self.build(d_model, num_heads).weights()
            gate = self.gate(d_model, num_heads)
            return replace(weights, semantics=replace(weights.semantics, gate=gate))


def at_least_one_head(num_heads: int) -> int:
    """Check that the number of heads is at least 1, and return it."""
    if num_heads < 1:
        raise ValueError(f"num_heads is {num_heads}: at least one head is needed")
    return num_heads


def at_least_one(value: int, name: str) -> int:
    """Check that a size is at least 1, and return it."""
    if value < 1:
        raise ValueError(f"{name} is {value}: it must be at least 1")
    return value
