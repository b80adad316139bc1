"""The standing attack, in a short form; `make attack` is the long one."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve.attack import attack
from serve.odd_values import REQUESTS, body_of, matrix, with_chat_template
from served import Served
from small_checkpoints import bert_that_runs
from triptych.model import Model, load
from triptych.running.text import chat


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="processes and memory are looked at in /proc")
def test_honest_clients_get_their_answers_during_an_attack(
    small_run: Path, language_model: Model, tmp_path: Path
) -> None:
    models = {"en-de": small_run, "gpt": Path(language_model.name), "bert": bert_that_runs(tmp_path / "bert")}
    seen = attack(models, seconds=8.0, seed=20170612, slowest_health=5.0)  # the cores are busy
    assert seen.faults == []
    assert seen.honest > 20
    assert sum(seen.tried.values()) > 20


@pytest.fixture(scope="module")
def served(
    small_run: Path, language_model: Model, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    place = tmp_path_factory.mktemp("models")
    folders = {"en-de": small_run, "bert": bert_that_runs(place / "bert")}
    folders["gpt"] = with_chat_template(Path(shutil.copytree(language_model.name, place / "gpt")))
    with Served({name: load(folder) for name, folder in folders.items()}) as running:
        yield running


@pytest.mark.parametrize(
    ("path", "share"),
    [
        *((path, 24) for path in REQUESTS),
        *(pytest.param(path, 1, marks=pytest.mark.slow) for path in REQUESTS),
    ],
)
def test_no_odd_value_of_a_field_is_answered_500_or_changes_another_answer(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, share: int
) -> None:
    def render(request: str, where: str) -> dict[str, Any]:  # without a process for each
        return {"text": "The cat" if request else where, "own": []}

    monkeypatch.setattr(chat, "_run_script", render)
    fields = {"model": "gpt", "prompt": "The cat", "max_tokens": 12, "temperature": 1.0, "seed": 3}
    before = served.ask("/v1/completions", fields).body["choices"]
    assert served.ask(path, REQUESTS[path]).status == (400 if "held_out" in path else 200)
    tried = [case for case in matrix() if case[0] == path][::share]
    found = {case[1:]: served.send(path, body_of(*case)).status for case in tried}
    assert [case for case, status in found.items() if status >= 500] == []
    assert served.ask("/v1/completions", fields).body["choices"] == before
