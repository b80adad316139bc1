"""Positions of an attention layer, read from its checkpoint: rotary embeddings, and biases of scores.

Source: linear: Chen et al. 2023, arXiv 2306.15595; dynamic: see `GrowingBase`; YaRN: Peng et al. 2023, arXiv
2309.00071; LongRoPE: Ding et al. 2024, arXiv 2402.13753; Llama 3: Dubey et al. 2024, arXiv 2407.21783;
`modeling_rope_utils.py` of github.com/huggingface/transformers, version 5.23.0.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from triptych.core.algebra.forms import at_least_float32
from triptych.core.algebra.positions import (
    ALiBi,
    GrowingBase,
    LongTexts,
    OtherFrequencies,
    PatchPositionBias,
    RelativePositionBias,
    RotaryEmbedding,
    ScoreBias,
    alibi_slopes,
)
from triptych.core.checkpoints.layer_map import Take
from triptych.core.checkpoints.specs import PatchesSpec
from triptych.core.checkpoints.stored_layers import Place
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import Tensors
from triptych.errors import DataError

_FIRST = "original_max_position_embeddings"
# Limit on the patches of an image, far above the number in models.
_MOST_PATCHES = 1 << 20


class Frequencies(NamedTuple):
    """Frequencies of the rotary pairs."""

    per_position: Tensor  # radians a position `[pairs]`, float64
    factor: float  # factor of rotated channels
    long: LongTexts | None = (
        None  # frequencies of long texts; None if all texts have the same
    )


def rope_type(scaling: Mapping[str, Any]) -> str:
    """Return the kind of RoPE scaling in a record, or "default"."""
    found = scaling.get("rope_type")
    found = scaling.get("type") if found is None else found
    return "default" if found is None else str(found)


def frequencies(
    scaling: Mapping[str, Any],
    width: int,
    base: float,
    max_positions: float,
    share: float = 1.0,
) -> Frequencies:
    """Compute the frequencies of rotary channels.

    `scaling`: record of RoPE scaling. `width`: number of rotary channels. `base`: b of the frequencies
    b^(−2i/n). `max_positions`: context length in tokens. `share`: rotated share of the pairs, for
    "proportional" scaling.

    Raises ValueError if the scaling is not supported, or its record is incomplete.
    """
    plain = base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    match rope_type(scaling):
        # "mrope" has three positions of image tokens; for text, they are the same.
        case "default" | "mrope":
            return Frequencies(plain, 1.0)
        case "dynamic":
            if scaling.get("alpha"):
                raise ValueError("an alpha of rope_type 'dynamic' is HunYuan's alone")
            if width <= 2:
                raise ValueError(
                    f"rope_type 'dynamic' needs more than {width} channels that turn"
                )
            return Frequencies(
                plain,
                1.0,
                GrowingBase(int(max_positions), base, _number(scaling, "factor")),
            )
        case "proportional":
            plain[int(share * width // 2) :] = 0
            return Frequencies(plain / _number(scaling, "factor", 1.0), 1.0)
        case "linear":
            return Frequencies(plain / _number(scaling, "factor"), 1.0)
        case "llama3":
            return Frequencies(_llama3(scaling, plain), 1.0)
        case "yarn" if (
            "short_factor" not in scaling
        ):  # early Phi-3 models use the name for LongRoPE
            return _yarn(scaling, plain, base, max_positions)
        case "longrope" | "su" | "yarn":
            return _longrope(scaling, plain, max_positions)
    raise ValueError(f"rope_type {rope_type(scaling)[:80]!r} is not supported")


def yarn_magnitude(factor: float, mscale: float = 1.0) -> float:
    """Return YaRN's factor of queries and keys, which keeps the entropy of attention."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(scaling: Mapping[str, Any], plain: Tensor) -> Tensor:
    factor = _number(scaling, "factor")
    first = _number(scaling, "original_max_position_embeddings")
    low = _number(scaling, "low_freq_factor")
    high = _number(scaling, "high_freq_factor")
    # Rotations within the original context length: pairs with many keep their frequency, pairs with few are
    # slowed down by the factor, and the frequencies between are interpolated.
    turns = first * plain / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return share * plain + (1 - share) * plain / factor


def _yarn(
    scaling: Mapping[str, Any], plain: Tensor, base: float, max_positions: float
) -> Frequencies:
    first = _number(scaling, "original_max_position_embeddings", max_positions)
    factor = _number(scaling, "factor", max_positions / first)
    width = 2 * len(plain)

    def pair_that_turns(times: float) -> float:
        return width * math.log(first / (times * 2 * math.pi)) / (2 * math.log(base))

    # Pairs below `low` keep their frequency, pairs above `high` are slowed down, with a linear ramp between.
    low = pair_that_turns(_number(scaling, "beta_fast", 32.0) or 32.0)
    high = pair_that_turns(_number(scaling, "beta_slow", 1.0) or 1.0)
    if scaling.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0.0)
    high = min(high, width - 1.0)
    high = high + 0.001 if high == low else high
    slowed = (
        (torch.arange(len(plain), dtype=torch.float64) - low) / (high - low)
    ).clamp(0, 1)
    one, all_dim = (
        _number(scaling, name, 0.0) for name in ("mscale", "mscale_all_dim")
    )
    both = one and all_dim
    usual = (
        yarn_magnitude(factor, one) / yarn_magnitude(factor, all_dim)
        if both
        else yarn_magnitude(factor)
    )
    return Frequencies(
        slowed * plain / factor + (1 - slowed) * plain,
        _attention_factor(scaling, usual),
    )


def _longrope(
    scaling: Mapping[str, Any], plain: Tensor, max_positions: float
) -> Frequencies:
    first = _number(scaling, "original_max_position_embeddings", max_positions)
    factor = _number(scaling, "factor", max_positions / first)
    short, long = (
        _divided(plain, scaling, name) for name in ("short_factor", "long_factor")
    )
    is_given = scaling.get("attention_factor") is not None
    usual = (
        1.0
        if is_given or factor <= 1
        else math.sqrt(1 + math.log(factor) / math.log(first))
    )
    return Frequencies(
        short, _attention_factor(scaling, usual), OtherFrequencies(int(first), long)
    )


def _attention_factor(scaling: Mapping[str, Any], usual: float) -> float:
    found = _number(scaling, "attention_factor", usual)
    if not found:
        raise ValueError("their attention_factor is 0")
    return found


def _divided(plain: Tensor, scaling: Mapping[str, Any], name: str) -> Tensor:
    by = scaling.get(name)
    if not isinstance(by, list) or len(by) != len(plain):
        raise ValueError(f"they need a {name} of {len(plain)} numbers")
    return plain / torch.tensor(
        [_number({name: each}, name) for each in by], dtype=torch.float64
    )


def _number(
    scaling: Mapping[str, Any], name: str, otherwise: float | None = None
) -> float:
    value = scaling.get(name)
    if value is None:
        value = otherwise
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not math.isfinite(value)
    ):
        raise ValueError(f"they need a number {name}, not {str(value)[:80]}")
    return float(value)


def read_rotary(place: Place, tensors: Tensors, width: int) -> RotaryEmbedding | None:
    """Read the rotary embedding of heads of a width; return None for layers without rotary positions."""
    spec = place.position
    where = place.settings.where
    if spec.kind != "rotary":
        return None
    whole = place.count(spec.width) if spec.width else width
    if spec.patches is not None:
        return _rotary_of_patches(place, spec.patches, whole)
    scaling = place.rope_scaling
    share = _share(place, scaling)
    start = int(place.number(spec.start))
    # "proportional" rotates a share of the pairs of whole heads, instead of all pairs of a share of channels.
    turned = whole if rope_type(scaling) == "proportional" else int(whole * share)
    if not 0 <= share <= 1 or start < 0 or turned + start > width:
        raise DataError(
            f"{where}: rotary positions rotate more than the {width} channels of a head"
        )
    if turned % 2:
        raise DataError(
            f"{where}: rotary positions rotate {turned} channels of a head, an odd number"
        )
    first = place.value(spec.original)
    if scaling and first is not None:
        scaling = {**scaling, _FIRST: first}
    longest = place.number("max_position_embeddings | 2048")
    base = place.number(spec.base)
    if (
        re.search(r"\brope_theta\b", spec.base)
        and scaling.get("rope_theta") is not None
    ):
        base = Settings(scaling, where).number(
            "rope_theta"
        )  # a record replaces another as a whole
    if (
        spec.alpha
        and rope_type(scaling) == "dynamic"
        and scaling.get("alpha")
        and turned > 2
    ):
        base *= Settings(scaling, where).positive("alpha") ** (turned / (turned - 2))
        scaling = {}
    try:
        found = frequencies(scaling, turned, base, longest, share)
    except (ValueError, TypeError, ArithmeticError) as error:
        raise DataError(
            f"{where}: the scaling of rotary positions is not supported: {error}"
        ) from None
    if spec.backwards:
        found = _backwards(found, where)
    _require_stored(place, tensors, found.per_position)
    factor = found.factor
    long = found.long
    if spec.factor and rope_type(scaling) != "default":
        factor = place.number(spec.factor)
    if spec.long_factor and rope_type(scaling) != "default":
        first = Settings({"longest": longest, **scaling}, where).number(
            f"{_FIRST} | longest"
        )
        if not factor:
            raise DataError(f"{where}: {spec.factor} is 0: a number above 0 is needed")
        long = OtherFrequencies(
            int(first), found.per_position, place.number(spec.long_factor) / factor
        )
    return RotaryEmbedding(
        found.per_position,
        spec.pairing,
        start,
        factor,
        long=long,
        reads_again=spec.read_again,
    )


def _backwards(found: Frequencies, where: str) -> Frequencies:
    long = found.long
    if isinstance(long, GrowingBase):
        raise DataError(
            f"{where}: rope_type 'dynamic' is not supported where channels turn backwards"
        )
    if isinstance(long, OtherFrequencies):
        long = replace(long, frequencies=-long.frequencies)
    return Frequencies(-found.per_position, found.factor, long)


def _share(place: Place, scaling: Mapping[str, Any]) -> float:
    own = place.number(place.position.share)
    kind = rope_type(scaling)
    record = Settings({**place.settings.record, **scaling}, place.settings.where)
    if kind in ("default", "mrope") or record.value("partial_rotary_factor") is None:
        return own
    share = record.number("partial_rotary_factor")
    if kind != "proportional" and share != own:
        raise DataError(
            f"{place.settings.where}: partial_rotary_factor is {share:g} under rope_type {kind!r}, but heads "
            f"of this type turn by a share of {own:g} of their channels: they must be the same"
        )
    return share


def _rotary_of_patches(
    place: Place, patches: PatchesSpec, width: int
) -> RotaryEmbedding:
    """Build DINOv3's embedding: half of the pairs rotate by row, half by column; an image spans −1 to 1."""
    if width % 4:
        raise DataError(
            f"{place.settings.where}: rotary positions in two directions need 4 channels, not {width}"
        )
    plain = frequencies(
        {}, width // 2, place.number(place.position.base), 0.0
    ).per_position
    before = sum(place.settings.whole(part, place.layer) for part in patches.before)
    if before > _MOST_PATCHES:
        raise DataError(
            f"{place.settings.where}: {before:,} tokens before the patches are more than {_MOST_PATCHES:,}"
        )
    # Centres of patches, relative to the image; tokens before the patches are not rotated.
    centres = [
        (2 * torch.arange(n, dtype=torch.float64) + 1) / n - 1
        for n in _grid(place, patches)
    ]
    of_patches = torch.stack(torch.meshgrid(*centres, indexing="ij"), dim=-1).flatten(
        0, 1
    )
    of_tokens = torch.cat([torch.zeros(before, 2, dtype=torch.float64), of_patches])
    of_pairs = of_tokens.repeat_interleave(len(plain), dim=1)
    return RotaryEmbedding(
        2 * math.pi * plain.repeat(2), place.position.pairing, places=of_pairs
    )


def _grid(place: Place, patches: PatchesSpec) -> tuple[int, int]:
    image, patch = (
        _two(place, expression) for expression in (patches.image, patches.patch)
    )
    rows, columns = (whole // part for whole, part in zip(image, patch, strict=True))
    if not rows or not columns:
        raise DataError(
            f"{place.settings.where}: no patch of {patch} is in a picture of {image}"
        )
    if rows * columns > _MOST_PATCHES:
        raise DataError(
            f"{place.settings.where}: a picture of {image} has {rows * columns:,} patches, more than "
            f"{_MOST_PATCHES:,}"
        )
    return rows, columns


def _two(place: Place, expression: str) -> tuple[int, int]:  # a height and a width
    found = place.value(expression)
    two = (
        found if isinstance(found, list | tuple) and len(found) == 2 else (found, found)
    )
    record = Settings(
        {"height": two[0], "width": two[1]}, f"{place.settings.where}, {expression}"
    )
    return record.count("height"), record.count("width")


def stored_angles(place: Place) -> list[str]:
    """Return the names of stored rotary angles, present in the file or not."""
    return [place.beside(name) for name in place.position.stored]


def _require_stored(place: Place, tensors: Tensors, per_position: Tensor) -> None:
    for name in stored_angles(place):
        if name not in tensors.infos:
            continue
        stored = tensors.read(name).double()
        expected = per_position
        if stored.ndim == 2:
            angles = (
                torch.arange(len(stored), dtype=torch.float64)[:, None] * per_position
            )
            expected = torch.cat([angles.sin(), angles.cos()], dim=-1)
        # Allow for rounding to the stored dtype, perhaps of angles computed in float32.
        rounding = 4 * (torch.finfo(tensors.infos[name].dtype).eps + 1e-7 * len(stored))
        if (
            stored.shape != expected.shape
            or float((stored - expected).abs().max()) > rounding
        ):
            raise DataError(
                f"{tensors.where(name)}, tensor {name}: the rotary positions stored here are not what the "
                "configuration gives"
            )


def read_bias(
    place: Place, tensors: Tensors, take: Take, heads: int, scale: float
) -> ScoreBias | None:
    """Read the bias of scores by positions: ALiBi or a distance table; hooks make further kinds."""
    spec = place.position
    if spec.kind == "alibi":
        slopes = alibi_slopes(heads) if spec.slopes == "authors" else _mpt_slopes(heads)
        return ALiBi(
            torch.tensor(slopes, dtype=torch.float64)
            * (scale if spec.before_scale else 1.0)
        )
    return (
        _distance_table(place, tensors, take, heads)
        if spec.kind == "distance table"
        else None
    )


def _mpt_slopes(heads: int) -> list[float]:
    """Compute MPT's slopes, out of the slopes of the next power of two: first every second slope."""
    above = 1 << (heads - 1).bit_length()
    slopes = [2 ** (-8 * (i + 1) / above) for i in range(above)]
    return slopes if above == heads else (slopes[1::2] + slopes[::2])[:heads]


def _distance_table(
    place: Place, tensors: Tensors, take: Take, heads: int
) -> ScoreBias:
    spec = place.position
    names = table_names(place, tensors)
    table = take(names[0], None)
    for name in names[1:]:
        table = at_least_float32(table) + take(name, None)
    at = f"{tensors.where(names[0])}, tensor {names[0]}"
    if spec.patches is not None:
        rows, columns = _grid(place, spec.patches)
        if rows != columns:
            raise DataError(
                f"{place.settings.where}: {rows} rows and {columns} columns of patches: tables of distances "
                "are read for square images only"
            )
        shape = [(2 * rows - 1) * (2 * columns - 1) + 3, heads]
        if [*table.shape] != shape:
            raise DataError(
                f"{at}: shape {[*table.shape]}, but the configuration says {shape}"
            )
        return PatchPositionBias(table, rows, columns)
    if spec.buckets:
        buckets = place.count(spec.buckets)
        if len(table) < buckets:
            raise DataError(f"{at}: {len(table)} rows, where {buckets} are used")
        table = table[:buckets]
    longest = place.count(spec.max_distance)
    # Half of the buckets (of a sign) are for single distances, half for ranges up to the longest distance.
    exact = len(table) // (4 if spec.both_ways else 2)
    if not 0 < exact < longest:
        raise DataError(
            f"{at}: {len(table)} rows for distances up to {longest}: {exact} of them are for one distance "
            "each, and at least 1 and fewer than the longest are needed"
        )
    return RelativePositionBias(table, spec.both_ways, longest)


def table_names(place: Place, tensors: Tensors) -> list[str]:
    """Return the names of the tensors that sum to a distance table."""
    spec = place.position
    more = [choice.value for choice in spec.more_tables if place.holds(choice.when)]
    return (
        [_table_name(place, tensors, name) for name in (spec.table, *more)]
        if spec.table
        else []
    )


def _table_name(place: Place, tensors: Tensors, name: str) -> str:
    """Return the stored name of a table; `BeitBackbone` saves a shared table below another prefix."""
    usual = place.beside(name)
    if usual in tensors.infos:
        return usual
    found = [other for other in tensors.infos if other.endswith(f".{name}")]
    return found[0] if len(found) == 1 else usual
