"""Entry point of serving over HTTP: address and keys."""

import ipaddress
import os
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from triptych.errors import DataError, UsageError
from triptych.extras import require_extra
from triptych.model import Model
from triptych.seeing.attending import HeldOutText
from triptych.serving import hangups
from triptych.serving.fleet import PageTexts
from triptych.serving.limits import Limits
from triptych.serving.logs import flush_log, log
from triptych.threads import torch_threads
from triptych.untrusted import read_limited

KEY_VARIABLE = "TRIPTYCH_API_KEY"
_MOST_WORKERS = 256
_LONGEST_KEYS = 1 << 20
_KEY = re.compile(r"[\x21-\x7e]{1,512}")


def serve(
    models: Mapping[str, Model],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    workers: int = 1,
    keys_file: Path | None = None,
    limits: Limits | None = None,
    shutdown_timeout: float = 30.0,
    over: Path | None = None,
    held_out: HeldOutText | None = None,
    page_only: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve models over HTTP until a signal stops the process.

    Args:
        models: models by name; the name of a translator ends in its languages, such as de-en.
        host: address to listen at. One that other machines can reach needs a key.
        port: port to listen at.
        workers: number of processes that compute, including this process. Each of several processes has one
            thread and a copy of the models in memory. The processes start with `spawn`: a script must guard
            its main part with `if __name__ == "__main__"`.
        keys_file: file of keys, one per line. Every request needs one of them. Default: the keys in
            TRIPTYCH_API_KEY, separated by spaces; without any, no key is needed.
        limits: limits of requests. Default: `Limits()`.
        shutdown_timeout: seconds that running requests get to end when the process is told to stop.
        over: text for the page's measurements of heads. Default: the text on the page.
        held_out: text for the effect of changes on the loss; only with a single model. Default: None, which
            omits this measurement.
        page_only: serve the page only; a translator's name may then lack languages.
        ready: function called as soon as the server answers requests.

    Raises:
        UsageError: A model cannot be served, other machines can reach the address without a key, or the
            server cannot listen at the address.
        DataError: The file of keys is unreadable or empty, or a key cannot be sent in a header.
    """
    require_extra(
        "serve",
        *("starlette", "uvicorn", "python_multipart", "prometheus_client", "turbohtml"),
        what="triptych serve",
    )
    from triptych.serving import uvicorn_server as running

    keys = _keys(keys_file)
    public = not _is_loopback(host)
    if public and not keys:
        raise UsageError(
            f"--host {host} can be reached by other machines: give --keys-file or {KEY_VARIABLE}, "
            "or leave out --host"
        )
    if not 0 < port < 1 << 16:
        raise UsageError(f"--port {port}: give a number from 1 to 65535")
    if not 0 < workers <= _MOST_WORKERS:
        raise UsageError(
            f"--workers {workers}: give a number from 1 to {_MOST_WORKERS}"
        )
    if held_out is not None and len(models) != 1:
        raise UsageError(
            f"the held-out text is of one model, and {len(models)} are served: leave it out"
        )
    # With several processes, every process has one thread.
    with (
        torch_threads(1 if workers > 1 else None),
        hangups.ignored(),
        ExitStack() as stack,
    ):
        page = PageTexts(over, held_out)
        fleet = running.Fleet(
            models, limits or Limits(), workers=workers, page=page, page_only=page_only
        )
        server = running.Server(fleet, limits or Limits(), keys)
        stack.callback(flush_log)
        stack.callback(server.close)
        listening = stack.enter_context(_listening(host, port))
        fleet.start()
        for model in fleet.models.values():
            if model.is_batch_invariant is False:
                log({"model": model.name, "batch_invariance": model.batch_invariance})
        running.Serving(server, shutdown_timeout, ready, public=public).run([listening])


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise UsageError(
            f"cannot listen at {host}:{port} ({why}): give another port or host"
        ) from None


def _keys(file: Path | None) -> list[str]:
    if file is None:
        keys = os.environ.get(KEY_VARIABLE, "").split()
        _require_sendable(keys, KEY_VARIABLE)
        return keys
    try:
        keys = read_limited(file, _LONGEST_KEYS).decode().split()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise DataError(f"{file}: cannot be read as a file of keys ({why})") from None
    if not keys:
        raise DataError(f"{file}: holds no key; write one per line")
    _require_sendable(keys, str(file))
    return keys


def _require_sendable(keys: Sequence[str], where: str) -> None:
    """Check that every key can be sent in a header."""
    for number, key in enumerate(keys, start=1):
        if not _KEY.fullmatch(key):
            raise DataError(
                f"{where}: no header can carry key {number}: use at most 512 letters and signs of ASCII"
            )


def _is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
