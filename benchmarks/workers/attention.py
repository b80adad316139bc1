"""One attention layer, everybody's in turn, in one process; or one of them alone, for its memory.

{"kind": "causal", "dtype": "fp32", "batch": 8, "length": 1024, "peers": [...], "seconds": 0.5}
{"memory_of": "triptych", "kind": ..., "dtype": ..., "batch": ..., "length": ...}
"""

import gc
import re
from pathlib import Path

import torch

from benchmarks.workers.in_turns import in_turns
from benchmarks.workers.layers import LAYERS, Inputs, Layer, forward, largest_difference, training
from benchmarks.workers.protocol import Answer, Options, Prepared, first_line, serve

OURS = "triptych"
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_AGREE = {"fp32": 1e-4, "bf16": 0.05}
_PASSES = {"forward": forward, "forward + backward": training}


def prepare(options: Options) -> Prepared:
    """Nothing is built before a request."""
    torch.set_num_threads(options["threads"])

    def work(request: Options) -> Answer:
        return _memory(options, request) if "memory_of" in request else _times(options, request)

    return {"threads": torch.get_num_threads()}, work


def _times(options: Options, request: Options) -> Answer:
    """Seconds by pass and contender; those that fail, or compute another function than ours, by name."""
    inputs = _inputs(options, request)
    ours = _layer(OURS, options, inputs)
    layers, apart, failed = {OURS: ours}, {}, {}
    for name in request["peers"]:
        try:
            layer = _layer(name, options, inputs)
            apart[name] = largest_difference(ours, layer, inputs)
        except Exception as error:  # noqa: BLE001 - whatever it is, it stands in the table
            failed[name] = f"{type(error).__name__}: {first_line(error)}"
            continue
        if apart[name] > _AGREE[request["dtype"]]:
            failed[name] = f"its output differs by {apart[name]:.2g}: another function"
        else:
            layers[name] = layer
    seconds = {
        name: in_turns({of: run(layer, inputs) for of, layer in layers.items()}, request["seconds"])
        for name, run in _PASSES.items()
    }
    return {"seconds": seconds, "largest_differences": apart, "left_out": failed}


def _memory(options: Options, request: Options) -> Answer:
    """How far resident memory rises above what layer and inputs take, in MiB, in each pass."""
    inputs = _inputs(options, request)
    layer = _layer(request["memory_of"], options, inputs)
    _PASSES["forward + backward"](layer, Inputs.of("self", 1, 16, options["d_model"], inputs.x.dtype))()
    found = {}
    for name, run in _PASSES.items():
        call = run(layer, inputs)
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # forgets the peak so far
        before = _status("VmRSS")
        call()
        found[name] = round((_status("VmHWM") - before) / 2**10, 1)
    return {"memory_mb": found}


def _inputs(options: Options, request: Options) -> Inputs:
    torch.manual_seed(0)
    dtype = _DTYPES[request["dtype"]]
    return Inputs.of(request["kind"], request["batch"], request["length"], options["d_model"], dtype)


def _layer(name: str, options: Options, inputs: Inputs) -> Layer:
    d_model = options["d_model"]
    layer = LAYERS[name](d_model, options["num_heads"])
    torch.manual_seed(0)
    layer.load(*(torch.randn(d_model, d_model) * d_model**-0.5 for _ in range(4)))
    layer.module.to(inputs.x.dtype)
    return layer


def _status(key: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="utf-8")
    found = re.search(rf"{key}:\s+(\d+)", text)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    serve(prepare)
