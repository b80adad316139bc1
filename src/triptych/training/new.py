"""New recipes: sizes that fit a text, and a comment for every key."""

import re
import textwrap
from pathlib import Path
from typing import Any

import tomli_w
from pydantic import BaseModel

from triptych.errors import UsageError
from triptych.files import write_text
from triptych.training.progress import Display, LineDisplay
from triptych.training.recipe import AnyRecipe, read_recipe, resolve, value_at
from triptych.training.task_table import task_of

_SAMPLE_TOKENS = 50
_WIDTH = 100


def new_recipe(
    path: str | Path,
    *,
    source: Path | None = None,
    target: Path | None = None,
    tsv: Path | None = None,
    text: Path | None = None,
    force: bool = False,
    display: Display | None = None,
) -> AnyRecipe:
    """Write a recipe for a text, with sizes that fit the amount of text and this machine.

    Args:
        path: TOML file to write. Its stem is the name of the run.
        source: for a translator, a text file with one sentence per line; needs target.
        target: the translations, line by line.
        tsv: for a translator, one file with both sides: .tsv, .jsonl or .parquet.
        text: for a language model, a text file or a folder of text files.
        force: replace an existing file.
        display: display of messages; lines on standard error if None.

    Returns:
        The recipe, read from the file.

    Raises:
        UsageError: Text is missing, or several texts are given; the file exists; the folder of the file does
            not exist; or a text cannot be read.
        DataError: The text is empty, or the two files have different numbers of lines.
    """
    path = Path(path)
    pair = None if source is None and target is None else (source, target)
    if path.suffix != ".toml":
        raise UsageError(f"{path}: the name of a recipe ends in .toml")
    if path.exists() and not force:
        raise UsageError(
            f"{path} is there: choose another name, or add --force to replace it"
        )
    if not path.parent.is_dir():
        raise UsageError(f"the folder of {path} does not exist: make it first")
    # One kind of text must be given, not two or three.
    if [pair, tsv, text].count(None) != 2 or (pair is not None and None in pair):
        raise UsageError(
            "give --source and --target, or --tsv with both sides, or --text for a language model"
        )
    corpus = {"files": str(text)} if text is not None else {"file": str(tsv)}
    if pair is not None:
        corpus = {"source": str(source), "target": str(target)}
    tree: dict[str, Any] = {
        "data": {"train": corpus},
        "training": {"precision": "auto"},
    }
    if text is not None:
        tree |= {
            "task": "language-model",
            "validation": {"sample_tokens": _SAMPLE_TOKENS},
        }
    fitted = task_of(resolve(tree)).prepare(Path.cwd(), display or LineDisplay()).recipe
    write_text(path, _written_recipe(fitted, tree, path))
    return read_recipe(path)


def _written_recipe(recipe: AnyRecipe, tree: dict[str, Any], path: Path) -> str:
    """Format the recipe: the given keys first, then each key of the task with its meaning."""
    # A key gets a section header when its section differs from the section before.
    lines = [
        "# Made by `triptych new`. The sizes fit the text and the machine; change what you like.",
        f"# Train it: triptych train {path}    Every other key: docs/reference/recipes.md",
    ]
    if "task" in tree:
        lines += ['task = "language-model"']
    lines += ["", "[data.train]", tomli_w.dumps(tree["data"]["train"]).strip()]
    section = "data.train"
    keys = task_of(recipe).first_keys
    for key in sorted(keys, key=lambda key: key.split(".")[:2] != ["data", "train"]):
        value = value_at(recipe, key)
        if value is None:
            continue
        if (
            begins := "data.train"
            if key.startswith("data.train.")
            else key.split(".")[0]
        ) != section:
            section = begins
            lines += ["", f"[{section}]"]
        owner: Any = recipe
        for part in key.split(".")[:-1]:
            owner = getattr(owner, part)
        meaning = meanings_of(type(owner))[key.rpartition(".")[2]]
        meaning = meaning[0].upper() + meaning[1:]
        lines += textwrap.wrap(
            meaning, _WIDTH, initial_indent="# ", subsequent_indent="#   "
        )
        lines += [
            f"{key.removeprefix(f'{section}.')} = {tomli_w.dumps({'value': value})[8:].strip()}"
        ]
    return "\n".join(lines) + "\n"


def meanings_of(model: type[BaseModel]) -> dict[str, str]:
    """Return the meaning of each key of a section, from the docstrings of the section and its bases."""
    meanings: dict[str, str] = {}
    for one in reversed(
        model.__mro__
    ):  # a subclass documents only the keys that it adds
        _, _, text = (one.__doc__ or "").partition("Attributes:\n")
        found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", text, flags=re.MULTILINE)
        meanings |= {
            name: re.sub(r"\s+", " ", meaning).strip() for name, meaning in found
        }
    return meanings
