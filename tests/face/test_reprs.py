"""What a notebook shows of an object: a few lines, and a small table."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from pydantic import BaseModel

import triptych
from small_checkpoints import gpt2_that_runs
from triptych import Model, load
from triptych.running.decoding import Continuation

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
    tables = [
        model.cost(),
        model.composition("V"),
        model.sweep(TEXT, TEXT, lambda run: run.loss),
        model.attend_over(TEXT),
        model.lens(TEXT),
        model.lens(TEXT).top(),
        model.lens(TEXT).attribution("e"),
    ]
    for found in tables:
        assert 1 <= len(repr(found).splitlines()) <= 8, found
        assert found._repr_html_().lstrip().startswith("<"), found
    for other in (model.layers, model.run(TEXT)["1.1"]):
        assert len(repr(other).splitlines()) <= 8


REACHED = 3


@pytest.mark.slow
def test_nothing_that_is_reached_from_a_model_prints_more_than_eight_lines(model: Model) -> None:
    """Whatever attributes and lists of results lead to, by `repr` and by `print`."""
    torch.manual_seed(0)
    roots: list[Any] = [
        model,
        model[1],
        model[1].weights,
        model[1, 1],
        model[1, 1].weights.q,
        model.run(TEXT),
        model.run(TEXT)["1"],
        model.attend(TEXT),
        model.attend([TEXT, TEXT]),
        model.attend(TEXT).steps(1, 1),
        model.attend(TEXT).top(5),
        model.attend(TEXT).top(5, per_head=True),
        model.rewrite("fold_value_bias", compare=False).certificate,
        model.plan("fold_value_bias"),
        model.inspect(),
        model.cost(),
        model.composition("V"),
        model.attend_over(TEXT),
        model.evaluate(TEXT),
        model.generate(TEXT, max_new_tokens=40),
        model.sweep(TEXT, TEXT, lambda run: run.loss),
        model.check(),
        model.lens(TEXT),
        model.lens(TEXT).top(),
        model.lens(TEXT).attribution("e"),
        triptych.MultiHeadAttention(16, 4)(torch.randn(1, 5, 16), need_weights=True),
    ]
    found: dict[str, int] = {}
    seen: list[Any] = []
    for root in roots:
        _walk(root, REACHED, seen, found)
    assert len(seen) > 60
    assert max(found.values()) <= 8, {name: lines for name, lines in found.items() if lines > 8}


def _walk(thing: Any, left: int, seen: list[Any], found: dict[str, int]) -> None:
    """Note the lines that objects of ours take, and go on to what they have."""
    if isinstance(thing, (tuple, list)) and thing and not hasattr(thing, "_fields"):
        thing = thing[0]
    kind = type(thing)
    ours = kind.__module__.startswith("triptych") and not isinstance(thing, (torch.Tensor, torch.nn.Module))
    if not ours or any(thing is one for one in seen):
        return
    seen.append(thing)
    # A continuation is printed as its text.
    for shown in (repr(thing), "" if isinstance(thing, Continuation) else str(thing)):
        lines = max(len(shown.splitlines()), -(-len(shown) // 600))  # a long line is several on a terminal
        found[kind.__qualname__] = max(lines, found.get(kind.__qualname__, 0))
    # Not what the face is made of, nor what pydantic's records have.
    skipped = {"opened", "reader", *dir(BaseModel)}
    for name in dir(thing) if left else ():
        if name[0] != "_" and name not in skipped:
            with suppress(triptych.TriptychError):
                _walk(getattr(thing, name), left - 1, seen, found)


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
