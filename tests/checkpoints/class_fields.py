"""Makes `class_fields.json`: the keys that each configuration class of `transformers` and its code know.

    python tests/checkpoints/class_fields.py

A key counts as known where the code of a class takes it from what it is given, or where code that its
models run through reads it from a configuration. A field that is only declared is not: no code reads what
it says. That is found in the source text, generously: a key too many is refused by name where one too few
would be left out, and it might have mattered.
"""

import ast
import dataclasses
import inspect
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers

from triptych.core.checkpoints import class_fields
from triptych.core.checkpoints.family import families

FILE = Path(class_fields.__file__).with_suffix(".json")
# Code that all models and configurations run through. Generating is none of it: it has settings of its own.
_OF_CONFIGURATIONS = (
    "configuration_utils", "modeling_rope_utils", "integrations.heterogeneity.configuration_utils",
)  # fmt: skip
_OF_MODELS = (
    "modeling_utils", "modeling_layers", "modeling_rope_utils", "masking_utils", "cache_utils",
    "modeling_attn_mask_utils", "modeling_flash_attention_utils", "pytorch_utils", "core_model_loading",
    "conversion_mapping", "fusion_mapping", "backbone_utils", "initialization", "utils.generic",
    "utils.output_capturing", "integrations.sdpa_attention", "integrations.moe",
    "integrations.flash_attention",
)  # fmt: skip
_CONFIGURATION = re.compile(r"(^|[._])(config|cfg)(\.get_text_config)?$")
_RECORD = re.compile(r"config|rope")
_OWN_RECORD = re.compile(r"config|rope|kwargs|params|defaults|dict")


def read_in(tree: ast.AST, *, of_configuration: bool) -> set[str]:
    """The names that a source text reads from a configuration, or from a record in one.

    In the code of a configuration class, what it reads of itself and of its arguments is that, too.
    """

    def is_configuration(of: ast.expr) -> bool:
        text = _spelled(of)
        if text.endswith("generation_config"):
            return False
        return bool(_CONFIGURATION.search(text)) or (of_configuration and text == "self")

    def is_record(of: ast.expr) -> bool:
        return bool((_OWN_RECORD if of_configuration else _RECORD).search(_spelled(of)))

    def read_by(node: ast.AST) -> Iterator[str]:
        match node:
            case ast.Attribute(value=of, attr=name) if is_configuration(of):
                yield name
            case ast.Subscript(value=of, slice=ast.Constant(value=str(name))) if is_record(of):
                yield name
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[of, key, *_]):
                if is_configuration(of):
                    yield from _words(key)
            case ast.Call(func=ast.Attribute(value=of, attr="get" | "pop" | "setdefault"), args=[key, *_]):
                if is_record(of):
                    yield from _words(key)
            case ast.Compare(left=left, ops=[ast.In() | ast.NotIn()], comparators=[of]) if is_record(of):
                yield from _words(left)

    def read_by_loop(function: ast.AST) -> Iterator[str]:
        """All words of a function that reads one name after the other."""
        for node in ast.walk(function):
            match node:
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[of, ast.Name(), *_]):
                    if is_configuration(of):
                        yield from _words(function)

    found = {name for node in ast.walk(tree) for name in read_by(node)}
    for function in [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]:
        found |= {*read_by_loop(function)}
    return {name for name in found if name.isidentifier() and not _is_method(name)}


def _spelled(of: ast.expr) -> str:
    """The names in an expression such as `self.config.get_text_config()`, with dots between them."""
    match of:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=name):
            return f"{_spelled(value)}.{name}"
        case ast.Call(func=value) | ast.Subscript(value=value) | ast.BoolOp(values=[value, *_]):
            return _spelled(value)
    return ""


def _words(key: ast.AST) -> Iterator[str]:
    """The texts in an expression."""
    for part in ast.walk(key):
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value


@cache
def _is_method(name: str) -> bool:
    return callable(getattr(transformers.PreTrainedConfig, name, None))


@cache
def _tree(module: str) -> ast.Module:
    found = find_spec(module)
    assert found is not None, module
    assert found.origin is not None, module
    return ast.parse(Path(found.origin).read_text(encoding="utf-8"))


def common() -> set[str]:
    """What every class has, and what code reads that all models run through."""
    found = {field.name for field in dataclasses.fields(transformers.PreTrainedConfig)}
    for name in _OF_CONFIGURATIONS:  # functions beside the classes make nothing of a model
        for node in _tree(f"transformers.{name}").body:
            if isinstance(node, ast.ClassDef):
                found |= read_in(node, of_configuration=True)
    for name in _OF_MODELS:
        found |= read_in(_tree(f"transformers.{name}"), of_configuration=False)
    return found


def declared(configuration: Any) -> set[str]:
    """The fields of a class, and its other names of them."""
    found = {field.name for field in dataclasses.fields(configuration)}
    return found | {*configuration.attribute_map} | {*configuration.attribute_map.values()}


def read_by_class(configuration: Any) -> set[str]:
    """What a class and the classes that it names take from what they are given."""
    found = set[str]()
    for owner in configuration.__mro__:
        if not owner.__module__.startswith("transformers.models."):
            continue
        module = sys.modules[owner.__module__]
        (own,) = [
            node
            for node in _tree(owner.__module__).body
            if isinstance(node, ast.ClassDef) and node.name == owner.__name__
        ]
        found |= read_in(own, of_configuration=True)
        for name in {node.id for node in ast.walk(own) if isinstance(node, ast.Name)} - {owner.__name__}:
            other = getattr(module, name, None)
            if dataclasses.is_dataclass(other) and other.__module__ == owner.__module__:
                found |= declared(other) | read_by_class(other)
    return found


def read_by_models(configuration: Any) -> set[str]:
    """What the models of a class read, with the models of others whose code they run."""
    package = configuration.__module__.rpartition(".")[0]
    folder = Path(inspect.getfile(configuration)).parent
    waiting = [f"{package}.{path.stem}" for path in sorted(folder.glob("modeling_*.py"))]
    found, seen = set[str](), set[str]()
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            found |= _read_in_models(module)
            waiting += _models_imported_by(module)
    return found


@cache
def _read_in_models(module: str) -> frozenset[str]:
    return frozenset(read_in(_tree(module), of_configuration=False))


def _models_imported_by(module: str) -> Iterator[str]:
    parts = module.split(".")
    for node in _tree(module).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[-1].startswith("modeling_"):
            whole = ".".join([*parts[: len(parts) - node.level], node.module or ""])
            if whole.startswith("transformers.models."):
                yield whole


def keys_of(configuration: Any, of_all: set[str]) -> list[str]:
    """The keys of a class besides those of all."""
    of_class = read_by_class(configuration)
    of_models = read_by_models(configuration)
    read = of_class | of_models
    for name, other in configuration.attribute_map.items():
        if {name, other} & (read | of_all):
            read |= {name, other}
    # Of a class whose models lie elsewhere, it is not known what they read.
    return sorted((read if of_models else read | declared(configuration)) - of_all)


def parts_of(configuration: Any) -> dict[str, str]:
    """The records within a configuration that are configurations themselves, and their `model_type`."""
    specs = sorted(configuration.sub_configs_defaults.items())
    return {key: spec.model_type for key, spec in specs if spec.model_type in transformers.CONFIG_MAPPING}


def made() -> str:
    """The text of the file, a class a line."""
    of_all = common()
    types = [name for family in families() for name in family.model_types]
    waiting = [name for name in types if name in transformers.CONFIG_MAPPING]
    classes = dict[str, dict[str, Any]]()
    while waiting:
        model_type = waiting.pop()
        if model_type not in classes:
            configuration = transformers.CONFIG_MAPPING[model_type]
            parts = parts_of(configuration)
            classes[model_type] = {"keys": keys_of(configuration, of_all), "parts": parts}
            waiting += parts.values()
    lines = [f"    {json.dumps(name)}: {json.dumps(known)}" for name, known in sorted(classes.items())]
    head = [
        f'  "transformers": {json.dumps(transformers.__version__)},',
        f'  "of_all": {json.dumps(sorted(of_all))},',
    ]
    return "\n".join(["{", *head, '  "classes": {', ",\n".join(lines), "  }", "}", ""])


if __name__ == "__main__":
    FILE.write_text(made(), encoding="utf-8")
