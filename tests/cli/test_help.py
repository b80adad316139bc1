"""`triptych --help`: what it says, and that nothing heavy is imported for it."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from typing import get_args

import pytest

import triptych
from triptych.cli.main import COMMANDS
from triptych.cli.signatures import REQUIRED
from triptych.cli.verbs import read_verb

_HEAVY = ("torch", "numpy", "tokenizers", "altair", "sacrebleu")  # typer loads pydantic itself, on errors

_SCRIPT = (
    "import sys\nfrom triptych.cli.main import run\n"
    "try:\n    run()\nexcept SystemExit:\n    pass\n"
    f"print([name for name in {_HEAVY} if name in sys.modules])"
)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["no-such-command"], []])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_says_what_it_is_in_a_line_and_has_two_examples(name: str) -> None:
    verb = read_verb(name)
    assert len(verb.text.splitlines()[0]) <= 63, "longer ones are cut off on a terminal of 80 columns"
    assert len(verb.examples) == 2
    assert all(f"triptych {name}" in line for line in verb.examples)


@pytest.mark.parametrize("name", COMMANDS)
def test_what_is_read_of_a_signature_is_what_python_has(name: str) -> None:
    module = import_module(f"triptych.cli.{name}")
    own = inspect.signature(getattr(module, name)).parameters
    for one in read_verb(name).parameters:
        if one.group is not None:
            _, _, function, names = get_args(own[one.group].annotation)
            assert one.name in names.split()
        of = own if one.group is None else inspect.signature(function).parameters
        written = of[one.name].default
        expected = REQUIRED if written is inspect.Parameter.empty else written
        assert one.default == expected, one.name
        assert one.positional == (one.group is None and of[one.name].kind is not of[one.name].KEYWORD_ONLY)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_a_command_imports_nothing_heavy(name: str) -> None:
    done = subprocess.run([sys.executable, "-c", _SCRIPT, name, "-h"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"
    assert "Examples:" in done.stdout


# What each command calls: a function of the package, or a method of the model that it opens.
VERBS = {
    "demo": ("demo",), "recipes": (), "explain": (), "new": ("new_recipe",), "train": ("train", "resume"),
    "report": ("report",), "verify": ("verify",), "diff": ("diff",), "compare": ("compare_study",),
    "plan": ("plan",), "cost": ("cost",), "serve": ("serve",), "explore": ("serve",),
}  # fmt: skip
# Every other command opens a model and calls the method of its name.
METHODS = {name: name for name in COMMANDS if name not in VERBS} | {"translate": "translator"}


def called_in(name: str) -> set[str]:
    """What the module of a command calls, as it is written."""
    tree = ast.parse(inspect.getsource(import_module(f"triptych.cli.{name}")))
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_every_command_has_its_verb_on_the_face_of_the_package() -> None:
    assert VERBS.keys() <= set(COMMANDS)
    assert {verb for verbs in VERBS.values() for verb in verbs} <= set(triptych.__all__)


@pytest.mark.parametrize("name", VERBS)
def test_a_command_calls_its_verb(name: str) -> None:
    called = called_in(name)
    assert {of.removeprefix("triptych.") for of in called if of.startswith("triptych.")} == set(VERBS[name])


@pytest.mark.parametrize("name", METHODS)
def test_a_command_on_a_model_opens_it_and_calls_its_method(name: str) -> None:
    called = called_in(name)
    assert "load_model" in called
    assert any(of.endswith(f".{METHODS[name]}") or of.endswith(f").{METHODS[name]}") for of in called)
    assert callable(getattr(triptych.Model, METHODS[name]))


def test_the_face_offers_about_forty_names_and_the_model_no_more_methods() -> None:
    assert len(triptych.__all__) <= 51
    methods = [name for name, value in vars(triptych.Model).items() if callable(value)]
    assert len([name for name in methods if not name.startswith("_")]) <= 40


def test_everything_that_the_package_offers_is_there_and_is_what_its_module_has() -> None:
    for name, module in triptych._MODULE_OF.items():
        assert getattr(triptych, name) is getattr(import_module(module), name)
    assert set(triptych._MODULE_OF) == set(triptych.__all__)
    assert set(triptych.__all__) <= set(dir(triptych))


def test_a_name_that_the_package_has_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        triptych.no_such_name  # noqa: B018
