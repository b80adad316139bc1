"""Positions: what tells a Transformer the order of its tokens.

Some are modules that add to the embeddings (`SinusoidalPositions`, `LearnedPositions`,
`NoPositions`), others records that act inside each attention layer (`Rotary`, `Alibi`).
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.algebra.function import Rotation

Pairing = Literal["halves", "interleaved"]
Layout = Literal["halves", "interleaved"]

_Tables = dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]]


class PositionIds(NamedTuple):
    """The positions of tokens, where they are not simply the next ones.

    Attributes:
        ids: the position of every token, or of all of them if there is one.
        end: above every id, known without looking at them.
        sharing: so many tokens share each position: key j has position j // sharing.
    """

    ids: Int[Tensor, " length"]
    end: int
    sharing: int = 1

    def of_keys(self, key_len: int) -> Int[Tensor, " key_len"]:
        """The position of every key."""
        keys = torch.arange(key_len, device=self.ids.device)
        return keys if self.sharing == 1 else keys // self.sharing

    @staticmethod
    def rows(start: "int | PositionIds", table: Tensor, length: int) -> Tensor:
        """The rows of a table at `length` positions from `start` on, or at the positions given."""
        if isinstance(start, PositionIds):
            return F.embedding(start.ids, table)
        return table[start : start + length]

    @staticmethod
    def end_of(start: "int | PositionIds", length: int) -> int:
        """A number above all these positions."""
        return start.end if isinstance(start, PositionIds) else start + length


def sinusoidal(length: int, d_model: int, layout: Layout = "interleaved") -> Float[Tensor, "length d_model"]:
    """The paper's fixed encoding, sines on even and cosines on odd channels.

        PE(pos, 2i) = sin(pos / 10000^(2i/d_model))    PE(pos, 2i+1) = cos(the same)

    Args:
        length: number of positions, from 0.
        d_model: number of channels; if odd, there is one sine more than cosines.
        layout: "interleaved" as above; "halves" has the same columns in another order, all sines
            before all cosines, as Marian has them.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.5; "halves": Junczys-Dowmunt et al.
    2018, Marian, as in `MarianSinusoidalPositionalEmbedding`, github.com/huggingface/transformers.
    """
    position = torch.arange(length, dtype=torch.float64)[:, None]
    frequency = torch.exp(torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10_000) / d_model))
    sines = torch.sin(position * frequency)
    cosines = torch.cos(position * frequency[: d_model // 2])
    if layout == "halves":
        return torch.cat([sines, cosines], dim=1)
    table = torch.empty(length, d_model, dtype=torch.float64)
    table[:, 0::2] = sines
    table[:, 1::2] = cosines
    return table


@final
class SinusoidalPositions(nn.Module):
    """Adds `sinusoidal` to embeddings; its table grows with the longest text seen, and is not saved."""

    table: Tensor

    def __init__(self, d_model: int, layout: Layout = "interleaved") -> None:
        """Start with an empty table.

        Args:
            d_model: width of the embeddings.
            layout: order of the channels; see `sinusoidal`.
        """
        super().__init__()
        self.d_model = d_model
        self.layout: Layout = layout
        self.register_buffer("table", torch.empty(0, d_model), persistent=False)

    def forward(
        self, x: Float[Tensor, "batch length d_model"], start: int | PositionIds = 0
    ) -> Float[Tensor, "batch length d_model"]:
        """Add the encodings of the positions from `start` on."""
        end = PositionIds.end_of(start, x.shape[1])
        if self.table.shape[0] < end or self.table.dtype != x.dtype or self.table.device != x.device:
            rows = max(256, 1 << (end - 1).bit_length())
            self.table = sinusoidal(rows, self.d_model, self.layout).to(device=x.device, dtype=x.dtype)
        return x + PositionIds.rows(start, self.table, x.shape[1])


@final
class LearnedPositions(nn.Module):
    """Adds a row learned for each position, of which there are only so many.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.5 and table 3, row E.
    """

    def __init__(self, max_tokens: int, d_model: int) -> None:
        """Make the rows.

        Args:
            max_tokens: number of positions, the length of the longest text that can be read.
            d_model: width of the embeddings.

        Raises:
            ValueError: no position at all.
        """
        super().__init__()
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}: at least one position is needed")
        self.weight = nn.Parameter(torch.empty(max_tokens, d_model))
        # The mean square of a sine is 1/2: beside embeddings of the same scale, these rows begin
        # with the weight that the sinusoidal ones have.
        nn.init.normal_(self.weight, std=math.sqrt(0.5))

    def forward(
        self, x: Float[Tensor, "batch length d_model"], start: int | PositionIds = 0
    ) -> Float[Tensor, "batch length d_model"]:
        """Add the rows of the positions from `start` on.

        Raises:
            ValueError: the text is longer than there are positions.
        """
        end = PositionIds.end_of(start, x.shape[1])
        if end > self.weight.shape[0]:
            raise ValueError(
                f"the text needs {end} positions and {self.weight.shape[0]} were learned: "
                "shorten it, or train with a larger max_tokens"
            )
        return x + PositionIds.rows(start, self.weight, x.shape[1])


@final
class NoPositions(nn.Module):
    """Adds nothing, where the attention itself knows positions, or the order shall not matter."""

    def forward(
        self, x: Float[Tensor, "batch length d_model"], start: int | PositionIds = 0
    ) -> Float[Tensor, "batch length d_model"]:
        """The embeddings as they are."""
        return x


class AttentionPositions(ABC):
    """A way to tell queries and keys apart by where they stand.

    A layer calls `turn` on its queries and keys and hands what `bias` gives to the operation; it
    need not know which of the two does nothing. A plain record, fit for a recipe: it has no
    parameters and nothing of it is saved.

    Attributes:
        scheme: the name that recipes and traits know it by.
        turns: whether `turn` does anything, so that W_QK alone no longer tells where a head looks.
    """

    scheme: ClassVar[Literal["rotary", "alibi"]]
    turns: ClassVar[bool]

    @abstractmethod
    def check(self, width: int) -> None:
        """Check that it can serve queries and keys of this width.

        Raises:
            ValueError: it cannot, with the numbers.
        """

    @abstractmethod
    def turn(
        self, heads: Float[Tensor, "batch heads length width"], start: int = 0
    ) -> Float[Tensor, "batch heads length width"]:
        """Queries or keys as they are at positions `start` to `start + length − 1`."""

    @abstractmethod
    def bias(
        self, num_heads: int, query_len: int, key_len: int, device: torch.device, dtype: torch.dtype
    ) -> Float[Tensor, "num_heads query_len key_len"] | None:
        """What is added to the scaled scores; None for nothing.

        The queries are the last `query_len` positions of the keys, as in `causal_mask`.
        """

    def rotation(self, width: int) -> Rotation | None:
        """How queries and keys of a width are rotated; None if they are not."""
        return None


@final
@dataclass(frozen=True)
class Rotary(AttentionPositions):
    """Turns pairs of channels by an angle proportional to the position.

    With m the position and f = 0 … rotary_dim/2 − 1 the pair,

        (a, b) → (a cos mθ_f − b sin mθ_f, a sin mθ_f + b cos mθ_f)    θ_f = base^(−2f/rotary_dim)

    so that the product of a turned query and a turned key depends on their distance only.

    Attributes:
        rotary_dim: how many channels of each head are turned, the first ones; all if None.
        pairing: "halves" pairs channel f with f + rotary_dim/2 (GPT-NeoX, Llama), "interleaved"
            2f with 2f + 1 (RoFormer, GPT-J). A permutation of channels turns one into the other.
        base: of the geometric row of frequencies.

    Source: Su et al. 2021, arXiv 2104.09864, section 3.4.2; a part of the channels: Black et al.
    2022, arXiv 2204.06745, section 2.1.
    """

    scheme = "rotary"
    turns = True

    rotary_dim: int | None = None
    pairing: Pairing = "halves"
    base: float = 10_000.0
    _tables: _Tables = field(default_factory=dict, init=False, repr=False, compare=False)

    def check(self, width: int) -> None:
        """Check that there are pairs of channels, and that they fit into a head.

        Raises:
            ValueError: an odd `rotary_dim`, one below 2 or above the width, or an odd width to be
                turned whole.
        """
        turned = width if self.rotary_dim is None else self.rotary_dim
        if turned < 2 or turned % 2:
            raise ValueError(
                f"rotary_dim is {turned}: it must be even and at least 2, channels turn in pairs"
            )
        if turned > width:
            raise ValueError(f"rotary_dim is {turned}, but queries and keys are {width} wide: it must fit")

    def turn(
        self, heads: Float[Tensor, "batch heads length width"], start: int = 0
    ) -> Float[Tensor, "batch heads length width"]:
        """Turn the heads; the products are taken in float32 at least, and rounded to the heads' dtype."""
        length, width = heads.shape[-2:]
        turned = width if self.rotary_dim is None else self.rotary_dim
        half = turned // 2
        cos, sin = self._rows(start, length, turned, heads.device, heads.dtype)
        if self.pairing == "halves":
            a, b = heads[..., :half], heads[..., half:turned]
            parts = [a * cos - b * sin, a * sin + b * cos]
        else:
            a, b = heads[..., 0:turned:2], heads[..., 1:turned:2]
            parts = [torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)]
        if turned < width:
            parts.append(heads[..., turned:])
        return torch.cat(parts, dim=-1).to(heads.dtype)

    def rotation(self, width: int) -> Rotation:
        planes = torch.arange(0, self.rotary_dim or width, 2, dtype=torch.float64)
        return Rotation(self.base ** (-planes / (self.rotary_dim or width)), self.pairing)

    def bias(
        self, num_heads: int, query_len: int, key_len: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Nothing is added to the scores."""

    def _rows(
        self, start: int, length: int, turned: int, device: torch.device, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        key = (turned, device, precise)
        end = start + length
        tables = self._tables.get(key)
        if tables is None or tables[0].shape[0] < end:
            rows = max(256, 1 << (end - 1).bit_length())
            # Angles in float64, rounded once: in float32 they would be off by 1e-3 at position 30,000.
            # Never as inference tensors: a translation may ask first, and training use them after it.
            with torch.inference_mode(False):
                frequency = self.base ** (-torch.arange(0, turned, 2, dtype=torch.float64) / turned)
                angle = torch.arange(rows, dtype=torch.float64)[:, None] * frequency
                tables = angle.cos().to(device, precise), angle.sin().to(device, precise)
            self._tables[key] = tables
        cos, sin = tables
        return cos[start:end], sin[start:end]


@final
@dataclass(frozen=True)
class Alibi(AttentionPositions):
    """Takes from each score its distance, times a slope of the head's own.

        score_ij − slope · |i − j|

    The distance counts in both directions: under a causal mask this is the paper's bias, without
    one its symmetric form for encoders.

    Source: Press, Smith & Lewis 2022, arXiv 2108.12409, section 3; numbers of heads that are no
    power of two: `get_slopes` in the authors' code, github.com/ofirpress/attention_with_linear_biases.
    """

    scheme = "alibi"
    turns = False

    def check(self, width: int) -> None:
        """Any width will do."""

    def turn(
        self, heads: Float[Tensor, "batch heads length width"], start: int = 0
    ) -> Float[Tensor, "batch heads length width"]:
        """The heads as they are."""
        return heads

    def bias(
        self, num_heads: int, query_len: int, key_len: int, device: torch.device, dtype: torch.dtype
    ) -> Float[Tensor, "num_heads query_len key_len"]:
        """−slope · |i − j| of every head, query and key."""
        # Not in bfloat16, which cannot count past 256.
        precise = torch.float64 if dtype == torch.float64 else torch.float32
        query = torch.arange(key_len - query_len, key_len, dtype=precise, device=device)
        key = torch.arange(key_len, dtype=precise, device=device)
        slopes = torch.tensor(alibi_slopes(num_heads), dtype=precise, device=device)
        return (-slopes[:, None, None] * (query[:, None] - key).abs()).to(dtype)


def alibi_slopes(num_heads: int) -> list[float]:
    """The slope of every head.

    For a power of two they are 2^(−8/h), 2^(−16/h), …, 2^−8. For another number, those of the power
    of two below it, and after them every other one, from the first, of the power of two above it.
    """
    below = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / below) for i in range(below)]
    return slopes + [2 ** (-4 * (i + 1) / below) for i in range(0, 2 * (num_heads - below), 2)]
