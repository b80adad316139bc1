"""`Semantics`: everything besides the maps that decides what an attention layer computes.

Layers, checkpoints, the plain formula (`algebra.function`), the legality of rewrites, costs and decoding
read this one record. Code that ignores a part of it has to check that the part is not there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any, ClassVar, Literal, final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from triptych.core.algebra.positions import PatchPositionBias, RotaryEmbedding, ScoreBias, distances

Kind = Literal["self", "causal", "cross"]
HeadSide = Literal["q", "k", "v"]
# Of something in a number of copies, each for as many consecutive heads: the copies that are left, in order.
CopiesLeft = Callable[[int], Sequence[int]]


@final
@dataclass(frozen=True, eq=False)
class HeadNorm:
    """A normalisation between a map and what reads it.

    Attributes:
        eps: added to the mean square.
        weight: as stored, less `offset`: `[width]`, or `[heads, width]` for a weight of each head's own,
            which serves as many consecutive heads as it takes; None for 1.
        bias: like `weight`; None for 0.
        centred: whether the mean is taken off first (LayerNorm), or not (RMSNorm).
        over: "head": each head by itself; "all heads": over the channels of all heads together, with a weight
            `[heads · width]`.
        channels: how many channels are normalised, the first ones; all if None.
        turned: whether the weight, one for all heads, is multiplied with after positions turned what is
            normalised (`apply_late_gain`).
        offset: what the weight is relative to: 1 where `w` of `1 + w` is stored. It is added in float32 at
            least, in which the small numbers that are stored do not get lost.
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
        """Whether heads have weights or biases of their own."""
        return any(
            part is not None and (part.ndim > 1 or self.over == "all heads")
            for part in (self.weight, self.bias)
        )

    def num_copies(self, width: int) -> int:
        """Count the heads, or groups of heads, with numbers of their own; 1 if all have the same."""
        parts = self.tensors().values()
        if self.over == "all heads":
            return max((len(part) // width for part in parts), default=1)
        return max((len(part) for part in parts if part.ndim > 1), default=1)

    @property
    def structure(self) -> tuple[object, ...]:
        """Everything but the weight and the bias."""
        shapes = {name: tensor.shape for name, tensor in self.tensors().items()}
        return self.eps, self.centred, self.over, self.channels, self.turned, self.offset, shapes

    def __call__(self, x: Float[Tensor, "batch heads length width"]) -> Tensor:
        if self.channels is not None and self.channels < x.shape[-1]:
            first = x[..., : self.channels]
            rest = x[..., self.channels :]
            return torch.cat([self._normalised(first), rest], dim=-1)
        return self._normalised(x)

    def apply_late_gain(self, x: Float[Tensor, "batch heads length width"]) -> Tensor:
        """What positions turned, times the weight if it is applied after that."""
        if not self.turned or self.weight is None:
            return x
        missing = x.shape[-1] - len(self.weight)
        gain = self.gain(torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
        return x * torch.nn.functional.pad(gain, (0, missing), value=1.0)

    def gain(self, dtype: torch.dtype) -> Tensor:
        """Return the factor of each channel; there must be a weight."""
        assert self.weight is not None
        weight = self.weight.to(dtype)
        return weight + self.offset if self.offset else weight

    def tensors(self) -> dict[str, Tensor]:
        """The weight and the bias, as far as they are there."""
        parts = {"weight": self.weight, "bias": self.bias}
        return {name: part for name, part in parts.items() if part is not None}

    def select_copies(self, left: CopiesLeft, copies: int, width: int) -> "HeadNorm":
        """Select heads, with everything that each of them has of its own."""

        def select(own: Tensor) -> Tensor:
            each = own if len(own) == copies else own.repeat_interleave(copies // len(own), dim=0)
            return select_rows(each, list(left(copies)))

        return self.with_own(width, select) if self.per_head else self

    def with_own(self, width: int, change: Callable[[Tensor], Tensor]) -> "HeadNorm":
        """The norm with what each head has of its own, `[heads, width]`, changed."""

        def changed(part: Tensor) -> Tensor:
            if self.over == "all heads":
                return change(part.view(-1, width)).flatten()
            return change(part) if part.ndim > 1 else part

        parts: dict[str, Any] = {name: changed(part) for name, part in self.tensors().items()}
        return replace(self, **parts)

    def _normalised(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        plain = self.turned or self.weight is None
        weight = self._numbers(None if plain else self.gain(wide), x)
        bias = self._numbers(self.bias, x)
        if self.over == "all heads":
            normal = self._scaled(x.transpose(1, 2).flatten(2), weight, bias)
            return normal.reshape(*normal.shape[:2], x.shape[1], x.shape[3]).transpose(1, 2)
        return self._scaled(x, weight, bias)

    def _numbers(self, part: Tensor | None, x: Tensor) -> Tensor | None:
        """A weight or bias as it is multiplied with, or added to, x."""
        if part is None:
            return None
        heads = x.shape[1]
        width = x.shape[3]
        if self.over == "all heads":
            times = heads * width // len(part)
            return part if times == 1 else part.view(-1, width).repeat_interleave(times, dim=0).flatten()
        if part.ndim == 1:
            return part
        return (part.repeat_interleave(heads // len(part), dim=0) if len(part) < heads else part)[:, None]

    def _scaled(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.promote_types(dtype, torch.float32))
        if self.centred:
            x = x - x.mean(dim=-1, keepdim=True)
        x = x / (x.square().mean(dim=-1, keepdim=True) + self.eps).sqrt()
        if weight is not None:
            x = x * weight.to(x.dtype)
        return (x if bias is None else x + bias.to(x.dtype)).to(dtype)


def same_norm_structure(one: HeadNorm | None, other: HeadNorm | None) -> bool:
    """Whether two norms differ in nothing but their numbers, or neither is there."""
    return (None if one is None else one.structure) == (None if other is None else other.structure)


@final
@dataclass(frozen=True, eq=False)
class HeadGate:
    """The share that a query takes of what a head moves: `σ(x w_i + b_i)`, between 0 and 1.

    One for each head, or for each channel of its values. In differential attention the first head of a pair
    is taken whole, and `σ(x w_i + b_i)` times what the second moves is subtracted from it.
    """

    # Sources: Qiu et al. 2025, arXiv 2505.06708, the gate of each head, or channel, after the operation.
    # Ye et al. 2026, Differential Transformer V2 (huggingface.co/blog/microsoft/diff-attn-v2), pairs.

    # of the input that the queries are made of: `[heads, d_model]`, or `[heads, d_v, d_model]`
    weight: Float[Tensor, "*gates d_model"]
    bias: Float[Tensor, "*gates"] | None = None
    whole: tuple[bool, ...] = ()  # of pairs: which heads have no gate; the others' gates are negative

    @property
    def num_heads(self) -> int:
        return len(self.whole) or self.weight.shape[0]

    @property
    def per_channel(self) -> bool:
        """Whether each channel of a head's values has a gate of its own."""
        return self.weight.ndim == 3

    @property
    def num_parameters(self) -> int:
        """The number of parameters, all heads."""
        return sum(part.numel() for part in self.tensors().values())

    @property
    def flops(self) -> int:
        """Floating-point operations for a token, all heads."""
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
        """What heads are multiplied by, from the shares that the gates let through."""
        heads = (len(self.weight), -1)
        of_heads: Tensor = shares.unflatten(-1, heads).transpose(1, 2)  # type: ignore[no-untyped-call]
        if not self.whole:
            return of_heads
        negative = iter(of_heads.neg().unbind(1))
        one = torch.ones_like(of_heads[:, 0])
        return torch.stack([one if whole else next(negative) for whole in self.whole], dim=1)

    def _own(self, heads: Iterable[int]) -> list[int]:
        """Some heads, without the ones that are taken whole."""
        return [head for head in heads if not self.whole or not self.whole[head]]

    def tensors(self) -> dict[str, Tensor]:
        """The weight, and the bias if there is one."""
        return {"weight": self.weight} if self.bias is None else {"weight": self.weight, "bias": self.bias}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> "HeadGate":
        """The gate of another weight and bias, by name."""
        return replace(self, weight=tensors["weight"], bias=tensors.get("bias"))

    def reading(self, gain: Float[Tensor, " d_model"], shift: Float[Tensor, " d_model"] | None) -> "HeadGate":
        """The gate that makes of x what this one makes of `gain ∘ x + shift`; rounded once."""
        wide = self.weight.double()
        bias = self.bias
        if shift is not None:
            moved = wide @ shift.double()
            bias = (moved if bias is None else bias.double() + moved).to(self.weight.dtype)
        return replace(self, weight=(wide * gain.double()).to(self.weight.dtype), bias=bias)

    def select_heads(self, order: Sequence[int]) -> "HeadGate | None":
        """Select the gate of some heads, in the order given. None stands for all heads."""
        rows = {head: row for row, head in enumerate(self._own(range(self.num_heads)))}
        chosen = [rows[head] for head in self._own(order)]
        if not chosen:
            return None
        whole = tuple(self.whole[head] for head in order) if self.whole else ()
        gate = self.with_tensors({name: select_rows(part, chosen) for name, part in self.tensors().items()})
        return replace(gate, whole=whole)


@final
@dataclass(frozen=True)
class Temperature:
    """Queries that are scaled up with their position in a text.

    That at position m is multiplied by 1 + strength · ln(1 + ⌊(m + first) / every⌋).

    Source: Nakanishi 2025, arXiv 2501.19399; `modeling_llama4.py` and `modeling_ministral3.py` of
    github.com/huggingface/transformers, version 5.23.0.
    """

    strength: float  # of the growth
    every: float  # how many positions share a factor
    first: int = 0  # the number of position m = 0

    def __call__(
        self, q: Float[Tensor, "batch heads length width"], positions: Int[Tensor, "*rows placed"]
    ) -> Tensor:
        steps = ((positions.double() + self.first) / self.every).floor()
        return q * (1 + self.strength * steps.log1p()).to(q.dtype).unsqueeze(-2).unsqueeze(-1)


@dataclass(frozen=True, eq=False)
class Scores(ABC):
    """A way to compare queries with keys that is not their scaled product. Nothing else scales the scores.

    Fields are learned tensors, of which the first dimension counts the heads.

    Attributes:
        name: as in a recipe; of a class in a file of one's own, `FILE.py:CLASS`.
        no_rotary: why rotary positions make no sense with it; "" if they do.
    """

    name: ClassVar[str] = ""
    no_rotary: ClassVar[str] = ""

    @classmethod
    @abstractmethod
    def drawn(cls, num_heads: int, d_k: int) -> "Scores":
        """New scores with random parameters."""

    @abstractmethod
    def __call__(
        self, q: Float[Tensor, "batch heads query_len d_k"], k: Float[Tensor, "batch heads key_len d_k"]
    ) -> Float[Tensor, "batch heads query_len key_len"]:
        """How well each query fits each key."""

    @property
    def num_heads(self) -> int:
        return next((len(part) for part in self.tensors().values()), 0)

    def tensors(self) -> dict[str, Tensor]:
        """The parameters by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def select_heads(self, order: Sequence[int]) -> "Scores":
        """The scores of some heads, in the order given."""
        return replace(self, **{name: part[list(order)] for name, part in self.tensors().items()})


@final
@dataclass(frozen=True, eq=False)
class AdditiveScores(Scores):
    """`v_i · tanh(q + k)`, with a vector v_i for each head."""

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
    """What an attention layer does besides its maps, in the order in which it is done."""

    scale: float  # what the products of queries and keys are multiplied by
    kind: Kind = "self"  # where queries and keys come from: one sequence, one sequence seen causally, or two
    # of the queries, before they are rotated (QK-norm); `k_norm` is of the keys, `v_norm` of the values
    q_norm: HeadNorm | None = None
    k_norm: HeadNorm | None = None
    v_norm: HeadNorm | None = None
    # what queries, keys and values are clipped to after their norms, ±; None if they are not
    clip: float | None = None
    rotary: RotaryEmbedding | None = None  # of queries and keys; None if there is none
    temperature: Temperature | None = None  # of queries, after they were rotated; None if all count alike
    bias: ScoreBias | None = None  # added to the scaled scores; None if nothing is
    soft_cap: float | None = None  # c where scores s become c · tanh(s / c); None if they do not
    # how many keys up to its own position a query sees, at most, and as many from there on where later ones
    # are seen; None for all
    window: int | None = None
    # the text is cut into pieces of this many positions, and a query sees keys of its own piece; None for one
    # piece
    chunk: int | None = None
    # a score for each head that takes part in the softmax and moves nothing; None without
    sinks: Float[Tensor, " heads"] | None = None
    dropout: float = 0.0  # probability with which attention weights are dropped, now
    gate: HeadGate | None = None  # what the output of each head is multiplied by; None if nothing
    # how queries and keys are compared, in place of their scaled products; None for those
    scores: Scores | None = None

    @property
    def positions(self) -> Literal["none", "rotary", "alibi", "relative", "disentangled"]:
        """How the layer itself tells positions apart, by name."""
        if self.rotary is not None:
            return "rotary"
        return "none" if self.bias is None else self.bias.scheme

    def apply_late_gains(self, q: Tensor) -> Tensor:
        """Turned queries times the weights applied after that; a key norm's gives the same scores here."""
        for norm in (self.q_norm, self.k_norm):
            q = q if norm is None else norm.apply_late_gain(q)
        return q

    @property
    def qk_norm(self) -> bool:
        """Whether queries or keys are normalised before their product."""
        return self.q_norm is not None or self.k_norm is not None

    @property
    def is_local(self) -> bool:
        """Whether queries see only keys near them."""
        return self.window is not None or self.chunk is not None

    def compare(self, q: Tensor, k: Tensor) -> Tensor:
        """The scores of queries and keys of every head, before positions add to them."""
        return q @ k.mT * self.scale if self.scores is None else self.scores(q, k)

    def beyond(self, held: Collection[str]) -> list[str]:
        """What the layer does that is not among these fields, in words; a field that is new is among none."""
        found = []
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in held and (each.default is MISSING or value is not each.default):
                found.append(_IN_WORDS.get(each.name, each.name).format(self.positions))
        return list(dict.fromkeys(found))

    def visible(
        self, queries: Int[Tensor, "*rows query_len"], keys: Int[Tensor, "*columns key_len"]
    ) -> Bool[Tensor, "*seen query_len key_len"] | None:
        """The keys that the queries at these positions see, causal masks left out; None for all.

        Where each row of a batch has positions of its own, `[batch, 1, query_len, key_len]`.
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
        """How many positions there are: the tokens of a picture; None for texts, which have no end."""
        if isinstance(self.bias, PatchPositionBias):
            return 1 + self.bias.rows * self.bias.columns
        return None if self.rotary is None or self.rotary.places is None else len(self.rotary.places)

    def select_heads(self, kept: Sequence[int]) -> "Semantics":
        """Select heads, in the order given, for queries, keys and values that were computed already.

        Norms stay as they are, since they are applied earlier.
        """
        order = list(kept)
        found = {
            name: _select_heads_of(part, order)
            for name, part in self._parts_of_heads().items()
            if not isinstance(part, HeadNorm)
        }
        return replace(self, **found) if found else self

    def select_copies(
        self, left: CopiesLeft, num_heads: int, sides: Mapping[HeadSide, tuple[int, int]]
    ) -> "Semantics":
        """Select heads, with everything that each of them has of its own.

        `sides` has the number and the width of the copies of queries, keys and values.
        """
        found: dict[str, Any] = {}
        for name, part in self._parts_of_heads().items():
            if isinstance(part, HeadNorm):
                found[name] = part.select_copies(left, *sides[HEADS_OF[name]])
            else:
                found[name] = _select_heads_of(part, list(left(num_heads)))
        return replace(self, **found) if found else self

    def require_heads(self, num_heads: int, sides: Mapping[HeadSide, tuple[int, int]]) -> None:
        """Raise ValueError unless each part has numbers for these heads; arguments as of `select_copies`."""
        for name, part in self._parts_of_heads().items():
            if isinstance(part, HeadNorm):
                copies, width = sides[HEADS_OF[name]]
                found = part.num_copies(width)
                fits = copies % found == 0
            else:
                copies = num_heads
                found = _count_heads(part)
                fits = found == copies
            if not fits:
                words = _IN_WORDS[name].format(self.positions)
                raise ValueError(f"{words}: there are numbers for {found} heads, and {copies} heads")

    def _parts_of_heads(self) -> dict[str, Any]:
        """Return the parts that have numbers for each head, where they are set."""
        parts = {name: getattr(self, name) for name in HEADS_OF}
        return {name: part for name, part in parts.items() if part is not None}

    def tensors(self) -> Iterator[Tensor]:
        """The tensors of norms, biases, sinks, gates and scores."""
        yield from self.learned().values()
        if self.bias is not None and not self.bias.learned:
            yield from self.bias.tensors().values()

    def learned(self) -> dict[str, Tensor]:
        """The parameters besides the maps, by name, such as `q_norm_weight`, `bias_table` or `sinks`."""
        found: dict[str, Tensor] = {}
        for name, part in self._parts_of_heads().items():
            if isinstance(part, Tensor):
                found[name] = part
            elif not isinstance(part, ScoreBias) or part.learned:
                found |= {f"{name}_{own}": tensor for own, tensor in part.tensors().items()}
        return found

    def with_learned(self, tensors: Mapping[str, Tensor]) -> "Semantics":
        """The same with other parameters, named as `learned` names them; any not given stay."""
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


def select_rows(part: Tensor, rows: list[int]) -> Tensor:
    """Select rows in the order given; the result is a view if they follow each other."""
    first = rows[0]
    count = len(rows)
    return part[first : first + count] if rows == list(range(first, first + count)) else part[rows]


def _select_heads_of(part: Any, order: list[int]) -> Any:
    """Select the numbers of some heads from a part that has numbers for each query head."""
    return select_rows(part, order) if isinstance(part, Tensor) else part.select_heads(order)


def _count_heads(part: Any) -> int:
    """Count the query heads that a part has numbers for."""
    return len(part) if isinstance(part, Tensor) else part.num_heads


# The parts that may have numbers of each head's own, and whose heads these are. Everything that leaves heads
# out, or puts them in another order, goes through this list.
HEADS_OF: Mapping[str, HeadSide] = {
    "q_norm": "q",
    "k_norm": "k",
    "v_norm": "v",
    "bias": "q",
    "gate": "q",
    "scores": "q",
    "sinks": "q",
}
# The others, which all heads have in common.
ALIKE_FOR_HEADS = frozenset(
    {"scale", "kind", "clip", "rotary", "temperature", "soft_cap", "window", "chunk", "dropout"}
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
