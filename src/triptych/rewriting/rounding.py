"""The effect of rounding alone on the output of a layer or of a whole model.

An exact rewrite computes the same function. The remaining difference is rounding, of the stored weights and
of the arithmetic. Its size depends on the model, so it is measured: every weight moves by half a unit in the
last digit, up or down at random, and the output is compared with the unmoved model's output.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple, final

import torch
from torch import Tensor

from triptych.core.algebra.weights import SIDES, AttentionWeights, Link, Side
from triptych.core.checkpoints.stored_layers import AttentionLayer, AttentionSource
from triptych.core.storage import Tensors
from triptych.rewriting.certificate import TensorRecord
from triptych.rewriting.on_text import Deviations, largest_difference
from triptych.running.opening import TextReader, Window

# Allowed move of outputs after exact rewrites, relative to the largest move by some random roundings. Correct
# rewrites stay below 1.2 over all families (docs/contributing/log/).
MOST_TIMES = 4.0
# Likewise for one layer in float64, where only weights are rounded: correct rewrites reach a factor of 0.8.
MOST_TIMES_OF_LAYER = 2.0
# Initial number of random roundings, and the maximum while their effect is too small: a mixture of experts
# jumps where two experts are nearly level, and only some roundings change the routing.
_FIRST_DRAWS = 3
_MOST_DRAWS = 16
# Entries of a map moved at a time.
_AT_A_TIME = 1 << 17
_BITS = {8: torch.int64, 4: torch.int32, 2: torch.int16}


class RoundingJudgement(NamedTuple):
    """The difference between two models, compared with the effect of rounding."""

    moved: float  # largest difference of a logit
    by_rounding: float

    @property
    def is_rounding(self) -> bool:
        """True if rounding explains the difference."""
        return self.moved <= MOST_TIMES * self.by_rounding


def changed_parameters(original: TextReader, rewritten: TextReader) -> frozenset[str]:
    """Return the names of parameters of the second model differing from the first or absent from it."""
    before = dict(original.model.named_parameters())
    return frozenset(
        name
        for name, parameter in rewritten.model.named_parameters()
        if name not in before
        or before[name].shape != parameter.shape
        or not torch.equal(before[name], parameter)
    )


def coarsest_changed(
    tensors: Mapping[str, TensorRecord], written: Tensors
) -> torch.dtype:
    """Return the coarsest dtype of the tensors changed by a rewrite; float64 without changes."""
    dtypes = {
        written.infos[name].dtype
        for name, record in tensors.items()
        if record.read != record.written and name in written.infos
    }
    floating = [torch.float64, *(dtype for dtype in dtypes if dtype.is_floating_point)]
    return max(floating, key=lambda dtype: torch.finfo(dtype).eps)


def judge_rounding(
    found: Deviations,
    rewritten: TextReader,
    changed: Collection[str],
    stored: torch.dtype,
) -> RoundingJudgement:
    """Compare the difference between two models with the effect of rounding."""
    most = 0.0
    outputs = [rewritten.outputs(window) for window in found.farthest]
    for seed in range(_MOST_DRAWS):
        moved = _rounded_again(rewritten, changed, stored, seed)
        for window, as_it_stands in zip(found.farthest, outputs, strict=True):
            most = max(most, largest_difference(as_it_stands, moved.outputs(window)))
        del moved  # large models: release before the next copy
        if seed + 1 >= _FIRST_DRAWS and found.worst_logit <= MOST_TIMES * most:
            break
    return RoundingJudgement(found.worst_logit, most)


def first_moved(
    original: TextReader,
    rewritten: TextReader,
    source: AttentionSource,
    window: Window,
    stored: torch.dtype,
) -> str:
    """Return the name of the first attention layer moved by more than rounding, or ""."""
    one = original.attention_outputs(source, window)
    other = rewritten.attention_outputs(source, window)
    changed = changed_parameters(original, rewritten)
    # Largest relative move of each layer's output by random roundings.
    rounded = [0.0] * len(other)
    for seed in range(_FIRST_DRAWS):
        again = _rounded_again(rewritten, changed, stored, seed).attention_outputs(
            source, window
        )
        for place, ((_, a), (_, b)) in enumerate(zip(other, again, strict=True)):
            rounded[place] = max(rounded[place], _relative(a, b))
    for (name, a), (_, b), most in zip(one, other, rounded, strict=True):
        if not _relative(a, b) <= MOST_TIMES * most:
            return name
    return ""


def _rounded_again(
    model: TextReader, changed: Collection[str], stored: torch.dtype, seed: int
) -> TextReader:
    """Copy a model, moving each parameter by a rounding, up or down at random."""
    generator = torch.Generator().manual_seed(seed)
    moved = model.copied()
    with torch.no_grad():
        for name, parameter in moved.model.named_parameters():
            step = unit(parameter, parameter.dtype)
            # The gain of a folded norm is constant: set, not rounded.
            if name in changed and not bool(
                (parameter == parameter.flatten()[:1]).all()
            ):
                step = torch.maximum(step, unit(parameter, stored) / 2)
            parameter.add_(step * signs(parameter, generator))
    return moved


def changed_numbers(
    before: AttentionLayer, after: AttentionLayer
) -> frozenset[tuple[str, str]]:
    """Return the changed weights and biases of a layer: chain, and "weight" or "bias"."""
    found = set[tuple[str, str]]()
    # Compare weights and biases of each chain separately.
    for side in SIDES:
        one = before.weights.chain(side)
        other = after.weights.chain(side)
        for part in ("weight", "bias"):
            mine, theirs = (
                [getattr(link, part) for link in chain] for chain in (one, other)
            )
            if len(mine) != len(theirs) or not all(map(_same_tensor, mine, theirs)):
                found.add((side, part))
    if not _same_tensor(before.weights.o_bias, after.weights.o_bias):
        found.add(("o", "bias"))
    one_gate, other_gate = (_gate_tensors(layer.weights) for layer in (before, after))
    for part in one_gate.keys() | other_gate.keys():
        if not _same_tensor(one_gate.get(part), other_gate.get(part)):
            found.add(("gate", part))
    return frozenset(found)


def _gate_tensors(weights: AttentionWeights) -> dict[str, Tensor]:
    gate = weights.semantics.gate
    return {} if gate is None else gate.tensors()


def _same_tensor(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(one, other)


@final
class RoundedAgain:
    """Moves every value of float64 weights by a rounding, up or down at random."""

    def __init__(
        self,
        changed: frozenset[tuple[str, str]],
        stored: torch.dtype | None,
        generator: torch.Generator,
    ) -> None:
        self._changed = changed
        self._stored = stored
        self._generator = generator

    def __call__(self, weights: AttentionWeights) -> AttentionWeights:
        # A shared map belongs to its first chain.
        side_of = dict[int, Side]()
        for side in reversed(SIDES):
            side_of |= dict.fromkeys(map(id, weights.chain(side)), side)

        def moved(link: Link) -> Link:
            side = side_of[id(link)]
            bias = None if link.bias is None else self._moved(side, "bias", link.bias)
            return replace(
                link, weight=self._moved(side, "weight", link.weight), bias=bias
            )

        weights = weights.each_link(moved)
        o_bias = (
            None if weights.o_bias is None else self._moved("o", "bias", weights.o_bias)
        )
        semantics = weights.semantics
        if semantics.gate is not None:
            gate = _gate_tensors(weights).items()
            moved_gate = {
                part: self._moved("gate", part, numbers.double())
                for part, numbers in gate
            }
            semantics = replace(semantics, gate=semantics.gate.with_tensors(moved_gate))
        return replace(weights, o_bias=o_bias, semantics=semantics)

    def _moved(
        self, side: Side | Literal["gate"], part: str, numbers: Tensor
    ) -> Tensor:
        stored = self._stored if (side, part) in self._changed else None
        if numbers.ndim > 1 and numbers.stride(-1) > numbers.stride(-2):
            return self._moved(side, part, numbers.mT).mT  # transposed, in memory order
        before = numbers.flatten()
        moved = torch.empty_like(before)
        # Blocks fit the processor's cache, and their memory is reused.
        for start in range(0, len(before), _AT_A_TIME):
            some = before[start : start + _AT_A_TIME]
            step = unit(some, torch.float64)
            if stored is not None:
                step = torch.maximum(step, unit(some, stored) / 2)
            torch.add(
                some,
                step.mul_(signs(some, self._generator)),
                out=moved[start : start + _AT_A_TIME],
            )
        return moved.view_as(numbers)


def unit(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance of each value to the next larger value of a dtype; 0 for zeros."""
    limits = torch.finfo(dtype)
    bits = _BITS[numbers.element_size()]
    # Infinity has exactly the exponent bits set: masking by them leaves the power of two of a value.
    exponent = torch.tensor(math.inf, dtype=numbers.dtype, device=numbers.device).view(
        bits
    )
    step = (numbers.view(bits) & exponent).view(numbers.dtype) * limits.eps
    step.clamp_(
        min=max(limits.smallest_normal * limits.eps, torch.finfo(numbers.dtype).tiny)
    )
    return step.masked_fill_(numbers == 0, 0.0)


def signs(like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw random signs, 1 or −1, in the shape and dtype of a tensor."""
    return (
        torch.randint(0, 2, like.shape, generator=generator, dtype=torch.int8).to(
            like.dtype
        )
        * 2
        - 1
    )


def _relative(one: Tensor, other: Tensor) -> float:
    one = one.double()
    other = other.double()
    return float(
        (one - other).norm() / one.norm().clamp(min=torch.finfo(torch.float64).tiny)
    )
