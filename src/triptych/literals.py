"""Arguments with a fixed set of words, and their check."""

import ast
from collections.abc import Callable
from functools import wraps
from inspect import Parameter, signature
from itertools import chain
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin

from triptych.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")

# Activations of a head.
Activation = Literal["q", "k", "v", "scores", "weights", "z"]
# Tokenizers of BLEU in sacreBLEU; ja-mecab and ko-mecab need libraries.
BleuTokenizer = Literal["13a", "intl", "zh", "ja-mecab", "ko-mecab", "char", "none"]
# Replacements of a head's output.
By = Literal["zero", "mean", "resample"]
# Division of a text file into documents: the whole file, single lines, or the lines between blank lines.
Documents = Literal["file", "line", "blank-lines"]
Dtype = Literal["float32", "bfloat16", "float16", "float64"]
EngineName = Literal["triptych", "ctranslate2", "auto"]
# Treatments of a checkpoint's generation_config.json.
FileSettings = Literal["follow", "ignore"]
# Replacements of a head's output when the loss without each head is measured.
Instead = Literal["zero", "mean", "even"]
# Maps of a later head that read the output of an earlier head.
Into = Literal["Q", "K", "V"]
Precision = Literal["fp32", "bf16", "int8"]
# The forms of a head, W_QK and W_OV.
FormName = Literal["qk", "ov"]
# Types of the matrices of a CTranslate2 or GGUF model, or of a page for the web.
Quantization = Literal["float32", "float16", "int8"]
# Required verdicts on two models.
Requirement = Literal["numbers", "function", "near"]
# Treatments of special tokens spelled out in a text (`<|endoftext|>`): as tokens, as in `transformers`, or as
# plain text.
SpecialTokens = Literal["tokens", "text"]
# Criteria for the end of a beam search.
Stop = Literal["certain", "full"]
TargetFormat = Literal["hf", "ctranslate2", "onnx", "gguf", "web", "triptych"]

_WORDS = {
    name: value for name, value in globals().items() if get_origin(value) is Literal
}


def check_choices(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a verb to refuse an argument outside the words of its `Literal`, and to explain unknown names.

    The decorated verb raises `UsageError` for such a word, and `TypeError`, like Python, for an unknown
    keyword argument.
    """
    # If an annotation also allows objects, only strings are checked.
    parameters = signature(function).parameters
    choices = {
        name: found
        for name, one in parameters.items()
        if (found := _choices(one.annotation))
    }
    takes_any = any(one.kind is Parameter.VAR_KEYWORD for one in parameters.values())

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        if not takes_any and (unknown := kwargs.keys() - parameters.keys()):
            from triptych.guesses import about_arguments

            raise TypeError(about_arguments(function.__name__, unknown, parameters))
        given = dict(zip(parameters, args, strict=False)) | kwargs
        for name, (words, only_words) in choices.items():
            value = given.get(name, words[0])
            if (isinstance(value, str) or only_words) and value not in words:
                known = ", ".join(str(word) for word in words if word is not None)
                from triptych.guesses import about_places

                hint = about_places(function.__name__, args)
                raise UsageError(f"{name}={value!r} is not one of {known}{hint}")
        return function(*args, **kwargs)

    return checked


def _choices(annotation: Any) -> tuple[tuple[Any, ...], bool] | None:
    """Return the words of an annotation, and whether it allows only words; None without words."""
    # Annotations are strings in modules with `from __future__ import annotations`.
    if isinstance(annotation, str):
        parts = [*_parts_as_written(ast.parse(annotation, mode="eval").body)]
    else:
        is_union = get_origin(annotation) in (Union, UnionType)
        parts = [*get_args(annotation)] if is_union else [annotation]
    literals = [part for part in parts if get_origin(part) is Literal]
    if not literals or str in parts:
        return None
    words = tuple(chain.from_iterable(get_args(part) for part in literals))
    others = {*parts} - {*literals, NoneType}
    return (*words, *([None] if NoneType in parts else [])), not others


def _parts_as_written(node: ast.expr) -> list[Any]:
    """Return the members of a union from its syntax tree: words, str, None, and object for other types."""
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
