"""Families of checkpoints, and their files in `families/`."""

import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any, final

from pydantic import model_validator

from triptych.core.checkpoints.specs import (
    AttentionSpec,
    Choice,
    ExportSpec,
    ModelSpec,
    Spec,
)
from triptych.errors import DataError, UsageError
from triptych.toml import read_toml
from triptych.untrusted import validated

_FOLDER = files("triptych.core.checkpoints") / "families"


@final
class Unread(Spec):
    """Known attention tensors without support."""

    names: str  # pattern of the tensors' names
    why: str  # reason, for reports


@final
class Family(Spec):
    name: str
    model_types: tuple[str, ...] = ()
    remote: bool = False  # true if `transformers` lacks a class for it (remote code)
    refused: tuple[
        Choice, ...
    ] = ()  # reasons to refuse its checkpoints, on conditions of the configuration
    # kinds of attention layers, all with a true condition; empty if all checkpoints are refused
    attention: tuple[AttentionSpec, ...] = ()
    model: ModelSpec | None = (
        None  # the parts besides attention; None if models cannot be run
    )
    export: ExportSpec | None = (
        None  # format of exported models; None if the family is not an export format
    )
    rest: tuple[
        str, ...
    ] = ()  # tensors named like attention but unrelated to it, as patterns
    unread: tuple[
        Unread, ...
    ] = ()  # attention tensors to report instead of reading them

    @model_validator(mode="after")
    def _require_attention(self) -> "Family":
        if not self.attention and not any(not choice.when for choice in self.refused):
            raise ValueError("there is no [[attention]]")
        return self

    def defaults_of(self, settings: str) -> dict[str, dict[str, Any]]:
        """Return the defaults of the record at this path, by `model_type`, of all its attention entries."""
        found: dict[str, dict[str, Any]] = {}
        for spec in self.attention:
            if spec.settings == settings:
                for model_type, own in spec.defaults.items():
                    found[model_type] = {**found.get(model_type, {}), **own}
        return found


def half_of(family: Family, half: str) -> Family:
    """Return the family with names of tensors as in files with only one half, "encoder" or "decoder"."""

    def below(held: Any) -> Any:
        match held:
            case str():
                return held.removeprefix(f"{half}.")
            case dict():
                return {key: below(value) for key, value in held.items()}
            case list() | tuple():
                return [below(value) for value in held]
        return held

    # Rewrite all strings of the record: names in files with one half lack its prefix.
    record = family.model_dump(exclude_unset=True)
    below_half = {
        part: below(record[part]) for part in ("attention", "model") if part in record
    }
    return Family.model_validate({**record, **below_half})


@cache
def family_of(model_type: str) -> Family | None:
    """Return the family of a configuration's `model_type`, or None for an unknown type."""
    # Parsing a file takes milliseconds. `model_types` precedes the tables of a file.
    named = f'"{model_type}"'
    found = (_read(*file) for file in _files() if named in file[1].partition("\n[")[0])
    return next((family for family in found if model_type in family.model_types), None)


@cache
def families() -> tuple[Family, ...]:
    return tuple(_read(name, text) for name, text in _files())


def read_family(path: str | Path) -> Family:
    """Read a user's family file.

    Raises:
        UsageError: the file is missing, incomplete, or not a valid family file in TOML.
    """
    path = Path(path)
    record = read_toml(path, "family")
    try:
        family = validated(Family, _expanded(record, path.stem), path)
        for spec in family.attention:
            _require_known_placeholders(spec)
            # `refuse_unknown` writes "?" for fields to complete.
            if any(
                "?" in said
                for said in (
                    spec.at,
                    spec.q,
                    spec.k,
                    spec.v,
                    spec.o,
                    *spec.expressions(),
                )
            ):
                raise DataError(f'{path}: complete each "?" first')
        return family
    except DataError as error:
        raise UsageError(str(error)) from None


def _files() -> Iterator[tuple[str, str]]:  # names and texts
    for entry in sorted(_FOLDER.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".toml"):
            yield entry.name, entry.read_text(encoding="utf-8")


def _read(name: str, text: str) -> Family:
    return Family.model_validate(_expanded(tomllib.loads(text), name))


def _require_known_placeholders(spec: AttentionSpec) -> None:
    head_norm = () if spec.head_norm is None else (spec.head_norm.q, spec.head_norm.k)
    beside = [*chain.from_iterable((norm.at, norm.memory) for norm in spec.norm)]
    beside += [p.table for p in spec.positions]
    for position in spec.positions:
        beside += [*position.stored, *(choice.value for choice in position.more_tables)]
    for other in spec.other_norms:
        beside += [other.within, *(norm.at for norm in other.norm)]
    for name in (spec.at, *beside, *(p.table_norm for p in spec.positions), *head_norm):
        # A wrong placeholder is an error of the family file, not of the checkpoint where it is first filled.
        try:
            name.format(layer=0, inner=0, head=0, previous=0, last=0)
        except (KeyError, IndexError, ValueError):
            raise DataError(
                f"{name}: the placeholders of a name are {{layer}}, {{inner}} and {{head}}, "
                "of a norm also {previous} and {last}"
            ) from None


def _expanded(record: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a record with `like = "NAME"` replaced by the fields of the family NAME."""
    entries = record.get("attention")
    model = record.get("model")
    if isinstance(model, dict):
        record = {**record, "model": _expanded_model(model, where)}
    if not isinstance(entries, list):
        return record
    return {
        **record,
        "attention": [
            _entry_laid_over(entry, ("attention",), where) for entry in entries
        ],
    }


def _expanded_model(model: dict[str, Any], where: str) -> dict[str, Any]:
    if "like" in model:
        model = _model_laid_over(model, where)
    # The encoder of an encoder-decoder has heads for files with the encoder alone.
    if isinstance(encoder := model.get("encoder"), dict):
        model = {**model, "encoder": _with_tasks(encoder, where)}
    return _with_tasks(model, where)


def _with_tasks(model: dict[str, Any], where: str) -> dict[str, Any]:
    tasks = model.get("tasks")
    if not isinstance(tasks, list):
        return model
    return {
        **model,
        "tasks": [_entry_laid_over(task, ("model", "tasks"), where) for task in tasks],
    }


def _model_laid_over(model: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a `[model]` table merged over that of another family, subtables key by key."""
    other = _family_record(str(model["like"]), where).get("model")
    if not isinstance(other, dict):
        raise DataError(f"{where}: {model['like']} has no [model] for `like`")
    own = {key: value for key, value in model.items() if key != "like"}
    for key, value in own.items():
        if isinstance(value, dict) and isinstance(other.get(key), dict):
            own[key] = {**other[key], **value}
    return {**other, **own}


def _family_record(name: str, where: str) -> dict[str, Any]:
    path = _FOLDER / f"{name}.toml"
    if not re.fullmatch(r"\w+", name) or not path.is_file():
        raise DataError(f"{where}: there is no family {name} for `like`")
    return _expanded(tomllib.loads(path.read_text(encoding="utf-8")), name)


def _entry_laid_over(entry: Any, path: tuple[str, ...], where: str) -> Any:
    """Return an entry of a list merged over an entry of another family: `like = "NAME#2"` is its entry 2.

    `path`: names of the tables above the list.
    """
    if not isinstance(entry, dict) or "like" not in entry:
        return entry
    name, _, number = str(entry["like"]).partition("#")
    others: Any = _family_record(name, where)
    for table in path:
        others = others.get(table, {})
    if not (number or "0").isdecimal() or int(number or 0) >= len(others):
        raise DataError(
            f"{where}: {name} has {path[-1]} 0 to {len(others) - 1}, and not {number}"
        )
    other = others[int(number or 0)]
    return {**other, **{key: value for key, value in entry.items() if key != "like"}}
