"""Machine-level parts of training: prefetching, signals, compiled blocks, peak rates and throughput.

`torch.compile` generates kernels that fuse the operations between matrix products, for every shape of batch
at once. Compilation needs about a minute at the start. It is not faster on the CPUs measured
(docs/contributing/log/). It is meant for GPUs, where launching small kernels costs most.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar, final

import torch
from torch import nn
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

from triptych.errors import UsageError
from triptych.processes import World
from triptych.threads import Ahead

T = TypeVar("T")


def ahead(items: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """Yield items in order; a thread makes them up to `depth` items ahead of their use.

    The thread starts with the first item requested, and ends with the last item, an error, or `close`.
    `close` waits for the item in progress. Use `contextlib.closing` if you may stop before the end.
    """
    made = Ahead(items, depth)
    try:
        yield from made
    finally:
        made.close()


@final
class StopRequest:
    """Context manager for recording the first SIGINT or SIGTERM; a second signal interrupts at once."""

    def __init__(self, say: Callable[[str], None] = lambda message: None) -> None:
        self.signal_number: int | None = None
        self._say = say
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread can set signal handlers
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *raised: Any) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number is not None:
            raise KeyboardInterrupt
        self.signal_number = number
        with suppress(RuntimeError):  # the signal interrupted a print
            self._say(
                "stopping after this step, then saving; a second Ctrl-C ends at once"
            )


def compile_blocks(
    blocks: Iterable[nn.Module], device: torch.device, backend: str = "inductor"
) -> None:
    """Compile each block in-place; weights and their names stay unchanged."""
    on_cpu = device.type == "cpu"
    if (
        backend == "inductor"
        and on_cpu
        and not any(map(shutil.which, ("g++", "clang++", "c++")))
    ):
        raise UsageError(
            "training.compile needs a C++ compiler on a CPU (g++ or clang++): install one or leave it"
        )
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
    torch._dynamo.config.cache_size_limit = max(
        torch._dynamo.config.cache_size_limit, 64
    )


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Make a GPU sum gradients in a fixed order inside the block, like a CPU."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # without it torch refuses products
    debugging: Any = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        debugging.fill_uninitialized_memory,
    )
    torch.use_deterministic_algorithms(True)
    debugging.fill_uninitialized_memory = False  # filling takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        debugging.fill_uninitialized_memory = before[1]


@contextmanager
def in_any_order() -> Iterator[None]:
    """Allow a GPU to write distinct indices in any order; a fixed order costs `index_put_` ten launches."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


_aten = torch.ops.aten
# Sizes of the multiplied matrices, large enough for the full rate.
_SIZES = {"cpu": (192, 768), "cuda": (8192,)}
_TIMES = 4
_LONGEST = 0.2  # seconds


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the floating-point operations a second of a product of square matrices, best of four."""
    rate = 0.0
    for size in _SIZES.get(device.type, (1024,)):
        operations = 2 * size**3
        if (
            rate and _TIMES * operations / rate > _LONGEST
        ):  # a dtype without fast instructions
            break
        # Values differ because a GPU multiplies equal values faster.
        one = (
            torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)
        )
        seconds = []
        for _ in range(_TIMES):
            started = time.perf_counter()
            product = one @ one
            product[0, 0].item()  # waits for a GPU
            seconds.append(time.perf_counter() - started)
        rate = operations / max(min(seconds), 1e-9)
    return rate


def count_operations(work: Callable[[], None]) -> int:
    """Count the floating-point operations of matrix products and attention in `work`."""
    with FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
        work()
    return int(counter.get_total_flops())


def _product_flops(
    own: Sequence[int], left: Sequence[int], right: Sequence[int], **_: Any
) -> int:
    """Count the operations of `own += left @ right`."""
    return 2 * left[0] * left[1] * right[1]


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _backward_flops(gradient: Sequence[int], *given: Any, **_: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, *given[:3]))  # type: ignore[no-untyped-call]


# Operations unknown to torch's counter: in-place products, and the attention kernels of a CPU.
_MORE = {
    _aten.addmm_: _product_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_flops,
}


@final
class Throughput:
    """Tokens and times of this process since the last line of metrics."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._forget()

    def _forget(self) -> None:
        self._tokens = 0
        self._seconds = self._for_data = self._for_others = 0.0

    def taken(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and count the time until each item as waiting for data."""
        iterator = iter(items)
        end = object()
        while True:
            started = time.monotonic()
            item = next(iterator, end)
            waited = time.monotonic() - started
            if item is end:
                return
            self._for_data += waited
            self._seconds += waited
            yield item  # type: ignore[misc]

    def add(self, own_tokens: int, seconds: float, for_others: float) -> None:
        """Count an update."""
        self._tokens += own_tokens
        self._seconds += seconds
        self._for_others += for_others

    def figures(self) -> dict[str, list[float]]:
        """Return the figures of each process since the last call, by rank; empty for one process.

        `ranks_tokens_per_second` counts the process's part of the batches. `ranks_waiting_for_data` and
        `ranks_waiting_for_others` are shares of the process's time. The exchange of gradients overlaps with
        the backward pass and counts as computing. All processes must call this method.
        """
        if self._world.size == 1:
            return {}
        # Each call starts a new interval in all processes.
        seconds = max(self._seconds, 1e-9)
        own = [
            self._tokens / seconds,
            self._for_data / seconds,
            self._for_others / seconds,
        ]
        self._forget()
        of_ranks = self._world.gathered(own)
        names = (
            "ranks_tokens_per_second",
            "ranks_waiting_for_data",
            "ranks_waiting_for_others",
        )
        return {
            name: [round(of[i], 4) for of in of_ranks] for i, name in enumerate(names)
        }
