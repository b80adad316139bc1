"""The Hugging Face Hub, as a server on this machine plays it."""

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

COMMIT = "c" * 40
PIECE = 1 << 16


class Hub(ThreadingHTTPServer):
    """Serves the files of a folder as the repositories `someone/model` and `model`."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.names = folder, ("someone/model", "model")
        self.sent = 0
        self.knows_ranges = True
        self.status: int | None = None
        self.code = ""
        self.cut_short = False
        # A hostile server: headers in the place of the true ones, after a number of true answers; and what is
        # sent instead of a content, of no stated length.
        self.lies: dict[str, str] = {}
        self.true_answers = 0
        self.instead: Callable[[bytes], Iterable[bytes]] | None = None
        self.breaks = 0  # answers that end in the middle, with the connection

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
        hub = self.server
        if hub.status is not None:
            self.refuse(hub.status, hub.code)
            return
        path = unquote(urlsplit(self.path).path)
        if path in {f"/api/models/{name}/revision/{COMMIT}" for name in hub.names}:
            files = sorted(path for path in hub.folder.rglob("*") if path.is_file())
            siblings = [{"rfilename": path.relative_to(hub.folder).as_posix()} for path in files]
            self.send(200, json.dumps({"siblings": siblings}).encode(), {}, body)
            return
        name, _, inside = path.strip("/").partition("/resolve/")
        revision, _, file = inside.partition("/")
        if name not in hub.names:
            self.refuse(404, "RepoNotFound")
        elif revision not in ("main", COMMIT):
            self.refuse(404, "RevisionNotFound")
        elif not (hub.folder / file).is_file():
            self.refuse(404, "EntryNotFound")
        else:
            self.send_file(hub.folder / file, body)

    def send_file(self, path: Path, body: bool) -> None:
        content, status = path.read_bytes(), 200
        large = path.suffix == ".safetensors"
        found = hashlib.sha256(content) if large else hashlib.sha1(b"blob %d\0" % len(content) + content)
        headers = {"ETag": f'"{found.hexdigest()}"', "Accept-Ranges": "bytes"}
        asked = self.headers.get("Range")
        if asked and self.server.knows_ranges:
            start, end = asked.removeprefix("bytes=").split("-")
            headers["Content-Range"] = f"bytes {start}-{end}/{len(content)}"
            content, status = content[int(start) : int(end) + 1], 206
        if self.server.cut_short and body and status == 206:
            content = content[:-1]
        self.send(status, content, headers, body)

    def send(self, status: int, content: bytes, headers: dict[str, str], body: bool) -> None:
        hub = self.server
        pieces: Iterable[bytes] = (content[i : i + PIECE] for i in range(0, len(content), PIECE))
        headers = {"X-Repo-Commit": COMMIT, "Content-Length": str(len(content))} | headers
        if hub.instead is not None and body:
            pieces = hub.instead(content)
            del headers["Content-Length"]
        if body and hub.breaks:
            hub.breaks -= 1
            pieces = [content[: len(content) // 2]]
        self.send_response(status)
        for name, value in (headers | self.lies()).items():
            self.send_header(name, value)
        self.end_headers()
        for piece in pieces if body else ():
            try:
                self.wfile.write(piece)
            except OSError:  # nobody listens any more
                return
            hub.sent += len(piece)

    def lies(self) -> dict[str, str]:
        if self.server.true_answers:
            self.server.true_answers -= 1
            return {}
        return self.server.lies

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        for name, value in ({"Content-Length": "0"} | self.lies()).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


# For tests of what is read by ranges: small files are taken whole, and these are to count as large.
BY_RANGES = 1 << 18


@contextmanager
def served(folder: Path) -> Iterator[Hub]:
    """The server, running."""
    server = Hub(folder)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@contextmanager
def in_place_of_the_hub(folder: Path, cache: Path, patch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The server, asked for every name; what is fetched is kept in `cache`."""
    with served(folder) as server:
        ask_at(server.url, cache, patch)
        yield server


def ask_at(url: str, cache: Path, patch: pytest.MonkeyPatch) -> None:
    """Have names on the Hub asked for at an address."""
    constants = "huggingface_hub.constants"
    patch.setattr(f"{constants}.HF_HUB_CACHE", str(cache))
    patch.setattr(f"{constants}.ENDPOINT", url)
    template = url + "/{repo_id}/resolve/{revision}/{filename}"
    patch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)


def settled(hub: Hub) -> int:
    """Bytes sent: they are counted after the client has them."""
    sent = -1
    while sent != hub.sent:
        sent = hub.sent
        time.sleep(0.1)
    return sent
