"""Layers and heads of a model: their matrices, forms and other parts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NoReturn, final, overload

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.centring import centred
from triptych.core.algebra.forms import BilinearForm, at_least_float32
from triptych.core.algebra.norm_folding import fold_norm
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.semantics import HeadSide
from triptych.core.algebra.weights import SIDES, AttentionWeights, Link, Norm, Side
from triptych.core.checkpoints.stored_layers import AttentionSource, Site
from triptych.core.places import head_of
from triptych.core.read_only import ReadOnlyTensor
from triptych.errors import UsageError
from triptych.printable import table_html


@final
@dataclass(frozen=True, eq=False)
class PairEnergies:
    """Energies of the rotary pairs of a head, as measures of their share of the attention scores.

    Attributes:
        frequencies: rotation per position in radians, `[pairs]`.
        energies: ‖W_Q's channel a‖² ‖W_K's channel b‖² for the two channels of each pair, `[pairs, 2, 2]`.
        mean: squared norm of each pair's form, averaged over all angles, `[pairs]`: half the sum of its
            energies.
    """

    frequencies: Float[Tensor, " pairs"]
    energies: Float[Tensor, "pairs 2 2"]

    @property
    def mean(self) -> Float[Tensor, " pairs"]:
        return self.energies.sum(dim=(-2, -1)) / 2

    def __repr__(self) -> str:
        return f"PairEnergies({len(self.frequencies)} rotary pairs, energies [{len(self.frequencies)}, 2, 2])"


@final
@dataclass(frozen=True, eq=False)
class RotaryForm:
    """W_QK of a head with rotary positions: a form for every distance, W_Q R(distance) W_Kᵀ.

    Attributes:
        left: W_Q, `[d_model, d_k]`.
        right: W_K, `[d_model, d_k]`.
        rotary: rotary embedding of queries and keys.
    """

    left: Float[Tensor, "d_model d_k"]
    right: Float[Tensor, "d_memory d_k"]
    rotary: RotaryEmbedding

    def at(self, distance: int) -> BilinearForm:
        """Return the form between a query and a key `distance` positions before the query.

        Args:
            distance: distance in tokens, negative for a key after the query.

        Raises:
            UsageError: the positions are rows and columns of patches of a picture.
        """
        if self.rotary.places is not None:
            raise UsageError(
                "qk.at: positions of patches have a row and a column, and no one distance: use W_Q and W_K"
            )
        rows = self.left if distance >= 0 else self.right
        positions = torch.full((rows.shape[0],), abs(distance), device=rows.device)
        turned = (
            self.rotary.at(rows[None, None], positions, abs(distance) + 1)[0, 0]
            * self.rotary.factor
        )
        return (
            BilinearForm(turned, self.right)
            if distance >= 0
            else BilinearForm(self.left, turned)
        )

    @property
    def pairs(self) -> PairEnergies:
        """Energies of the rotary pairs; unrotated channels are left out."""
        first_and_second = [torch.tensor(channels) for channels in self.rotary.pairs]
        q, k = (
            torch.stack(
                [
                    at_least_float32(rows).square().sum(dim=0)[of]
                    for of in first_and_second
                ],
                dim=-1,
            )
            for rows in (self.left, self.right)
        )
        energies = q[:, :, None] * k[:, None, :] * self.rotary.factor**4
        return PairEnergies(self.rotary.frequencies, energies)

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        raise UsageError(
            f"qk.{name}: rotary positions turn W_QK, which is another form at every distance: take "
            f"qk.at(distance).{name}, or qk.pairs"
        )

    def __repr__(self) -> str:
        shape = (
            f"{self.left.shape[0]} × {self.right.shape[0]}, width {self.left.shape[1]}"
        )
        return (
            f"RotaryForm({shape}: positions turn it: .at(distance) is the form at one, "
            ".pairs its energies)"
        )

    def _repr_html_(self) -> str:
        from triptych.core.head_pictures import rotary_in_notebook

        return rotary_in_notebook(self)


@final
class Head:
    """An attention head: `q = x W_Q + b_Q`, `k = y W_K + b_K`, `v = y W_V + b_V`, and W_O.

    Attributes:
        name: place in the model, `3.2` or `cross.3.2`.
        number: number of the head within its layer.
        layer: layer of the head.
    """

    def __init__(
        self, layer: "Layer", number: int, weights: AttentionWeights | None = None
    ) -> None:
        self.layer = layer
        self.number = number
        self.name = f"{layer.name}.{number}"
        self._own = weights

    @cached_property
    def weights(self) -> AttentionWeights:
        """The head as a layer with a single head, with the norm before the layer; tensors are views."""
        return (
            _one_head(self.layer.weights, self.number)
            if self._own is None
            else self._own
        )

    @cached_property
    def _outline(self) -> AttentionWeights:
        """The same as `weights` for shapes only: values may be missing."""
        return (
            _one_head(self.layer.outline, self.number)
            if self._own is None
            else self._own
        )

    @property
    def W_Q(self) -> Float[Tensor, "d_model d_k"]:
        """Map to the query, `[d_model, d_k]`."""
        return self._map("q").weight[0]

    @property
    def W_K(self) -> Float[Tensor, "d_memory d_k"]:
        """Map to the key, `[d_model, d_k]`, the same for all heads of a group."""
        return self._map("k").weight[0]

    @property
    def W_V(self) -> Float[Tensor, "d_memory d_v"]:
        """Map to the value, `[d_model, d_v]`, the same for all heads of a group."""
        return self._map("v").weight[0]

    @property
    def W_O(self) -> Float[Tensor, "d_v d_model"]:
        """Map from the weighted sum of values to the residual stream, `[d_v, d_model]`."""
        return self._map("o").weight[0]

    @property
    def b_Q(self) -> Float[Tensor, " d_k"] | None:
        """Bias of the query, `[d_k]`, or None; `b_K` and `b_V` are the biases of key and value.

        The output bias b_O belongs to the layer.
        """
        return self._bias("q")

    @property
    def b_K(self) -> Float[Tensor, " d_k"] | None:
        return self._bias("k")

    @property
    def b_V(self) -> Float[Tensor, " d_v"] | None:
        return self._bias("v")

    @property
    def d_k(self) -> int:
        """Width of queries and keys."""
        return self._outline.multiplied("q").d_out

    @property
    def d_v(self) -> int:
        """Width of values."""
        return self._outline.multiplied("v").d_out

    @property
    def qk(self) -> BilinearForm | RotaryForm:
        """W_QK = W_Q W_Kᵀ, the form of the attention scores, without biases and scale.

        With rotary positions there is a form for every distance (`RotaryForm`).

        Raises:
            UsageError: the scores are not a bilinear form, because of norms, clipping or additive scores.
        """
        if found := [why for why in self.between if why in _BREAKS_QK]:
            raise UsageError(
                f"head {self.name}: {found[0]} comes between the maps and the scores, so W_QK is not one "
                "form: use W_Q and W_K"
            )
        rotary = self._outline.semantics.rotary
        return (
            BilinearForm(self.W_Q, self.W_K)
            if rotary is None
            else RotaryForm(self.W_Q, self.W_K, rotary)
        )

    @property
    def ov(self) -> BilinearForm:
        """W_OV = W_V W_O, the map from an attended token to the head's output, without biases.

        Raises:
            UsageError: values are clipped or normalised, so the map is not one form.
        """
        if found := [why for why in self.between if why in _BREAKS_OV]:
            raise UsageError(
                f"head {self.name}: {found[0]} comes between W_V and W_O, so W_OV is not one form: "
                "use W_V and W_O"
            )
        return BilinearForm(self.W_V, self.W_O.mT)

    @property
    def W_QK(self) -> Float[Tensor, "d_model d_memory"]:
        """The matrix of `qk`, W_Q W_Kᵀ; for rotary heads, the matrix at distance 0 is returned.

        Raises:
            UsageError: the scores are not a bilinear form; see `qk`.
        """
        form = self.qk
        return (form.at(0) if isinstance(form, RotaryForm) else form).dense()

    @property
    def W_OV(self) -> Float[Tensor, "d_memory d_model"]:
        """The matrix of `ov`, W_V W_O.

        Raises:
            UsageError: values are clipped or normalised; see `ov`.
        """
        return self.ov.dense()

    @property
    def between(self) -> list[str]:
        """Parts of the computation besides the maps, in words, such as rotary positions or QK-norm."""
        found = self._outline.semantics.beyond(("scale", "kind", "dropout"))
        if self._has_norm_within("q") or self._has_norm_within("k"):
            found.append(_NORM_WITHIN_QK)
        if self._has_norm_within("v"):
            found.append(_NORM_WITHIN_V)
        return found

    def _has_norm_within(self, side: HeadSide) -> bool:
        return any(link.norm is not None for link in self._outline.chain(side))

    @property
    def group(self) -> tuple[int, ...]:
        """Heads of the layer with the same keys and values, including this head."""
        weights = self.layer.outline
        size = weights.num_heads // max(weights.num_key_heads, weights.num_value_heads)
        first = self.number // size * size
        return tuple(range(first, first + size))

    @property
    def borrows(self) -> str | None:
        """Name of the layer lending keys and values to a KV-sharing layer; None for other layers.

        W_K and W_V then belong to the lending layer and apply to its input. `group` has the heads of one
        layer with the same keys and values.
        """
        return self.layer.borrows

    @property
    def folded(self) -> "Head":
        """The head with gain and shift of the norm before it folded into its maps.

        The maps read the normalised input. Directions removed by a LayerNorm are removed from the maps.

        Raises:
            RewriteRefusedError: the norm cannot be folded (post-norm, sandwich), or is missing.
        """
        slots = replace(
            self.weights,
            other_norm_readers="",
            bias_slots=frozenset(("q", "k", "v", "o")),
        )
        folded = fold_norm(slots.to(torch.float64)).weights
        norm, memory_norm = (
            _without_gain(norm) for norm in (slots.norm, slots.memory_norm)
        )
        maps = centred(folded, norm, memory_norm, keys=self.borrows is None)
        read = replace(maps, o=folded.o)
        return Head(self.layer, self.number, read.to(slots.dtype))

    def _map(self, side: Side) -> Link:
        found = (
            None if self._own is not None else self.layer.read_map(side, self.number)
        )
        return (self.weights.multiplied(side) if found is None else found).mapped(
            ReadOnlyTensor.of
        )

    def _bias(self, side: Side) -> Tensor | None:
        bias = self._map(side).bias
        return None if bias is None else bias[0]

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            from triptych.guesses import about_attribute

            raise AttributeError(about_attribute("head", name))

    def __repr__(self) -> str:
        first = self.group[0]
        last = self.group[-1]
        group = (
            ""
            if first == last
            else f", keys and values shared with heads {first} to {last}"
        )
        between = f"\n  between: {', '.join(self.between)}" if self.between else ""
        shapes = self._shapes()
        dtype = _dtype(next(self._outline.tensors()))
        biases = [
            f"b_{side.upper()}"
            for side in _SIDES
            if self._outline.multiplied(side).bias is not None
        ]
        return (
            f"Head {self.name} of {self.layer.model}{group}{_borrowed(self.borrows)}\n"
            f"  {'  '.join(f'{name} {shape}' for name, shape in shapes)}"
            + (f"  with {', '.join(biases)}" if biases else "")
            + f" ({dtype}){between}"
        )

    def _repr_html_(self) -> str:
        from triptych.core.head_pictures import pictures_of_head

        rows = [*self._shapes(), ("between", ", ".join(self.between) or "nothing")]
        return table_html(f"Head {self.name}", rows) + pictures_of_head(self)

    def _shapes(self) -> list[tuple[str, str]]:
        maps = ((side, self._outline.multiplied(side).weight[0]) for side in SIDES)
        return [(f"W_{side.upper()}", str([*part.shape])) for side, part in maps]


_SIDES: tuple[Side, ...] = ("q", "k", "v")
_NORM_WITHIN_QK = "a norm within the map of queries or keys"
_NORM_WITHIN_V = "a norm within the map of values"
_BREAKS_QK = (
    "QK-norm",
    "clipped queries, keys and values",
    "scores that are no product of queries and keys",
    _NORM_WITHIN_QK,
)
_BREAKS_OV = ("clipped queries, keys and values", "a norm of values", _NORM_WITHIN_V)


@final
class Layer:
    """An attention layer; weights are read on first use.

    Attributes:
        name: place in the model, `3` or `cross.3`.
        kind: source of queries and keys: "self", "causal" or "cross".
        model: name of the model.
        num_heads: number of query heads.
        borrows: name of the layer lending keys and values to a KV-sharing layer; None for other layers.
        shares: name of the earlier layer with the same weights (ALBERT); None without sharing.
    """

    def __init__(
        self,
        name: str,
        source: AttentionSource,
        site: Site,
        borrows: str | None = None,
        shares: str | None = None,
    ) -> None:
        self.name, self.model, self.kind, self.borrows = (
            name,
            source.name,
            site.kind,
            borrows,
        )
        self.shares = shares
        self._source = source
        self._site = site

    @property
    def weights(self) -> AttentionWeights:
        """All maps as chains of factors, with the sharing of maps and the semantics of the layer."""
        self._require_same()
        return self._weights

    @cached_property
    def _weights(self) -> AttentionWeights:
        found = self._source.read(self._site).weights.mapped(ReadOnlyTensor.of)
        learned = {
            name: ReadOnlyTensor.of(part)
            for name, part in found.semantics.learned().items()
        }
        return replace(found, semantics=found.semantics.with_learned(learned))

    def _require_same(self) -> None:
        if self._source.source is not None:
            self._source.source.require_same()

    @cached_property
    def outline(self) -> AttentionWeights:
        """The same as `weights` for shapes only; tensors may be on the "meta" device."""
        return self.__dict__.get("_weights") or self._source.outline(self._site).weights

    def read_map(self, side: Side, head: int) -> Link | None:
        """Read the map of a single head; None if the whole layer has been read or has to be."""
        self._require_same()
        return (
            None
            if "_weights" in self.__dict__
            else self._source.read_map(self._site, side, head)
        )

    @property
    def num_heads(self) -> int:
        return self.outline.num_heads

    @property
    def num_kv_heads(self) -> int:
        """Number of key heads, or of value heads if there are more of them."""
        return max(self.outline.num_key_heads, self.outline.num_value_heads)

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.outline.d_model

    @property
    def heads(self) -> tuple[Head, ...]:
        """All heads."""
        return tuple(Head(self, number) for number in range(self.num_heads))

    @property
    def W_Q(self) -> Float[Tensor, "num_heads d_model d_k"]:
        """W_Q of every head, `[num_heads, d_model, d_k]`. In `W_K` and `W_V` shared maps are repeated."""
        return ReadOnlyTensor.of(self.weights.W_Q)

    @property
    def W_K(self) -> Float[Tensor, "num_heads d_memory d_k"]:
        return ReadOnlyTensor.of(self.weights.W_K)

    @property
    def W_V(self) -> Float[Tensor, "num_heads d_memory d_v"]:
        return ReadOnlyTensor.of(self.weights.W_V)

    @property
    def W_O(self) -> Float[Tensor, "num_heads d_v d_model"]:
        """W_O of every head, `[num_heads, d_v, d_model]`."""
        return ReadOnlyTensor.of(self.weights.W_O)

    @property
    def b_Q(self) -> Float[Tensor, "num_heads d_k"] | None:
        """Query bias of every head, `[num_heads, d_k]`, or None; `b_K` and `b_V` for keys and values."""
        return self._bias("q")

    @property
    def b_K(self) -> Float[Tensor, "num_heads d_k"] | None:
        return self._bias("k")

    @property
    def b_V(self) -> Float[Tensor, "num_heads d_v"] | None:
        return self._bias("v")

    @property
    def b_O(self) -> Float[Tensor, " d_model"] | None:
        """Bias of the output, `[d_model]`, added once, or None."""
        return self.weights.o_bias

    def _bias(self, side: Literal["q", "k", "v"]) -> Tensor | None:
        bias = self.weights.head_bias(side)
        return None if bias is None else ReadOnlyTensor.of(bias)

    @property
    def between(self) -> list[str]:
        """Parts of the computation besides the maps, in words (see `Head.between`)."""
        return self[0].between

    def __len__(self) -> int:
        return self.num_heads

    def __iter__(self) -> Iterator[Head]:
        return iter(self.heads)

    def __getitem__(self, number: int) -> Head:
        """Return a head by its number.

        Raises:
            UsageError: the layer does not have this head.
        """
        return Head(
            self, head_of(number, self.num_heads, f"layer {self.name} of {self.model}")
        )

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            from triptych.guesses import about_attribute

            raise AttributeError(about_attribute("layer", name))

    def __repr__(self) -> str:
        weights = self.outline
        groups = (
            f" ({self.num_kv_heads} of keys and values)"
            if self.num_kv_heads != self.num_heads
            else ""
        )
        between = f"\n  between: {', '.join(self.between)}" if self.between else ""
        d_k = weights.multiplied("q").d_out
        d_v = weights.multiplied("v").d_out
        return (
            f"Layer {self.name} of {self.model}: {self.kind} attention, {self.num_heads} heads{groups}, "
            f"d_model {self.d_model}, d_k {d_k}, d_v {d_v}, {weights.num_parameters:,} parameters "
            f"({_dtype(next(weights.tensors()))}){_borrowed(self.borrows)}{_shared(self.shares)}{between}"
        )

    def _repr_html_(self) -> str:
        rows = [
            (f"head {head.number}", "  ".join(shape for _, shape in head._shapes()))
            for head in self.heads
        ]
        return table_html(f"Layer {self.name}: W_Q, W_K, W_V, W_O", rows)


@final
class Layers(Sequence[Layer]):
    """A sequence of attention layers; `layers[3]` is the fourth layer, and a slice is a shorter sequence."""

    def __init__(self, layers: Sequence[Layer]) -> None:
        self._layers = tuple(layers)

    def __len__(self) -> int:
        return len(self._layers)

    @overload
    def __getitem__(self, number: int) -> Layer: ...

    @overload
    def __getitem__(self, number: slice) -> "Layers": ...

    def __getitem__(self, number: int | slice) -> "Layer | Layers":
        if isinstance(number, slice):
            return Layers(self._layers[number])
        return self._layers[number]

    def __repr__(self) -> str:
        names = [layer.name for layer in self._layers]
        return (
            f"Layers({len(names)}: {names[0]} to {names[-1]})"
            if len(names) > 1
            else f"Layers({names})"
        )


@final
class Stack:
    """The attention layers of one stack of a model: `model.encoder.layers`.

    Attributes:
        name: name of the stack: "encoder", "decoder" or "cross".
        model: name of the model.
        layers: layers in order.
    """

    def __init__(self, name: str, model: str, layers: Layers) -> None:
        self.name = name
        self.model = model
        self.layers = layers

    def __getitem__(self, place: int | tuple[int, int]) -> "Layer | Head":
        """Return a layer by its number, or a head by the numbers of layer and head."""
        if isinstance(place, tuple):
            return self.layers[place[0]][place[1]]
        return self.layers[place]

    def __len__(self) -> int:
        return len(self.layers)

    def __repr__(self) -> str:
        return f"{self.name} of {self.model}: {self.layers!r}"


def _one_head(weights: AttentionWeights, number: int) -> AttentionWeights:
    """Select one head of a layer; its tensors are views of the layer's."""
    alone = weights.select_copies(
        lambda copies: [number * copies // weights.num_heads], 1
    )
    return replace(alone, o_bias=None)


def _without_gain(norm: Norm | None) -> Norm | None:
    return (
        None
        if norm is None
        else replace(norm, weight=torch.ones_like(norm.weight), bias=None, offset=0.0)
    )


def _borrowed(lender: str | None) -> str:
    return "" if lender is None else f", keys and values of layer {lender}"


def _shared(layer: str | None) -> str:
    return "" if layer is None else f", weights of layer {layer}"


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
