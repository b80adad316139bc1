"""Looking into a checkpoint, ours and others' ways; every request in a process of its own.

{"way": "triptych", "folder": ...}         `inspect`, all its measures
{"way": "plain read", "folder": ...}       the bytes of the file, which has nothing but attention
{"way": "WeightWatcher", "folder": ...}    its `analyze` of the same matrices, whole
{"way": "dense", "folder": ...}            singular values of one head's W_QK and W_OV, as d × d matrices
{"spectra": D, "d_k": ..., "heads": ..., "dtype": ...}   ours against dense, head by head
"""

import time
from pathlib import Path

import torch
from torch import nn

from benchmarks.workers.protocol import Answer, Options, Prepared, seconds_of, serve
from triptych.core.algebra.semantics import Semantics
from triptych.core.algebra.weights import AttentionWeights, Link
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.seeing.inspection import inspect
from triptych.seeing.layer_measures import measure_heads

_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}


def prepare(options: Options) -> Prepared:
    """Nothing is read before a request."""
    torch.set_num_threads(options["threads"])

    def work(request: Options) -> Answer:
        if "spectra" in request:
            return _spectra(request)
        folder = Path(request["folder"])
        started = time.perf_counter()
        answer = _WAYS[request["way"]](folder)
        return {"seconds": time.perf_counter() - started, **answer}

    return {"threads": torch.get_num_threads()}, work


def _triptych(folder: Path) -> Answer:
    checkpoint = open_checkpoint(folder)
    found = inspect(checkpoint)
    return {"bytes": sum(layer.num_bytes for layer in found.layers), "heads": len(found.rows())}


def _plain_read(folder: Path) -> Answer:
    buffer, total = bytearray(4 << 20), 0
    with (folder / "model.safetensors").open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            total += count
    return {"bytes": total}


def _weightwatcher(folder: Path) -> Answer:
    import weightwatcher  # a peer; not there for the others

    checkpoint = open_checkpoint(folder)
    maps = nn.ModuleDict()
    for site in checkpoint.sites:
        weights = checkpoint.read(site).weights
        for side in ("q", "k", "v", "o"):
            link = weights.multiplied(side)
            joined = link.weight.flatten(0, 1) if side == "o" else link.weight.mT.flatten(0, 1)
            linear = nn.Linear(joined.shape[1], joined.shape[0], bias=False)
            linear.weight = nn.Parameter(joined.float())
            maps[f"{site.layer}_{side}"] = linear
    watcher = weightwatcher.WeightWatcher(model=maps)
    details = watcher.analyze()
    return {"bytes": sum(checkpoint.bytes_of(site) for site in checkpoint.sites), "matrices": len(details)}


def _dense(folder: Path) -> Answer:
    checkpoint = open_checkpoint(folder)
    weights = checkpoint.read(checkpoint.sites[0]).weights
    q, k, v, o = (weights.per_head(side)[0].float() for side in ("q", "k", "v", "o"))
    for product in (q @ k.mT, v @ o):
        torch.linalg.svdvals(product)
    return {"heads": 1, "of_heads": sum(checkpoint.read(s).weights.num_heads for s in checkpoint.sites)}


_WAYS = {
    "triptych": _triptych,
    "plain read": _plain_read,
    "WeightWatcher": _weightwatcher,
    "dense": _dense,
}


def _spectra(request: Options) -> Answer:
    d, d_k, heads = request["spectra"], request["d_k"], request["heads"]
    dtype = _DTYPES[request["dtype"]]
    torch.manual_seed(0)
    maps = [Link(torch.randn(heads, d, d_k, dtype=dtype)) for _ in range(3)]
    output = Link(torch.randn(heads, d_k, d, dtype=dtype))
    q, k, v = ((link,) for link in maps)
    weights = AttentionWeights(d, heads, q, k, v, (output,), Semantics(1.0))
    found: list[torch.Tensor] = []
    # All the measures there are, not this spectrum alone.
    ours = seconds_of(lambda: found.append(measure_heads(weights).qk.values))
    product = maps[0].weight[0] @ maps[1].weight[0].mT
    dense = seconds_of(lambda: found.append(torch.linalg.svdvals(product)))
    expected = found[1][:d_k].double()
    difference = (found[0][0] - expected).abs() / expected
    return {
        "ours_seconds_a_head": ours / heads,
        "dense_seconds_a_head": dense,
        "largest_relative_difference": float(difference.max()),
    }


if __name__ == "__main__":
    serve(prepare)
