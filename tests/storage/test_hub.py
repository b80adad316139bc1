"""The Hub, as a server on this machine plays it: only what is asked for is sent."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hub_server import Hub, served, settled
from triptych.errors import DataError
from triptych.storage.hub import HubBytes, is_hub_id, open_hub

LARGE = torch.randn(400, 1000)
SMALL = torch.randn(3, 4)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    save_file({"large": LARGE, "small": SMALL}, folder / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    with served(folder) as server:
        yield server


def test_only_the_header_and_what_is_read_are_fetched(hub: Hub) -> None:
    config, where, tensors = open_hub("someone/model", endpoint=hub.url)
    assert config == {"model_type": "gpt2"}
    assert where == "someone/model/config.json"
    assert set(tensors.infos) == {"large", "small"}
    after_header = settled(hub)
    assert after_header < LARGE.nbytes / 2
    assert torch.equal(tensors.read("small"), SMALL)
    assert settled(hub) <= after_header + SMALL.nbytes
    assert torch.equal(tensors.read("large"), LARGE)
    assert settled(hub) <= after_header + SMALL.nbytes + LARGE.nbytes


def test_shards_of_an_index_are_opened_at_the_same_commit(hub: Hub) -> None:
    (hub.folder / "model.safetensors").unlink()
    save_file({"a": LARGE}, hub.folder / "one.safetensors")
    save_file({"b": SMALL}, hub.folder / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (hub.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _, _, tensors = open_hub("someone/model@main", endpoint=hub.url)
    assert torch.equal(tensors.read("a"), LARGE)
    assert torch.equal(tensors.read("b"), SMALL)


def failure(hub: Hub, hub_id: str = "someone/model") -> str:
    with pytest.raises(DataError) as error:
        open_hub(hub_id, endpoint=hub.url)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_not_there_is_said(hub: Hub) -> None:
    assert "no such repository on the Hub" in failure(hub, "someone/else")
    assert "no such revision" in failure(hub, "someone/model@other")
    (hub.folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in failure(hub)
    (hub.folder / "config.json").unlink()
    assert "there is no config.json" in failure(hub)


def test_gated_and_broken_answers_are_said(hub: Hub) -> None:
    hub.status, hub.code = 403, "GatedRepo"
    assert "request access" in failure(hub)
    hub.status = 401
    assert "request access" in failure(hub)
    hub.code = "RepoNotFound"
    assert "no such repository on the Hub" in failure(hub)
    hub.status, hub.code = 403, ""
    assert "the Hub could not be reached" in failure(hub)


def test_a_server_without_ranges_is_not_read_whole(hub: Hub) -> None:
    hub.knows_ranges = False
    larger = torch.zeros(16_000_000)  # than what the network holds on its way
    save_file({"larger": larger}, hub.folder / "model.safetensors")
    assert "the answer has status 200" in failure(hub)
    assert hub.sent < larger.nbytes / 2


def test_an_answer_cut_short_is_no_tensor(hub: Hub) -> None:
    _, _, tensors = open_hub("someone/model", endpoint=hub.url)
    hub.cut_short = True
    with pytest.raises(DataError, match="came: try again"):
        tensors.read("large")


def test_a_hub_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="the Hub could not be reached"):
        open_hub("someone/model", endpoint="http://127.0.0.1:9")


def test_reading_past_the_end_is_refused_here() -> None:
    with pytest.raises(DataError, match="has 10 bytes, and 12 were asked for"):
        HubBytes("file", 10, "http://127.0.0.1:9").read(4, 8)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("gpt2", True),
        ("gpt2@main", True),
        ("model.safetensors", False),
        ("folder/model.safetensors", False),
        ("folder/pytorch_model.bin", False),
        ("some one", False),
        ("someone/model", True),
        ("someone/model-1.5@refs/pr/3", True),
        ("../model", False),
        ("a/b/c", False),
        ("/a/b", False),
    ],
)
def test_what_an_id_looks_like(text: str, is_one: bool) -> None:
    assert is_hub_id(text) is is_one
