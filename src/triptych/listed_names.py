"""Names that a package lists in its `__init__` module, imported at their first use.

A command imports a few modules of a package without the libraries of its other modules.
"""

import ast
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any


def modules_of_names(path: Path) -> Mapping[str, str]:
    """Return the module of each name that a file imports, from its source."""
    return {
        name.name: node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and node.module
        for name in node.names
    }


def finder(package: str, path: str) -> Callable[[str], Any]:
    """Return `__getattr__` of a package whose file at `path` lists names as imports.

    No module of the package may have a listed name: its import would replace the name by the module.
    """
    modules: Mapping[str, str] = {}

    def find(name: str) -> Any:
        nonlocal modules
        modules = modules or modules_of_names(Path(path))
        if name not in modules or name.startswith("_"):
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(modules[name]), name)

    return find
