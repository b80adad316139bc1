"""The modules of the package, and the syntax tree of each."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "triptych"
MODULES = sorted(SOURCE.rglob("*.py"))


def module_of(path: Path) -> str:
    """Return the full name of a module; of a package, the name of its folder."""
    parts = ("triptych", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_of(path): path for path in MODULES}


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the full name of every module, or name in one, that is imported anywhere in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def modules_imported(module: str) -> set[str]:
    """Return the modules of the package that a module imports, or imports a name from."""
    names = (name for name in imported(parse(PATHS[module])) if name.split(".")[0] == "triptych")
    return {name if name in PATHS else name.rpartition(".")[0] for name in names}


def graph_of_modules() -> dict[str, set[str]]:
    return {module: modules_imported(module) for module in PATHS}
