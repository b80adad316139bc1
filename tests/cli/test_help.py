"""`triptych --help`: what it says, and that nothing heavy is imported for it."""

import ast
import inspect
import subprocess
import sys
from importlib import import_module

import pytest

import triptych
from triptych.cli.main import COMMANDS

_HEAVY = ("torch", "numpy", "tokenizers", "altair", "sacrebleu")  # typer loads pydantic itself, on errors


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["no-such-command"], []])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    script = (
        "import sys\nfrom triptych.cli.main import run\n"
        "try:\n    run()\nexcept SystemExit:\n    pass\n"
        f"print([name for name in {_HEAVY} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize("name", COMMANDS)
def test_the_summary_of_a_command_is_the_first_line_of_its_docstring(name: str) -> None:
    function = getattr(import_module(f"triptych.cli.{name}"), name)
    assert (inspect.getdoc(function) or "").splitlines()[0] == COMMANDS[name]
    assert len(COMMANDS[name]) <= 63, "longer ones are cut off on a terminal of 80 columns"


# What each command calls: a function of the package, or a method of the model that it opens.
VERBS = {
    "demo": ("demo",),
    "train": ("train", "resume"),
    "verify": ("verify",),
    "compare": ("compare_study",),
    "plan": ("plan",),
    "cost": ("cost", "measure_times"),
}
METHODS = {
    "translate": "translator",
    "generate": "generator",
    "fill": "fill",
    "attend": "attend",
    "evaluate": "evaluate",
    "inspect": "inspect",
    "rewrite": "rewrite",
    "convert": "convert",
}


def called_in(name: str) -> set[str]:
    """What the module of a command calls, as it is written."""
    tree = ast.parse(inspect.getsource(import_module(f"triptych.cli.{name}")))
    return {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}


def test_every_command_has_its_verb_on_the_face_of_the_package() -> None:
    assert VERBS.keys() | METHODS.keys() == COMMANDS.keys()
    assert {verb for verbs in VERBS.values() for verb in verbs} <= set(triptych.__all__)


@pytest.mark.parametrize("name", VERBS)
def test_a_command_calls_its_verb(name: str) -> None:
    called = called_in(name)
    assert {of.removeprefix("triptych.") for of in called if of.startswith("triptych.")} == set(VERBS[name])


@pytest.mark.parametrize("name", METHODS)
def test_a_command_on_a_model_opens_it_and_calls_its_method(name: str) -> None:
    called = called_in(name)
    assert called & {"open_model", "open_run"}
    assert any(of.endswith(f".{METHODS[name]}") or of.endswith(f").{METHODS[name]}") for of in called)
    assert callable(getattr(triptych.Model, METHODS[name]))


def test_the_face_offers_about_forty_names_and_the_model_no_more_methods() -> None:
    assert len(triptych.__all__) <= 45
    assert len([name for name in vars(triptych.Model) if not name.startswith("_")]) <= 40


def test_everything_that_the_package_offers_is_there_and_is_what_its_module_has() -> None:
    for name, module in triptych._MODULE_OF.items():
        assert getattr(triptych, name) is getattr(import_module(module), name)
    assert set(triptych._MODULE_OF) == set(triptych.__all__)
    assert set(triptych.__all__) <= set(dir(triptych))


def test_a_name_that_the_package_has_not_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        triptych.no_such_name  # noqa: B018
