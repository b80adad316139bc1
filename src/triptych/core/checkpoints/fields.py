"""Fields of a configuration that nobody reads: which of them can change what a model computes.

Of a family in a file `transformers` is followed. What its class of the model reads, the family reads, or says
that it does not (`ignored`); anything else that the class knows is refused by name when the model is run.
What the class does not know (`class_fields.py`) changes nothing there, and nothing here.
"""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from importlib.resources import files
from typing import Any

from triptych.core.checkpoints.class_fields import is_known, known_keys
from triptych.core.checkpoints.family import Family
from triptych.core.checkpoints.hooks import hook_of
from triptych.core.checkpoints.specs import AttentionSpec
from triptych.core.storage.settings import Settings, paths_in
from triptych.errors import DataError
from triptych.untrusted import shown

_NAMES: dict[str, frozenset[str]] = {
    name: frozenset(names)
    for name, names in tomllib.loads(
        (files("triptych.core.checkpoints") / "fields.toml").read_text(encoding="utf-8")
    ).items()
}
# What names of fields that have to do with attention, or with the norm before it, are made of.
_OF_ATTENTION = re.compile(
    r"att(n|ention)|softmax|soft_?cap|rope|rotary|alibi|causal|bidirection|window|clip|sink|quer(y|ies)|heads?(_|$)"
    r"|(^|_)(q|k|v|qk|kv|qkv)(_|$)|position|relative|layer_types|layernorm|qk_?norm|parallel|temperature_tuning"
)
_HARMLESS_ENDS = re.compile(
    r"(_token_id|_token_ids|_token_index|dropout|dropout_prob|dropout_rate|_pdrop|_drop_path_rate)$"
    r"|^(initializer|classifier|summary|router|forced)_"
    r"|^(linear|mamba)_"  # of layers that have no attention
)
# Values that ask for what is done anyway. The first is what a model does that does not have the field.
_AS_USUAL: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", "rotary"),
    "scale_attn_weights": (True,),
    "pruned_heads": ({},),
}
_WORD_OF_LAYER = re.compile(r"([\w.]+)\[\]\s*(?:==|!=)\s*([a-z_]+)")


def overlooked(record: Mapping[str, Any], read: Collection[str], path: str = "") -> Iterator[str]:
    """The fields that are set and not read, as paths; records of which parts are read are looked into."""
    for name, value in record.items():
        at = path + name
        if value is None or at in read:
            continue
        if isinstance(value, dict) and any(of.startswith(f"{at}.") for of in read):
            yield from overlooked(value, read, f"{at}.")
        else:
            yield at


def fields_read(family: Family) -> frozenset[str]:
    """The fields that a family reads, or says that nobody does, as paths."""
    ignored = {ignored.field for spec in family.attention for ignored in spec.ignored}
    hooks = (hook_of(spec.hook) for spec in family.attention)
    hooked = (hook.fields for hook in hooks if hook is not None)
    return _NAMES["read_in_code"].union(
        ignored, *hooked, *(paths_in(expression) for expression in family.expressions())
    )


def of_attention(path: str) -> bool:
    """Whether a field may have to do with attention, as far as its name tells."""
    name = path.rpartition(".")[2]
    harmless = name in _NAMES["harmless"] | _NAMES["sounds_only"] or _HARMLESS_ENDS.search(name)
    return bool(_OF_ATTENTION.search(name)) and not harmless


def not_followed(family: Family, spec: AttentionSpec, settings: Settings) -> Iterator[str]:
    """Sentences on fields that are set and change nothing, of a family that a file describes."""
    for ignored in spec.ignored:
        said = settings.value(ignored.field)
        if said is not None and settings.holds(f"{ignored.field} != {ignored.as_with}"):
            as_if = "without it" if ignored.as_with == "null" else f"with {ignored.as_with}"
            yield (
                f"{settings.where}: {ignored.field} is {shown(said)}, which transformers does not follow; "
                f"read as it runs, {as_if}"
            )
    if strange := unknown_to_class(family, settings):
        are, they = ("is no field", "it changes") if len(strange) == 1 else ("are no fields", "they change")
        yield (
            f"{settings.where}: {list_names(strange)} {are} of {family.name} in transformers: "
            f"{they} nothing, there or here"
        )
    unread = [
        path
        for path in overlooked(settings.record, fields_read(family))
        if of_attention(path)
        and path not in strange
        and path not in _NAMES["sizes"]
        and settings.value(path) != _AS_USUAL.get(path, (None,))[0]
    ]
    if unread:
        yield f"{settings.where}: {family.name} does not say what {list_names(unread)} does: not followed"


def unknown_to_class(family: Family, settings: Settings) -> list[str]:
    """Return the fields that are set and that the family's class in `transformers` does not know.

    None where there is no such class. Fields that speak of no computation are left out.
    """
    keys = known_keys(settings) if family.model_types and not family.remote else None
    if keys is None:
        return []
    return [
        path
        for path in overlooked(settings.record, fields_read(family))
        if not is_known(path, keys)
        and not _speaks_of_no_computation(path)
        and settings.value(path) not in _AS_USUAL.get(path, ())
    ]


def not_understood_of_model(family: Family, settings: Settings) -> list[str]:
    """The fields that are set and may change what a model computes, and that its family does not read."""
    harmless = {*_NAMES["harmless_to_models"]}
    if family.model is not None:
        harmless |= {*family.model.harmless}
    strange = unknown_to_class(family, settings)
    return [
        path
        for path in overlooked(settings.record, fields_read(family))
        if (name := path.rpartition(".")[2]) not in harmless
        and path not in harmless
        and path not in strange
        and not _speaks_of_no_computation(path)
        and settings.value(path) not in _AS_USUAL.get(name, ())
    ]


def _speaks_of_no_computation(path: str) -> bool:
    name = path.rpartition(".")[2]
    harmless = name in _NAMES["harmless"] and name not in _NAMES["of_models"]
    return harmless or bool(_HARMLESS_ENDS.search(name))


def require_known_kinds(spec: AttentionSpec, settings: Settings, layers: int) -> None:
    """Check that the family knows every kind of layer in a list such as `layer_types`."""
    asked = [found for e in spec.expressions() if (found := _WORD_OF_LAYER.fullmatch(e.strip()))]
    known = {found[2] for found in asked} | {"full_attention", "global"}
    if spec.window:
        known.add("sliding_attention")  # its window, where a family says only which layers have none
    for path in dict.fromkeys(found[1] for found in asked):
        for layer in range(layers):
            word = settings.word(f"{path}[]", layer)
            if word is not None and word not in known:
                raise DataError(
                    f"{settings.where}: {path} of layer {layer} is {shown(word)}, which is not supported; "
                    f"there are {', '.join(sorted(known))}"
                )


def sees_both_ways(spec: AttentionSpec, settings: Settings, layer: int) -> bool:
    """Whether a causal layer sees what comes later, too."""
    # `transformers` makes the mask of any decoder-only model by `is_causal`, a field that no class has.
    own = bool(spec.both_ways) and settings.holds(spec.both_ways, layer)
    if not is_turned_round(spec, settings):
        return own
    position = next((p for p in spec.positions if settings.holds(p.when, layer)), None)
    if position is not None and position.kind == "alibi":
        raise DataError(f"{settings.where}: is_causal is false, which is not supported with ALiBi positions")
    if own and spec.window:
        raise DataError(
            f"{settings.where}: is_causal is false, and {spec.both_ways} is true: give one of them"
        )
    return True


def is_turned_round(spec: AttentionSpec, settings: Settings) -> bool:
    """Whether `is_causal` makes a causal layer one that sees both sides."""
    heeded = spec.kind == "causal" and all(ignored.field != "is_causal" for ignored in spec.ignored)
    return heeded and settings.value("is_causal") is False


def list_names(names: Collection[str], most: int | None = None) -> str:
    """Join names from a file: all, or the first ones and the number of the others."""
    listed = [shown(name) for name in names]
    more = 0 if most is None else len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more:,} more" if more > 0 else "")
