"""The module of `Model` is a door: a verb is the call of one function of one package, with its real type."""

import ast
from collections.abc import Iterator

import pytest

from modules import SOURCE, parse

MODULE = parse(SOURCE / "model.py")
# An import, what is given to the function, its call, and what is made of its result.
MOST_STATEMENTS = 5
# A layer or a head, by the words of a string; texts that may be one or several, with a number of samples.
OPEN_TYPES = {"__getitem__": 1, "generate": 2}


def is_overload(node: ast.FunctionDef) -> bool:
    return any(isinstance(one, ast.Name) and one.id == "overload" for one in node.decorator_list)


def methods() -> Iterator[ast.FunctionDef]:
    (model,) = (node for node in MODULE.body if isinstance(node, ast.ClassDef))
    yield from (node for node in model.body if isinstance(node, ast.FunctionDef))


def statements(function: ast.FunctionDef) -> list[ast.stmt]:
    return function.body[ast.get_docstring(function) is not None :]


VERBS = {node.name: node for node in methods() if not is_overload(node)}


@pytest.mark.parametrize("name", VERBS)
def test_a_verb_is_the_call_of_one_function(name: str) -> None:
    body = statements(VERBS[name])
    assert len(body) <= MOST_STATEMENTS
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    assert len(imports) <= 1
    assert not any(isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Try) for node in body)


def test_the_types_of_results_are_real_where_an_editor_can_know_them() -> None:
    found = [node for node in methods() if node.returns is not None and "Any" in ast.unparse(node.returns)]
    names = [node.name for node in found]
    assert {name: names.count(name) for name in names} == OPEN_TYPES


def test_the_module_is_read_without_another_package() -> None:
    """Only base modules are imported with it; the packages are named for the type checker alone."""
    at_import = [node for node in MODULE.body if isinstance(node, ast.ImportFrom)]
    ours = {node.module for node in at_import if (node.module or "").startswith("triptych")}
    assert ours == {f"triptych.{name}" for name in ("errors", "literals", "progress")}
