"""Architectures of llama.cpp as data (`architectures.toml`)."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any, Literal, final

from pydantic import Field

from triptych.core.checkpoints.specs import Choice, Spec
from triptych.core.storage.settings import Settings

_FILE = files("triptych.core.checkpoints.gguf") / "architectures.toml"


@final
class Joined(Spec):
    """A tensor of `transformers` in parts in a file, or under a name that the package `gguf` lacks."""

    name: str  # name in `transformers` without the prefix; "{layer}" is the number of the layer
    parts: tuple[str, ...]  # names in a file, without the layer
    # order of the parts' rows in the tensor
    order: Literal["", "halves", "alternating", "by group", "latents"] = ""
    transposed: bool = False  # True if `transformers` stores `[in, out]`


@final
class Listed(Spec):
    """A tensor of each layer of `transformers` whose single value a file lists in its metadata."""

    key: str  # key of the list; the architecture is not part of it
    name: str  # name in `transformers` without the prefix; "{layer}" is the number of the layer
    shape: tuple[int, ...] = ()


@final
class Architecture(Spec):
    """An architecture of llama.cpp; the file documents the fields."""

    name: str  # `general.architecture`
    when: str = ""  # condition over the metadata
    types: dict[
        str, str
    ]  # classes of `transformers` by model type; files are read as the first type
    prefix: str = "model."  # prefix in `transformers` of all names except the head's
    left_out: tuple[
        str, ...
    ] = ()  # ends of names of the family that these models do not use
    fields: dict[str, str] = Field(default_factory=dict)
    derived: dict[str, str] = Field(default_factory=dict)
    config: dict[str, str] = Field(default_factory=dict)
    nulls: tuple[str, ...] = ()
    by_layer: tuple[str, ...] = ()  # fields with a list of a value for each layer
    columns: dict[str, str] = Field(default_factory=dict)
    there: dict[str, str] = Field(default_factory=dict)
    rows: dict[str, str] = Field(default_factory=dict)
    rotary: str = ""  # "" if all channels are rotated, or without rotary positions
    has_rotary: bool = True
    # True if rotary channels i and i + n/2 of queries and keys are stored as neighbours
    permuted: bool = False
    fused: Literal["", "by group"] = (
        ""  # order of a fused map in `transformers`; its rows are q, k, v in a file
    )
    transposed: tuple[str, ...] = ()  # maps that `transformers` stores `[in, out]`
    square: bool = False  # True if all heads together are as wide as the model
    equal_heads: bool = False  # True if there are as many heads of keys as of queries
    gains_from_one: bool = False  # True if `transformers` stores gains of norms less 1
    # True if a tensor with a divisor for each rotary frequency is followed
    rope_factors: bool = False
    # True if the metadata have mscale_all_dim of YaRN unchanged, with an mscale of 1
    plain_mscale: bool = False
    windows: bool = False  # True if the metadata list the layers with a window
    has_head: bool = True  # False if llama.cpp computes the last hidden states alone
    joined: tuple[Joined, ...] = ()
    listed: tuple[Listed, ...] = ()
    # True if llama.cpp does not divide the logits of a tied table by a root
    unscaled_logits: bool = False
    # value by whose root `transformers` divides the logits of an output table as well
    over_root: str = ""
    # difference between the model and llama.cpp's result, if files are read but not written
    unlike: str = ""
    # changes of config.json that make llama.cpp compute the same
    advice: tuple[Choice, ...] = ()

    @property
    def model_type(self) -> str:
        """The model type of files of this architecture."""
        return next(iter(self.types))

    def advised(self, settings: Settings) -> list[str]:
        """Return what may help if llama.cpp would compute something else of this configuration."""
        return [one.value for one in self.advice if settings.holds(one.when)]

    @property
    def has_latents(self) -> bool:
        """True if the map from the latent of keys and values is stored in two parts."""
        return any(one.order == "latents" for one in self.joined)

    @property
    def has_two_stacks(self) -> bool:
        """True for an encoder with a decoder."""
        return "decoder_block_count" in self.fields


@cache
def _record() -> dict[str, Any]:
    return tomllib.loads(_FILE.read_text(encoding="utf-8"))


@cache
def _all() -> tuple[tuple[Architecture, ...], dict[str, str]]:
    record = _record()
    entries: list[dict[str, Any]] = record["architecture"]
    whole = {entry["name"]: entry for entry in entries if "like" not in entry}
    found = []
    for own in entries:
        entry = dict(own)
        if (like := entry.pop("like", None)) is not None:
            other = whole[like]
            # An entry "like" another entry inherits its keys, except `nulls`.
            entry = {
                **other,
                **entry,
                **{
                    field: {**other.get(field, {}), **entry.get(field, {})}
                    for field in ("fields", "config")
                },
                "nulls": (),
            }
        common = entry.pop("common", None)
        fields = dict(record["common"]) if common is None else dict(common)
        derived = dict(record["derived"]) if common is None else {}
        entry["fields"] = _without_empty({**fields, **entry.get("fields", {})})
        entry["derived"] = _without_empty({**derived, **entry.get("derived", {})})
        found.append(
            Architecture(has_rotary="rope.freq_base" in entry["fields"], **entry)
        )
    return tuple(found), dict(record["defaults"])


def _without_empty(fields: dict[str, str]) -> dict[str, str]:
    return {key: expression for key, expression in fields.items() if expression}


def architectures() -> tuple[Architecture, ...]:
    """Return all known architectures; one may have several entries for different metadata."""
    return _all()[0]


def defaults() -> dict[str, str]:
    """Return what llama.cpp takes for missing keys, as expressions over the metadata."""
    return _all()[1]


def refusals() -> dict[str, str]:
    """Return why models are not written that llama.cpp knows, by their type."""
    found: dict[str, str] = _record()["refused"]
    return found


def architecture_of(name: str, metadata: Settings) -> Architecture | None:
    """Return the architecture of a file; None for an unknown architecture."""
    return next(
        (
            one
            for one in architectures()
            if one.name == name and metadata.holds(one.when)
        ),
        None,
    )


def architectures_of_type(model_type: str) -> tuple[Architecture, ...]:
    """Return the architectures for models of a type of `transformers`."""
    return tuple(one for one in architectures() if model_type in one.types)
