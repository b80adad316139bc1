"""The rooms: who may import whom, and that the tests check every shape."""

import ast
import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation

from rooms import (
    MODULES,
    PATHS,
    ROOT,
    SOURCE,
    graph_of_modules,
    graph_of_rooms,
    imported,
    module_of,
    parse,
    picture,
    room_of,
)
from triptych.attention import attention

# The table of the design: data flows one way, imports follow it. A module at the top is a room of its own.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": {"printable"},
    "files": {"errors"},
    "launch": {"errors"},
    "extras": {"errors"},
    "printable": set(),
    "progress": set(),
    "threads": set(),
    "thresholds": set(),
    "toml": {"errors", "storage"},
    "user_code": {"errors", "storage"},  # files of a user's own classes
    "algebra": set(),
    "attention": {"algebra"},  # a layer hands out its forms
    "models": {"attention", "algebra", "storage"},  # algebra: the weights of its layers
    "text": {"storage"},
    "storage": set(),  # the files of a checkpoint: every room reads them through it
    "checkpoints": {"algebra", "attention", "models", "storage", "text"},  # others' files become our models
    # attention: learned positions are tables; algebra: what a plan counts
    "training": {"algebra", "attention", "checkpoints", "decoding", "models", "opening", "storage", "text"},
    "decoding": {"models", "text", "attention", "algebra"},  # the engine multiplies layers out
    # what a source is, its model with tokenizers, and what reads texts with it
    "opening": {
        "algebra",
        "attention",
        "checkpoints",
        "decoding",
        "models",
        "storage",
        "text",
    },
    # attending: which heads the loss misses least
    "rewriting": {
        "algebra",
        "attending",
        "attention",
        "checkpoints",
        "models",
        "opening",
        "storage",
        "training",
    },
    "converting": {
        *(
            "algebra",
            "attention",
            "checkpoints",
            "decoding",
            "models",
            "opening",
            "rewriting",
            "storage",  # a checkpoint to fill
            "text",
            "training",
        ),
    },
    # one model, its layers, its heads: what all commands are thin over
    "face": {
        *(
            "algebra",
            "attending",
            "attention",
            "checkpoints",
            "converting",
            "decoding",
            "inspection",
        ),
        *("models", "opening", "rewriting", "storage", "text", "training"),
    },
    "reports": set(),
    "inspection": {"algebra", "checkpoints", "reports"},
    # what a model does on a text
    "attending": {
        *("algebra", "attention", "checkpoints", "decoding", "models", "opening", "reports"),
        *("storage", "text"),
    },
    "costing": {"algebra", "attention", "reports"},
    "studies": {
        *(
            "algebra",
            "attention",
            "checkpoints",
            "decoding",
            "opening",
            "inspection",
            "models",
            "reports",
            "rewriting",
        ),
        *("text", "training"),
    },
    "run_page": {"attending", "face", "inspection", "reports", "storage", "text", "training"},
    # models over HTTP; algebra: spectra of chance; models: the embedding tables; reports: the page;
    # storage: the file of keys
    "serving": {"algebra", "attending", "decoding", "face", "models", "reports", "storage", "text"},
    "harness": {"decoding", "opening"},  # a model as another program takes it
    "demonstration": {
        *("algebra", "attending", "decoding", "models", "opening", "reports", "rewriting"),
        *("run_page", "text", "training"),
    },
}
FOUNDATION = {
    *("errors", "extras", "files", "launch", "printable", "progress", "threads", "thresholds", "toml"),
    "user_code",
}
ABOVE_ALL = {"__main__", "cli", "triptych"}  # the command and the face of the package
OPTIONAL = {
    "ctranslate2",
    "datasets",
    "num2words",
    "onnx",
    "onnxruntime",
    "pandas",
    "pyarrow",
    "scipy",
    "prometheus_client",
    "sacrebleu",  # not optional, but slow to import and needed by scores alone
    "sentencepiece",
    "starlette",
    "tensorboard",
    "torch.utils.tensorboard",
    "transformers",
    "turbohtml",
    "triptych.serving.running",  # what it imports is optional
    "uvicorn",
    "vl_convert",
}


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def cycle_in(graph: dict[str, set[str]]) -> tuple[str, ...]:
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return tuple(error.args[1])
    return ()


def test_the_table_names_every_room_and_no_other() -> None:
    assert len(MODULES) > 30
    assert MAY_IMPORT.keys() | ABOVE_ALL == {room_of(module) for module in PATHS}
    assert set().union(*MAY_IMPORT.values()) <= MAY_IMPORT.keys()


def test_what_a_module_imports_is_a_module() -> None:
    assert set().union(*graph_of_modules().values()) <= PATHS.keys()


@pytest.mark.parametrize("graph", [graph_of_modules, graph_of_rooms])
def test_no_imports_go_in_a_circle(graph: Callable[[], dict[str, set[str]]]) -> None:
    assert cycle_in(graph()) == ()


def test_a_circle_is_found() -> None:
    assert cycle_in({"runs": {"rewriting"}, "rewriting": {"runs"}, "text": set()})


def test_the_table_has_no_circle() -> None:
    assert cycle_in(MAY_IMPORT) == ()


def test_a_module_imports_only_from_rooms_before_it() -> None:
    wrong = {}
    for module, others in graph_of_modules().items():
        room = room_of(module)
        if room not in ABOVE_ALL:
            allowed = {room} | MAY_IMPORT[room] | (set() if room in FOUNDATION else FOUNDATION)
            wrong[module] = set(map(room_of, others)) - allowed
    assert {module: rooms for module, rooms in wrong.items() if rooms} == {}


def of_each_module(find: Callable[[ast.Module], Iterable[object]]) -> dict[str, list[object]]:
    """What is found in the modules, by their names; those where nothing is are left out."""
    found = {name_of(path): list(find(parse(path))) for path in MODULES}
    return {name: things for name, things in found.items() if things}


def test_a_module_imports_by_full_name() -> None:
    def relative(tree: ast.Module) -> Iterator[object]:
        return (node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level)

    assert of_each_module(relative) == {}


def test_nothing_but_an_optional_library_is_imported_inside_a_function() -> None:
    def hidden(tree: ast.Module) -> Iterator[object]:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = imported(node)
                yield from (n for n in names if not any(f"{n}.".startswith(f"{lib}.") for lib in OPTIONAL))

    assert of_each_module(hidden) == {}


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    names = {name_of(path): {*path.relative_to(SOURCE).with_suffix("").parts} & drawers for path in MODULES}
    assert {name: found for name, found in names.items() if found} == {}


def test_the_picture_of_the_rooms_is_up_to_date() -> None:
    """`make docs` draws it again."""
    assert (ROOT / "docs/contributing/rooms.svg").read_text(encoding="utf-8") == picture()


def test_shapes_are_checked_while_testing() -> None:
    q, k = torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 5)
    with pytest.raises(BeartypeCallHintViolation):
        attention(q, k, k)


def documented() -> set[tuple[str, str]]:
    """Module and name of what the package offers or a document imports, and of what these classes extend."""
    named = re.compile(r"from (triptych[\w.]*) import ([\w, ]+)")
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), SOURCE / "__init__.pyi"]
    found = {("triptych.harness", "HarnessModel")}  # its module asks for an optional library
    for page in pages:
        for module, names in named.findall(page.read_text(encoding="utf-8")):
            for name in names.partition(" as ")[0].split(","):
                if module != "triptych.harness":
                    thing = getattr(importlib.import_module(module), name.strip())
                    for one in getattr(thing, "__mro__", (thing,)):
                        found.add((getattr(one, "__module__", ""), getattr(one, "__qualname__", "")))
    return found


def test_only_documented_names_have_sections_in_their_docstrings() -> None:
    kept, wrong = documented(), []
    for path in MODULES:
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                for inner in node.body if isinstance(node, ast.ClassDef) else ():
                    inner.owner = node.name  # type: ignore[attr-defined]
                name = getattr(node, "owner", node.name)
                text = ast.get_docstring(node) or ""
                if ((module_of(path), name) not in kept) and re.search(
                    r"^(Args|Returns|Raises|Yields):", text, re.M
                ):
                    wrong.append(f"{module_of(path)}.{name}: {node.name}")
    assert wrong == []
