"""Which heads there are: permuted, left out, and each given its own key-value head."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from triptych.algebra.forms import BilinearForm
from triptych.algebra.moments import Moments
from triptych.algebra.rewrites.channels import (
    NAMES,
    SIDES_OF,
    Move,
    each_link,
    in_working_precision,
    one_map,
)
from triptych.algebra.rewrites.data import require_moments_of
from triptych.algebra.rewrites.legality import (
    require_nothing_between,
    require_whole_number,
    unchanged,
)
from triptych.algebra.rewrites.record import RewriteRefusedError, Rewritten, rewritten
from triptych.algebra.rewrites.rewrite import Layer, LayerRewrite, Selected
from triptych.algebra.weights import SIDES, AttentionWeights, Link, Side

_OWN_NUMBERS = "ALiBi and distance tables, whose numbers are each head's own"


@final
class PruneHeads(LayerRewrite):
    """Leave heads out: those named, those that do least, or dead ones."""

    name = "prune_heads"
    tier = "bounded unless the heads are dead"
    refused = _OWN_NUMBERS
    place = 4
    why_here = "heads that go should not take part in what is shared out"
    by_groups = True
    selects = True
    resizes = True

    heads: tuple[int, ...] | None = Field(None, description="which, by number; dead ones by default")
    number: int | None = Field(None, ge=1, description="how many of each layer, those that do least")
    on_text: bool = Field(False, description="measure what heads do on the text")
    by_loss: bool = Field(
        False, description="those do least whose absence raises the model's loss on the text least"
    )
    losses: dict[str, tuple[float, ...]] = Field(default_factory=dict, exclude=True)

    @model_validator(mode="after")
    def _one_way(self) -> "PruneHeads":
        if self.heads is not None and self.number is not None:
            raise ValueError("heads and number contradict each other: give one of them")
        if self.by_loss and (self.number is None or self.on_text):
            raise ValueError("by_loss goes with number, and without on_text")
        return self

    @property
    def needs_text(self) -> bool:
        return self.on_text or self.by_loss

    @property
    def needs_losses(self) -> bool:
        return self.by_loss

    def with_losses(self, losses: Mapping[str, tuple[float, ...]]) -> "PruneHeads":
        return self.model_copy(update={"losses": dict(losses)})

    def apply(self, layer: Layer) -> Rewritten:
        return self.select(layer.weights, self.look(layer)).done

    def look(self, layer: Layer) -> tuple[Tensor, ...]:
        """What every head does: its form and its bias, and on the text."""
        does = measure_pruning(layer.weights)
        importance = does.whole
        if self.number is not None and self.on_text:
            importance = measure_importance(layer.weights, layer.moments)
        if self.by_loss:
            importance = importance.new_tensor(self._losses_of(layer))
        return (*does, importance)

    def select(self, whole: AttentionWeights, seen: tuple[Tensor, ...]) -> Selected:
        form, bias, importance = seen
        gone = self._chosen(whole.num_heads, importance)
        bounded = self.heads is not None or self.number is not None
        # Where distances have maps of their own, heads that are left stay in their places.
        done = prune_heads(whole, gone, bounded=bounded, does=Move(form, bias), distances_follow=True)
        return Selected(done, tuple(head for head in range(whole.num_heads) if head not in gone))

    def _losses_of(self, layer: Layer) -> tuple[float, ...]:
        """Of the heads of a layer, or of the part of it that is given."""
        found = self.losses.get(layer.name, ())[layer.first_head :][: layer.weights.num_heads]
        if len(found) < layer.weights.num_heads:
            raise RewriteRefusedError(self.name, "the loss without each of these heads is not known")
        return found

    def _chosen(self, heads: int, does: Tensor) -> list[int]:
        if self.heads is not None:
            return list(self.heads)
        if self.number is None:
            dead = [head for head in range(heads) if float(does[head]) == 0]
            return dead if len(dead) < heads else dead[1:]
        if self.number >= heads:
            raise RewriteRefusedError("prune_heads", f"number is {self.number}, and there are {heads} heads")
        return sorted(does.argsort()[: self.number].tolist())


@final
class SortHeads(LayerRewrite):
    """Sort heads by the size of W_OV, groups with theirs."""

    name = "sort_heads"
    tier = "bit-exact"
    refused = _OWN_NUMBERS
    place = 8
    why_here = "copies of key-value heads come last"
    by_groups = True
    selects = True
    at_end = True

    def apply(self, layer: Layer) -> Rewritten:
        return self.select(layer.weights, self.look(layer)).done

    def look(self, layer: Layer) -> tuple[Tensor, ...]:
        """The size of W_OV of every head."""
        return (layer.weights.ov.frobenius_norm(),)

    def select(self, whole: AttentionWeights, seen: tuple[Tensor, ...]) -> Selected:
        groups = max(1, min(whole.num_key_heads, whole.num_value_heads))
        served = whole.num_heads // groups
        sizes = seen[0].view(groups, served)
        by_group = sizes.norm(dim=-1).argsort(descending=True, stable=True).tolist()
        inside = sizes.argsort(dim=-1, descending=True, stable=True).tolist()
        order = tuple(group * served + head for group in by_group for head in inside[group])
        # Distances follow where they share the maps of queries and keys; the format refuses the others.
        return Selected(permute_heads(whole, order, distances_follow=True), order)


@final
class PermuteHeads(LayerRewrite):
    """Put heads in another order; key-value heads move with the queries that read them."""

    name = "permute_heads"
    tier = "bit-exact"
    refused = f"{_OWN_NUMBERS}; heads that share a map would be torn apart"
    place = 8
    why_here = SortHeads.why_here
    selects = True

    order: tuple[int, ...] = Field(description="head i of the result is head `order[i]`")

    def apply(self, layer: Layer) -> Rewritten:
        return self.select(layer.weights, ()).done

    def select(self, whole: AttentionWeights, seen: tuple[Tensor, ...]) -> Selected:
        return Selected(permute_heads(whole, self.order, distances_follow=True), self.order)


@final
class RepeatKVHeads(LayerRewrite):
    """Repeat key-value heads."""

    name = "repeat_kv_heads"
    tier = "bit-exact"
    refused = "the number is no multiple of those there are"
    place = 9
    by_groups = True
    at_end = True
    resizes = True

    num_kv_heads: int | None = Field(
        None, ge=1, description="how many there are then; one for every query head by default"
    )

    def apply(self, layer: Layer) -> Rewritten:
        return repeat_kv_heads(layer.weights, self.num_kv_heads)


def permute_heads(
    weights: AttentionWeights, order: Sequence[int], *, distances_follow: bool = False
) -> Rewritten:
    """Put the heads in another order; key-value heads move with the queries that read them.

    Args:
        weights: the layer.
        order: head i of the result is head `order[i]` of the weights.
        distances_follow: whether queries and keys of distances (disentangled positions) may be put in the
            same order, as they may where they share the layer's maps.

    Returns:
        The same function: a sum of heads has no order.

    Raises:
        RewriteRefusedError: not a permutation; one that would tear heads from others that read the
            same maps; or positions that add a bias of each head's own, which would stay behind.
    """
    heads = weights.num_heads
    if sorted(order) != list(range(heads)):
        raise RewriteRefusedError(
            "permute_heads",
            f"the order {list(order)} does not name each of the {heads} heads 0 to {heads - 1} once",
        )
    if list(order) == list(range(heads)):
        return unchanged("permute_heads", weights, "the heads are in that order")
    _require_heads_without_numbers("permute_heads", weights, distances_follow)

    def permute(link: Link) -> Link:
        served = heads // link.copies
        readers = torch.tensor(order).view(-1, served)
        if link.copies == 1:
            return link
        copies = readers // served
        torn = (copies != copies[:, :1]).nonzero()
        if len(torn):
            block, place = torn[0].tolist()
            raise RewriteRefusedError(
                "permute_heads",
                f"heads {readers[block, 0]} and {readers[block, place]} would come to share a map, but read "
                f"two, {copies[block, 0]} and {copies[block, place]} of {link.copies}",
                "move whole groups, or give every head its own key-value head first (repeat_kv_heads)",
            )
        return _taken(link, copies[:, 0])

    return rewritten(
        "permute_heads",
        "bit-exact",
        weights,
        _with_heads(each_link(weights, permute), order),
        checked=(
            f"the order names each of the {heads} heads once",
            "heads that read one map stay together",
            "no position bias of each head's own",
        ),
        choice=f"order {', '.join(map(str, order))}",
        notes=_notes_on_heads(weights),
    )


def prune_heads(
    weights: AttentionWeights,
    heads: Sequence[int],
    *,
    bounded: bool = False,
    does: Move | None = None,
    distances_follow: bool = False,
) -> Rewritten:
    """Leave heads out. The widths of the others stay.

    A key-value head goes with the last of the heads that read it. Where the groups that are left
    would have different sizes, key-value heads are repeated for smaller ones of one size: the layer may
    then hold and cache more numbers than before.

    Args:
        weights: the layer.
        heads: numbers of the query heads to leave out.
        bounded: whether heads that do something may go too.
        does: what `measure_pruning` finds, if it is known: shapes of weights (on the "meta" device) are then
            enough.
        distances_follow: as in `permute_heads`.

    Returns:
        The same function if `W_V W_O` and `b_V W_O` of each head is exactly 0; else, if allowed, one
        whose bound is the largest ‖W_OV‖ left out (the value bias counts as one more row).

    Raises:
        RewriteRefusedError: a head does something, with its ‖W_OV‖; a number out of range or given
            twice; no head would be left; or positions add a bias of each head's own.
    """
    _require_prunable(weights, heads)
    if not heads:
        return unchanged("prune_heads", weights, "no head was named")
    _require_heads_without_numbers("prune_heads", weights, distances_follow)
    for side in SIDES_OF["ov"]:
        require_nothing_between("prune_heads", side, weights.chain(side)[:-1])
    lost = _done_by(weights, list(heads)) if does is None else Move(*(part[list(heads)] for part in does))
    active = bool(lost.whole.gt(0).any())
    if active and not bounded:
        raise _does_something(heads, lost)
    kept = [head for head in range(weights.num_heads) if head not in heads]
    repeated: list[str] = []

    def select(link: Link) -> Link:
        if link.copies == 1:
            return link
        readers = torch.tensor(kept) // (weights.num_heads // link.copies)
        living, served = torch.unique_consecutive(readers, return_counts=True)
        copies = living.repeat_interleave(served // math.gcd(*served.tolist()))
        if len(copies) > len(living):
            repeated.append(f"{len(living)} that are left became {len(copies)}")
        return _taken(link, copies)

    result = _with_heads(each_link(weights, select, num_heads=len(kept)), kept)
    notes = (
        f"groups of different sizes would be left: of the key-value heads {what}" for what in repeated[:1]
    )
    return rewritten(
        "prune_heads",
        "bounded" if active else "rounding-exact",
        weights,
        result,
        checked=(
            "W_V W_O and b_V W_O of every head left out are 0" if not active else "bounded=True was given",
            "no position bias of each head's own",
        ),
        choice=f"{len(heads)} of {weights.num_heads} heads left out: {', '.join(map(str, heads))}",
        notes=(*notes, *_notes_on_heads(weights)),
        bound=float(lost.whole.max()) if active else 0.0,
    )


def _does_something(heads: Sequence[int], lost: Move) -> RewriteRefusedError:
    """The refusal that names the head that does most."""
    worst = int(torch.where(lost.whole > 0, lost.whole, 0.0).argmax())
    form, bias = float(lost.form[worst]), float(lost.bias[worst])
    what = f"its ‖W_OV‖ is {form:.6g}" if form > 0 else f"its value bias adds {bias:.6g} to the output"
    return RewriteRefusedError(
        "prune_heads",
        f"head {heads[worst]} does something: {what}",
        "bounded=True leaves it out all the same" if form > 0 else "fold the value bias first",
    )


def leave_heads(
    weights: AttentionWeights, kept: Sequence[int], served: Mapping[Side, int]
) -> AttentionWeights:
    """Some heads of a part of a layer, as `prune_heads` of the whole layer has them.

    Args:
        weights: a few groups of heads, one map a side and nothing shared between sides.
        kept: the heads of it that are left, in order, at least one.
        served: how many heads read one map of each side in the whole layer afterwards.
    """

    def select(side: Side, link: Link) -> Link:
        copies = torch.tensor(kept) // (weights.num_heads // link.copies)
        return _taken(link, copies[:: served[side]])

    chains = {str(side): tuple(select(side, link) for link in weights.chain(side)) for side in SIDES}
    return _with_heads(replace(weights, num_heads=len(kept), **chains), kept)  # type: ignore[arg-type]


def measure_pruning(weights: AttentionWeights) -> Move:
    """‖W_V W_O‖ and ‖b_V W_O‖ of every head: together, the bound of leaving it out."""
    return _done_by(weights.to(torch.float64), list(range(weights.num_heads)))


def measure_importance(
    weights: AttentionWeights, moments: Moments | None = None
) -> Float[Tensor, " num_heads"]:
    """How much each head does: the least is the first for `prune_heads` to leave out.

    Args:
        weights: the layer.
        moments: of a text, of the layer as it is written.

    Returns:
        With moments √E‖z W_O‖², the root mean square length of what a head adds to the output on the text.
        Without, ‖W_V W_O‖ with `b_V W_O` as one more row: the bound of leaving it out.

    Raises:
        RewriteRefusedError: the moments are of other heads or channels, with both sizes.
    """
    if moments is None:
        return measure_pruning(weights).whole
    require_moments_of("measure_importance", weights, moments, ["ov"])
    W_O = weights.to(torch.float64).W_O
    squares: Tensor = ((moments.mixed @ W_O) * W_O).sum(dim=(-2, -1))
    return squares.clamp(min=0.0).sqrt()


def repeat_kv_heads(weights: AttentionWeights, num_kv_heads: int | None = None) -> Rewritten:
    """Give fewer query heads, or each, a key and a value head of their own, copies of those that they read.

    Args:
        weights: the layer.
        num_kv_heads: number of key-value heads of the result, a multiple of those there are that divides the
            number of heads; one for every head if None.

    Returns:
        The same function, for more memory; the weights given if there are as many already.

    Raises:
        RewriteRefusedError: numbers that do not divide; queries must be multiplied out for it (heads that
            weigh the channels of one key map), and something stands between their maps.
    """
    heads = weights.num_heads if num_kv_heads is None else num_kv_heads
    both: tuple[Side, Side] = ("k", "v")
    sides = [
        side for side in both if 0 < max((link.copies for link in weights.chain(side)), default=0) < heads
    ]
    there = [max(link.copies for link in weights.chain(side)) for side in sides]
    if weights.num_heads % heads or any(heads % copies for copies in there):
        raise RewriteRefusedError(
            "repeat_kv_heads",
            f"num_kv_heads {heads} is no multiple of {max(there, default=1)} that divides "
            f"{weights.num_heads} heads",
        )
    if not sides and num_kv_heads is not None and heads < weights.num_key_heads:
        raise RewriteRefusedError(
            "repeat_kv_heads",
            f"there are {weights.num_key_heads} key-value heads, more than {heads}",
            "merge_kv_heads leaves fewer",
        )
    if not sides:
        return unchanged(
            "repeat_kv_heads", weights, "every head has its own keys and values, as far as they have maps"
        )
    notes = [f"{weights.multiplied(side).copies} maps of {NAMES[side]} became {heads}" for side in sides]
    result = weights
    multiplied = "k" in sides and len(weights.q) > 1
    if multiplied:
        require_nothing_between("repeat_kv_heads", "q", weights.q[:-1])
        result = replace(result, q=(one_map(weights, "q", notes),))
    last = {id(weights.chain(side)[-1]) for side in sides}
    result = each_link(result, lambda link: link.of_heads(heads) if id(link) in last else link)
    return rewritten(
        "repeat_kv_heads",
        "rounding-exact" if multiplied else "bit-exact",
        weights,
        result,
        notes=tuple(notes),
    )


def _with_heads(weights: AttentionWeights, kept: Sequence[int]) -> AttentionWeights:
    """The weights with what each head does besides its maps, in the order of the heads kept."""
    return replace(weights, semantics=weights.semantics.of_heads(kept))


def _taken(link: Link, copies: Tensor) -> Link:
    """Some of the copies, in some order; a fixed map of which not all is left in place is fixed no longer."""
    if copies.tolist() == list(range(link.copies)):
        return link
    copies = copies.to(link.weight.device)
    bias = None if link.bias is None else link.bias[copies]
    return replace(link, weight=link.weight[copies], bias=bias, learned=True)


def _require_heads_without_numbers(name: str, weights: AttentionWeights, distances_follow: bool) -> None:
    stays = ("alibi", "relative") if distances_follow else ("alibi", "relative", "disentangled")
    if weights.semantics.positions in stays:
        raise RewriteRefusedError(
            name,
            f"{weights.semantics.positions} positions add a bias of each head's own, which would stay in its "
            "place",
        )


def _notes_on_heads(weights: AttentionWeights) -> tuple[str, ...]:
    """What else might be each head's own."""
    if not weights.semantics.qk_norm:
        return ()
    return ("a gain of the QK-norm of each head's own, if there is one, lies outside and must follow",)


def _require_prunable(weights: AttentionWeights, heads: Sequence[int]) -> None:
    num_heads = weights.num_heads
    for place, head in enumerate(heads):
        require_whole_number("prune_heads", "a head", head)
        if not 0 <= head < num_heads:
            reason = f"there is no head {head}: there are {num_heads}, 0 to {num_heads - 1}"
            raise RewriteRefusedError("prune_heads", reason)
        if head in heads[:place]:
            raise RewriteRefusedError("prune_heads", f"head {head} is named twice")
    if len(heads) == num_heads:
        raise RewriteRefusedError("prune_heads", f"all {num_heads} heads are named, and one must be left")


def _done_by(weights: AttentionWeights, heads: list[int]) -> Move:
    """‖W_V W_O‖ and ‖b_V W_O‖ of some heads: exactly 0 where no channel is used on both sides.

    Clipped values need not cancel each other across channels: then it is Σ_c ‖W_V,c‖ ‖W_O,c‖ over channels c,
    and likewise of the bias.
    """
    weights = in_working_precision(weights)
    W_V, W_O, bias = weights.W_V[heads], weights.W_O[heads], weights.head_bias("v")
    read = W_O.ne(0).any(dim=-1)
    if weights.semantics.clip is not None:
        of_outputs = W_O.norm(dim=-1)
        of_bias = of_outputs.new_zeros(()) if bias is None else bias[heads].abs()
        return Move((W_V.norm(dim=-2) * of_outputs).sum(dim=-1), (of_bias * of_outputs).sum(dim=-1))
    used = (W_V.ne(0).any(dim=-2) & read)[:, None, :]
    form = BilinearForm(W_V * used, W_O.mT * used).frobenius_norm()
    if bias is None:
        return Move(form, torch.zeros_like(form))
    return Move(form, (bias[heads][:, None, :] @ W_O)[:, 0].norm(dim=-1))
