"""Running the application on uvicorn, with a stop that loses no request."""

import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import final

import uvicorn

from triptych.serving.application import application
from triptych.serving.limits import Limits
from triptych.serving.models import ServedModel
from triptych.serving.processes import ServingProcess as ServingProcess


def run(
    models: Sequence[ServedModel],
    listening: socket.socket,
    keys: Sequence[str],
    limits: Limits,
    shutdown_timeout: float,
    ready: Callable[[], None],
    *,
    public: bool,
) -> None:
    """Serve until the process is told to stop."""
    config = uvicorn.Config(
        application(models, limits, keys, public=public),
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=max(1, round(shutdown_timeout)),
    )
    _Draining(config, shutdown_timeout, ready).run([listening])


@final
class _Draining(uvicorn.Server):
    """Told to stop, it answers 503 until the running requests have ended, and ends then."""

    def __init__(self, config: uvicorn.Config, seconds: float, ready: Callable[[], None]) -> None:
        super().__init__(config)
        self._seconds, self._until, self._ready = seconds, 0.0, ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        server = self.config.app.state.server  # type: ignore[union-attr]
        if server.is_stopping:
            super().handle_exit(sig, frame)  # the second time, at once
        server.is_stopping, self._until = True, time.monotonic() + self._seconds

    async def on_tick(self, counter: int) -> bool:
        server = self.config.app.state.server  # type: ignore[union-attr]
        if server.is_stopping and (not server.num_requests or time.monotonic() > self._until):
            self.should_exit = True
        return await super().on_tick(counter)
