"""A standing attack on a server, beside honest clients whose answers, latency and streams are watched.

    python tests/serve/attack.py --seconds 600 --seed 7

Hostile bodies, options at the edges of their numbers, odd values of every field (`odd_values.py`), slow and
silent clients, streams that are left, killed and stopped processes, files that change, reloads, a log that is
closed. What is tried follows from the seed. It exits with 1 if an honest client got another answer than alone
or none, if anything answered 500, or if /health or memory are past their limits.
"""

import argparse
import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from serve.odd_values import REQUESTS, body_of, matrix, with_chat_template
from served import Answer, ServedCommand

KEY = "honest"
KEYED = {"Authorization": f"Bearer {KEY}"}
LINES = ["twelve", "three hundred and one", "seventy-five", "two thousand and six"]
EDGES = [0, 1, -1, 2, 0.5, 1e-9, 1e-300, 5e-324, 1e300, float("inf"), float("nan"), 1 << 31, 1 << 63, 1 << 70]
EDGES += [True, None, "", "1", "²", "☃", "\0", [], {}, [1], [[]], {"a": 1}]  # type: ignore[list-item]
NUMBERS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "n", "max_tokens", "stop")
NUMBERS += (
    "logprobs", "echo", "stream", "alternatives", "head", "layer", "query", "count", "layers", "heads",
)  # fmt: skip
MARKUP = ["<a ", "<b>", "</b>", "<![<!", "<![CDATA[", "<!--", "&#", "<p>", "x ", "<script>", "]]>", "<svg>"]
PATHS = ("/translate", "/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/v1/attend", "/v1/steps")
PATHS += (
    "/v1/inspect", "/v1/explore/view", "/v1/explore/row", "/v1/explore/head", "/detect", "/admin/nothing",
)  # fmt: skip


ODD_REQUESTS = [*matrix()]


@dataclass
class Seen:
    """What was seen during an attack."""

    faults: list[str] = field(default_factory=list)
    statuses: Counter[int] = field(default_factory=Counter)
    tried: Counter[str] = field(default_factory=Counter)
    honest: int = 0
    slowest_health: float = 0.0


class Attack:
    """An attack on a server that is running."""

    def __init__(self, served: ServedCommand, files: list[Path], seed: int) -> None:
        """`files` are the weights that the server has opened, which are changed."""
        self.served, self.files, self.seed = served, files, seed
        self.originals = {file: file.read_bytes() for file in files}
        self.seen, self.over = Seen(), threading.Event()
        self.changing = threading.Lock()
        self.alone = {json.dumps(asked): self.answer(*asked) for asked in self.honest_requests()}

    def honest_requests(self) -> list[tuple[str, dict[str, Any]]]:
        languages = {"source": "en", "target": "de"}
        completion = {"model": "gpt", "max_tokens": 12, "temperature": 1.0}
        found: list[tuple[str, dict[str, Any]]] = []
        for seed, line in enumerate(LINES):
            found.append(("/translate", {"q": [line, line[::-1]], **languages}))
            found.append(("/translate", {"q": f"<p>{line} <b>{line}</b></p>", "format": "html", **languages}))
            found.append(("/v1/completions", {**completion, "prompt": line, "seed": seed}))
            found.append(("/v1/completions", {**completion, "prompt": line, "seed": seed, "stream": True}))
        return found

    def answer(self, path: str, fields: dict[str, Any]) -> Any:
        """What an honest client gets; it tries again when it is told to."""
        for _ in range(100):
            if fields.get("stream"):
                events = self.served.events(path, fields, None, **KEYED)
                if events and all("choices" in event for event in events):
                    return "".join(event["choices"][0]["text"] for event in events)
                status, found = 0, events
            else:
                answered = self.served.ask(path, fields, **KEYED)
                status, found = answered.status, answered.body
                if status == 200:
                    return found.get("translatedText") or found["choices"]
            if status not in (429, 503):
                return f"status {status}: {found}"[:300]
            time.sleep(0.2)
        return "no answer in 100 tries"

    def run(self, seconds: float, attackers: int = 4, clients: int = 20) -> Seen:
        with ThreadPoolExecutor(attackers + clients + 1) as pool:
            running = [pool.submit(self._honest, number) for number in range(clients)]
            running += [pool.submit(self._attacker, number) for number in range(attackers)]
            running.append(pool.submit(self._watch_health))
            time.sleep(seconds)
            self.over.set()
            for one in running:
                one.result()
        return self.seen

    def _honest(self, number: int) -> None:
        draw = random.Random(f"honest {self.seed} {number}")
        requests = self.honest_requests()
        while not self.over.is_set():
            asked = draw.choice(requests)
            found = self.answer(*asked)
            self.seen.honest += 1
            if found != self.alone[json.dumps(asked)]:
                self.seen.faults.append(f"{asked}: {found!r:.300}")

    def _watch_health(self) -> None:
        while not self.over.is_set():
            started = time.monotonic()
            if (status := self.served.ask("/health").status) != 200:
                self.seen.faults.append(f"/health answers {status}")
            self.seen.slowest_health = max(self.seen.slowest_health, time.monotonic() - started)
            time.sleep(0.02)

    def _attacker(self, number: int) -> None:
        draw = random.Random(f"attacker {self.seed} {number}")
        kinds: list[Callable[[random.Random], None]] = [
            *(self.hostile_body, self.edges, self.markup, self.slow_body, self.silence, self.left_stream),
            *(self.many_looks, self.odd_head, self.kill_a_process, self.change_a_file, self.reload),
            self.odd_value,
        ]
        weights = [8, 12, 4, 2, 2, 4, 3, 4, 0.5, 0.5, 0.3, 12]
        while not self.over.is_set():
            (kind,) = draw.choices(kinds, weights)
            self.seen.tried[kind.__name__] += 1
            with suppress(OSError, ValueError):  # a connection that the server closes
                kind(draw)

    def noted(self, answer: Answer, what: object) -> None:
        self.seen.statuses[answer.status] += 1
        if answer.status >= 500 and answer.status != 503:
            self.seen.faults.append(f"{answer.status} for {what!r:.300}")

    def hostile_body(self, draw: random.Random) -> None:
        whole = json.dumps(
            {"model": "gpt", "prompt": "a", "q": "a", "source": "en", "target": "de", "text": "a"}
        )
        body = draw.choice(
            [whole, "[" * draw.randint(1, 5000), '{"a":' * 900, "\ud800", "null", "{", whole[:-9]]
        )
        raw = body.encode(errors="surrogatepass")
        place = draw.randrange(len(raw) + 1)
        raw = raw[:place] + draw.randbytes(draw.randint(0, 3)) + raw[place:]
        path = draw.choice(PATHS)
        self.noted(self.served.send(path, raw, **KEYED), (path, raw[:100]))

    def edges(self, draw: random.Random) -> None:
        fields: dict[str, Any] = {"model": "gpt", "prompt": "The cat", "text": "a cat", "max_tokens": 3}
        fields |= {"q": "twelve", "source": "en", "target": "de", "layer": 1, "head": 0, "temperature": 1.0}
        fields |= {name: draw.choice(EDGES) for name in draw.sample(NUMBERS, draw.randint(1, 3))}
        path = draw.choice(PATHS)
        self.noted(self.served.send(path, json.dumps(fields).encode(), **KEYED), (path, fields))

    def odd_value(self, draw: random.Random) -> None:
        path, name, value = draw.choice(ODD_REQUESTS)
        self.noted(self.served.send(path, body_of(path, name, value), **KEYED), (path, name, value))

    def markup(self, draw: random.Random) -> None:
        parts = draw.sample(MARKUP, draw.randint(1, 3))
        text = "".join(parts) * (draw.choice([10, 1000, 40_000]) // len("".join(parts)))
        fields = {"q": text, "source": "en", "target": "de", "format": "html"}
        self.noted(self.served.ask("/translate", fields, **KEYED), text[:100])

    def many_looks(self, draw: random.Random) -> None:
        text = draw.choice(["a ", "☃", "cat "]) * draw.choice([1, 20, 2000])
        path = draw.choice(("/v1/attend", "/v1/explore/view", "/v1/explore/gallery", "/v1/inspect"))
        self.noted(self.served.ask(path, {"model": "gpt", "text": text}, **KEYED), (path, text[:50]))

    def slow_body(self, draw: random.Random) -> None:
        with closing(socket.create_connection(("127.0.0.1", self.served.port), timeout=5)) as connection:
            key = draw.choice(["", f"Authorization: Bearer {KEY}\r\n", "Authorization: Bearer wrong\r\n"])
            head = f"POST /translate HTTP/1.1\r\nHost: localhost\r\n{key}Content-Length: 9999\r\n\r\n"
            connection.sendall(head.encode())
            for _ in range(draw.randint(1, 20)):
                connection.sendall(b"x")
                time.sleep(0.05)

    def silence(self, draw: random.Random) -> None:
        opened = []
        for _ in range(draw.randint(1, 60)):
            opened.append(socket.create_connection(("127.0.0.1", self.served.port), timeout=5))
            opened[-1].sendall(draw.choice([b"", b"GET /", b"\r\n"]))
        time.sleep(draw.random())
        for one in opened:
            one.close()

    def left_stream(self, draw: random.Random) -> None:
        fields = {"model": "gpt", "prompt": "a", "max_tokens": 60, "stream": True, "n": 4, "temperature": 1.0}
        body = json.dumps(fields)
        with closing(socket.create_connection(("127.0.0.1", self.served.port), timeout=5)) as connection:
            head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {KEY}\r\n"
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
            connection.recv(draw.choice([1, 500, 5000]))

    def odd_head(self, draw: random.Random) -> None:
        names = (
            "Host", "Origin", "Content-Type", "Authorization", "X-Request-ID", "Transfer-Encoding", "Expect",
        )  # fmt: skip
        values = (
            "evil.example",
            "null",
            "text/plain",
            "Bearer",
            "a\tb",
            "é",
            "application/json; charset=punycode",
        )
        headers = {draw.choice(names): draw.choice(values) for _ in range(2)}
        answer = self.served.send(draw.choice(PATHS), b"q=a&source=en&target=de", **headers)
        self.noted(answer, headers)

    def kill_a_process(self, draw: random.Random) -> None:
        pid = self.served.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        workers = [int(child) for child in children if "spawn_main" in command_of(child)]
        if workers:
            os.kill(draw.choice(workers), draw.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))

    def change_a_file(self, draw: random.Random) -> None:
        """Overwrite or cut off a file in place, and open it anew when it is whole again."""
        with self.changing:
            file = draw.choice(self.files)
            if draw.random() < 0.5:
                os.truncate(file, draw.choice([0, 100, 5000]))
            else:
                file.write_bytes(draw.randbytes(len(self.originals[file])))
            self.many_looks(draw)
            time.sleep(0.3)
            file.write_bytes(self.originals[file])
            # Until then whatever reads the files is told to try again.
            while self.served.ask("/admin/reload", {}, **KEYED).status != 200 and not self.over.is_set():
                time.sleep(0.2)

    def reload(self, draw: random.Random) -> None:
        if draw.random() < 0.5:
            self.served.process.send_signal(signal.SIGHUP)
        else:
            self.noted(self.served.ask("/admin/reload", {}, **KEYED), "/admin/reload")


def command_of(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def memory_of(pid: int) -> int:
    """Bytes of a process that are its own."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def attack(
    models: dict[str, Path],
    seconds: float,
    seed: int,
    *,
    slowest_health: float,
    most_memory: float | None = None,
    workers: int = 2,
) -> Seen:
    """Attack a server of copies of models; what was seen, with what is past its limits as faults.

    The models are "en-de", "gpt" and "bert": a translator, a language model and an encoder.
    """
    reader, writer = os.pipe()
    with TemporaryDirectory(prefix="triptych-attack-") as place, os.fdopen(writer, "w") as stderr:
        copies = {name: Path(shutil.copytree(path, Path(place, name))) for name, path in models.items()}
        with_chat_template(copies["gpt"])
        files = [file for folder in copies.values() for file in folder.glob("*.safetensors")]
        named = [f"{name}={folder}" for name, folder in copies.items()]
        options = ("--workers", workers, "--stranger-seconds", 2, "--body-seconds", 3)
        with ServedCommand(*named, *options, stderr=stderr, TRIPTYCH_API_KEY=KEY) as served:
            os.close(reader)  # whoever read the log has seen enough
            own = Attack(served, files, seed)
            for path, fields in REQUESTS.items():  # what is imported for them stays
                served.ask(path, fields, **KEYED)
            before = memory_of(served.process.pid)
            seen = own.run(seconds)
            if seen.slowest_health > slowest_health:
                seen.faults.append(f"/health took {seen.slowest_health:.2f} s")
            if served.process.poll() is not None:
                seen.faults.append(f"the server has ended ({served.process.returncode})")
            if most_memory is not None:
                time.sleep(75)  # what was kept is given back
                after = memory_of(served.process.pid)
                if after > most_memory * before:
                    seen.faults.append(f"memory grew from {before >> 20} to {after >> 20} MiB")
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    from small_checkpoints import bert_that_runs, gpt2_that_runs
    from small_models import train_small_run

    with TemporaryDirectory(prefix="triptych-attacked-") as place:
        run = train_small_run(Path(place, "run"))
        models = {"en-de": run, "gpt": gpt2_that_runs(Path(place, "gpt2"))}
        models["bert"] = bert_that_runs(Path(place, "bert"))
        seen = attack(models, given.seconds, given.seed, slowest_health=0.2, most_memory=1.1)
    print(f"{seen.honest:,} honest requests; slowest /health {seen.slowest_health:.3f} s")
    print(f"statuses: {dict(seen.statuses)}; tried: {dict(seen.tried)}")
    for fault in seen.faults[:50]:
        print(f"fault: {fault}")
    return 1 if seen.faults else 0


if __name__ == "__main__":
    sys.exit(main())
