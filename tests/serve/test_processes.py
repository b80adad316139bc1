"""Processes that die or stop answering: requests get their answers, and others take their places."""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
from benchmarks import serving

from served import Served, ServedCommand
from triptych.model import Model, load
from triptych.serving import worker_processes as processes
from triptych.serving.limits import Limits, RequestError
from triptych.serving.worker import Item, QueuedJob
from triptych.serving.worker_processes import ServingProcess
from triptych.threads import torch_threads

FIELDS = {"q": ["twelve", "three hundred and one"] * 4, "source": "en", "target": "de"}
STREAM = {"model": "gpt", "prompt": ["The cat"] * 6, "max_tokens": 40, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def folder(language_model: Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(language_model.name, tmp_path_factory.mktemp("own") / "gpt"))


@pytest.fixture(scope="module")
def served(translator: Model, folder: Path) -> Iterator[Served]:
    models = {"en-de": load(translator.name), "gpt": load(folder)}
    with torch_threads(1), Served(models, num_processes=2) as running:
        yield running


def wait_for_two(served: Served) -> None:
    until = time.monotonic() + 120
    while served.ask("/health").body["workers"] < 2:
        assert time.monotonic() < until, "no process takes the place"
        time.sleep(0.05)


def process_of(served: Served) -> ServingProcess:
    (process,) = served.processes
    return process


@pytest.mark.slow  # starts processes again
def test_a_process_that_is_killed_while_it_opens_its_models_is_started_again(served: Served) -> None:
    first = process_of(served).pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    killed = {first}
    while len(killed) < 3:  # twice more, before it can compute
        pid = process_of(served).pid
        if pid is not None and pid not in killed:
            killed.add(pid)
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    wait_for_two(served)
    assert process_of(served).pid not in killed


@pytest.mark.slow  # waits for a process that does not answer
def test_what_a_process_had_that_does_not_answer_is_computed_by_others(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = served.ask("/translate", FIELDS).body
    alone = [event["choices"] for event in served.events("/v1/completions", {**STREAM, "stream": True})]
    monkeypatch.setattr(processes, "SECONDS_BETWEEN_PINGS", 0.1)
    monkeypatch.setattr(processes, "SECONDS_SILENT", 1.0)
    process = process_of(served)
    wait_for_two(served)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(served.ask, "/translate", FIELDS) for _ in range(3)]
        streamed = pool.submit(served.events, "/v1/completions", {**STREAM, "stream": True})
        assert [one.result().body for one in asked] == [before] * 3
        assert text_of(streamed.result()) == text_of([{"choices": choices} for choices in alone])
    wait_for_two(served)
    assert process.pid != pid


def text_of(events: list[dict[str, object]]) -> list[str]:
    """The text of every choice."""
    found = [""] * 6
    for event in events:
        choices = event["choices"]
        assert isinstance(choices, list)
        found[choices[0]["index"]] += choices[0]["text"]
    return found


@pytest.mark.slow
def test_what_another_process_refuses_is_refused_as_here(served: Served, folder: Path) -> None:
    wait_for_two(served)
    fields = {"model": "gpt", "prompt": ["The cat"] * 8, "max_tokens": 0, "echo": True, "logprobs": 2}
    file = folder / "model.safetensors"
    before = file.stat()
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1))  # as after an overwrite
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda _: served.ask("/v1/completions", fields), range(8))]
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert {one.status for one in found} == {503}
    assert {one.body["error"]["message"].partition(":")[0] for one in found} == {
        "the files of gpt were changed after it was opened"
    }


def test_a_process_that_fails_is_started_again(served: Served, capfd: pytest.CaptureFixture[str]) -> None:
    wait_for_two(served)
    process = process_of(served)
    pid = process.pid
    process._send(process._helper, "no message of ours")
    until = time.monotonic() + 120
    while process.pid == pid:
        assert time.monotonic() < until, "it is believed to be there"
        time.sleep(0.05)
    wait_for_two(served)
    assert served.ask("/translate", FIELDS).status == 200
    assert f"process {pid} has failed: ValueError" in capfd.readouterr().err


def test_a_signal_to_all_processes_ends_none_but_the_first(served: Served) -> None:
    wait_for_two(served)
    pid = process_of(served).pid
    assert pid is not None
    for number in (signal.SIGHUP, signal.SIGTERM):
        os.kill(pid, number)
    assert served.ask("/v1/completions", {**STREAM, "prompt": ["a"] * 20}).status == 200
    assert process_of(served).pid == pid


@pytest.mark.slow
def test_few_places_to_wait_are_few_for_all_processes_together(folder: Path) -> None:
    fields = {**STREAM, "prompt": ["The cat", "a"]}
    models = {"gpt": load(folder)}
    limits = Limits(max_waiting=2, seconds=20.0)
    with torch_threads(1), Served(models, limits, num_processes=2) as served, ThreadPoolExecutor(12) as pool:
        pid = process_of(served).pid
        statuses = {*pool.map(lambda _: served.ask("/v1/completions", fields).status, range(120))}
        assert statuses <= {200, 429}
        assert process_of(served).pid == pid


@pytest.mark.slow
def test_a_server_that_is_told_to_stop_while_it_opens_its_models_anew_ends(folder: Path) -> None:
    with ServedCommand(f"gpt={folder}", "--workers", 2) as served:
        served.process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(100) == 0


class Waiting(QueuedJob):
    def compute(self, items: object) -> list[object]:
        raise NotImplementedError


def test_an_item_that_was_lost_twice_is_refused(served: Served) -> None:
    process = process_of(served)
    item = Item(Waiting(), "a")
    item.result.set_running_or_notify_cancel()
    item.was_lost = True
    process._items[-1] = item
    process._compute_elsewhere([-1])
    with pytest.raises(RequestError, match="send it again"):
        item.result.result(1)


@pytest.mark.slow
def test_processes_share_the_work_and_one_that_dies_is_replaced(
    served: Served, translator: Model, language_model: Model, capfd: pytest.CaptureFixture[str]
) -> None:
    wait_for_two(served)
    process, fields = process_of(served), {**FIELDS, "alternatives": 1}
    assert [model["batch_invariant"] for model in served.ask("/health").body["models"]] == [True, True]
    pid, before = process.pid, served.ask("/translate", fields).body
    assert before["translatedText"] == [one.text for one in translator.translate(FIELDS["q"])]
    refused = served.ask("/translate", {**fields, "glossary": {"a": ""}})
    assert refused.body["error"].startswith("glossary: 'a'")
    own = language_model.generate("The cat", max_new_tokens=40, temperature=1.0, seed=3)
    assert text_of(served.events("/v1/completions", {**STREAM, "stream": True})) == [own.text] * 6
    serving.abort(served.port, Random(0), ({**fields, "q": FIELDS["q"][:4]}, None))
    running = served.state.models["en-de"].queue.lanes[1].running
    while served.state.num_requests or running:  # a client that goes away leaves nothing behind
        time.sleep(0.01)
    os.kill(pid, signal.SIGSTOP)
    with ThreadPoolExecutor() as pool:
        lost = pool.submit(served.ask, "/translate", fields)
        while len(running) < 4:
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        assert (lost.result().status, lost.result().body) == (200, before)  # computed once more
    assert served.ask("/translate", fields).body == before
    wait_for_two(served)
    assert process.pid != pid
    assert served.ask("/translate", fields).body == before
    assert f'{{"error": "process {pid} has ended (-9)"}}' in capfd.readouterr().err
