"""Differences between a model and what llama.cpp would compute from its GGUF file."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from triptych.core.algebra.semantics import Semantics
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.model_map import model_map
from triptych.core.checkpoints.stored_layers import Site

# Fields that change no output, or only where texts are read again from their beginning.
_LEFT_OUT = frozenset({"dropout", "reads_again", "structure"})
_WINDOW = "window"


def differences(model: Checkpoint, written: Checkpoint) -> list[str]:
    """Return what differs between two checkpoints besides the numbers of their maps, in words."""
    found = list(
        _compare(
            model_map(model).architecture, model_map(written).architecture, "model"
        )
    )
    own = _by_place(model)
    other = _by_place(written)
    for place, site in own.items():
        one = _of_any_length(model.outline(site).weights.semantics)
        two = _of_any_length(written.outline(other[place]).weights.semantics)
        found += _compare(one, two, f"attention of layer {place[1]}")
    return found


def _of_any_length(semantics: Semantics) -> Semantics:
    """Return the semantics without a rotation for long texts if both rotations are equal."""
    rotary = semantics.rotary
    if rotary is None or rotary.long is None:
        return semantics
    of_long = rotary.of_length(1 << 30)
    if (
        not torch.equal(of_long.frequencies, rotary.frequencies)
        or of_long.factor != rotary.factor
    ):
        return semantics
    return replace(semantics, rotary=replace(rotary, long=None))


def windows_only(model: Checkpoint, found: list[str]) -> int | None:
    """Return the smallest window of a model if only windows differ, else None."""
    if not found or not all(
        one.partition(":")[0].endswith(f".{_WINDOW}") for one in found
    ):
        return None
    windows = [model.outline(site).weights.semantics.window for site in model.sites]
    if len(found) < sum(window is not None for window in windows):
        return None  # some layers keep their windows
    return min(window for window in windows if window is not None)


def _by_place(checkpoint: Checkpoint) -> dict[tuple[str, int], Site]:
    stack = checkpoint.family.model.stack if checkpoint.family.model is not None else ""
    return {
        (site.stack, site.layer): site
        for site in checkpoint.sites
        if site.stack == stack
    }


def _compare(one: Any, other: Any, where: str) -> Iterator[str]:
    if type(one) is not type(other):
        # None instead of a record ends up here too.
        yield f"{where}: {_in_words(one)} instead of {_in_words(other)}"
    elif is_dataclass(one):
        for field in fields(one):
            if (
                field.compare
                and not field.name.startswith("_")
                and field.name not in _LEFT_OUT
            ):
                yield from _compare(
                    getattr(one, field.name),
                    getattr(other, field.name),
                    f"{where}.{field.name}",
                )
    elif isinstance(one, tuple | list):
        if len(one) != len(other):
            yield f"{where}: {len(one)} instead of {len(other)}"
        for place, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from _compare(left, right, f"{where}.{place}")
    elif isinstance(one, Tensor):
        if not _same_numbers(one, other):
            yield f"{where}: other numbers"
    elif isinstance(one, float):
        if not math.isclose(one, other, rel_tol=1e-5, abs_tol=1e-12):
            yield f"{where}: {one:g} instead of {other:g}"
    elif isinstance(one, str | int | bool) and one != other:
        yield f"{where}: {one} instead of {other}"


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    if one.is_meta or other.is_meta:
        return True
    return torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-7)


def _in_words(value: Any) -> str:
    return (
        "none"
        if value is None
        else type(value).__name__
        if is_dataclass(value)
        else str(value)
    )
