"""Costs of the parameterisations at one size, counted and compared: `cost(CostSpec(...))`."""

import dataclasses
import itertools
from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, final

import torch

from triptych.core.algebra.cost import cached_numbers, pass_cost
from triptych.core.algebra.weights import SIDES, AttentionWeights, Chain, Link
from triptych.core.attention import (
    PARAMETERISATIONS,
    Parameterisation,
    parameterisation,
    parameterisation_class,
)
from triptych.user_code import use_named

Dtype = Literal["fp32", "bf16", "fp16"]
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

# Sizes available as options of parameterisations.
_SIZES = ("d_k", "d_v", "num_kv_heads", "d_latent", "d_shared")


# Upper limit of sizes: larger shapes would overflow.
_LARGEST = 10_000_000


@final
@dataclass(frozen=True)
class CostSpec:
    """The size of one attention layer, and the work it is given.

    Attributes:
        d_model: size of the input and the output.
        num_heads: number of query heads.
        d_k: size of queries and keys per head. Default: d_model / num_heads.
        d_v: size of values per head. Default: d_model / num_heads.
        num_kv_heads: number of key-value heads of 'grouped' and 'differential'.
        d_latent: size of the latent of 'latent'.
        d_shared: number of channels that 'collaborative' shares.
        biases: give every map a bias.
        length: sequence length in training and prefill, in tokens.
        context: context length of a decoding step, in tokens, including the new token.
        batch: batch size.
        dtype: type of weights, activations and cache: fp32, bf16 or fp16.
        parameterisations: names of the parameterisations to count.

    Raises:
        ValueError: a size below 1, a number of heads that should divide d_model but doesn't, a size unused by
            all parameterisations, or an unknown name.
    """

    d_model: int = 512
    num_heads: int = 8
    d_k: int | None = None
    d_v: int | None = None
    num_kv_heads: int | None = None
    d_latent: int | None = None
    d_shared: int | None = None
    biases: bool = False
    length: int = 512
    context: int = 2048
    batch: int = 1
    dtype: str = "fp32"
    parameterisations: tuple[str, ...] = tuple(PARAMETERISATIONS)

    def __post_init__(self) -> None:
        for field in ("d_model", "num_heads", *_SIZES, "length", "context", "batch"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ValueError(f"{field} is {value}: it must be at least 1")
            if value is not None and value > _LARGEST:
                raise ValueError(f"{field} is {value}: it must be at most {_LARGEST:,}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype {self.dtype!r} is not one of {', '.join(DTYPES)}")
        # Default widths require heads that divide d_model.
        if self.d_model % self.num_heads and (self.d_k is None or self.d_v is None):
            raise ValueError(
                f"num_heads {self.num_heads} does not divide d_model {self.d_model}: give both d_k and d_v"
            )
        use_named(self.parameterisations)
        if not self.parameterisations:
            raise ValueError(
                f"no parameterisation is given: choose from {', '.join(PARAMETERISATIONS)}"
            )
        for name, times in Counter(self.parameterisations).items():
            parameterisation_class(name)
            if times > 1:
                raise ValueError(f"{name} is given {times} times")
        known = {
            *itertools.chain.from_iterable(
                _option_names(name) for name in self.parameterisations
            )
        }
        for field in _SIZES:
            if getattr(self, field) is not None and field not in known:
                raise ValueError(
                    f"{field} is given, but {', '.join(self.parameterisations)} has no such size"
                )

    @property
    def key_width(self) -> int:
        """d_k, given or d_model / num_heads."""
        return self.d_model // self.num_heads if self.d_k is None else self.d_k

    @property
    def value_width(self) -> int:
        """d_v, given or d_model / num_heads."""
        return self.d_model // self.num_heads if self.d_v is None else self.d_v

    @property
    def bytes_per_number(self) -> int:
        return DTYPES[self.dtype].itemsize

    def choice(self, name: str) -> Parameterisation:
        """Return a parameterisation with the given options applicable to it."""
        given: dict[str, int | bool | None] = {}
        for option in _option_names(name):
            if option in _SIZES and getattr(self, option) is not None:
                given[option] = getattr(self, option)
            elif option.endswith("_bias"):
                given[option] = self.biases
        return parameterisation(name, **given)


@final
@dataclass(frozen=True)
class Formulas:
    """Forms of a head and their cost, as formulas and as values at this size."""

    W_QK: str  # form of head i as a product of the maps; likewise `W_OV`
    W_OV: str
    parameters: str  # parameters without biases, in d, h, d_k, d_v and specific sizes
    num_parameters: int  # value of the formula
    cache: str  # values cached per token
    num_cached: int  # value of the formula


@final
@dataclass(frozen=True)
class CostRow:
    """Costs of one parameterisation.

    FLOPs count matrix products (a multiplication and an addition are two operations), with every query
    attending to every key: a causal mask would need (length + 1) / 2 pairs per token instead of length, but
    only kernels that skip blocks save the difference. Elementwise operations are not counted: softmax, scale,
    biases and diagonal maps (the m_i of `collaborative`, the factor of `four_matrix`).
    """

    name: str  # name of the parameterisation
    sizes: dict[str, int]  # specific sizes and widths
    parameters: int  # number of parameters, biases included; `parameter_bytes` in the spec's dtype
    parameter_bytes: int
    cached_numbers: (
        int  # per token while decoding; `cache_bytes`: all sequences at the context
    )
    cache_bytes: int
    # per token, forward and backward: three times `prefill_flops`, as each product has two products in the
    # backward pass. The gradient of the layer's input is included, as inside a network; a first layer with a
    # fixed input does not need it.
    training_flops: int
    prefill_flops: int  # per token of self-attention over `length` tokens, by the route `prefill_route`
    prefill_route: str
    # FLOPs of one new token attending to `context` cached tokens, by `decode_route`: "absorbed" maps queries
    # to the cached tensors, "expanded" recomputes keys and values of every token if they are not cached
    decode_flops: int
    decode_route: str
    # bytes kept for the backward pass by all sequences at `length`, with a fused kernel (tensors of
    # `PassCost.kept_numbers`)
    activation_bytes: int
    weights_bytes: int  # attention weights, kept in addition without a fused kernel
    # bytes moved by one prefill of the batch: the maps once, and `PassCost.moved_numbers` per sequence.
    # `decode_bytes` likewise for one step.
    prefill_bytes: int
    decode_bytes: int
    prefill_intensity: float  # FLOPs per byte moved
    decode_intensity: float
    formulas: Formulas  # formulas of forms, parameters and cache


@final
@dataclass(frozen=True)
class LeftOut:
    """A parameterisation unavailable at these sizes, with the reason."""

    name: str
    reason: str


@final
@dataclass(frozen=True)
class CostReport:
    """Costs of the parameterisations, in the order of the spec."""

    spec: CostSpec
    rows: tuple[CostRow, ...]
    left_out: tuple[LeftOut, ...]

    def figures(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def cost(spec: CostSpec) -> CostReport:
    """Count the costs of each parameterisation at a size, without building or running a layer.

    Raises:
        ValueError: all of the parameterisations are unavailable at these sizes, with the reasons.
    """
    rows = []
    left_out = []
    for name in spec.parameterisations:
        # Unavailable parameterisations are reported, not fatal.
        try:
            chosen = spec.choice(name)
            weights = chosen.skeleton(spec.d_model, spec.num_heads)
            _check_widths(spec, name, weights)
        except ValueError as error:
            left_out.append(LeftOut(name, str(error)))
        else:
            rows.append(_cost_row(spec, chosen, weights))
    if not rows:
        raise ValueError("; ".join(f"{left.name}: {left.reason}" for left in left_out))
    return CostReport(spec, tuple(rows), tuple(left_out))


def _cost_row(
    spec: CostSpec, chosen: Parameterisation, weights: AttentionWeights
) -> CostRow:
    prefill = pass_cost(weights, spec.length)
    decode = pass_cost(weights, 1, cached=spec.context - 1)
    per_number = spec.bytes_per_number
    batch = spec.batch
    cached = cached_numbers(weights)
    # The maps are read once per batch, all other tensors once per sequence.
    prefill_bytes, decode_bytes = (
        (done.weight_numbers + batch * done.moved_numbers) * per_number
        for done in (prefill, decode)
    )
    sizes = _sizes(spec, chosen, weights)
    return CostRow(
        name=chosen.name,
        sizes=sizes,
        parameters=weights.num_parameters,
        parameter_bytes=weights.num_parameters * per_number,
        cached_numbers=cached,
        cache_bytes=cached * spec.context * batch * per_number,
        training_flops=3 * prefill.flops // spec.length,
        prefill_flops=prefill.flops // spec.length,
        prefill_route=prefill.route,
        decode_flops=decode.flops,
        decode_route=decode.route,
        activation_bytes=prefill.kept_numbers * batch * per_number,
        weights_bytes=prefill.pair_numbers * batch * per_number,
        prefill_bytes=prefill_bytes,
        decode_bytes=decode_bytes,
        prefill_intensity=prefill.flops * batch / prefill_bytes,
        decode_intensity=decode.flops * batch / decode_bytes,
        formulas=_formulas(chosen, weights, sizes),
    )


def _option_names(name: str) -> list[str]:
    return [field.name for field in dataclasses.fields(parameterisation_class(name))]


def _check_widths(spec: CostSpec, name: str, weights: AttentionWeights) -> None:
    """Refuse widths other than the spec's: a row of another size would not be comparable."""
    options = _option_names(name)
    for option, wanted, chain in (
        ("d_k", spec.key_width, weights.k),
        ("d_v", spec.value_width, weights.v),
    ):
        width = chain[-1].d_out if chain else weights.d_model
        if option not in options and width != wanted:
            raise ValueError(
                f"its {option} cannot be chosen: it is {width} here, not {wanted}"
            )


def _sizes(
    spec: CostSpec, chosen: Parameterisation, weights: AttentionWeights
) -> dict[str, int]:
    """Return all sizes used in formulas, defaults included."""
    filled = (
        type(chosen).fitting(weights) if chosen.name in PARAMETERISATIONS else chosen
    )
    own = {} if filled is None else dataclasses.asdict(filled)
    return {
        "d": spec.d_model,
        "h": spec.num_heads,
        "d_k": spec.key_width,
        "d_v": spec.value_width,
        **{name: own[name] for name in _SIZES[2:] if name in own},
    }


def _formulas(
    chosen: Parameterisation, weights: AttentionWeights, sizes: dict[str, int]
) -> Formulas:
    W_QK, W_OV = written_forms(weights)
    parameters = chosen.parameters_formula
    cache = chosen.cache_formula
    biases = [weights.o_bias, *(link.bias for link in weights.links())]
    unbiased = weights.num_parameters - sum(
        bias.numel() for bias in biases if bias is not None
    )
    return Formulas(
        W_QK=W_QK,
        W_OV=W_OV,
        parameters=_readable(parameters),
        num_parameters=evaluate_formula(parameters, sizes) if parameters else unbiased,
        cache=_readable(cache),
        num_cached=evaluate_formula(cache, sizes) if cache else cached_numbers(weights),
    )


def evaluate_formula(formula: str, sizes: dict[str, int]) -> int:
    """Evaluate a parameterisation's formula (a Python expression) at given sizes."""
    return int(eval(formula, {"__builtins__": {}}, dict(sizes)))


def _readable(formula: str) -> str:
    """Format `2*h*d**2` as `2·h·d²`."""
    return formula.replace("**2", "²").replace("*", "·")


def written_forms(weights: AttentionWeights) -> tuple[str, str]:
    """Write W_QK and W_OV of head i as products of the layer's maps."""
    names = _names(weights)

    def product(chain: Chain) -> str:
        return " ".join(names[id(link)] for link in chain)

    def transposed(chain: Chain) -> str:
        return (
            f"({product(chain)})ᵀ"
            if len(chain) > 1
            else f"{product(chain)}ᵀ"
            if chain
            else ""
        )

    qk = f"{product(weights.q)} {transposed(weights.k)}".strip()
    ov = f"{product(weights.v)} {product(weights.o)}".strip()
    return qk or "I", ov or "I"


def _names(weights: AttentionWeights) -> dict[int, str]:
    plain = {id(link): _name(link, weights) for link in weights.links()}
    counts = Counter(plain.values())
    seen = Counter[str]()
    names = {}
    for link in weights.links():
        name = plain[id(link)]
        seen[name] += 1
        numbered = counts[name] > 1 and link.learned
        names[id(link)] = f"{name}{seen[name]}" if numbered else name
    return names


def _name(link: Link, weights: AttentionWeights) -> str:
    index = (
        "" if link.copies == 1 else "_i" if link.copies == weights.num_heads else "_g"
    )
    if link.diagonal:
        return f"diag(m{index})" if link.learned else f"c{index}"
    if not link.learned:
        return f"I{index}ᵀ" if link in weights.o else f"I{index}"
    return f"W{index}^{''.join(side.upper() for side in SIDES if link in weights.chain(side))}"
