"""The list of rewrites, and their syntax: `truncate(rank=6)`, or a table of a recipe."""

import ast
import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from triptych.errors import UsageError, nearest
from triptych.rewriting.functions.biases import DropKeyBias, FoldValueBias
from triptych.rewriting.functions.folding import Expand, Factor, Fold
from triptych.rewriting.functions.gauge import GaugeFix
from triptych.rewriting.functions.head_order import (
    PermuteHeads,
    RepeatKVHeads,
    SortHeads,
)
from triptych.rewriting.functions.latent import ToLatent
from triptych.rewriting.functions.merging import MergeKVHeads
from triptych.rewriting.functions.norms import FoldNorm, FoldOtherNorms
from triptych.rewriting.functions.pruning import PruneHeads
from triptych.rewriting.functions.rewrite import Rewrite
from triptych.rewriting.functions.truncation import Truncate

REWRITES: tuple[type[Rewrite], ...] = (
    Fold,
    Expand,
    Factor,
    FoldNorm,
    FoldOtherNorms,
    DropKeyBias,
    FoldValueBias,
    PruneHeads,
    MergeKVHeads,
    Truncate,
    GaugeFix,
    SortHeads,
    PermuteHeads,
    RepeatKVHeads,
    ToLatent,
)
BY_NAME = {rewrite.name: rewrite for rewrite in REWRITES}

# All exact rewrites that never enlarge a layer and preserve the order of active heads.
EXACT: tuple[Rewrite, ...] = (
    Fold(),
    FoldNorm(),
    FoldOtherNorms(),
    DropKeyBias(),
    FoldValueBias(),
    PruneHeads(),
    GaugeFix(),
)


def read_rewrite(given: object) -> Rewrite:
    """Return a rewrite unchanged, or read it from a call (`"truncate(rank=6)"`, `"expand"`) or a table."""
    if isinstance(given, Rewrite):
        return given
    if not isinstance(given, str | Mapping):
        raise UsageError(f"{given!r} is no rewrite: write truncate(rank=6), or expand")
    options = _parse_call(given) if isinstance(given, str) else dict(given)
    name = options.pop("rewrite", None)
    kind = BY_NAME.get(name) if isinstance(name, str) else None
    if kind is None:
        raise UsageError(
            f"there is no rewrite {name}{_did_you_mean(str(name), BY_NAME)}: there are {', '.join(BY_NAME)}"
        )
    known = option_names(kind)
    if unknown := next((option for option in options if option not in known), None):
        said = f"there are {', '.join(known)}"
        raise UsageError(
            f"{kind.name} has no option {unknown}{_did_you_mean(unknown, known)}: {said}"
        )
    try:
        # Strict validation of JSON: lists become tuples, and other values must have the exact type.
        return kind.model_validate_json(json.dumps(options, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (kind.name, *first["loc"]))
        raise UsageError(
            f"{where}: {first['msg'].removeprefix('Value error, ')}"
        ) from None


def require_order(rewrites: Sequence[Rewrite]) -> None:
    """Refuse rewrites that undo or spoil preceding rewrites."""
    for before, after in pairwise(rewrites):
        if after.place < before.place:
            raise UsageError(
                f"{after.name} must come before {before.name}: {after.why_here}"
            )


def option_names(kind: type[Rewrite]) -> list[str]:
    """Return the options of a rewrite: specific options first, then options of all rewrites."""
    names = [name for name, field in kind.model_fields.items() if not field.exclude]
    return sorted(names, key=lambda name: name in Rewrite.model_fields)


def purpose(kind: type[Rewrite]) -> str:
    """Return the purpose of a rewrite: the first line of its docstring."""
    return (kind.__doc__ or "").partition("\n")[0]


def signature(kind: type[Rewrite]) -> str:
    """Return a rewrite with its specific options, types and defaults: `to_latent(rank: int = None)`."""
    said = []
    for name in option_names(kind):
        field = kind.model_fields[name]
        if name not in Rewrite.model_fields:
            default = (
                "" if field.is_required() else f" = {_words_of_value(field.default)}"
            )
            said.append(f"{name}: {_words_of_type(field.annotation)}{default}")
    return f"{kind.name}({', '.join(said)})"


def _parse_call(text: str) -> dict[str, Any]:
    """Parse a call into its name and options; a bare name is a call without options."""
    wrong = f"{text!r} is no rewrite: write truncate(rank=6), or expand"
    try:
        found = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(wrong) from None
    # A bare name is a call without options.
    if isinstance(found, ast.Name):
        return {"rewrite": found.id}
    if not isinstance(found, ast.Call) or not isinstance(found.func, ast.Name):
        raise UsageError(wrong)
    options: dict[str, Any] = {"rewrite": found.func.id}
    if found.args or any(keyword.arg is None for keyword in found.keywords):
        raise UsageError(f"{text}: give options by name, as in truncate(rank=6)")
    for keyword in found.keywords:
        name = str(keyword.arg)
        if name in options:
            raise UsageError(f"{text}: {name} is given twice")
        try:
            options[name] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, RecursionError, MemoryError):
            shown = ast.unparse(keyword.value)
            raise UsageError(
                f"{text}: {name} is {shown}: write a number, a string or a list of them"
            ) from None
    return options


def _did_you_mean(name: str, known: Sequence[str] | Mapping[str, Any]) -> str:
    found = nearest(name, known)
    return f" (did you mean {found}?)" if found else ""


def _words_of_type(annotation: Any) -> str:
    arguments = get_args(annotation)
    match get_origin(annotation):
        case origin if origin in (Union, UnionType):
            return " | ".join(
                _words_of_type(part) for part in arguments if part is not NoneType
            )
        case origin if origin is Literal:
            return " | ".join(_words_of_value(value) for value in arguments)
        case origin if origin is tuple:
            return f"[{_words_of_type(arguments[0])}, …]"
    return str(getattr(annotation, "__name__", annotation))


def _words_of_value(value: Any) -> str:
    return (
        json.dumps(value, default=list)
        if isinstance(value, str | tuple)
        else str(value)
    )
