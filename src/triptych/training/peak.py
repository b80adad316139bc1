"""How fast this machine multiplies matrices, and how many products a training step needs."""

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import (
    FlopCounterMode,
    sdpa_backward_flop_count,
    sdpa_flop_count,
)

_aten = torch.ops.aten
# Of the matrices that are multiplied: large enough for the full rate, and over in some 50 ms on a CPU.
_SIZE = {"cpu": 768, "cuda": 8192}
_TIMES = 4


def measure_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second of a product of two square matrices, the best of four."""
    size = _SIZE.get(device.type, 1024)
    one = torch.ones(size, size, device=device, dtype=dtype)
    seconds = []
    for _ in range(_TIMES):
        started = time.perf_counter()
        product = one @ one
        product[0, 0].item()  # waits for a GPU
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / max(min(seconds), 1e-9)


def count_operations(work: Callable[[], None]) -> int:
    """Floating-point operations of the matrix products and the attention in a piece of work."""
    with FlopCounterMode(display=False, custom_mapping=_MORE) as counter:
        work()
    return int(counter.get_total_flops())


def _product(own: Sequence[int], left: Sequence[int], right: Sequence[int], **_: Any) -> int:
    """Of `own += left @ right`."""
    return 2 * left[0] * left[1] * right[1]


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))  # type: ignore[no-untyped-call]


def _attention_backward(
    gradient: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    *_: Any,
    **__: Any,
) -> int:
    return int(sdpa_backward_flop_count(gradient, query, key, value))  # type: ignore[no-untyped-call]


# What torch's counter does not know: products in place, and the attention kernels of a CPU.
_MORE = {
    _aten.addmm_: _product,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
