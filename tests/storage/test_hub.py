"""The Hub, as a server on this machine plays it: only what is asked for is sent."""

import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hub_server import BY_RANGES, Hub, served, settled
from triptych.core.storage.hub import HubBytes, is_hub_id, open_hub
from triptych.errors import DataError, SourceNote

pytestmark = pytest.mark.filterwarnings("ignore::triptych.errors.SourceNote")
LARGE = torch.randn(400, 1000)
SMALL = torch.randn(3, 4)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    save_file({"large": LARGE, "small": SMALL}, folder / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("triptych.core.storage.hub._TAKEN_WHOLE", BY_RANGES)
    with served(folder) as server:
        yield server


def test_only_the_header_and_what_is_read_are_fetched(hub: Hub) -> None:
    repository = open_hub("someone/model", endpoint=hub.url)
    assert repository.record == {"model_type": "gpt2"}
    tensors = repository.tensors()
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
    tensors = open_hub("someone/model@main", endpoint=hub.url).tensors()
    assert torch.equal(tensors.read("a"), LARGE)
    assert torch.equal(tensors.read("b"), SMALL)


def failure(hub: Hub, hub_id: str = "someone/model") -> str:
    with pytest.raises(DataError) as error:
        open_hub(hub_id, endpoint=hub.url).tensors()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_not_there_is_said(hub: Hub) -> None:
    for name in ("someone/else", "someone"):
        assert "no such repository on the Hub" in failure(hub, name)
    assert "no such revision" in failure(hub, "someone/model@other")
    (hub.folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in failure(hub)
    (hub.folder / "config.json").unlink()
    assert "there is no config.json" in failure(hub)


def test_gated_and_broken_answers_are_said(hub: Hub) -> None:
    hub.status, hub.code = 403, "GatedRepo"
    assert "request access on its page, then run `hf auth login`" in failure(hub)
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
    tensors = open_hub("someone/model", endpoint=hub.url).tensors()
    hub.cut_short = True
    with pytest.raises(DataError, match="came: try again"):
        tensors.read("large")


def test_a_hub_that_does_not_answer_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match="the Hub could not be reached"):
        open_hub("someone/model", endpoint="http://127.0.0.1:9").tensors()


def test_reading_past_the_end_is_refused_here() -> None:
    with pytest.raises(DataError, match="has 10 bytes, and 12 were asked for"):
        HubBytes("file", 10, "http://127.0.0.1:9", "0" * 64).read(4, 8)


def refusal(hub: Hub) -> str:
    """Of opening a repository, or else of downloading it."""

    def use() -> None:
        open_hub("someone/model", endpoint=hub.url).tensors()
        open_hub("someone/model", endpoint=hub.url).fetch().tensors()

    with pytest.raises(DataError) as error:
        use()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("true_answers", range(5))
@pytest.mark.parametrize("header", ["ETag", "X-Linked-Etag", "X-Repo-Commit"])
def test_a_hash_or_commit_that_is_a_path_names_no_file(
    hub: Hub, tmp_path: Path, header: str, true_answers: int
) -> None:
    for name in ("short", "a" * 41, "../../../../evil", str(tmp_path / "evil")):
        hub.lies, hub.true_answers = {header: name}, true_answers
        found = refusal(hub)
        assert f"{name.lstrip('/')} is not the form of a " in found
    assert sorted(path.name for path in tmp_path.iterdir()) in (["cache", "repository"], ["repository"])
    assert not [*tmp_path.rglob("*evil*")]


@pytest.mark.parametrize("said", ["bytes 1-400000/1600208", "bytes 0-9/10", "all of it"])
def test_an_answer_of_another_range_is_no_tensor(hub: Hub, said: str) -> None:
    tensors = open_hub("someone/model", endpoint=hub.url).tensors()
    hub.lies = {"Content-Range": said}
    with pytest.raises(DataError, match=f"asked for bytes .*, the answer is of {said}"):
        tensors.read("large")


def test_a_broken_connection_is_taken_up_where_it_broke(hub: Hub) -> None:
    tensors = open_hub("someone/model", endpoint=hub.url).tensors()
    hub.breaks = 1
    assert torch.equal(tensors.read("large"), LARGE)
    assert hub.breaks == 0


def zeros_without_end(_: bytes) -> Iterable[bytes]:
    while True:
        yield bytes(1 << 16)


def drop_by_drop(content: bytes) -> Iterable[bytes]:
    for byte in content:
        time.sleep(0.05)
        yield bytes([byte])


def test_an_answer_without_end_is_cut(hub: Hub) -> None:
    hub.instead = zeros_without_end
    assert "and more came" in refusal(hub)
    hub.instead = None
    tensors = open_hub("someone/model", endpoint=hub.url).tensors()
    before = settled(hub)
    hub.instead = zeros_without_end
    with pytest.raises(DataError, match="and more came"):
        tensors.read("large")
    hub.instead = None
    assert settled(hub) - before < 10 * LARGE.nbytes


def test_an_answer_that_drips_is_given_up(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.core.storage.hub._PATIENCE_SECONDS", 0.3)
    hub.instead = drop_by_drop
    assert "bytes came in 0 seconds" in refusal(hub)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_without_the_hash_that_the_hub_gives_is_refused_and_not_kept(
    hub: Hub, tmp_path: Path, file: str
) -> None:
    if file == "model.safetensors":
        open_hub("someone/model", endpoint=hub.url).tensors()

    def flipped(content: bytes) -> Iterable[bytes]:
        yield content[:-1]
        yield bytes([content[-1] ^ (not content.startswith(b'{"siblings'))])

    hub.instead = flipped
    assert f"{file}: what came has the hash " in refusal(hub)
    sound = [path.read_bytes() for path in hub.folder.iterdir()]
    kept = [path for path in tmp_path.rglob("cache/**/*") if path.is_file() and "refs" not in path.parts]
    assert all(path.read_bytes() in sound for path in kept)
    hub.instead = None
    assert (open_hub("someone/model", endpoint=hub.url).fetch() / file).is_file()


def test_weights_whose_bytes_are_inverted_in_a_range_are_refused_or_said_not_to_be_compared(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def inverted(content: bytes) -> Iterable[bytes]:
        yield content if len(content) < 1000 else content[:-8] + bytes(255 - byte for byte in content[-8:])

    hub.instead = inverted
    with pytest.warns(SourceNote, match="only a whole file can be compared with the Hub's hash"):
        open_hub("someone/model", endpoint=hub.url).tensors()
    monkeypatch.setattr("triptych.core.storage.hub._TAKEN_WHOLE", 1 << 25)
    with pytest.raises(DataError, match=r"model\.safetensors: what came has the hash"):
        open_hub("someone/model", endpoint=hub.url).tensors()


def test_a_small_file_of_weights_is_compared_with_its_hash(hub: Hub) -> None:
    save_file({"small": SMALL}, hub.folder / "model.safetensors")
    hub.lies = {"X-Linked-Etag": "0" * 64}
    hub.true_answers = 3  # the configuration, asked for twice and sent
    assert "what came has the hash" in refusal(hub)


@pytest.mark.parametrize("name", ["../evil.json", "/tmp/evil.json", "a\\..\\..\\evil.json", 3])
def test_a_listed_name_that_leads_out_of_the_folder_is_refused(hub: Hub, name: object) -> None:
    (hub.folder / "model.safetensors.index.json").write_text("{}")
    listed = json.dumps({"siblings": [{"rfilename": name}]}).encode()
    hub.instead = lambda content: [listed if content.startswith(b'{"siblings') else content]
    with pytest.raises(DataError, match="is not the name of a file"):
        open_hub("someone/model", endpoint=hub.url).fetch().tensors()


def test_a_file_larger_than_the_disk_is_not_begun(hub: Hub) -> None:
    hub.lies, hub.true_answers = {"X-Linked-Size": str(1 << 60)}, 5
    with pytest.raises(DataError, match="GB free: make room"):
        open_hub("someone/model", endpoint=hub.url).fetch().tensors()


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
