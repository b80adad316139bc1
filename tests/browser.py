"""A browser without a window, told what to do through two pipes (Chrome DevTools Protocol)."""

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe",
)  # fmt: skip
# The browser's pipes are its files 3 and 4.
_LAUNCH = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
_LAUNCH += "os.execv(sys.argv[3], sys.argv[3:])"
_KEYS = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}


def found_browser() -> str | None:
    """Where one is installed."""
    return next((path for name in _NAMES if (path := shutil.which(name))), None)


class Page:
    """A page that is looked at.

    Attributes:
        complaints: errors and warnings that the browser has to tell so far.
        requests: addresses that were asked for.
    """

    def __init__(self, write_to: int, read_from: int) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self._write_to, self._read_from = write_to, read_from
        self._left, self._number, self._session = b"", 0, ""
        self._loaded = False
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask for something and wait for the answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self._note(answer)
        assert "error" not in answer, answer["error"]
        return dict(answer["result"])

    def open(self, path: Path) -> float:
        """Open a file; seconds until it is drawn."""
        began = time.monotonic()
        self.visit(path.as_uri())
        self.value("new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")
        return time.monotonic() - began

    def visit(self, address: str) -> None:
        """Go to an address, and wait until it is loaded."""
        self._loaded = False
        self.call("Page.navigate", url=address)
        while not self._loaded:
            self._note(self._next())

    def value(self, expression: str) -> Any:
        """What a piece of JavaScript gives."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press a key and let it go."""
        pressed: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": _KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **pressed, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **pressed)

    def point_at(self, selector: str, *, click: bool = False, at: tuple[float, float] | None = None) -> None:
        """Move the mouse to the middle of an element, or to a place in it, in pixels from its corner."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.value(f"{element}.scrollIntoView({{ block: 'center' }})")
        box = self.value(f"{element}.getBoundingClientRect().toJSON()")
        inside = at or (box["width"] / 2, box["height"] / 2)
        x, y = box["left"] + inside[0], box["top"] + inside[1]
        kinds = ("mouseMoved", "mousePressed", "mouseReleased") if click else ("mouseMoved",)
        for kind in kinds:
            pressed: dict[str, Any] = {} if kind == "mouseMoved" else {"button": "left", "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **pressed)

    def write(self, text: str) -> None:
        """Put text where the focus is."""
        self.call("Input.insertText", text=text)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            piece = os.read(self._read_from, 1 << 16)
            assert piece, "the browser has gone"
            self._left += piece
        message, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        match event.get("method"):
            case "Page.loadEventFired":
                self._loaded = True
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "warning", "assert"):
                self.complaints.append(json.dumps(about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] in ("error", "warning"):
                self.complaints.append(about["entry"]["text"])


class Valued(Protocol):
    """A page of any browser."""

    def value(self, expression: str) -> Any: ...


def wait_for(tab: Valued, condition: str) -> None:
    """Wait until a condition of the page is true."""
    for _ in range(1200):
        if tab.value(condition):
            return
        time.sleep(0.05)
    problem = tab.value("document.getElementById('problem')?.textContent ?? ''")
    raise AssertionError(f"never true: {condition}; {problem}")


@contextmanager
def page_in(browser: str, folder: Path) -> Iterator[Page]:
    """An empty page of a browser that keeps what it writes in a folder."""
    to_read, to_write = os.pipe(), os.pipe()
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (to_read[0], to_write[1])]
    command = [
        sys.executable,
        "-c",
        _LAUNCH,
        *map(str, theirs),
        browser,
        *_FLAGS,
        f"--user-data-dir={folder}",
    ]
    process = subprocess.Popen(command, pass_fds=theirs, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    for end in (*theirs, to_read[0], to_write[1]):
        os.close(end)
    try:
        yield Page(to_read[1], to_write[0])
    finally:
        process.terminate()
        process.wait(30)
        os.close(to_read[1])
        os.close(to_write[0])
