"""Position encodings, and the positions of tokens.

`SinusoidalPositions`, `LearnedPositions` and `NoPositions` are modules on the embeddings. `RotaryPositions`
and `AlibiPositions` configure the attention layers.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.core.algebra.positions import ALiBi, Pairing, RotaryEmbedding
from triptych.core.algebra.semantics import Semantics
from triptych.core.attention.layer_cache import AttentionCache

SinusoidalLayout = Literal["halves", "interleaved", "tensor2tensor"]


class PositionIds(NamedTuple):
    """Explicit positions of tokens, instead of consecutive positions."""

    # position of every token: `[length]`, `[1]` for one position of all tokens, or `[batch, length]` if the
    # rows of a batch differ, as under padding on the left
    ids: Int[Tensor, "*rows length"]
    end: int  # upper bound above every id, known without reading the tensor
    # number of consecutive tokens with one position: key j has position j // sharing. If None, layers that
    # compare positions cache the positions of keys
    sharing: int | None = None

    def of_row(self, row: int, length: int) -> "PositionIds":
        """Select the positions of the first `length` tokens of one row of a batch."""
        ids = self.ids[row : row + 1] if self.ids.ndim == 2 else self.ids
        return self._replace(ids=ids[..., :length])

    def positions_of_first_keys(self, count: Any) -> Int[Tensor, " key_len"]:
        """Return the positions of the first `count` keys (a symbol in a traced model) of a text."""
        keys = torch.arange(count, device=self.ids.device)
        return keys if self.sharing in (None, 1) else keys // self.sharing

    @staticmethod
    def rows(
        start: "int | PositionIds",
        table: Float[Tensor, "positions width"],
        x: Float[Tensor, "*batch length d"],
    ) -> Float[Tensor, "*rows width"]:
        """Return the rows of a table at the positions of `x`: given positions, or positions from `start`."""
        if isinstance(start, PositionIds):
            return F.embedding(start.ids, table)
        return table[start : start + x.shape[-2]]

    @staticmethod
    def end_of(start: "int | PositionIds", x: Float[Tensor, "*batch length d"]) -> int:
        """Return an upper bound above all positions of `x`."""
        return start.end if isinstance(start, PositionIds) else start + x.shape[-2]


class TokenPositions(NamedTuple):
    """Positions of the tokens and of the keys of a call."""

    start: int  # position of the first token, without given positions
    given: PositionIds | None = None  # given positions of the tokens
    # positions of all keys, including cached keys; None if they follow from the number of keys
    keys: Int[Tensor, "*rows key_len"] | None = None

    @classmethod
    def after(
        cls, cache: AttentionCache | None, given: PositionIds | None
    ) -> "TokenPositions":
        """Build the positions of tokens after the tokens of a cache, if there is a cache."""
        own = (
            given.ids
            if cache is None and given is not None and given.sharing is None
            else None
        )
        return cls(0 if cache is None else cache.length, given, own)

    def piece(self, queries: slice, keys: slice) -> "TokenPositions":
        """Select given positions and key positions by slices; `start` stays unchanged."""
        given = self.given and self.given._replace(ids=self.given.ids[..., queries])
        return self._replace(
            given=given, keys=None if self.keys is None else self.keys[..., keys]
        )

    def add(
        self, cache: AttentionCache, new: tuple[Tensor, ...]
    ) -> "tuple[TokenPositions, tuple[Tensor, ...]]":
        """Append tokens to a cache, with their positions where the cache has to store them.

        Return the positions of all keys and all entries. Raise ValueError unless the cache and these tokens
        agree on having positions.
        """
        given = self.given
        keeps = given is not None and given.sharing is None
        try:
            if given is None or not keeps:
                return self, cache.append(new)
            batch, _, length, _ = new[0].shape
            *held, keys = cache.append(
                (*new, given.ids.expand(batch, length)[:, None, :, None])
            )
        except ValueError:  # the number of entries differs from that of the cache
            which = (
                "without positions and these have some"
                if keeps
                else "with positions and these have none"
            )
            raise ValueError(
                f"the tokens in the cache came {which}: give them for all, or for none"
            ) from None
        return self._replace(keys=keys[:, 0, :, 0]), tuple(held)

    def rotate(self, x: Tensor, rotary: RotaryEmbedding) -> Tensor:
        """Rotate queries or keys of the tokens, `[batch, heads, length, width]`, by their positions."""
        if self.given is None:
            return rotary(x, self.start)
        return rotary.at(x, self.given.ids, self.given.end)

    def of_keys(self, k: Tensor) -> "TokenPositions":
        """Return the positions of all keys, including cached keys, as positions of tokens."""
        given = self.given
        if given is None:
            return TokenPositions(0)
        if self.keys is not None:
            return TokenPositions(0, PositionIds(self.keys, max(given.end, k.shape[2])))
        # A cache of fixed size may be longer than its text: positions after it are clamped below `end`.
        return TokenPositions(
            0, PositionIds(self.key_positions(k).clamp(max=given.end - 1), given.end)
        )

    def query_positions(self, x: Tensor) -> Tensor:
        """Return the position of every token."""
        if self.given is None:
            return torch.arange(self.start, self.start + x.shape[2], device=x.device)
        return self.given.ids

    def key_positions(self, k: Tensor) -> Tensor:
        """Return the position of every key."""
        if self.keys is not None:
            return self.keys
        if self.given is None:
            return torch.arange(k.shape[2], device=k.device)
        return self.given.positions_of_first_keys(k.shape[2])


def sinusoidal(
    length: int, d_model: int, layout: SinusoidalLayout = "interleaved"
) -> Float[Tensor, "length d_model"]:
    """Compute the paper's fixed encoding in float64.

        PE(pos, 2i) = sin(pos / 10000^(2i/d_model))    PE(pos, 2i+1) = cos(the same)

    "interleaved" is this formula. "halves" has all sines before all cosines. "tensor2tensor" has them in
    halves as well, with the exponent i / (d_model / 2 − 1).

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.5; "halves": Junczys-Dowmunt et al.
    2018, Marian, as in `MarianSinusoidalPositionalEmbedding`, github.com/huggingface/transformers;
    "tensor2tensor": `M2M100SinusoidalPositionalEmbedding` there.
    """
    # In float64, rounded once by the caller.
    position = torch.arange(length, dtype=torch.float64)[:, None]
    if layout == "tensor2tensor":
        half = d_model // 2
        steps = torch.arange(half, dtype=torch.float64) / max(half - 1, 1)
        angles = position * torch.exp(-math.log(10_000) * steps)
        return F.pad(torch.cat([angles.sin(), angles.cos()], dim=1), (0, d_model % 2))
    frequency = torch.exp(
        torch.arange(0, d_model, 2, dtype=torch.float64) * (-math.log(10_000) / d_model)
    )
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
    """Sinusoidal positions added to embeddings; the table grows with the longest text and is not saved."""

    table: Tensor

    def __init__(self, d_model: int, layout: SinusoidalLayout = "interleaved") -> None:
        """Create the module with an empty table."""
        super().__init__()
        self.d_model = d_model
        self.layout: SinusoidalLayout = layout
        self.register_buffer("table", torch.empty(0, d_model), persistent=False)

    def forward(
        self, x: Float[Tensor, "batch length d_model"], start: int | PositionIds = 0
    ) -> Float[Tensor, "batch length d_model"]:
        """Add the encodings at positions from `start` on, or at given positions."""
        end = PositionIds.end_of(start, x)
        if (
            self.table.shape[0] < end
            or self.table.dtype != x.dtype
            or self.table.device != x.device
        ):
            rows = max(256, 1 << (end - 1).bit_length())
            self.table = sinusoidal(rows, self.d_model, self.layout).to(
                device=x.device, dtype=x.dtype
            )
        return x + PositionIds.rows(start, self.table, x)


@final
class LearnedPositions(nn.Module):
    """Learned positions added to embeddings: a row per position, up to a fixed number of positions.

    Source: Vaswani et al. 2017, arXiv 1706.03762, section 3.5 and table 3, row E.
    """

    def __init__(self, max_tokens: int, d_model: int) -> None:
        """Draw the rows."""
        super().__init__()
        if max_tokens < 1:
            raise ValueError(
                f"max_tokens is {max_tokens}: at least one position is needed"
            )
        self.weight = nn.Parameter(torch.empty(max_tokens, d_model))
        # The mean square of a sine is 1/2: learned rows begin as large as sinusoidal rows.
        nn.init.normal_(self.weight, std=math.sqrt(0.5))

    def forward(
        self, x: Float[Tensor, "batch length d_model"], start: int | PositionIds = 0
    ) -> Float[Tensor, "batch length d_model"]:
        """Add the rows at positions from `start` on, or at given positions; ValueError for longer texts."""
        end = PositionIds.end_of(start, x)
        if end > self.weight.shape[0]:
            raise ValueError(
                f"the text needs {end} positions and {self.weight.shape[0]} were learned: "
                "shorten it, or train with a larger max_tokens"
            )
        return x + PositionIds.rows(start, self.weight, x)


@final
class NoPositions(nn.Module):
    """The identity, for positions inside the attention or a model without positions."""

    def forward(
        self, x: Float[Tensor, "batch length d_model"], start: int | PositionIds = 0
    ) -> Float[Tensor, "batch length d_model"]:
        return x


@final
@dataclass(frozen=True)
class RotaryPositions:
    """Configuration of `RotaryEmbedding` with frequencies `base^(−2f / rotary_dim)`.

    Attributes:
        rotary_dim: number of rotated channels of each head, from the first; all if None.
        pairing: channels of a pair; see `apply_rotary`.
        base: base of the geometric sequence of frequencies.
    """

    rotary_dim: int | None = None
    pairing: Pairing = "halves"
    base: float = 10_000.0

    def check(self, width: int) -> None:
        """Check that the rotated channels form pairs and fit into a head.

        Raises:
            ValueError: `rotary_dim`, or the width if all channels are rotated, is odd or below 2, or
                `rotary_dim` exceeds the width.
        """
        rotated = width if self.rotary_dim is None else self.rotary_dim
        if rotated < 2 or rotated % 2:
            raise ValueError(
                f"rotary_dim is {rotated}: it must be even and at least 2, channels turn in pairs"
            )
        if rotated > width:
            raise ValueError(
                f"rotary_dim is {rotated}, but queries and keys are {width} wide: it must fit"
            )

    def added_to(self, semantics: Semantics, width: int, num_heads: int) -> Semantics:
        """Add the rotary embedding to the semantics of a layer, for queries and keys of this width."""
        rotary = RotaryEmbedding.of_width(
            self.rotary_dim or width, self.base, self.pairing
        )
        return replace(semantics, rotary=rotary)


@final
@dataclass(frozen=True)
class AlibiPositions:
    """Configuration of `ALiBi` with the slopes of its authors."""

    def added_to(self, semantics: Semantics, width: int, num_heads: int) -> Semantics:
        """Add the bias to the semantics of a layer."""
        return replace(semantics, bias=ALiBi.for_heads(num_heads))


# Position encodings inside self-attention.
AttentionPositions = RotaryPositions | AlibiPositions
