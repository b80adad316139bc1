"""Serving models over HTTP: the address and the keys."""

import ipaddress
import os
import pickle
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

from triptych.errors import DataError, UsageError
from triptych.extras import require_extra
from triptych.face import Model
from triptych.serving.limits import Limits
from triptych.serving.models import ServedModel
from triptych.threads import torch_threads

KEY_VARIABLE = "TRIPTYCH_API_KEY"
_MOST_WORKERS = 256


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
    page_only: bool = False,
    ready: Callable[[], None] = lambda: None,
) -> None:
    """Serve models over HTTP until the process is told to stop.

    Args:
        models: by name; the name of a translator ends in its languages, as in de-en.
        host: address to listen at. One that other machines can reach needs a key.
        port: port to listen at.
        workers: processes that compute, this one included; with several, each with one thread and with the
            models in its memory. Started with `spawn`: a script guards its main part with
            `if __name__ == "__main__"`.
        keys_file: file of keys, one per line. Every request needs one of them. Default: the keys in
            TRIPTYCH_API_KEY, separated by spaces; without any, no key is needed.
        limits: of every request.
        shutdown_timeout: seconds that running requests get to end when the process is told to stop.
        over: a text on which the page at / measures what heads do. Default: the text that is on the page.
        page_only: the page is all that is wanted, so that a translator needs no languages in its name.
        ready: called when requests are answered.

    Raises:
        UsageError: a model cannot be served; an address that other machines can reach without a key, or one
            that cannot be listened at.
        DataError: the file of keys holds none.
    """
    require_extra(
        "serve", "starlette", "uvicorn", "python_multipart", "prometheus_client", what="triptych serve"
    )
    from triptych.serving import running
    from triptych.serving.server import log

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
        raise UsageError(f"--workers {workers}: give a number from 1 to {_MOST_WORKERS}")
    limits = limits or Limits()
    arguments = (
        _pickled(models, limits) if workers > 1 else b""
    )  # before the models are built: as their files
    with torch_threads(1 if workers > 1 else None), ExitStack() as stack:
        served = [ServedModel(name, model, limits) for name, model in models.items()]
        for model in served:
            _require_servable(model, workers, page_only=page_only)
            if over is not None:
                model.explorer.over = model.model.attend_over(over)
        listening = stack.enter_context(_listening(host, port))
        others = [running.ServingProcess(served, arguments) for _ in range(workers - 1)]
        for process in others:
            stack.enter_context(closing(process))
        for model in served:
            model.check_batches()  # builds it, too, before the first request comes
        for process in others:
            process.start()
        for model in served:
            if model.is_batch_invariant is False:
                log({"model": model.name, "batch_invariance": model.batch_invariance})
        server = running.Server(served, limits, keys)
        running.Serving(server, shutdown_timeout, ready, public=public).run([listening])


def _require_servable(model: ServedModel, workers: int, *, page_only: bool) -> None:
    if "translate" in model.can and model.languages is None and not page_only:
        raise UsageError(
            f"{model.name} translates, and its name does not end in two languages: write de-en={model.name} "
            "(the languages that it translates from and to)"
        )
    if workers > 1 and next(model.model.opened.model.parameters()).is_cuda:
        raise UsageError(f"{model.name} is on a GPU, which one process serves: leave out --workers")


def _pickled(models: Mapping[str, Model], limits: Limits) -> bytes:
    """What other processes open the models from."""
    try:
        return pickle.dumps((dict(models), limits))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError) as error:
        why = f"other processes cannot have the models ({error}): leave out workers, or load them anew"
        raise UsageError(why) from None


def _listening(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        why = str(error.strerror).partition(" (")[0]
        raise UsageError(f"cannot listen at {host}:{port} ({why}): give another port or host") from None


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
