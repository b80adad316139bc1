"""The Hub, as a server on this machine plays it: only what is asked for is sent."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import torch
from safetensors.torch import save_file

from triptych.checkpoints.hub import HubBytes, is_hub_id, open_hub
from triptych.errors import DataError

COMMIT = "c" * 40
PIECE = 1 << 16


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder as the repository `someone/model`."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.sent = 0
        self.knows_ranges = True
        self.status: int | None = None
        self.cut_short = False

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        if self.server.status is not None:
            self.refuse(
                self.server.status, {401: "RepoNotFound", 403: "GatedRepo"}.get(self.server.status, "")
            )
            return
        owner, name, what, revision, file = unquote(urlsplit(self.path).path).strip("/").split("/", 4)
        if (owner, name, what) != ("someone", "model", "resolve"):
            self.refuse(404, "RepoNotFound")
            return
        if revision not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
            return
        path = self.server.folder / file
        if not path.is_file():
            self.refuse(404, "EntryNotFound")
            return
        content, status = path.read_bytes(), 200
        whole = len(content)
        asked = self.headers.get("Range")
        if asked and self.server.knows_ranges:
            start, end = asked.removeprefix("bytes=").split("-")
            content, status = content[int(start) : int(end) + 1], 206
        if self.server.cut_short and body and status == 206:
            content = content[:-1]
        self.send_response(status)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{file}-{whole}"')
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        for start in range(0, len(content) if body else 0, PIECE):
            try:
                self.wfile.write(content[start : start + PIECE])
            except OSError:  # nobody listens any more
                return
            self.server.sent += len(content[start : start + PIECE])

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


LARGE = torch.randn(400, 1000)
SMALL = torch.randn(3, 4)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    save_file({"large": LARGE, "small": SMALL}, folder / "model.safetensors")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def settled(hub: Hub) -> int:
    """Bytes sent: they are counted after the client has them."""
    sent = -1
    while sent != hub.sent:
        sent = hub.sent
        time.sleep(0.1)
    return sent


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
    assert "no such repository for you" in failure(hub, "someone/else")
    assert "no such revision" in failure(hub, "someone/model@other")
    (hub.folder / "model.safetensors").unlink()
    assert "has no model.safetensors" in failure(hub)
    (hub.folder / "config.json").unlink()
    assert "there is no config.json" in failure(hub)


def test_gated_and_broken_answers_are_said(hub: Hub) -> None:
    hub.status = 403
    assert "access must be asked for" in failure(hub)
    hub.status = 401
    assert "no such repository for you" in failure(hub)


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
    with pytest.raises(DataError, match="the Hub could not be asked"):
        open_hub("someone/model", endpoint="http://127.0.0.1:9")


def test_reading_past_the_end_is_refused_here() -> None:
    with pytest.raises(DataError, match="has 10 bytes, and 12 were asked for"):
        HubBytes("file", 10, "http://127.0.0.1:9").read(4, 8)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("gpt2", False),
        ("someone/model", True),
        ("someone/model-1.5@refs/pr/3", True),
        ("../model", False),
        ("a/b/c", False),
        ("/a/b", False),
    ],
)
def test_what_an_id_looks_like(text: str, is_one: bool) -> None:
    assert is_hub_id(text) is is_one
