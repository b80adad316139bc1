"""Timing of the parameterisations on this machine, compared with predictions from counts."""

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, final

import torch
from torch import Tensor

from triptych.core.attention import LayerCache, MultiHeadAttention
from triptych.progress import Progress
from triptych.seeing.costing.counting import DTYPES, CostReport, CostRow, CostSpec

# Sizes for compute-bound products (width) and memory-bound transfers (bytes), by device.
_GEMM_WIDTH = {"cpu": 1024, "cuda": 4096}
_COPIED_BYTES = {"cpu": 128 * 2**20, "cuda": 2**30}
_WARM_UP_ROUNDS = 2
_MIN_ROUNDS = 5
_MAX_ROUNDS = 1000
_RATE_ROUNDS = 5


@final
@dataclass(frozen=True)
class Machine:
    """The machine of the timings, with its peak rates."""

    device: str  # "cpu" or the name of the GPU
    threads: int  # number of CPU threads used by torch
    dtype: str  # dtype of weights and activations
    torch: str  # version of torch
    gemm_flops_per_second: float  # median rate of a large matrix product in the dtype
    bytes_per_second: float  # median rate of a large copy, reads plus writes

    def predicted_seconds(self, flops: float | int, moved_bytes: float | int) -> float:
        """Return the roofline prediction: the longer of the times for arithmetic and for memory."""
        return max(flops / self.gemm_flops_per_second, moved_bytes / self.bytes_per_second)


@final
@dataclass(frozen=True)
class Timing:
    """Durations of one pass."""

    seconds: float  # median over the rounds; `low_seconds` and `high_seconds` are the quartiles
    low_seconds: float
    high_seconds: float
    rounds: int  # number of timed rounds
    # Maximum of FLOPs over the rate of a large product and bytes over the rate of a large copy.
    predicted_seconds: float
    ratio: float  # measured over predicted


@final
@dataclass(frozen=True)
class TimedRow:
    """Times of one parameterisation for the whole batch."""

    name: str  # name of the parameterisation
    forward: Timing  # self-attention over `length` tokens, without gradients
    training: Timing  # forward and backward pass, with the gradient of the input
    decode: Timing  # one new token attending to `context` tokens


@final
@dataclass(frozen=True)
class TimingReport:
    """Times of the parameterisations, interleaved, and the machine."""

    machine: Machine
    rows: tuple[TimedRow, ...]

    def figures(self) -> dict[str, Any]:
        return asdict(self)


def measure_times(
    report: CostReport,
    *,
    seconds: float = 1.0,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
) -> TimingReport:
    """Time the layers of a report.

    Each round runs every parameterisation once, in their order (A B C A B C …), so that a temporary slowdown
    of the machine affects all of them.

    Args:
        report: counts of the layers to time.
        seconds: approximate time per cell (one parameterisation in one pass); at least 5 rounds per cell.
        device: device to run on.
        progress: called with the current pass, the number of finished passes and the total.
    """
    spec = report.spec
    device = torch.device(device)
    taken: list[list[list[float]]] = []
    # Fixed random values; rates are measured before and after the layers.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        rates = _Rates(spec, device)
        rates.take()
        choices = [spec.choice(row.name) for row in report.rows]
        made = [MultiHeadAttention(spec.d_model, spec.num_heads, choice) for choice in choices]
        layers = [layer.to(device=device, dtype=DTYPES[spec.dtype]) for layer in made]
        for number, (what, prepare) in enumerate(_PASSES.items()):
            calls = [prepare(layer, spec, device) for layer in layers]

            def tell(share: float, what: str = what, number: int = number) -> None:
                if progress is not None:
                    progress(what, number + share, len(_PASSES))

            taken.append(_in_turn(calls, seconds * len(calls), device, tell))
        rates.take()
    machine = rates.machine()
    rows = []
    for row, *samples in zip(report.rows, *taken, strict=True):
        predicted = (machine.predicted_seconds(*work) for work in _work_per_pass(row, spec))
        rows.append(TimedRow(row.name, *map(_timing, samples, predicted)))
    return TimingReport(machine, tuple(rows))


def _work_per_pass(row: CostRow, spec: CostSpec) -> tuple[tuple[int, int], ...]:
    """Return FLOPs and bytes of each pass for the whole batch."""
    tokens = spec.batch * spec.length
    return (
        (row.prefill_flops * tokens, row.prefill_bytes),
        # Both products in the backward pass read and write as much as the forward product.
        (row.training_flops * tokens, 3 * row.prefill_bytes),
        (row.decode_flops * spec.batch, row.decode_bytes),
    )


def _timing(samples: list[float], predicted_seconds: float) -> Timing:
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Timing(middle, low, high, len(samples), predicted_seconds, middle / predicted_seconds)


def _in_turn(
    calls: list[Callable[[], object]],
    budget_seconds: float,
    device: torch.device,
    tell: Callable[[float], None],
) -> list[list[float]]:
    """Time every call round by round, until the budget is spent."""
    # Warm-up rounds are not timed.
    for _ in range(_WARM_UP_ROUNDS):
        for call in calls:
            _seconds(call, device)
    samples: list[list[float]] = [[] for _ in calls]
    started = time.monotonic()
    for done in range(1, _MAX_ROUNDS + 1):
        for call, found in zip(calls, samples, strict=True):
            found.append(_seconds(call, device))
        spent = time.monotonic() - started
        share = min(done / _MIN_ROUNDS, spent / budget_seconds if budget_seconds else 1.0)
        tell(min(1.0, max(share, done / _MAX_ROUNDS)))
        if share >= 1:
            break
    return samples


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    _wait(device)
    started = time.perf_counter()
    call()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _forward(layer: MultiHeadAttention, spec: CostSpec, device: torch.device) -> Callable[[], object]:
    x = _input(spec, spec.length, device)

    def call() -> None:
        with torch.no_grad():
            layer(x)

    return call


def _training(layer: MultiHeadAttention, spec: CostSpec, device: torch.device) -> Callable[[], object]:
    x = _input(spec, spec.length, device).requires_grad_()
    wanted = [x, *layer.parameters()]
    gradient = torch.ones_like(x)
    # The absorbed route of `latent` does not use the bias of its keys.
    return lambda: torch.autograd.grad(layer(x).output, wanted, gradient, allow_unused=True)


def _decode(layer: MultiHeadAttention, spec: CostSpec, device: torch.device) -> Callable[[], object]:
    # A cache of context − 1 tokens with space for one more token: the first entries create an exactly full
    # store, and the last entry grows it.
    cache = LayerCache()
    before = spec.context - 1
    with torch.no_grad():
        for length in (before - 1, min(before, 1)):
            if length > 0:
                x = _input(spec, length, device)
                cache.append(layer.projections.project_kv(x, x))
    token = _input(spec, 1, device)

    def call() -> None:
        with torch.no_grad():
            # A copy shares the stores but counts its tokens separately: only the copy grows, and the next
            # step overwrites the added token.
            layer(token, cache=copy.copy(cache))

    return call


def _input(spec: CostSpec, length: int, device: torch.device) -> Tensor:
    return torch.randn(spec.batch, length, spec.d_model).to(device=device, dtype=DTYPES[spec.dtype])


_PASSES: dict[str, Callable[[MultiHeadAttention, CostSpec, torch.device], Callable[[], object]]] = {
    "forward": _forward,
    "forward + backward": _training,
    "decode step": _decode,
}


class _Rates:
    """The peak rates of the machine, measured before and after the layers."""

    def __init__(self, spec: CostSpec, device: torch.device) -> None:
        self.device = device
        self.dtype = spec.dtype
        width = _GEMM_WIDTH[device.type]
        numbers = _COPIED_BYTES[device.type] // spec.bytes_per_number
        self.flops = 2 * width**3
        self.moved = 2 * numbers * spec.bytes_per_number
        self.square = torch.randn(width, width).to(device=device, dtype=DTYPES[spec.dtype])
        self.source = torch.ones(numbers, dtype=DTYPES[spec.dtype], device=device)
        self.target = torch.empty_like(self.source)
        self.gemm_seconds: list[float] = []
        self.copy_seconds: list[float] = []

    def take(self) -> None:
        calls: list[Callable[[], object]] = [
            lambda: self.square @ self.square,
            lambda: self.target.copy_(self.source),
        ]
        for call in calls:
            _seconds(call, self.device)
        for _ in range(_RATE_ROUNDS):
            for call, found in zip(calls, (self.gemm_seconds, self.copy_seconds), strict=True):
                found.append(_seconds(call, self.device))

    def machine(self) -> Machine:
        on_cpu = self.device.type == "cpu"
        return Machine(
            device="cpu" if on_cpu else torch.cuda.get_device_name(self.device),
            threads=torch.get_num_threads(),
            dtype=self.dtype,
            torch=torch.__version__,
            gemm_flops_per_second=self.flops / statistics.median(self.gemm_seconds),
            bytes_per_second=self.moved / statistics.median(self.copy_seconds),
        )
