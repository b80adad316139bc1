"""Changes of a model: new weights, edited activations, directions added to the residual stream.

A change is a record of its effect on the weights of layers, or on the modules of a running model. The
original model is never modified: a changed model has new modules, and shares all unchanged tensors.
"""

import itertools
from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triptych.core.algebra.weights import AttentionWeights, Link, Side
from triptych.core.attention import (
    LearnedPositions,
    MultiHeadAttention,
    NoPositions,
    SinusoidalPositions,
)
from triptych.core.models import (
    AttentionSite,
    EncoderDecoder,
    LanguageModel,
    attention_sites,
    blocks_of,
    sharing_copy,
)
from triptych.errors import UsageError
from triptych.literals import Activation

Map = Literal["W_Q", "W_K", "W_V", "W_O"]
SIDE_OF: dict[str, Side] = {"W_Q": "q", "W_K": "k", "W_V": "v", "W_O": "o"}
# Map the value of a head, `[batch, …]`, or of several heads, `[batch, heads, …]`, and the position of its
# first query to the new value.
Edit = Callable[[Tensor, int], Tensor]
Part = int | tuple[int, ...]  # one head, or several heads edited together
OfWeights = Callable[[AttentionWeights], AttentionWeights]


class Change(ABC):
    """One change of a model.

    Attributes:
        words: description for reprs and messages, such as "ablate(3.2)".
        layers: function from old to new weights, by layer number in model order. Layers with shared weights
            keep sharing them if they have the same function object.
        unsayable: reason why weights cannot express the change, so that it cannot be saved; "" if they can.
    """

    words: str
    layers: Mapping[int, OfWeights]
    unsayable: str = ""

    def of_weights(self, layer: int, weights: AttentionWeights) -> AttentionWeights:
        """Return the weights of a layer, by number in model order, after the change."""
        return self.layers[layer](weights) if layer in self.layers else weights

    def apply(
        self, model: LanguageModel | EncoderDecoder, sites: Sequence[AttentionSite]
    ) -> None:
        """Apply the change to a copy of a model, with its layers `sites` in model order.

        Layers of the checkpoint not run by the model come after these layers and are ignored.
        """
        # New modules replace changed layers; a tap of an earlier change is kept.
        for number, site in enumerate(sites):
            if number not in self.layers:
                continue
            new = MultiHeadAttention.from_weights(
                self.of_weights(number, site.layer.weights(site.kind)),
                site.layer.dropout,
                adopted=True,
            )
            new.tap = site.layer.tap
            new.train(site.layer.training)
            name = "cross_attention" if site.stack == "cross" else "self_attention"
            setattr(blocks_of(model, site.stack)[site.block], name, new)


@final
@dataclass(frozen=True, eq=False)
class WeightChange(Change):
    """New weights in some layers: functions from old to new weights, by layer number in model order."""

    words: str
    layers: Mapping[int, OfWeights]


@final
@dataclass(frozen=True, eq=False)
class ValueChange(Change):
    """Edits of an activation of heads while the model runs, by layer number in model order."""

    words: str
    what: Activation
    heads: Mapping[int, Mapping[Part, Edit]]
    layers: Mapping[int, OfWeights] = field(default_factory=dict, init=False)

    @property
    def unsayable(self) -> str:  # type: ignore[override]
        return (
            f"it changes {self.what} while the model runs, which weights cannot express"
        )

    def apply(
        self, model: LanguageModel | EncoderDecoder, sites: Sequence[AttentionSite]
    ) -> None:
        for number, site in enumerate(sites):
            if (edits := self.heads.get(number)) is None:
                continue
            layer = site.layer
            before = layer.tap.edits if isinstance(layer.tap, HeadTap) else ()
            layer.tap = HeadTap((*before, (self.what, edits)))


@final
class HeadTap:
    """The tap of a layer: edits of its heads, applied in the order of their changes."""

    def __init__(self, edits: Sequence[tuple[Activation, Mapping[Part, Edit]]]) -> None:
        self.edits = tuple(edits)
        self.first = (
            0  # position of the first query, for calls without it (cross-attention)
        )

    @property
    def patches(self) -> list["Patch"]:
        edits = itertools.chain.from_iterable(own.values() for _, own in self.edits)
        return [edit for edit in edits if isinstance(edit, Patch)]

    def require_lengths(self, queries: int | None, keys: int) -> None:
        """Check that patched values fit a text by its numbers of queries and keys.

        `queries` is None if a search adds the queries step by step.
        """
        for patch in self.patches:
            patch.require_lengths(queries, keys)

    def __call__(self, name: Activation, value: Tensor, first: int | None) -> Tensor:
        for what, by_head in self.edits:
            if what != name:
                continue
            value = value.clone()
            for heads, edit in by_head.items():
                at = list(heads) if isinstance(heads, tuple) else heads
                old = value[:, at].clone()
                new = edit(old, self.first if first is None else first)
                value[:, at] = _checked(name, old, new).to(value)
        return value


def _checked(name: Activation, old: Tensor, new: object) -> Tensor:
    """Check that the result of an edit is a tensor with the shape of the old value and a suitable dtype."""
    if not isinstance(new, Tensor):
        raise UsageError(
            f"the edit of {name} gave a {type(new).__name__}: return a tensor of shape {list(old.shape)}"
        )
    if new.shape != old.shape:
        raise UsageError(
            f"the edit of {name} gave shape {list(new.shape)} in the place of {list(old.shape)}"
        )
    if new.is_complex() or not (new.is_floating_point() or old.dtype == new.dtype):
        dtype = str(new.dtype).removeprefix("torch.")
        raise UsageError(
            f"the edit of {name} gave numbers of {dtype}: return floating-point numbers"
        )
    return new


@final
@dataclass(frozen=True, eq=False)
class Steering(Change):
    """A direction added to the residual stream."""

    words: str
    stack: str  # "encoder" or "decoder"
    block: int  # the direction is added before this block, or at the stack's end for the number of blocks
    vector: Float[Tensor, " d_model"]
    layers: Mapping[int, OfWeights] = field(default_factory=dict, init=False)

    @property
    def unsayable(self) -> str:  # type: ignore[override]
        return "" if self.block else "the embeddings have no bias to take a direction"

    def apply(
        self, model: LanguageModel | EncoderDecoder, sites: Sequence[AttentionSite]
    ) -> None:
        blocks = blocks_of(model, self.stack)
        if self.block < len(blocks):
            block = blocks[self.block]
            block.added_before = sum_of(block.added_before, self.vector)
        else:
            block = blocks[-1]
            block.added_after = sum_of(block.added_after, self.vector)

    def into_weights(self, model: LanguageModel | EncoderDecoder) -> None:
        """Add the direction to the bias right before it in the residual stream, in a copy of a model.

        Raises UsageError if the model lacks this bias.
        """
        block = blocks_of(model, self.stack)[self.block - 1]
        frame = block.feed_forward_residual
        # Post-norm blocks end with the norm's bias. Pre-norm blocks end with the feed-forward layer's bias,
        # unless a norm or a multiplier comes between this bias and the stream.
        target = (
            frame.norm if not frame.pre else getattr(block.feed_forward, "outer", None)
        )
        bias = getattr(target, "bias", None)
        if bias is None or (
            frame.pre and (frame.out_norm is not None or frame.scale != 1.0)
        ):
            raise UsageError(
                f"{self.words} cannot be saved: no bias comes right before it, so no weights "
                "of this model say it"
            )
        assert isinstance(target, nn.Module)
        target.bias = nn.Parameter(bias.detach() + self.vector.to(bias))


@final
@dataclass(frozen=True, eq=False)
class PositionsOff(Change):
    """Removal of positions from all layers and from the embeddings."""

    words: str
    layers: Mapping[
        int, OfWeights
    ]  # `without_positions`, by number of each layer with positions
    unsayable: str = "it leaves out positions, which weights cannot express"

    def apply(
        self, model: LanguageModel | EncoderDecoder, sites: Sequence[AttentionSite]
    ) -> None:
        super().apply(model, sites)
        for module in list(model.modules()):
            for name, part in module.named_children():
                if isinstance(part, LearnedPositions | SinusoidalPositions):
                    setattr(module, name, NoPositions())


def without_positions(weights: AttentionWeights) -> AttentionWeights:
    """Return the layer without rotary embedding and position bias."""
    return replace(
        weights, semantics=replace(weights.semantics, rotary=None, bias=None)
    )


def sum_of(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other


def changed_copy(
    model: LanguageModel | EncoderDecoder,
    changes: Sequence[Change],
    order: Callable[[LanguageModel | EncoderDecoder], Sequence[AttentionSite]],
) -> LanguageModel | EncoderDecoder:
    """Return a model with changes; its new modules share unchanged parameters with the old modules."""
    copied = sharing_copy(model)
    for change in changes:
        change.apply(copied, order(copied))
    return copied


def is_patched(model: LanguageModel | EncoderDecoder) -> bool:
    """Return True if a layer has patched values of another run, valid for texts of one length only."""
    taps = [site.layer.tap for site in attention_sites(model)]
    return any(isinstance(tap, HeadTap) and len(tap.patches) > 0 for tap in taps)


# Weights.


def ablation(
    words: str,
    heads: Mapping[int, Sequence[int] | Mapping[int, Float[Tensor, "tokens d_v"]]],
) -> WeightChange:
    """Switch heads off, by layer number; heads with values output their mean value at every position."""
    # Equal ablations are the same function object, so that layers with shared weights keep sharing them.
    same: dict[object, OfWeights] = {}
    found: dict[int, OfWeights] = {}
    for layer, own in heads.items():
        alike = id(own) if isinstance(own, Mapping) else tuple(own)
        found[layer] = same.setdefault(alike, partial(_without_heads, heads=own))
    return WeightChange(words, found)


def _without_heads(
    weights: AttentionWeights,
    heads: Sequence[int] | Mapping[int, Float[Tensor, "tokens d_v"]],
) -> AttentionWeights:
    """Set W_O of some heads to 0; their mean outputs, if given, are added to the output bias."""
    # Head h adds z_h W_O[h] to the output, so its mean contribution is mean(z_h) W_O[h].
    whole = weights.multiplied("o").repeat(weights.num_heads)
    W_O = whole.weight.detach().clone()
    o_bias = weights.o_bias
    if isinstance(heads, Mapping):
        means = [
            values.mean(dim=0).to(W_O) @ W_O[head] for head, values in heads.items()
        ]
        added = sum(means, torch.zeros_like(W_O[0, 0]))
        o_bias = added if o_bias is None else o_bias + added
    W_O[list(heads)] = 0.0
    return replace(weights, o=(Link(W_O),), o_bias=o_bias)


def with_map(
    weights: AttentionWeights, name: str, given: Tensor, head: int | None
) -> AttentionWeights:
    """Return the layer with another W_Q, W_K, W_V or W_O; the bias is kept."""
    side = SIDE_OF[name]
    whole = weights.multiplied(side)
    if head is not None:
        # Heads of a group share the map, so a single head of the group cannot be changed.
        if whole.copies < weights.num_heads:
            size = weights.num_heads // whole.copies
            first = head // size * size
            raise UsageError(
                f"heads {first} to {first + size - 1} share {name}: give the layer's, "
                f"[{whole.copies}, {whole.d_in}, {whole.d_out}]"
            )
        maps = whole.weight.detach().clone()
        _require_shape(name, given, maps[head])
        maps[head] = given.to(maps)
    else:
        maps = given.to(whole.weight)
        if maps.shape != whole.weight.shape:
            _require_shape(name, given, whole.repeat(weights.num_heads).weight)
    bias = whole.bias
    if bias is not None and bias.shape[0] != maps.shape[0]:
        bias = bias.repeat_interleave(maps.shape[0] // bias.shape[0], dim=0)
    chain = (Link(maps, bias, norm=whole.norm),)
    return replace(weights, **{side: chain})  # type: ignore[arg-type]


def tied_map(weights: AttentionWeights, name: str, to: str) -> AttentionWeights:
    """Return the layer with map `name` replaced by map `to`, including the bias."""
    # Both maps must have the same input and shape.
    side = SIDE_OF[name]
    other = SIDE_OF[to]
    if "o" in (side, other):
        raise UsageError(
            f"{name} and {to} cannot be tied: W_O reads what heads mixed, the others the input"
        )
    if weights.semantics.kind == "cross" and "q" in (side, other):
        raise UsageError(
            f"{name} and {to} cannot be tied: in cross-attention queries read the decoder's stream, keys and "
            "values the encoder's output"
        )
    one = weights.multiplied(side)
    two = weights.multiplied(other)
    if one.weight.shape != two.weight.shape:
        raise UsageError(
            f"{name} cannot be tied to {to}: it is [heads, d_in, d_out] = {list(one.weight.shape)}, and {to} "
            f"{list(two.weight.shape)}"
        )
    return replace(weights, **{side: weights.chain(other)})  # type: ignore[arg-type]


def _require_shape(name: str, given: Tensor, like: Tensor) -> None:
    if given.shape != like.shape:
        raise UsageError(
            f"{name} is {list(like.shape)} here, and {list(given.shape)} was given"
        )


# Values.


def resampled(values: Float[Tensor, "tokens d_v"]) -> Edit:
    """Build an edit: the outputs of a head on another text, by position, repeated past their end."""

    def edit(z: Tensor, first: int) -> Tensor:
        places = torch.arange(first, first + z.shape[1], device=values.device) % len(
            values
        )
        return values[places].expand_as(z)

    return edit


@final
class Patch:
    """An edit with the value of a head from another run on a text of the same length.

    Generated tokens after the run's last token keep their computed values.

    Attributes:
        what: name of the activation.
        num_rows: number of the run's queries, or of its keys if the value is `k` or `v`.
        num_keys: number of the run's keys for scores and weights; None for other activations.
    """

    def __init__(
        self,
        what: Activation,
        values: Tensor,
        positions: Sequence[int] | None,
        *,
        queries_grow: bool = False,
        keys_grow: bool = False,
    ) -> None:
        """Build the edit from the values of a run, at some positions or at all of them.

        `queries_grow` and `keys_grow` mark dimensions lengthened by a search; a call does not check their
        length.
        """
        self.what = what
        self._values = values
        self._keys_grow = keys_grow
        self._rows_grow = keys_grow if self.of_keys else queries_grow
        self.num_rows = length = len(values)
        self.num_keys = values.shape[1] if what in ("scores", "weights") else None
        if unknown := [
            place for place in positions or () if not -length <= place < length
        ]:
            raise UsageError(
                f"there is no position {unknown[0]}: the run has {length} tokens, 0 to {length - 1}"
            )
        # Negative positions count from the end.
        self._rows = (
            range(length)
            if positions is None
            else [place % length for place in positions]
        )

    @property
    def of_keys(self) -> bool:
        """Return True if the rows of the value are keys rather than queries."""
        return self.what in ("k", "v")

    def require_lengths(self, queries: int | None, keys: int) -> None:
        """Check that a text has as many tokens as the run; see `HeadTap.require_lengths`."""
        rows = keys if self.of_keys else queries
        if rows is not None:
            _require_length(self.what, self.num_rows, rows)
        if self.num_keys is not None:
            _require_length(self.what, self.num_keys, keys)

    def __call__(self, value: Tensor, first: int) -> Tensor:
        if self.num_keys is None and self._values.shape[1:] != value.shape[2:]:
            raise UsageError(
                f"{self.what} of the run are {self._values.shape[-1]} wide, and of the model "
                f"{value.shape[-1]}"
            )
        if first == 0 and not self._rows_grow:
            _require_length(self.what, self.num_rows, value.shape[1])
        if first == 0 and self.num_keys is not None and not self._keys_grow:
            _require_length(self.what, self.num_keys, value.shape[2])
        start = 0 if self.of_keys else first
        rows = [row for row in self._rows if start <= row < start + value.shape[1]]
        if not rows:
            return value
        new = self._values[rows].to(value)
        # In causal attention, later rows have more keys; earlier rows do not attend to these.
        value[:, torch.tensor(rows, device=value.device) - start] = (
            new if self.num_keys is None else new[:, : value.shape[2]]
        )
        return value


def _require_length(what: Activation, of_run: int, of_text: int) -> None:
    if of_run != of_text:
        raise UsageError(
            f"the run has {of_run} tokens and the text {of_text}: {what} are patched between texts of one "
            "length"
        )
