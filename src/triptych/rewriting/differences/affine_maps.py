"""Maps of a layer on the plain normalised stream, with norms, scales and biases folded in."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import torch
from torch import Tensor

from triptych.core.algebra.weights import AttentionWeights, Chain, Link
from triptych.rewriting.differences.rounded import Rounded, left_alone, stacked
from triptych.rewriting.differences.turning import Turn


@final
@dataclass(frozen=True, eq=False)
class Reading:
    """The input of a sub-layer's maps: `gain ∘ n + shift`, where n is a plain normalised stream.

    Attributes:
        gain: gain of the norm before the sub-layer, in float64; None for 1.
        shift: shift of the norm; None for 0.
        centred: True if the entries of n sum to 0.
        turn: basis of the stream in which the maps are compared.
    """

    gain: Tensor | None = None
    shift: Tensor | None = None
    centred: bool = False
    turn: Turn | None = None

    def same_as(self, other: "Reading") -> bool:
        """Return True if gain and shift are equal to the bit."""
        if self.turn is not None or other.turn is not None:
            return False
        return _same(self.gain, other.gain, 1.0) and _same(self.shift, other.shift, 0.0)


def rounded_rows(one: Reading, other: Reading, rows: int) -> Tensor:
    """Return for each row of a map and for its bias whether folding a norm rounded it, `[rows + 1]`."""
    if one.turn is not None or other.turn is not None:
        return torch.ones(rows + 1, dtype=torch.bool)
    gains = [
        torch.ones(rows).double() if own.gain is None else own.gain
        for own in (one, other)
    ]
    has_other_shift = torch.tensor([not _same(one.shift, other.shift, 0.0)])
    return torch.cat([gains[0] != gains[1], has_other_shift])


def unfolded_rows(
    one: "AffineMap", other: "AffineMap", readings: tuple[Reading, Reading]
) -> Tensor:
    """Return for each row of a map and for its bias whether it ignores a difference of norms, `[rows + 1]`.

    `one`, `other`: stored maps of A and B. `readings`: the norms before them.
    """
    stored = one.rows().numbers, other.rows().numbers
    if stored[0].shape != stored[1].shape:
        return torch.zeros(stored[0].shape[-2], dtype=torch.bool)
    now, kept = (one.reading(replace(read, turn=None)).rows() for read in readings)
    return left_alone(*stored, now, kept)


def _same(one: Tensor | None, other: Tensor | None, default: float) -> bool:
    if one is None and other is None:
        return True
    of_one = torch.tensor(default).double() if one is None else one
    of_other = torch.tensor(default).double() if other is None else other
    return bool((of_one == of_other).all())


PLAIN = Reading()


class AffineMap(NamedTuple):
    """Maps `x W + b` in float64: `[copies, d_in, d_out]` and `[copies, d_out]`."""

    weight: Rounded
    bias: Rounded

    def rows(self) -> Rounded:
        """Return the map with its bias as a last row, `[copies, d_in + 1, d_out]`."""
        return stacked(
            [self.weight, self.bias.reshape(len(self.bias.numbers), 1, -1)], 1
        )

    def without_bias(self) -> "AffineMap":
        return AffineMap(self.weight, Rounded.exact(torch.zeros(self.bias.shape)))

    def times(self, factor: float) -> "AffineMap":
        return (
            self
            if factor == 1
            else AffineMap(self.weight.times(factor), self.bias.times(factor))
        )

    def select(self, copies: Sequence[int]) -> "AffineMap":
        return AffineMap(self.weight[copies], self.bias[copies])

    def repeat(self, copies: int) -> "AffineMap":
        times = copies // len(self.weight.numbers)
        return (
            self
            if times == 1
            else AffineMap(self.weight.repeat(times), self.bias.repeat(times))
        )

    def reading(self, read: Reading, *, centre: bool = False) -> "AffineMap":
        """Return the map as it acts on the plain normalised stream."""
        weight = self.weight
        bias = self.bias
        if read.shift is not None:
            shift = Rounded.exact(read.shift[None, None])
            bias = bias.plus((shift @ weight).reshape(*bias.shape))
        if read.gain is not None:
            weight = weight.times(read.gain[:, None])
        if read.turn is not None:
            weight = read.turn.read(weight)
        return AffineMap(
            weight.without_mean(1) if centre and read.centred else weight, bias
        )


def affine(weight: Rounded, bias: Rounded | None) -> AffineMap:
    """Return one map `[d_in, d_out]` with a bias `[d_out]`, zero by default."""
    copies = weight.reshape(1, *weight.shape)
    zero = Rounded.exact(torch.zeros(1, weight.shape[-1]))
    return AffineMap(copies, zero if bias is None else bias.reshape(1, -1))


def chain_map(chain: Chain, d_model: int, dtype: torch.dtype) -> AffineMap:
    """Multiply a chain without norms between its maps; an empty chain is the identity."""
    found: AffineMap | None = None
    for link in chain:
        own = _link_map(link, dtype)
        found = own if found is None else _then(found, own)
    if found is None:
        eye = torch.eye(d_model, dtype=torch.float64)[None]
        return AffineMap(Rounded.exact(eye), Rounded.exact(torch.zeros(1, d_model)))
    return found


def _link_map(link: Link, dtype: torch.dtype) -> AffineMap:
    weight = torch.diag_embed(link.weight) if link.diagonal else link.weight
    read = Rounded.stored(weight, dtype) if link.learned else Rounded.exact(weight)
    if link.bias is None:
        return AffineMap(read, Rounded.exact(torch.zeros(link.copies, link.d_out)))
    return AffineMap(read, Rounded.stored(link.bias, dtype))


def _then(one: AffineMap, two: AffineMap) -> AffineMap:
    copies = math.lcm(len(one.weight.numbers), len(two.weight.numbers))
    one = one.repeat(copies)
    two = two.repeat(copies)
    row = one.bias.reshape(copies, 1, -1) @ two.weight
    return AffineMap(one.weight @ two.weight, row.reshape(copies, -1).plus(two.bias))


class Cut(NamedTuple):
    """A layer with its chains cut after their last norms: the maps before, and the layer behind."""

    before: dict[str, Chain]
    behind: AttentionWeights


def cut_at_norms(weights: AttentionWeights) -> Cut:
    """Cut the chains of queries, keys and values after their last norm, in float64."""
    wide = weights.to(torch.float64)
    before: dict[str, Chain] = {}
    for side in ("q", "k", "v"):
        chain = wide.chain(side)
        last = max(
            (
                place
                for place, link in enumerate(chain[:-1], 1)
                if link.norm is not None
            ),
            default=0,
        )
        before[side] = chain[:last]
    return Cut(before, wide.behind_norms())


def with_channels(chain: Chain, order: Sequence[int]) -> Chain:
    """Put the channels of queries or keys in another order."""
    *first, last = chain
    index = torch.tensor(order)
    bias = None if last.bias is None else last.bias[..., index]
    return (*first, replace(last, weight=last.weight[..., index], bias=bias))
