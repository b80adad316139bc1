"""First guesses of people who know other libraries: a guess works, or its error has the line that does."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import triptych
from small_checkpoints import gpt2_that_runs
from triptych import guesses
from triptych.errors import UsageError
from triptych.model import Model, load

TEXT = "The cat sat on the mat"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(gpt2_that_runs(tmp_path_factory.mktemp("guesses") / "gpt2"))


def test_what_a_model_is_has_the_names_that_are_typed_first(model: Model) -> None:
    assert (model.num_layers, model.d_model) == (len(model.layers), model.layers[0].d_model)
    assert (model.device, model.dtype) == (torch.device("cpu"), torch.float32)
    assert model.config["model_type"] == "gpt2"
    with pytest.raises(TypeError):
        model.config["model_type"] = "llama"  # type: ignore[index]
    ids = model.tokenizer.encode(TEXT)[0]
    assert model.tokenizer.decode([ids]) == [TEXT]
    assert list(model.run(TEXT).ids) == ids


def test_a_result_is_printed_as_its_text(model: Model) -> None:
    continued = model.generate(TEXT, max_new_tokens=3)
    assert str(continued) == continued.text
    (drawn, _) = model.generate([TEXT, TEXT], max_new_tokens=3)
    assert f"{drawn}" == drawn.text
    translated = load("demo").translate("Der Zug kommt um halb vier an.", num_best=2)
    assert str(translated) == translated.text == str(translated.candidates[0])


def test_the_two_products_have_the_names_of_the_pages(model: Model) -> None:
    head = model[1, 0]
    torch.testing.assert_close(head.W_QK, head.W_Q @ head.W_K.mT)
    torch.testing.assert_close(head.W_OV, head.W_V @ head.W_O)


@pytest.mark.parametrize("name", guesses.OF_MODEL)
def test_a_name_of_another_library_is_answered_by_ours(name: str, model: Model) -> None:
    assert not hasattr(Model, name)
    with pytest.raises(AttributeError, match=re.escape(guesses.OF_MODEL[name])):
        getattr(model, name)


def parts_of_lines() -> Iterator[str]:
    for line in guesses.OF_MODEL.values():
        yield from re.findall(r"(?<![\w'.])(?:model|run|triptych)(?:\[[^]]*\])?\.\w+", line)


@pytest.mark.parametrize("part", sorted(set(parts_of_lines())))
def test_what_an_answer_names_is_there(part: str, model: Model) -> None:
    run = model.run(TEXT)
    for ours, of_the_tiny_model in (("[3, 2]", "[1, 0]"), ("[3]", "[1]"), ("'3.2'", "'1.0'")):
        part = part.replace(ours, of_the_tiny_model)
    place, _, name = part.rpartition(".")
    found: Any = eval(place, {"model": model, "run": run, "triptych": triptych})
    assert hasattr(found, name)


@pytest.mark.parametrize("name", guesses.OF_VERBS)
def test_an_argument_of_another_library_is_answered_by_ours(name: str, model: Model) -> None:
    with pytest.raises(TypeError, match=f"generate has no argument {name!r}: use "):
        model.generate(TEXT, **{name: 1})  # type: ignore[call-overload]


def test_an_argument_with_a_slip_is_answered_by_the_nearest(model: Model) -> None:
    with pytest.raises(TypeError, match="generate has no argument 'temprature': use temperature"):
        model.generate(TEXT, temprature=1)  # type: ignore[call-overload]


def test_a_head_given_as_two_numbers_is_answered_by_its_name(model: Model) -> None:
    with pytest.raises(UsageError, match=r"ablate\('1.0'\)"):
        model.ablate(1, 0)  # type: ignore[arg-type]


def test_no_other_attribute_is_explained(model: Model) -> None:
    with pytest.raises(AttributeError, match=r"a model has no 'nothing_of_this_name'$"):
        model.nothing_of_this_name  # noqa: B018
