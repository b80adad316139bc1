"""Ours at other writings of a head: times beside what counting predicts.

{"spec": {...}, "seconds": 0.5}     the fields of a `CostSpec`
{"fold": D_MODEL, "heads": H}       what folding makes of a stacked layer
"""

import copy
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from benchmarks.workers.in_turns import in_turns
from benchmarks.workers.protocol import Answer, Options, Prepared, serve
from triptych import CostSpec, MultiHeadAttention, cost
from triptych.core.attention import LayerCache, Stacked
from triptych.rewriting import rewrite
from triptych.seeing.costing.counting import DTYPES, CostRow

# The rates that times are predicted with: of a product that computes, and of a copy that no cache holds.
_PRODUCT_WIDTH = 1024
_COPIED_BYTES = 128 * 2**20


def prepare(options: Options) -> Prepared:
    """Nothing is built before a request."""
    torch.set_num_threads(options["threads"])

    def work(request: Options) -> Answer:
        if "fold" in request:
            layer = MultiHeadAttention(request["fold"], request["heads"], Stacked())
            return {"folded": rewrite(layer, "fold").result.parameterisation.name}
        given = {**request["spec"], "parameterisations": tuple(request["spec"]["parameterisations"])}
        report = cost(CostSpec(**given))
        times = _times(report.spec, report.rows, request["seconds"])
        return {"cost": report.figures(), "times": times}

    return {"threads": torch.get_num_threads()}, work


def _times(spec: CostSpec, rows: tuple[CostRow, ...], seconds: float) -> dict[str, Any]:
    """Quartiles of each pass of each parameterisation; rates are measured before and after the passes."""
    torch.manual_seed(0)
    before = _rates(spec, seconds)
    layers: dict[str, MultiHeadAttention] = {}
    for row in rows:
        layer = MultiHeadAttention(spec.d_model, spec.num_heads, spec.choice(row.name))
        layers[row.name] = layer.to(DTYPES[spec.dtype])
    samples: dict[str, Mapping[str, list[float]]] = {}
    for name, call_of in _PASSES.items():
        calls = {of: call_of(layer, spec) for of, layer in layers.items()}
        samples[name] = in_turns(calls, seconds)
    after = _rates(spec, seconds)
    rates = {name: (before[name] + after[name]) / 2 for name in before}
    found = []
    for row in rows:
        work = _work_of(row, spec)
        timed = {name: _timing(samples[name][row.name], *work[name], rates) for name in _PASSES}
        found.append({"name": row.name, **timed})
    machine = {"threads": torch.get_num_threads(), "dtype": spec.dtype, "torch": torch.__version__, **rates}
    return {"machine": machine, "rows": found}


def _work_of(row: CostRow, spec: CostSpec) -> dict[str, tuple[int, int]]:
    """FLOPs and bytes of each pass, for the whole batch."""
    tokens = spec.batch * spec.length
    return {
        "forward": (row.prefill_flops * tokens, row.prefill_bytes),
        # Both products of the backward pass read and write as much as that of the forward pass.
        "training": (row.training_flops * tokens, 3 * row.prefill_bytes),
        "decode": (row.decode_flops * spec.batch, row.decode_bytes),
    }


def _timing(samples: list[float], flops: int, moved: int, rates: dict[str, float]) -> dict[str, Any]:
    """Quartiles, and the longer of the times for arithmetic and for memory."""
    low, middle, high = statistics.quantiles(samples, n=4, method="inclusive")
    predicted = max(flops / rates["gemm_flops_per_second"], moved / rates["bytes_per_second"])
    return {
        "seconds": middle,
        "low_seconds": low,
        "high_seconds": high,
        "rounds": len(samples),
        "predicted_seconds": predicted,
        "ratio": middle / predicted,
    }


def _rates(spec: CostSpec, seconds: float) -> dict[str, float]:
    """Rates of a large product in the dtype, and of a large copy (reads and writes)."""
    dtype = DTYPES[spec.dtype]
    square = torch.randn(_PRODUCT_WIDTH, _PRODUCT_WIDTH).to(dtype)
    source = torch.ones(_COPIED_BYTES // spec.bytes_per_number, dtype=dtype)
    target = torch.empty_like(source)
    samples = in_turns({"product": lambda: square @ square, "copy": lambda: target.copy_(source)}, seconds)
    return {
        "gemm_flops_per_second": 2 * _PRODUCT_WIDTH**3 / statistics.median(samples["product"]),
        "bytes_per_second": 2 * source.nbytes / statistics.median(samples["copy"]),
    }


def _forward(layer: MultiHeadAttention, spec: CostSpec) -> Callable[[], object]:
    """Self-attention over `length` tokens, without gradients."""
    x = _input(spec, spec.length)

    def call() -> None:
        with torch.no_grad():
            layer(x)

    return call


def _training(layer: MultiHeadAttention, spec: CostSpec) -> Callable[[], object]:
    """Forward and backward, with the gradient of the input."""
    x = _input(spec, spec.length).requires_grad_()
    wanted = [x, *layer.parameters()]
    gradient = torch.ones_like(x)
    # The absorbed route of `latent` does not use the bias of its keys.
    return lambda: torch.autograd.grad(layer(x).output, wanted, gradient, allow_unused=True)


def _decode(layer: MultiHeadAttention, spec: CostSpec) -> Callable[[], object]:
    """One new token that attends to `context` tokens."""
    # The last token of the cache grows its store, so that there is space for the new one.
    cache = LayerCache()
    num_cached = spec.context - 1
    with torch.no_grad():
        for length in (num_cached - 1, min(num_cached, 1)):
            if length > 0:
                x = _input(spec, length)
                cache.append(layer.projections.project_kv(x, x))
    token = _input(spec, 1)

    def call() -> None:
        with torch.no_grad():
            # A copy shares the store and counts its tokens: every step overwrites the same new token.
            layer(token, cache=copy.copy(cache))

    return call


def _input(spec: CostSpec, length: int) -> Tensor:
    return torch.randn(spec.batch, length, spec.d_model).to(DTYPES[spec.dtype])


_PASSES: dict[str, Callable[[MultiHeadAttention, CostSpec], Callable[[], object]]] = {
    "forward": _forward,
    "training": _training,
    "decode": _decode,
}


if __name__ == "__main__":
    serve(prepare)
