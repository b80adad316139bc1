"""Output differences of rewritten layers on random and real inputs, and bounds for all inputs."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from triptych.core.algebra.function import run_layer
from triptych.core.algebra.norm_folding import fold_norm
from triptych.core.algebra.rewritten import RewriteRefusedError
from triptych.core.algebra.weights import SIDES, AttentionWeights, Norm
from triptych.core.checkpoints.stored_layers import AttentionLayer
from triptych.rewriting.certificate import Measured, Probes
from triptych.rewriting.functions.bounds import output_bound, score_bound
from triptych.rewriting.functions.channels import (
    FORMS,
    Form,
)
from triptych.rewriting.functions.moves import measure_move
from triptych.rewriting.inputs import before_gain
from triptych.rewriting.rounding import (
    MOST_TIMES,
    MOST_TIMES_OF_LAYER,
    RoundedAgain,
    changed_numbers,
    unit,
)
from triptych.running.opening import Seen

# Maximum entries in float64 at once, of a map outside the attention; and maximum size of a layer with bounds
# per head.
MOST_NUMBERS = 1 << 22
PROBES = Probes(count=1, length=16, seed=2017)
_DRAWS = 3
# Rounding of float64 sums in the measurement itself: correct rewrites moved by up to 17 eps more than the
# rounding of weights explains (docs/contributing/log/).
_MEASURING = 32 * torch.finfo(torch.float64).eps


class Rounding(NamedTuple):
    """Effect of rounding on an output, relative to its norm.

    Attributes:
        of_weights: effect of moving each changed value by half a unit in the last digit, at random.
        in_dtype: error of the original in the checkpoint's dtype.
        of_measuring: rounding of the measurement in float64, for float64 weights.
    """

    of_weights: float
    in_dtype: float
    of_measuring: float = 0.0

    def explains(self, found: Measured) -> bool:
        """Return True if a measured difference is within rounding."""
        new_error = found.error_ratio * self.in_dtype
        of_layer = MOST_TIMES_OF_LAYER * self.of_weights + self.of_measuring
        return found.relative <= of_layer and new_error <= MOST_TIMES * (
            self.of_weights + self.in_dtype
        )


def measure_change(
    before: AttentionLayer,
    after: AttentionLayer,
    given: Probes | Seen = PROBES,
    *,
    bounded: bool = False,
) -> Measured:
    """Measure the change of a layer's output on random inputs, or on inputs from a text."""
    x, memory = _before_gains(before, given)
    reference = _output(before, x, memory, torch.float64)
    moved = _output(after, x, memory, torch.float64)
    difference = moved - reference
    own = before.weights.dtype
    own_error = (_output(before, x, memory, own).double() - reference).norm()
    new_error = (_output(after, x, memory, own).double() - reference).norm()
    # The rounding of a float64 checkpoint itself is the floor.
    floor = (
        torch.finfo(own).eps * reference.norm() * 1e-3 + torch.finfo(torch.float64).tiny
    )
    score, output, why_not = _bounds(before, after) if bounded else (None, None, "")
    return Measured(
        worst_absolute=float(difference.abs().max()),
        relative=float(
            difference.norm()
            / reference.norm().clamp(min=torch.finfo(torch.float64).tiny)
        ),
        error_ratio=float(new_error / own_error.clamp(min=float(floor))),
        score_bound=score,
        output_bound=output,
        no_bound=why_not,
    )


def measure_rounding(
    before: AttentionLayer,
    after: AttentionLayer,
    stored: torch.dtype | None,
    given: Probes | Seen = PROBES,
) -> Rounding:
    """Measure the effect of rounding alone on a layer's output."""
    x, memory = _before_gains(before, given)
    tiny = torch.finfo(torch.float64).tiny
    original = _output(before, x, memory, torch.float64)
    in_dtype = _output(before, x, memory, before.weights.dtype).double()
    reference = _output(after, x, memory, torch.float64)
    size = original.norm().clamp(min=tiny)
    changed = changed_numbers(before, after)
    most = 0.0
    # The largest of several random roundings.
    for seed in range(_DRAWS):
        again = RoundedAgain(changed, stored, torch.Generator().manual_seed(seed))
        moved = _output(after, x, memory, torch.float64, again)
        most = max(most, float((moved - reference).norm() / size))
    of_measuring = _MEASURING if before.weights.dtype == torch.float64 else 0.0
    return Rounding(most, float((in_dtype - original).norm() / size), of_measuring)


def _before_gains(
    layer: AttentionLayer, given: Probes | Seen
) -> tuple[Tensor, Tensor | None]:
    """Return input and memory of a layer before the weights and biases of its norms."""
    weights = layer.weights
    if isinstance(given, Seen):
        memory = (
            None
            if given.memory is None
            else before_gain(given.memory.double(), weights.memory_norm)
        )
        return before_gain(given.x.double(), weights.norm), memory
    generator = torch.Generator().manual_seed(given.seed)
    x = _standardised(weights.d_model, given, generator)[
        :, : weights.semantics.num_positions
    ]
    if weights.semantics.kind != "cross":
        return x, None
    return x, _standardised(
        weights.k[0].d_in if weights.k else weights.d_model, given, generator
    )


def _standardised(width: int, probes: Probes, generator: torch.Generator) -> Tensor:
    found = torch.randn(
        probes.count, probes.length, width, dtype=torch.float64, generator=generator
    )
    found = found - found.mean(dim=-1, keepdim=True)
    return found / found.square().mean(dim=-1, keepdim=True).sqrt()


def _output(
    layer: AttentionLayer,
    x: Tensor,
    memory: Tensor | None,
    dtype: torch.dtype,
    change: Callable[[AttentionWeights], AttentionWeights] = lambda weights: weights,
) -> Tensor:
    weights = layer.weights
    x = _through_norm(x, weights.norm).to(dtype)
    if memory is not None:
        memory = _through_norm(memory, weights.memory_norm).to(dtype)
    return run_layer(change(weights.to(dtype)), x, memory)


def _through_norm(x: Tensor, norm: Norm | None) -> Tensor:
    if norm is None:
        return x
    x = x * (norm.weight.double() + norm.offset)
    return x if norm.bias is None else x + norm.bias.double()


class MapErrors(NamedTuple):
    """Output errors on the probes of a map reading a norm."""

    worst: float  # largest entry of the difference in float64
    moved: float  # squared norm of the difference
    size: float  # squared norm of the original's output
    own: float  # squared norm of the original's error in the map's dtype
    new: float
    eps: float  # eps of the map's dtype
    rounding: float  # squared norm of the output's change if every new value is rounded at random


Map = tuple[Tensor, Tensor | None]


def measure_map(
    norm: Norm, new_norm: Norm, before: Map, after: Map, probes: Probes = PROBES
) -> MapErrors:
    """Measure the change of the output of a map reading a norm."""
    x = _standardised(
        len(norm.weight), probes, torch.Generator().manual_seed(probes.seed)
    ).flatten(0, 1)
    one = _through_norm(x, norm)
    other = _through_norm(x, new_norm)
    own = before[0].dtype
    worst = 0.0
    sums = torch.zeros(5, dtype=torch.float64)
    # Block by block: the map may be the largest tensor of the checkpoint.
    for block in blocks(before[0]):
        reference = _mapped(one, before, block, torch.float64)
        difference = _mapped(other, after, block, torch.float64) - reference
        own_error = _mapped(one, before, block, own).double() - reference
        new_error = _mapped(other, after, block, own).double() - reference
        worst = max(worst, float(difference.abs().max()))
        squares = [
            t.square().sum() for t in (difference, reference, own_error, new_error)
        ]
        sums += torch.stack([*squares, _variance(other, after, block).sum()])
    moved, size, own_sum, new_sum, rounding = sums.tolist()
    return MapErrors(
        worst, moved, size, own_sum, new_sum, torch.finfo(own).eps, rounding
    )


def total_errors(maps: Sequence[MapErrors]) -> Measured:
    """Combine the errors of several maps, as of their concatenated outputs."""
    moved, size, own, new = (
        math.sqrt(sum(getattr(errors, name) for errors in maps))
        for name in ("moved", "size", "own", "new")
    )
    tiny = torch.finfo(torch.float64).tiny
    floor = max(errors.eps for errors in maps) * size * 1e-3 + tiny
    return Measured(
        worst_absolute=max(errors.worst for errors in maps),
        relative=moved / max(size, tiny),
        error_ratio=new / max(own, floor),
    )


def blocks(
    weight: Tensor, most_numbers: int = MOST_NUMBERS
) -> Iterator[tuple[int | slice, ...]]:
    """Yield ranges of rows of a map `[…, d_out, d_in]`, with a limited number of entries per range."""
    rows = max(1, most_numbers // max(1, weight.shape[-1]))
    parts = [slice(start, start + rows) for start in range(0, weight.shape[-2], rows)]
    if weight.ndim == 2:
        yield from ((part,) for part in parts)
    else:
        yield from product(range(len(weight)), parts)


def _mapped(
    x: Tensor, map_: Map, block: tuple[int | slice, ...], dtype: torch.dtype
) -> Tensor:
    weight, bias = map_
    shift = None if bias is None else bias[block].to(dtype)
    return torch.nn.functional.linear(x.to(dtype), weight[block].to(dtype), shift)


def _variance(x: Tensor, map_: Map, block: tuple[int | slice, ...]) -> Tensor:
    """Return the variance of a map's output under random rounding of all of its values."""

    def squared(numbers: Tensor) -> Tensor:
        wide = numbers.double()
        return (unit(wide, numbers.dtype) / 2).square() + unit(
            wide, torch.float64
        ).square()

    weight, bias = map_
    shift = None if bias is None else squared(bias[block])
    return torch.nn.functional.linear(x.square(), squared(weight[block]), shift)


def total_rounding(maps: Sequence[MapErrors]) -> Rounding:
    """Return the effect of rounding alone on the concatenated outputs of several maps."""
    size = math.sqrt(sum(errors.size for errors in maps)) or 1.0
    by_rounding, own = (
        math.sqrt(sum(getattr(errors, name) for errors in maps)) / size
        for name in ("rounding", "own")
    )
    return Rounding(by_rounding, own)


def _bounds(
    before: AttentionLayer, after: AttentionLayer
) -> tuple[float | None, float | None, str]:
    """Bound the change of a score and of a head's output for normalised inputs.

    Unknown bounds are None; the last entry gives the reasons.
    """
    if reason := _why_not_compared(before, after):
        return None, None, reason

    def scores() -> Tensor:
        # A temperature varies with the position, so a common bound does not exist.
        if before.weights.semantics.temperature is not None:
            raise RewriteRefusedError(
                "score_bound", "scores grow with the place of the query in its text"
            )
        one, other = (
            _with_input_norms_folded(layer, "qk") for layer in (before, after)
        )
        return score_bound(one, other)

    def outputs() -> Tensor:
        return output_bound(
            *(_with_input_norms_folded(layer, "ov") for layer in (before, after))
        )

    found: list[float | None] = []
    reasons: list[str] = []
    for bound in (scores, outputs):
        try:
            found.append(float(bound().max()))
        except RewriteRefusedError as refused:
            found.append(None)
            reasons.append(refused.reason)
    return found[0], found[1], "; ".join(dict.fromkeys(reasons))


def _why_not_compared(before: AttentionLayer, after: AttentionLayer) -> str:
    """Return the reason against bounds per head; "" if they are possible."""
    one = before.weights
    other = after.weights
    if one.num_heads != other.num_heads:
        return f"there are {other.num_heads} heads where there were {one.num_heads}"
    if sum(link.weight.numel() for link in one.links()) > MOST_NUMBERS:
        return "the layer is too large for a bound of every head to be worked out"
    return (
        "there are norms between two maps of a side"
        if one.norms_within or other.norms_within
        else ""
    )


def _with_input_norms_folded(layer: AttentionLayer, form: Form) -> AttentionWeights:
    """Fold the norms before a layer into its maps, so that its inputs have norm at most √d."""
    weights = layer.weights
    inputs = layer.inputs
    cross = weights.semantics.kind == "cross"
    of_keys = inputs.memory if cross else inputs.x
    if of_keys is None or (form == "qk" and inputs.x is None):
        which = "the memory" if of_keys is None and cross else "the input"
        raise RewriteRefusedError(
            f"{form}_bound",
            f"{which} may be of any length: no norm is known that makes it",
        )
    return _with_norm_folded(
        replace(weights, norm=inputs.x, memory_norm=inputs.memory if cross else None)
    )


def measure_form_move(before: AttentionLayer, after: AttentionLayer) -> float | None:
    """Return the largest Frobenius norm of a form's change over heads; None if heads are not comparable.

    Forms are compared under the scale of the original if the query map can absorb the ratio; rewrites keep
    the scale of all other layers.
    """
    one = before.weights
    other = after.weights
    if one.num_heads != other.num_heads or one.norms_within or other.norms_within:
        return None
    return _largest_form_move(one, _under(one.scale, other))


def measure_form_rounding(
    before: AttentionLayer, after: AttentionLayer, stored: torch.dtype | None
) -> float:
    """Return the change of forms if changed values are rounded at random, in Frobenius norm."""
    again = RoundedAgain(
        changed_numbers(before, after), stored, torch.Generator().manual_seed(0)
    )
    weights = after.weights.to(torch.float64)
    scale = before.weights.scale
    return _largest_form_move(_under(scale, weights), _under(scale, again(weights)))


def _under(scale: float, weights: AttentionWeights) -> AttentionWeights:
    """Rescale weights to another scale with equal scores, if the query map can absorb the ratio."""
    return weights.with_scale(scale) if weights.takes_up_scale else weights


def _largest_form_move(one: AttentionWeights, other: AttentionWeights) -> float:
    one = one.to(torch.float64)
    other = other.to(torch.float64)
    if not _is_same_norm(one.norm, other.norm) or not _is_same_norm(
        one.memory_norm, other.memory_norm
    ):
        one = _with_norm_folded(one)
        other = _with_norm_folded(other)
    return max(float(measure_move(one, other, form).form.max()) for form in FORMS)


def _is_same_norm(one: Norm | None, other: Norm | None) -> bool:
    if one is None or other is None:
        return one is other
    shifts = (
        norm.weight.new_zeros(1) if norm.bias is None else norm.bias
        for norm in (one, other)
    )
    return torch.equal(one.weight, other.weight) and torch.equal(*shifts)


def _with_norm_folded(weights: AttentionWeights) -> AttentionWeights:
    """Return the layer in float64, with gain and shift of its norms folded into its maps."""
    wide = weights.to(torch.float64)
    if wide.norm is None and wide.memory_norm is None:
        return wide
    everything = frozenset(SIDES)
    free = replace(wide, norm_place="pre", other_norm_readers="", bias_slots=everything)
    return fold_norm(free).weights
