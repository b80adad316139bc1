"""A server under load loses no request, and its answers are the ones that it gives alone.

    python benchmarks/serving.py ../shared/checkpoints/marian-multi30k \\
        ../shared/data/multi30k/test_2016_flickr.en

Starts `triptych serve` with one process and with two, and asks each for each line alone. Then 64 clients
ask for lines at random, a quarter of the time by themselves, and then next to clients that abort,
disconnect, send bodies of 10 MB, and send their request byte by byte. Exits with 1 if a request is lost or an
answer is another than alone. The same lines are translated in the same run by `triptych translate` and, as
LibreTranslate does it, one after another, with triptych and CTranslate2. Prints a table in Markdown;
processor time says more than lines/s on a busy machine.
"""

import argparse
import contextlib
import http.client
import json
import os
import random
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(_ROOT))  # the benchmarks are not installed

from benchmarks.harness.machine import describe_code, describe_machine  # noqa: E402

_HUGE_BYTES, _LINES_TO_ABORT = 10_000_000, 32
_SECONDS_BETWEEN_BYTES, _SECONDS_BETWEEN_NEIGHBOURS = 0.02, 0.05
# Between two looks at the server's memory; of a short run, this share of it.
_SECONDS_BETWEEN_SAMPLES, _SHARE_BETWEEN_SAMPLES = 60.0, 0.1


@dataclass
class Rate:
    """How fast lines were translated.

    Attributes:
        lines: per second.
        cpu_ms: processor time of all processes, for a line; None where it was not measured.
        latencies: of every request that was answered, in seconds.
    """

    lines: float
    cpu_ms: float | None = None
    latencies: Sequence[float] = ()

    def latency_ms(self, share: float) -> str:
        """The latency that this share of the requests did not exceed."""
        if not self.latencies:
            return ""
        at = min(int(share * len(self.latencies)), len(self.latencies) - 1)
        return f"{1000 * sorted(self.latencies)[at]:.0f}"


@dataclass
class Load:
    """What clients saw.

    Attributes:
        seconds: of the load, until the last answer.
        latencies: of every request that was answered, in seconds.
        num_texts: texts in answers.
        faults: requests that were lost, and answers that differ from the ones alone, one line for each.
        neighbours: what became of the requests of each kind of neighbour.
        memory_bytes: resident memory of the server, now and then.
    """

    seconds: float = 0.0
    latencies: list[float] = field(default_factory=list)
    num_texts: int = 0
    faults: list[str] = field(default_factory=list)
    neighbours: Counter[str] = field(default_factory=Counter)
    memory_bytes: list[int] = field(default_factory=list)


def ask(connection: http.client.HTTPConnection, fields: dict[str, Any]) -> tuple[int, Any]:
    connection.request("POST", "/translate", json.dumps(fields), {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def load(
    port: int,
    requests: Sequence[tuple[dict[str, Any], Any]],
    seconds: float,
    *,
    clients: int = 64,
    neighbours: bool = True,
    memory: Callable[[], int] | None = None,
) -> Load:
    """Clients that draw requests, each with the answer that it gets alone, for a number of seconds."""
    seen, stop, guard = Load(), threading.Event(), threading.Lock()

    def client(number: int) -> None:
        draw = random.Random(number)
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        while not stop.is_set():
            fields, expected = draw.choice(requests)
            started = time.perf_counter()
            try:
                status, body = ask(connection, fields)
                fault = None if (status, body) == (200, expected) else f"{status} {body}"
            except (OSError, http.client.HTTPException, ValueError) as error:
                connection.close()
                fault = f"lost: {error!r}"
            with guard:
                seen.latencies.append(time.perf_counter() - started)
                seen.num_texts += len(fields["q"])
                seen.faults += [] if fault is None else [f"{fields['q']}: {fault}"]
        connection.close()

    def neighbour(kind: Callable[[int, random.Random, Any], str]) -> None:
        draw = random.Random(kind.__name__)
        while not stop.wait(_SECONDS_BETWEEN_NEIGHBOURS):
            try:
                found = kind(port, draw, draw.choice(requests))
            except OSError as error:
                found = type(error).__name__
            with guard:
                seen.neighbours[f"{kind.__name__}: {found}"] += 1
                if found.startswith("wrong"):
                    seen.faults.append(f"{kind.__name__}: {found}")

    threads = [threading.Thread(target=client, args=(number,)) for number in range(clients)]
    if neighbours:
        threads += [threading.Thread(target=neighbour, args=(kind,)) for kind in _NEIGHBOURS]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    between = min(_SECONDS_BETWEEN_SAMPLES, _SHARE_BETWEEN_SAMPLES * seconds)
    while (left := started + seconds - time.perf_counter()) > 0:
        time.sleep(min(between, left))
        seen.memory_bytes += [] if memory is None else [memory()]
    stop.set()
    for thread in threads:
        thread.join()
    seen.seconds = time.perf_counter() - started
    return seen


def _head(length: int) -> bytes:
    kind = "Host: localhost\r\nContent-Type: application/json\r\nConnection: close"
    return f"POST /translate HTTP/1.1\r\n{kind}\r\nContent-Length: {length}\r\n\r\n".encode()


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.status, response.read()


def abort(port: int, draw: random.Random, request: tuple[dict[str, Any], Any]) -> str:
    """Ask for much, and reset the connection while it is computed."""
    fields = {**request[0], "q": request[0]["q"] * _LINES_TO_ABORT}
    body = json.dumps(fields).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(_head(len(body)) + body)
        time.sleep(draw.random() / 10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "gone"


def disconnect(port: int, draw: random.Random, request: tuple[dict[str, Any], Any]) -> str:
    """Send a part of a request, and go away."""
    body = json.dumps(request[0]).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall((_head(len(body)) + body)[: draw.randrange(1, len(body))])
    return "gone"


def send_much(port: int, draw: random.Random, request: tuple[dict[str, Any], Any]) -> str:
    """Send 10 MB. The server answers at its limit and closes, so that the answer may not arrive."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        with contextlib.suppress(ConnectionError):
            connection.sendall(_head(_HUGE_BYTES) + b"x" * _HUGE_BYTES)
        try:
            status, _ = _answer(connection)
        except (ConnectionError, http.client.HTTPException):
            return "closed"
    return "413" if status == 413 else f"wrong: {status}"


def drip(port: int, draw: random.Random, request: tuple[dict[str, Any], Any]) -> str:
    """Send a request byte by byte; it is answered as the others."""
    fields, expected = request
    body = json.dumps(fields).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(_head(len(body)))
        for place in range(len(body)):
            time.sleep(_SECONDS_BETWEEN_BYTES)
            connection.sendall(body[place : place + 1])
        status, found = _answer(connection)
    return "200" if (status, json.loads(found)) == (200, expected) else f"wrong: {status} {found.decode()}"


_NEIGHBOURS = (abort, disconnect, send_much, drip)


@contextlib.contextmanager
def served(model: str, options: Sequence[str], log: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """`triptych serve` in a process of its own, and its port."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "triptych", "serve", f"aa-bb={model}", "--port", str(port), *options]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file, env={**os.environ, "TRIPTYCH_API_KEY": ""})
    try:
        while b"serving aa-bb at" not in log.read_bytes():
            if process.poll() is not None:
                raise SystemExit(log.read_text(encoding="utf-8"))
            time.sleep(0.1)
        yield process, port
    finally:
        process.terminate()
        process.wait(60)


def family_of(process: int) -> list[int]:
    """A process and those that it started."""
    started = Path(f"/proc/{process}/task/{process}/children").read_text(encoding="utf-8").split()
    return [process, *map(int, started)]


def resident_bytes(process: int) -> int:
    """Of all its processes; what they share is counted in each."""
    found = [Path(f"/proc/{one}/status").read_text(encoding="utf-8") for one in family_of(process)]
    lines = [line for status in found for line in status.splitlines()]
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def processor_seconds(process: int) -> float:
    found = [Path(f"/proc/{one}/stat").read_text(encoding="utf-8") for one in family_of(process)]
    fields = [one.rpartition(")")[2].split() for one in found]
    return sum(int(of[11]) + int(of[12]) for of in fields) / os.sysconf("SC_CLK_TCK")  # user and system


def translated(model: str, source: Path, options: Sequence[str]) -> tuple[list[str], Rate]:
    """What `triptych translate` gives, and how fast after the first batch."""
    command = [sys.executable, "-m", "triptych", "translate", model, str(source), *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    found, times = list[str](), list[float]()
    for line in process.stdout:
        found.append(line.removesuffix("\n"))
        times.append(time.perf_counter())
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed")
    first = min(16, len(found) // 2)  # lines of the first batch
    return found, Rate((len(found) - first) / (times[-1] - times[first - 1]))


def in_process(model: str, engine: Any, lines: Sequence[str], *, together: bool) -> Rate | str:
    """One call for all lines, or as LibreTranslate does it one for each; or why there is none."""
    import triptych

    try:
        translator = triptych.load(model, engine=engine).translator()
        translator.translate(lines[0])
    except triptych.TriptychError as error:
        return str(error)
    began, latencies = time.process_time(), list[float]()
    for part in [lines] if together else lines:
        started = time.perf_counter()
        translator.translate(part)
        latencies.append(time.perf_counter() - started)
    cpu_ms = 1000 * (time.process_time() - began) / len(lines)
    return Rate(len(lines) / sum(latencies), cpu_ms, () if together else latencies)


def measure(
    process: int,
    port: int,
    name: str,
    asked: argparse.Namespace,
    lines: Sequence[str],
    texts: Sequence[str],
    rates: dict[str, Rate | str],
    loads: list[Load],
    faults: list[str],
) -> list[int]:
    """Put a server under load: adds its rates, what clients saw and what was wrong; returns its memory."""
    memory = [resident_bytes(process)]
    connection = http.client.HTTPConnection("127.0.0.1", port)
    groups = [lines[place : place + asked.texts] for place in range(0, len(lines), asked.texts)]
    requests, latencies = list[tuple[dict[str, Any], Any]](), list[float]()
    began = processor_seconds(process)
    for group in groups:
        fields = {"q": group, "source": "aa", "target": "bb", "details": True}
        started = time.perf_counter()
        status, body = ask(connection, fields)
        latencies.append(time.perf_counter() - started)
        assert status == 200, body
        requests.append((fields, body))
    cpu_ms = 1000 * (processor_seconds(process) - began) / len(lines)
    rates[f"{name}, one client"] = Rate(len(lines) / sum(latencies), cpu_ms, latencies)
    if [text for _, body in requests for text in body["translatedText"]] != texts:
        faults.append(f"{name} translates otherwise than `triptych translate`")
    for neighbours, share in (("", 0.25), (" and neighbours", 0.75)):
        began = processor_seconds(process)
        seen = load(
            port,
            requests,
            share * asked.seconds,
            clients=asked.clients,
            neighbours=bool(neighbours),
            memory=lambda: resident_bytes(process),
        )
        cpu_ms = 1000 * (processor_seconds(process) - began) / seen.num_texts
        rates[f"{name}, {asked.clients} clients{neighbours}"] = Rate(
            seen.num_texts / seen.seconds, cpu_ms, seen.latencies
        )
        loads.append(seen)
        memory += seen.memory_bytes
        faults += seen.faults
    return memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("source", type=Path, help="a file of lines")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the load on each server")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2], help="of each server")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--lines", type=int, default=1000, help="lines of the file that are used")
    parser.add_argument("--texts", type=int, default=1, help="texts in a request")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    lines = [line for line in asked.source.read_text(encoding="utf-8").splitlines() if line][: asked.lines]
    options = ("--precision", asked.precision)
    rates: dict[str, Rate | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        source, log = Path(folder, "lines"), Path(folder, "log")
        source.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        texts, whole = translated(asked.model, source, options)
        rates["`triptych translate`"] = whole
        one_process = (*options, "--workers", "1")
        _, rates["`triptych translate --workers 1`"] = translated(asked.model, source, one_process)
        for engine in ("triptych", "ctranslate2"):
            for how, together in (("one call", True), ("one after another", False)):
                rates[f"{how}, {engine}"] = in_process(asked.model, engine, lines, together=together)
        loads, memory, faults = list[Load](), dict[str, list[int]](), list[str]()
        for workers in map(str, asked.workers):
            name, with_workers = f"`triptych serve --workers {workers}`", (*options, "--workers", workers)
            with served(asked.model, with_workers, log) as (process, port):
                memory[workers] = measure(process.pid, port, name, asked, lines, texts, rates, loads, faults)
    print(f"{len(lines)} lines, {asked.texts} in a request, {asked.precision}, {asked.seconds:g} seconds\n")
    print("| | lines/s | of `triptych translate` | CPU ms a line | p50 ms | p99 ms |")
    print("|---|---:|---:|---:|---:|---:|")
    for name, rate in rates.items():
        if isinstance(rate, str):
            print(f"| {name} | {rate} | | | | |")
            continue
        of_whole = f"{rate.lines / whole.lines:.2f}"
        cpu = "" if rate.cpu_ms is None else f"{rate.cpu_ms:.1f}"
        latencies = f"{rate.latency_ms(0.5)} | {rate.latency_ms(0.99)}"
        print(f"| {name} | {rate.lines:.1f} | {of_whole} | {cpu} | {latencies} |")
    between = min(_SECONDS_BETWEEN_SAMPLES, _SHARE_BETWEEN_SAMPLES * asked.seconds)
    print(f"\nMemory when ready and then about every {between:g} seconds, MiB:")
    for workers, sizes in memory.items():
        print(f"--workers {workers}: " + " ".join(str(size >> 20) for size in sizes))
    for what, count in sorted(sum((seen.neighbours for seen in loads), Counter()).items()):
        print(f"neighbour {what}: {count}")
    print(f"{sum(len(seen.latencies) for seen in loads)} requests, {len(faults)} lost or different")
    for fault in faults[:10]:
        print(f"  {fault[:300]}")
    if asked.json:
        record = {
            "rates": rates,
            "loads": [vars(seen) for seen in loads],
            "memory": memory,
            "asked": vars(asked),
        }
        told = {**record, "machine": describe_machine(), "code": describe_code(_ROOT)}
        asked.json.write_text(json.dumps(told, indent=2, default=vars_or_text) + "\n", encoding="utf-8")
    return bool(faults)


def vars_or_text(value: Any) -> Any:
    return vars(value) if isinstance(value, Rate) else str(value)


if __name__ == "__main__":
    sys.exit(main())
