"""The cost of a layer's parameterisation: parameters, multiplications, memory.

All counts are derived from the chains of maps and the maps shared by them, without a list of
parameterisations. Shapes are enough: weights may be on the "meta" device.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, final

from triptych.core.algebra.weights import AttentionWeights, Chain, Link

Route = Literal["expanded", "absorbed"]


@final
@dataclass(frozen=True)
class WritingCost:
    """The cost of one layer's parameterisation, independent of lengths."""

    parameters: int  # biases included
    query_flops: (
        int  # maps of queries, per token; maps shared with keys and values left out
    )
    memory_flops: int  # maps of keys and values, per token
    output_flops: int  # gates and output maps, per token
    pair_flops: (
        int  # score and weighted value, per pair of a query and a key, all heads
    )
    cached_numbers: int  # values cached per token while decoding

    @property
    def token_flops(self) -> int:
        """Operations per token of self-attention, without the products of pairs."""
        return self.query_flops + self.memory_flops + self.output_flops


def writing_cost(weights: AttentionWeights) -> WritingCost:
    """Count the cost of a layer from the shapes of its maps and the maps shared by chains."""
    memory_flops = maps_flops((weights.k, weights.v))
    return WritingCost(
        parameters=weights.num_parameters,
        query_flops=maps_flops((weights.k, weights.v, weights.q)) - memory_flops,
        memory_flops=memory_flops,
        # Heads that share the last map are summed before it.
        output_flops=maps_flops((weights.o[:-1],), weights.num_heads)
        + maps_flops((weights.o[-1:],))
        + _gate_cost(weights)[0],
        pair_flops=2
        * weights.num_heads
        * (_out_width(weights, weights.q) + _out_width(weights, weights.v)),
        cached_numbers=cached_numbers(weights),
    )


def maps_flops(chains: Sequence[Chain], streams: int = 1) -> int:
    """Count operations of chains for one token, which `streams` vectors enter; shared maps count once."""
    flops: dict[int, int] = {}
    for chain in chains:
        entering = streams
        for link in chain:
            entering = max(entering, link.copies)
            flops.setdefault(id(link), link.flops * (entering // link.copies))
    return sum(flops.values())


def cached_numbers(weights: AttentionWeights) -> int:
    """Count the values cached per token while decoding."""
    entries = {
        tuple(id(link) for link in made): _chain_numbers(weights, made)
        for made in (
            _applied_before_storing(weights, chain)[0]
            for chain in (weights.k, weights.v)
        )
    }
    return sum(entries.values())


def _applied_before_storing(
    weights: AttentionWeights, chain: Chain
) -> tuple[Chain, Chain]:
    """Split a chain of keys or values at the cache: maps before storing, and maps after it."""
    # Keys and values with common maps share a cache behind the last common map. Other chains are stored
    # behind the last learned map.
    common = [
        i for i, link in enumerate(chain) if link in weights.k and link in weights.v
    ]
    if common and weights.k != weights.v:
        cut = common[-1] + 1
    else:
        cut = max((i + 1 for i, link in enumerate(chain) if link.learned), default=0)
    return chain[:cut], chain[cut:]


def _out_width(weights: AttentionWeights, chain: Chain) -> int:
    return chain[-1].d_out if chain else weights.d_model


def _gate_cost(weights: AttentionWeights) -> tuple[int, int]:
    """Count operations per token and parameters of all gates."""
    gate = weights.semantics.gate
    return (0, 0) if gate is None else (gate.flops, gate.num_parameters)


def _chain_numbers(weights: AttentionWeights, chain: Chain) -> int:
    """Count the output values of a chain for one token."""
    return (
        max(link.copies for link in chain) * chain[-1].d_out
        if chain
        else weights.d_model
    )


@final
@dataclass(frozen=True)
class PassCost:
    """The cost of one pass of a layer: a number of queries over all keys."""

    route: Route  # "expanded" if keys and values are computed from the cache
    flops: int  # operations of matrix products: a multiplication and an addition count as two
    diagonal_flops: int  # multiplications by diagonal maps, not included in `flops`
    weight_numbers: int  # parameters of the maps in use, biases included
    moved_numbers: int  # memory traffic besides `weight_numbers` in values; each tensor counts once
    kept_numbers: (
        int  # values stored for the backward pass in training, each tensor once
    )
    pair_numbers: (
        int  # attention weights of all heads and pairs, also stored if materialised
    )


def pass_cost(
    weights: AttentionWeights,
    query_len: int,
    *,
    cached: int = 0,
    memory_len: int | None = None,
    route: Route | None = None,
) -> PassCost:
    """Count the cost of one pass over one sequence; the cheaper route if None is given."""
    if memory_len is not None and cached > memory_len:
        raise ValueError(f"{cached} tokens are cached, but the memory has {memory_len}")
    expanded = _Pass(weights, query_len, cached, memory_len, "expanded").cost()
    # Without learned maps behind the cache there is only the expanded route.
    stored = (
        _applied_before_storing(weights, chain)[1] for chain in (weights.k, weights.v)
    )
    if not any(link.learned for link in itertools.chain.from_iterable(stored)):
        if route == "absorbed":
            raise ValueError(
                "these weights make keys and values before they are stored: nothing to absorb"
            )
        return expanded
    absorbed = _Pass(weights, query_len, cached, memory_len, "absorbed").cost()
    if route is None:
        return absorbed if absorbed.flops < expanded.flops else expanded
    return absorbed if route == "absorbed" else expanded


@dataclass(frozen=True)
class _Value:
    """A tensor of a pass: `streams` vectors of a width for each token."""

    key: tuple[object, ...]  # the maps that produced it
    tokens: int
    streams: int
    width: int


class _Pass:
    """Counter of one pass; tensors common to two chains are computed once."""

    def __init__(
        self,
        weights: AttentionWeights,
        query_len: int,
        cached: int,
        memory_len: int | None,
        route: Route,
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
        """Run through the pass and return the sums."""
        weights = self.weights
        heads = self.weights.num_heads
        x = self._value(("input",), self.query_len, 1, weights.d_model)
        q = self._chain(x, weights.q)
        (made_k, rest_k), (made_v, rest_v) = (
            _applied_before_storing(weights, chain) for chain in (weights.k, weights.v)
        )
        y = self._value((self.source,), self.key_len - self.cached, 1, weights.d_model)
        k, v = (
            replace(self._chain(y, made), tokens=self.key_len)
            for made in (made_k, made_v)
        )
        if self.route == "expanded":
            k = self._chain(k, rest_k)
            v = self._chain(v, rest_v)
        else:
            # Absorbed: queries pass the transposed maps of keys, and mixed cache entries the maps of values.
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
        # Inputs are read, the output is written, and every other tensor is written and read.
        read = {("input",), (self.source,)}
        made = self.numbers.keys() - read - {output.key}
        bias = 0 if weights.o_bias is None else weights.o_bias.numel()
        return PassCost(
            route=self.route,
            flops=self.flops,
            diagonal_flops=self.diagonal_flops,
            weight_numbers=bias
            + gate_numbers
            + sum(link.num_parameters for link in self.used.values()),
            moved_numbers=sum(self.numbers[key] for key in read)
            + 2 * sum(self.numbers[key] for key in made)
            + self.cached * cached_numbers(weights)
            + output.tokens * output.width,  # summed over the heads
            kept_numbers=sum(self.numbers[key] for key in self.kept),
            pair_numbers=heads * pairs,
        )

    def _value(
        self, key: tuple[object, ...], tokens: int, streams: int, width: int
    ) -> _Value:
        self.numbers.setdefault(key, tokens * streams * width)
        return _Value(key, tokens, streams, width)

    def _chain(self, value: _Value, chain: Chain) -> _Value:
        for link in chain:
            value = self._apply(value, link)
        return value

    def _apply(self, value: _Value, link: Link, *, transposed: bool = False) -> _Value:
        streams = max(value.streams, link.copies)
        width = link.d_in if transposed and not link.diagonal else link.d_out
        if (
            not link.learned and not link.diagonal
        ):  # a choice of channels costs no operations
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
