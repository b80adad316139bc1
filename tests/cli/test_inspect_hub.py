"""`triptych inspect owner/name`: a repository on the Hub, played by a server on this machine."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from command import Command
from hub_server import BY_RANGES, Hub, ask_at, in_place_of_the_hub, settled
from small_checkpoints import HEADS, LAYERS, D, gpt2

# What is fetched of the weights at once, for their header.
FIRST = 1 << 18
ATTENTION = 4 * LAYERS * (3 * D * D + 3 * D + D * D + D + 2 * D)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """With a GPT-2 whose attention lies behind a large table."""
    gpt2(tmp_path / "repository", {"embedding.weight": torch.randn(20_000, D)})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("triptych.core.storage.hub._TAKEN_WHOLE", BY_RANGES)
    with in_place_of_the_hub(tmp_path / "repository", tmp_path / "cache", monkeypatch) as server:
        yield server


@pytest.mark.parametrize("name", ["someone/model", "someone/model@main", "model"])
def test_a_repository_is_inspected_and_only_its_attention_is_fetched(
    triptych: Command, hub: Hub, name: str
) -> None:
    record = triptych("inspect", name, "--json").record()
    assert record["name"] == name
    assert [len(layer["heads"]) for layer in record["layers"]] == [HEADS] * LAYERS
    config = (hub.folder / "config.json").stat().st_size
    assert ATTENTION < settled(hub) <= FIRST + ATTENTION + config
    assert hub.sent < (hub.folder / "model.safetensors").stat().st_size / 5


def test_what_lies_here_under_a_name_comes_first(triptych: Command, hub: Hub) -> None:
    shutil.copytree(hub.folder, "model")
    triptych("inspect", "model").done()
    assert hub.sent == 0


def test_a_run_of_ours_is_fetched_whole(triptych: Command, hub: Hub, small_run: Path) -> None:
    for file in ("config.json", "model.safetensors"):
        shutil.copy(small_run / file, hub.folder)
    there, here = (triptych("inspect", n, "--json").record() for n in ("someone/model", small_run))
    assert (there["name"], there["family"]) == ("someone/model", "triptych")
    assert there["layers"] == here["layers"]


def test_a_repository_is_rewritten_like_the_same_files_here(triptych: Command, hub: Hub) -> None:
    (hub.folder / "tokenizer.json").write_text("{}")
    for name in ("pytorch_model.bin", "modeling.py", "onnx/model.safetensors"):
        (hub.folder / name).parent.mkdir(exist_ok=True)
        (hub.folder / name).write_bytes(b"not to be fetched")
    options = ("--exact", "--no-compare", "--out")
    answer = triptych("rewrite", "someone/model", *options, "there").done()
    assert answer.err == ""
    assert "triptych verify there --against someone/model" in answer.out
    triptych("rewrite", hub.folder, *options, "here").done()
    same = "model.safetensors", "config.json", "tokenizer.json"
    for name in same:
        assert Path("there", name).read_bytes() == Path("here", name).read_bytes()
    assert {path.name for path in Path("there").iterdir()} == {*same, "README.md", "certificate.json"}
    triptych("verify", "there", "--against", "someone/model").done()
    card = Path("there/README.md").read_text()
    assert "`triptych verify path/to/this/folder --against someone/model`" in card


def test_pickled_weights_of_a_repository_are_not_fetched(triptych: Command, hub: Hub) -> None:
    (hub.folder / "model.safetensors").rename(hub.folder / "pytorch_model.bin")
    for command in (
        ("rewrite", "model", "--exact", "--out", "out"),
        ("rewrite", "model", "--exact", "--plan"),
    ):
        triptych(*command).refused("only safetensors are read from the Hub", code=1)
    assert not Path("out").exists()
    assert settled(hub) < (hub.folder / "pytorch_model.bin").stat().st_size / 5


def test_a_place_that_is_taken_is_refused_before_anything_is_fetched(triptych: Command, hub: Hub) -> None:
    Path("out").mkdir()
    assert triptych("rewrite", "model", "--exact", "--out", "out").code == 2
    assert settled(hub) == (hub.folder / "config.json").stat().st_size


@pytest.mark.parametrize(
    ("name", "status", "code", "reason"),
    [
        ("someone/else", None, "", "no such repository on the Hub"),
        ("someone/model", 403, "GatedRepo", "request access on its page, then run `hf auth login`"),
        ("no/such/folder", None, "", "no/such/folder: there is no such f"),
        ("model.safetensors", None, "", "model.safetensors: there is no such f"),
    ],
)
def test_what_is_refused_there_is_one_line(
    triptych: Command, hub: Hub, name: str, status: int | None, code: str, reason: str
) -> None:
    hub.status, hub.code = status, code
    nobody_was_asked = "there is no such f" in reason
    triptych("inspect", name).refused(reason, code=2 if nobody_was_asked else 1)


def test_a_network_that_is_not_there_is_one_line(
    triptych: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask_at("http://127.0.0.1:9", tmp_path, monkeypatch)
    triptych("inspect", "someone/model").refused(
        "someone/model: no such path, and the Hub could not be reached: ", code=1
    )
