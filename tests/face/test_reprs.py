"""What a notebook shows of an object: a few lines, and a small table."""

import base64
import re
import struct
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import BaseModel

import triptych
from small_checkpoints import gpt2_that_runs, llama
from triptych import Model, load
from triptych.running.decoding import Continuation

TEXT = "First Citizen: Before we proceed any further, hear me speak."


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    pytest.importorskip("transformers", reason="it comes with the extra [dev]")
    return load(gpt2_that_runs(tmp_path_factory.mktemp("models") / "gpt2"), device="cpu")


@pytest.fixture(scope="module")
def results(model: Model) -> list[Any]:
    """A model, its parts and what its verbs give, whose `repr` begins with their type."""
    certificate = model.rewrite("fold_value_bias", compare=False).certificate
    found = [model, model[1], model[1, 1], model.attend(TEXT), model.run(TEXT), model.inspect(), certificate]
    return [*found, model.plan("fold_value_bias"), model.check()]


@pytest.fixture(scope="module")
def tables(model: Model) -> list[Any]:
    """What verbs give that is shown as a table."""
    lens, sweep = model.lens(TEXT), model.sweep(TEXT, TEXT, lambda run: run.loss)
    found = [model.cost(), model.composition("V"), model.attend_over(TEXT), sweep]
    return [*found, lens, lens.top(), lens.attribution("e")]


def test_reprs_are_a_few_lines_of_shapes_and_have_a_table(
    model: Model, results: list[Any], tables: list[Any]
) -> None:
    named = [*results, model.ablate("1.1"), model[1, 1].qk]
    for found in [*named, *tables]:
        lines = repr(found).splitlines()
        assert 1 <= len(lines) <= 8, found
        assert max(map(len, lines)) < 300, found
        assert "tensor(" not in repr(found)
        assert found._repr_html_().lstrip().startswith("<"), found
    assert [found for found in named if type(found).__name__ not in repr(found)] == []
    for other in (model.layers, model.run(TEXT)["1.1"]):
        assert len(repr(other).splitlines()) <= 8


def pictures(shown: str) -> dict[str, list[list[int]]]:
    """The levels of the pictures of a notebook, by name, read from their PNG files."""
    found = {}
    for name, data in re.findall(r"<figcaption>(.*?)</figcaption>.*?base64,(.*?)\"", shown):
        file = base64.b64decode(data)
        assert file.startswith(b"\x89PNG")
        width, height = struct.unpack(">II", file[16:24])
        at = file.index(b"IDAT")
        (length,) = struct.unpack(">I", file[at - 4 : at])
        rows = zlib.decompress(file[at + 4 : at + 4 + length])
        found[name] = [[*rows[(width + 1) * y + 1 : (width + 1) * (y + 1)]] for y in range(height)]
    return found


def test_a_head_and_a_form_show_pictures_of_their_matrices(model: Model) -> None:
    head = model[1, 1]
    drawn = pictures(head._repr_html_())
    assert [*drawn] == ["W_Q", "W_K", "W_V", "W_QK", "W_OV"]
    form = pictures(head.qk._repr_html_())
    assert [*form] == ["left", "right", "left rightᵀ"]
    assert (form["left"], form["right"], form["left rightᵀ"]) == (drawn["W_Q"], drawn["W_K"], drawn["W_QK"])
    # A level is the root mean square of a block over the largest, of 15.
    blocks = [part.square() for part in head.W_QK.float().tensor_split(24)]
    sizes = torch.stack([torch.stack([c.mean() for c in b.tensor_split(24, dim=1)]) for b in blocks]).sqrt()
    assert drawn["W_QK"] == (15 * sizes / sizes.max()).round().int().tolist()
    assert max(max(row) for row in drawn["W_OV"]) == 15


def test_pictures_are_those_that_a_head_has(tmp_path: Path) -> None:
    rotary = load(llama(tmp_path / "llama"))[0, 0]
    assert [*pictures(rotary._repr_html_())][-2:] == ["W_QK at distance 0", "W_OV"]
    turned = pictures(rotary.qk._repr_html_())
    assert [*turned] == ["W_Q", "W_K", *(f"W_QK at distance {distance}" for distance in (0, 1, 16))]
    assert turned["W_QK at distance 0"] != turned["W_QK at distance 16"]
    batch = triptych.BilinearForm(torch.randn(3, 8, 2), torch.randn(3, 8, 2))
    assert [*pictures(batch._repr_html_())] == ["0", "1", "2"]
    broken = torch.full((8, 2), float("nan"))
    assert set(pictures(triptych.BilinearForm(broken, broken)._repr_html_())["left"][0]) == {0}
    empty = triptych.BilinearForm(torch.empty(8, 2, device="meta"), torch.empty(8, 2, device="meta"))
    assert pictures(empty._repr_html_()) == {}


REACHED = 3


@pytest.mark.slow
def test_nothing_that_is_reached_from_a_model_prints_more_than_eight_lines(
    model: Model, results: list[Any], tables: list[Any]
) -> None:
    """Whatever attributes and lists of results lead to, by `repr` and by `print`."""
    torch.manual_seed(0)
    attended, weights = model.attend(TEXT), model[1].weights
    roots = [*results, *tables, weights, model[1, 1].weights.q, model.run(TEXT)["1"]]
    roots.append(model.attend([TEXT, TEXT]))
    roots += [attended.steps(1, 1), attended.top(5), attended.top(5, per_head=True), model.evaluate(TEXT)]
    roots.append(model.generate(TEXT, max_new_tokens=40))
    roots.append(triptych.MultiHeadAttention(16, 4)(torch.randn(1, 5, 16), need_weights=True))
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
