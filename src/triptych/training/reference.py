"""The tables of `docs/reference/recipes.md`, made from the models that check a recipe.

`python -m triptych.training.reference docs/reference/recipes.md` (`make docs`) brings the page up to date.
"""

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from triptych.files import write_text
from triptych.models import PRESETS, ModelConfig
from triptych.training.recipe import LanguageRecipe, Recipe
from triptych.training.sections import ContinuedModelConfig

BEGIN, END = "<!-- keys: made by `make docs` -->", "<!-- end of keys -->"
# A section of a kind that has been shown before is not shown again.
_SHOWN_ONCE = ("data.valid", "model.decoder.attention", "model.decoder.cross_attention")


def with_keys(page: str) -> str:
    """The page with its tables made anew."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page has no lines {BEGIN} and {END}, between which the tables belong")
    return f"{before}{BEGIN}\n\n{keys()}\n{END}{after}"


def keys() -> str:
    """A table for every section of both kinds of recipes: key, type, default, meaning."""
    lines = [
        *_section(Recipe, ""),
        "## Every key of a language model's recipe\n",
        *_section(LanguageRecipe, ""),
        "## A model that begins as a checkpoint, instead of `[tokenizer]` and `[model]`\n",
        *_section(ContinuedModelConfig, "model"),
    ]
    return "\n".join(lines)


def _section(model: type[BaseModel], path: str) -> Iterator[str]:
    yield f"### `[{path}]`\n" if path else "### At the top\n"
    if model is ModelConfig:
        yield f"`preset` ({_either(PRESETS)}; `base` if not given) names what the other keys change.\n"
    meanings = meanings_of(model)
    sections: list[tuple[type[BaseModel], str]] = []
    yield "| key | type | default | meaning |\n|---|---|---|---|"
    for name, field in model.model_fields.items():
        if (inner := _model_of(field.annotation)) is not None and get_origin(field.annotation) is not dict:
            sections.append((inner, f"{path}.{name}" if path else name))
            continue
        cells = f"`{name}`", _type(field), _default(field), meanings[name]
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""
    if path.endswith("encoder.attention"):
        yield "`triptych cost` lists the names for `projections`. Each has further keys, for its sizes.\n"
    for inner, below in sections:
        if below in _SHOWN_ONCE:
            like = "data.train" if below.startswith("data") else "model.encoder.attention"
            yield f"### `[{below}]`\n\nThe keys of `[{like}]`.\n"
        else:
            yield from _section(inner, below)


def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """What each key of a section means."""
    meanings: dict[str, str] = {}
    for one in reversed(model.__mro__):  # a section says what it adds to the one that it extends
        _, _, text = (one.__doc__ or "").partition("Attributes:\n")
        found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", text, flags=re.MULTILINE)
        meanings |= {name: re.sub(r"\s+", " ", meaning).strip() for name, meaning in found}
    return meanings


def _model_of(annotation: Any) -> type[BaseModel] | None:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, types.UnionType) else (annotation,)
    models = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
    return models[0] if models else None


def _type(field: FieldInfo) -> str:
    limits = [
        f"{sign} {getattr(rule, name):g}"
        for rule in field.metadata
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<"))
        if isinstance(getattr(rule, name, None), int | float) and abs(getattr(rule, name)) < 2**60
    ]
    return ", ".join([_kind(field.annotation), *limits])


def _kind(annotation: Any) -> str:
    origin = get_origin(annotation)
    if origin is Literal:
        return _either(get_args(annotation), quoted=True)
    if origin in (Union, types.UnionType):
        return " or ".join(_kind(one) for one in get_args(annotation) if one is not type(None))
    if origin is dict:
        return "a section for each number of a layer"
    if origin in (tuple, list):
        return f"list of {_kind(get_args(annotation)[0])}"
    names = {int: "integer", float: "number", bool: "true or false", str: "string", Path: "path"}
    return names.get(annotation) or str(getattr(annotation, "__name__", annotation))


def _either(names: Any, *, quoted: bool = False) -> str:
    return ", ".join(f'`"{name}"`' if quoted else f"`{name}`" for name in names)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "must be given"
    value = field.get_default(call_default_factory=True)
    if value is None or value == {}:
        return "–"
    shown = {bool: str(value).lower(), str: f'"{value}"', float: f"{value:g}" if type(value) is float else ""}
    return f"`{shown.get(type(value), value)}`"


if __name__ == "__main__":
    page = Path(sys.argv[1])
    write_text(page, with_keys(page.read_text(encoding="utf-8")))
