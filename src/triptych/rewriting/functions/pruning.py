"""Removal of heads: named, least important or dead heads."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

import torch
from jaxtyping import Float
from pydantic import Field, model_validator
from torch import Tensor

from triptych.core.algebra.forms import BilinearForm
from triptych.core.algebra.legality import (
    HEADS_ALIKE,
    require_nothing_between,
    require_whole_number,
    unchanged,
)
from triptych.core.algebra.rewritten import RewriteRefusedError, Rewritten, rewritten
from triptych.core.algebra.semantics import HeadNorm
from triptych.core.algebra.weights import AttentionWeights, Link, Side
from triptych.rewriting.functions.channels import NAMES, in_working_precision
from triptych.rewriting.functions.metric import require_moments_of
from triptych.rewriting.functions.moments import Moments
from triptych.rewriting.functions.moves import Move
from triptych.rewriting.functions.rewrite import LayerRewrite, LayerToRewrite

# Effective ‖W_OV‖ of normalised values.
_NORMED = "√(d_v / d_model) ‖diag(γ) W_O‖"


@final
class PruneHeads(LayerRewrite):
    """Remove heads: the given ones, the ones that do least, or dead ones."""

    name = "prune_heads"
    tier = "bounded unless the heads are dead"
    requires = (HEADS_ALIKE,)
    place = 4
    why_here = "heads that go should not take part in what is shared out"
    resizes = True

    heads: tuple[int, ...] | None = Field(
        None, description="numbers of the heads; by default the dead ones"
    )
    number: int | None = Field(
        None,
        ge=1,
        description="how many heads of each layer: the ones that do least. Heads of differential attention "
        "go in pairs, by the sum of both",
    )
    on_text: bool = Field(False, description="measure what heads do on the text")
    by_loss: bool = Field(
        False,
        description="order heads by how much the loss on the text rises without them",
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

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        weights = layer.weights
        does = measure_pruning(layer.weights)
        importance = does.whole
        if self.number is not None and self.on_text:
            importance = measure_importance(weights, layer.moments)
        if self.by_loss:
            losses = self.losses.get(layer.name, ())
            if len(losses) < weights.num_heads:
                raise RewriteRefusedError(
                    self.name, "the loss without each of these heads is not known"
                )
            importance = importance.new_tensor(losses)
        gate = weights.semantics.gate
        together = (
            2 if gate is not None and gate.whole else 1
        )  # heads of differential attention form pairs
        gone = self._chosen(weights.num_heads, importance, together)
        bounded = self.heads is not None or self.number is not None
        done = prune_heads(weights, gone, bounded=bounded, does=does)
        stay = done.weights.num_heads == weights.num_heads
        kept = tuple(
            head for head in range(weights.num_heads) if stay or head not in gone
        )
        return done.with_kept(kept)

    def _chosen(self, heads: int, does: Tensor, together: int) -> list[int]:
        if self.heads is not None:
            return list(self.heads)
        if self.number is None:
            dead = [head for head in range(heads) if float(does[head]) == 0]
            return dead if len(dead) < heads else dead[1:]
        if self.number >= heads:
            raise RewriteRefusedError(
                "prune_heads", f"number is {self.number}, and there are {heads} heads"
            )
        if self.number % together:
            raise RewriteRefusedError(
                "prune_heads",
                f"number is {self.number}, and heads stand in pairs",
                "give an even number",
            )
        least = does.view(-1, together).sum(dim=1).argsort()[: self.number // together]
        of_group = (least * together)[:, None] + torch.arange(together)
        return sorted(of_group.flatten().tolist())


def prune_heads(
    weights: AttentionWeights,
    heads: Sequence[int],
    *,
    bounded: bool = False,
    does: Move | None = None,
) -> Rewritten:
    """Remove heads; the widths of remaining heads are unchanged.

    A key-value head is removed with the last query head reading it. If the remaining groups would have
    different sizes, key-value heads are repeated to smaller groups of equal size: the layer may then have
    more parameters and cache more values than before. If one norm spans the queries, keys or values of all
    heads, the heads stay, and their output maps become zero.
    """
    _require_prunable(weights, heads)
    if not heads:
        return unchanged("prune_heads", weights, "no head was named")
    HEADS_ALIKE.require("prune_heads", weights)
    require_nothing_between("prune_heads", "o", weights.o[:-1])
    lost = (
        _done_by(weights, list(heads))
        if does is None
        else Move(*(part[list(heads)] for part in does))
    )
    active = bool(lost.whole.gt(0).any())
    normed = weights.semantics.v_norm
    if active and not bounded:
        raise _does_something(heads, lost, "‖W_OV‖" if normed is None else _NORMED)
    kept = [head for head in range(weights.num_heads) if head not in heads]
    notes: tuple[str, ...] = ()

    def left(copies: int) -> list[int]:
        nonlocal notes
        readers = torch.tensor(kept) // (weights.num_heads // copies)
        # Equal groups: their size is the greatest common divisor of the remaining sizes.
        living, served = torch.unique_consecutive(readers, return_counts=True)
        found: list[int] = living.repeat_interleave(
            served // math.gcd(*served.tolist())
        ).tolist()
        if len(found) > len(living):
            what = f"{len(living)} that are left became {len(found)}"
            notes = (
                f"groups of different sizes would be left: of the key-value heads {what}",
            )
        return found

    together = _normed_together(weights)
    # A norm over all heads would change with fewer heads.
    if together:
        notes = (
            f"a norm reads the {' and '.join(together)} of all heads: those left out stay, and their output "
            "is 0",
        )
        last = weights.o[-1].repeat(weights.num_heads)
        weight = last.weight.index_fill(
            0, torch.tensor([*heads], device=last.weight.device), 0.0
        )
        result = replace(
            weights, o=(*weights.o[:-1], replace(last, weight=weight, learned=True))
        )
    else:
        result = weights.select_copies(left, len(kept))
    return rewritten(
        "prune_heads",
        "bounded" if active else "rounding-exact",
        weights,
        result,
        checked=(
            "W_V W_O and b_V W_O of every head left out are 0"
            if not active
            else "bounded=True was given",
            *HEADS_ALIKE.checked,
        ),
        choice=f"{len(heads)} of {weights.num_heads} heads left out: {', '.join(map(str, heads))}",
        notes=notes
        if normed is None or not active
        else (*notes, f"values are normalised: bound by {_NORMED}"),
        bound=float(lost.whole.max()) if active else 0.0,
    )


def _normed_together(weights: AttentionWeights) -> list[str]:
    """Return the names of the chains with one norm over several heads."""
    semantics = weights.semantics
    found = list[str]()
    sides: tuple[tuple[Side, HeadNorm | None], ...] = (
        ("q", semantics.q_norm),
        ("k", semantics.k_norm),
        ("v", semantics.v_norm),
    )
    for side, own in sides:
        norms = [own, *(link.norm for link in weights.chain(side) if link.copies > 1)]
        if any(norm is not None and norm.over == "all heads" for norm in norms):
            found.append(NAMES[side])
    return found


def _does_something(
    heads: Sequence[int], lost: Move, measure: str
) -> RewriteRefusedError:
    """Return the refusal naming the most important of these heads."""
    worst = int(torch.where(lost.whole > 0, lost.whole, 0.0).argmax())
    form = float(lost.form[worst])
    bias = float(lost.bias[worst])
    what = (
        f"its {measure} is {form:.6g}"
        if form > 0
        else f"its value bias adds {bias:.6g} to the output"
    )
    return RewriteRefusedError(
        "prune_heads",
        f"head {heads[worst]} does something: {what}",
        "bounded=True leaves it out all the same"
        if form > 0
        else "fold the value bias first",
    )


def measure_pruning(weights: AttentionWeights) -> Move:
    """Compute ‖W_V W_O‖ and ‖b_V W_O‖ of every head: together, the bound for its removal."""
    return _done_by(weights.to(torch.float64), list(range(weights.num_heads)))


def measure_importance(
    weights: AttentionWeights, moments: Moments | None = None
) -> Float[Tensor, " num_heads"]:
    """Compute the importance of each head; `prune_heads` removes the least important heads."""
    if moments is None:
        return measure_pruning(weights).whole
    require_moments_of("measure_importance", weights, moments, ["ov"])
    W_O = weights.to(torch.float64).W_O
    squares: Tensor = ((moments.mixed @ W_O) * W_O).sum(dim=(-2, -1))
    return squares.clamp(min=0.0).sqrt()


def _require_prunable(weights: AttentionWeights, heads: Sequence[int]) -> None:
    num_heads = weights.num_heads
    for place, head in enumerate(heads):
        require_whole_number("prune_heads", "a head", head)
        if not 0 <= head < num_heads:
            reason = (
                f"there is no head {head}: there are {num_heads}, 0 to {num_heads - 1}"
            )
            raise RewriteRefusedError("prune_heads", reason)
        if head in heads[:place]:
            raise RewriteRefusedError("prune_heads", f"head {head} is named twice")
    if len(heads) == num_heads:
        raise RewriteRefusedError(
            "prune_heads", f"all {num_heads} heads are named, and one must be left"
        )


def _done_by(weights: AttentionWeights, heads: list[int]) -> Move:
    """Compute ‖W_V W_O‖ and ‖b_V W_O‖ of some heads: exactly 0 without a channel used by both maps.

    Normalised values have norm √d_v, regardless of the size of W_V. Only the norm's weight γ and W_O count:
    as a form of inputs of norm √d_model, √(d_v / d_model) ‖diag(γ) W_O‖.
    """
    weights = in_working_precision(weights.behind_norms())
    W_V = weights.W_V[heads]
    W_O = weights.W_O[heads]
    bias = weights.head_bias("v")
    read = W_O.ne(0).any(dim=-1)
    if weights.semantics.v_norm is not None:
        return _done_by_normed(weights, W_V, W_O, heads)
    gate = weights.semantics.gate
    # Clips and channel gates act between the maps: bound each channel separately.
    if weights.semantics.clip is not None or (gate is not None and gate.per_channel):
        of_outputs = W_O.norm(dim=-1)
        of_bias = of_outputs.new_zeros(()) if bias is None else bias[heads].abs()
        return Move(
            (W_V.norm(dim=-2) * of_outputs).sum(dim=-1),
            (of_bias * of_outputs).sum(dim=-1),
        )
    used = (W_V.ne(0).any(dim=-2) & read)[:, None, :]
    form = BilinearForm(W_V * used, W_O.mT * used).norm()
    if bias is None:
        return Move(form, torch.zeros_like(form))
    return Move(form, (bias[heads][:, None, :] @ W_O)[:, 0].norm(dim=-1))


def _done_by_normed(
    weights: AttentionWeights, W_V: Tensor, W_O: Tensor, heads: list[int]
) -> Move:
    """Compute the same norms for heads with values normalised in all or some channels."""
    norm = weights.semantics.v_norm
    bias = weights.head_bias("v")
    width = W_O.shape[1]
    assert norm is not None
    made = (
        W_V.ne(0).any(dim=-2)
        if bias is None
        else W_V.ne(0).any(dim=-2) | bias[heads].ne(0)
    )
    if norm.centred:  # centring changes channels of 0 to minus the mean
        made = made.any(dim=-1, keepdim=True).expand_as(made)
    # Read the norm's gain and shift behind a dummy map.
    copies = max(weights.num_value_heads, norm.num_copies(width))
    after = Link(W_V.new_ones(copies, width), norm=norm).norm_map
    gain = W_O.new_ones(width)
    shift = None
    if after is not None:
        after = after.repeat(weights.num_heads)
        gain = after.weight[heads]
        shift = None if after.bias is None else after.bias[heads]
    channels = width if norm.channels is None else min(width, norm.channels)
    together = weights.num_heads if norm.over == "all heads" else 1
    normed = torch.arange(width, device=W_O.device) < channels
    length = (channels * together / W_O.shape[2]) ** 0.5
    size = (W_O * (gain * made * normed)[..., None]).flatten(1).norm(dim=-1) * length
    size = (
        size + BilinearForm(W_V * ~normed, W_O.mT * (made & ~normed)[:, None, :]).norm()
    )
    moved = torch.zeros_like(size)
    if shift is not None:
        moved = moved + (shift[:, None, :] @ W_O)[:, 0].norm(dim=-1)
    if bias is not None:
        moved = moved + ((bias[heads] * ~normed)[:, None, :] @ W_O)[:, 0].norm(dim=-1)
    return Move(size, moved)
