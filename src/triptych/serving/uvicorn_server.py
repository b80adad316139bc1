"""Application on uvicorn; its shutdown waits for running requests."""

import asyncio
import logging
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import final

import uvicorn

from triptych.serving import hangups
from triptych.serving.application import web_application
from triptych.serving.connections import uvicorn_config
from triptych.serving.fleet import Fleet as Fleet
from triptych.serving.logs import LogHandler, log
from triptych.serving.server import Server as Server


@final
class Serving(uvicorn.Server):
    """Server with a graceful shutdown: after a first stop signal, it answers 503 until running requests end.

    A second signal raises KeyboardInterrupt.
    """

    def __init__(
        self, server: Server, seconds: float, ready: Callable[[], None], *, public: bool
    ) -> None:
        """Make a server with `seconds` to stop; it calls `ready` as soon as it listens."""
        app = web_application(server, public=public)
        most = max(1, round(seconds))
        super().__init__(
            uvicorn_config(app, server.limits, timeout_graceful_shutdown=most)
        )
        self._server = server
        self._seconds = seconds
        self._until = 0.0
        self._ready = ready
        self._says_why = True
        _log_of_uvicorn()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._listen_to_hangups()
        self._ready()

    def _listen_to_hangups(self) -> None:
        """Reload at SIGHUP, except at a terminal: closing a terminal sends SIGHUP."""
        if hangups.are_heard():
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reload)

    def _reload(self) -> None:
        reloading = asyncio.ensure_future(self._server.reload_when_possible())
        reloading.add_done_callback(
            lambda over: over.cancelled() or over.exception()
        )  # errors are logged

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._server.is_stopping:
            logging.getLogger(
                "uvicorn.error"
            ).disabled = True  # it would log the aborted requests
            raise KeyboardInterrupt
        self._server.is_stopping, self._until = True, time.monotonic() + self._seconds

    async def on_tick(self, counter: int) -> bool:
        # uvicorn stops listening only at `should_exit`: until then, new requests get 503.
        if self._server.is_stopping:
            self._server.give_up_reload()
        if self._server.is_stopping and (
            not self._server.num_requests or time.monotonic() > self._until
        ):
            self.should_exit = True
        elif self._server.is_stopping and self._says_why:
            ways = f"in at most {self._seconds:g} s; a second Ctrl-C ends at once"
            log(
                {
                    "stopping": f"running requests are finished first, {ways}",
                    "requests": self._server.num_requests,
                }
            )
            self._says_why = False
        return await super().on_tick(counter)


def _log_of_uvicorn() -> None:
    """Route uvicorn's warnings to the log."""
    own = logging.getLogger("uvicorn")
    own.handlers = [LogHandler()]
    own.propagate = False
    own.setLevel(logging.WARNING)
