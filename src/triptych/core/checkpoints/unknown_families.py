"""Errors for checkpoints of unknown families, with a draft of a family file."""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Never, final

from triptych.core.checkpoints.model_types import (
    LOOKS_LIKE_ATTENTION,
    model_types_of_tensors,
)
from triptych.core.storage.settings import Settings
from triptych.core.storage.tensors import Tensors
from triptych.errors import DataError
from triptych.untrusted import shown

# Words common to the names of different maps.
_FILLERS = {
    "proj",
    "projection",
    "linear",
    "lin",
    "fc",
    "w",
    "c",
    "to",
    "map",
    "layer",
    "self",
}
_SIDES = {
    **dict.fromkeys(("q", "query", "queries", "wq"), "q"),
    **dict.fromkeys(("k", "key", "keys", "wk"), "k"),
    **dict.fromkeys(("v", "value", "values", "wv"), "v"),
    **dict.fromkeys(("o", "out", "output", "dense", "wo", ""), "o"),
    **dict.fromkeys(("qkv", "wqkv", "in", "attn", "query key value", "q k v"), "qkv"),
}
_FIELDS = {
    "layers": (
        "num_hidden_layers",
        "n_layer",
        "n_layers",
        "num_layers",
        "encoder_layers",
        "decoder_layers",
    ),
    "heads": (
        "num_attention_heads",
        "n_head",
        "n_heads",
        "num_heads",
        "nhead",
        "encoder_attention_heads",
    ),
    "groups": ("num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_head_kv"),
    "size": ("hidden_size", "d_model", "n_embd", "dim"),
}
_LAYER = re.compile(r"(?<![^.])\d{1,5}(?=\.)")
_WITHIN_ATTENTION = re.compile(
    r"((?:.*?\{layer\})?.*?(?:attn|attention)[^.]*)\.(.+)", re.I
)
_OF_CROSS = re.compile(r"cross|(encoder|enc|src|memory|multihead)_?at", re.I)
_MOST_NAMES = 60
_HEADER = """\
# Complete each "?" and give this file to triptych inspect --family. AttentionSpec lists the fields, in
# triptych/core/checkpoints/specs.py; families/*.toml next to it are examples.
name = "mine"
"""
_Kinds = Mapping[str, list[int]]


def refuse_unknown(settings: Settings, tensors: Tensors, name: str) -> Never:
    """Raise DataError with the names found; a note of the error contains a family file to complete."""
    kinds = _kinds_of_tensors(tensors)
    draft = _Draft(
        kinds, _modules(kinds), _layers(tensors), *_record_with_heads(settings)
    )
    seen = [f"{module} ({', '.join(maps)})" for module, maps in draft.modules.items()]
    looks = shown("; ".join(seen) or "nothing")
    describe = (
        "describe it in a family file, which --verbose begins "
        "(triptych inspect --family my.toml, family=)"
    )
    if settings.value("model_type") is None:
        what = "model_type" if settings.record else "config.json"
        fitting = model_types_of_tensors(tensors)
        if fitting:
            hint = f" ({', '.join(fitting)} have such tensors): add it"
        else:
            hint = f", and what looks like attention is {looks}: add it"
        error = DataError(
            f"{settings.where}: there is no {what}, which says the architecture{hint}, or {describe}"
        )
    else:
        error = DataError(
            f"{name}: no family file knows model_type {shown(settings.value('model_type'))!r}, and what "
            f"looks like attention is {looks}: {describe}"
        )
    # The note lists only the first tensors: a file may have any number of names.
    names = [
        f"#   {shown(kind)} {shape}\n" for kind, shape in [*kinds.items()][:_MOST_NAMES]
    ]
    more = (
        f"#   and {len(kinds) - _MOST_NAMES} more\n" if len(kinds) > _MOST_NAMES else ""
    )
    listed = "".join(
        ["# Tensors, with the shape of the first of each name:\n", *names, more]
    )
    error.add_note(
        "\n".join([_HEADER, *draft.attention_tables(), *draft.model_tables(), listed])
    )
    raise error


def _kinds_of_tensors(tensors: Tensors) -> dict[str, list[int]]:
    """Return names of tensors with "{layer}" for the first number, and the shape of the first such tensor."""
    found: dict[str, list[int]] = {}
    for name, info in tensors.infos.items():
        found.setdefault(_LAYER.sub("{layer}", name, count=1), [*info.shape])
    # Tensors of layers come first, since their names describe attention.
    return dict(sorted(found.items(), key=lambda entry: "{layer}" not in entry[0]))


def _layers(tensors: Tensors) -> dict[str, range]:
    """Return the numbers of layers by what precedes the number in names."""
    found: dict[str, range] = {}
    for name in tensors.infos:
        if LOOKS_LIKE_ATTENTION.search(name) and (match := _LAYER.search(name)):
            before, number = name[: match.start()], int(match[0])
            known = found.get(before, range(number, number + 1))
            found[before] = range(min(known.start, number), max(known.stop, number + 1))
    return found


def _modules(kinds: _Kinds) -> dict[str, list[str]]:
    """Return modules with names like attention's, and the names of their matrices."""
    matrices = [_map_name(kind) for kind, shape in kinds.items() if len(shape) == 2]
    found: dict[str, list[str]] = {}
    for matrix in matrices:
        if LOOKS_LIKE_ATTENTION.search(
            matrix.replace("*", "weight") if "*" in matrix else f"{matrix}.weight"
        ):
            within = _WITHIN_ATTENTION.fullmatch(matrix)
            found.setdefault(within[1] if within else matrix.rpartition(".")[0], [])
    for module, maps in found.items():
        maps += sorted(
            matrix[len(module) + 1 :]
            for matrix in matrices
            if matrix.startswith(f"{module}.")
        )
    return {module: maps for module, maps in found.items() if maps and module}


def _map_name(tensor: str) -> str:
    """Return the name of a map as in family files: `in_proj_*` of `in_proj_weight`."""
    if tensor.endswith(".weight"):
        return tensor.removesuffix(".weight")
    return (
        f"{tensor.removesuffix('_weight')}_*" if tensor.endswith("_weight") else tensor
    )


def _side_of(name: str) -> str:
    """Return the map that a name suggests: "q", "k", "v", "o", "qkv"; "" for further names."""
    *_, last = [part for part in name.lower().split(".") if not part.isdecimal()] or [
        ""
    ]
    words = [
        word
        for word in last.replace("*", "").split("_")
        if word and word not in _FILLERS
    ]
    return _SIDES.get(" ".join(words), "")


def _record_with_heads(settings: Settings) -> tuple[str, Mapping[str, object]]:
    for name, value in [("", settings.record), *settings.record.items()]:
        if isinstance(value, Mapping) and any(
            field in value for field in _FIELDS["heads"]
        ):
            return name, value
    return "", settings.record


@final
@dataclass(frozen=True)
class _Draft:
    """The beginning of a family file, by the names and shapes of tensors."""

    kinds: _Kinds
    modules: Mapping[str, list[str]]  # modules like attention, with their maps
    layers: Mapping[
        str, range
    ]  # numbers of layers by what precedes the number in names
    path: str  # path of the record of sizes
    record: Mapping[str, object]

    def attention_tables(self) -> list[str]:
        tables = [
            self._attention_table(module, maps) for module, maps in self.modules.items()
        ]
        return tables or [self._attention_table("?", [])]

    def _field(self, what: str, otherwise: object = "?") -> str:
        return next(
            (name for name in _FIELDS[what] if self.record.get(name) is not None),
            str(otherwise),
        )

    def _stack_of(self, module: str) -> str:
        """Return the stack of a module, by what precedes the number of its layer."""
        before, _, after = module.partition("{layer}")
        is_encoder = "encoder" in before or (
            "{layer}" not in module and "encoder" in after
        )
        return (
            "encoder"
            if is_encoder and not _OF_CROSS.search(after or module)
            else "decoder"
        )

    def _kind_of(self, module: str) -> str:
        if _OF_CROSS.search(module.partition("{layer}")[2] or module):
            return "cross"
        # If there are two stacks, the encoder is bidirectional and the decoder is causal.
        stacks = {self._stack_of(one) for one in self.modules}
        return (
            {"encoder": "self", "decoder": "causal"}[self._stack_of(module)]
            if len(stacks) > 1
            else "?"
        )

    def _attention_table(self, module: str, maps: list[str]) -> str:
        # Fields of the configuration take precedence; sizes of tensors replace missing fields.
        heads = self._field("heads")
        numbers = self.layers.get(module.partition("{layer}")[0], range(1))
        told: dict[str, object] = {
            "at": module,
            "stack": self._stack_of(module),
            "kind": self._kind_of(module),
        }
        told |= {"settings": self.path} if self.path else {}
        by_side = {side: name for name in maps if (side := _side_of(name))}
        for side in ("qkv", "o") if "qkv" in by_side else ("q", "k", "v", "o"):
            told[side] = by_side.get(side, "?")
        width = self._width_of(module, maps)
        told["layers"] = (
            self._field("layers", len(numbers)) if "{layer}" in module else "1"
        )
        if numbers.start and "{layer}" in module:
            told["first"] = numbers.start
        told["heads"] = heads
        if self._field("size") == "?":
            told["size"] = width
        told["width"] = (
            "head_dim"
            if self.record.get("head_dim") is not None
            else f"{self._field('size', width)} / {heads}"
        )
        if self._is_transposed(module, maps):
            told["transposed"] = True
        lines = [f"{key} = {json.dumps(value)}" for key, value in told.items()]
        which = (
            '                        # "causal", "self" (sees both sides) or "cross"'
        )
        lines = [f"{line}{which}" if line == 'kind = "?"' else line for line in lines]
        return "\n".join(
            [
                "[[attention]]",
                *lines,
                f"groups = [{{ value = {json.dumps(self._field('groups', heads))} }}]",
                'positions = [{ kind = "?" }]      # "learned", "alibi", …; "rotary" takes pairing: "halves"',
                '                                  # (as Llama) or "interleaved" (as GPT-J)',
                "known = []                        # patterns of tensors in the module that are no maps",
                "",
            ]
        )

    def _is_transposed(self, module: str, maps: list[str]) -> bool:
        """Return True if a fused map is stored `[in, out]`: it has more outputs than inputs."""
        fused = next((name for name in maps if _side_of(name) == "qkv"), None)
        shape = self.kinds.get(f"{module}.{fused}.weight", [])
        return len(shape) == 2 and shape[0] < shape[1]

    def _width_of(self, module: str, maps: list[str]) -> str:
        """Return the width that the maps of queries read; "?" if the maps are unknown."""
        for name in maps:
            if _side_of(name) in ("q", "qkv"):
                stored = (
                    name.replace("*", "weight") if "*" in name else f"{name}.weight"
                )
                return str(min(self.kinds[f"{module}.{stored}"]))
        return "?"

    def model_tables(self) -> list[str]:
        """Return the tables of the parts around attention, as comments."""
        stacks = dict.fromkeys(
            self._stack_of(module) for module in self.modules if "{layer}" in module
        )
        ordered = sorted(stacks)  # the encoder of a decoder follows it
        names = [
            "model.encoder" if stack == "encoder" and len(stacks) > 1 else "model"
            for stack in ordered
        ]
        lines = [
            "To run the model, too, complete these lines without the leading #. ModelSpec lists the fields.",
        ]
        for name, stack in zip(names, ordered, strict=True):
            lines += self._model(name, stack)
        return (
            ["\n".join([f"# {line}".rstrip() for line in lines]) + "\n"]
            if stacks
            else []
        )

    def _model(self, name: str, stack: str) -> Iterator[str]:
        module, maps = next(
            (one, maps)
            for one, maps in self.modules.items()
            if self._stack_of(one) == stack and "{layer}" in one
        )
        width = self._width_of(module, maps)
        layer = module.partition("{layer}")[0] + "{layer}."
        others = tuple(
            f"{one.partition('.')[0]}."
            for one in self.modules
            if self._stack_of(one) != stack and "." in one
        )
        ours = {
            kind: shape
            for kind, shape in self.kinds.items()
            if not kind.startswith(others or "?")
        }
        # Outside the layers, matrices of the model's width are embeddings, positions or the head.
        tables = {
            _map_name(kind): shape
            for kind, shape in ours.items()
            if len(shape) == 2 and "{layer}" not in kind and str(shape[1]) == width
        }
        positions = next(
            (kind for kind in tables if re.search(r"pos|wpe", kind, re.I)), ""
        )
        words = [
            kind
            for kind in tables
            if re.search(r"emb|wte|tok|word", kind, re.I) and kind != positions
        ]
        heads = [
            kind
            for kind in tables
            if kind not in (*words, positions) and not self._is_of_attention(kind)
        ]
        norms = [
            kind
            for kind, shape in ours.items()
            if len(shape) == 1 and kind.endswith(".weight")
        ]
        yield f"[{name}]"
        yield f'kind = "{stack}"'
        yield f'stack = "{stack}"'
        yield 'eps = "1e-5"'
        yield f'embedding = "{words[0] if words else "?"}"'
        if positions:
            yield f'positions = [{{ table = "{positions}", rows = "{tables[positions][0]}" }}]'
        within = [
            norm.removesuffix(".weight") for norm in norms if norm.startswith(layer)
        ]
        of_attention = [
            norm for norm in within if norm.startswith(module.rpartition(".")[0])
        ]
        for field, norm in zip(
            _norm_fields(len(of_attention)), of_attention, strict=False
        ):
            kind = "layer" if f"{norm}.bias" in self.kinds else "rms"
            yield f'{field} = [{{ at = "{norm}", kind = "{kind}", place = "?" }}]  # "pre" or "post"'
        after = [
            norm.removesuffix(".weight") for norm in norms if "{layer}" not in norm
        ]
        if after:
            yield f'final_norm = [{{ at = "{after[-1]}" }}]'
        if name == "model" and stack == "decoder":
            bias = (
                ', bias = "true"' if heads and f"{heads[0]}.bias" in self.kinds else ""
            )
            yield (
                f'head = {{ at = "{heads[0]}", tied = "false"{bias} }}'
                if heads
                else 'head = { tied = "true" }'
            )
        yield ""
        yield f"[[{name}.feed_forward]]"
        inner, outer, gate = self._feed_forward(layer, width)
        if self._is_transposed(module, maps):
            inner, outer = outer, inner
            yield "transposed = true"
        if gate:
            yield f'gate = "{gate.removeprefix(layer)}"'
        yield f'at = "{layer.rstrip(".")}"'
        yield f'inner = "{inner.removeprefix(layer)}"'
        yield f'outer = "{outer.removeprefix(layer)}"'
        yield f'size = "{max(self.kinds.get(f"{inner}.weight", [0])) or "?"}"'
        yield 'activation = "?"  # "relu", "gelu", …, in quotes within the quotes: "\'relu\'"'
        yield f'bias = "{"true" if f"{inner}.bias" in self.kinds else "false"}"'
        yield ""

    def _is_of_attention(self, name: str) -> bool:
        return any(name.startswith(f"{module}.") for module in self.modules)

    def _feed_forward(self, layer: str, width: str) -> tuple[str, str, str]:
        """Return the maps to and from another width in a layer that belong to no attention, and the gate."""
        matrices = {
            name: shape
            for kind, shape in self.kinds.items()
            if len(shape) == 2
            and (name := _map_name(kind)).startswith(layer)
            and not self._is_of_attention(kind)
        }
        to = [
            name
            for name, shape in matrices.items()
            if str(shape[1]) == width != str(shape[0])
        ]
        back = [
            name
            for name, shape in matrices.items()
            if str(shape[0]) == width != str(shape[1])
        ]
        gate = next((name for name in to if "gate" in name and len(to) == 2), "")
        inner = [name for name in to if name != gate]
        return (inner[0] if inner else "?"), (back[0] if back else "?"), gate


def _norm_fields(count: int) -> tuple[str, ...]:
    if count == 3:
        return ("attention_norm", "cross_norm", "feed_forward_norm")
    return ("attention_norm", "feed_forward_norm")
