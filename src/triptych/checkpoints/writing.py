"""Rewritten attention as the tensors of its checkpoint, in that checkpoint's own format.

A layer is brought to sizes that the format can hold, written through its `LayerMap`, and cast once to the
dtype in which each tensor is stored. What a format cannot hold is refused.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, final

import torch
from torch import Tensor

from triptych.algebra.forms import are_finite
from triptych.algebra.positions import DisentangledBias
from triptych.algebra.rewrites.legality import require_nothing_between
from triptych.algebra.rewrites.norm_folding import fold_norm
from triptych.algebra.rewrites.record import RewriteRefusedError
from triptych.algebra.semantics import HeadNorm
from triptych.algebra.weights import SIDES, AttentionWeights, Link
from triptych.checkpoints.checkpoint import Checkpoint
from triptych.checkpoints.layer import AttentionLayer
from triptych.checkpoints.layer_map import LayerMap, layer_map
from triptych.checkpoints.place import Sizes
from triptych.checkpoints.resizing import resizing, sizes_of

_NAME = "write"
_INPUTS: tuple[Literal["q", "k", "v"], ...] = ("q", "k", "v")
# How far numbers that only took up a norm's gain may lie apart, relative to the largest.
_ROUNDING = 1e-9


@final
@dataclass(frozen=True, eq=False)
class WrittenLayer:
    """What a layer changes in its checkpoint.

    Attributes:
        tensors: by name, those whose numbers change, in the dtype they are stored in and shaped as the
            format has them.
        settings: entries that `config.json` must have from now on, by dotted path. All layers that share
            a configuration must agree on them (`resizing` says which those are).
        shapes: the layer as the format has it, with what is filled up (on the "meta" device), for its costs.
    """

    tensors: dict[str, Tensor]
    settings: dict[str, Any]
    shapes: AttentionWeights


def write_layer(
    checkpoint: Checkpoint,
    before: AttentionLayer,
    after: AttentionWeights,
    *,
    kept: Sequence[int] | None = None,
    same_sizes: bool = False,
) -> WrittenLayer:
    """A rewritten layer as tensors of the checkpoint it was read from.

    Formats have fixed slots. A bias that is gone is written as zeros, a norm that was folded as gain 1 and
    shift 0. Other numbers and widths of heads are written as such where the configuration can say them
    (`resizing`); else narrower heads are padded with zeros, heads that are gone become zero maps in their
    old places, and fewer key-value heads are repeated.

    Args:
        checkpoint: where the layer lies.
        before: what `checkpoint.read` gave.
        after: the rewritten weights, in any floating dtype.
        kept: head i of `after` is head `kept[i]` of `before`; each in its place if None. Needed for
            heads that were left out or put in another order: what lies outside the maps (sinks) follows.
        same_sizes: leave the sizes of the format as they are, even where it could have others.

    Returns:
        The tensors whose stored numbers change; none at all for weights that were not rewritten.

    Raises:
        RewriteRefusedError: the format cannot hold it; the message says what, and what would fit.
    """
    try:
        return _LayerWriter(checkpoint, before, after, kept, same_sizes).write()
    except RewriteRefusedError as error:
        raise error.at(before.site.name) from None


@final
class _LayerWriter:
    def __init__(
        self,
        checkpoint: Checkpoint,
        before: AttentionLayer,
        after: AttentionWeights,
        kept: Sequence[int] | None,
        same_sizes: bool,
    ) -> None:
        self.checkpoint, self.tensors = checkpoint, checkpoint.tensors
        self.layer, self.before, self.after = before, before.weights, after
        self.place = checkpoint.place(before.site)
        self.spec, self.semantics = self.place.spec, before.weights.semantics
        self.same_sizes = same_sizes
        self.kept = list(range(after.num_heads)) if kept is None else list(kept)
        self._require_kept(kept is not None)

    def write(self) -> WrittenLayer:
        in_place = self.kept == list(range(self.before.num_heads))
        if in_place and _are_the_same(self.before, self.after):
            return WrittenLayer({}, {}, self.before.mapped(_to_meta))
        if self.spec.why_kept:
            _refuse(self.spec.why_kept, "leave this layer out")
        old = sizes_of(self.before)
        whole = self._one_map_a_side()
        self._require_channels_of_old(whole)
        fitted = self._in_widths(self._in_groups(self._in_heads(whole, old), old), old)
        new = sizes_of(fitted)
        scale = self._scale_of_format(old, new)
        if not math.isclose(scale, fitted.scale, rel_tol=1e-12):
            fitted = fitted.to(torch.float64).with_scale(scale)
        found = resizing(self.checkpoint, self.layer.site, new) if new != old else None
        stored = layer_map(self.place, self.tensors, new)
        ours = (
            self._maps(fitted, stored) | self._norm() | self._sinks(new) | dict(self._gains(old, new, stored))
        )
        changed = ((name, self._changed(name, full)) for name, full in stored.write(ours))
        tensors = {name: tensor for name, tensor in changed if tensor is not None}
        shapes = _with_biases_of(self.before, fitted.mapped(_to_meta))
        return WrittenLayer(tensors, found.settings if found else {}, shapes)

    # Heads, groups and widths that the file can have.

    def _require_kept(self, given: bool) -> None:
        heads, left = self.before.num_heads, self.after.num_heads
        if left > heads:
            _refuse(f"there are {left} heads now, and the file has {heads}")
        if left < heads and not given:
            _refuse(f"{left} of {heads} heads are left, and `kept` does not say which")
        if len(self.kept) != left or len(set(self.kept)) != left or not set(self.kept) <= set(range(heads)):
            _refuse(f"kept is {self.kept}: it must name {left} different heads of 0 to {heads - 1}")

    def _one_map_a_side(self) -> AttentionWeights:
        for side in SIDES:
            require_nothing_between(_NAME, side, self.after.chain(side)[:-1])
        links = {}
        for side in SIDES:
            links[side] = replace(self.after.multiplied(side), learned=True, norm=None)
        heads = self.after.num_heads
        groups = math.lcm(links["k"].copies, links["v"].copies)
        return replace(
            self.after,
            q=(links["q"].of_heads(heads),),
            k=(links["k"].of_heads(groups),),
            v=(links["v"].of_heads(groups),),
            o=(links["o"].of_heads(heads),),
            norm=None,
            memory_norm=None,
        )

    def _can_be(self, sizes: Sizes) -> bool:
        return not self.same_sizes and resizing(self.checkpoint, self.layer.site, sizes) is not None

    def _in_heads(self, whole: AttentionWeights, old: Sizes) -> AttentionWeights:
        if whole.num_heads == old.heads:
            if self.kept != list(range(old.heads)):
                self._require_heads_without_numbers()
            return whole
        if self._can_be(old._replace(heads=whole.num_heads, groups=whole.k[0].copies)):
            return whole
        return self._in_old_places(whole, old)

    def _in_old_places(self, whole: AttentionWeights, old: Sizes) -> AttentionWeights:
        """Every head where it was, and zero maps for those that are gone."""
        heads = torch.tensor(self.kept)
        groups = heads // (old.heads // old.groups)
        (q,), (k,), (v,), (o,) = (whole.chain(side) for side in SIDES)
        filled = {"q": _spread(q, heads, old.heads), "o": _spread(o, heads, old.heads)}
        for side, link in (("k", k), ("v", v)):
            of_heads = link.of_heads(whole.num_heads)
            filled[side] = _spread(of_heads, groups, old.groups)
            if not torch.equal(filled[side].weight[groups], of_heads.weight):
                _refuse(
                    f"{whole.num_heads} of {old.heads} heads are left, in their old places, and some of one "
                    f"group read different key-value heads: the file has {old.groups}",
                    "leave repeat_kv_heads out",
                )
        if any(norm is not None and norm.over == "all heads" for norm in self._head_norms()):
            expected = self._expected()  # the norm over all heads reads those that are gone as well
            gone = [head for head in range(old.heads) if head not in self.kept]
            empty = sorted(set(range(old.groups)) - set(groups.tolist()))
            filled["q"] = _taken_over(filled["q"], expected.q[0], gone)
            filled["k"] = _taken_over(filled["k"], expected.k[0], empty)
        chains = {side: (link,) for side, link in filled.items()}
        return replace(whole, num_heads=old.heads, **chains)  # type: ignore[arg-type]

    def _in_groups(self, whole: AttentionWeights, old: Sizes) -> AttentionWeights:
        groups = whole.k[0].copies
        if groups == old.groups or self._can_be(old._replace(heads=whole.num_heads, groups=groups)):
            return whole
        if old.groups % groups:
            _refuse(
                f"there are {groups} key-value heads now, and the file has {old.groups}, which its "
                "configuration "
                + ("is to keep" if self.same_sizes else "has no field to change, or cannot for one layer"),
                f"merge_kv_heads to {old.groups} or fewer",
            )
        return whole.evened(old.groups)

    def _in_widths(self, whole: AttentionWeights, old: Sizes) -> AttentionWeights:
        sizes = sizes_of(whole)
        for what, now, there in (
            ("queries and keys", sizes.width, old.width),
            ("values", sizes.value_width, old.value_width),
        ):
            if now > there:
                _refuse(
                    f"{what} have {now} channels a head now, and the file has {there}",
                    f"truncate to {there} or fewer",
                )
        if sizes != old and sizes.width == sizes.value_width and self._can_be(sizes):
            return whole
        more_qk, more_ov = old.width - sizes.width, old.value_width - sizes.value_width
        pad = torch.nn.functional.pad
        return replace(
            whole,
            q=(_widened(whole.q[0], more_qk),),
            k=(_widened(whole.k[0], more_qk),),
            v=(_widened(whole.v[0], more_ov),),
            o=(Link(pad(whole.o[0].weight, (0, 0, 0, more_ov))),),
        )

    def _scale_of_format(self, old: Sizes, new: Sizes) -> float:
        """What the reader of the file will multiply scores by."""
        return self.before.scale * (1.0 if self.spec.scale else math.sqrt(old.width / new.width))

    # What lies outside the maps.

    def _head_norms(self) -> tuple[HeadNorm | None, HeadNorm | None]:
        return self.semantics.q_norm, self.semantics.k_norm

    def _require_heads_without_numbers(self) -> None:
        """Heads may be put in another order only if nothing that stays behind is one head's own.

        Raises:
            RewriteRefusedError: something is.
        """
        positions = self.semantics.positions
        if positions in ("alibi", "relative") or self._distances_have_maps():
            _refuse(
                f"the heads are in another order, and {positions} positions, which are each head's own, stay "
                "in theirs",
                "leave permute_heads out",
            )

    def _distances_have_maps(self) -> bool:
        return isinstance(self.semantics.bias, DisentangledBias) and not self.semantics.bias.through_maps

    def _require_channels_of_old(self, whole: AttentionWeights) -> None:
        """Where the format reads channels one by one, they must be what they were.

        Raises:
            RewriteRefusedError: they are not.
        """
        if self.semantics.clip is not None:
            sides, why = _INPUTS, f"queries, keys and values are clipped at ±{self.semantics.clip:g}"
        elif isinstance(self.semantics.bias, DisentangledBias):
            sides, why = _INPUTS[:2], "distances meet queries and keys in their channels"
        else:
            return
        expected, heads = self._expected(), self.kept
        for side in sides:
            wanted, found = expected.per_head(side)[heads], whole.per_head(side)
            if not _is_near(found, wanted) or not _is_near(
                _or_zeros(whole.head_bias(side), found),
                _or_zeros(expected.head_bias(side), expected.per_head(side))[heads],
            ):
                _refuse(
                    f"the map of {side} has other channels now, and {why}", "leave the channels as they are"
                )

    def _expected(self) -> AttentionWeights:
        """What was read, in float64, with its norm folded if the rewritten weights have it so."""
        exact = self.before.to(torch.float64)
        folded = self.before.norm is not None and self.after.norm is None
        return fold_norm(exact).weights if folded else exact

    # Tensors.

    def _maps(self, fitted: AttentionWeights, stored: LayerMap) -> dict[str, Tensor]:
        """The maps and their biases, zeros where the file has a place for a bias that is gone."""
        ours: dict[str, Tensor] = {side: fitted.chain(side)[0].weight for side in SIDES}
        for side in SIDES:
            link = fitted.chain(side)[0]
            bias, zeros = (
                (fitted.o_bias, link.weight[0, 0]) if side == "o" else (link.bias, link.weight[:, 0])
            )
            if f"{side}.bias" in stored.parts:
                ours[f"{side}.bias"] = torch.zeros_like(zeros) if bias is None else bias
            elif bias is not None and bool(bias.any()):
                _refuse(
                    f"the map of {side} has a bias now, and the format has no place for one",
                    "leave out the step that makes it",
                )
        return ours

    def _norm(self) -> dict[str, Tensor]:
        """The norm, if it was folded: gain 1 and shift 0."""
        norm = self.before.norm
        if norm is None or self.after.norm is not None:
            return {}
        at = self.place.norm_module
        for other in self.checkpoint.sites:
            if other != self.layer.site and at == self.checkpoint.place(other).norm_module:
                _refuse(f"the norm {at} was folded, and {other.name} reads it too", "leave fold_norm out")
        found = {"norm": torch.full_like(norm.gain, 1 - norm.offset)}
        return found if norm.shift is None else found | {"norm.bias": torch.zeros_like(norm.shift)}

    def _sinks(self, new: Sizes) -> dict[str, Tensor]:
        """Scores of the sinks follow their heads."""
        sinks = self.semantics.sinks
        return {} if sinks is None or len(self.kept) != new.heads else {"sinks": sinks[self.kept]}

    def _gains(self, old: Sizes, new: Sizes, stored: LayerMap) -> Iterator[tuple[str, Tensor]]:
        """Gains and shifts of norms of queries and keys, where each head has its own, follow their heads.

        Raises:
            RewriteRefusedError: heads that had one key head between them no longer stand together.
        """
        heads = torch.tensor(self.kept)
        # Other numbers of heads are only written where no norm has a gain of each head's own.
        if not len(heads) == new.heads == old.heads or self.kept == list(range(old.heads)):
            return
        groups = (heads // (old.heads // old.groups)).view(old.groups, -1)
        for part, norm, order in (
            ("q_norm", self.semantics.q_norm, heads),
            ("k_norm", self.semantics.k_norm, groups[:, 0]),
        ):
            if norm is None or not norm.of_each_head:
                continue
            if not bool((groups == groups[:, :1]).all()):
                _refuse(
                    "heads of several groups stand together now, and the gains of their keys are each "
                    "group's own",
                    "leave permute_heads out",
                )
            for name in (part, f"{part}.bias"):
                if (name,) in stored.entries:
                    (gains,) = stored.entries[(name,)].read(lambda name, _: self.tensors.read(name))
                    yield name, gains.view(len(order), -1)[order].view(gains.shape)

    def _changed(self, name: str, full: Tensor) -> Tensor | None:
        """A tensor as it is to be stored; None if that is how it is stored already.

        Raises:
            RewriteRefusedError: it cannot be stored so.
        """
        dtype = self.tensors.infos[name].dtype
        new, old = full.to(dtype).contiguous(), self.tensors.read(name)
        if torch.equal(new, old):
            return None
        if how := self.tensors.packed_as(name):
            _refuse(
                f"tensor {name} is stored as {how}, which cannot take other numbers",
                "rewrite the checkpoint it was made from",
            )
        if not are_finite(new) and are_finite(old):
            largest = f"up to {float(full.abs().max()):.3g}" if are_finite(full) else "now"
            _refuse(
                f"tensor {name}: numbers {largest} do not fit {dtype}".replace("torch.", ""),
                "store the checkpoint in bfloat16 or float32 first",
            )
        return new


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _with_biases_of(before: AttentionWeights, fitted: AttentionWeights) -> AttentionWeights:
    """The shapes of a layer with a bias wherever the file has a place for one."""
    chains = {}
    for side in _INPUTS:
        (link,), there = fitted.chain(side), before.chain(side)[-1].bias
        bias = None if there is None else link.weight.new_empty(link.copies, link.d_out)
        chains[str(side)] = (replace(link, bias=bias),)
    o_bias = None if before.o_bias is None else fitted.o[0].weight.new_empty(before.o_bias.shape)
    return replace(fitted, o_bias=o_bias, **chains)  # type: ignore[arg-type]


def _refuse(reason: str, advice: str = "") -> NoReturn:
    raise RewriteRefusedError(_NAME, reason, advice)


def _are_the_same(one: AttentionWeights, other: AttentionWeights) -> bool:
    """Whether two writings hold the same numbers in the same maps."""
    if one is other:
        return True
    alike = one.scale == other.scale and (one.norm is None) == (other.norm is None)
    alike = alike and (one.o_bias is None) == (other.o_bias is None)
    if not alike or any(len(one.chain(side)) != len(other.chain(side)) for side in SIDES):
        return False
    mine, theirs = list(one.tensors()), list(other.tensors())
    return len(mine) == len(theirs) and all(map(_are_equal, mine, theirs))


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers; in at least float64 where their dtypes differ."""
    if one.dtype == other.dtype or one.shape != other.shape:
        return torch.equal(one, other)
    return all(torch.equal(a.double(), b.double()) for a, b in zip(one, other, strict=True))


def _spread(link: Link, places: Tensor, copies: int) -> Link:
    """A link's copies at some places of more, and zeros at the others."""

    def spread(part: Tensor) -> Tensor:
        whole = part.new_zeros(copies, *part.shape[1:])
        whole[places] = part
        return whole

    return Link(spread(link.weight), None if link.bias is None else spread(link.bias))


def _taken_over(link: Link, other: Link, copies: list[int]) -> Link:
    """A link with some copies those of another."""
    weight = link.weight.clone()
    weight[copies] = other.weight[copies]
    if other.bias is None:
        return replace(link, weight=weight)
    bias = torch.zeros_like(other.bias) if link.bias is None else link.bias.clone()
    bias[copies] = other.bias[copies]
    return replace(link, weight=weight, bias=bias)


def _widened(link: Link, more: int) -> Link:
    if not more:
        return link
    pad = torch.nn.functional.pad
    rows = pad(link.weight.mT, (0, 0, 0, more))  # in memory as most formats have them
    return Link(rows.mT, None if link.bias is None else pad(link.bias, (0, more)))


def _or_zeros(bias: Tensor | None, weight: Tensor) -> Tensor:
    """The bias of a link, or the zeros that its absence stands for."""
    return torch.zeros_like(weight[:, 0, :]) if bias is None else bias


def _is_near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return float((one - other).abs().max()) <= _ROUNDING * float(other.abs().max())
