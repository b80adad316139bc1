"""What a writing costs: parameters, multiplications, memory.

Everything is counted from the chains of maps and from what they share; no parameterisation is known
here by name. Shapes are enough: weights on the "meta" device do.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from triptych.core.algebra.weights import AttentionWeights, Chain, Link

Route = Literal["expanded", "absorbed"]


@final
@dataclass(frozen=True)
class WritingCost:
    """The cost of one layer's writing, before anything is said of lengths."""

    parameters: int  # biases included
    query_flops: int
    memory_flops: int
    output_flops: int
    pair_flops: int  # for one pair of a query and a key: its score, and its share of the output, all heads
    cached_numbers: int  # what is kept of a token while decoding

    @property
    def token_flops(self) -> int:
        """The operations of a token that is query and key in one, as in self-attention, without its pairs."""
        return self.query_flops + self.memory_flops + self.output_flops


def writing_cost(weights: AttentionWeights) -> WritingCost:
    """Count what a writing costs, from its shapes and from what it shares."""
    memory_flops = maps_flops((weights.k, weights.v))
    return WritingCost(
        parameters=weights.num_parameters,
        query_flops=maps_flops((weights.k, weights.v, weights.q)) - memory_flops,
        memory_flops=memory_flops,
        # Heads that share the last map are summed before it.
        output_flops=maps_flops((weights.o[:-1],), weights.num_heads)
        + maps_flops((weights.o[-1:],))
        + _gate_cost(weights)[0],
        pair_flops=2 * weights.num_heads * (_out_width(weights, weights.q) + _out_width(weights, weights.v)),
        cached_numbers=cached_numbers(weights),
    )


def maps_flops(chains: Sequence[Chain], streams: int = 1) -> int:
    """Floating-point operations of chains of maps for one token; a map that several use counts once."""
    flops: dict[int, int] = {}
    for chain in chains:
        entering = streams
        for link in chain:
            entering = max(entering, link.copies)
            flops.setdefault(id(link), link.flops * (entering // link.copies))
    return sum(flops.values())


def cached_numbers(weights: AttentionWeights) -> int:
    """Numbers kept of a token while decoding."""
    entries = {
        tuple(id(link) for link in made): _chain_numbers(weights, made)
        for made in (_applied_before_storing(weights, chain)[0] for chain in (weights.k, weights.v))
    }
    return sum(entries.values())


def _applied_before_storing(weights: AttentionWeights, chain: Chain) -> tuple[Chain, Chain]:
    """A chain of keys or values, cut where a token is stored: what is applied before, and after."""
    common = [i for i, link in enumerate(chain) if link in weights.k and link in weights.v]
    if common and weights.k != weights.v:
        cut = common[-1] + 1
    else:
        cut = max((i + 1 for i, link in enumerate(chain) if link.learned), default=0)
    return chain[:cut], chain[cut:]


def _out_width(weights: AttentionWeights, chain: Chain) -> int:
    """Width of what a chain makes, one head's."""
    return chain[-1].d_out if chain else weights.d_model


def _gate_cost(weights: AttentionWeights) -> tuple[int, int]:
    """Operations for the gates of all heads of a token, and their parameters."""
    gate = weights.semantics.gate
    return (0, 0) if gate is None else (gate.flops, gate.num_parameters)


def _chain_numbers(weights: AttentionWeights, chain: Chain) -> int:
    """Numbers that a chain makes of one token, all copies."""
    return max(link.copies for link in chain) * chain[-1].d_out if chain else weights.d_model


@final
@dataclass(frozen=True)
class PassCost:
    """The cost of one pass of a layer: some queries, over the keys they may see."""

    route: Route  # "expanded" where keys and values are made of what is remembered of each token
    flops: int  # of the matrix products, a multiplication and an addition being two
    diagonal_flops: int  # multiplications by diagonal maps (one a channel), which are not in `flops`
    weight_numbers: int  # parameters of the maps that are used, biases included
    moved_numbers: int  # numbers, `weight_numbers` apart, that pass between memory and processor in the ideal
    kept_numbers: int  # numbers that training keeps for the backward pass, each tensor once
    pair_numbers: int  # attention weights, one a head and pair: kept besides where attention is written out


def pass_cost(
    weights: AttentionWeights,
    query_len: int,
    *,
    cached: int = 0,
    memory_len: int | None = None,
    route: Route | None = None,
) -> PassCost:
    """Count one pass over one sequence."""
    if memory_len is not None and cached > memory_len:
        raise ValueError(f"{cached} tokens are cached, but the memory has {memory_len}")
    expanded = _Pass(weights, query_len, cached, memory_len, "expanded").cost()
    stored = (_applied_before_storing(weights, chain)[1] for chain in (weights.k, weights.v))
    if not any(link.learned for chain in stored for link in chain):
        if route == "absorbed":
            raise ValueError("these weights make keys and values before they are stored: nothing to absorb")
        return expanded
    absorbed = _Pass(weights, query_len, cached, memory_len, "absorbed").cost()
    if route is None:
        return absorbed if absorbed.flops < expanded.flops else expanded
    return absorbed if route == "absorbed" else expanded


@dataclass(frozen=True)
class _Value:
    """Something a pass has made: by which maps, for how many tokens, how many vectors of what width."""

    key: tuple[object, ...]
    tokens: int
    streams: int
    width: int


class _Pass:
    """Walks through one pass and adds up; what two chains have in common is made once."""

    def __init__(
        self, weights: AttentionWeights, query_len: int, cached: int, memory_len: int | None, route: Route
    ) -> None:
        self.weights = weights
        self.query_len = query_len
        self.cached = cached
        self.route = route
        self.key_len = cached + query_len if memory_len is None else memory_len
        self.source = "input" if memory_len is None else "memory"
        self.flops = 0
        self.diagonal_flops = 0
        self.used: dict[int, Link] = {}
        self.numbers: dict[tuple[object, ...], int] = {}
        self.kept: set[tuple[object, ...]] = set()

    def cost(self) -> PassCost:
        """Walk, and give the sums."""
        weights = self.weights
        heads = self.weights.num_heads
        x = self._value(("input",), self.query_len, 1, weights.d_model)
        q = self._chain(x, weights.q)
        (made_k, rest_k), (made_v, rest_v) = (
            _applied_before_storing(weights, chain) for chain in (weights.k, weights.v)
        )
        y = self._value((self.source,), self.key_len - self.cached, 1, weights.d_model)
        k, v = (replace(self._chain(y, made), tokens=self.key_len) for made in (made_k, made_v))
        if self.route == "expanded":
            k = self._chain(k, rest_k)
            v = self._chain(v, rest_v)
        else:
            for link in reversed(rest_k):
                q = self._apply(q, link, transposed=True)
        attended = self._value(("heads",), self.query_len, heads, v.width)
        self.kept |= {q.key, k.key, v.key, attended.key}
        pairs = self.query_len * self.key_len
        self.flops += 2 * heads * pairs * (q.width + v.width)
        if self.route == "absorbed":
            attended = self._chain(attended, rest_v)
        gate_flops, gate_numbers = _gate_cost(weights)
        self.flops += self.query_len * gate_flops
        summed = self._chain(attended, weights.o[:-1])
        if weights.o and (copies := weights.o[-1].copies) < summed.streams:
            summed = self._value(("summed",), self.query_len, copies, summed.width)
        output = self._chain(summed, weights.o[-1:])
        read = {("input",), (self.source,)}
        made = self.numbers.keys() - read - {output.key}
        bias = 0 if weights.o_bias is None else weights.o_bias.numel()
        return PassCost(
            route=self.route,
            flops=self.flops,
            diagonal_flops=self.diagonal_flops,
            weight_numbers=bias + gate_numbers + sum(link.num_parameters for link in self.used.values()),
            moved_numbers=sum(self.numbers[key] for key in read)
            + 2 * sum(self.numbers[key] for key in made)
            + self.cached * cached_numbers(weights)
            + output.tokens * output.width,  # summed over the heads
            kept_numbers=sum(self.numbers[key] for key in self.kept),
            pair_numbers=heads * pairs,
        )

    def _value(self, key: tuple[object, ...], tokens: int, streams: int, width: int) -> _Value:
        self.numbers.setdefault(key, tokens * streams * width)
        return _Value(key, tokens, streams, width)

    def _chain(self, value: _Value, chain: Chain) -> _Value:
        for link in chain:
            value = self._apply(value, link)
        return value

    def _apply(self, value: _Value, link: Link, *, transposed: bool = False) -> _Value:
        streams = max(value.streams, link.copies)
        width = link.d_in if transposed and not link.diagonal else link.d_out
        if not link.learned and not link.diagonal:  # a choice of channels: nothing is computed
            return _Value(value.key, value.tokens, streams, width)
        key = (*value.key, id(link), transposed, value.tokens)
        if key not in self.numbers and value.tokens:
            flops = value.tokens * link.flops * (streams // link.copies)
            if link.diagonal:
                self.diagonal_flops += flops
            else:
                self.flops += flops
            if link.learned:
                self.kept.add(value.key)
            self.used[id(link)] = link
        return self._value(key, value.tokens, streams, width)
