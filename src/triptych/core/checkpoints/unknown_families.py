"""Errors for checkpoints of unknown families, with a draft of a family file."""

import json
import re
from collections.abc import Mapping
from typing import Never

from triptych.core.checkpoints.model_types import model_types_of_tensors
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import Tensors
from triptych.errors import DataError
from triptych.untrusted import shown

# A tensor with such a name outside all known layers may belong to unknown attention.
LOOKS_LIKE_ATTENTION = re.compile(
    r"attn|attention|(^|[._])(q|k|v|qkv|kv)(_?(proj|lin|a_proj|b_proj))?\.(weight|bias)$|query|key_value|Wqkv",
    re.I,
)
# Usual names of maps, below the module of their attention.
_MAPS = {
    "q": re.compile(r"(.*\.)?(w?q|q_proj|q_lin|to_q|query|query_proj)"),
    "k": re.compile(r"(.*\.)?(w?k|k_proj|k_lin|to_k|key|key_proj)"),
    "v": re.compile(r"(.*\.)?(w?v|v_proj|v_lin|to_v|value|value_proj)"),
    "o": re.compile(r"(.*\.)?(w?o|o_proj|out_proj|out_lin|to_out(\.0)?|dense|c_proj)"),
    "qkv": re.compile(r"(.*\.)?(w?qkv|qkv_proj|c_attn|in_proj|query_key_value|to_qkv)"),
}
_FIELDS = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers"),
    "heads": ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"),
    "groups": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
    "size": ("hidden_size", "d_model", "n_embd", "dim"),
}
_LAYER = re.compile(r"(?<=\.)\d{1,5}(?=\.)")
_WITHIN_ATTENTION = re.compile(r"(.*?\{layer\}.*?(?:attn|attention)[^.]*)\.(.+)", re.I)
_MOST_NAMES = 60
_HEADER = """\
# Complete each "?" and give this file to triptych inspect --family. AttentionSpec lists the fields, in
# triptych/core/checkpoints/specs.py; families/*.toml next to it are examples.
name = "mine"
"""


def refuse_unknown(settings: Settings, tensors: Tensors, name: str) -> Never:
    """Raise DataError with the names found; a note of the error contains a family file to complete."""
    kinds = _kinds_of_tensors(tensors)
    modules = _modules(kinds)
    seen = [f"{module} ({', '.join(maps)})" for module, maps in modules.items()]
    path, record = _record_with_heads(settings)
    if settings.value("model_type") is None:
        fitting = model_types_of_tensors(tensors)
        several = f" ({', '.join(fitting)} have such tensors)" if fitting else ""
        raise DataError(
            f"{settings.where}: there is no model_type, which says the architecture{several}: add it, or "
            "give a family file (triptych inspect --family my.toml)"
        )
    error = DataError(
        f"{name}: no family file knows model_type {shown(settings.value('model_type'))!r}, and what looks "
        f"like attention is {shown('; '.join(seen) or 'nothing')}: describe it in a family file (triptych "
        "inspect --family my.toml)"
    )
    tables = [_attention_table(module, maps, path, record) for module, maps in modules.items()]
    # The note lists only the first tensors: a file may have any number of names.
    names = [f"#   {shown(kind)} {shape}\n" for kind, shape in [*kinds.items()][:_MOST_NAMES]]
    more = f"#   and {len(kinds) - _MOST_NAMES} more\n" if len(kinds) > _MOST_NAMES else ""
    listed = "".join(["# Tensors of a layer, with the shape of the first:\n", *names, more])
    error.add_note("\n".join([_HEADER, *(tables or [_attention_table("?", [], path, record)]), listed]))
    raise error


def _kinds_of_tensors(tensors: Tensors) -> dict[str, list[int]]:
    """Return names of tensors with "{layer}" for the first number, and the shape of the first such tensor."""
    found: dict[str, list[int]] = {}
    for name, info in tensors.infos.items():
        kind, numbers = _LAYER.subn("{layer}", name, count=1)
        if numbers:
            found.setdefault(kind, [*info.shape])
    return found


def _modules(kinds: Mapping[str, list[int]]) -> dict[str, list[str]]:
    """Return modules with names like attention's, and the names of their matrices."""
    matrices = [kind.removesuffix(".weight") for kind, shape in kinds.items() if len(shape) > 1]
    found: dict[str, list[str]] = {}
    for matrix in matrices:
        if LOOKS_LIKE_ATTENTION.search(f"{matrix}.weight"):
            within = _WITHIN_ATTENTION.fullmatch(matrix)
            found.setdefault(within[1] if within else matrix.rpartition(".")[0], [])
    for module, maps in found.items():
        maps += sorted(matrix[len(module) + 1 :] for matrix in matrices if matrix.startswith(f"{module}."))
    return {module: maps for module, maps in found.items() if maps}


def _record_with_heads(settings: Settings) -> tuple[str, Mapping[str, object]]:
    for name, value in [("", settings.record), *settings.record.items()]:
        if isinstance(value, Mapping) and any(field in value for field in _FIELDS["heads"]):
            return name, value
    return "", settings.record


def _attention_table(module: str, maps: list[str], path: str, record: Mapping[str, object]) -> str:
    def field(what: str, otherwise: str = "?") -> str:
        return next((name for name in _FIELDS[what] if record.get(name) is not None), otherwise)

    # Guess a map by its usual names; a fused map replaces q, k and v.
    heads = field("heads")
    told = {"at": module, "stack": "encoder" if "encoder" in module else "decoder"}
    told |= {"settings": path} if path else {}
    for side, pattern in _MAPS.items():
        matching = [name for name in maps if pattern.fullmatch(name)]
        told |= {side: matching[-1]} if matching else {side: "?"} if side != "qkv" else {}
    for side in ("q", "k", "v") if "qkv" in told else ():
        del told[side]
    told |= {"layers": field("layers"), "heads": heads}
    told["width"] = "head_dim" if record.get("head_dim") is not None else f"{field('size')} / {heads}"
    lines = [f"{key} = {json.dumps(value)}" for key, value in told.items()]
    return "\n".join(
        [
            "[[attention]]",
            *lines,
            f"groups = [{{ value = {json.dumps(field('groups', heads))} }}]",
            'kind = "?"                        # "causal", "self" (sees both sides) or "cross"',
            'positions = [{ kind = "?" }]      # "learned", "alibi", …; "rotary" takes pairing = "halves"',
            '                                  # (as Llama) or "interleaved" (as GPT-J)',
            "known = []                        # patterns of tensors in the module that are no maps",
            "",
        ]
    )
