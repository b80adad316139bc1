"""`triptych serve`: what it refuses, and how it ends."""

import http.client
import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import pytest

from command import Command
from served import ServedCommand


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["en-de={run}", "--host", "0.0.0.0"], "--keys-file"),
        (["{run}"], "write de-en="),
        (["en-de={run}", "en-de={run}"], "two models have one name"),
        (["en-de={run}", "--max-items", "0"], "--max-items is 0"),
        (["en-de={run}", "--port", "99999"], "--port 99999"),
        (["en-de={run}", "--workers", "0"], "--workers 0"),
        (["en-de={run}", "--host", "no.such.host.invalid"], "--keys-file"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_line(
    triptych: Command, small_run: Path, arguments: list[str], says: str
) -> None:
    found = triptych("serve", *(one.format(run=small_run) for one in arguments))
    assert found.code == 2
    assert says in found.err.splitlines()[-1]


def test_a_port_that_is_taken_is_said_in_one_line(triptych: Command, small_run: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = triptych("serve", f"en-de={small_run}", "--port", port)
    assert found.code == 2
    assert f"cannot listen at 127.0.0.1:{port} (Address already in use)" in found.err


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_told_to_stop_it_ends_what_runs_and_then_itself(small_run: Path, workers: int) -> None:
    with ServedCommand(f"en-de={small_run}", "--workers", workers, stderr=subprocess.PIPE) as served:
        process = served.process
        assert process.stderr is not None
        assert process.stderr.readline().startswith(b"serving en-de at ")
        connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
        body = json.dumps({"q": ["three hundred and one"] * 100, "source": "en", "target": "de"})
        connection.request("POST", "/translate", body)
        time.sleep(0.05)
        os.killpg(process.pid, signal.SIGTERM)  # as systemd sends it, to all processes
        answer = connection.getresponse()
        assert answer.status == 200
        assert len(json.loads(answer.read())["translatedText"]) == 100
        connection.close()
        assert process.wait(60) == 0
        with suppress(ProcessLookupError):  # nothing of it is left, soon
            for _ in range(600):
                os.killpg(process.pid, 0)
                time.sleep(0.05)
            pytest.fail("a process of the server is left")
        *_, answered, stopped = process.stderr.read().splitlines()
        process.stderr.close()
        assert (json.loads(answered)["status"], stopped) == (200, b"stopped")
