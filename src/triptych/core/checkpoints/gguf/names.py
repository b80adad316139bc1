"""Names of tensors in GGUF files and in `transformers`, from the table of the package `gguf`.

The table maps names in `transformers` to names in a file. If several names share a name in a file, the name
in the family file applies.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

from triptych.core.checkpoints.family import Family
from triptych.core.checkpoints.gguf.architectures import Architecture, Joined, Listed

_SUFFIXES = (".weight", ".bias")
_WITHIN = (
    "transformer.",
    "model.language_model.",
    "model.text_model.",
    "language_model.model.",
    "language_model.",
    "bert.",
    "roberta.",
    "distilbert.",
    "electra.",
    "model.",
)
_PREFIXES = ("model.language_model.", "model.", "transformer.", "gpt_neox.")
# `transformers` has a tensor for each expert; GGUF files stack the experts.
_EXPERTS = re.compile(r"(?P<start>.*\bexperts)\.(?P<end>[^.]+)")
_EXPERT = re.compile(r"(?P<start>.*\bexperts)\.(?P<expert>\d+)\.(?P<end>.+)")
_LAYER = re.compile(r"(?<=\.)\d+(?=\.)")
# Fields of family files; their words may be names of modules of other models.
_NO_NAMES = ("stack", "kind")
# The table lists this vector as the bias of a module.
_CORRECTION = "e_score_correction_bias"
_AS_BIAS = "e_score_correction.bias"


@cache
def _table(name: str, layers: int) -> Any:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    architecture = next(key for key, value in MODEL_ARCH_NAMES.items() if value == name)
    return get_tensor_name_map(architecture, layers)


def name_in_gguf(
    architecture: str, layers: int, name: str
) -> tuple[str, int | None] | None:
    """Return the name of a tensor of `transformers` in a file, and the number of its expert, if it is one's.

    Returns None for a name that the table does not have.
    """
    expert = None
    if (found := _EXPERT.fullmatch(name)) is not None:
        name = f"{found['start']}.{found['end']}"
        name = re.sub(
            r"^model\.(.*)\.block_sparse_moe\.(experts\.w\d)",
            r"\1.feed_forward.\2",
            name,
        )
        expert = int(found["expert"])
    name = name.replace(_CORRECTION, _AS_BIAS)
    table = _table(architecture, layers)
    # Half of the names are listed with the prefix of a whole model, half without it.
    for own in (name, *(name.removeprefix(prefix) for prefix in _WITHIN)):
        for candidate in (own, f"transformer.{own}", f"model.{own}"):
            if (there := table.get_name(candidate, try_suffixes=_SUFFIXES)) is not None:
                return str(there), expert
    return None


def entry_of(
    architecture: Architecture, name: str
) -> tuple[Joined | Listed, int] | None:
    """Return the architecture's entry for a tensor of `transformers` and the tensor's layer, or None."""
    layer = _LAYER.search(name)
    if layer is None:
        return None
    template = f"{name[: layer.start()]}{{layer}}{name[layer.end() :]}"
    entries: list[Joined | Listed] = [*architecture.joined, *architecture.listed]
    for entry in entries:
        if template.endswith(entry.name):
            return entry, int(layer[0])
    return None


def names_in_transformers(
    architecture: Architecture, layers: int, family: Family, names: Iterable[str]
) -> dict[str, str]:
    """Return the family's own names of tensors by their names in a file; names without one are left out."""
    templates = _templates(family)
    assert family.model is not None
    head = family.model.head.at
    own: dict[str, str] = {}
    for name, (_, there) in _table(architecture.name, layers).mapping.items():
        bare = _bare(name)
        left_out = any(bare.endswith(end) for end in architecture.left_out)
        # The table also lists the names in files.
        of_table = name == there and bare != head
        if of_table or left_out or not _is_of_family(bare, templates):
            continue
        # A whole name in the family file precedes the name of a submodule of a named module.
        if own.get(there) != head and (
            there not in own or _numbered(bare) in templates
        ):
            own[there] = bare if bare == head else f"{architecture.prefix}{bare}"
    found = {}
    for name in names:
        base, _, suffix = name.rpartition(".")
        if base in own and f".{suffix}" in _SUFFIXES:
            found[name] = f"{own[base]}.{suffix}".replace(_AS_BIAS, _CORRECTION)
    return found


def _bare(name: str) -> str:
    """Return a name without what a whole model is called."""
    prefix = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def expert_name(merged: str, expert: int) -> str:
    """Return the name of one expert's tensor, from the name of all experts' tensor."""
    found = _EXPERTS.search(merged)
    assert found is not None, merged
    return f"{found['start']}.{expert}.{merged[found.end('start') + 1 :]}"


def _templates(family: Family) -> frozenset[str]:
    """Return all names of modules and tensors in a family file, with "#" for numbers of layers."""
    found: set[str] = set()

    def collect(held: Any) -> None:
        match held:
            case str():
                name = held.replace(_CORRECTION, _AS_BIAS)
                name = name.replace("{layer}", "#").replace(".{expert}", "")
                # Some fields name a tensor, and some its module.
                found.update({_numbered(name), _numbered(_module(name))})
            case dict():
                for field, one in held.items():
                    if field not in _NO_NAMES:
                        collect(one)
            case list() | tuple():
                for one in held:
                    collect(one)

    assert family.model is not None
    # A file has the stacks of the text model only.
    stacks = {family.model.stack}
    if family.model.encoder is not None:
        stacks.add(family.model.encoder.stack)
    for spec in family.attention:
        if spec.stack in stacks:
            collect(spec.model_dump())
    collect(family.model.model_dump())
    return frozenset(found)


def _module(name: str) -> str:
    suffix = next((one for one in _SUFFIXES if name.endswith(one)), "")
    return name.removesuffix(suffix)


def _numbered(name: str) -> str:
    return _LAYER.sub("#", name)


def _is_of_family(name: str, templates: frozenset[str]) -> bool:
    """Return True for a module of the family: named whole, or within a named module."""
    name = _numbered(name)
    parts = name.split(".")
    return name in templates or any(
        ".".join(parts[:cut]) in templates and ".".join(parts[cut:]) in templates
        for cut in range(1, len(parts))
    )
