"""Position schemes inside attention: rotary embeddings of queries and keys, and biases of the scores."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar, Literal, final

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

Pairing = Literal["halves", "interleaved"]

_Tables = dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]]


def apply_rotary(
    x: Float[Tensor, "*batch length width"],
    cos: Float[Tensor, "*rows placed pairs"],
    sin: Float[Tensor, "*rows placed pairs"],
    pairing: Pairing = "halves",
    start: int = 0,
) -> Float[Tensor, "*batch length width"]:
    """Rotate pairs of channels (`RotaryEmbedding.pairs`): `(a, b) → (a cos − b sin, a sin + b cos)`."""
    # Channels before `start` and after the last pair stay unchanged.
    pairs = cos.shape[-1]
    end = start + 2 * pairs
    if pairing == "halves":
        a = x[..., start : start + pairs]
        b = x[..., start + pairs : end]
        parts = [a * cos - b * sin, a * sin + b * cos]
    else:
        a = x[..., start:end:2]
        b = x[..., start + 1 : end : 2]
        parts = [
            torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
        ]
    if start:
        parts.insert(0, x[..., :start])
    if end < x.shape[-1]:
        parts.append(x[..., end:])
    return torch.cat(parts, dim=-1).to(x.dtype)


@final
@dataclass(frozen=True, eq=False)
class OtherFrequencies:
    """A second rotation for all texts above a limit (LongRoPE).

    Source: Ding et al. 2024, arXiv 2402.13753.
    """

    grows = False  # True if every length has a separate rotation
    limit: int  # largest length in tokens with the plain rotation
    frequencies: Float[Tensor, " pairs"]  # θ_f of texts above the limit
    times: float = 1.0  # additional factor of rotated channels

    def rotation(self, plain: "RotaryEmbedding", length: int) -> "RotaryEmbedding":
        """Return the rotation of a text of `length` tokens, above the limit, given the plain rotation."""
        del length
        return replace(
            plain,
            frequencies=self.frequencies,
            factor=plain.factor * self.times,
            long=None,
        )


@final
@dataclass(frozen=True, eq=False)
class GrowingBase:
    """A base growing with the length L of the text (dynamic NTK).

    The base is b · (s L / limit − s + 1)^(n / (n − 2)) for n rotated channels.

    Source: "Dynamically Scaled RoPE", emozilla 2023, after "NTK-Aware Scaled RoPE", bloc97 2023;
    `_compute_dynamic_ntk_parameters` of github.com/huggingface/transformers.
    """

    grows = True
    limit: int  # largest length in tokens with the plain rotation
    base: float  # b, the base within the limit
    stretch: float  # s
    times: float = 1.0  # additional factor of rotated channels

    def rotation(self, plain: "RotaryEmbedding", length: int) -> "RotaryEmbedding":
        width = 2 * len(plain.frequencies)
        times = self.stretch * length / self.limit - (self.stretch - 1)
        powers = (
            torch.arange(
                0, width, 2, dtype=torch.float64, device=plain.frequencies.device
            )
            / width
        )
        frequencies = (self.base * times ** (width / (width - 2))) ** -powers
        return replace(
            plain, frequencies=frequencies, factor=plain.factor * self.times, long=None
        )


LongTexts = OtherFrequencies | GrowingBase


@final
@dataclass(frozen=True, eq=False)
class RotaryEmbedding:
    """Rotary embedding: pair f of a query or key at position m is rotated by the angle m θ_f.

    The product of a rotated query and a rotated key depends only on their distance, provided that their texts
    have the same length or lengths up to `limit`.

    Source: Su et al. 2021, arXiv 2104.09864, section 3.4.2; partial rotation: Black et al. 2022,
    arXiv 2204.06745, section 2.1; factor: Peng et al. 2023, arXiv 2309.00071.
    """

    frequencies: Float[Tensor, " pairs"]  # θ_f of every pair, in radians per position
    pairing: Pairing = "halves"  # channels of a pair; see `apply_rotary`
    start: int = 0  # first rotated channel of a head
    factor: float = 1.0  # factor of rotated channels (YaRN's attention factor)
    # `[positions, pairs]`: m of every position and pair, for patches of a picture. m is the patch's row for
    # some pairs and its column for the other pairs, and 0 for unrotated tokens. Default: the position itself.
    places: Float[Tensor, "positions pairs"] | None = None
    # Rotation of texts above a limit; None if all lengths have the same rotation. The length of a text is the
    # last position in a call plus one, and the length of a batch is the length of its longest text.
    long: LongTexts | None = None
    # True if decoding past the limit starts again from the first token of a text. If False, cached keys keep
    # their rotation.
    reads_again: bool = False
    _tables: _Tables = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    _of_long: "list[RotaryEmbedding]" = field(
        default_factory=list, init=False, repr=False, compare=False
    )

    @classmethod
    def of_width(
        cls, width: int, base: float = 10_000.0, pairing: Pairing = "halves"
    ) -> "RotaryEmbedding":
        """Return the rotation of the first `width` channels, with `θ_f = base^(−2f / width)`."""
        return cls(
            base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width), pairing
        )

    @property
    def pairs(self) -> tuple[list[int], list[int]]:
        """First and second channels of all pairs."""
        count = len(self.frequencies)
        if self.pairing == "halves":
            first = range(self.start, self.start + count)
            step = count
        else:
            first = range(self.start, self.start + 2 * count, 2)
            step = 1
        return list(first), [channel + step for channel in first]

    @property
    def limit(self) -> int | None:
        """Largest length in tokens with the plain rotation; None if all lengths have it."""
        return None if self.long is None else self.long.limit

    def of_length(self, length: int | None) -> "RotaryEmbedding":
        """Return the rotation of texts of a length; a length of None means within the limit."""
        if self.long is None or length is None or length <= self.long.limit:
            return self
        if self.long.grows:
            return self.long.rotation(self, length)
        if not self._of_long:
            self._of_long.append(self.long.rotation(self, length))
        return self._of_long[0]

    def __call__(
        self, x: Float[Tensor, "*batch length width"], position: int = 0
    ) -> Float[Tensor, "*batch length width"]:
        """Rotate queries or keys at consecutive positions from `position` to the end of the text.

        The products are computed in at least float32, and rounded to the dtype of `x`.
        """
        end = position + x.shape[-2]
        cos, sin = self.cos_sin(position, end, x.device, x.dtype)
        return apply_rotary(x, cos, sin, self.pairing, self.start)

    def at(
        self,
        x: Float[Tensor, "batch heads length width"],
        positions: Int[Tensor, "*rows placed"],
        end: int,
    ) -> Float[Tensor, "batch heads length width"]:
        """Rotate queries or keys at given positions; `end` is an upper bound above every position."""
        # `end` is an upper bound; above the limit the rotation depends on the exact length of the text.
        if self.long is not None and end > self.long.limit:
            end = int(positions.max()) + 1
        cos, sin = (
            F.embedding(positions, table)
            for table in self.cos_sin(0, end, x.device, x.dtype)
        )
        if positions.ndim == 2:
            cos = cos[:, None]
            sin = sin[:, None]
        return apply_rotary(x, cos, sin, self.pairing, self.start)

    def reach(self, longest: int) -> Float[Tensor, " pairs"]:
        """Return an upper bound of the distance between two of `longest` positions, for each pair."""
        if self.places is None:
            return torch.full_like(self.frequencies, longest)
        return self.places.amax(dim=0) - self.places.amin(dim=0)

    def cos_sin(
        self, begin: int, end: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Float[Tensor, "positions pairs"], Float[Tensor, "positions pairs"]]:
        """Return cosines and sines, times the factor, from position `begin` on in a text of `end` tokens."""
        if self.places is not None:
            _require_in_picture(end, len(self.places))
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        turned = self.of_length(end)
        if turned is not self:
            grows = (
                self.long is not None and self.long.grows
            )  # tables of one length: not cached
            return (turned._table if grows else turned.cos_sin)(
                begin, end, device, precise
            )
        tables = self._tables.get((device, precise))
        if tables is None or len(tables[0]) < end:
            tables = self._table(
                0, max(256, 1 << (end - 1).bit_length()), device, precise
            )
            self._tables[device, precise] = tables
        return tables[0][begin:end], tables[1][begin:end]

    def _table(
        self, begin: int, end: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        # Angles in float64, rounded once: in float32 the error would be 1e-3 at position 30,000.
        # Never inference tensors: training may use the tables of an earlier translation.
        with torch.inference_mode(False):
            frequencies = self.frequencies.double()
            places = self.places
            if places is None:
                places = torch.arange(
                    begin, end, dtype=torch.float64, device=frequencies.device
                )[:, None]
            angles = places.double() * frequencies
            cos = angles.cos() * self.factor
            sin = angles.sin() * self.factor
            return cos.to(device, dtype), sin.to(device, dtype)


class ScoreBias(ABC):
    """Base class of biases added to the scaled scores."""

    scheme: ClassVar[
        Literal["alibi", "relative", "disentangled"]
    ]  # name in reports and messages
    head_dims: ClassVar[
        Mapping[str, int]
    ]  # names of the tensors, with the dimension of heads
    learned: ClassVar[bool] = True
    reads_content: ClassVar[bool] = (
        False  # True if the bias depends on queries and keys
    )

    @abstractmethod
    def __call__(
        self,
        q: Float[Tensor, "batch heads query_len d_k"],
        k: Float[Tensor, "batch key_heads key_len d_k"],
        query_positions: Int[Tensor, "*rows query_len"],
        key_positions: Int[Tensor, "*columns key_len"],
    ) -> Tensor:
        """Compute the bias, broadcastable to `[batch, heads, query_len, key_len]`."""

    @property
    def num_heads(self) -> int:
        return next(
            tensor.shape[self.head_dims[name]]
            for name, tensor in self.tensors().items()
        )

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of `head_dims` by name, where they are set."""
        found = {name: getattr(self, name) for name in self.head_dims}
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def select_heads(self, kept: Sequence[int]) -> "ScoreBias":
        """Select the bias of some heads in a given order."""
        order = torch.tensor(kept)
        parts = {
            name: tensor.index_select(self.head_dims[name], order.to(tensor.device))
            for name, tensor in self.tensors().items()
        }
        return replace(self, **parts)  # type: ignore[type-var]


@final
@dataclass(frozen=True, eq=False)
class ALiBi(ScoreBias):
    """Linear biases: `score_ij − slope · |i − j|`, with a slope for each head.

    The distance counts in both directions: under a causal mask this is the paper's bias, and without a mask
    its symmetric form for encoders.

    Source: Press, Smith & Lewis 2022, arXiv 2108.12409, section 3.
    """

    scheme = "alibi"
    head_dims = MappingProxyType({"slopes": 0})
    learned = False
    slopes: Float[Tensor, " heads"]

    @classmethod
    def for_heads(cls, num_heads: int) -> "ALiBi":
        """Return a bias with the authors' slopes; see `alibi_slopes`."""
        return cls(torch.tensor(alibi_slopes(num_heads), dtype=torch.float64))

    def __call__(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> Tensor:
        # Not in bfloat16: it cannot represent every integer above 256.
        precise = torch.float64 if q.dtype == torch.float64 else torch.float32
        distance = distances(query_positions, key_positions).abs().to(precise)
        distance = distance[:, None] if distance.ndim == 3 else distance
        return (-self.slopes.to(q.device, precise)[:, None, None] * distance).to(
            q.dtype
        )


def alibi_slopes(num_heads: int) -> list[float]:
    """Return the slope of every head, as chosen by ALiBi's authors."""
    # Source: `get_slopes` in github.com/ofirpress/attention_with_linear_biases.
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    return slopes + [
        2 ** (-4 * (i + 1) / below) for i in range(0, 2 * (num_heads - below), 2)
    ]


@final
@dataclass(frozen=True, eq=False)
class RelativePositionBias(ScoreBias):
    """T5's bias: a learned value for each head and bucket of distances."""

    # Source: Raffel et al. 2020, arXiv 1910.10683, section 2.1.

    scheme = "relative"
    head_dims = MappingProxyType({"table": 1})
    table: Float[Tensor, "buckets heads"]
    both_ways: bool  # True if half of the buckets are for keys after the query
    max_distance: int  # distances from here on share the last bucket

    def __call__(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> Tensor:
        offset = -distances(query_positions, key_positions)
        return self.table.to(q.dtype)[self._buckets(offset)].movedim(-1, -3)

    def _buckets(self, offset: Tensor) -> Tensor:
        """Return the bucket, a row of the table, of each offset: key position − query position."""
        buckets = len(self.table)
        first = torch.zeros_like(offset)
        if self.both_ways:
            buckets //= 2
            first = (offset > 0) * buckets
            distance = offset.abs()
        else:
            distance = (-offset).clamp(min=0)
        # Half of the buckets are for single distances, and half for ranges of distances with equal ratios.
        # Logarithms in float32, as in the training of T5.
        exact = buckets // 2
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(
            self.max_distance / exact
        )
        far = (exact + (ratio * (buckets - exact)).long()).clamp(max=buckets - 1)
        return first + torch.where(distance < exact, distance, far)


@final
@dataclass(frozen=True, eq=False)
class PatchPositionBias(ScoreBias):
    """BEiT's bias: a learned value for each head and offset in rows and columns between patches of a picture.

    Source: Bao et al. 2022, arXiv 2106.08254; `BeitRelativePositionBias` of
    github.com/huggingface/transformers.
    """

    scheme = "relative"
    head_dims = MappingProxyType({"table": 1})
    # `[(2 rows − 1)(2 columns − 1) + 3, heads]`. The last three entries belong to the token before the
    # patches: from the token to patches, from patches to the token, and from the token to itself.
    table: Float[Tensor, "distances heads"]
    rows: int  # number of rows of patches
    columns: int  # number of columns of patches

    def __call__(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> Tensor:
        for positions in (query_positions, key_positions):
            if positions.numel():
                _require_in_picture(
                    int(positions.max()) + 1, 1 + self.rows * self.columns
                )
        one = query_positions[..., :, None] - 1
        other = key_positions[..., None, :] - 1
        down = one // self.columns - other // self.columns + self.rows - 1
        right = one % self.columns - other % self.columns + self.columns - 1
        entry = down * (2 * self.columns - 1) + right
        count = len(self.table)
        entry = torch.where(one < 0, count - 3, entry)
        entry = torch.where(other < 0, count - 2, entry)
        entry = torch.where((one < 0) & (other < 0), count - 1, entry)
        return self.table.to(q.dtype)[entry].movedim(-1, -3)


@final
@dataclass(frozen=True, eq=False)
class DisentangledBias(ScoreBias):
    """DeBERTa's bias: scores of queries with embedded distances, and of embedded distances with keys."""

    # Source: He et al. 2021, arXiv 2006.03654, equation 4; buckets: github.com/microsoft/DeBERTa.

    scheme = "disentangled"
    head_dims = MappingProxyType({"keys": 0, "queries": 0})
    reads_content = True
    # keys and queries of distances, `[heads, 2 · span, d_k]`; None without the scores that need them
    keys: Tensor | None
    queries: Tensor | None
    span: int  # number of buckets in each direction
    max_distance: (
        int | None
    )  # distances from here on share the last bucket; None for a bucket per distance
    scale: float  # factor of the two products
    through_maps: bool = (
        False  # True if embedded distances pass the layer's maps of keys and queries
    )

    def __call__(
        self, q: Tensor, k: Tensor, query_positions: Tensor, key_positions: Tensor
    ) -> Tensor:
        # Content to position: q_i · keys[δ(i − j)]. Position to content: k_j · queries[δ(i − j)], computed
        # with keys as rows and transposed.
        distance = self._bucketed(distances(query_positions, key_positions)).unsqueeze(
            -3
        )
        shape = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        total = torch.zeros(shape, dtype=q.dtype, device=q.device)
        if self.keys is not None:
            row = (distance + self.span).clamp(0, 2 * self.span - 1)
            total = total + (q @ self.keys.to(q.dtype).mT).gather(-1, row.expand(shape))
        if self.queries is not None:
            row = (self.span + distance).clamp(0, 2 * self.span - 1).mT
            own = (
                k
                if k.shape[1] == q.shape[1]
                else k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            )
            of_keys = (own @ self.queries.to(q.dtype).mT).gather(
                -1, row.expand(*shape[:2], shape[3], shape[2])
            )
            total = total + of_keys.mT
        return total * self.scale

    def _bucketed(self, distance: Tensor) -> Tensor:
        """Return the signed bucket of each distance, query position − key position."""
        if self.max_distance is None:
            return distance
        middle = self.span // 2
        far = distance.abs().clamp(min=middle).float()
        ratio = torch.log(far / middle) / math.log((self.max_distance - 1) / middle)
        bucket = (torch.ceil(ratio * (middle - 1)) + middle).long() * distance.sign()
        return torch.where(distance.abs() <= middle, distance, bucket)


def distances(
    queries: Int[Tensor, "*rows query_len"], keys: Int[Tensor, "*columns key_len"]
) -> Int[Tensor, "*pairs query_len key_len"]:
    """Return query position − key position of each query and key: positive for earlier keys."""
    return queries[..., None] - (keys if keys.ndim == 1 else keys[..., None, :])


def _require_in_picture(end: int, count: int) -> None:
    if end > count:
        raise ValueError(f"there are {end} positions, and a picture has {count}")
