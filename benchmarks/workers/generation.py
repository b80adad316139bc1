"""What the workers of the generation table share: prompts of random tokens in, greedy tokens out.

A request is `{"batch": 32, "prompt": 128, "new": 128}`. With one new token it is the reading of the prompts,
and the tokens counted are theirs; otherwise those that were made. The answer has `row`, the tokens made for
the first prompt, to be compared.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.workers.protocol import Answer, Options, Prepared, peak_rss_mb


class Engine(ABC):
    """Somebody who continues texts."""

    @abstractmethod
    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """As many new tokens for every prompt, the most probable ones, without an end."""


def prompts_of(vocab_size: int, batch: int, length: int) -> list[list[int]]:
    """The same random tokens for everybody."""
    draw = torch.Generator().manual_seed(batch)
    return torch.randint(10, min(1000, vocab_size), (batch, length), generator=draw).tolist()


def prepare(options: Options, build: Callable[[Options], Engine]) -> Prepared:
    """Load the engine, and say what that took: the peak of memory beyond that of its libraries."""
    torch.set_num_threads(options["threads"])
    before, started = _resident_mb(), time.perf_counter()
    engine = build(options)
    about = {
        "loading_seconds": round(time.perf_counter() - started, 2),
        "loading_mb": round(peak_rss_mb() - before, 1),
        "file_mb": round(options["file_bytes"] / 2**20, 1),
    }
    warmed_up: set[tuple[int, int]] = set()

    def work(request: Options) -> Answer:
        batch, length, new = request["batch"], request["prompt"], request["new"]
        prompts = prompts_of(options["vocab_size"], batch, length)
        if (batch, new) not in warmed_up:
            engine.generate(prompts, min(new, 4) if not options.get("compiled") else new)
            warmed_up.add((batch, new))
        started = time.perf_counter()
        found = engine.generate(prompts, new)
        seconds = time.perf_counter() - started
        if {len(row) for row in found} - {0} not in ({new}, set()):
            raise ValueError(f"rows of {sorted({len(row) for row in found})} tokens, not {new}")
        return {"seconds": seconds, "tokens": batch * (length if new == 1 else new), "row": found[0]}

    return about, work


def _resident_mb() -> float:
    status = Path("/proc/self/status")
    if not status.exists():
        return 0.0
    (resident_kb,) = (line.split()[1] for line in status.read_text().splitlines() if "VmRSS" in line)
    return int(resident_kb) / 2**10
