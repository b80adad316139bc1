"""Unread fields of a configuration, sorted by whether they can change a model's output.

`transformers` is the reference. A family reads the fields of its class in `transformers`, or lists them as
ignored (`ignored`); all further fields of the class are errors when the model is run. Fields that neither
the class nor its models read (`class_fields.py`) are without effect there, and here.
"""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from importlib.resources import files
from itertools import chain
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
# Parts of names of fields about attention, or about the norm before it.
_OF_ATTENTION = re.compile(
    r"att(n|ention)|softmax|soft_?cap|rope|rotary|alibi|causal|bidirection|window|clip|sink|quer(y|ies)|heads?(_|$)"
    r"|(^|_)(q|k|v|qk|kv|qkv)(_|$)|position|relative|layer_types|layernorm|qk_?norm|parallel|temperature_tuning"
)
_HARMLESS_ENDS = re.compile(
    r"(_token_id|_token_ids|_token_index|dropout|dropout_prob|dropout_rate|_pdrop|_drop_path_rate)$"
    r"|^(initializer|classifier|summary|router|forced)_"
    r"|^(linear|mamba)_"  # fields of layers without attention
)
# Values for the usual behaviour. The first value is the default of models without the field.
_AS_USUAL: dict[str, tuple[Any, ...]] = {
    "position_embedding_type": ("absolute", "rotary"),
    "scale_attn_weights": (True,),
    "pruned_heads": ({},),
}
_WORD_OF_LAYER = re.compile(r"([\w.]+)\[\]\s*(?:==|!=)\s*([a-z_]+)")


def overlooked(
    record: Mapping[str, Any], read: Collection[str], path: str = ""
) -> Iterator[str]:
    """Yield the paths of set, unread fields, also within partly read records."""
    for name, value in record.items():
        at = path + name
        if value is None or at in read:
            continue
        if isinstance(value, dict) and any(of.startswith(f"{at}.") for of in read):
            yield from overlooked(value, read, f"{at}.")
        else:
            yield at


def fields_read(family: Family) -> frozenset[str]:
    """Return the paths of the fields that a family reads, or lists as ignored."""
    ignored = {
        ignored.field
        for ignored in chain.from_iterable(spec.ignored for spec in family.attention)
    }
    hooks = (hook_of(spec.hook) for spec in family.attention)
    hooked = (hook.fields for hook in hooks if hook is not None)
    return _NAMES["read_in_code"].union(
        ignored, *hooked, *(paths_in(expression) for expression in family.expressions())
    )


def of_attention(path: str) -> bool:
    """Return True if a field may concern attention, judged by its name."""
    name = path.rpartition(".")[2]
    harmless = name in _NAMES["harmless"] | _NAMES[
        "sounds_only"
    ] or _HARMLESS_ENDS.search(name)
    return bool(_OF_ATTENTION.search(name)) and not harmless


def not_followed(
    family: Family, spec: AttentionSpec, settings: Settings
) -> Iterator[str]:
    """Yield a sentence for each kind of set fields without effect on the attention.

    These are fields ignored by `transformers`, unknown to its class, or not read by the family.
    """
    # One sentence for all omitted fields, and a sentence for all fields with the same other value.
    for as_with in dict.fromkeys(ignored.as_with for ignored in spec.ignored):
        fields = [
            ignored.field for ignored in spec.ignored if ignored.as_with == as_with
        ]
        said = [
            f"{field} is {shown(settings.value(field))}"
            for field in fields
            if settings.value(field) is not None
            and settings.holds(f"{field} != {as_with}")
        ]
        without = "without it" if len(said) == 1 else "without them"
        as_if = without if as_with == "null" else f"with {as_with}"
        if said:
            yield (
                f"{settings.where}: {', '.join(said)}, which transformers does not follow; "
                f"read as it runs, {as_if}"
            )
    # Fields unknown to the class are reported once, here, and not again among the unread fields of attention.
    if strange := unknown_to_class(family, settings):
        are, they = (
            ("is", "it changes") if len(strange) == 1 else ("are", "they change")
        )
        yield (
            f"{settings.where}: {list_names(strange)} {are} not read by {family.name} in transformers: "
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
    """Return the set fields that `transformers` does not read for a family; empty for remote code.

    Fields unrelated to the computation are left out.
    """
    # Classes in remote code are not among the known classes.
    keys = known_keys(settings) if family.model_types and not family.remote else None
    if keys is None:
        return []
    harmless = {
        *_NAMES["harmless_to_models"],
        *(family.model.harmless if family.model else ()),
    }
    return [
        path
        for path in overlooked(settings.record, fields_read(family))
        if not is_known(path, keys)
        and path.rpartition(".")[2] not in harmless
        and not _speaks_of_no_computation(path)
        and settings.value(path) not in _AS_USUAL.get(path, ())
    ]


def not_understood_of_model(family: Family, settings: Settings) -> list[str]:
    """Return the set fields with a possible effect on a model's output that its family does not read."""
    harmless = {*_NAMES["harmless_to_models"]}
    if family.model is not None:
        harmless |= {*family.model.harmless}
    # Fields unknown to the class only cause a warning (`not_followed`): `transformers` runs without them too.
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
    # An expression such as `layer_types[] == full_attention` names a kind that the family knows.
    asked = [
        found
        for e in spec.expressions()
        if (found := _WORD_OF_LAYER.fullmatch(e.strip()))
    ]
    known = {found[2] for found in asked} | {"full_attention", "global"}
    if spec.window:
        known.add(
            "sliding_attention"
        )  # default kind, where the family names only layers without a window
    for path in dict.fromkeys(found[1] for found in asked):
        for layer in range(layers):
            word = settings.word(f"{path}[]", layer)
            if word is not None and word not in known:
                raise DataError(
                    f"{settings.where}: {path} of layer {layer} is {shown(word)}, which is not supported; "
                    f"there are {', '.join(sorted(known))}"
                )


def sees_both_ways(spec: AttentionSpec, settings: Settings, layer: int) -> bool:
    """Return True if a layer of a causal family sees later tokens, too."""
    # `transformers` makes the mask of any decoder-only model by `is_causal`, a field missing in all classes.
    own = bool(spec.both_ways) and settings.holds(spec.both_ways, layer)
    if not is_made_bidirectional(spec, settings):
        return own
    position = next((p for p in spec.positions if settings.holds(p.when, layer)), None)
    if position is not None and position.kind == "alibi":
        raise DataError(
            f"{settings.where}: is_causal is false, which is not supported with ALiBi positions"
        )
    if own and spec.window:
        raise DataError(
            f"{settings.where}: is_causal is false, and {spec.both_ways} is true: give one of them"
        )
    return True


def is_made_bidirectional(spec: AttentionSpec, settings: Settings) -> bool:
    """Return True if `is_causal` is false and makes causal layers bidirectional."""
    heeded = spec.kind == "causal" and all(
        ignored.field != "is_causal" for ignored in spec.ignored
    )
    return heeded and settings.value("is_causal") is False


def list_names(names: Collection[str], most: int | None = None) -> str:
    """Join names from a file: all names, or the first `most` and the number of further names."""
    listed = [shown(name) for name in names]
    more = 0 if most is None else len(listed) - most
    return ", ".join(listed[:most]) + (f" and {more:,} more" if more > 0 else "")
