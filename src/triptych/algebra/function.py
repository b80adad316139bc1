"""What an attention layer computes, written out: its maps, and what stands between them and the softmax.

`AttentionWeights` says what may be done to a layer; with a `Scoring` beside it there is everything to
compute its output, slowly and in any dtype. That is how a reading of a checkpoint is checked against the
model that wrote it, and a rewrite against the original.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from triptych.algebra.weights import AttentionWeights, Chain, Side

Pairing = Literal["halves", "interleaved"]


@final
@dataclass(frozen=True, eq=False)
class HeadNorm:
    """A normalisation between a map and what reads it.

    Attributes:
        eps: added to the mean square.
        gain: `[width]`, or `[heads, width]` for a gain of each head's own; None for 1.
        shift: like `gain`; None for 0.
        centred: whether the mean is taken off first (LayerNorm), or not (RMSNorm).
        over: "head": each head by itself; "all heads": over the channels of all heads side by side, the gain
            `[heads · width]`.
        channels: how many channels are normalised, the first ones; all if None.
    """

    eps: float
    gain: Tensor | None = None
    shift: Tensor | None = None
    centred: bool = False
    over: Literal["head", "all heads"] = "head"
    channels: int | None = None

    @property
    def of_each_head(self) -> bool:
        """Whether heads have gains or shifts of their own."""
        return any(
            part is not None and (part.ndim > 1 or self.over == "all heads")
            for part in (self.gain, self.shift)
        )

    def __call__(self, x: Float[Tensor, "batch heads length width"]) -> Tensor:
        """Normalise."""
        if self.channels is not None and self.channels < x.shape[-1]:
            first, rest = x[..., : self.channels], x[..., self.channels :]
            return torch.cat([self._normalised(first), rest], dim=-1)
        return self._normalised(x)

    def _normalised(self, x: Tensor) -> Tensor:
        if self.over == "all heads":
            joined = x.transpose(1, 2).flatten(2)
            normal = self._scaled(joined, self.gain, self.shift)
            return normal.reshape(*normal.shape[:2], x.shape[1], x.shape[3]).transpose(1, 2)
        return self._scaled(x, _per_head(self.gain), _per_head(self.shift))

    def _scaled(self, x: Tensor, gain: Tensor | None, shift: Tensor | None) -> Tensor:
        if self.centred:
            x = x - x.mean(dim=-1, keepdim=True)
        x = x / (x.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()
        if gain is not None:
            x = x * gain.to(x.dtype)
        return x if shift is None else x + shift.to(x.dtype)


@final
@dataclass(frozen=True, eq=False)
class Rotation:
    """Rotary positions: plane f of a query or key at position m is turned by m θ_f.

    Attributes:
        frequencies: θ_f, one a plane.
        pairing: "halves" pairs channel f with f + number of planes, "interleaved" 2f with 2f + 1.
        start: the first channel of a head that is turned; the planes follow it.
        factor: what turned channels are multiplied by (YaRN's attention factor).
        places: the m of every position, one a plane, where it is not its number: rows for some planes and
            columns for the others, where positions are patches of a picture; 0 for tokens that do not turn.

    Source: Su et al. 2021, arXiv 2104.09864; Peng et al. 2023, arXiv 2309.00071.
    """

    frequencies: Float[Tensor, " planes"]
    pairing: Pairing = "halves"
    start: int = 0
    factor: float = 1.0
    places: Float[Tensor, "positions planes"] | None = None

    @property
    def pairs(self) -> tuple[list[int], list[int]]:
        """The first and the second channel of every plane."""
        count = len(self.frequencies)
        if self.pairing == "halves":
            first, step = range(self.start, self.start + count), count
        else:
            first, step = range(self.start, self.start + 2 * count, 2), 1
        return list(first), [channel + step for channel in first]

    def __call__(
        self, x: Float[Tensor, "batch heads length width"], positions: Int[Tensor, " length"]
    ) -> Tensor:
        """Turn."""
        planes = len(self.frequencies)
        end = self.start + 2 * planes
        before, turned, after = x[..., : self.start], x[..., self.start : end], x[..., end:]
        angles = self._places(positions) * self.frequencies.double()
        cos, sin = ((f * self.factor).to(x.dtype) for f in (angles.cos(), angles.sin()))
        if self.pairing == "halves":
            a, b = turned[..., :planes], turned[..., planes:]
            turned = torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)
        else:
            a, b = turned[..., 0::2], turned[..., 1::2]
            turned = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
        return torch.cat([before, turned, after], dim=-1)

    def reach(self, longest: int) -> Float[Tensor, " planes"]:
        """How far apart two of that many positions lie at most, for each plane."""
        if self.places is None:
            return torch.full_like(self.frequencies, longest)
        return self.places.amax(dim=0) - self.places.amin(dim=0)

    def _places(self, positions: Tensor) -> Tensor:
        if self.places is None:
            return positions.double()[:, None]
        _require_in_picture(positions, len(self.places))
        return self.places.double()[positions]


@final
@dataclass(frozen=True)
class Temperature:
    """Queries that count for more the further they stand in a text.

    That at position m is multiplied by 1 + strength · ln(1 + ⌊(m + first) / every⌋).

    Attributes:
        strength: of the growth.
        every: how many positions share a factor.
        first: the number of position m = 0.

    Source: Nakanishi 2025, arXiv 2501.19399; `modeling_llama4.py` and `modeling_ministral3.py` of
    github.com/huggingface/transformers, version 5.23.0.
    """

    strength: float
    every: float
    first: int = 0

    def __call__(
        self, q: Float[Tensor, "batch heads length width"], positions: Int[Tensor, " length"]
    ) -> Tensor:
        """Queries times their factors."""
        steps = ((positions.double() + self.first) / self.every).floor()
        return q * (1 + self.strength * steps.log1p()).to(q.dtype)[:, None]


class ScoreBias(ABC):
    """Numbers added to the scaled scores."""

    @abstractmethod
    def __call__(
        self,
        q: Float[Tensor, "batch heads query_len d_k"],
        k: Float[Tensor, "batch heads key_len d_k"],
        query_positions: Int[Tensor, " query_len"],
        key_positions: Int[Tensor, " key_len"],
    ) -> Tensor:
        """What is added, broadcasting to `[batch, heads, query_len, key_len]`."""


@final
@dataclass(frozen=True, eq=False)
class Slopes(ScoreBias):
    """ALiBi: a head's slope times how far the key lies from the query, taken off.

    Source: Press, Smith & Lewis 2022, arXiv 2108.12409.
    """

    slopes: Float[Tensor, " heads"]

    def __call__(self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """−slope · |i − j|."""
        distance = (query_positions[:, None] - key_positions).abs()
        return -self.slopes.to(q.dtype)[:, None, None] * distance.to(q.dtype)


@final
@dataclass(frozen=True, eq=False)
class DistanceTable(ScoreBias):
    """T5's: a learned number for each head and bucket of distances.

    Attributes:
        table: `[buckets, heads]`.
        both_ways: whether keys after the query have buckets of their own, half of them.
        max_distance: from where on all distances share the last bucket.

    Source: Raffel et al. 2020, arXiv 1910.10683, section 2.1.
    """

    table: Float[Tensor, "buckets heads"]
    both_ways: bool
    max_distance: int

    def __call__(self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """The table's entry for each distance."""
        distance = key_positions - query_positions[:, None]
        return self.table.to(q.dtype)[self._buckets(distance)].permute(2, 0, 1)

    def _buckets(self, distance: Tensor) -> Tensor:
        buckets, first = len(self.table), torch.zeros_like(distance)
        if self.both_ways:
            buckets //= 2
            first = (distance > 0) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        # Half of them count one by one, the others in equal ratios. In float32, as those who trained it did.
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return first + torch.where(distance < exact, distance, far)


@final
@dataclass(frozen=True, eq=False)
class PatchTable(ScoreBias):
    """BEiT's: a learned number for each head and distance in rows and columns between patches of a picture.

    Attributes:
        table: `[(2 rows − 1)(2 columns − 1) + 3, heads]`. The last three are for the token before the
            patches: from it to them, from them to it, and its own.
        rows: of patches.
        columns: of patches.

    Source: Bao et al. 2022, arXiv 2106.08254; `BeitRelativePositionBias` of
    github.com/huggingface/transformers.
    """

    table: Float[Tensor, "distances heads"]
    rows: int
    columns: int

    def __call__(self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """The table's entry for each pair of positions."""
        for positions in (query_positions, key_positions):
            _require_in_picture(positions, 1 + self.rows * self.columns)
        one, other = query_positions[:, None] - 1, key_positions - 1
        down = one // self.columns - other // self.columns + self.rows - 1
        right = one % self.columns - other % self.columns + self.columns - 1
        place = down * (2 * self.columns - 1) + right
        last = len(self.table)
        place = torch.where(one < 0, last - 3, place)
        place = torch.where(other < 0, last - 2, place)
        place = torch.where((one < 0) & (other < 0), last - 1, place)
        return self.table.to(q.dtype)[place].permute(2, 0, 1)


def _require_in_picture(positions: Tensor, count: int) -> None:
    """Raises ValueError for a position that is none of a picture's."""
    if len(positions) and int(positions.max()) >= count:
        raise ValueError(f"there are {len(positions)} positions, and a picture has {count}")


@final
@dataclass(frozen=True, eq=False)
class Disentangled(ScoreBias):
    """DeBERTa's: scores of content with the distance, and of the distance with content.

    Attributes:
        keys: of the distances, `[heads, 2 · span, d_k]`, read by queries; None if they are not.
        queries: of the distances, likewise, reading keys; None if they do not.
        span: number of buckets to each side.
        max_distance: the longest distance that has a bucket of its own kind; buckets are exact if None.
        scale: of both products.
        through_maps: whether the distances pass the layer's own maps of keys and queries, and not others.

    Source: He et al. 2021, arXiv 2006.03654, equation 4; buckets: github.com/microsoft/DeBERTa.
    """

    keys: Tensor | None
    queries: Tensor | None
    span: int
    max_distance: int | None
    scale: float
    through_maps: bool = False

    def __call__(self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor) -> Tensor:
        """Both parts."""
        distance = self._bucketed(query_positions[:, None] - key_positions)
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        total = torch.zeros(shape, dtype=q.dtype, device=q.device)
        if self.keys is not None:
            place = (distance + self.span).clamp(0, 2 * self.span - 1)
            total = total + (q @ self.keys.to(q.dtype).mT).gather(-1, place.expand(shape))
        if self.queries is not None:
            place = (self.span + distance).clamp(0, 2 * self.span - 1).mT
            of_keys = (k @ self.queries.to(q.dtype).mT).gather(
                -1, place.expand(*shape[:2], shape[3], shape[2])
            )
            total = total + of_keys.mT
        return total * self.scale

    def of_heads(self, kept: Sequence[int]) -> "Disentangled":
        """Of some heads, in some order."""
        keys, queries = (None if part is None else part[list(kept)] for part in (self.keys, self.queries))
        return replace(self, keys=keys, queries=queries)

    def _bucketed(self, distance: Tensor) -> Tensor:
        if self.max_distance is None:
            return distance
        middle = self.span // 2
        far = distance.abs().clamp(min=middle).float()
        ratio = torch.log(far / middle) / math.log((self.max_distance - 1) / middle)
        bucket = (torch.ceil(ratio * (middle - 1)) + middle).long() * distance.sign()
        return torch.where(distance.abs() <= middle, distance, bucket)


@final
@dataclass(frozen=True, eq=False)
class Scoring:
    """What a layer does besides its maps.

    Attributes:
        rotation: of queries and keys; None if there is none.
        bias: added to the scaled scores; None if nothing is.
        q_norm: of the queries, before they are turned; likewise `k_norm`.
        between: of a side's chain, the normalisation between its first and second map.
        soft_cap: c where scores s become c · tanh(s / c); None if they do not.
        sinks: a score for each head that takes part in the softmax and moves nothing; None without.
        window: how many keys up to its own position a query sees, at most, and as many from there on where
            later ones are seen; None for all.
        chunk: the text is cut into pieces of so many positions, and a query sees keys of its own piece; None
            for one piece.
        clip: what queries, keys and values are clipped to after their norms, ±; None if they are not.
        temperature: of queries, after they were turned; None if all count alike.
    """

    rotation: Rotation | None = None
    bias: ScoreBias | None = None
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    between: dict[Side, HeadNorm] = field(default_factory=dict)
    soft_cap: float | None = None
    sinks: Float[Tensor, " heads"] | None = None
    window: int | None = None
    chunk: int | None = None
    clip: float | None = None
    temperature: Temperature | None = None

    @property
    def num_positions(self) -> int | None:
        """How many positions there are: the tokens of a picture; None for texts, which have no end."""
        if isinstance(self.bias, PatchTable):
            return 1 + self.bias.rows * self.bias.columns
        return None if self.rotation is None or self.rotation.places is None else len(self.rotation.places)

    def of_heads(self, kept: Sequence[int]) -> "Scoring":
        """What it is where some heads are left, in some order: their sinks, and what distances are to them.

        Norms and other biases of each head's own stay as they are: the rewrites that leave heads out refuse
        these biases.
        """
        order = list(kept)
        sinks = None if self.sinks is None else self.sinks[order]
        bias = self.bias.of_heads(order) if isinstance(self.bias, Disentangled) else self.bias
        return replace(self, sinks=sinks, bias=bias)


def attend(
    weights: AttentionWeights,
    scoring: Scoring,
    x: Float[Tensor, "batch query_len d_model"],
    memory: Float[Tensor, "batch key_len d_memory"] | None = None,
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "batch query_len d_out"]:
    """The output of a layer, step by step, in the dtype of its maps.

    Args:
        weights: the maps; of their traits only `kind` counts here: "causal" hides what comes later.
        scoring: the rest.
        x: what queries are made of; keys and values too without a memory.
        memory: what keys and values are made of.
        mask: True = may attend, broadcasts to `[batch, heads, query_len, key_len]`.
    """
    q, k, v = channels(weights, scoring, x, memory)
    mixed = probabilities(weights, scoring, q, k, mask) @ of_heads(v, weights.num_heads)
    for link in weights.o:
        mixed = link.of_heads(weights.num_heads)(mixed)
    out = mixed.sum(dim=1)
    return out if weights.o_bias is None else out + weights.o_bias


class Channels(NamedTuple):
    """Queries of every head, keys and values of every key and value head, before positions turn them."""

    q: Float[Tensor, "batch heads query_len d_k"]
    k: Float[Tensor, "batch key_heads key_len d_k"]
    v: Float[Tensor, "batch value_heads key_len d_v"]


def channels(
    weights: AttentionWeights,
    scoring: Scoring,
    x: Float[Tensor, "batch query_len d_model"],
    memory: Float[Tensor, "batch key_len d_memory"] | None = None,
) -> Channels:
    """What the maps, and the norms after them, make of the inputs; arguments as those of `attend`."""
    y = x if memory is None else memory
    q = _through(weights, scoring, "q", x)
    k, v = _through(weights, scoring, "k", y), _through(weights, scoring, "v", y)
    q = q if scoring.q_norm is None else scoring.q_norm(q)
    k = k if scoring.k_norm is None else scoring.k_norm(k)
    if scoring.clip is not None:
        q, k, v = (t.clamp(-scoring.clip, scoring.clip) for t in (q, k, v))
    return Channels(of_heads(q, weights.num_heads), k, v)


def of_heads(t: Float[Tensor, "batch copies length width"], num_heads: int) -> Tensor:
    """Each copy once for every query head that reads it."""
    return t.repeat_interleave(num_heads // t.shape[1], dim=1)


def probabilities(
    weights: AttentionWeights,
    scoring: Scoring,
    q: Float[Tensor, "batch heads query_len d_k"],
    k: Float[Tensor, "batch key_heads key_len d_k"],
    mask: Bool[Tensor, "..."] | None = None,
) -> Float[Tensor, "batch heads query_len key_len"]:
    """How much each query takes from each key, from what `channels` gave; the mask as that of `attend`."""
    query_positions, key_positions = (torch.arange(t.shape[2], device=t.device) for t in (q, k))
    if scoring.rotation is not None:
        q, k = scoring.rotation(q, query_positions), scoring.rotation(k, key_positions)
    if scoring.temperature is not None:
        q = scoring.temperature(q, query_positions)
    k = of_heads(k, weights.num_heads)
    scores = q @ k.mT * weights.scale
    if scoring.bias is not None:
        scores = scores + scoring.bias(q, k, query_positions, key_positions)
    if scoring.soft_cap is not None:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    scores = scores.masked_fill(~_visible(weights, scoring, query_positions, key_positions, mask), -math.inf)
    if scoring.sinks is None:
        return scores.softmax(dim=-1)
    sinks = scoring.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:3], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]


def _through(weights: AttentionWeights, scoring: Scoring, side: Side, x: Tensor) -> Tensor:
    """A side's chain applied, `[batch, copies, length, width]`."""
    chain: Chain = weights.chain(side)
    x = x[:, None].to(weights.dtype)
    for place, link in enumerate(chain):
        if x.shape[1] not in (1, link.copies):
            x = x.repeat_interleave(max(1, link.copies // x.shape[1]), dim=1)
        x = link.of_heads(max(link.copies, x.shape[1]))(x)
        if place == 0 and side in scoring.between:
            x = scoring.between[side](x)
    return x


def _visible(
    weights: AttentionWeights, scoring: Scoring, queries: Tensor, keys: Tensor, mask: Tensor | None
) -> Tensor:
    seen = torch.ones(1, 1, len(queries), len(keys), dtype=torch.bool, device=queries.device)
    behind = queries[:, None] - keys
    if weights.traits.kind == "causal":
        seen = seen & (behind >= 0)
    if scoring.window is not None:
        seen = seen & (behind.abs() < scoring.window)
    if scoring.chunk is not None:
        seen = seen & (queries[:, None] // scoring.chunk == keys // scoring.chunk)
    return seen if mask is None else seen & mask


def _per_head(numbers: Tensor | None) -> Tensor | None:
    """`[heads, width]` as it is multiplied with `[batch, heads, length, width]`."""
    return numbers[:, None] if numbers is not None and numbers.ndim == 2 else numbers
