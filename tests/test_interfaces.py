"""Every package states the modules that others may import; the other modules are private to the package."""

import ast
import copy
import functools
import re

import grimp
import pytest
from importlinter.api import read_configuration
from importlinter.contracts.protected import ProtectedContract

from modules import ROOT, SOURCE, graph_of_modules, imported, module_of, parse

PACKAGES = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file())
CONFIGURATION = read_configuration(str(ROOT / "pyproject.toml"))
CONTRACTS = {
    one["protected_modules"][0].split(".")[1]: one
    for one in CONFIGURATION["contracts_options"]
    if one["type"] == "protected"
}
# The docstring of a package is one screen.
LINES_OF_A_SCREEN = 30


def interface(package: str) -> set[str]:
    """Return the modules of a package that its contract lets others import."""
    return {line.split(" -> ")[1] for line in CONTRACTS[package]["ignore_imports"]}


@functools.cache
def graph_as_it_is() -> grimp.ImportGraph:
    return grimp.build_graph("triptych", cache_dir=None)


def graph_to_change() -> grimp.ImportGraph:
    return copy.deepcopy(graph_as_it_is())


def is_kept(package: str, graph: grimp.ImportGraph) -> bool:
    contract = ProtectedContract(
        name=package, session_options=CONFIGURATION["session_options"], contract_options=CONTRACTS[package]
    )
    return contract.check(graph, verbose=False).kept


def is_within(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"triptych.{package}.")


def imported_from_outside(package: str) -> set[str]:
    """Return the modules of a package that other modules, and the list of public names, import."""
    graph = graph_of_modules() | {"triptych": set(modules_of_public_names())}
    found = {other for module, others in graph.items() for other in others if not is_within(module, package)}
    return {module for module in found if is_within(module, package)} - {f"triptych.{package}"}


def modules_of_public_names() -> list[str]:
    names = imported(ast.parse((SOURCE / "__init__.pyi").read_text(encoding="utf-8")))
    return [name.rpartition(".")[0] for name in names]


@pytest.mark.parametrize("package", PACKAGES)
def test_modules_of_a_package_are_private_to_it_but_for_its_interface(package: str) -> None:
    assert CONTRACTS[package]["protected_modules"] == [f"triptych.{package}.**"]
    assert CONTRACTS[package]["allowed_importers"] == [f"triptych.{package}", f"triptych.{package}.**"]
    assert is_kept(package, graph_to_change())


@pytest.mark.parametrize("package", PACKAGES)
def test_an_import_past_an_interface_is_found(package: str) -> None:
    graph = graph_to_change()
    private = next(
        name
        for name in sorted(graph.modules - interface(package))
        if is_within(name, package) and name != f"triptych.{package}"
    )
    graph.add_import(importer="triptych.printable", imported=private)
    assert not is_kept(package, graph)


@pytest.mark.parametrize("package", PACKAGES)
def test_an_interface_is_what_others_import(package: str) -> None:
    """No module is in an interface that nobody imports; public names come from interfaces alone."""
    assert imported_from_outside(package) == interface(package)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_states_its_interface_on_one_screen(package: str) -> None:
    stated = ast.get_docstring(parse(SOURCE / package / "__init__.py")) or ""
    assert len(stated.splitlines()) <= LINES_OF_A_SCREEN
    (line,) = re.findall(r"^Interface: (.*?)(?:\n\n|\Z)", stated, re.M | re.S)
    names = {f"triptych.{package}.{name}" for name in re.findall(r"`([a-z_.]+)`", line)}
    assert names == interface(package)
    assert "Start with" in stated


def test_modules_of_one_package_import_each_other_directly() -> None:
    """The list of names of a sub-package is for other packages: its own would go in a circle."""
    lists = {name for package in PACKAGES for name in {f"triptych.{package}", *interface(package)}}
    lists = {name for name in lists if is_init(name)}
    past = [
        f"{module} imports {other}"
        for module, others in graph_of_modules().items()
        for other in others
        if other in lists and is_within(module, other.split(".")[1]) and not is_init(module)
    ]
    assert past == []


def is_init(module: str) -> bool:
    return module in {module_of(path) for path in SOURCE.rglob("__init__.py")}
