"""What the processor can do at best, with as many threads as it is told: products and memory."""

from collections.abc import Callable

import torch

from benchmarks.workers.in_turns import in_turns
from benchmarks.workers.protocol import Answer, Options, Prepared, serve

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NUMBERS = 64 * 2**20  # 256 MiB of float32: no cache holds it


def prepare(options: Options) -> Prepared:
    """Nothing is built before a request."""
    torch.set_num_threads(options["threads"])
    return {"threads": torch.get_num_threads()}, lambda request: _answer(request)


def _answer(request: Options) -> Answer:
    """Seconds of one product `[m, k] @ [k, n]` in each dtype, or of a copy and a sum of a large array."""
    if "m" in request:
        sizes = request["m"], request["k"], request["n"]
        calls = {name: _product(*sizes, dtype) for name, dtype in _DTYPES.items()}
        return {"seconds": in_turns(calls, request["seconds"])}
    source = torch.ones(_NUMBERS)
    target = torch.empty_like(source)
    calls = {"copy": lambda: target.copy_(source), "read": lambda: source.sum()}
    moved = {"copy": 2 * source.nbytes, "read": source.nbytes}
    return {"seconds": in_turns(calls, request["seconds"]), "bytes": moved}


def _product(m: int, k: int, n: int, dtype: torch.dtype) -> Callable[[], object]:
    a, b = torch.randn(m, k).to(dtype), torch.randn(n, k).to(dtype)
    return lambda: torch.nn.functional.linear(a, b)


if __name__ == "__main__":
    serve(prepare)
