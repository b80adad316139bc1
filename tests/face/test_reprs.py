"""What a notebook shows of an object: a few lines, and a small table."""

from typing import Any

import pytest

import triptych
from small_checkpoints import gpt2_that_runs
from triptych import Model, load

TEXT = "First Citizen: Before we proceed any further, hear me speak."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    return load(gpt2_that_runs(tmp_path_factory.mktemp("models") / "gpt2"), device="cpu")


def test_reprs_are_a_few_lines_of_shapes_and_have_a_table(model: Model) -> None:
    rewritten = model.rewrite("fold_value_bias", compare=False)
    shown: list[Any] = [
        model,
        model.ablate("1.1"),
        model[1],
        model[1, 1],
        model[1, 1].qk,
        model.attend(TEXT),
        model.run(TEXT),
        model.inspect(),
        model.plan("fold_value_bias"),
        rewritten.certificate,
        model.check(),
    ]
    for found in shown:
        lines = repr(found).splitlines()
        assert 1 <= len(lines) <= 8, found
        assert max(map(len, lines)) < 300, found
        assert "tensor(" not in repr(found)
        assert type(found).__name__ in repr(found)
        assert found._repr_html_().lstrip().startswith("<"), found
    for other in (model.layers, model.cost(), model.composition("V"), model.run(TEXT)["1.1"]):
        assert len(repr(other).splitlines()) <= 8


def test_tab_offers_public_names_only() -> None:
    assert dir(triptych) == triptych.__all__
    assert all(name[0] != "_" for name in dir(triptych))


def test_a_place_is_spelled_in_several_ways_and_an_error_lists_them(model: Model) -> None:
    head = model[2, 1]
    for same in (model["2.1"], model[2][1], model.layers[2].heads[1], model["decoder.2.1"], model[-1, 1]):
        assert (same.name, same.W_Q.tolist()) == (head.name, head.W_Q.tolist())
    with pytest.raises(triptych.UsageError, match=r"has no layer 7: its layers are 0 to 2$"):
        model[7]
    with pytest.raises(triptych.UsageError, match=r"has no head 9: its heads are 0 to 3$"):
        model[1, 9]
