"""Differences between configuration records: the computation of a model apart from its weights."""

import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from triptych.core.models import (
    BlockConfig,
    EncoderDecoderArchitecture,
    ExpertsConfig,
    FeedForwardConfig,
    LanguageModelArchitecture,
    NormConfig,
    SublayerConfig,
)
from triptych.rewriting.differences.difference_records import SettingDifference
from triptych.rewriting.differences.sides import AnyArchitecture, Side

# Relative error of rotary frequencies computed from factors stored in float32.
_SAME_FREQUENCY = 2.0**-23


def different_fields(
    one: Any, other: Any, name: str, known: Collection[str] = ()
) -> Iterator[SettingDifference]:
    """Yield the fields in which two values differ, recursively down to scalars and tensors.

    Every field except `known` fields counts, so that a new field of a record is always compared.
    """
    if one is other:
        return
    if is_dataclass(one) and type(one) is type(other):
        for field in fields(one):
            if field.name not in known and field.compare:  # caches are not compared
                yield from different_fields(
                    getattr(one, field.name),
                    getattr(other, field.name),
                    _below(name, field.name),
                )
        return
    if (
        isinstance(one, tuple | list)
        and isinstance(other, tuple | list)
        and len(one) == len(other)
    ):
        for number, (mine, theirs) in enumerate(zip(one, other, strict=True)):
            yield from different_fields(mine, theirs, _below(name, str(number)))
        return
    if (
        isinstance(one, Mapping)
        and isinstance(other, Mapping)
        and one.keys() == other.keys()
    ):
        for key in one:
            yield from different_fields(one[key], other[key], _below(name, str(key)))
        return
    if not _are_equal(one, other, name):
        is_part = one is None or other is None
        words = _part_in_words if is_part else _in_words
        yield SettingDifference(name, words(one), words(other))


def _part_in_words(value: Any) -> str:
    """Return words for a part present in only one model."""
    if value is None:
        return "absent"
    return "present" if is_dataclass(value) else _in_words(value)


def _below(name: str, own: str) -> str:
    return f"{name}.{own}" if name else own


def _are_equal(one: Any, other: Any, name: str) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return False
        one = one.double()
        other = other.double()
        if name.endswith("frequencies"):
            return bool(((one - other).abs() <= _SAME_FREQUENCY * one.abs()).all())
        return torch.equal(one, other)
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return same_number(one, other)
    return type(one) is type(other) and bool(one == other)


def same_number(one: float | int, other: float | int) -> bool:
    """Return True if two values are equal in single precision, as stored in some files."""
    return one == other or _in_single(one) == _in_single(other)


def _in_single(number: float | int) -> float:
    """Return a number as stored in float32, as by GGUF files."""
    try:
        return float(struct.unpack("f", struct.pack("f", number))[0])
    except OverflowError:
        return number


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor):
        first = ", ".join(f"{number:.6g}" for number in value.flatten()[:3].tolist())
        return f"{list(value.shape)}: {first}{', …' if value.numel() > 3 else ''}"
    if is_dataclass(value):
        return type(value).__name__
    if isinstance(value, tuple | list):
        return f"{len(value)} entries"
    return f"{value:.10g}" if isinstance(value, float) else str(value)


def plain_architecture(made: AnyArchitecture) -> AnyArchitecture:
    """Return an architecture without the fields compared through its tensors.

    These are sizes, the presence of weights and biases, tied tables and factors.
    """
    if isinstance(made, EncoderDecoderArchitecture):
        return EncoderDecoderArchitecture(
            _plain(made.encoder), _plain(made.decoder), shared=False
        )
    return _plain(made)


def _plain(made: LanguageModelArchitecture) -> LanguageModelArchitecture:
    own = made.embeddings
    embeddings = replace(
        own,
        vocab_size=0,
        num_types=0,
        map_bias=False,
        dropout=0.0,
        scale=1.0 if takes_scale(made) else own.scale,
        norm=_plain_norm(own.norm),
    )
    head = made.head and replace(
        made.head,
        tied=False,
        bias=False,
        map_bias=False,
        outputs=None,
        scale=1.0,
        input_scale=1.0,
        norm=_plain_norm(made.head.norm),
    )
    return replace(
        made,
        embeddings=embeddings,
        blocks=tuple(map(_plain_block, made.blocks)),
        final_norm=_plain_norm(made.final_norm),
        head=head,
    )


def takes_scale(made: LanguageModelArchitecture) -> bool:
    """Return True if the factor of embeddings may be multiplied into their table."""
    return made.embeddings.width is None


def _plain_norm(norm: NormConfig | None) -> NormConfig | None:
    return norm and replace(norm, weight=True, bias=False, offset=0.0)


def _plain_block(block: BlockConfig) -> BlockConfig:
    return replace(
        block,
        attention=_plain_frame(block.attention),
        cross=block.cross and _plain_frame(block.cross),
        feed_forward=plain_feed_forward(block.feed_forward),
        feed_forward_frame=_plain_frame(block.feed_forward_frame),
    )


def _plain_frame(frame: SublayerConfig) -> SublayerConfig:
    return replace(
        frame,
        norm=_plain_norm(frame.norm),
        out_norm=_plain_norm(frame.out_norm),
        scale=1.0,
        dropout=0.0,
    )


def plain_feed_forward(
    config: FeedForwardConfig | ExpertsConfig,
) -> FeedForwardConfig | ExpertsConfig:
    """Return the configuration of a feed-forward layer without sizes, biases and dropout."""
    if isinstance(config, ExpertsConfig):
        shared = config.shared and _plain_units(config.shared)
        return replace(
            config, expert=_plain_units(config.expert), shared=shared, router_bias=False
        )
    return _plain_units(config)


def _plain_units(config: FeedForwardConfig) -> FeedForwardConfig:
    return replace(config, d_ff=0, bias=False, out_bias=False, dropout=0.0)


def different_factors(one: Side, other: Side) -> Iterator[SettingDifference]:
    """Yield the different factors of two models, such as the scale of attention."""
    theirs = dict(_factors(other))
    for name, factor in _factors(one):
        if name in theirs and not same_number(factor, theirs[name]):
            yield SettingDifference(name, _in_words(factor), _in_words(theirs[name]))


def _factors(side: Side) -> Iterator[tuple[str, float]]:
    for stack, made in side.stacks.items():
        at = side.prefix(stack)
        yield f"{at}embeddings.scale", made.embeddings.scale
        for number, block in enumerate(made.blocks):
            for kind in ("attention", "cross", "feed_forward_frame"):
                frame = getattr(block, kind)
                if frame is not None:
                    yield f"{at}blocks.{number}.{kind}.scale", frame.scale
        if made.head is not None:
            yield f"{at}head.input_scale", made.head.input_scale
            yield f"{at}head.scale", made.head.scale
    for place in side.places:
        outline = side.source.outline(side.site(place))
        yield f"{side.attention_name(place)}.scale", outline.weights.scale


def in_short(found: list[SettingDifference]) -> tuple[SettingDifference, ...]:
    """Return differences with one entry for those alike in several blocks."""
    rows: dict[tuple[str, str, str], list[SettingDifference]] = {}
    for one in found:
        name = ".".join("*" if part.isdigit() else part for part in one.name.split("."))
        rows.setdefault((name, one.a, one.b), []).append(one)
    return tuple(
        own[0] if len(own) == 1 else SettingDifference(name, a, b)
        for (name, a, b), own in rows.items()
    )
