"""`AttentionWeights`: the maps and the semantics of one attention layer.

Layers and checkpoints produce this record; measures and rewrites read it. Queries, keys, values and outputs
are each computed by a *chain* of affine maps: one link for the paper's projections, two for stacked
projections, and an empty chain where the input itself is used. Shared maps are the same object: a layer with
W^Q = W^K has `weights.q is weights.k`.
"""

import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any, Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

from triptych.core.algebra.forms import BilinearForm, at_least_float32
from triptych.core.algebra.semantics import (
    CopiesLeft,
    HeadNorm,
    HeadSide,
    Semantics,
    select_rows,
)
from triptych.printable import shown_fields

Side = Literal["q", "k", "v", "o"]
SIDES: tuple[Side, ...] = ("q", "k", "v", "o")
HEAD_SIDES: tuple[HeadSide, ...] = ("q", "k", "v")


@final
@dataclass(frozen=True, eq=False)
class Link:
    """An affine map `x ↦ x W + b` for all heads, or a separate map for each head or group of heads."""

    weight: Float[
        Tensor, "copies *matrix"
    ]  # `[copies, d_in, d_out]`, or `[copies, width]` for a diagonal map
    bias: Float[Tensor, "copies d_out"] | None = None
    norm: HeadNorm | None = (
        None  # norm of the map's output, before the next map of the chain
    )
    learned: bool = True  # False for a map without parameters (a slice of the input, a fixed factor)

    def __repr__(self) -> str:
        return shown_fields(
            type(self).__name__,
            {one.name: getattr(self, one.name) for one in fields(self)},
        )

    @property
    def diagonal(self) -> bool:
        """True if the map scales each channel separately."""
        return self.weight.ndim == 2

    @property
    def copies(self) -> int:
        return self.weight.shape[0]

    @property
    def d_in(self) -> int:
        return self.weight.shape[1]

    @property
    def d_out(self) -> int:
        return self.weight.shape[-1]

    @property
    def num_parameters(self) -> int:
        """Number of parameters of weight and bias, without the norm; 0 if the map is not learned."""
        if not self.learned:
            return 0
        return self.weight.numel() + (0 if self.bias is None else self.bias.numel())

    @property
    def flops(self) -> int:
        """Floating-point operations of all heads for one token, biases left out; 0 for a fixed matrix."""
        if self.diagonal:
            return self.weight.numel()
        return 2 * self.weight.numel() if self.learned else 0

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Link":
        """Apply a function to every tensor of the map and of its norm."""
        bias = None if self.bias is None else change(self.bias)
        norm = self.norm
        if norm is not None:
            norm = replace(
                norm,
                **{name: change(part) for name, part in norm.tensors().items()},  # type: ignore[arg-type]
            )
        return replace(self, weight=change(self.weight), bias=bias, norm=norm)

    def repeat(self, num_heads: int) -> "Link":
        """Repeat each map for consecutive heads, up to `num_heads`, a multiple of the current number."""
        times = num_heads // self.copies
        if times == 1:
            return self
        bias = None if self.bias is None else self.bias.repeat_interleave(times, dim=0)
        return replace(
            self, weight=self.weight.repeat_interleave(times, dim=0), bias=bias
        )

    def select_copies(self, left: CopiesLeft) -> "Link":
        """Select heads or groups in a given order, with their norms.

        A fixed map becomes a learned map if heads are left out or moved.
        """
        if self.copies == 1:
            return self
        chosen = list(left(self.copies))
        if chosen == list(range(self.copies)):
            return self
        bias = None if self.bias is None else select_rows(self.bias, chosen)
        norm = (
            None
            if self.norm is None
            else self.norm.select_copies(left, self.copies, self.d_out)
        )
        return replace(
            self,
            weight=select_rows(self.weight, chosen),
            bias=bias,
            norm=norm,
            learned=True,
        )

    @property
    def norm_map(self) -> "Link | None":
        """Gain and shift of the norm after the map as a map `x ↦ γ ∘ x + β`, or None."""
        if self.norm is None or not self.norm.tensors():
            return None
        weight = None if self.norm.weight is None else self.norm.gain(self.weight.dtype)
        gain = self._rows_of_norm(weight, 1.0)
        shift = self._rows_of_norm(self.norm.bias, 0.0)
        copies = math.lcm(len(gain), len(shift))
        gain, shift = (
            rows.repeat_interleave(copies // len(rows), dim=0) for rows in (gain, shift)
        )
        return Link(gain, shift if shift.is_meta or bool(shift.any()) else None)

    def _rows_of_norm(
        self, part: Tensor | None, neutral: float
    ) -> Float[Tensor, "copies d_out"]:
        """Return the gain or the bias of the norm, with `neutral` at the channels outside the norm."""
        assert self.norm is not None
        if part is None:
            return self.weight.new_full((1, self.d_out), neutral)
        whole = self.norm.over == "all heads" or part.ndim == 1
        rows = part.view(-1, min(len(part), self.d_out)) if whole else part
        if (
            rows.shape[-1] == 1 and self.norm.channels != 1
        ):  # one value for all channels
            rows = rows.expand(-1, self.d_out)
        missing = self.d_out - rows.shape[-1]
        return torch.nn.functional.pad(
            rows.to(self.weight.dtype), (0, missing), value=neutral
        )

    def then(self, other: "Link") -> "Link":
        """Compose two maps, `x W₁ W₂ + (b₁ W₂ + b₂)`; of a norm between them only the gain is kept."""
        if (norm_map := self.norm_map) is not None:
            other = replace(norm_map, bias=None).then(other)
        copies = math.lcm(self.copies, other.copies)
        if self.copies == 1 and not (self.diagonal or other.diagonal):
            # One product with all maps of `other` concatenated, instead of repeating this map.
            joined = other.weight.transpose(0, 1).flatten(1)
            weight = (
                (self.weight[0] @ joined).unflatten(1, (copies, -1)).transpose(0, 1)  # type: ignore[no-untyped-call]
            )
            bias = (
                None
                if self.bias is None
                else _row_times(self.bias.expand(copies, -1), other.weight)
            )
            return Link(
                weight,
                _add_biases(bias, other.bias),
                norm=other.norm,
                learned=self.learned or other.learned,
            )
        one = self.repeat(copies)
        two = other.repeat(copies)
        return Link(
            weight=_multiply(one.weight, two.weight),
            bias=_add_biases(
                None if one.bias is None else _row_times(one.bias, two.weight), two.bias
            ),
            norm=other.norm,
            learned=self.learned or other.learned,
        )

    def __call__(self, x: Float[Tensor, "batch copies length d_in"]) -> Tensor:
        """Apply copy i to slice i of x (every copy to a single slice), then the norm."""
        if self.diagonal:
            y = x * self.weight[:, None, :]
        else:
            # Batch and length in one dimension: otherwise every map would be copied for each text.
            rows = x.transpose(0, 1).flatten(1, 2)
            y = (
                _apply_weight(rows, self.weight)  # type: ignore[no-untyped-call]
                .unflatten(1, (x.shape[0], x.shape[2]))
                .transpose(0, 1)
            )
        y = y if self.bias is None else y + self.bias[:, None, :]
        return y if self.norm is None else self.norm(y)


Chain = tuple[Link, ...]


@final
@dataclass(frozen=True, eq=False)
class Norm:
    """Weight and bias of a LayerNorm or RMSNorm."""

    weight: Float[Tensor, " d_model"]  # stored weight; the gain is `offset + weight`
    bias: Float[Tensor, " d_model"] | None = None
    offset: float = 0.0  # 1 for families with a stored `w` of `1 + w`
    centred: bool = False  # True for a LayerNorm, which subtracts the mean of its input


@final
@dataclass(frozen=True, eq=False)
class AttentionWeights:
    """The maps of one attention layer, with its semantics.

        q = chain_q(x)   k = chain_k(y)   v = chain_v(y)
        out = Σ_i chain_o(softmax(scale · q_i k_iᵀ + …) v_i) + o_bias

    `function.run_layer` computes the layer from this record alone.
    """

    d_model: int  # width of the input
    num_heads: int  # number of query heads
    q: Chain  # chain of maps to the queries (`k` keys, `v` values); an empty chain is the input itself
    k: Chain
    v: Chain
    o: Chain  # chain of maps from the output of each head, summed over heads; links without bias
    semantics: Semantics  # computation of the layer besides its maps
    o_bias: Float[Tensor, " d_out"] | None = None  # `[d_out]`, added once
    # pre-norm with the output `x` (and `y`, unless kind is "cross"); None if unknown or not to be folded
    norm: Norm | None = None
    memory_norm: Norm | None = None  # norm of the memory of a cross-attention
    norm_place: Literal["pre", "post", "sandwich"] = (
        "pre"  # position of the norm around the layer
    )
    other_norm_readers: str = (
        ""  # readers of the norm's output besides this layer; "" by default
    )
    bias_slots: frozenset[str] = frozenset(
        SIDES
    )  # chains with biases in the target format

    def __repr__(self) -> str:
        maps = {
            side: " · ".join(str(list(link.weight.shape)) for link in self.chain(side))
            or "the input"
            for side in SIDES
        }
        shown = "  ".join(f"{side} {shapes}" for side, shapes in maps.items())
        return f"AttentionWeights: {self.num_heads} heads, d_model {self.d_model}\n  {shown}"

    def __post_init__(self) -> None:
        for side in SIDES:
            for link in self.chain(side):
                if self.num_heads % link.copies:
                    raise ValueError(
                        f"the {side} chain has {link.copies} maps: they cannot serve {self.num_heads} heads"
                    )
        self.semantics.require_heads(self.num_heads, self._head_sides)
        tensors = list(self.tensors())
        kinds = sorted(
            {f"{t.dtype} on {t.device}".removeprefix("torch.") for t in tensors}
        )
        if len(kinds) > 1:
            raise ValueError(
                f"the maps are {' and '.join(kinds)}: bring them to one dtype and device"
            )

    def chain(self, side: Side) -> Chain:
        return {"q": self.q, "k": self.k, "v": self.v, "o": self.o}[side]

    def links(self) -> Iterator[Link]:
        """Yield every map of the four chains, shared maps once."""
        seen: set[int] = set()
        for side in SIDES:
            for link in self.chain(side):
                if id(link) not in seen:
                    seen.add(id(link))
                    yield link

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor of maps and norms; shared tensors are yielded once."""
        # The tensors of `semantics` are left out: their dtype may differ (ALiBi's slopes are float64).
        for link in self.links():
            yield link.weight
            if link.bias is not None:
                yield link.bias
            if link.norm is not None:
                yield from link.norm.tensors().values()
        if self.o_bias is not None:
            yield self.o_bias
        for norm in (self.norm, self.memory_norm):
            if norm is not None:
                yield norm.weight
                if norm.bias is not None:
                    yield norm.bias

    @property
    def scale(self) -> float:
        return self.semantics.scale

    @property
    def norms_within(self) -> bool:
        """True if a norm follows any map, the last map of a chain included."""
        return any(link.norm is not None for link in self.links())

    def tied(self, one: Side, other: Side) -> bool:
        """Return True if two of q, k, v, o share the same non-empty chain."""
        return len(self.chain(one)) > 0 and self.chain(one) is self.chain(other)

    @property
    def num_parameters(self) -> int:
        """Number of parameters of maps, biases and gates, without norms; shared parameters count once."""
        gate = self.semantics.gate
        return (
            sum(link.num_parameters for link in self.links())
            + (0 if self.o_bias is None else self.o_bias.numel())
            + (0 if gate is None else gate.num_parameters)
        )

    def copies(self, side: Side) -> int:
        """Return the largest number of separate maps in a link of the chain; 1 for an empty chain.

        For queries, keys and values this is the number of heads, or of groups, with separate maps.
        """
        return max((link.copies for link in self.chain(side)), default=1)

    def width(self, side: HeadSide) -> int:
        """Return the width of the queries, keys or values of a head."""
        chain = self.chain(side)
        return chain[-1].d_out if chain else self.d_model

    @property
    def _head_sides(self) -> dict[HeadSide, tuple[int, int]]:
        """Number of heads, and width of a head, of queries, keys and values."""
        return {side: (self.copies(side), self.width(side)) for side in HEAD_SIDES}

    @property
    def num_key_heads(self) -> int:
        """Number of key heads: 1, the number of groups of query heads, or the number of query heads."""
        return self.copies("k")

    @property
    def num_value_heads(self) -> int:
        """Number of value heads: 1, the number of groups of query heads, or the number of query heads."""
        return self.copies("v")

    def multiplied(self, side: Side) -> Link:
        """Multiply a chain into one link per head or group; an empty chain gives the identity.

        Only the gain of a norm between two links is kept: callers replacing the chain by its product have to
        check for norms. The bias of the output map is None: `o_bias` belongs to all heads together.
        """
        chain = self.chain(side)
        if not chain:
            eye = torch.eye(self.d_model, dtype=self.dtype, device=self.device)
            return Link(eye[None], learned=False)
        whole = reduce(Link.then, chain)
        if whole.diagonal:
            whole = replace(whole, weight=torch.diag_embed(whole.weight))
        return whole

    def behind_norms(self) -> "AttentionWeights":
        """Remove from the chains of queries, keys and values all maps up to their last inner norm.

        An inner norm stands between two maps. The first remaining map reads the normalised vector of this
        norm, and absorbs its gain and shift.
        """
        chains: dict[str, Chain] = {}
        for side in SIDES[:3]:
            chain = self.chain(side)
            last = max(
                (
                    count
                    for count, link in enumerate(chain[:-1], 1)
                    if link.norm is not None
                ),
                default=0,
            )
            chains[side] = chain[last:]
            if last and (norm_map := chain[last - 1].norm_map) is not None:
                chains[side] = (norm_map.then(chain[last]), *chain[last + 1 :])
        return replace(self, **chains)  # type: ignore[arg-type]

    @property
    def dtype(self) -> torch.dtype:
        return next(self.tensors()).dtype

    @property
    def device(self) -> torch.device:
        return next(self.tensors()).device

    def per_head(self, side: Side) -> Float[Tensor, "num_heads d_in d_out"]:
        """Return the map of every query head as one product: `W_Q`, `W_K`, `W_V` or `W_O`."""
        return self.multiplied(side).repeat(self.num_heads).weight

    def head_bias(
        self, side: Literal["q", "k", "v"]
    ) -> Float[Tensor, "num_heads width"] | None:
        """Return the composed bias of every query head, or None."""
        return self.multiplied(side).repeat(self.num_heads).bias

    @property
    def W_Q(self) -> Float[Tensor, "num_heads d_model d_k"]:
        return self.per_head("q")

    @property
    def W_K(self) -> Float[Tensor, "num_heads d_model d_k"]:
        """Key maps of all query heads: the maps of groups are repeated."""
        return self.per_head("k")

    @property
    def W_V(self) -> Float[Tensor, "num_heads d_model d_v"]:
        """Value maps of all query heads: the maps of groups are repeated."""
        return self.per_head("v")

    @property
    def W_O(self) -> Float[Tensor, "num_heads d_v d_out"]:
        return self.per_head("o")

    @property
    def qk(self) -> BilinearForm:
        """W_QK of every head as one batched form, `[num_heads, …]`, without biases and scale."""
        exact = self._for_products("q", "k")
        return BilinearForm(exact.W_Q, exact.W_K)

    @property
    def ov(self) -> BilinearForm:
        """W_OV of every head as one batched form, `[num_heads, …]`, without biases."""
        exact = self._for_products("v", "o")
        return BilinearForm(exact.W_V, exact.W_O.mT)

    def _for_products(self, *sides: Side) -> "AttentionWeights":
        """Convert all maps to at least float32 if a product of several maps is needed for these chains."""
        if all(len(self.chain(side)) < 2 for side in sides):
            return self
        return self.mapped(at_least_float32)

    @property
    def heads(self) -> tuple["HeadForms", ...]:
        qk = self.qk
        ov = self.ov
        return tuple(
            HeadForms(
                BilinearForm(qk.left[i], qk.right[i]),
                BilinearForm(ov.left[i], ov.right[i]),
            )
            for i in range(self.num_heads)
        )

    def each_link(
        self,
        change: Callable[[Link], Link],
        sides: Collection[Side] = SIDES,
        num_heads: int | None = None,
        **others: Any,
    ) -> "AttentionWeights":
        """Change every map of some chains, and fields in `others`; shared maps and chains stay shared."""
        # Keyed by identity, so that a shared object is changed once.
        links: dict[int, Link] = {}
        chains: dict[int, Chain] = {}

        def change_link(link: Link) -> Link:
            if id(link) not in links:
                links[id(link)] = change(link)
            return links[id(link)]

        def change_side(side: Side) -> Chain:
            chain = self.chain(side)
            if side not in sides:
                return chain
            if id(chain) not in chains:
                new = tuple(change_link(link) for link in chain)
                same = all(one is other for one, other in zip(new, chain, strict=True))
                chains[id(chain)] = chain if same else new
            return chains[id(chain)]

        heads = self.num_heads if num_heads is None else num_heads
        q, k, v, o = (change_side(side) for side in SIDES)
        return replace(self, num_heads=heads, q=q, k=k, v=v, o=o, **others)

    def select_copies(self, left: CopiesLeft, num_heads: int) -> "AttentionWeights":
        """Select `num_heads` heads of the layer in a given order, with their separate parameters.

        `left` returns the indices to select, in order, for a number of separate maps. For a map per head,
        these are the heads.
        """
        semantics = self.semantics.select_copies(left, self.num_heads, self._head_sides)
        return self.each_link(
            lambda link: link.select_copies(left),
            num_heads=num_heads,
            semantics=semantics,
        )

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "AttentionWeights":
        """Change every tensor of maps and norms (cast, move, clone); shared maps and chains stay shared.

        The tensors of `semantics` stay unchanged.
        """

        def change_norm(norm: Norm | None) -> Norm | None:
            if norm is None:
                return None
            return replace(
                norm,
                weight=change(norm.weight),
                bias=None if norm.bias is None else change(norm.bias),
            )

        return self.each_link(
            lambda link: link.mapped(change),
            o_bias=None if self.o_bias is None else change(self.o_bias),
            norm=change_norm(self.norm),
            memory_norm=change_norm(self.memory_norm),
        )

    @property
    def takes_up_scale(self) -> bool:
        """True if the last query map can absorb another scale: learned, unshared, read by products only."""
        semantics = self.semantics
        q = self.q
        read = semantics.bias is not None and semantics.bias.reads_content
        changes = semantics.q_norm is not None or semantics.clip is not None or read
        changes = changes or semantics.scores is not None
        return (
            bool(q)
            and q[-1].learned
            and q[-1].norm is None
            and not self.tied("q", "k")
            and not changes
        )

    def with_scale(self, scale: float) -> "AttentionWeights":
        """Change the scale, not the scores: the last query map absorbs the ratio, or else ValueError."""
        if math.isclose(scale, self.scale, rel_tol=1e-12):
            return self
        # A map shared with the keys cannot absorb the ratio: the keys would change as well.
        found = f"scores are multiplied by {self.scale:.6g}, not {scale:.6g}, and"
        if not self.q or not self.q[-1].learned or self.tied("q", "k"):
            raise ValueError(
                f"{found} the queries have no map of their own to take up the ratio: expand the tied maps "
                "first"
            )
        if not self.takes_up_scale:
            raise ValueError(
                f"{found} more than the product with the keys reads what the query map makes"
            )
        ratio = self.scale / scale
        last = self.q[-1]
        bias = None if last.bias is None else last.bias * ratio
        return replace(
            self,
            semantics=replace(self.semantics, scale=scale),
            q=(*self.q[:-1], replace(last, weight=last.weight * ratio, bias=bias)),
        )

    def with_single_links(self) -> "AttentionWeights":
        """Multiply every chain into one link, in at least float32; shared chains stay shared.

        As in `multiplied`, only the gain of a norm between two links is kept; an empty chain is the identity.
        """
        wide = torch.promote_types(self.dtype, torch.float32)
        whole = (
            self if all(len(self.chain(side)) == 1 for side in SIDES) else self.to(wide)
        )
        chains: dict[int, Chain] = {}
        for side in SIDES:
            chain = whole.chain(side)
            if id(chain) not in chains:
                chains[id(chain)] = (
                    chain if len(chain) == 1 else (whole.multiplied(side),)
                )
        q, k, v, o = (chains[id(whole.chain(side))] for side in SIDES)
        return replace(whole, q=q, k=k, v=v, o=o)

    def with_even_copies(self, groups: int) -> "AttentionWeights":
        """Repeat maps to one copy per head for queries and outputs, and to `groups` for keys and values.

        Chains of several maps stay unchanged, and so do layers with W_Q = W_K or W_K = W_V.
        """

        def even(side: Side, copies: int) -> Chain:
            chain = self.chain(side)
            return (chain[0].repeat(copies),) if len(chain) == 1 else chain

        if self.tied("k", "v") or self.tied("q", "k"):
            return self
        heads = self.num_heads
        return replace(
            self,
            q=even("q", heads),
            k=even("k", groups),
            v=even("v", groups),
            o=even("o", heads),
        )

    def without_norms(self) -> "AttentionWeights":
        """Remove `norm` and `memory_norm` from the record, without folding them into the maps."""
        return replace(self, norm=None, memory_norm=None)

    def to(self, dtype: torch.dtype) -> "AttentionWeights":
        return self.mapped(lambda tensor: tensor.to(dtype))


@final
@dataclass(frozen=True)
class HeadForms:
    """The two forms of one head.

    Attributes:
        qk: W_QK, the form of the attention scores.
        ov: W_OV, the map from attended tokens to the output.
    """

    qk: BilinearForm
    ov: BilinearForm


def standard_scale(d_k: int) -> float:
    """Return the paper's scale, `1/√d_k`."""
    return 1 / math.sqrt(d_k)


def _multiply(one: Tensor, two: Tensor) -> Tensor:
    match one.ndim, two.ndim:
        case 2, 2:
            return one * two
        case 2, 3:
            return one[:, :, None] * two
        case 3, 2:
            return one * two[:, None, :]
        case _:
            return one @ two


def _apply_weight(rows: Tensor, weight: Tensor) -> Tensor:
    """Compute `rows @ weight`. On a CPU, float16 is multiplied in float32, the dtype of its sums anyway."""
    if weight.dtype == torch.float16 and weight.device.type == "cpu":
        return (rows.float() @ weight.float()).half()  # two to four times as fast
    return rows @ weight


def _row_times(row: Tensor, matrix: Tensor) -> Tensor:
    return row * matrix if matrix.ndim == 2 else (row[:, None, :] @ matrix)[:, 0]


def _add_biases(one: Tensor | None, two: Tensor | None) -> Tensor | None:
    if one is None or two is None:
        return one if two is None else two
    return one + two
