"""Arguments that are one of a few words."""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from triptych.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


def check_choices(function: Callable[P, R]) -> Callable[P, R]:
    """Raise a UsageError that names the argument if it is none of the words of its annotation's `Literal`."""
    parameters = signature(function).parameters
    choices = {name: found for name, one in parameters.items() if (found := _choices(one.annotation))}

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        given = dict(zip(parameters, args, strict=False)) | kwargs
        for name, (words, only_words) in choices.items():
            value = given.get(name, words[0])
            if (isinstance(value, str) or only_words) and value not in words:
                known = ", ".join(str(word) for word in words if word is not None)
                raise UsageError(f"{name}={value!r} is not one of {known}")
        return function(*args, **kwargs)

    return checked


def _choices(annotation: Any) -> tuple[tuple[Any, ...], bool] | None:
    """The words of an annotation, and whether it has nothing else; None for one without words."""
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    literals = [part for part in parts if get_origin(part) is Literal]
    if not literals or str in parts:
        return None
    words = tuple(word for part in literals for word in get_args(part))
    others = {*parts} - {*literals, NoneType}
    return (*words, *([None] if NoneType in parts else [])), not others
