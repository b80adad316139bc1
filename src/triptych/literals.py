"""Arguments that are one of a few words: the words, and their check."""

import ast
from collections.abc import Callable
from functools import wraps
from inspect import signature
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from triptych.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

# An activation of a head.
Activation = Literal["q", "k", "v", "scores", "weights", "z"]
# The replacement of a head's output.
By = Literal["zero", "mean", "resample"]
# A document in a file of text: all of it, a line, or the lines between blank ones.
Documents = Literal["file", "line", "blank-lines"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
EngineName = Literal["triptych", "ctranslate2", "auto"]
# Settings of a checkpoint's generation_config.json.
FileSettings = Literal["follow", "ignore"]
# The replacement of a head's output, where the loss without each head is measured.
Instead = Literal["zero", "mean", "even"]
# The map of a later head that reads an earlier one.
Into = Literal["Q", "K", "V"]
Precision = Literal["fp32", "bf16", "int8"]
# Types of the matrices that CTranslate2 holds.
Quantization = Literal["float32", "int8"]
# How special tokens that a text spells out (`<|endoftext|>`) are read: as the tokens, which `transformers`
# does, or as plain text.
SpecialTokens = Literal["tokens", "text"]
# When beam search ends.
Stop = Literal["certain", "full"]
TargetFormat = Literal["hf", "ctranslate2", "onnx", "triptych"]

_WORDS = {name: value for name, value in globals().items() if get_origin(value) is Literal}


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
    """Return the words of an annotation, and whether it has nothing else; None for one without words."""
    if isinstance(annotation, str):
        parts = [*_parts_as_written(ast.parse(annotation, mode="eval").body)]
    else:
        is_union = get_origin(annotation) in (Union, UnionType)
        parts = [*get_args(annotation)] if is_union else [annotation]
    literals = [part for part in parts if get_origin(part) is Literal]
    if not literals or str in parts:
        return None
    words = tuple(word for part in literals for word in get_args(part))
    others = {*parts} - {*literals, NoneType}
    return (*words, *([None] if NoneType in parts else [])), not others


def _parts_as_written(node: ast.expr) -> list[Any]:
    """Return the members of a union that is only written: words, str, None, and object for all else."""
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return [*_parts_as_written(left), *_parts_as_written(right)]
        case ast.Constant(value=None):
            return [NoneType]
        case ast.Name(id="str"):
            return [str]
        case ast.Name(id=name):
            return [_WORDS.get(name, object)]
        case ast.Subscript(value=ast.Name(id="Literal")):
            return [Literal[ast.literal_eval(node.slice)]]
        case _:
            return [object]
