"""Firefox without a window, told what to do by its protocol for tests (Marionette: JSON over a socket)."""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_NAMES = ("firefox", "firefox-esr")
_SECONDS_TO_START = 120


def found_firefox() -> str | None:
    """Where one is installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class FirefoxPage:
    """A page of Firefox."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left, self._number = b"", 0
        self._read()  # its greeting
        self.call("WebDriver:NewSession", capabilities={"alwaysMatch": {"acceptInsecureCerts": True}})

    def call(self, method: str, **parameters: Any) -> Any:
        """Ask for something and wait for the answer."""
        self._number += 1
        message = json.dumps([0, self._number, method, parameters]).encode()
        self._connection.sendall(b"%d:%s" % (len(message), message))
        _, number, error, result = self._read()
        assert (number, error) == (self._number, None)
        return result

    def visit(self, address: str) -> None:
        """Go to an address, and wait until it is loaded."""
        self.call("WebDriver:Navigate", url=address)

    def value(self, expression: str) -> Any:
        """What a piece of JavaScript gives."""
        return self.call("WebDriver:ExecuteScript", script=f"return {expression}", args=[])["value"]

    def _read(self) -> Any:
        while b":" not in self._left:
            self._receive()
        length, _, self._left = self._left.partition(b":")
        while len(self._left) < int(length):
            self._receive()
        message, self._left = self._left[: int(length)], self._left[int(length) :]
        return json.loads(message)

    def _receive(self) -> None:
        piece = self._connection.recv(1 << 16)
        assert piece, "the browser has gone"
        self._left += piece


@contextmanager
def firefox_page(browser: str, folder: Path) -> Iterator[FirefoxPage]:
    """An empty page of a Firefox with its profile in an empty folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "user.js").write_text(f'user_pref("marionette.port", {port});\n', encoding="utf-8")
    command = [browser, "--headless", "--marionette", "--no-remote", "--profile", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        with _connected(port, process) as connection:
            yield FirefoxPage(connection)
    finally:
        process.terminate()
        process.wait(30)


def _connected(port: int, process: subprocess.Popen[bytes]) -> socket.socket:
    end = time.monotonic() + _SECONDS_TO_START
    while time.monotonic() < end:
        assert process.poll() is None, "Firefox did not start"
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=120)
        except ConnectionRefusedError:
            time.sleep(0.2)
    raise AssertionError("Firefox does not answer")
