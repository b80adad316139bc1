"""Running the application on uvicorn, with a stop that loses no request."""

import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, final

import uvicorn

from triptych.serving.application import web_application
from triptych.serving.processes import ServingProcess as ServingProcess
from triptych.serving.server import Server as Server


@final
class Serving(uvicorn.Server):
    """A server that, once told to stop, answers 503 until the running requests have ended."""

    def __init__(self, server: Server, seconds: float, ready: Callable[[], None], *, public: bool) -> None:
        """A server that has `seconds` to stop, and calls `ready` when it listens."""
        quiet: dict[str, Any] = {"log_level": "warning", "access_log": False, "server_header": False}
        app, most = web_application(server, public=public), max(1, round(seconds))
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=most, **quiet))
        self._server, self._seconds, self._until, self._ready = server, seconds, 0.0, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._server.is_stopping:
            super().handle_exit(sig, frame)  # the second time, at once
        self._server.is_stopping, self._until = True, time.monotonic() + self._seconds

    async def on_tick(self, counter: int) -> bool:
        if self._server.is_stopping and (not self._server.num_requests or time.monotonic() > self._until):
            self.should_exit = True
        return await super().on_tick(counter)
