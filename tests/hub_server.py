"""The Hugging Face Hub, as a server on this machine plays it."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

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
            self.refuse(self.server.status, self.server.code)
            return
        path = unquote(urlsplit(self.path).path)
        name, listing, revision = path.removeprefix("/api/models/").partition("/tree/")
        if listing and name in self.server.names and revision in ("main", COMMIT):
            self.send_list()
            return
        name, _, inside = unquote(urlsplit(self.path).path).strip("/").partition("/resolve/")
        revision, _, file = inside.partition("/")
        if name not in self.server.names:
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

    def send_list(self) -> None:
        """Of the files, as the Hub's own interface gives it."""
        folder = self.server.folder
        found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        entries = [
            {
                "type": "file",
                "path": str(path.relative_to(folder)),
                "size": path.stat().st_size,
                "oid": "0" * 40,
            }
            for path in found
        ]
        content = json.dumps(entries).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def served(folder: Path) -> Iterator[Hub]:
    """The server, running."""
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
