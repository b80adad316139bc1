"""Requirements of rewrites as data, and checks shared by several rewrites."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, final

from torch import Tensor

from triptych.core.algebra.forms import are_finite
from triptych.core.algebra.rewritten import RewriteRefusedError, Rewritten, rewritten
from triptych.core.algebra.semantics import ALIKE_FOR_HEADS, HEADS_OF
from triptych.core.algebra.weights import SIDES, AttentionWeights, Chain, Side

INPUT_SIDES: tuple[Side, ...] = ("q", "k", "v")


class Trait(NamedTuple):
    """A feature of layers for which some rewrites are refused."""

    words: str  # the feature in the plural
    there: Callable[
        [AttentionWeights], bool
    ]  # returns True for a layer with the feature


@final
@dataclass(frozen=True)
class Need:
    """A requirement of a rewrite: the absence of refused traits and of unlisted fields.

    Refusals, a column of the table of rewrites and the checks listed in certificates are derived from it.

    Attributes:
        against: refused traits, mapped to the reasons given by refusals.
        allows: fields of `Semantics` that may be set, unless a trait refuses their value. A layer with any
            other field is refused, so that a new field is refused until a requirement names it.
        of: part of the layer in question ("W_QK"), where some options of a rewrite require less.
    """

    against: Mapping[str, str]
    allows: frozenset[str]
    of: str = ""

    @property
    def where(self) -> str:
        """Refused traits in words, for the table of rewrites."""
        words = ", ".join(TRAITS[trait].words for trait in self.against)
        return f"{self.of}: {words}" if self.of else words

    @property
    def checked(self) -> tuple[str, ...]:
        """Absent traits in words, for certificates."""
        before = f"{self.of}: " if self.of else ""
        return tuple(f"{before}no {TRAITS[trait].words}" for trait in self.against)

    def why_not(self, weights: AttentionWeights) -> str:
        """Return the reason why a layer does not satisfy the requirement; "" if it does."""
        semantics = weights.semantics
        words = {
            name: getattr(semantics, name)
            for name in ("clip", "soft_cap", "dropout", "positions")
        }
        for trait, why in self.against.items():
            if TRAITS[trait].there(weights):
                return why.format(trait=TRAITS[trait].words, **words)
        if unknown := semantics.beyond(self.allows):
            return (
                f"the layer has {named(unknown)}, which this does not take into account"
            )
        return ""

    def require(
        self, name: str, weights: AttentionWeights, advice: str = "", about: str = ""
    ) -> None:
        """Raise RewriteRefusedError unless a layer satisfies the requirement.

        `name` is the name of the rewrite, and `about` comes before the reason in the message.
        """
        if reason := self.why_not(weights):
            raise RewriteRefusedError(name, about + reason, advice)


def _scheme_trait(words: str, scheme: str) -> Trait:
    return Trait(words, lambda weights: weights.semantics.positions == scheme)


def _field_trait(words: str, *names: str) -> Trait:
    return Trait(
        words,
        lambda weights: any(
            getattr(weights.semantics, name) is not None for name in names
        ),
    )


TRAITS: dict[str, Trait] = {
    "rotary": _scheme_trait("rotary positions", "rotary"),
    "disentangled": Trait(
        "disentangled positions",
        lambda weights: (
            (bias := weights.semantics.bias) is not None and bias.reads_content
        ),
    ),
    "alibi": _scheme_trait("ALiBi", "alibi"),
    "relative": _scheme_trait("relative position biases", "relative"),
    "qk_norm": _field_trait("QK-norm", "q_norm", "k_norm"),
    "v_norm": _field_trait("norms of values", "v_norm"),
    "clip": _field_trait("clipping", "clip"),
    "soft_cap": _field_trait("soft caps", "soft_cap"),
    "sinks": _field_trait("sinks", "sinks"),
    "gate": _field_trait("gates", "gate"),
    "channel_gate": Trait(
        "gates of channels",
        lambda weights: (
            (gate := weights.semantics.gate) is not None and gate.per_channel
        ),
    ),
    "dropout": Trait(
        "attention dropout", lambda weights: weights.semantics.dropout > 0
    ),
    "no_rotary": Trait(
        "other than rotary positions", lambda weights: weights.semantics.rotary is None
    ),
    "of_patches": Trait(
        "positions of patches",
        lambda weights: (
            (rotary := weights.semantics.rotary) is not None
            and rotary.places is not None
        ),
    ),
    "window": _field_trait("windows", "window", "chunk"),
    "temperature": _field_trait(
        "temperatures that grow with the position", "temperature"
    ),
    "compared": _field_trait("scores other than products", "scores"),
    "both_ways": Trait(
        "attention to later tokens or another text",
        lambda weights: weights.semantics.kind != "causal",
    ),
    "growing": Trait(
        "rotations that change with the length of the text",
        lambda weights: (
            (rotary := weights.semantics.rotary) is not None
            and rotary.long is not None
            and (rotary.long.grows or rotary.long.times != 1)
        ),
    ),
    "biased": Trait(
        "biases",
        lambda weights: (
            weights.o_bias is not None
            or any(link.bias is not None for link in weights.links())
        ),
    ),
    "no_output_bias": Trait(
        "outputs without a bias", lambda weights: "o" not in weights.bias_slots
    ),
}
# What rewrites rely on: scores depend on queries and keys through W_Q W_Kᵀ ("products"); a number added to
# a row of scores cancels ("shifts"); channels of values may be mixed ("values"); the weights of a row sum to
# 1 and mixed values reach W_O unweighted ("sums"); keys and values may be computed from one latent
# ("latent"); `fold_norm` knows everything that reads the layer's input ("input").
Property = Literal["products", "shifts", "values", "sums", "latent", "input"]
# Properties that each field of `Semantics` breaks. Where only some values of a field break a property (gates
# of channels, biases that read queries and keys), a trait refuses the values.
BREAKS: Mapping[str, tuple[Property, ...]] = {
    "scale": (),
    "kind": (),
    "q_norm": ("products",),
    "k_norm": ("products",),
    "v_norm": ("values",),
    "clip": ("products", "values"),
    "rotary": ("products", "latent"),
    "temperature": (),
    "bias": (),
    "soft_cap": ("shifts",),
    "window": (),
    "chunk": (),
    "sinks": ("shifts", "sums"),
    "dropout": ("sums",),
    "gate": ("sums",),
    "scores": ("products",),
}


def _keeping(*properties: Property) -> frozenset[str]:
    """Return the fields compatible with all given properties."""
    return frozenset(
        field for field, broken in BREAKS.items() if not set(properties) & set(broken)
    )


_VALUES_NORMED = "the values of each head are normalised after their map"
_CLIPPED = "queries, keys and values are clipped at ±{clip:g}, channel by channel and with their biases"
_NORMALISED = "queries and keys are normalised (QK-norm), which depends on the basis of their channels"
_MET = "distances meet queries and keys in the same channels (disentangled positions)"
# Requirements for mixing the channels between the two maps of a form.
CHANNELS_FREE: dict[Literal["qk", "ov"], Need] = {
    "qk": Need(
        {
            "clip": _CLIPPED,
            "rotary": "under rotary positions only one non-zero complex scalar per rotary pair commutes with "
            "the rotation, so key channels cannot be mixed",
            "disentangled": _MET,
            "qk_norm": _NORMALISED,
        },
        _keeping("products"),
        "W_QK",
    ),
    "ov": Need(
        {
            "clip": _CLIPPED,
            "v_norm": _VALUES_NORMED,
            "channel_gate": "each channel of a head's values has a gate of its own, so they cannot be mixed",
        },
        _keeping("values"),
        "W_OV",
    ),
}
# Requirement for scores being sums over rotary pairs of queries and keys.
ROTARY_PAIRS_MEET = Need(
    {
        "no_rotary": "the layer has no rotary pairs: its positions are {positions}, not rotary",
        "qk_norm": _NORMALISED,
        "of_patches": "rotary pairs turn by rows and columns of patches, and what they carry is counted over "
        "distances in a text",
        "clip": _CLIPPED,
    },
    _keeping("products") - {"bias"} | {"rotary"},
    "W_QK of rotary heads",
)
# Requirement for mixing the channels of W_QK, or for treating its rotary pairs separately.
CHANNELS_OR_PAIRS = Need(
    {
        trait: why
        for trait, why in {
            **CHANNELS_FREE["qk"].against,
            **ROTARY_PAIRS_MEET.against,
        }.items()
        if trait not in ("rotary", "no_rotary")
    },
    _keeping("products") | {"rotary"},
    "W_QK",
)
# Requirement for scores depending on queries and keys through W_Q W_Kᵀ only.
SCORES_ARE_THE_FORM = Need(
    {
        "rotary": "under rotary positions the form depends on the distance, so no one matrix is it",
        "disentangled": _MET,
        "qk_norm": "queries and keys are normalised before their product (QK-norm)",
        "clip": _CLIPPED,
    },
    _keeping("products"),
)
# Requirement for dropping the key bias: it adds the same value to all scores of a query.
KEY_BIAS_BLIND = Need(
    {
        "rotary": "under rotary positions the key bias is turned with each key, so it does not add the same "
        "number to every score of a query",
        "disentangled": "distances meet the keys with their bias (disentangled positions), each with another "
        "number",
        "qk_norm": "the keys are normalised with their bias (QK-norm), so it is more than an addition to a "
        "row",
        "clip": _CLIPPED,
        "soft_cap": "the scores are soft-capped at ±{soft_cap:g}, and what a bias adds to a row comes out of "
        "the cap as another number for every key",
        "sinks": "something takes part in the softmax besides the keys (a sink), and its score does not move "
        "with theirs",
    },
    _keeping("products", "shifts"),
)
# Requirement for a value bias being a bias of the output.
VALUE_BIAS_PASSES = Need(
    {
        "dropout": "attention dropout of {dropout:g} is on, as while training: rows of weights do not sum to "
        "1",
        "sinks": "something takes part in the softmax besides the keys (a sink): rows over the keys sum to "
        "less than 1",
        "gate": "each token takes another share of what a head moves (a gate), and of its value bias with it",
        "clip": _CLIPPED,
        "v_norm": _VALUES_NORMED,
        "no_output_bias": "the output map has no bias slot in the target format",
    },
    _keeping("values", "sums"),
)
# Requirement for computing keys and values of all heads from one latent.
ONE_LATENT = Need(
    {
        "rotary": "under rotary positions keys would have to be turned between the latent and the query; "
        "decoupled rotary makes it bounded, and is not part of this writing",
        "disentangled": _MET,
    },
    _keeping("latent"),
    "without a format",
)
# Requirement for the format of DeepSeek's layers: decoupled rotary keys, and only features of these layers.
DECOUPLED = Need(
    {
        "no_rotary": "the positions are {positions}, and DeepSeek's layers have rotary ones",
        "biased": "maps have biases, and the format has no place for one of the queries",
        "clip": _CLIPPED,
        "v_norm": _VALUES_NORMED,
        **dict.fromkeys(
            (
                *(
                    "qk_norm",
                    "of_patches",
                    "growing",
                    "soft_cap",
                    "sinks",
                    "gate",
                    "window",
                    "temperature",
                ),
                *("compared", "both_ways"),
            ),
            "DeepSeek's layers have no {trait}",
        ),
    },
    frozenset({"scale", "kind", "rotary", "dropout"}),
    "with a format",
)
# Requirement for reordering heads: no position bias per head. Distance embeddings move with their heads.
HEADS_ALIKE = Need(
    dict.fromkeys(
        ("alibi", "relative"),
        "{positions} positions add a bias of each head's own, which would stay in its place",
    ),
    frozenset({*ALIKE_FOR_HEADS, *HEADS_OF}),
)
# Requirement for changing the layer's input: whatever reads it besides the maps is known to `fold_norm`.
INPUT_READ_BY_MAPS = Need({}, _keeping("input"))


def require_whole_number(name: str, what: str, value: object) -> None:
    """Refuse a value other than a whole number before it is compared with sizes."""
    if type(value) is not int:
        raise RewriteRefusedError(
            name, f"{what} is {value!r}: it must be a whole number"
        )


def require_one_each(
    name: str,
    what: str,
    given: int | Sequence[int],
    heads: int,
    side: str,
    most: int,
    why: str,
) -> list[int]:
    """Return one number per key or value head (`heads` in total); a single number applies to all heads.

    Refuse a list of the wrong length, and values outside 1 to `most`; `why` explains the limit.
    """
    numbers = list(given) if isinstance(given, Sequence) else [given] * heads
    if len(numbers) != heads:
        plural = "s" if heads > 1 else ""
        raise RewriteRefusedError(
            name,
            f"{what} names {len(numbers)} numbers: there are {heads} {side} head{plural}, and each takes one",
        )
    for number in numbers:
        require_whole_number(name, what, number)
        if not 1 <= number <= most:
            raise RewriteRefusedError(name, f"{what} is {number}: {why} 1 to {most}")
    return numbers


def require_finite(name: str, weights: AttentionWeights) -> None:
    """Refuse layers with NaN or infinity in maps, norms or other learned parameters."""
    # The message names the first tensor with NaN or infinity: of the maps, the norms, then the semantics.
    found = list[tuple[str, Tensor | None]]()
    for side in SIDES:
        for link in weights.chain(side):
            found += [
                (f"a map of {side}", link.weight),
                (f"a bias of {side}", link.bias),
            ]
    found.append(("the bias of o", weights.o_bias))
    for which, norm in (("norm", weights.norm), ("memory's norm", weights.memory_norm)):
        if norm is not None:
            found += [
                (f"the weight of the {which}", norm.weight),
                (f"the bias of the {which}", norm.bias),
            ]
    for what, numbers in (*found, *weights.semantics.learned().items()):
        if numbers is not None and not are_finite(numbers):
            bad = int((~numbers.isfinite()).sum())
            raise RewriteRefusedError(
                name,
                f"{bad:,} of {numbers.numel():,} numbers in {what} are NaN or infinite",
            )


def require_nothing_between(
    name: str, side: Side, chain: Chain, advice: str = ""
) -> None:
    """Refuse a chain with a norm after any map: no part of a map can be moved through a norm."""
    for number, link in enumerate(chain, start=1):
        if link.norm is not None:
            raise RewriteRefusedError(
                name, f"there is a norm after map {number} of {side}", advice
            )


def require_last_map(name: str, side: Side, chain: Chain) -> None:
    """Refuse to change the channels of a chain unless its last map can absorb the change.

    A learned matrix at the end of q, k or v absorbs it. In any other chain the change reaches an
    earlier map, and must not pass a norm.
    """
    if side == "o" or not chain or not chain[-1].learned or chain[-1].diagonal:
        require_nothing_between(name, side, chain[:-1])


def share_a_map(one: Chain, other: Chain) -> bool:
    """Return True if two chains have a map in common."""
    return not {id(link) for link in one}.isdisjoint(id(link) for link in other)


def sharing_sides(weights: AttentionWeights, side: Side) -> tuple[Side, ...]:
    """Return the further chains among q, k and v with a map in common with the given chain."""
    return tuple(
        other
        for other in INPUT_SIDES
        if other != side and share_a_map(weights.chain(side), weights.chain(other))
    )


def separate(chain: Chain) -> Chain:
    """Clone the maps of a chain to undo sharing."""
    return tuple(
        replace(
            link,
            weight=link.weight.clone(),
            bias=None if link.bias is None else link.bias.clone(),
        )
        for link in chain
    )


def with_chains(
    weights: AttentionWeights, chains: dict[Side, Chain]
) -> AttentionWeights:
    return replace(weights, **{str(side): chain for side, chain in chains.items()})  # type: ignore[arg-type]


def unchanged(name: str, weights: AttentionWeights, note: str) -> Rewritten:
    """Return the weights unchanged, with a bit-exact record whose note has the reason."""
    return rewritten(name, "bit-exact", weights, weights, notes=(note,))


def named(names: Sequence[str]) -> str:
    """Join names in a sentence: "q", "k and v", "q, k and v"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
