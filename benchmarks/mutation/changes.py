"""Small changes of Python source, each of which should make a test fail."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
_COMPARISONS = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
_NAMES = {
    **{"min": "max", "max": "min", "any": "all", "all": "any"},
    **{"amin": "amax", "amax": "amin", "argmin": "argmax", "argmax": "argmin", "minimum": "maximum"},
    **{"maximum": "minimum", "floor": "ceil", "ceil": "floor", "real": "imag", "mean": "sum"},
}


@dataclass(frozen=True)
class Change:
    """Text in place of other text.

    Attributes:
        file: relative to the root.
        line: of the first character that changes.
        lines: first and last of the statement it is in.
        scope: name of the function or class around it, "" outside.
        start: of the text that is replaced, in characters of the file; likewise `end`.
        old: that text.
        new: what takes its place.
        kind: of change.
    """

    file: str
    line: int
    lines: tuple[int, int]
    scope: str
    start: int
    end: int
    old: str
    new: str
    kind: str

    def applied(self, source: str) -> str:
        """The file with the change."""
        assert source[self.start : self.end] == self.old
        return source[: self.start] + self.new + source[self.end :]


def changes_of(file: str, source: str) -> list[Change]:
    """Every change that is tried in a file, in order.

    Left out: annotations, decorators, strings, what is raised or asserted, and `__repr__`.
    """
    return list(_Walk(file, source).module())


def is_sound(change: Change, source: str) -> bool:
    """Whether the changed file is Python, and another program."""
    try:
        changed = ast.parse(change.applied(source))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def span_of(change: Change, source: str) -> tuple[int, int]:
    """First and last line of the innermost function or class around a change; of the file outside."""
    found = (1, source.count("\n") + 1)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first, last = node.lineno, node.end_lineno or node.lineno
            if first <= change.line <= last and last - first < found[1] - found[0]:
                found = first, last
    return found


class _Walk:
    def __init__(self, file: str, source: str) -> None:
        self._file, self._source = file, source
        self._starts = [0]
        for line in source.splitlines(keepends=True):
            self._starts.append(self._starts[-1] + len(line))
        self._lines = source.splitlines(keepends=True)

    def module(self) -> Iterator[Change]:
        for statement in ast.parse(self._source).body:
            yield from self._statement(statement, "")

    def _statement(self, node: ast.stmt, scope: str) -> Iterator[Change]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            if node.name != "__repr__":
                inner = f"{scope}.{node.name}" if scope else node.name
                if not isinstance(node, ast.ClassDef):
                    for default in filter(None, (*node.args.defaults, *node.args.kw_defaults)):
                        yield from self._expression(default, default, inner)
                for statement in node.body:
                    yield from self._statement(statement, inner)
            return
        if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
            return
        yield from self._dropped(node, scope)
        if isinstance(node, ast.If):
            yield self._change(
                node.test, f"not ({self._text(node.test)})", "condition negated", node.test, scope
            )
        if isinstance(node, ast.AugAssign) and type(node.op) in _ARITHMETIC:
            old, new = _ARITHMETIC[type(node.op)]
            yield from self._between(node.target, node.value, f"{old}=", f"{new}=", node, scope)
        for name, value in ast.iter_fields(node):
            if name == "annotation":
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.stmt):
                    yield from self._statement(child, scope)
                elif isinstance(child, ast.expr):
                    yield from self._expression(child, node if not _has_body(node) else child, scope)
                elif isinstance(child, ast.AST):  # handlers, cases, items of `with`
                    yield from self._inside(child, scope)

    def _inside(self, node: ast.AST, scope: str) -> Iterator[Change]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.stmt):
                yield from self._statement(child, scope)
            elif isinstance(child, ast.expr) and not isinstance(node, ast.ExceptHandler):
                yield from self._expression(child, child, scope)
            elif isinstance(child, ast.match_case):
                yield from self._inside(child, scope)

    def _dropped(self, node: ast.stmt, scope: str) -> Iterator[Change]:
        """A statement that does something to what is there already, left out."""
        if isinstance(node, ast.Expr):
            drops = isinstance(node.value, ast.Call)
        elif isinstance(node, ast.Assign):
            drops = all(isinstance(target, ast.Subscript | ast.Attribute) for target in node.targets)
        else:
            drops = isinstance(node, ast.AugAssign)
        if drops:
            yield self._change(node, "pass", "statement dropped", node, scope)

    def _expression(self, node: ast.expr | None, within: ast.stmt | ast.expr, scope: str) -> Iterator[Change]:
        match node:
            case None | ast.JoinedStr():
                return
            case ast.Constant(value=bool() as value):
                yield self._change(node, str(not value), "constant", within, scope)
            case ast.Constant(value=int() | float() as value):
                for by in (1, -1):
                    yield self._change(node, repr(value + by), "constant", within, scope)
            case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
                yield self._change(node, f"({self._text(operand)})", "sign or not removed", within, scope)
            case ast.BinOp(left=left, right=right, op=op) if type(op) in _ARITHMETIC and not _is_text(node):
                yield from self._between(left, right, *_ARITHMETIC[type(op)], within, scope)
            case ast.Compare(left=left, ops=ops, comparators=others):
                for one, sign, other in zip((left, *others), ops, others, strict=False):
                    yield from self._between(one, other, *_COMPARISONS[type(sign)], within, scope)
            case ast.BoolOp(op=op, values=values):
                swap = ("and", "or") if isinstance(op, ast.And) else ("or", "and")
                for one, other in pairwise(values):
                    yield from self._between(one, other, *swap, within, scope)
            case ast.IfExp(test=test):
                yield self._change(test, f"not ({self._text(test)})", "condition negated", within, scope)
            case ast.Call(func=ast.Name(id=name) as called) if name in _NAMES:
                yield self._change(called, _NAMES[name], "other function", within, scope)
            case ast.Call(func=ast.Attribute(value=value, attr=name) as called) if name in _NAMES:
                text = self._text(called)
                yield self._change(called, text[: -len(name)] + _NAMES[name], "other function", within, scope)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                yield from self._expression(child, within, scope)
            elif isinstance(child, ast.keyword):
                yield from self._expression(child.value, within, scope)
            elif isinstance(child, ast.comprehension):
                for test in child.ifs:
                    yield self._change(
                        test, f"(not ({self._text(test)}))", "condition negated", within, scope
                    )
                yield from self._inside(child, scope)

    def _between(
        self, left: ast.expr, right: ast.expr, old: str, new: str, within: ast.stmt | ast.expr, scope: str
    ) -> Iterator[Change]:
        """The operator between two operands."""
        start, end = self._end(left), self._start(right)
        gap = self._source[start:end]
        pattern = r"\s+".join(map(re.escape, old.split()))
        if old.isidentifier() or " " in old:
            pattern = rf"\b{pattern}\b"
        if found := re.search(pattern, gap):
            at = start + found.start()
            kind = f"{old} → {new}"
            yield self._replaced(at, at + len(found[0]), new, kind, within, scope)

    def _change(self, node: ast.AST, new: str, kind: str, within: ast.AST, scope: str) -> Change:
        return self._replaced(self._start(node), self._end(node), new, kind, within, scope)

    def _replaced(self, start: int, end: int, new: str, kind: str, within: ast.AST, scope: str) -> Change:
        line = self._source.count("\n", 0, start) + 1
        lines = within.lineno, within.end_lineno or within.lineno  # type: ignore[attr-defined]
        return Change(self._file, line, lines, scope, start, end, self._source[start:end], new, kind)

    def _text(self, node: ast.AST) -> str:
        return self._source[self._start(node) : self._end(node)]

    def _start(self, node: ast.AST) -> int:
        return self._offset(node.lineno, node.col_offset)  # type: ignore[attr-defined]

    def _end(self, node: ast.AST) -> int:
        return self._offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def _offset(self, line: int, column: int) -> int:
        """In characters; columns of a syntax tree count bytes."""
        return self._starts[line - 1] + len(self._lines[line - 1].encode()[:column].decode())


def _has_body(node: ast.stmt) -> bool:
    return hasattr(node, "body")


def _is_text(node: ast.BinOp) -> bool:
    """Whether strings are joined."""
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )
