"""The rooms: who may import whom, and that the tests check every shape."""

import ast
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch

import triptych
from triptych.attention import attention

SOURCE = Path(triptych.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

# The table of the design: data flows one way, imports follow it.
MAY_IMPORT: dict[str, set[str]] = {
    "attention": {"algebra"},  # a layer hands out its forms
    "models": {"attention", "algebra"},  # algebra: the weights of its layers
    "algebra": set(),
    "storage": set(),  # the files of a checkpoint
    "checkpoints": {"algebra", "attention", "models", "storage", "text"},  # others' files become our models
    "text": set(),
    "training": {"models", "text"},
    "decoding": {"models", "text", "attention", "algebra"},  # the engine multiplies layers out
    "rewriting": {"algebra", "attention", "checkpoints", "models", "runs", "storage"},
    "converting": {"algebra", "attention", "checkpoints", "models", "rewriting", "runs", "text"},
    "inspection": {"algebra", "checkpoints", "reports"},
    "costing": {"algebra", "attention", "reports"},
    "studies": {"training", "decoding", "algebra"},
    "reports": set(),
    "recipes": set(),
    "serving": {"decoding", "reports"},
}
FOUNDATION = {"errors", "files"}
ABOVE_ALL = {"cli"}
OPTIONAL = {
    "ctranslate2",
    "datasets",
    "onnx",
    "onnxruntime",
    "pyarrow",
    "tensorboard",
    "torch.utils.tensorboard",
    "transformers",
}


def room_of(path: Path) -> str | None:
    """The room a module lies in; None for those at the top."""
    parts = path.relative_to(SOURCE).parts
    return parts[0] if len(parts) > 1 else None


def imported(tree: ast.AST) -> Iterator[str]:
    """The full name of every module, or thing in one, that is imported anywhere in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def test_there_are_modules_to_look_at() -> None:
    assert len(MODULES) > 30
    assert {"attention", "models", "decoding"} <= {room_of(path) for path in MODULES}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_only_from_rooms_before_it(path: Path) -> None:
    room = room_of(path)
    if (room is None and path.stem not in FOUNDATION) or room in ABOVE_ALL:
        return  # the way in: may import all
    allowed = FOUNDATION | ({room} | MAY_IMPORT[room] if room else set())
    parts = [name.split(".") for name in imported(parse(path))]
    ours = {name[1] for name in parts if name[0] == "triptych" and len(name) > 1}
    assert ours <= allowed


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_a_module_imports_by_full_name(path: Path) -> None:
    assert not [node for node in ast.walk(parse(path)) if isinstance(node, ast.ImportFrom) and node.level]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_but_an_optional_library_is_imported_inside_a_function(path: Path) -> None:
    functions = (
        node for node in ast.walk(parse(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    inside = {name for function in functions for name in imported(function)}
    assert {name for name in inside if not any(f"{name}.".startswith(f"{lib}.") for lib in OPTIONAL)} == set()


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_is_a_drawer_for_odds_and_ends(path: Path) -> None:
    names = {part.removesuffix(".py") for part in path.relative_to(SOURCE).parts}
    assert not names & {"utils", "util", "helpers", "common", "misc"}


def test_shapes_are_checked_while_testing() -> None:
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)
    with pytest.raises(jaxtyping.TypeCheckError):
        attention(q, k, k)
