"""Inference of a missing model type from the name of the class or the names of the tensors."""

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from triptych.core.checkpoints.family import Family, families
from triptych.core.checkpoints.specs import AttentionSpec, ModelSpec
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import TensorInfo, Tensors

# A tensor with such a name outside all known layers may belong to unknown attention.
LOOKS_LIKE_ATTENTION = re.compile(
    r"attn|attention|(^|[._])(q|k|v|qkv|kv)(_?(proj|lin|a_proj|b_proj))?\.(weight|bias)$|query|key_value|Wqkv"
    r"|(^|[._])fc_(q|k|v)\.|in_proj_(weight|bias)$",
    re.I,
)
# Suffix of a class name of `transformers` after the name of the architecture.
_REST_OF_CLASS = re.compile(
    r"(LMHead|DoubleHeads|MT|Text|Encoder|Decoder)?Model|(Text)?(For[A-Z]\w*)"
)


def model_type_of_class(record: Mapping[str, Any]) -> str | None:
    """Return the model type of the first class in `architectures`, or None for an unknown class."""
    classes = record.get("architectures")
    named = (
        str(classes[0]).replace("_", "")
        if isinstance(classes, list) and classes
        else ""
    )
    known = {*chain.from_iterable(family.model_types for family in families())}
    found = max(
        (kind for kind in known if _is_class_of(named, kind)), key=len, default=None
    )
    # Models of pictures and text have a type for the whole and a type for the text part.
    of_text = f"{found}_text"
    return of_text if of_text in known and "text_config" not in record else found


def _is_class_of(name: str, model_type: str) -> bool:
    stem = _plain(model_type)
    return name.lower().startswith(stem) and bool(
        _REST_OF_CLASS.fullmatch(name[len(stem) :])
    )


def _plain(model_type: str) -> str:
    return re.sub(r"[-_]", "", model_type).lower()


def model_types_of_tensors(tensors: Tensors) -> list[str]:
    """Return the model types whose tensor names a file has."""
    found = [
        (family, prefix)
        for family in families()
        for prefix in _prefixes(family, tensors.infos)
    ]
    by_prefix: list[str] = []
    of_families: list[str] = []
    for family, prefix in found:
        # In many files, the name of the model type precedes all names of tensors.
        by_prefix += (
            kind for kind in family.model_types if _plain(kind) == _plain(prefix)
        )
        of_families += _alike(family, prefix, tensors.infos)
    return list(dict.fromkeys(by_prefix or of_families))


def _alike(
    family: Family, prefix: str, infos: Mapping[str, TensorInfo]
) -> tuple[str, ...]:
    """Return the first model type with the stored number of positions, for types that differ in it alone."""
    model = family.model
    assert model is not None, "`_prefixes` leaves out others"
    padded = dict[bool, tuple[str, TensorInfo | None]]()
    for kind in family.model_types:
        settings = Settings({"model_type": kind}, "config.json")
        positions = next(
            (spec for spec in model.positions if settings.holds(spec.when)), None
        )
        if positions is None or not positions.table:
            return family.model_types
        info = infos.get(".".join(filter(None, (prefix, positions.table, "weight"))))
        padded.setdefault(bool(positions.padding), (kind, info))
    if len(padded) != 2:
        return family.model_types
    # Rows precede the first position where positions count from the padding token: 514 for 512 tokens.
    info = padded[True][1]
    has_power_of_two = info is not None and info.shape[0].bit_count() == 1
    return (padded[not has_power_of_two][0],)


def _prefixes(family: Family, infos: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield the prefix of the names of tensors, if a file has the names of a family."""
    # Read-only families have too few known parts to be distinguished.
    if family.model is None or family.remote:
        return
    spec = family.attention[0]
    module = spec.at.format(layer=0, inner=0)
    first = spec.qkv or (spec.q if spec.latent is None else spec.latent.kv_down)
    ending = f"{module}.{first}.weight"
    for name, info in infos.items():
        if name == ending or name.endswith(f".{ending}"):
            prefix = name.removesuffix(ending)
            has_maps = _has_maps(spec, f"{prefix}{module}", infos) and _lies_right(
                spec, info
            )
            if has_maps and _has_parts(spec, family.model, prefix, infos):
                yield prefix.rstrip(".")


def _has_parts(
    spec: AttentionSpec, model: ModelSpec, prefix: str, infos: Mapping[str, TensorInfo]
) -> bool:
    """Return True if a file has the embeddings of a family, its angles, and the norms of its first block."""
    stored = {*chain.from_iterable(position.stored for position in spec.positions)}
    if any(f"{prefix}{name.format(layer=0, inner=0)}" not in infos for name in stored):
        return False
    # Embeddings of a width of their own always have a map to that of the model.
    has_own_width = (
        bool(model.embedding_width) and "hidden_size" not in model.embedding_width
    )
    if has_own_width and f"{prefix}{model.embedding_map}.weight" not in infos:
        return False
    parts = [
        [model.embedding, *model.copies],
        [norm.at for norm in model.attention_norm if norm.at],
        [norm.at for norm in model.feed_forward_norm if norm.at],
        [positions.table for positions in model.positions if positions.table],
    ]
    return all(
        any(
            f"{prefix}{name.format(layer=0, inner=0)}.weight" in infos for name in names
        )
        for names in parts
        if names
    )


def _has_maps(
    spec: AttentionSpec, module: str, infos: Mapping[str, TensorInfo]
) -> bool:
    sides = (spec.o,) if spec.qkv or spec.latent else (spec.q, spec.k, spec.v, spec.o)
    return all(f"{module}.{side}.weight" in infos for side in sides)


def _lies_right(spec: AttentionSpec, info: TensorInfo) -> bool:
    """Return True if a fused map is stored with its longer dimension in the family's order."""
    if not spec.qkv or len(info.shape) != 2:
        return True
    rows, columns = info.shape
    return rows <= columns if spec.transposed else columns <= rows
