"""Any chains of maps, held as they are written."""

from dataclasses import dataclass, field, replace
from typing import ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from triptych.algebra.cost import Route
from triptych.algebra.positions import RotaryEmbedding
from triptych.algebra.semantics import HeadNorm
from triptych.algebra.weights import SIDES, AttentionWeights, Link, Side
from triptych.attention.projections.abstract import Parameterisation, ParameterisationSizes, Projections
from triptych.attention.projections.maps import (
    FromHeads,
    HeadMap,
    Held,
    draw_evenly,
    split_heads,
    through_own_map,
)


@final
@dataclass(frozen=True)
class AsWritten(Parameterisation):
    """The chains of a writing: any number of maps, shared or not, fixed or learned, with norms between them.

    For layers that are made of weights (`MultiHeadAttention.from_weights`); a recipe cannot ask for it.

    Attributes:
        maps: by name, the output map `o_proj` last.
        chains: the names of the maps of each side.
        width: of queries and keys.
    """

    name: ClassVar[str] = "as_written"
    parameters_formula: ClassVar[str] = ""
    cache_formula: ClassVar[str] = ""

    maps: dict[str, HeadMap] = field(compare=False)
    chains: dict[Side, tuple[str, ...]] = field(compare=False)
    width: int

    @classmethod
    def of(cls, weights: AttentionWeights) -> "tuple[AttentionWeights, AsWritten]":
        """The parameterisation of a writing, and the writing with a learned output map for each head."""
        last = weights.o[-1] if weights.o else None
        if last is None or last.diagonal or last.norm is not None:
            raise ValueError("the heads' outputs need a map of their own at the end")
        last = replace(last.of_heads(weights.num_heads), learned=True)
        weights = replace(weights, o=(*weights.o[:-1], last))
        links = list(weights.links())
        names = {id(link): f"map_{i}" for i, link in enumerate(links)}
        names[id(weights.o[-1])] = "o_proj"
        maps: dict[str, HeadMap] = {names[id(link)]: LinkMap.of(link) for link in links}
        last = weights.o[-1]
        maps["o_proj"] = FromHeads(last.d_in, last.d_out, weights.num_heads, weights.o_bias is not None)
        chains = {side: tuple(names[id(link)] for link in weights.chain(side)) for side in SIDES}
        return weights, cls(maps, chains, weights.multiplied("q").d_out if weights.q else weights.d_model)

    def chain(self, side: Side) -> tuple[str, ...]:
        return self.chains[side]

    def sizes(self, d_model: int, num_heads: int) -> ParameterisationSizes:
        return ParameterisationSizes(self.width, self.maps)

    def build(self, d_model: int, num_heads: int) -> "WrittenProjections":
        return WrittenProjections(self, d_model, num_heads)


@final
class WrittenProjections(Projections):
    """The maps of `AsWritten`.

    Where keys and values are each one map of what they share, as those of latent heads are, there is the
    absorbed route: what is shared serves as keys and values, and the maps are applied to queries and outputs.
    """

    def __init__(self, parameterisation: AsWritten, d_model: int, num_heads: int) -> None:
        super().__init__(parameterisation, d_model, num_heads)
        first = [self._maps[chain[0]] for chain in (self._chains["k"], self._chains["v"]) if chain]
        self._memory_widths = [one.d_in for one in first if isinstance(one, LinkMap)]
        self._ups = self._own_maps()

    @property
    def memory_width(self) -> int:
        return self._memory_widths[0] if self._memory_widths else self.d_model

    def turned_when_stored(self, rotary: RotaryEmbedding) -> RotaryEmbedding | None:
        """That of channels which keys take over as they are stored, if it is of no others."""
        if self.caches_keys:
            return rotary
        if self._ups is None:
            return None
        up, of_values = self._ups[0][1], self._ups[1][1]
        channels = [channel for pair in rotary.pairs for channel in pair]
        outside = min(channels) < up.written or max(channels) >= up.written + up.passed
        if outside or up.bias or of_values.read > up.read:
            return None
        return replace(rotary, start=rotary.start - up.written + up.read)

    def route(self, query_len: int, key_len: int) -> Route:
        if self._ups is None:
            return "expanded"
        (_, k), (_, v) = self._ups
        maps = k.read * k.written + v.read * v.written
        expanded = key_len * maps + query_len * key_len * (k.d_out + v.d_out)
        absorbed = query_len * maps + query_len * key_len * (k.read + k.passed + v.read)
        return "absorbed" if absorbed < expanded else "expanded"

    @property
    def absorbs_biases(self) -> bool:
        return self._ups is None or not self._ups[1][1].bias

    def absorbed(self, q: Tensor, remembered: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
        assert self._ups is not None
        (held, up), (_, of_values) = self._ups
        (shared,) = remembered
        moved = through_own_map(q[..., : up.written], self._held_link(held).weight)
        keys = shared[..., : up.read + up.passed]
        return torch.cat([moved, q[..., up.written :]], dim=-1), keys, shared[..., : of_values.read]

    def output(self, heads: Tensor, route: Route = "expanded") -> Tensor:
        if route == "absorbed":
            assert self._ups is not None
            own = self._held_link(self._ups[1][0])
            heads = through_own_map(heads, own.weight.mT)
            if own.bias is not None:
                heads = heads + own.bias[:, None]
        return super().output(heads)

    def _own_maps(self) -> "tuple[tuple[str, LinkMap], tuple[str, LinkMap]] | None":
        """The maps of keys and of values after what they share, with one for each head and no norm."""
        found = []
        for names in self._of_shared if self._shared else ():
            own = self._maps[names[0]] if len(names) == 1 else None
            if not isinstance(own, LinkMap) or own.copies != self.num_heads:
                return None
            if own.diagonal or own.norm is not None or not own.learned:
                return None
            found.append((names[0], own))
        if len(found) != 2 or found[1][1].passed or self._maps_of_shared_have_copies():
            return None
        return found[0], found[1]

    def _maps_of_shared_have_copies(self) -> bool:
        return any(isinstance(own := self._maps[name], LinkMap) and own.copies > 1 for name in self._shared)

    def _held_link(self, name: str) -> "HeldLink":
        held = self._held(name)
        assert isinstance(held, HeldLink)
        return held

    def _load_link(self, name: str, own: Link, given: Link) -> None:
        held = self._held(name)
        if isinstance(held, HeldLink):
            held.load(given)
        else:
            super()._load_link(name, own, given)


@final
@dataclass(frozen=True)
class LinkMap(HeadMap):
    """A map of any chain.

    The first `read` channels of its input pass through numbers of its own to the first `written` channels of
    its output; the next `passed` ones are its last as they are; any others are not read.

    Attributes:
        d_in: width read; likewise `d_out`, written.
        copies: how many there are.
        read: see above; likewise `written` and `passed`.
        diagonal: whether each channel is scaled by itself.
        bias: whether there is one.
        learned: whether its numbers are.
        norm: after it, without numbers; None without.
        norm_parts: shapes of the norm's numbers.
    """

    d_in: int
    d_out: int
    copies: int
    read: int
    written: int
    passed: int
    diagonal: bool
    bias: bool
    learned: bool
    norm: HeadNorm | None
    norm_parts: dict[str, torch.Size] = field(compare=False)

    @classmethod
    def of(cls, link: Link) -> "LinkMap":
        """For a link of a writing; which of its channels pass is read off its numbers."""
        read, passed = _passing(link)
        parts = {} if link.norm is None else link.norm.tensors()
        bare = None if link.norm is None else replace(link.norm, weight=None, bias=None)
        return cls(
            d_in=link.d_in,
            d_out=link.d_out,
            copies=link.copies,
            read=read,
            written=link.d_out - passed,
            passed=passed,
            diagonal=link.diagonal,
            bias=link.bias is not None,
            learned=link.learned,
            norm=bare,
            norm_parts={name: tensor.shape for name, tensor in parts.items()},
        )

    def make(self) -> "HeldLink":
        return HeldLink(self)

    def initialise(self, held: Held) -> None:
        assert isinstance(held, HeldLink)
        with torch.no_grad():
            if self.diagonal or not self.learned:
                held.weight.fill_(1.0)
            else:
                draw_evenly(held.weight, 1 / (self.read + self.written))
            for name, parameter in held.named_parameters():
                if name != "weight":
                    parameter.fill_(1.0 if name == "norm_weight" else 0.0)

    def apply(self, held: Held, x: Tensor) -> Tensor:
        assert isinstance(held, HeldLink)
        return held(x)  # type: ignore[no-any-return]

    def link(self, held: Held, like: Tensor) -> Link:
        assert isinstance(held, HeldLink)
        return held.link()


@final
class HeldLink(nn.Module):
    """The numbers of a `LinkMap`.

    Attributes:
        weight: `[copies, written, read]`, or `[copies, width]` of a diagonal map; a buffer where it is fixed.
        bias: `[copies, d_out]` or None.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, kind: LinkMap) -> None:
        super().__init__()
        self.kind = kind
        weight = (
            torch.empty(kind.copies, kind.d_out)
            if kind.diagonal
            else torch.empty(kind.copies, kind.written, kind.read)
        )
        if kind.learned:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)
        self.bias = nn.Parameter(torch.empty(kind.copies, kind.d_out)) if kind.bias else None
        for name, shape in kind.norm_parts.items():
            self.register_parameter(f"norm_{name}", nn.Parameter(torch.empty(shape)))

    @property
    def norm(self) -> HeadNorm | None:
        """The norm with its numbers."""
        norm = self.kind.norm
        if norm is None or not self.kind.norm_parts:
            return norm
        return replace(norm, **{name: getattr(self, f"norm_{name}") for name in self.kind.norm_parts})

    def link(self) -> Link:
        """As a link of a chain; a view where no channels pass."""
        weight, kind = self.weight, self.kind
        if not kind.diagonal:
            weight = weight.mT
            if (kind.read, kind.written) != (kind.d_in, kind.d_out):
                weight = F.pad(weight, (0, kind.passed, 0, kind.d_in - kind.read))
                if kind.passed:
                    passing = torch.zeros_like(weight[0])
                    passing[kind.read : kind.read + kind.passed, kind.written :].fill_diagonal_(1.0)
                    weight = weight + passing
        return Link(weight, self.bias, self.norm, kind.learned)

    @torch.no_grad()
    def load(self, given: Link) -> None:
        """Take the numbers of a link."""
        kind, weight = self.kind, given.weight
        if not kind.diagonal:
            weight = weight[:, : kind.read, : kind.written].mT
        self.weight.copy_(weight)
        if self.bias is not None:
            self.bias.copy_(torch.zeros_like(self.bias) if given.bias is None else given.bias)
        for name, tensor in (given.norm.tensors() if given.norm is not None else {}).items():
            getattr(self, f"norm_{name}").copy_(tensor)

    def forward(self, x: Tensor) -> Tensor:
        """Apply copy i to stream i, `[batch, streams, length, d_in]`; see `Link`."""
        kind, streams, weight, bias = self.kind, x.shape[1], self.weight, self.bias
        if 1 < streams < kind.copies:
            x = x.repeat_interleave(kind.copies // streams, dim=1)
        elif kind.copies < streams:
            weight = weight.repeat_interleave(streams // kind.copies, dim=0)
            bias = None if bias is None else bias.repeat_interleave(streams // kind.copies, dim=0)
        if kind.diagonal:
            y = x * weight[:, None, :]
        else:
            read = x[..., : kind.read]
            if streams == 1:
                y = split_heads(F.linear(read[:, 0], weight.flatten(0, 1)), kind.copies)
            else:
                y = through_own_map(read, weight.mT)
            if kind.passed:
                rest = x[..., kind.read : kind.read + kind.passed].expand(-1, y.shape[1], -1, -1)
                y = torch.cat([y, rest], dim=-1)
        y = y if bias is None else y + bias[:, None, :]
        norm = self.norm
        return y if norm is None else norm(y)


def _passing(link: Link) -> tuple[int, int]:
    """How many channels pass through the numbers of a link, and how many come out at the end as they are."""
    d_in, d_out = link.d_in, link.d_out
    if link.diagonal or not link.learned:
        return d_in, 0
    weight = link.weight
    nonzero = weight.ne(0).any(dim=2).any(dim=0).nonzero()
    read = int(nonzero.max()) + 1 if len(nonzero) else d_in
    as_it_is = torch.zeros_like(weight[0])
    rows = torch.arange(max(0, d_in - d_out), d_in)
    as_it_is[rows, rows + d_out - d_in] = 1.0
    alike = (weight == as_it_is).all(dim=2).all(dim=0).tolist()
    passed = next((i for i, same in enumerate(reversed(alike)) if not same), d_in)
    if passed in (0, d_in, d_out) or bool(weight[:, : d_in - passed, d_out - passed :].any()):
        return read, 0
    return d_in - passed, passed
