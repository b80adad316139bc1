"""`Semantics`: the computation of an attention layer besides its maps.

Layers, checkpoints, the plain formula (`function.py`), the legality of rewrites, costs and decoding read this
record. Code ignoring a field has to check that the field is unset.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from triptych.core.algebra.positions import (
    PatchPositionBias,
    RotaryEmbedding,
    ScoreBias,
    distances,
)

Kind = Literal["self", "causal", "cross"]
HeadSide = Literal["q", "k", "v"]
# Maps the number of heads or groups with separate maps to the indices to keep, in order.
CopiesLeft = Callable[[int], Sequence[int]]


@final
@dataclass(frozen=True, eq=False)
class HeadNorm:
    """A normalisation of the output of a map, such as QK-norm.

    Attributes:
        eps: constant added to the mean square.
        weight: stored weight, `[width]`, or `[heads, width]` with a row for each head or group of heads; the
            width is 1 for a gain of all channels, and `channels` where some channels are not normalised. The
            gain is `weight + offset`. Default: a gain of 1.
        bias: shift, with the shapes of `weight`. Default: 0.
        centred: True to subtract the mean first (LayerNorm), False for RMSNorm.
        over: "head" to normalise each head separately, "all heads" to normalise the channels of all heads
            together, with a weight `[heads · width]`.
        channels: number of leading channels to normalise. Default: all channels.
        turned: True if the weight, `[width]`, is applied after the rotary rotation (`apply_late_gain`).
        offset: constant added to the weight: 1 for a stored `w` of `1 + w`. The norm adds it in at least
            float32, so that small stored values are not lost.
    """

    eps: float
    weight: Tensor | None = None
    bias: Tensor | None = None
    centred: bool = False
    over: Literal["head", "all heads"] = "head"
    channels: int | None = None
    turned: bool = False
    offset: float = 0.0

    @property
    def per_head(self) -> bool:
        """True if heads have separate weights or biases."""
        return any(
            part is not None and (part.ndim > 1 or self.over == "all heads")
            for part in (self.weight, self.bias)
        )

    def num_copies(self, width: int) -> int:
        """Count the heads, or groups of heads, with separate parameters; 1 for parameters of all heads."""
        parts = self.tensors().values()
        if self.over == "all heads":
            return max((len(part) // width for part in parts), default=1)
        return max((len(part) for part in parts if part.ndim > 1), default=1)

    @property
    def structure(self) -> tuple[object, ...]:
        """Settings and shapes, without the values of weight and bias."""
        shapes = {name: tensor.shape for name, tensor in self.tensors().items()}
        return (
            self.eps,
            self.centred,
            self.over,
            self.channels,
            self.turned,
            self.offset,
            shapes,
        )

    def __call__(self, x: Float[Tensor, "batch heads length width"]) -> Tensor:
        if self.channels is not None and self.channels < x.shape[-1]:
            first = x[..., : self.channels]
            rest = x[..., self.channels :]
            return torch.cat([self._apply(first), rest], dim=-1)
        return self._apply(x)

    def apply_late_gain(self, x: Float[Tensor, "batch heads length width"]) -> Tensor:
        """Multiply rotated queries or keys by the gain, if it is applied after the rotation."""
        if not self.turned or self.weight is None:
            return x
        missing = x.shape[-1] - len(self.weight)
        gain = self.gain(torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        return x * torch.nn.functional.pad(gain, (0, missing), value=1.0)

    def gain(self, dtype: torch.dtype) -> Tensor:
        """Return the gain of each channel; the weight must be set."""
        assert self.weight is not None
        weight = self.weight.to(dtype)
        return weight + self.offset if self.offset else weight

    def tensors(self) -> dict[str, Tensor]:
        """Return weight and bias by name, where they are set."""
        parts = {"weight": self.weight, "bias": self.bias}
        return {name: part for name, part in parts.items() if part is not None}

    def select_copies(self, left: CopiesLeft, copies: int, width: int) -> "HeadNorm":
        """Select heads with their separate parameters from heads of a given width."""

        def select(own: Tensor) -> Tensor:
            each = (
                own
                if len(own) == copies
                else own.repeat_interleave(copies // len(own), dim=0)
            )
            return select_rows(each, list(left(copies)))

        return self.with_own(width, select) if self.per_head else self

    def with_own(self, width: int, change: Callable[[Tensor], Tensor]) -> "HeadNorm":
        """Change weight and bias that differ between heads, given to `change` as `[heads, width]`."""

        def changed(part: Tensor) -> Tensor:
            if self.over == "all heads":
                return change(part.view(-1, width)).flatten()
            return change(part) if part.ndim > 1 else part

        parts: dict[str, Any] = {
            name: changed(part) for name, part in self.tensors().items()
        }
        return replace(self, **parts)

    def _apply(self, x: Tensor) -> Tensor:
        """Normalise all channels of x; a late gain is left out."""
        wide = torch.promote_types(x.dtype, torch.float32)
        plain = self.turned or self.weight is None
        weight = self._for_heads_of(x, None if plain else self.gain(wide))
        bias = self._for_heads_of(x, self.bias)
        if self.over == "all heads":
            normal = self._normalise_rows(x.transpose(1, 2).flatten(2), weight, bias)
            return normal.reshape(*normal.shape[:2], x.shape[1], x.shape[3]).transpose(
                1, 2
            )
        return self._normalise_rows(x, weight, bias)

    def _for_heads_of(self, x: Tensor, part: Tensor | None) -> Tensor | None:
        """Repeat the rows of a weight or bias for the heads of x, `[batch, heads, length, width]`."""
        if part is None:
            return None
        heads = x.shape[1]
        width = x.shape[3]
        if self.over == "all heads":
            times = heads * width // len(part)
            return (
                part
                if times == 1
                else part.view(-1, width).repeat_interleave(times, dim=0).flatten()
            )
        if part.ndim == 1:
            return part
        return (
            part.repeat_interleave(heads // len(part), dim=0)
            if len(part) < heads
            else part
        )[:, None]

    def _normalise_rows(
        self, x: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.promote_types(dtype, torch.float32))
        if self.centred:
            x = x - x.mean(dim=-1, keepdim=True)
        x = x / (x.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()
        if weight is not None:
            x = x * weight.to(x.dtype)
        return (x if bias is None else x + bias.to(x.dtype)).to(dtype)


def same_norm_structure(one: HeadNorm | None, other: HeadNorm | None) -> bool:
    """Return True if two norms differ only in the values of their parameters, or are both None."""
    return (None if one is None else one.structure) == (
        None if other is None else other.structure
    )


@final
@dataclass(frozen=True, eq=False)
class HeadGate:
    """A gate on the output of each head: `σ(x w_i + b_i)`, between 0 and 1, where x is the query's input.

    There is a gate per head, or per channel of the values. In differential attention the first head of a pair
    is ungated, and the gated output of the second head is subtracted from it.
    """

    # Sources: Qiu et al. 2025, arXiv 2505.06708, gates per head or channel, after the attention operation.
    # Ye et al. 2026, Differential Transformer V2 (huggingface.co/blog/microsoft/diff-attn-v2), pairs.

    # `[heads, d_model]`, or `[heads, d_v, d_model]`; rows of gated heads only
    weight: Float[Tensor, "*gates d_model"]
    bias: Float[Tensor, "*gates"] | None = None
    whole: tuple[
        bool, ...
    ] = ()  # ungated heads of differential pairs; their partners' gates are negated

    @property
    def num_heads(self) -> int:
        return len(self.whole) or self.weight.shape[0]

    @property
    def per_channel(self) -> bool:
        """True if each channel of a head's values has a separate gate."""
        return self.weight.ndim == 3

    @property
    def num_parameters(self) -> int:
        """Number of parameters of all heads."""
        return sum(part.numel() for part in self.tensors().values())

    @property
    def flops(self) -> int:
        """Floating-point operations of all heads for one token."""
        return 2 * self.weight.numel()

    def __call__(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> Float[Tensor, "batch heads length channels"]:
        bias = None if self.bias is None else self.bias.flatten().to(x.dtype)
        weight = self.weight.reshape(-1, self.weight.shape[-1]).to(x.dtype)
        return self.of_shares(torch.nn.functional.linear(x, weight, bias).sigmoid())

    def of_shares(
        self, shares: Float[Tensor, "batch length gates"]
    ) -> Float[Tensor, "batch heads length channels"]:
        """Arrange the sigmoids of gates by head, with 1 for ungated heads and a minus for their partners."""
        heads = (len(self.weight), -1)
        of_heads: Tensor = shares.unflatten(-1, heads).transpose(1, 2)  # type: ignore[no-untyped-call]
        if not self.whole:
            return of_heads
        negative = iter(of_heads.neg().unbind(1))
        one = torch.ones_like(of_heads[:, 0])
        return torch.stack(
            [one if whole else next(negative) for whole in self.whole], dim=1
        )

    def _gated(self, heads: Iterable[int]) -> list[int]:
        return [head for head in heads if not self.whole or not self.whole[head]]

    def tensors(self) -> dict[str, Tensor]:
        """Return the weight, and the bias if set, by name."""
        return (
            {"weight": self.weight}
            if self.bias is None
            else {"weight": self.weight, "bias": self.bias}
        )

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "HeadGate":
        """Replace weight and bias by name."""
        return replace(self, weight=tensors["weight"], bias=tensors.get("bias"))

    def reading(
        self, gain: Float[Tensor, " d_model"], shift: Float[Tensor, " d_model"] | None
    ) -> "HeadGate":
        """Fold gain and shift of a norm into the gate, which then reads x instead of `gain ∘ x + shift`."""
        wide = self.weight.double()
        bias = self.bias
        if shift is not None:
            moved = wide @ shift.double()
            bias = (moved if bias is None else bias.double() + moved).to(
                self.weight.dtype
            )
        return replace(
            self, weight=(wide * gain.double()).to(self.weight.dtype), bias=bias
        )

    def select_heads(self, order: Sequence[int]) -> "HeadGate | None":
        """Select the gates of some heads in a given order; None if all of these heads are ungated."""
        rows = {
            head: row for row, head in enumerate(self._gated(range(self.num_heads)))
        }
        chosen = [rows[head] for head in self._gated(order)]
        if not chosen:
            return None
        whole = tuple(self.whole[head] for head in order) if self.whole else ()
        gate = self.with_tensors(
            {name: select_rows(part, chosen) for name, part in self.tensors().items()}
        )
        return replace(gate, whole=whole)


@final
@dataclass(frozen=True)
class Temperature:
    """Scaling of queries with their position in a text.

    The query at position m is multiplied by 1 + strength · ln(1 + ⌊(m + first) / every⌋).

    Source: Nakanishi 2025, arXiv 2501.19399; `modeling_llama4.py` and `modeling_ministral3.py` of
    github.com/huggingface/transformers, version 5.23.0.
    """

    strength: float  # factor of the logarithm
    every: float  # number of positions with the same factor
    first: int = (
        0  # offset added to the position: 1 if the formula counts positions from 1
    )

    def __call__(
        self,
        q: Float[Tensor, "batch heads length width"],
        positions: Int[Tensor, "*rows placed"],
    ) -> Tensor:
        steps = ((positions.double() + self.first) / self.every).floor()
        return q * (1 + self.strength * steps.log1p()).to(q.dtype).unsqueeze(
            -2
        ).unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class Scores(ABC):
    """Scores of queries and keys other than their scaled product. `Semantics.scale` is not applied to them.

    Fields are learned tensors with heads in the first dimension.

    Attributes:
        name: name in recipes; `FILE.py:CLASS` for a class in a user's file.
        no_rotary: reason against rotary positions with these scores; "" if they fit.
    """

    name: ClassVar[str] = ""
    no_rotary: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def drawn(cls, num_heads: int, d_k: int) -> "Scores":
        """Return new scores with random parameters."""

    @abstractmethod
    def __call__(
        self,
        q: Float[Tensor, "batch heads query_len d_k"],
        k: Float[Tensor, "batch heads key_len d_k"],
    ) -> Float[Tensor, "batch heads query_len key_len"]:
        """Compute the score of every query with every key."""

    @property
    def num_heads(self) -> int:
        return next((len(part) for part in self.tensors().values()), 0)

    def tensors(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def select_heads(self, order: Sequence[int]) -> "Scores":
        """Select the scores of some heads in a given order."""
        return replace(
            self, **{name: part[list(order)] for name, part in self.tensors().items()}
        )


@final
@dataclass(frozen=True, eq=False)
class AdditiveScores(Scores):
    """Additive scores `v_i · tanh(q + k)`, with a vector v_i for each head."""

    # Source: Bahdanau et al. 2015, arXiv 1409.0473, with W^Q and W^K as the maps of queries and keys.

    name = "additive"
    no_rotary = (
        "rotary positions turn queries and keys so that their product tells distances, and additive scores "
        "are no product"
    )

    weight: Float[Tensor, "heads d_k"]

    @classmethod
    def drawn(cls, num_heads: int, d_k: int) -> "AdditiveScores":
        return cls(torch.randn(num_heads, d_k) / d_k**0.5)

    def __call__(self, q: Tensor, k: Tensor) -> Tensor:
        met = torch.tanh(q[:, :, :, None] + k[:, :, None])
        return torch.einsum("bhnmd,hd->bhnm", met, self.weight.to(met.dtype))


@final
@dataclass(frozen=True, eq=False)
class Semantics:
    """Computation of an attention layer besides its maps; optional fields are None if unused."""

    scale: float  # factor of the products of queries and keys
    kind: Kind = "self"  # one sequence, one causally masked sequence, or queries and keys of two sequences
    # norms of queries and keys before their rotation (QK-norm), and of values
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: HeadNorm | None = None
    clip: float | None = (
        None  # queries, keys and values are clipped to ±clip after their norms
    )
    rotary: RotaryEmbedding | None = None  # rotation of queries and keys
    temperature: Temperature | None = None  # scaling of queries after their rotation
    bias: ScoreBias | None = None  # added to the scaled scores
    soft_cap: float | None = None  # c of scores c · tanh(s / c)
    # A query sees keys at distances below `window`, in both directions where later keys are visible.
    window: int | None = None
    # The text is split into chunks of this many positions; a query sees keys of the same chunk.
    chunk: int | None = None
    # an additional entry of the softmax for each head, without a value
    sinks: Float[Tensor, " heads"] | None = None
    dropout: float = 0.0  # current dropout probability of attention weights
    gate: HeadGate | None = None  # factors of the outputs of heads
    scores: Scores | None = (
        None  # scores that replace scaled products of queries and keys
    )

    @property
    def positions(
        self,
    ) -> Literal["none", "rotary", "alibi", "relative", "disentangled"]:
        """Name of the layer's position scheme."""
        if self.rotary is not None:
            return "rotary"
        return "none" if self.bias is None else self.bias.scheme

    def apply_late_gains(self, q: Tensor) -> Tensor:
        """Multiply rotated queries by the gains applied after rotation.

        The gain of a key norm is applied to queries, too: the scores are the same.
        """
        for norm in (self.q_norm, self.k_norm):
            q = q if norm is None else norm.apply_late_gain(q)
        return q

    @property
    def qk_norm(self) -> bool:
        """True if queries or keys are normalised before their product."""
        return self.q_norm is not None or self.k_norm is not None

    @property
    def is_local(self) -> bool:
        """True if queries see only nearby keys, by a window or chunks."""
        return self.window is not None or self.chunk is not None

    def beyond(self, held: Collection[str]) -> list[str]:
        """Describe in words the fields outside `held` with values other than their defaults.

        Callers name the fields they handle, so a new field of this class is always described.
        """
        found = []
        for each in fields(self):
            if each.name not in held and not _is_default(
                getattr(self, each.name), each.default
            ):
                found.append(_IN_WORDS.get(each.name, each.name).format(self.positions))
        return list(dict.fromkeys(found))

    def visible(
        self,
        queries: Int[Tensor, "*rows query_len"],
        keys: Int[Tensor, "*columns key_len"],
    ) -> Bool[Tensor, "*seen query_len key_len"] | None:
        """Return the mask of keys visible by window and chunk, without causality; None without both.

        The shape is `[batch, 1, query_len, key_len]` for positions `[batch, length]`.
        """
        seen = None
        if self.window is not None:
            seen = distances(queries, keys).abs() < self.window
        if self.chunk is not None:
            same = distances(queries // self.chunk, keys // self.chunk) == 0
            seen = same if seen is None else seen & same
        return seen[:, None] if seen is not None and seen.ndim == 3 else seen

    @property
    def num_positions(self) -> int | None:
        """Number of positions of a picture: its tokens. None for texts of any length."""
        if isinstance(self.bias, PatchPositionBias):
            return 1 + self.bias.rows * self.bias.columns
        return (
            None
            if self.rotary is None or self.rotary.places is None
            else len(self.rotary.places)
        )

    def select_heads(self, kept: Sequence[int]) -> "Semantics":
        """Select heads in a given order, for computed queries, keys and values.

        Norms stay unchanged: they are applied earlier.
        """
        order = list(kept)
        found = {
            name: _select_heads_of(part, order)
            for name, part in self._parts_of_heads().items()
            if not isinstance(part, HeadNorm)
        }
        return replace(self, **found) if found else self

    def select_copies(
        self,
        left: CopiesLeft,
        num_heads: int,
        sides: Mapping[HeadSide, tuple[int, int]],
    ) -> "Semantics":
        """Select heads with their separate parameters.

        `sides` maps queries, keys and values to their number and width.
        """
        found: dict[str, Any] = {}
        for name, part in self._parts_of_heads().items():
            if isinstance(part, HeadNorm):
                found[name] = part.select_copies(left, *sides[HEADS_OF[name]])
            else:
                found[name] = _select_heads_of(part, list(left(num_heads)))
        return replace(self, **found) if found else self

    def require_heads(
        self, num_heads: int, sides: Mapping[HeadSide, tuple[int, int]]
    ) -> None:
        """Raise ValueError unless the parameters fit these heads; with the arguments of `select_copies`."""
        for name, part in self._parts_of_heads().items():
            if isinstance(part, HeadNorm):
                copies, width = sides[HEADS_OF[name]]
                found = part.num_copies(width)
                fits = copies % found == 0
            else:
                copies = num_heads
                found = len(part) if isinstance(part, Tensor) else part.num_heads
                fits = found == copies
            if not fits:
                words = _IN_WORDS[name].format(self.positions)
                raise ValueError(
                    f"{words}: there are numbers for {found} heads, and {copies} heads"
                )

    def _parts_of_heads(self) -> dict[str, Any]:
        """Return the fields with separate parameters per head, where they are set."""
        parts = {name: getattr(self, name) for name in HEADS_OF}
        return {name: part for name, part in parts.items() if part is not None}

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors of norms, biases, sinks, gates and scores."""
        yield from self.learned().values()
        if self.bias is not None and not self.bias.learned:
            yield from self.bias.tensors().values()

    def learned(self) -> dict[str, Tensor]:
        """Return parameters besides the maps by name, such as `q_norm_weight`, `bias_table` or `sinks`."""
        found: dict[str, Tensor] = {}
        for name, part in self._parts_of_heads().items():
            if isinstance(part, Tensor):
                found[name] = part
            elif not isinstance(part, ScoreBias) or part.learned:
                found |= {
                    f"{name}_{own}": tensor for own, tensor in part.tensors().items()
                }
        return found

    def with_learned(self, tensors: Mapping[str, Tensor]) -> "Semantics":
        """Replace parameters, named as in `learned`; parameters not given stay unchanged."""
        parts: dict[str, dict[str, Tensor]] = {}
        changed: dict[str, Any] = {}
        for name, tensor in tensors.items():
            part = next((one for one in HEADS_OF if name.startswith(f"{one}_")), "")
            own = name.removeprefix(f"{part}_") if part else name
            if part:
                parts.setdefault(part, {})[own] = tensor
            else:
                changed[own] = tensor
        for part, own_tensors in parts.items():
            changed[part] = replace(getattr(self, part), **own_tensors)
        return replace(self, **changed)


def _is_default(value: object, default: object) -> bool:
    """Return True for a field's default; tensors and records of them have no equality."""
    return value is default or (isinstance(value, float | str) and value == default)


def select_rows(part: Tensor, rows: list[int]) -> Tensor:
    """Select rows in a given order; the result is a view if the rows are consecutive."""
    first = rows[0]
    count = len(rows)
    return (
        part[first : first + count]
        if rows == list(range(first, first + count))
        else part[rows]
    )


def _select_heads_of(part: Any, order: list[int]) -> Any:
    return (
        select_rows(part, order)
        if isinstance(part, Tensor)
        else part.select_heads(order)
    )


# Fields with separate parameters per head, and the heads (of q, k or v) in question. The table applies
# wherever heads are selected or reordered.
HEADS_OF: Mapping[str, HeadSide] = {
    "q_norm": "q",
    "k_norm": "k",
    "v_norm": "v",
    "bias": "q",
    "gate": "q",
    "scores": "q",
    "sinks": "q",
}
# Fields common to all heads.
ALIKE_FOR_HEADS = frozenset(
    {
        "scale",
        "kind",
        "clip",
        "rotary",
        "temperature",
        "soft_cap",
        "window",
        "chunk",
        "dropout",
    }
)
_IN_WORDS = {
    "q_norm": "QK-norm",
    "k_norm": "QK-norm",
    "v_norm": "a norm of values",
    "clip": "clipped queries, keys and values",
    "rotary": "rotary positions",
    "temperature": "queries that grow with their position",
    "bias": "{} positions",
    "soft_cap": "a soft cap",
    "window": "a window",
    "chunk": "chunks",
    "sinks": "sinks",
    "gate": "a gate on the output of each head",
    "scores": "scores that are no product of queries and keys",
}
