"""What training does with the machine: batches made ahead, signals, compiled blocks, rates and waiting.

`torch.compile` generates kernels that join what lies between the matrix products, for every shape of batch
at once. That takes about a minute at the start. On the CPUs measured it does not win
(docs/contributing/log/); on GPUs, where launching small kernels costs most, it is meant to.
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
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from triptych.errors import UsageError
from triptych.threads import Ahead
from triptych.training.processes import World

T = TypeVar("T")


def ahead(items: Iterable[T], depth: int = 2) -> Generator[T, None, None]:
    """The items in their order, made in a thread of their own up to `depth` ahead of their use.

    The thread lives from the first item asked for until the last one is taken, an error, or `close`, which
    waits for the item being made. Close it (`contextlib.closing`) if you may stop before the end.
    """
    made = Ahead(items, depth)
    try:
        yield from made
    finally:
        made.close()


@final
class StopRequest:
    """While entered, notes the first signal; a second one of either kind interrupts at once."""

    def __init__(self, say: Callable[[str], None] = lambda message: None) -> None:
        self.signal_number: int | None = None
        self._say = say
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is not threading.main_thread():
            return self  # Python hands signals to the main thread alone
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
        with suppress(RuntimeError):  # the signal came while a line was printed
            self._say("stopping after this step, then saving; a second Ctrl-C ends at once")


def compile_blocks(blocks: Iterable[nn.Module], device: torch.device, backend: str = "inductor") -> None:
    """Compile each block in place; weights and their names stay."""
    on_cpu = device.type == "cpu"
    if backend == "inductor" and on_cpu and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        raise UsageError(
            "training.compile needs a C++ compiler on a CPU (g++ or clang++): install one or leave it"
        )
    for block in blocks:
        block.compile(dynamic=True, backend=backend)
    torch._dynamo.config.cache_size_limit = max(torch._dynamo.config.cache_size_limit, 64)


@contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Make a GPU add up gradients in the same order every time, as a CPU does."""
    if device.type != "cuda":
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it torch refuses products
    debugging: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), debugging.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    debugging.fill_uninitialized_memory = False  # which takes time
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        debugging.fill_uninitialized_memory = before[1]


@contextmanager
def in_any_order() -> Iterator[None]:
    """Let a GPU write to places that all differ as it likes: in order, `index_put_` takes ten launches."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


_aten = torch.ops.aten
# Sizes of the matrices that are multiplied: enough for the full rate.
_SIZES = {"cpu": (192, 768), "cuda": (8192,)}
_TIMES = 4
_LONGEST = 0.2  # seconds


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a product of two square matrices, the best of four."""
    rate = 0.0
    for size in _SIZES.get(device.type, (1024,)):
        operations = 2 * size**3
        if rate and _TIMES * operations / rate > _LONGEST:  # what a processor has no instructions for
            break
        # A GPU multiplies equal numbers faster.
        one = torch.linspace(-1, 1, size * size, device=device).view(size, size).to(dtype)
        seconds = []
        for _ in range(_TIMES):
            started = time.perf_counter()
            product = one @ one
            product[0, 0].item()  # waits for a GPU
            seconds.append(time.perf_counter() - started)
        rate = operations / max(min(seconds), 1e-9)
    return rate


def count_operations(work: Callable[[], None]) -> int:
    """Floating-point operations of the matrix products and the attention in a piece of work."""
    with FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
        work()
    return int(counter.get_total_flops())


def _product_flops(own: Sequence[int], left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    """Of `own += left @ right`."""
    return 2 * left[0] * left[1] * right[1]


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any
) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _backward_flops(gradient: Sequence[int], *given: Any, **_: Any) -> int:
    return int(sdpa_backward_flop_count(gradient, *given[:3]))  # type: ignore[no-untyped-call]


# What torch's counter does not know: products in place, and the attention kernels of a CPU.
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
        """The items; the time until each comes is that of waiting for data."""
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
        """A figure of each process by its rank, since the last call; nothing of one process.

        `ranks_tokens_per_second` is of its own part of the batches; `ranks_waiting_for_data` and
        `ranks_waiting_for_others` are shares of its time. Gradients are exchanged while others are computed,
        which counts as computing. All processes must call it.
        """
        if self._world.size == 1:
            return {}
        seconds = max(self._seconds, 1e-9)
        own = [self._tokens / seconds, self._for_data / seconds, self._for_others / seconds]
        self._forget()
        of_ranks = self._world.gathered(own)
        names = "ranks_tokens_per_second", "ranks_waiting_for_data", "ranks_waiting_for_others"
        return {name: [round(of[i], 4) for of in of_ranks] for i, name in enumerate(names)}
