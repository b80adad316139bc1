"""A model's name in requests stands where a name belongs, and nothing else of an answer changes."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from served import Served
from small_checkpoints import gpt2_that_runs
from triptych.model import Model, load

TEXT = "a mat, a map, a name"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose name is a letter and which is opened by that name alone."""
    parent = tmp_path_factory.mktemp("names")
    gpt2_that_runs(parent / "a")
    return parent


@pytest.fixture(scope="module")
def own(folder: Path) -> Model:
    return load(folder / "a")


@pytest.mark.parametrize("name", ["model", "m"])
def test_no_letter_of_an_answer_changes_with_the_name_of_the_folder(
    folder: Path, own: Model, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with Served({name: load("a")}) as served:
        steps = served.ask("/v1/steps", {"text": TEXT, "layer": 1, "head": 0}).body
        expected = own.attend(TEXT).steps(1, 0).record()
        assert steps == {**as_json(expected), "model": name}
        heads = served.ask("/v1/inspect", {"layers": [1]}).body
        expected = own.inspect(layers=[1]).record()
        assert heads == {**as_json(expected), "name": name, "seconds": heads["seconds"]}
        attended = served.ask("/v1/attend", {"text": TEXT, "heads": "*.0"}).body
        assert attended["model"] == name
        assert attended["tokens"] == list(own.attend(TEXT).tokens)
        long = served.ask("/v1/attend", {"text": "a" * 600})
        assert (long.status, "the prompt" in long.body["error"]["message"]) == (400, False)
        message = long.body["error"]["message"]
        with pytest.raises(Exception, match="600 tokens") as refused:
            own.attend("a" * 600)
        assert message == str(refused.value)


def test_no_refusal_has_the_path_of_a_model(folder: Path, own: Model) -> None:
    with Served({"m": own}) as served:
        asked: list[tuple[str, dict[str, Any]]] = [
            ("/v1/attend", {"text": TEXT, "target": "b"}),
            ("/v1/attend", {"text": TEXT, "heads": "99.0"}),
            ("/v1/steps", {"text": TEXT, "layer": "encoder.1", "head": 0}),
            ("/v1/explore/row", {"text": TEXT, "layer": "9", "head": 0, "query": 0}),
            ("/v1/explore/view", {"text": TEXT, "changes": ["truncate(0.0, \u00b2)"]}),
            ("/v1/explore/view", {"text": TEXT, "changes": ["ablate(0.\u00b2)"]}),
        ]
        for path, fields in asked:
            found = served.ask(path, fields)
            assert (found.status, str(folder) in json.dumps(found.body)) == (400, False), found
            assert os.sep not in found.body["error"]["message"]


def as_json(record: Any) -> Any:
    return json.loads(json.dumps(record))
