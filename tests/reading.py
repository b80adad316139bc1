"""Count what makes the source easy or hard to read; every count has a ceiling that only falls.

The reading set of `load` is the import closure of the module that defines `Model`, by imports at the level of
modules: a reader of the class need not read what a method imports when it is called.

`python tests/reading.py` prints the table of the package; `python tests/reading.py FOLDER` that of another
version (`FOLDER/triptych` is its package). `tests/test_reading.py` fails where a count is above its ceiling.
`python tests/reading.py --show KIND` prints the clauses of one kind of prose.
"""

import argparse
import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src"

# The largest value that each figure may have. After a change that makes a figure better, its new value
# goes here, rounded up: ceilings only fall. The three counts of lines that are marked rose with a verb, pairs
# and labels of texts, adapters by their names and layers of torch; two of them again, by 44 and 56 lines,
# with the heads of tasks of every family and encoders alone.
CEILINGS: Mapping[str, float] = {
    "reading set of load: lines": 14_450,  # rose
    "reading set of load: modules": 48,
    "import closure of the module of Model: lines": 1_700,  # rose
    "import closure of the module of Model: modules": 5,
    "import closure of core/checkpoints/stored_models.py: lines": 20_060,  # rose
    "import closure of core/checkpoints/stored_models.py: modules": 66,
    "code tokens a code line": 7.8,
    "packed assignments per 1,000 lines": 1.0,
    "comprehensions of two loops or more": 25,
    "functions of 15 lines or more with a comment inside, %": 65,
    "functions that are one return or less, per 1,000 lines": 14.7,
    "one-way pairs of packages used": 24,
    "prose: clauses of one of the kinds below, %": 3.2,
    "prose: docstrings that begin with What, Whether, Why, How or Where": 7,
    "prose: relative clause, per 1,000 clauses": 6.1,
    "prose: noun clause, per 1,000 clauses": 1.4,
    "prose: preposition fragment, per 1,000 clauses": 9.5,
    "prose: pronoun without its noun, per 1,000 clauses": 4.0,
    "prose: everyday verb, per 1,000 clauses": 3.7,
    "prose: home-made noun, per 1,000 clauses": 4,
    "prose: negated noun, per 1,000 clauses": 1.8,
    "prose: as X has it, per 1,000 clauses": 0.5,
    "prose: trailing apposition, per 1,000 clauses": 3.4,
}
# Figures that are better when they are larger: their ceiling is a floor, and it only rises.
AT_LEAST = {"functions of 15 lines or more with a comment inside, %"}
# Where the figures are to go.
AIMS: Mapping[str, float] = {
    "reading set of load: lines": 14_000,
    "code tokens a code line": 8,
    "packed assignments per 1,000 lines": 5,
    "comprehensions of two loops or more": 30,
    "functions of 15 lines or more with a comment inside, %": 60,
    "functions that are one return or less, per 1,000 lines": 9,
    "prose: clauses of one of the kinds below, %": 10,
}

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
NO_CODE |= {tokenize.ENDMARKER}

# Kinds of prose that a native reader stumbles over, each with an example. A clause is counted once for each
# kind. The expressions are simple: they find the kind, not every case of it.
KINDS: Mapping[str, re.Pattern[str]] = {
    kind: re.compile("|".join(patterns), re.IGNORECASE)
    for kind, patterns in {
        # "the layers that have no keys of their own"
        "relative clause": (
            r"\b(?<!so )(?<!such )(?:that|which|whose) (?:has|have|had|is|are|was|were|no|do|does)\b",
            r"\b(?<!so )(?<!such )(?:that|which|whose) (?:it|they|all|each|one|can|may|must)\b",
            r"\b(?<!so )(?<!such )(?:that|which|whose) \w+[^su\W]s\b",
        ),
        # "What a plan names", "Whether heads share a map", "says what it takes"
        "noun clause": (
            r"^(?:what|whether|why|how)\b",
            r"\b(?:says?|said|tells?|of|with|from|than) (?:what|whether|why)\b",
        ),
        # "layer: of the stack; …", a field explained by a preposition
        "preposition fragment": (
            r"^(?:of|for|with|without|by|in|at|on|from|to|as|before|after|between|under|below|above|over|where)"
            r"\b(?!.*\b(?:is|are|has|have|gives?|makes?|takes?|was|were|be|can|may|must)\b)",
        ),
        # "the others", "its own", "the rest"
        "pronoun without its noun": (
            r"\b(?:others|the rest|(?:its|their) own|those|ones|neither|both)(?=$|[,)]| (?:of|that|which|is"
            r"|are|as|and|or|in|to|with|have|has|by|for|from|who|whose|there|at|on|where|above|below)\b)",
            r"\b(?:one|each)(?=$|[,)]| (?:of|that|which|is|has|with|whose|where|in|for|by|a|as|or)\b)",
        ),
        # "take up", "go on", "let go"
        "everyday verb": (
            r"\b(?:takes?|taken|took) up\b",
            r"\b(?:go|goes|going|went|gone) (?:on|with|through|into)\b",
            r"\b(?:comes?|came) (?:to|from|of|with)\b",
            r"\b(?:lets?|letting) go\b",
            r"\b(?:holds?|held|tells?|told|says?|said|meets?|met|looks?|turns?|turned)\b",
        ),
        # "numbers" for parameters, "writing" for a parameterisation
        "home-made noun": (
            r"\bnumbers\b(?! of\b)",
            r"\b(?:a|the|its|their|other|another|every|each) writings?\b",
            r"\b(?:places?|sides?|copies|rooms?|looks)\b",
        ),
        # "that is no X", "nothing"; the value None is no such case
        "negated noun": (
            r"\b(?:is|are|was|were|be|gives?|has|have|had|takes?|makes?|needs?|with|of) no\b",
            r"\b(?-i:none|nothing|nobody|Nothing|Nobody|No one|no one)\b",
        ),
        # "as the file has it", "as it is"
        "as X has it": (
            r"\bas (?:\w+ ){1,3}(?:is|are|was|were|has|have|had|does|do|did|says?|reads?|writes?)\b",
            r"\bas (?:ever|before|usual|read|given)$",
        ),
        # ", the nearest first"
        "trailing apposition": (
            r"^(?!(?:where|if|when|under|in|with|what)\b)[^,]+, (?:the|one|all|each|both)(?: \w+){1,3}$",
            r", [\w` ]+ (?:first|last)$",
            r", (?:in (?:their|its) order|\w+ (?:by|for) \w+)$",
        ),
    }.items()
}


class Module:
    """A module of the package: its text, tokens, and the nodes of its tree."""

    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="utf-8")
        self.tokens = list(tokenize.generate_tokens(io.StringIO(self.text).readline))
        self.tree = ast.parse(self.text)
        self.nodes = list(ast.walk(self.tree))
        self.functions = [node for node in self.nodes if isinstance(node, FUNCTIONS)]
        self.docstrings: list[str] = []
        self.lines_of_docstrings: set[int] = set()
        for node in self.nodes:
            if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
                self.docstrings.append(text)
                self.lines_of_docstrings.update(lines_of(node.body[0]))

    def import_statements(self, *, inside: bool) -> Iterator[ast.Import | ast.ImportFrom]:
        """Yield the imports, with those inside functions or without."""
        for node in statements(self.tree, inside=inside):
            if isinstance(node, ast.Import | ast.ImportFrom):
                yield node

    def comments(self) -> Iterator[str]:
        """Yield the comments; comments on adjacent lines of their own are one."""
        words: list[str] = []
        before = -1  # the line of the comment before, if nothing else is on it
        for token in self.tokens:
            if token.type != tokenize.COMMENT:
                continue
            number = token.start[0]
            is_alone = token.line.lstrip().startswith("#")
            if words and not (is_alone and before == number - 1):
                yield " ".join(words)
                words = []
            words.append(token.string.lstrip("#: ").strip())
            before = number if is_alone else -1
        if words:
            yield " ".join(words)

    def lines_of_comments(self) -> set[int]:
        return {token.start[0] for token in self.tokens if token.type == tokenize.COMMENT}

    def tokens_and_lines(self) -> tuple[int, int]:
        """Count tokens of code, and the lines that have one; docstrings and comments are no code."""
        count = 0
        lines: set[int] = set()
        for token in self.tokens:
            if token.type not in NO_CODE and token.start[0] not in self.lines_of_docstrings:
                count += 1
                lines.update(range(token.start[0], token.end[0] + 1))
        return count, len(lines)

    def written_lines(self) -> int:
        """Count lines that are neither empty nor a comment; docstrings count."""
        lines = [line.strip() for line in self.text.splitlines()]
        return sum(1 for line in lines if line and not line.startswith("#"))


class Package:
    """The modules of a package by name, and what they import."""

    def __init__(self, root: Path) -> None:
        self.modules: dict[str, Module] = {}
        self.folders = {path.name for path in (root / "triptych").iterdir() if path.is_dir()}
        for path in sorted((root / "triptych").rglob("*.py")):
            parts = path.relative_to(root).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.modules[name] = Module(path)

    def defining(self, name: str) -> str:
        """Return the module at whose top level a class is defined."""
        for found, module in self.modules.items():
            if any(isinstance(node, ast.ClassDef) and node.name == name for node in module.tree.body):
                return found
        raise LookupError(f"no module defines {name}")

    def imports(self, *, inside: bool) -> dict[str, set[str]]:
        """Return the modules that each module imports, inside functions too or only when it is imported."""
        return {
            name: self.modules_of(module.import_statements(inside=inside))
            for name, module in self.modules.items()
        }

    def modules_of(self, statements: Iterable[ast.stmt]) -> set[str]:
        """Return the modules of the package that some statements import."""
        found: set[str] = set()
        for statement in statements:
            if isinstance(statement, ast.Import | ast.ImportFrom):
                for one in imported_names(statement):
                    # `from triptych.a import b` imports the module a.b where there is one, and else a.
                    found.add(one if one in self.modules else one.rpartition(".")[0])
        return found & self.modules.keys()

    def imports_of_load(self) -> set[str]:
        """Return the module that defines `Model`, and the modules that `load` imports when it is called."""
        door = self.defining("Model")
        load = [
            node
            for node in self.modules[door].tree.body
            if isinstance(node, FUNCTIONS) and node.name == "load"
        ]
        inside = (one for function in load for one in statements(function, inside=True))
        return {door, *self.modules_of(inside)}

    def num_lines(self, names: set[str]) -> int:
        return sum(len(self.modules[name].text.splitlines()) for name in names)


def statements(block: ast.AST, *, inside: bool) -> Iterator[ast.stmt]:
    """Yield the statements of a block and of the blocks in it, with those inside functions or without.

    Without them, imports for the type checker alone are left out as well: they are not run.
    """
    if not inside and isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING":
        return
    for name in ("body", "orelse", "finalbody", "handlers", "cases"):
        for node in getattr(block, name, ()):
            if isinstance(node, ast.stmt):
                yield node
            if inside or not isinstance(node, FUNCTIONS):
                yield from statements(node, inside=inside)


def lines_of(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def imported_names(node: ast.Import | ast.ImportFrom) -> Iterator[str]:
    """Yield full names of what a statement imports."""
    for name in node.names:
        yield name.name if isinstance(node, ast.Import) else f"{node.module}.{name.name}"


def closure(graph: Mapping[str, set[str]], starts: set[str]) -> set[str]:
    """Return modules with all that they import, directly or through other modules."""
    found = {*starts}
    waiting = [*starts]
    while waiting:
        new = graph[waiting.pop()] - found
        found |= new
        waiting += new
    return found


def clauses(text: str) -> Iterator[str]:
    """Yield the clauses of a text: what lies between full stops, colons, semicolons and empty lines."""
    for clause in re.split(r"[.;:!?](?:\s|$)|\n\n|\n(?= *[\w, ]+: )", text):
        words = " ".join(clause.split())
        if re.search(r"\w+\s+\w+", words):
            yield words


def prose(package: Package) -> Iterator[str]:
    """Yield the clauses of all docstrings and comments."""
    for module in package.modules.values():
        for text in [*module.docstrings, *module.comments()]:
            yield from clauses(text)


def is_packed(node: ast.AST) -> bool:
    """Whether a statement is `a, b = x, y`; `a, b = call()` unpacks one value and is not."""
    return (
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
    )


def is_double(node: ast.AST) -> bool:
    """Whether a comprehension has two loops or more."""
    kinds = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
    return isinstance(node, kinds) and len(node.generators) > 1


def is_one_return(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether a function is one return, or only a docstring or an ellipsis."""
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    match body:
        case [] | [ast.Return()] | [ast.Expr(value=ast.Constant())]:
            return True
    return False


def room(module: str) -> str:
    """Return the folder or module right below the package."""
    return [*module.split("."), "triptych"][1]


def figures(package: Package) -> dict[str, float]:
    """Return every figure of the table."""
    return figures_of_imports(package) | figures_of_code(package) | figures_of_prose(package)


def figures_of_imports(package: Package) -> dict[str, float]:
    """Count what a reader has to open, and which packages know each other."""
    graph = package.imports(inside=False)
    found: dict[str, float] = {}
    starts = {
        "reading set of load": package.imports_of_load(),
        "import closure of the module of Model": {package.defining("Model")},
    }
    core = "triptych.core.checkpoints.stored_models"
    if core in package.modules:
        starts["import closure of core/checkpoints/stored_models.py"] = {core}
    for name, start in starts.items():
        reading = closure(graph, start)
        found[f"{name}: lines"] = package.num_lines(reading)
        found[f"{name}: modules"] = len(reading)
    everything = package.imports(inside=True)
    pairs = {(room(module), room(other)) for module, others in everything.items() for other in others}
    used = [(one, other) for one, other in pairs if one != other and {one, other} <= package.folders]
    return {**found, "one-way pairs of packages used": len(used)}


def figures_of_code(package: Package) -> dict[str, float]:
    """Count what makes code dense."""
    modules = package.modules.values()
    counted = [module.tokens_and_lines() for module in modules]
    tokens = sum(count for count, _ in counted)
    lines = sum(count for _, count in counted)
    written = sum(module.written_lines() for module in modules)
    packed = sum(is_packed(node) for module in modules for node in module.nodes)
    commented = []  # for each function of 15 lines or more, whether a comment is inside
    for module in modules:
        with_comment = module.lines_of_comments()
        for function in module.functions:
            inside = lines_of(function)
            if len(inside) >= 15:
                commented.append(not with_comment.isdisjoint(inside))
    return {
        "code tokens a code line": tokens / lines,
        "packed assignments per 1,000 lines": 1000 * packed / written,
        "comprehensions of two loops or more": sum(
            is_double(node) for module in modules for node in module.nodes
        ),
        "functions of 15 lines or more with a comment inside, %": 100
        * sum(commented)
        / max(len(commented), 1),
        "functions that are one return or less, per 1,000 lines": 1000
        * sum(is_one_return(function) for module in modules for function in module.functions)
        / written,
    }


def figures_of_prose(package: Package) -> dict[str, float]:
    """Count the clauses of docstrings and comments of each kind of `KINDS`."""
    counts = dict.fromkeys(KINDS, 0)
    total = 0
    marked = 0
    for clause in prose(package):
        kinds = kinds_of(clause)
        for kind in kinds:
            counts[kind] += 1
        total += 1
        marked += bool(kinds)
    firsts = [text.split()[0] for module in package.modules.values() for text in module.docstrings]
    return {
        "prose: clauses of one of the kinds below, %": 100 * marked / total,
        "prose: docstrings that begin with What, Whether, Why, How or Where": sum(
            first in {"What", "Whether", "Why", "How", "Where"} for first in firsts
        ),
        **{f"prose: {kind}, per 1,000 clauses": 1000 * count / total for kind, count in counts.items()},
    }


def kinds_of(clause: str) -> list[str]:
    """Return the kinds that a clause is of."""
    return [kind for kind, pattern in KINDS.items() if pattern.search(clause)]


def misses(found: Mapping[str, float]) -> Iterator[str]:
    """Yield a line for each figure that is on the wrong side of its ceiling."""
    for name, ceiling in CEILINGS.items():
        value = found.get(name)
        if value is None:
            continue
        if value < ceiling if name in AT_LEAST else value > ceiling:
            yield f"{name}: {value:.4g}, and the ceiling is {ceiling:g}"


def main() -> int:
    """Print the table, or the clauses of a kind."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, nargs="?", default=SOURCE)
    parser.add_argument("--show", choices=KINDS, metavar="KIND", help=", ".join(KINDS))
    asked = parser.parse_args()
    package = Package(asked.source)
    if asked.show:
        print("\n".join(clause for clause in prose(package) if asked.show in kinds_of(clause)))
        return 0
    found = figures(package)
    print(f"{'':66} {'today':>9} {'ceiling':>9} {'aim':>9}")
    for name, value in found.items():
        shown = f"{value:,.1f}" if isinstance(value, float) else f"{value:,}"
        limits = [f"{table[name]:,g}" if name in table else "" for table in (CEILINGS, AIMS)]
        print(f"{name:66} {shown:>9} {limits[0]:>9} {limits[1]:>9}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
