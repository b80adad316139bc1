"""Reloads: never more than two copies of the models, none that holds up the end, and none that is lost."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from served import Served, ServedCommand, free_port
from triptych.model import Model, load
from triptych.serving.fleet import Fleet

KEY = {"Authorization": "Bearer k"}
STREAM: dict[str, Any] = {
    "prompt": "The cat", "max_tokens": 40, "stream": True, "temperature": 1.0, "seed": 1,
}  # fmt: skip
needs_hangups = pytest.mark.skipif(not hasattr(signal, "SIGHUP"), reason="there is no SIGHUP")


@pytest.fixture
def folder(language_model: Model, tmp_path: Path) -> Path:
    return Path(shutil.copytree(language_model.name, tmp_path / "gpt"))


def until(is_so: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_reload_is_refused_while_a_stream_goes_on_on_the_models_before_the_last_one(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    with Served({"gpt": load(folder)}, keys=["k"]) as served, ThreadPoolExecutor() as pool:
        alone = served.events("/v1/completions", STREAM, None, **KEY)
        worker = served.state.models["gpt"].worker
        step = worker._step
        monkeypatch.setattr(worker, "_step", lambda *given: (goes_on.wait(60), step(*given)))
        streamed = pool.submit(served.events, "/v1/completions", STREAM, None, **KEY)
        until(lambda: served.state.models["gpt"].queue.num_running > 0)
        assert served.ask("/admin/reload", {}, **KEY).status == 200
        refused = served.ask("/admin/reload", {}, **KEY)
        assert (refused.status, refused.headers["retry-after"]) == (409, "1")
        assert refused.body["error"].startswith("requests still end on the models before the last reload")
        assert len(served.state._fleets) == 2
        goes_on.set()
        texts = [[one["choices"][0]["text"] for one in of] for of in (streamed.result(), alone)]
        assert "".join(texts[0]) == "".join(texts[1])
        until(lambda: not served.state._retiring)
        assert len(served.state._fleets) == 1
        assert served.ask("/admin/reload", {}, **KEY).status == 200


@pytest.mark.slow
def test_signals_that_come_during_a_reload_are_one_more_reload(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, opened, reopened = threading.Event(), list[int](), Fleet.reopened

    def slowly(fleet: Fleet) -> Fleet:
        opened.append(1)
        assert goes_on.wait(60)
        return reopened(fleet)

    monkeypatch.setattr(Fleet, "reopened", slowly)
    with Served({"gpt": load(folder)}) as served:
        loop = served.server.servers[0].get_loop()
        for _ in range(5):
            asyncio.run_coroutine_threadsafe(served.state.reload_when_possible(), loop)
        until(lambda: len(opened) == 1)
        goes_on.set()
        until(lambda: len(opened) == 2)
        until(lambda: served.state._reloading is None)
        time.sleep(0.3)
        assert len(opened) == 2


@needs_hangups
@pytest.mark.slow  # starts the command
def test_the_end_does_not_wait_for_a_reload(folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    starts = tmp_path / "sitecustomize.py"  # so that a reload takes for ever
    starts.write_text(
        "import sys\n"
        "def slowly(fleet):\n    print('reopening', file=sys.stderr, flush=True)\n"
        "    while True:\n        reopened(fleet).close()\n"
        "if 'serve' in sys.argv:\n    from triptych.serving.fleet import Fleet\n"
        "    reopened, Fleet.reopened = Fleet.reopened, slowly\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    with log.open("w") as stderr, ServedCommand(f"m={folder}", stderr=stderr, PYTHONPATH=path) as served:
        served.process.send_signal(signal.SIGHUP)
        until(lambda: "reopening" in log.read_text())
        assert served.ask("/health").status == 200
        started = time.monotonic()
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0
        assert time.monotonic() - started < 25  # of 600


@needs_hangups
@pytest.mark.slow  # starts the command
def test_a_hangup_while_the_server_starts_ends_nothing(folder: Path) -> None:
    command = [sys.executable, "-c", _TOLD_WHEN_IT_OPENS, str(folder), str(free_port())]
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **streams) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "opening\n"
        process.send_signal(signal.SIGHUP)
        try:
            assert process.stdout.readline() == "ready\n"
        finally:
            process.kill()


# The command, which says when it opens its models, and when it is ready.
_TOLD_WHEN_IT_OPENS = """
import sys, time
from triptych.cli import serve
def load(*given, **options):
    print("opening", flush=True)
    time.sleep(1)
    return opened(*given, **options)
opened, serve.load = serve.load, load
serve.say = lambda text: print("ready", flush=True)
from triptych.cli.main import application
application(["serve"])(["serve", f"m={sys.argv[1]}", "--port", sys.argv[2]])
"""
