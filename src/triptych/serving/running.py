"""Running the application on uvicorn: the address, the keys, and a stop that loses no request."""

import ipaddress
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import final

import uvicorn

from triptych.errors import DataError, UsageError
from triptych.face import Model
from triptych.serving.application import application
from triptych.serving.limits import Limits
from triptych.serving.models import ServedModel

KEY_VARIABLE = "TRIPTYCH_API_KEY"
_MOST_CONNECTIONS = 512


def serve(
    models: Mapping[str, Model],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    keys_file: Path | None = None,
    limits: Limits | None = None,
    shutdown_timeout: float = 30.0,
) -> None:
    """Serve models over HTTP until the process is told to stop.

    Args:
        models: by name; the name of a translator ends in its languages, as in de-en.
        host: address to listen at. One that other machines can reach needs a key.
        port: port to listen at.
        keys_file: file of keys, one per line, of which every request needs one. Default: the keys in
            TRIPTYCH_API_KEY, with spaces between them; without any, no key is needed.
        limits: of every request.
        shutdown_timeout: seconds that running requests get to end when the process is told to stop.

    Raises:
        UsageError: a model cannot be served, or an address that other machines can reach without a key.
        DataError: the file of keys holds none.
    """
    keys = _keys(keys_file)
    public = not _is_loopback(host)
    if public and not keys:
        raise UsageError(
            f"--host {host} can be reached by other machines: give --keys-file or {KEY_VARIABLE}, "
            "or leave out --host"
        )
    limits = limits or Limits()
    served = [ServedModel(name, model, limits) for name, model in models.items()]
    for model in served:
        model.check_batches()  # builds it, too, before the first request comes
    app = application(served, limits, keys, public=public)
    config = uvicorn.Config(
        app,
        host,
        port,
        log_level="warning",
        access_log=False,
        server_header=False,
        limit_concurrency=_MOST_CONNECTIONS,
        timeout_graceful_shutdown=max(1, round(shutdown_timeout)),
    )
    _Draining(config, shutdown_timeout).run()


@final
class _Draining(uvicorn.Server):
    """Told to stop, it answers 503 until the running requests have ended, and ends then."""

    def __init__(self, config: uvicorn.Config, seconds: float) -> None:
        super().__init__(config)
        self._seconds, self._until = seconds, 0.0

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


def _keys(file: Path | None) -> list[str]:
    if file is None:
        return os.environ.get(KEY_VARIABLE, "").split()
    try:
        keys = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file}: cannot be read as a file of keys ({error})") from None
    if not keys:
        raise DataError(f"{file}: holds no key; write one per line")
    return keys


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
