"""The packages: which may import which, and that the tests check every shape."""

import ast
import importlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from importlinter.cli import lint_imports

from modules import MODULES, PATHS, ROOT, SOURCE, graph_of_modules, imported, module_of, parse
from triptych.core.attention import attention
from triptych.listed_names import modules_of_names

OPTIONAL = {
    "ctranslate2",  # not optional, but slow to import and needed by its engine alone
    "datasets",
    "gguf",
    "google",  # protobuf, which `onnx` brings
    "num2words",
    "onnx",
    "onnxruntime",
    "py3langid",
    "pandas",
    "peft",
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
    "triptych.serving.uvicorn_server",  # what it imports is optional
    "uvicorn",
    "vl_convert",
}
SHARED_NAMES = {"recipe.py", "progress.py", "reading.py"}


def name_of(path: Path) -> str:
    return str(path.relative_to(SOURCE))


def cycle_in(graph: dict[str, set[str]]) -> tuple[str, ...]:
    try:
        tuple(TopologicalSorter(graph).static_order())
    except CycleError as error:
        return tuple(error.args[1])
    return ()


def test_packages_import_only_packages_below_them() -> None:
    """The layers are in `pyproject.toml`, under `tool.importlinter`."""
    assert lint_imports(str(ROOT / "pyproject.toml")) == 0


def test_an_imported_module_is_a_module() -> None:
    assert set().union(*graph_of_modules().values()) <= PATHS.keys()


def test_no_imports_go_in_a_circle() -> None:
    assert cycle_in(graph_of_modules()) == ()


def test_a_circle_is_found() -> None:
    assert cycle_in({"runs": {"rewriting"}, "rewriting": {"runs"}, "text": set()})


def test_no_file_name_stands_in_two_packages() -> None:
    """The command and the packages share the names of verbs alone."""
    names = Counter(path.name for path in MODULES if path.name != "__init__.py" and path.parent.name != "cli")
    assert {name for name, count in names.items() if count > 1} <= SHARED_NAMES


def of_each_module(find: Callable[[ast.Module], Iterable[object]]) -> dict[str, list[object]]:
    """What is found in the modules, by their names; those where nothing is are left out."""
    found = {name_of(path): list(find(parse(path))) for path in MODULES}
    return {name: things for name, things in found.items() if things}


# Modules between `load` and the heads of a checkpoint, which are read without the modules of this library,
# and readers, which are opened without engines of decoding.
IMPORTING_LATE = {"__init__.py", "cli/terminal.py", "literals.py", "model.py", "running/opened_source.py"}
IMPORTING_LATE |= {"core/heads.py", "core/algebra/forms.py"}  # pictures, which only a notebook shows
IMPORTING_LATE |= {
    "core/checkpoints/checkpoint.py",
    "core/checkpoints/source.py",
    "running/opening/reader.py",
    "running/decoding/translator.py",  # CTranslate2 translates without torch
    "threads.py",
    "cli/translate.py",
    "running/opening/run_folder.py",  # the table of languages, which few recipes need
    "pytest_plugin.py",  # pytest imports it at its start, in every project
}


def test_a_package_finds_every_name_of_its_list_and_no_other() -> None:
    for path in SOURCE.rglob("__init__.py"):
        package = importlib.import_module(module_of(path))
        if "finder(__name__, __file__)" in path.read_text(encoding="utf-8"):
            for name, module in modules_of_names(path).items():
                assert getattr(package, name) is getattr(importlib.import_module(module), name)
            # The import of a module of that name would put the module in the place of the name.
            assert not {own.stem for own in path.parent.iterdir()} & {*modules_of_names(path)}
            with pytest.raises(AttributeError, match="has no attribute 'missing'"):
                assert package.missing


def test_a_module_imports_by_full_name() -> None:
    def relative(tree: ast.Module) -> Iterator[object]:
        return (node.lineno for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.level)

    assert of_each_module(relative) == {}


def test_nothing_but_an_optional_library_is_imported_inside_a_function() -> None:
    """The verbs of a model import their package when they are called; so do parts that only run a model.

    Answers to names of other libraries are imported where one was given.
    """

    def hidden(tree: ast.Module) -> Iterator[object]:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = imported(node)
                yield from (n for n in names if not any(f"{n}.".startswith(f"{lib}.") for lib in OPTIONAL))

    assert of_each_module(hidden).keys() <= IMPORTING_LATE


def test_no_module_is_a_drawer_for_odds_and_ends() -> None:
    drawers = {"utils", "util", "helpers", "common", "misc"}
    names = {name_of(path): {*path.relative_to(SOURCE).with_suffix("").parts} & drawers for path in MODULES}
    assert {name: found for name, found in names.items() if found} == {}


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
