"""The log decides about no answer: closed, full or unread, requests get theirs and the server starts."""

import io
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from served import Served, ServedCommand
from triptych.model import Model
from triptych.serving.logs import flush_log

FULL = Path("/dev/full")
needs_full = pytest.mark.skipif(not FULL.exists(), reason="there is no device that is always full")


def closed_pipe() -> TextIO:
    """What `| head -1` leaves behind."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def closed_file() -> TextIO:
    file = io.StringIO()
    file.close()
    return file


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(lambda: FULL.open("w"), marks=needs_full, id="full disk"),
        pytest.param(closed_pipe, id="closed pipe"),
        pytest.param(closed_file, id="closed file"),
        pytest.param(lambda: None, id="no standard error"),
    ],
)
def test_requests_are_answered_where_the_log_cannot_be_written(
    language_model: Model, monkeypatch: pytest.MonkeyPatch, made: Callable[[], TextIO | None]
) -> None:
    fields = {"prompt": "The cat", "max_tokens": 3, "temperature": 0}
    with Served({"gpt": language_model}) as served:
        expected = served.ask("/v1/completions", fields).body["choices"]
        flush_log()
        before = lost(served)
        opened = made()
        monkeypatch.setattr(sys, "stderr", opened)
        found = [served.ask("/v1/completions", fields) for _ in range(3)]
        flush_log()
        if opened is not None:
            opened.close()
        assert [one.status for one in found] == [200] * 3
        assert all(one.body["choices"] == expected for one in found)
        assert lost(served) >= before + 3


def lost(served: Served) -> float:
    return float(str(served.ask("/metrics").body).partition("\ntriptych:log_lines_lost ")[2].split()[0])


@needs_full
@pytest.mark.slow  # starts the command
def test_the_command_starts_answers_and_stops_on_a_full_disk(language_model: Model) -> None:
    with FULL.open("w") as stderr, ServedCommand(f"m={language_model.name}", stderr=stderr) as served:
        assert [served.ask("/health").status for _ in range(20)] == [200] * 20
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0


def test_a_reader_who_has_stopped_holds_up_no_request(
    language_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = os.pipe()
    with Served({"gpt": language_model}) as served, os.fdopen(writer, "w") as stderr:
        os.set_blocking(writer, False)
        with suppress(BlockingIOError):
            while True:
                os.write(writer, b"x" * 4096)
        os.set_blocking(writer, True)
        monkeypatch.setattr(sys, "stderr", stderr)
        assert [served.ask("/health").status for _ in range(20)] == [200] * 20
        os.close(reader)
        flush_log()
