"""Connections with limits for idle clients.

A connection is closed if a request does not arrive in time, or if it is the oldest of too many idle
connections. A closed connection is aborted if its client does not read the end of the answer.
"""

import asyncio
from functools import partial
from typing import Any, final

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from triptych.serving.limits import Limits

# Key in the scope of a request: a function to abort its connection, whether or not the client reads.
CUT_OFF = "triptych.cut_off"
# Grace time of a new connection: a request sent at once is read before the connection may be closed.
_SECONDS_TO_SPEAK = 0.1


def uvicorn_config(app: ASGIApp, limits: Limits, **options: Any) -> uvicorn.Config:
    """Make the configuration of uvicorn with these connections."""
    made: Any = partial(Connection, limits=limits, waiting={})
    quiet: dict[str, Any] = {
        "log_config": None,
        "access_log": False,
        "server_header": False,
    }
    return uvicorn.Config(app, http=made, ws="none", **quiet, **options)


@final
class Connection(H11Protocol):
    """Connection of uvicorn, closed if the head of a request does not arrive in time.

    uvicorn alone waits for ever for the first request, for a whole head, and for the client to read all of an
    answer.
    """

    def __init__(
        self,
        *arguments: Any,
        limits: Limits,
        waiting: "dict[Connection, None]",
        **options: Any,
    ) -> None:
        """Make a connection; `waiting` has all connections without a request, oldest first."""
        super().__init__(*arguments, **options)
        self._limits = limits
        self._waiting = waiting
        self._timer: asyncio.TimerHandle | None = None
        self._look: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()
        self._look_soon(unread=None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        if self._look is not None:
            self._look.cancel()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._stop_waiting()
            self.cycle.scope[CUT_OFF] = self.transport.abort  # type: ignore[literal-required]

    def on_response_complete(self) -> None:
        answered = self.cycle
        super().on_response_complete()
        if self.cycle is answered and not self.transport.is_closing():
            self._wait()

    def _wait(self) -> None:
        """Start the timeout for a request, and close the oldest waiting connection if there are too many."""
        self._stop_waiting()
        self._waiting[self] = None
        self._timer = self.loop.call_later(self._limits.stranger_seconds, self._end)
        if len(self._waiting) > self._limits.max_connections:
            self.loop.call_later(_SECONDS_TO_SPEAK, self._make_room)

    def _make_room(self) -> None:
        if len(self._waiting) > self._limits.max_connections:
            next(iter(self._waiting))._end()

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self) -> None:
        self._stop_waiting()
        self.transport.close()

    def _look_soon(self, unread: int | None) -> None:
        look = partial(self._cut_off_if_unread, unread)
        self._look = self.loop.call_later(self._limits.stranger_seconds, look)

    def _cut_off_if_unread(self, before: int | None) -> None:
        """Abort a closing connection if its unread data has not shrunk since the last check.

        `before` is the size of the unread data at the last check, or None for an open connection.
        """
        unread = (
            self.transport.get_write_buffer_size()
            if self.transport.is_closing()
            else None
        )
        if unread is not None and before is not None and unread >= before:
            self.transport.abort()
        else:
            self._look_soon(unread)
