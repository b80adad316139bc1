"""Signatures and docstrings of functions, parsed from source without importing it.

`triptych translate --help` is built from `translate` in `cli/translate.py` and from library functions:
`search: Annotated[Options, "Search", Model.translate, "beam_size alpha"]` takes
these two parameters of `Model.translate`, with their types, defaults and sentences, under the heading
"Search". This never imports torch.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from inspect import cleandoc
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, Literal, NamedTuple, get_origin

import triptych

# A verb's argument for a group of parameters: their values by name, to be passed on.
Options = dict[str, Any]

REQUIRED = object()


class Quantity(float):
    """A number given with a unit, such as 80GB."""


_SIMPLE: dict[str, Any] = {
    "Quantity": Quantity,
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "Path": Path,
}
_SECTION = re.compile(r"^([A-Z][\w ,-]*):$")
_ITEM = re.compile(r"^ {4}(\w+): ")


@dataclass(frozen=True)
class Parameter:
    """A parameter of a function.

    Attributes:
        name: its name.
        kind: the type of a value: str, int, float, Quantity, bool, Path, a Literal, or a list or tuple of
            them.
        default: its value if it is not given; `REQUIRED` if it must be.
        positional: True for a positional argument.
        about: its description in the docstring; "" if absent.
        section: its heading in the help.
        group: the parameter of the verb for its group; None if it is a parameter of the verb itself.
    """

    name: str
    kind: Any
    default: Any
    positional: bool = False
    about: str = ""
    section: str = "Options"
    group: str | None = None


class FunctionText(NamedTuple):
    """The docstring and the parameters of a function, parsed from source."""

    text: str  # its docstring up to the first section
    examples: tuple[str, ...]  # the lines of the section "Examples"
    parameters: tuple[
        Parameter, ...
    ]  # parameters in the order of the signature, groups taken apart


def read_function(module: str, name: str) -> FunctionText:
    """A function of a module of ours, a method as `Class.method`, or the fields of a record."""
    module, node = _definition(module, name)
    text, sections = _sections(cleandoc(ast.get_docstring(node) or ""))
    documented = dict[str, tuple[str, str]]()
    for title, lines in sections.items():
        documented |= {item: (title, said) for item, said in _items(lines).items()}
    found = list[Parameter]()
    for argument, annotation, default, positional in _arguments_of(node):
        assert annotation is not None, f"{module}.{name}: {argument} has no type"
        if (group := _group(annotation)) is not None:
            found += _taken(module, argument, *group, documented)
            continue
        title, about = documented.get(argument, ("Options", ""))
        value = REQUIRED if default is None else _value(default)
        found.append(
            Parameter(
                argument, _kind(module, annotation), value, positional, about, title
            )
        )
    return FunctionText(
        text, tuple(line.strip() for line in sections.get("Examples", ())), tuple(found)
    )


def _taken(
    module: str,
    group: str,
    section: str,
    function: ast.expr,
    names: str,
    documented: dict[str, tuple[str, str]],
) -> Iterator[Parameter]:
    """Yield parameters of another function; descriptions in the verb's docstring have precedence."""
    owner, _, rest = ast.unparse(function).partition(".")
    if owner == "triptych":
        owner = rest
        rest = ""
        module = vars(triptych)["_MODULE_OF"][owner]
    where, original = _where_defined(module, owner)
    of = read_function(where, f"{original}.{rest}" if rest else original)
    by_name = {parameter.name: parameter for parameter in of.parameters}
    for name in names.split():
        found = by_name[name]
        about = documented.get(name, ("", found.about))[1]
        yield replace(
            found, positional=False, about=about, section=section, group=group
        )


def _group(annotation: ast.expr) -> tuple[str, ast.expr, str] | None:
    """Heading, function and names of `Annotated[Options, "heading", function, "names"]`."""
    if (
        not isinstance(annotation, ast.Subscript)
        or ast.unparse(annotation.value) != "Annotated"
    ):
        return None
    assert isinstance(annotation.slice, ast.Tuple)
    _, section, function, names = annotation.slice.elts
    return ast.literal_eval(section), function, ast.literal_eval(names)


@cache
def _tree(module: str) -> ast.Module:
    base = Path(triptych.__file__).parent.joinpath(*module.split(".")[1:])
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    return ast.parse(path.read_text(encoding="utf-8"))


def _definition(module: str, name: str) -> tuple[str, ast.FunctionDef | ast.ClassDef]:
    """Find a function, a class or a (possibly inherited) method; return its module and its definition."""
    owner, _, method = name.rpartition(".")
    body = _tree(module).body
    if owner:
        module, found = _definition(module, owner)
        body = found.body
    named = [
        node
        for node in body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == method
    ]
    if named:
        return module, named[-1]  # the definition follows its overloads
    assert isinstance(found, ast.ClassDef)
    where, base = _where_defined(module, ast.unparse(found.bases[0]))
    return _definition(where, f"{base}.{method}")


def _where_defined(module: str, name: str) -> tuple[str, str]:
    """The module of ours where a name is defined, and its name there."""
    body = _tree(module).body
    # Imports for types alone are inside `if TYPE_CHECKING`.
    for node in [
        *body,
        *chain.from_iterable(block.body for block in body if isinstance(block, ast.If)),
    ]:
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.startswith("triptych")
        ):
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    return _where_defined(node.module, alias.name)
    return module, name


def _arguments_of(
    node: ast.FunctionDef | ast.ClassDef,
) -> Iterator[tuple[str, ast.expr | None, ast.expr | None, bool]]:
    """Yield name, type, default and `is_positional` of parameters, or of the fields of a record."""
    if isinstance(node, ast.ClassDef):
        for field in node.body:
            if isinstance(field, ast.AnnAssign):
                yield ast.unparse(field.target), field.annotation, field.value, False
        return
    given = node.args
    first = [*given.posonlyargs, *given.args]
    defaults = [None] * (len(first) - len(given.defaults)) + [*given.defaults]
    for argument, default in zip(first, defaults, strict=True):
        if argument.arg != "self":
            yield argument.arg, argument.annotation, default, True
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield argument.arg, argument.annotation, default, False


def _kind(module: str, annotation: ast.expr) -> Any:
    """Return the type of a value on the command line; `object` if it cannot be given there."""
    members = [kind for kind in _members(module, annotation) if kind is not object]
    return next(
        (kind for kind in members if kind is Path), members[0] if members else object
    )


def _members(module: str, node: ast.expr) -> Iterator[Any]:
    """The types of a union, None left out."""
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            yield from _members(module, left)
            yield from _members(module, right)
        case ast.Constant(value=str(text)):
            yield from _members(module, ast.parse(text, mode="eval").body)
        case ast.Name(id=name) if name in _SIMPLE:
            yield _SIMPLE[name]
        case ast.Name(id=name):
            where, original = _where_defined(module, name)
            for line in _tree(where).body:
                if (
                    isinstance(line, ast.Assign)
                    and ast.unparse(line.targets[0]) == original
                ):
                    yield from _members(where, line.value)
        case ast.Subscript(value=ast.Name(id="Literal")):
            yield Literal[ast.literal_eval(node.slice)]
        case ast.Subscript(value=ast.Name(id="list" | "Sequence")):
            yield list[_kind(module, node.slice)]  # type: ignore[misc]
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=parts)):
            yield tuple[tuple(_kind(module, part) for part in parts)]  # type: ignore[misc]


def _value(default: ast.expr) -> Any:
    """Evaluate a default; return None if it is not a literal, like the default of `progress`."""
    try:
        if isinstance(default, ast.Call) and ast.unparse(default.func) == "Path":
            return Path(*map(ast.literal_eval, default.args))
        return ast.literal_eval(default)
    except ValueError:
        return None


def _sections(docstring: str) -> tuple[str, dict[str, list[str]]]:
    """Return the text before the first section, and the lines of every section by title."""
    text = list[str]()
    sections = dict[str, list[str]]()
    into = text
    for line in docstring.splitlines():
        if title := _SECTION.match(line):
            into = sections[title[1]] = []
        else:
            into.append(line)
    return "\n".join(text).strip(), {
        "Options" if title in ("Args", "Attributes") else title: [
            line for line in lines if line.strip()
        ]
        for title, lines in sections.items()
    }


def _items(lines: list[str]) -> dict[str, str]:
    """Return the descriptions in a section of a docstring by name."""
    found = dict[str, list[str]]()
    name = ""
    for line in lines:
        if start := _ITEM.match(line):
            name = start[1]
            line = line[start.end() :]
        found.setdefault(name, []).append(line.strip())
    joined = {name: " ".join(said) for name, said in found.items() if name}
    return {name: _as_sentence(said.replace("`", "")) for name, said in joined.items()}


def _as_sentence(said: str) -> str:
    first = (
        said if said.split()[0].endswith(",") else said[0].upper() + said[1:]
    )  # "auto, cpu or cuda"
    return f"{first.removesuffix('.')}."


def is_list(kind: Any) -> bool:
    """Return True if a parameter takes several values."""
    assert not isinstance(kind, UnionType)
    return get_origin(kind) is list
