"""A server of models in a thread of this process, and what is asked of it."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing, suppress
from typing import Any, NamedTuple
from urllib.parse import urlencode

import uvicorn

from triptych.model import Model
from triptych.serving.application import web_application
from triptych.serving.connections import uvicorn_config
from triptych.serving.fleet import Fleet
from triptych.serving.limits import Limits
from triptych.serving.server import Server


def free_port() -> int:
    """Return the number of a port at which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


class Answer(NamedTuple):
    status: int
    body: Any
    headers: dict[str, str]


class Asking:
    """A server that is asked over HTTP."""

    port: int

    def ask(self, path: str, fields: Any = None, *, form: bool = False, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with closing(connection):
            kind = "application/x-www-form-urlencoded" if form else "application/json"
            body = None if fields is None else urlencode(fields, doseq=True) if form else json.dumps(fields)
            headers = {name.replace("_", "-"): value for name, value in headers.items()}
            method = "GET" if fields is None else "POST"
            connection.request(method, path, body, {"Content-Type": kind, **headers})
            response = connection.getresponse()
            text = response.read().decode()
            is_json = response.headers.get_content_type() == "application/json"
            return Answer(response.status, json.loads(text) if is_json else text, dict(response.headers))

    def send(self, path: str, body: bytes, **headers: str) -> Answer:
        """Post bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with closing(connection):
            connection.request("POST", path, body, {"Content-Type": "application/json", **headers})
            response = connection.getresponse()
            return Answer(response.status, response.read(), dict(response.headers))

    def events(
        self, path: str, fields: Any, started: threading.Barrier | None = None, **headers: str
    ) -> list[Any]:
        """The events of a stream; with a barrier, the rest is read when all others have begun."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        with closing(connection):
            kind = {"Content-Type": "application/json", **headers}
            connection.request("POST", path, json.dumps(fields), kind)
            response = connection.getresponse()
            found = list[Any]()
            for line in response:
                if started is not None and not found:
                    started.wait(60)
                if line.startswith(b"data: {"):
                    found.append(json.loads(line[6:]))
            return found


class Served(Asking):
    """A server in a thread of this process."""

    def __init__(
        self,
        models: dict[str, Model],
        limits: Limits | None = None,
        keys: Sequence[str] = (),
        num_processes: int = 1,
    ) -> None:
        limits = limits or Limits()
        self.fleet = Fleet(models, limits, workers=num_processes, page_only=True)
        self.processes = self.fleet.processes
        self.fleet.start()
        self.state = Server(self.fleet, limits, keys)
        app = web_application(self.state)
        self.server = uvicorn.Server(uvicorn_config(app, limits, host="127.0.0.1", port=0))
        self.thread = threading.Thread(target=self.server.run)

    def __enter__(self) -> "Served":
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_: object) -> None:
        self.server.should_exit = True
        self.thread.join()
        self.state.close()


class ServedCommand(Asking):
    """`triptych serve` as a process of its own; what it says is at standard error."""

    def __init__(self, *arguments: object, stderr: Any = subprocess.DEVNULL, **environment: str) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "triptych", "serve", *map(str, arguments), "--port", str(self.port)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "TRIPTYCH_API_KEY": "", **environment},
            start_new_session=True,
        )

    def __enter__(self) -> "ServedCommand":
        until = time.monotonic() + 120
        while True:
            assert self.process.poll() is None, "it has ended"
            assert time.monotonic() < until, "it does not answer"
            with suppress(OSError):
                if self.ask("/health").status == 200:
                    return self
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
