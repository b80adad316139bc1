"""What the workers of the decoding table share: lines in, lines and counts out.

A request is `{"beam": 4, "batch": 32}`; the answer has seconds, output tokens and BLEU. The clock runs
from text to text, pieces included. Tokens are those of the output, its end of sentence with them.
"""

import importlib
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, final

from benchmarks.workers.protocol import Answer, Options, Prepared
from triptych.running.decoding import measure_bleu

_WARM_UP_LINES = 32


class Output(NamedTuple):
    """A translation, and the tokens that were made for it, the end of sentence among them."""

    text: str
    tokens: int


# Translates a batch of lines with a beam.
TranslateBatch = Callable[[Sequence[str], int], list[Output]]


class Engine(ABC):
    """Somebody who translates a text."""

    def get_ready(self, beam: int, batch: int) -> bool:
        """Prepare for a request before the clock starts; whether anything new must be warmed up."""
        return False

    @abstractmethod
    def translate(self, lines: Sequence[str], beam: int, batch: int) -> list[Output]:
        """Lines in their order; `batch` sentences at a time."""


@final
class Batched(Engine):
    """An engine of one that translates a batch: here, or in processes of their own.

    Lines are sorted by length and cut into batches; free processes take the next one.

    Args:
        module: a worker whose `load(options)` gives a `TranslateBatch`.
        options: with `processes`: how many; 1 is this one.
    """

    def __init__(self, module: str, options: Options) -> None:
        self.pool: ProcessPoolExecutor | None = None
        if options["processes"] == 1:
            self.translate_batch: TranslateBatch = importlib.import_module(module).load(options)
            return
        self.pool = ProcessPoolExecutor(
            options["processes"],
            mp_context=multiprocessing.get_context("spawn"),
            initializer=_load_here,
            initargs=(module, options),
        )

    def translate(self, lines: Sequence[str], beam: int, batch: int) -> list[Output]:
        """Lines in their order."""
        order = sorted(range(len(lines)), key=lambda i: len(lines[i]), reverse=True)
        places = [order[start : start + batch] for start in range(0, len(order), batch)]
        batches = [[lines[i] for i in some] for some in places]
        if self.pool is None:
            found = [self.translate_batch(some, beam) for some in batches]
        else:
            found = [*self.pool.map(_translate_here, batches, [beam] * len(batches))]
        outputs: dict[int, Output] = {}
        for some, translated in zip(places, found, strict=True):
            outputs |= zip(some, translated, strict=True)
        return [outputs[i] for i in range(len(lines))]


_here: dict[str, TranslateBatch] = {}


def _load_here(module: str, options: Options) -> None:
    _here["engine"] = importlib.import_module(module).load(options)


def _translate_here(lines: Sequence[str], beam: int) -> list[Output]:
    return _here["engine"](lines, beam)


def prepare(options: Options, build: Callable[[Options], Engine]) -> Prepared:
    """Read the text, load the engine, warm it up."""
    lines = _lines(options["source"])[: options["num_lines"]]
    references = _lines(options["target"])[: options["num_lines"]]
    started = time.perf_counter()
    engine = build(options)
    engine.get_ready(4, 8)
    engine.translate(lines[:_WARM_UP_LINES], 4, 8)
    about = {"prepared_seconds": round(time.perf_counter() - started, 2)}

    def work(request: Options) -> Answer:
        beam, batch = request["beam"], request["batch"]
        if engine.get_ready(beam, batch):
            engine.translate(lines[:_WARM_UP_LINES], beam, batch)
        started = time.perf_counter()
        outputs = engine.translate(lines, beam, batch)
        seconds = time.perf_counter() - started
        return {
            "seconds": seconds,
            "tokens": sum(output.tokens for output in outputs),
            "bleu": measure_bleu([output.text for output in outputs], references),
            "all_processes_peak_rss_mb": _peak_of_all(),
        }

    return about, work


def _lines(path: str) -> list[str]:
    return Path(path).read_text(encoding="utf-8").splitlines()


def _peak_of_all() -> float | None:
    """The peaks of this process and its children together, in MiB; None where /proc does not say."""
    own = os.getpid()
    try:
        children = Path(f"/proc/{own}/task/{own}/children").read_text(encoding="ascii").split()
        texts = [Path(f"/proc/{pid}/status").read_text(encoding="utf-8") for pid in (own, *children)]
    except OSError:
        return None
    peaks: list[Any] = [line.split()[1] for text in texts for line in text.splitlines() if "VmHWM" in line]
    return round(sum(map(int, peaks)) / 2**10, 1)
