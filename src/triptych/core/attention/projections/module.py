"""`Projections`: the module with the maps of one attention layer."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from triptych import thresholds
from triptych.core.algebra.cost import Route
from triptych.core.algebra.positions import RotaryEmbedding
from triptych.core.algebra.semantics import Semantics, same_norm_structure
from triptych.core.algebra.weights import (
    SIDES,
    AttentionWeights,
    Chain,
    Link,
    Side,
    standard_scale,
)
from triptych.core.attention.projections.maps import (
    ConcatenatedHeads,
    HeadMap,
    LinkMap,
    Stored,
    StoredLink,
    ToHeads,
    split_heads,
    through_own_map,
)

# Name and `HeadMap.channels` of an absorbable map.
_Up = tuple[str, tuple[int, int, int]]


class Projections(nn.Module):
    """The maps of one attention layer.

    Attributes:
        d_model: width of input and output.
        num_heads: number of query heads.
        d_k: width for the scale: scores are divided by √d_k.
        o_proj: W^O, from the concatenated heads to d_model: `nn.Linear`, or `ConcatenatedHeads`.
    """

    o_proj: nn.Linear | ConcatenatedHeads

    def __init__(
        self,
        name: str,
        d_model: int,
        num_heads: int,
        d_k: int,
        maps: Mapping[str, HeadMap],
        chains: Mapping[Side, tuple[str, ...]],
    ) -> None:
        """Create the maps of a parameterisation of this name and draw their values in the order of `maps`."""
        super().__init__()
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_k
        self._maps = maps
        self._chains = chains
        self._name = name
        for name, own in self._maps.items():
            stored = own.make()
            if stored is not None:
                setattr(self, name, stored)
        for name, own in self._maps.items():
            own.initialise(self._stored(name))
        # Keys and values share the first maps of their chains: their output is cached.
        k = self._chains["k"]
        v = self._chains["v"]
        shared = sum(1 for one, other in zip(k, v, strict=False) if one == other)
        self._shared = k[:shared]
        self._after_shared = k[shared:], v[shared:]
        self._ups = self._maps_to_absorb()

    @property
    def caches_keys(self) -> bool:
        """True if keys and values are cached apart; False if one tensor, after a shared map, is cached."""
        return not self._shared

    @property
    def no_two_memories(self) -> str:
        """Reason against keys and values from two sequences; "" if two sequences are supported."""
        return (
            f"{self._name} makes keys and values of one sequence, by the same map"
            if self._shared
            else ""
        )

    @property
    def memory_width(self) -> int:
        """Width of the input of keys, and of values unless they have another input."""
        return self._width_read(self._chains["k"] or self._chains["v"])

    @property
    def value_width(self) -> int:
        """Width of the input of values."""
        return self._width_read(self._chains["v"] or self._chains["k"])

    def _width_read(self, chain: Sequence[str]) -> int:
        """Return the width of the input of a chain."""
        first = self._maps[chain[0]] if chain else None
        return first.d_in if isinstance(first, ToHeads | LinkMap) else self.d_model

    def rotate_cached_keys(self, rotary: RotaryEmbedding) -> RotaryEmbedding | None:
        """Return the rotation of the first cached tensor by which the keys are rotated; None if impossible.

        A latent can be rotated if the key map passes the rotated channels unchanged and values do not read
        them.
        """
        if self.caches_keys:
            return rotary
        if self._ups is None:
            return None
        (k_up, (read, written, passed)), (_, (of_values, _, _)) = self._ups
        # Key channels from `written` on are latent channels from `read` on.
        channels = [*itertools.chain.from_iterable(rotary.pairs)]
        outside = min(channels) < written or max(channels) >= written + passed
        if outside or self._matrices(k_up)[1] is not None or of_values > read:
            return None
        return replace(rotary, start=rotary.start - written + read)

    def queries(
        self, x: Float[Tensor, "batch query_len d_model"]
    ) -> Float[Tensor, "batch num_heads query_len width"]:
        """Compute the queries of every head."""
        return self._apply_chain(self._chains["q"], x[:, None])

    def share_keys_and_values(self, lender: "Projections") -> None:
        """Replace the key and value maps by the maps of another layer, with shared parameters."""
        for name in {*self._chains["k"], *self._chains["v"]}:
            setattr(self, name, getattr(lender, name))

    def project_kv(
        self,
        key_input: Float[Tensor, "batch key_len d_memory"],
        value_input: Float[Tensor, "batch key_len d_values"],
    ) -> tuple[Tensor, ...]:
        """Compute the cached form of each token: tensors `[batch, heads, key_len, width]`.

        The result is keys and values, or a single tensor after the shared maps of keys and values.
        """
        if self._shared:
            return (self._apply_chain(self._shared, key_input[:, None]),)
        # One sequence: the first maps of both chains can be one product.
        if value_input is key_input:
            return tuple(self._apply_chains(self._after_shared, key_input))
        keys, values = self._after_shared
        return self._apply_chain(keys, key_input[:, None]), self._apply_chain(
            values, value_input[:, None]
        )

    def keys_values(self, cached: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Compute keys `[batch, num_key_heads, key_len, width]` and values `[batch, num_value_heads, …]`."""
        if not self._shared:
            k, v = cached
            return k, v
        keys, values = self._after_shared
        return self._apply_chain(keys, cached[0]), self._apply_chain(values, cached[0])

    def project_one_sequence(
        self, x: Float[Tensor, "batch length d_model"]
    ) -> tuple[Float[Tensor, "batch num_heads length width"], tuple[Tensor, ...]]:
        """Compute `queries(x)` and `project_kv(x, x)` for self-attention, with shared maps applied once."""
        cached = (self._shared,) if self._shared else self._after_shared
        if self._chains["q"] == cached[0]:
            keys, *values = self._apply_chains(cached, x)
            return keys, (keys, *values)
        *keys_values, q = self._apply_chains((*cached, self._chains["q"]), x)
        return q, tuple(keys_values)

    def values(
        self, heads: Float[Tensor, "batch num_heads query_len width"], route: Route
    ) -> Float[Tensor, "batch num_heads query_len d_v"]:
        """Return mixed values from the outputs of the operation.

        On the expanded route these are the values; on the absorbed route they are latents, which the value
        map of each head maps to values.
        """
        if route != "absorbed":
            return heads
        assert self._ups is not None
        matrices, bias = self._matrices(self._ups[1][0])
        heads = through_own_map(heads, matrices.mT)
        return heads if bias is None else heads + bias[:, None]

    def output(
        self, heads: Float[Tensor, "batch num_heads query_len d_v"]
    ) -> Float[Tensor, "batch query_len d_model"]:
        """Compute `Σ_i head_i W_i^O` as one product."""
        return self._apply_chain(self._chains["o"], heads)[:, 0]

    def weights(self) -> AttentionWeights:
        """Return the maps as chains of views of the parameters; shared maps and chains are one object."""
        like = next(self.parameters())
        links = {
            name: own.link(self._stored(name), like) for name, own in self._maps.items()
        }
        # Equal chains become one tuple, so that `weights.q is weights.k` where maps are shared.
        chains: dict[tuple[str, ...], Chain] = {}
        for names in self._chains.values():
            chains.setdefault(names, tuple(links[name] for name in names))
        q, k, v, o = (chains[self._chains[side]] for side in SIDES)
        return AttentionWeights(
            d_model=self.d_model,
            num_heads=self.num_heads,
            q=q,
            k=k,
            v=v,
            o=o,
            semantics=Semantics(scale=standard_scale(self.d_k)),
            o_bias=self.o_proj.bias,
        )

    def route(self, query_len: int, key_len: int) -> Route:
        """Return the route with fewer multiplications per head; "expanded" if no map can be absorbed."""
        if self._ups is None:
            return "expanded"
        (_, (k_read, k_written, passed)), (_, (v_read, v_written, _)) = self._ups
        maps = k_read * k_written + v_read * v_written
        expanded = key_len * maps + query_len * key_len * (
            k_written + passed + v_written
        )
        absorbed = query_len * maps + query_len * key_len * (k_read + passed + v_read)
        return "absorbed" if absorbed < expanded else "expanded"

    @property
    def is_absorbed_exact_below_one(self) -> bool:
        """True if the absorbed route is exact for weights with a sum below 1: value maps must lack a bias."""
        return self._ups is None or self._matrices(self._ups[1][0])[1] is None

    def absorbed(
        self, q: Tensor, cached: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values of the absorbed route: attention to the cached latent itself.

        The key bias is left out: it adds a constant to all scores of a query.
        """
        assert self._ups is not None
        ((name, (read, written, passed)), (_, (of_values, _, _))), (kept,) = (
            self._ups,
            cached,
        )
        moved = through_own_map(q[..., :written], self._matrices(name)[0])
        keys = kept if read + passed == kept.shape[3] else kept[..., : read + passed]
        values = keys if of_values == keys.shape[3] else kept[..., :of_values]
        return (
            torch.cat([moved, q[..., written:]], dim=-1) if passed else moved,
            keys,
            values,
        )

    def _maps_to_absorb(self) -> "tuple[_Up, _Up] | None":
        """Return the key map and the value map after the shared maps; None if a map cannot be absorbed."""
        # A map can be absorbed if it is the only map after the shared maps, a learned matrix for every head.
        like = next(iter(self.parameters()), torch.empty(0))
        found: list[_Up] = []
        for names in self._after_shared if self._shared else ():
            own = self._maps[names[0]] if len(names) == 1 else None
            if own is None or own.channels is None:
                return None
            if own.link(self._stored(names[0]), like).copies != self.num_heads:
                return None
            found.append((names[0], own.channels))
        one_stream = all(
            self._maps[name].link(self._stored(name), like).copies == 1
            for name in self._shared
        )
        if len(found) != 2 or found[1][1][2] or not one_stream:
            return None
        return found[0], found[1]

    def _matrices(self, name: str) -> tuple[Tensor, Tensor | None]:
        return self._maps[name].matrices(self._stored(name))

    @torch.no_grad()
    def load(self, weights: AttentionWeights) -> None:
        """Copy weights of the same structure into the parameters; missing biases become 0.

        The query map absorbs the ratio of the scale of `weights` to that of the parameterisation. Raise
        ValueError for another structure, or another fixed map.
        """
        mine = self.weights()
        weights = weights.with_scale(mine.scale)
        difference = structural_difference(mine, weights)
        if difference:
            raise ValueError(f"{self._name} cannot hold these weights: {difference}")
        names = dict[int, str]()
        for side in SIDES:
            names |= zip(map(id, mine.chain(side)), self._chains[side], strict=True)
        # Links are views of the parameters, except a padded link of a `StoredLink`.
        for own, given in zip(mine.links(), weights.links(), strict=True):
            stored = self._stored(names[id(own)])
            if isinstance(stored, StoredLink):
                stored.load(given)
                continue
            if own.learned:
                own.weight.copy_(given.weight)
            elif not same_but_rounded(own.weight, given.weight):
                raise ValueError(
                    f"{self._name} cannot hold these weights: a fixed map differs"
                )
            if own.bias is not None:
                own.bias.copy_(
                    torch.zeros_like(own.bias) if given.bias is None else given.bias
                )
        if mine.o_bias is not None:
            mine.o_bias.copy_(
                torch.zeros_like(mine.o_bias)
                if weights.o_bias is None
                else weights.o_bias
            )

    @torch.no_grad()
    def adopt(self, weights: AttentionWeights) -> None:
        """Replace the parameters by the tensors of weights of the same structure.

        Tensors with the same memory layout are not copied. The parameterisation must store every map as one
        learned parameter, with a second parameter for the bias, such as `Factored` and `Grouped`.
        """
        mine = self.weights()
        if difference := structural_difference(mine, weights):
            raise ValueError(f"{self._name} cannot hold these weights: {difference}")
        pairs = [(mine.o_bias, weights.o_bias)]
        for own, given in zip(mine.links(), weights.links(), strict=True):
            pairs += [(own.weight, given.weight), (own.bias, given.bias)]
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        for view, numbers in pairs:
            if view is None:
                continue
            stored = view if view._base is None else view._base
            module, _, name = names[id(stored)].rpartition(".")
            if numbers is None:
                numbers = torch.zeros(
                    view.shape, dtype=weights.dtype, device=weights.device
                )
            # Permute to the layout of the stored parameter, whose view the link is.
            strides = view.stride()
            order = sorted(range(view.ndim), key=strides.__getitem__, reverse=True)
            new = nn.Parameter(numbers.permute(order).reshape(stored.shape))
            setattr(self.get_submodule(module), name, new)

    def _stored(self, name: str) -> Stored:
        return getattr(self, name, None)

    def _apply_chain(self, names: tuple[str, ...], x: Tensor) -> Tensor:
        """Apply maps one after another to a stream `[batch, copies, length, width]`."""
        for name in names:
            x = self._maps[name].apply(self._stored(name), x)
        return x

    def _apply_chains(
        self, chains: Sequence[tuple[str, ...]], x: Tensor
    ) -> list[Tensor]:
        """Apply several chains to one input `[batch, length, width]`, with one product of the first maps."""
        names = [chain[0] for chain in chains if chain]
        # No := here: torch.compile would break its graph.
        first = [
            own
            for own in [self._maps[name] for name in names]
            if isinstance(own, ToHeads)
        ]
        biased = {own.bias for own in first}
        if (
            x.device.type not in thresholds.ONE_PRODUCT_ON
            or len(first) < len(chains)
            or len(biased) > 1
        ):
            return [self._apply_chain(chain, x[:, None]) for chain in chains]
        weight = torch.cat([self.get_parameter(f"{name}.weight") for name in names])
        bias = (
            torch.cat([self.get_parameter(f"{name}.bias") for name in names])
            if biased == {True}
            else None
        )
        widths = [own.copies * own.d_out for own in first]
        parts = torch.split(F.linear(x, weight, bias), widths, dim=-1)
        streams = [
            split_heads(part, own.copies)
            for part, own in zip(parts, first, strict=True)
        ]
        return [
            self._apply_chain(chain[1:], stream)
            for chain, stream in zip(chains, streams, strict=True)
        ]


def structural_difference(one: AttentionWeights, other: AttentionWeights) -> str:
    """Return why `other`, perhaps without biases, does not fit the structure of `one`; "" if it fits."""
    if one.num_heads != other.num_heads:
        return f"{one.num_heads} heads, not {other.num_heads}"
    # Sharing of maps must agree, in both directions.
    links: dict[int, Link] = {}
    for side in SIDES:
        mine = one.chain(side)
        theirs = other.chain(side)
        if len(mine) != len(theirs):
            return f"{side} is a chain of {len(mine)} maps, not {len(theirs)}"
        for own, given in zip(mine, theirs, strict=True):
            if own.weight.shape != given.weight.shape:
                return f"a map of {side} is {list(own.weight.shape)}, not {list(given.weight.shape)}"
            if own.learned != given.learned:
                return f"a map of {side} is {'learned' if own.learned else 'fixed'} here only"
            if not same_norm_structure(own.norm, given.norm):
                return f"the norms after a map of {side} differ"
            if own.bias is None and given.bias is not None:
                return f"a map of {side} has no place for its bias"
            if links.setdefault(id(own), given) is not given:
                return f"{side} shares a map here only"
    shared = {id(link) for link in links.values()}
    if len(shared) != len(links):
        return "maps are shared there only"
    if one.o_bias is None and other.o_bias is not None:
        return "there is no place for the output bias"
    return ""


def same_but_rounded(fixed: Tensor, given: Tensor) -> bool:
    """Return True if `given` is `fixed`, or `fixed` rounded to a dtype of lower precision."""
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    return any(torch.equal(fixed.to(dtype).to(fixed.dtype), given) for dtype in dtypes)
