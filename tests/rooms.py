"""The rooms of the package as data: what imports what, and their picture.

`python tests/rooms.py picture FILE` draws the rooms, each above what it imports.
"""

import argparse
import ast
import functools
import html
import textwrap
from collections.abc import Iterator, Mapping, Set
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "triptych"
MODULES = sorted(SOURCE.rglob("*.py"))


def module_of(path: Path) -> str:
    """The full name of a module; of a package, the name of its folder."""
    parts = ("triptych", *path.relative_to(SOURCE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_of(path): path for path in MODULES}


def room_of(module: str) -> str:
    """The folder or module right below the package; "triptych" for the package itself."""
    return [*module.split("."), "triptych"][1]


@functools.cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imported(tree: ast.AST) -> Iterator[str]:
    """The full name of every module, or thing in one, that is imported anywhere in the tree."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{name.name}" for name in node.names)


def modules_imported(module: str) -> set[str]:
    """The modules of the package that a module imports, or imports something from."""
    names = (name for name in imported(parse(PATHS[module])) if name.split(".")[0] == "triptych")
    return {name if name in PATHS else name.rpartition(".")[0] for name in names}


def graph_of_modules() -> dict[str, set[str]]:
    return {module: modules_imported(module) for module in PATHS}


def graph_of_rooms() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for module, others in graph_of_modules().items():
        found.setdefault(room_of(module), set()).update(map(room_of, others))
    return {room: others - {room} for room, others in found.items()}


def floors(graph: Mapping[str, Set[str]]) -> list[list[str]]:
    """Rooms by floor: each one floor above the highest room that it imports."""
    floor: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        floor[room] = 1 + max((floor[other] for other in graph[room]), default=-1)
    return [sorted(room for room in graph if floor[room] == at) for at in range(max(floor.values()) + 1)]


def picture() -> str:
    """The folders of the package as SVG: each room above what it imports, with the purpose that it states."""
    graph = graph_of_rooms()
    folders = {room for room in graph if (SOURCE / room).is_dir()}
    rows = floors({room: graph[room] & folders for room in folders})[::-1]
    width, height, gap = 190, 84, 14
    across = max(map(len, rows)) * (width + gap) + gap
    down = len(rows) * (height + gap) + gap
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {across} {down}" font-family="sans-serif">',
        "<title>The rooms of triptych: each imports only from rooms below it</title>",
        "<style>rect{fill:#eef2f7;stroke:#8aa0bd}text{fill:#1c2733;font-size:11px}.n{font-weight:bold;"
        "font-size:14px}@media(prefers-color-scheme:dark){rect{fill:#1f2a37;stroke:#5b7291}text{fill:#dde6f0}}"
        "</style>",
    ]
    for row, rooms in enumerate(rows):
        left = (across - len(rooms) * (width + gap) + gap) // 2
        for column, room in enumerate(rooms):
            x, y = left + column * (width + gap), gap + row * (height + gap)
            purpose = (ast.get_docstring(parse(SOURCE / room / "__init__.py")) or "").split("\n")[0]
            drawn.append(f'<g><rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6"/>')
            drawn.append(f'<text class="n" x="{x + 9}" y="{y + 20}">{room}/</text>')
            for at, words in enumerate(textwrap.wrap(purpose, 32)[:4]):
                drawn.append(f'<text x="{x + 9}" y="{y + 37 + 14 * at}">{html.escape(words)}</text>')
            drawn.append(
                f"<title>{room} imports {', '.join(sorted(graph[room] & folders)) or 'no other'}</title></g>"
            )
    return "\n".join([*drawn, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("picture", help="draw the rooms").add_argument("file", type=Path)
    asked = parser.parse_args()
    asked.file.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
