"""What more than one rewrite asks before it touches a map."""

from collections.abc import Sequence
from dataclasses import replace

from triptych.algebra.forms import are_finite
from triptych.algebra.rewrites.record import RewriteRefusedError, Rewritten, rewritten
from triptych.algebra.semantics import Semantics
from triptych.algebra.weights import SIDES, AttentionWeights, Chain, Side

INPUT_SIDES: tuple[Side, ...] = ("q", "k", "v")


def why_clipping_counts(semantics: Semantics) -> str:
    """Why queries, keys and values must stay the numbers that they are; "" if they need not."""
    if semantics.clip is None:
        return ""
    clip = f"±{semantics.clip:g}"
    return f"queries, keys and values are clipped at {clip}, channel by channel and with their biases"


def why_key_bias_counts(semantics: Semantics) -> str:
    """Why a number added to every score of a query would be seen; "" if the softmax is blind to it."""
    if semantics.positions == "rotary":
        return (
            "under rotary positions the key bias is turned with each key, so it does not add the same number "
            "to every score of a query"
        )
    if semantics.positions == "disentangled":
        return "distances meet the keys with their bias (disentangled positions), each with another number"
    if semantics.qk_norm:
        return "the keys are normalised with their bias (QK-norm), so it is more than an addition to a row"
    if reason := why_clipping_counts(semantics):
        return reason
    if semantics.soft_cap is not None:
        return (
            f"the scores are soft-capped at ±{semantics.soft_cap:g}, and what a bias adds to a row "
            "comes out of the cap as another number for every key"
        )
    if semantics.sinks is not None:
        return (
            "something takes part in the softmax besides the keys (a sink), and its score does not move "
            "with theirs"
        )
    return ""


def require_whole_number(name: str, what: str, value: object) -> None:
    """Refuse what is no whole number before it is compared with sizes."""
    if type(value) is not int:
        raise RewriteRefusedError(name, f"{what} is {value!r}: it must be a whole number")


def require_one_each(name: str, what: str, given: int | Sequence[int], heads: int, side: str) -> list[int]:
    """A whole number for each key or value head, from one that serves all or a sequence."""
    numbers = list(given) if isinstance(given, Sequence) else [given] * heads
    if len(numbers) != heads:
        plural = "s" if heads > 1 else ""
        raise RewriteRefusedError(
            name,
            f"{what} names {len(numbers)} numbers: there are {heads} {side} head{plural}, and each takes one",
        )
    for number in numbers:
        require_whole_number(name, what, number)
    return numbers


def require_finite(name: str, weights: AttentionWeights) -> None:
    """Refuse maps, norms and whatever else is learned of a layer that hold NaN or infinity."""
    of_maps = (
        (f"a {what} of {side}", numbers)
        for side in SIDES
        for link in weights.chain(side)
        for what, numbers in (("map", link.weight), ("bias", link.bias))
    )
    of_norms = (
        (f"the {what} of the {name}", numbers)
        for name, norm in (("norm", weights.norm), ("memory's norm", weights.memory_norm))
        if norm is not None
        for what, numbers in (("weight", norm.weight), ("bias", norm.bias))
    )
    bias_of_output = ("the bias of o", weights.o_bias)
    for what, numbers in (*of_maps, bias_of_output, *of_norms, *weights.semantics.learned().items()):
        if numbers is not None and not are_finite(numbers):
            bad = int((~numbers.isfinite()).sum())
            raise RewriteRefusedError(
                name, f"{bad:,} of {numbers.numel():,} numbers in {what} are NaN or infinite"
            )


def require_nothing_between(name: str, side: Side, chain: Chain, advice: str = "") -> None:
    """Refuse to carry anything out of a chain through what stands after one of its maps."""
    for place, link in enumerate(chain, start=1):
        if link.norm is not None:
            raise RewriteRefusedError(name, f"a norm stands after map {place} of {side}", advice)


def share_a_map(one: Chain, other: Chain) -> bool:
    """Whether two chains have a map in common."""
    return not {id(link) for link in one}.isdisjoint(id(link) for link in other)


def sharing_sides(weights: AttentionWeights, side: Side) -> tuple[Side, ...]:
    """Those of q, k, v that share a map with a side, the side itself left out."""
    return tuple(
        other
        for other in INPUT_SIDES
        if other != side and share_a_map(weights.chain(side), weights.chain(other))
    )


def separate(chain: Chain) -> Chain:
    """The same numbers in maps of their own."""
    return tuple(
        replace(link, weight=link.weight.clone(), bias=None if link.bias is None else link.bias.clone())
        for link in chain
    )


def with_chains(weights: AttentionWeights, chains: dict[Side, Chain]) -> AttentionWeights:
    """The writing with some of its chains changed."""
    return replace(weights, **{str(side): chain for side, chain in chains.items()})  # type: ignore[arg-type]


def unchanged(name: str, weights: AttentionWeights, note: str) -> Rewritten:
    """The weights themselves, and a record that says why there was nothing to do."""
    return rewritten(name, "bit-exact", weights, weights, notes=(note,))


def named(sides: tuple[Side, ...]) -> str:
    """Sides in a sentence: "q", "k and v", "q, k and v"."""
    *first, last = sides
    return f"{', '.join(first)} and {last}" if first else last
