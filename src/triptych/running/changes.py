"""Changes of a model: other weights, values changed on the way, directions added to the residual stream.

A change is a record that says what it does to the weights of a layer, or to the modules of a model that runs.
It never touches what it was given: a changed model has modules of its own, and shares all other tensors.
"""

from abc import ABC
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor, nn

from triptych.core.algebra.weights import AttentionWeights, Link, Side
from triptych.core.attention import LearnedPositions, MultiHeadAttention, NoPositions, SinusoidalPositions
from triptych.core.models import EncoderDecoder, LanguageModel
from triptych.core.models.blocks import sharing_copy
from triptych.core.models.sites import AttentionSite, attention_sites, blocks_of
from triptych.errors import UsageError
from triptych.literals import Activation
from triptych.running.decoding import Continuation, GenerationOptions, TextGenerator

Map = Literal["W_Q", "W_K", "W_V", "W_O"]
SIDE_OF: dict[str, Side] = {"W_Q": "q", "W_K": "k", "W_V": "v", "W_O": "o"}
# From the value of one head, `[batch, …]`, or of some together, `[batch, heads, …]`, and the position of its
# first query to the value in its place.
Edit = Callable[[Tensor, int], Tensor]
Part = int | tuple[int, ...]  # a head, or some of a layer together
OfWeights = Callable[[AttentionWeights], AttentionWeights]


class Change(ABC):
    """One change of a model.

    Attributes:
        words: what it is, for reprs and messages: "ablate(3.2)".
        layers: what becomes of the weights of layers, by a layer's number in order. Layers that shared their
            weights before go on sharing them where it is the same function.
        unsayable: why weights cannot express it, so that it cannot be saved; "" if they can.
    """

    words: str
    layers: Mapping[int, OfWeights]
    unsayable: str = ""

    def of_weights(self, layer: int, weights: AttentionWeights) -> AttentionWeights:
        """The weights of a layer, by its number in order, after the change."""
        return self.layers[layer](weights) if layer in self.layers else weights

    def apply(self, model: LanguageModel | EncoderDecoder, sites: Sequence[AttentionSite]) -> None:
        """Change a copy of a model; layers after those in `sites` are read and not run."""
        for number, site in enumerate(sites):
            if number not in self.layers:
                continue
            new = MultiHeadAttention.from_weights(
                self.of_weights(number, site.layer.weights(site.kind)), site.layer.dropout
            )
            new.tap = site.layer.tap
            new.train(site.layer.training)
            name = "cross_attention" if site.stack == "cross" else "self_attention"
            setattr(blocks_of(model, site.stack)[site.block], name, new)


@final
@dataclass(frozen=True, eq=False)
class WeightChange(Change):
    """Other weights in some layers: by a layer's number in order, what becomes of its weights."""

    words: str
    layers: Mapping[int, OfWeights]


@final
@dataclass(frozen=True, eq=False)
class ValueChange(Change):
    """A value of heads changed while the model runs: by a layer's number in order, the edits of its heads."""

    words: str
    what: Activation
    heads: Mapping[int, Mapping[Part, Edit]]
    layers: Mapping[int, OfWeights] = field(default_factory=dict, init=False)

    @property
    def unsayable(self) -> str:  # type: ignore[override]
        return f"it changes {self.what} while the model runs, which weights cannot express"

    def apply(self, model: LanguageModel | EncoderDecoder, sites: Sequence[AttentionSite]) -> None:
        for number, site in enumerate(sites):
            if (edits := self.heads.get(number)) is None:
                continue
            layer = site.layer
            before = layer.tap.edits if isinstance(layer.tap, HeadTap) else ()
            layer.tap = HeadTap((*before, (self.what, edits)))


@final
class HeadTap:
    """The tap of a layer: edits of some of its heads, in the order in which they were made."""

    def __init__(self, edits: Sequence[tuple[Activation, Mapping[Part, Edit]]]) -> None:
        self.edits = tuple(edits)
        self.first = 0  # position of the first query, where the layer cannot tell (cross-attention)

    @property
    def _patches(self) -> list["Patch"]:
        return [edit for _, own in self.edits for edit in own.values() if isinstance(edit, Patch)]

    @property
    def has_patches(self) -> bool:
        """True if some of the edits take values of another run."""
        return bool(self._patches)

    def require_lengths(self, queries: int | None, keys: int) -> None:
        """Check that values of other runs fit a text of so many tokens that look and are looked at.

        None is for queries that a search adds one by one.
        """
        for patch in self._patches:
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
    """Check that the result of an edit can take the place of the value."""
    if not isinstance(new, Tensor):
        raise UsageError(
            f"the edit of {name} gave a {type(new).__name__}: return a tensor of shape {list(old.shape)}"
        )
    if new.shape != old.shape:
        raise UsageError(f"the edit of {name} gave shape {list(new.shape)} in the place of {list(old.shape)}")
    if new.is_complex() or not (new.is_floating_point() or old.dtype == new.dtype):
        dtype = str(new.dtype).removeprefix("torch.")
        raise UsageError(f"the edit of {name} gave numbers of {dtype}: return floating-point numbers")
    return new


@final
@dataclass(frozen=True, eq=False)
class Steering(Change):
    """A direction added to the residual stream."""

    words: str
    stack: str  # "encoder" or "decoder"
    block: int  # before which block; their number for the end of the stack
    vector: Float[Tensor, " d_model"]
    layers: Mapping[int, OfWeights] = field(default_factory=dict, init=False)

    @property
    def unsayable(self) -> str:  # type: ignore[override]
        return "" if self.block else "the embeddings have no bias to take a direction"

    def apply(self, model: LanguageModel | EncoderDecoder, sites: Sequence[AttentionSite]) -> None:
        blocks = blocks_of(model, self.stack)
        if self.block < len(blocks):
            block = blocks[self.block]
            block.added_before = sum_of(block.added_before, self.vector)
        else:
            block = blocks[-1]
            block.added_after = sum_of(block.added_after, self.vector)

    def into_weights(self, model: LanguageModel | EncoderDecoder) -> None:
        """Add the direction to the last bias before it in the stream, in a copy of a model."""
        block = blocks_of(model, self.stack)[self.block - 1]
        frame = block.feed_forward_residual
        target = frame.norm if not frame.pre else getattr(block.feed_forward, "outer", None)
        bias = getattr(target, "bias", None)
        if bias is None or (frame.pre and (frame.out_norm is not None or frame.scale != 1.0)):
            raise UsageError(
                f"{self.words} cannot be saved: no bias comes right before it, so no weights "
                "of this model say it"
            )
        assert isinstance(target, nn.Module)
        target.bias = nn.Parameter(bias.detach() + self.vector.to(bias))


@final
@dataclass(frozen=True, eq=False)
class PositionsOff(Change):
    """No layer knows positions, and none are added to the embeddings."""

    words: str
    layers: Mapping[int, OfWeights]  # of the layers that know positions themselves: `without_positions`
    unsayable: str = "it leaves out positions, which weights cannot express"

    def apply(self, model: LanguageModel | EncoderDecoder, sites: Sequence[AttentionSite]) -> None:
        super().apply(model, sites)
        for module in list(model.modules()):
            for name, part in module.named_children():
                if isinstance(part, LearnedPositions | SinusoidalPositions):
                    setattr(module, name, NoPositions())


def without_positions(weights: AttentionWeights) -> AttentionWeights:
    """Return the layer without positions of its own."""
    return replace(weights, semantics=replace(weights.semantics, rotary=None, bias=None))


def sum_of(one: Tensor | None, other: Tensor) -> Tensor:
    return other if one is None else one + other


def changed_copy(
    model: LanguageModel | EncoderDecoder,
    changes: Sequence[Change],
    order: Callable[[LanguageModel | EncoderDecoder], Sequence[AttentionSite]],
) -> LanguageModel | EncoderDecoder:
    """A model with changes: new modules, which share the parameters of the old ones."""
    copied = sharing_copy(model)
    for change in changes:
        change.apply(copied, order(copied))
    return copied


def is_patched(model: LanguageModel | EncoderDecoder) -> bool:
    """Return True if some layer takes values of another run, which fit texts of one length only."""
    taps = [site.layer.tap for site in attention_sites(model)]
    return any(isinstance(tap, HeadTap) and tap.has_patches for tap in taps)


def continue_changed(
    ids: Sequence[list[int]], by: TextGenerator, options: GenerationOptions, changes: Sequence[Change]
) -> list[list[Continuation]]:
    """Continuations of texts. If values are changed by position, only texts of one length run together."""
    if not any(isinstance(change, ValueChange) for change in changes):
        return by.continue_tokens(ids, options)
    found: dict[int, list[Continuation]] = {}
    for length in sorted({len(own) for own in ids}):
        places = [place for place, own in enumerate(ids) if len(own) == length]
        found |= dict(zip(places, by.continue_tokens([ids[i] for i in places], options), strict=True))
    return [found[place] for place in range(len(ids))]


# Weights.


def ablation(
    words: str, heads: Mapping[int, Sequence[int] | Mapping[int, Float[Tensor, "tokens d_v"]]]
) -> WeightChange:
    """Heads off, by the number of their layer; with values, each gives the mean of its own everywhere."""
    same: dict[object, OfWeights] = {}
    found: dict[int, OfWeights] = {}
    for layer, own in heads.items():
        alike = id(own) if isinstance(own, Mapping) else tuple(own)
        found[layer] = same.setdefault(alike, partial(_without_heads, heads=own))
    return WeightChange(words, found)


def _without_heads(
    weights: AttentionWeights, heads: Sequence[int] | Mapping[int, Float[Tensor, "tokens d_v"]]
) -> AttentionWeights:
    """The layer without what some heads add to its output; the mean of what they added becomes a bias."""
    whole = weights.multiplied("o").repeat(weights.num_heads)
    W_O = whole.weight.detach().clone()
    o_bias = weights.o_bias
    if isinstance(heads, Mapping):
        means = [values.mean(dim=0).to(W_O) @ W_O[head] for head, values in heads.items()]
        added = sum(means, torch.zeros_like(W_O[0, 0]))
        o_bias = added if o_bias is None else o_bias + added
    W_O[list(heads)] = 0.0
    return replace(weights, o=(Link(W_O),), o_bias=o_bias)


def with_map(weights: AttentionWeights, name: str, given: Tensor, head: int | None) -> AttentionWeights:
    """The layer with another W_Q, W_K, W_V or W_O; its bias stays."""
    side = SIDE_OF[name]
    whole = weights.multiplied(side)
    if head is not None:
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
    """The layer with one of its maps in the place of another, bias and all."""
    side = SIDE_OF[name]
    other = SIDE_OF[to]
    if "o" in (side, other):
        raise UsageError(f"{name} and {to} cannot be tied: W_O reads what heads mixed, the others the input")
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
        raise UsageError(f"{name} is {list(like.shape)} here, and {list(given.shape)} was given")


# Values.


def resampled(values: Float[Tensor, "tokens d_v"]) -> Edit:
    """What a head gave on another text, position by position; from its start again past its end."""

    def edit(z: Tensor, first: int) -> Tensor:
        places = torch.arange(first, first + z.shape[1], device=values.device) % len(values)
        return values[places].expand_as(z)

    return edit


@final
class Patch:
    """The value of a head from another run, in the place of what it computes on a text of the same length.

    A text that is generated may grow from there: what comes after the run's last token stays as it is.

    Attributes:
        what: which value.
        num_rows: how many tokens of the run have it: queries, or of keys and values those looked at.
        num_keys: how many tokens the run's queries look at; None of a value without a dimension of them.
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
        """Take values at some positions of a run, or at all.

        What grows has no length of its own: a search lengthens a translation from nothing.
        """
        self.what = what
        self._values = values
        self._keys_grow = keys_grow
        self._rows_grow = keys_grow if self.of_keys else queries_grow
        self.num_rows = length = len(values)
        self.num_keys = values.shape[1] if what in ("scores", "weights") else None
        if unknown := [place for place in positions or () if not -length <= place < length]:
            raise UsageError(
                f"there is no position {unknown[0]}: the run has {length} tokens, 0 to {length - 1}"
            )
        self._rows = range(length) if positions is None else [place % length for place in positions]

    @property
    def of_keys(self) -> bool:
        """True if its rows are the tokens that are looked at."""
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
        # A later row of causal attention has more keys, of which earlier rows see none.
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
