"""Models in forms that llama.cpp has, and differences to what it would compute from a GGUF file."""

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from triptych.core.algebra.semantics import Semantics
from triptych.core.checkpoints.checkpoint import Checkpoint
from triptych.core.checkpoints.gguf.architectures import Architecture
from triptych.core.checkpoints.model_map import (
    ModelMap,
    encoder_decoder_map,
    has_two_stacks,
    model_map,
)
from triptych.core.checkpoints.stored_layers import Site
from triptych.core.models import (
    EncoderDecoderArchitecture,
    LanguageModelArchitecture,
)
from triptych.core.storage import InMemory, Settings

# Fields that change no output, or only where texts are read again from their beginning.
_LEFT_OUT = frozenset({"dropout", "reads_again", "structure"})
_WINDOW = "window"


def any_map(
    model: Checkpoint,
) -> ModelMap[LanguageModelArchitecture] | ModelMap[EncoderDecoderArchitecture]:
    """Return the map of a language model, or of an encoder and a decoder."""
    if has_two_stacks(model):
        return encoder_decoder_map(model)
    return model_map(model)


def written_part(
    architecture: LanguageModelArchitecture | EncoderDecoderArchitecture,
) -> LanguageModelArchitecture:
    """Return the language model, or the decoder."""
    if isinstance(architecture, EncoderDecoderArchitecture):
        return architecture.decoder
    return architecture


def fit_to(
    model: Checkpoint, architecture: Architecture
) -> tuple[Checkpoint, tuple[str, ...]]:
    """Return the same model in llama.cpp's form, and notes on changed and omitted parts."""
    # Each step reads the model of the step before it.
    notes: list[str] = []
    if not architecture.has_head:
        model, of_head = _without_head(model, architecture)
        notes += of_head
        model, of_positions = _from_first_position(model)
        notes += of_positions
    if architecture.unscaled_logits:
        model, of_logits = _untied(model, architecture)
        notes += of_logits
    return model, tuple(notes)


def _without_head(
    model: Checkpoint, architecture: Architecture
) -> tuple[Checkpoint, list[str]]:
    """Return an encoder without its heads for tokens and tasks."""
    found = any_map(model)
    of_head = {*found.unread}
    for parts, stored in found.tensors.entries.items():
        if all(part.startswith(("head.", "task.", "second.")) for part in parts):
            of_head.update(stored.names)
    # The class of the bare encoder: with another class, the head would be missed.
    kept = model.tensors.replacing(of_head, InMemory(model.name, {}))
    kind = str(model.settings.value("model_type"))
    record = {**model.settings.record, "architectures": [architecture.types[kind]]}
    notes = (
        ["its head is left out: llama.cpp computes the last hidden states alone"]
        if of_head
        else []
    )
    return _checkpoint(model, record, kept), notes


def _from_first_position(model: Checkpoint) -> tuple[Checkpoint, list[str]]:
    """Return an encoder with a table of positions from the first token on, as in BERT."""
    # RoBERTa and similar encoders begin the table with rows for padding.
    found = any_map(model)
    embeddings = written_part(found.architecture).embeddings
    offset = embeddings.position_offset
    if not offset:
        return model, []
    stored = found.tensors.entries["embeddings.positions.weight",]
    (name,) = stored.names
    table = model.tensors.read(name)[offset:].clone()
    record = {
        **model.settings.record,
        "model_type": "bert",
        "max_position_embeddings": len(table),
    }
    tensors = model.tensors.replacing({name}, InMemory(model.name, {name: table}))
    note = (
        f"positions are rows {offset:,} and on of their table: padding is not counted"
    )
    return _checkpoint(model, record, tensors), [note]


def _untied(
    model: Checkpoint, architecture: Architecture
) -> tuple[Checkpoint, list[str]]:
    """Return a model with a separate output table, multiplied by the factor of the logits."""
    # A file without an output table is read as a tied model, with logits times the factor.
    found = any_map(model)
    head = written_part(found.architecture).head
    if head is None or not head.tied:
        return model, []
    factor = head.scale * head.input_scale
    spec = model.family.model
    assert spec is not None
    table = model.tensors.read(_table_of(found)).float()
    if not architecture.over_root:  # otherwise the layout of the table has the factor
        table = table * factor
    record = {**model.settings.record, "tie_word_embeddings": False}
    record.pop("scale_decoder_outputs", None)
    name = f"{spec.head.at}.weight"
    tensors = model.tensors.replacing({name}, InMemory(model.name, {name: table}))
    note = f"the output table is the embedding times {factor:.3g}: llama.cpp has no factor of logits here"
    return _checkpoint(model, record, tensors), [note]


def _table_of(found: ModelMap[Any]) -> str:
    name = next(
        stored.names
        for parts, stored in found.tensors.entries.items()
        if parts[0].endswith("embeddings.table.weight")
    )
    return next(iter(name))


def _checkpoint(model: Checkpoint, record: dict[str, Any], tensors: Any) -> Checkpoint:
    settings = Settings(record, model.settings.where)
    return Checkpoint(model.name, model.family, settings, tensors)


def differences(model: Checkpoint, written: Checkpoint) -> list[str]:
    """Return what differs between two checkpoints besides the numbers of their maps, in words."""
    found = list(
        _compare(any_map(model).architecture, any_map(written).architecture, "model")
    )
    own = _by_place(model)
    other = _by_place(written)
    for place, site in own.items():
        one = _of_any_length(model.outline(site).weights.semantics)
        two = _of_any_length(written.outline(other[place]).weights.semantics)
        stack = "" if len({one for one, _ in own}) == 1 else f" of the {place[0]}"
        found += _compare(one, two, f"attention of layer {place[1]}{stack}")
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
    spec = checkpoint.family.model
    stacks = set[str]() if spec is None else {spec.stack}
    if spec is not None and spec.encoder is not None:
        stacks.add(spec.encoder.stack)
    return {
        (site.named_stack, site.layer): site
        for site in checkpoint.sites
        if site.stack in stacks
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
