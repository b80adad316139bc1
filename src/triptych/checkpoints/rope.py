"""The frequencies of rotary positions, as configurations of Hugging Face describe them.

Source: linear: Chen et al. 2023, arXiv 2306.15595; dynamic: see `GrowingBase`; YaRN: Peng et al. 2023, arXiv
2309.00071; LongRoPE: Ding et al. 2024, arXiv 2402.13753; Llama 3: Dubey et al. 2024, arXiv 2407.21783;
`modeling_rope_utils.py` of github.com/huggingface/transformers, version 5.23.0.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triptych.algebra.positions import GrowingBase, LongTexts, OtherFrequencies


class Frequencies(NamedTuple):
    """How fast each rotary pair turns."""

    per_position: Tensor  # radians a position, one per pair, float64
    factor: float  # what turned channels are multiplied by
    long: LongTexts | None = None  # what long texts have instead; None if they have the same


def rope_type(scaling: Mapping[str, Any]) -> str:
    """The kind of scaling that a record names; "default" if none."""
    found = scaling.get("rope_type")
    found = scaling.get("type") if found is None else found
    return "default" if found is None else str(found)


def frequencies(
    scaling: Mapping[str, Any], width: int, base: float, max_positions: float, share: float = 1.0
) -> Frequencies:
    """The frequencies of `width` channels."""
    plain = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    match rope_type(scaling):
        # "mrope" counts pictures' positions in three ways; those of text are all the same.
        case "default" | "mrope":
            return Frequencies(plain, 1.0)
        case "dynamic":
            if scaling.get("alpha"):
                raise ValueError("an alpha of rope_type 'dynamic' (HunYuan's) is not supported")
            if width <= 2:
                raise ValueError(f"rope_type 'dynamic' needs more than {width} channels that turn")
            return Frequencies(plain, 1.0, GrowingBase(int(max_positions), base, _number(scaling, "factor")))
        case "proportional":
            plain[int(share * width // 2) :] = 0
            return Frequencies(plain / _number(scaling, "factor", 1.0), 1.0)
        case "linear":
            return Frequencies(plain / _number(scaling, "factor"), 1.0)
        case "llama3":
            return Frequencies(_llama3(scaling, plain), 1.0)
        case "yarn" if "short_factor" not in scaling:  # the first Phi-3 called LongRoPE so
            return _yarn(scaling, plain, base, max_positions)
        case "longrope" | "su" | "yarn":
            return _longrope(scaling, plain, max_positions)
    raise ValueError(f"rope_type {rope_type(scaling)[:80]!r} is not supported")


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """What YaRN multiplies scores' square roots by, to keep their entropy."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(scaling: Mapping[str, Any], plain: Tensor) -> Tensor:
    factor, first = _number(scaling, "factor"), _number(scaling, "original_max_position_embeddings")
    low, high = _number(scaling, "low_freq_factor"), _number(scaling, "high_freq_factor")
    # Turns within the first length: many keep their frequency, few are slowed down, in between both.
    turns = first * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return share * plain + (1 - share) * plain / factor


def _yarn(scaling: Mapping[str, Any], plain: Tensor, base: float, max_positions: float) -> Frequencies:
    first = _number(scaling, "original_max_position_embeddings", max_positions)
    factor = _number(scaling, "factor", max_positions / first)
    width = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        return width * math.log(first / (times * 2 * math.pi)) / (2 * math.log(base))

    low = pair_that_turns(_number(scaling, "beta_fast", 32.0) or 32.0)
    high = pair_that_turns(_number(scaling, "beta_slow", 1.0) or 1.0)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, width - 1.0)
    high = high + 0.001 if high == low else high
    slowed = ((torch.arange(len(plain), dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        one, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        attention_factor = (
            yarn_magnitude(factor, float(one)) / yarn_magnitude(factor, float(all_dim))
            if one and all_dim
            else yarn_magnitude(factor)
        )
    return Frequencies(slowed * plain / factor + (1 - slowed) * plain, float(attention_factor))


def _longrope(scaling: Mapping[str, Any], plain: Tensor, max_positions: float) -> Frequencies:
    first = _number(scaling, "original_max_position_embeddings", max_positions)
    factor = _number(scaling, "factor", max_positions / first)
    short, long = (_divided(plain, scaling, name) for name in ("short_factor", "long_factor"))
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(first))
    return Frequencies(short, float(attention_factor), OtherFrequencies(int(first), long))


def _divided(plain: Tensor, scaling: Mapping[str, Any], name: str) -> Tensor:
    by = scaling.get(name)
    if not isinstance(by, list) or len(by) != len(plain):
        raise ValueError(f"they need a {name} of {len(plain)} numbers")
    return plain / torch.tensor([_number({name: each}, name) for each in by], dtype=torch.float64)


def _number(scaling: Mapping[str, Any], name: str, otherwise: float | None = None) -> float:
    value = scaling.get(name)
    if value is None:
        value = otherwise
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"they need a number {name}, not {str(value)[:80]}")
    return float(value)
