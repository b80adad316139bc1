"""A large checkpoint rewritten in one pass, beside a plain copy of it: seconds, bytes a second, memory."""

import json
import os
import shutil
import statistics
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command import Command
from benchmarks.harness.machine import cores
from benchmarks.harness.ours import run_ours
from benchmarks.harness.page import Page

# Layers as OPT-30B has them, as many as make 20 GB.
LAYERS, HEADS, D, FF, WORDS = 16, 56, 7168, 28672, 50272
_QUICK = {"layers": 3, "heads": 8, "d": 1024, "ff": 4096, "words": 50272}
STEPS = ("fold_norm", "fold_value_bias")
# What is asked for: peak memory in largest tensors and bytes besides, and the share of the copy's rate.
_MOST_TENSORS, _MOST_BESIDES, _LEAST_RATE = 3, 1e9, 0.5


def measure(command: Command) -> Page:
    """Copy and rewrite in turns, and verify once."""
    place = command.work / "rewritten"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        return _page(command, _measured(command, place))
    finally:
        shutil.rmtree(place)


def _measured(command: Command, place: Path) -> dict[str, Any]:
    sizes = _QUICK if command.quick else {"layers": LAYERS, "heads": HEADS, "d": D, "ff": FF, "words": WORDS}
    source, target = place / "source", place / "target"
    total, largest = _write(source, sizes)
    room = shutil.disk_usage(place).free
    if room < total * 1.05:
        raise RuntimeError(f"{place}: {total / 1e9:.0f} GB more are needed, and {room / 1e9:.0f} are free")
    rounds, cold = [], False
    for number in range(command.rounds):
        ways = [("copy", _copy), ("rewrite", _rewrite)]
        found: dict[str, Any] = {"load_average": os.getloadavg()[0]}
        for way, do in ways if number % 2 == 0 else reversed(ways):
            cold = _drop_caches()
            started = time.perf_counter()
            peak = do(command, source, target)
            found[way] = {"seconds": time.perf_counter() - started, "peak_bytes": peak}
            last = number == command.rounds - 1
            if way == "rewrite" and last:
                cold = _drop_caches()
                started = time.perf_counter()
                peak = run_ours(command, "verify", str(target), "--against", str(source)).peak_bytes
                found["verify"] = {"seconds": time.perf_counter() - started, "peak_bytes": peak}
            shutil.rmtree(target)
        command.tell(
            f"copy {found['copy']['seconds']:.1f} s, rewrite {found['rewrite']['seconds']:.1f} s, "
            f"{found['rewrite']['peak_bytes'] / 1e6:,.0f} MB"
        )
        rounds.append(found)
    return {
        **sizes,
        "steps": STEPS,
        "bytes": total,
        "largest_tensor_bytes": largest,
        "allowed_bytes": _MOST_TENSORS * largest + _MOST_BESIDES,
        "cold": cold,
        "processors": cores(),
        "rounds": rounds,
    }


def _page(command: Command, found: dict[str, Any]) -> Page:
    rounds, total = found["rounds"], found["bytes"]
    rows = []
    for way in ("copy", "rewrite", "verify"):
        answers = [one[way] for one in rounds if way in one]
        seconds = [answer["seconds"] for answer in answers]
        shares = [one["copy"]["seconds"] / one[way]["seconds"] for one in rounds if way in one]
        peak = max(answer["peak_bytes"] for answer in answers)
        rows.append(
            [
                way,
                f"{statistics.median(seconds):.1f} ({min(seconds):.1f}–{max(seconds):.1f})",
                f"{total / 1e9 / statistics.median(seconds):.3f}",
                f"{statistics.median(shares):.2f} ({min(shares):.2f}–{max(shares):.2f})",
                f"{peak / 1e6:,.0f}" if peak else "–",
            ]
        )
    return Page(
        name="rewriting",
        title=f"{' and '.join(STEPS)} of {total / 1e9:.1f} GB in {found['layers'] + 1} files",
        columns=("way", "seconds", "GB a second", "of the copy's rate", "peak MB"),
        rows=rows,
        notes=(
            f"OPT, {found['layers']} layers × {found['heads']} heads, d {found['d']:,}, float16. "
            f"Median of {command.rounds} rounds, copy (cp -r) and rewrite in turns, both until all is on the "
            f"disk, the page cache {'emptied before each' if found['cold'] else 'as it was'}; "
            f"{found['processors']} processors.",
            f"Largest tensor {found['largest_tensor_bytes'] / 1e6:,.0f} MB: {_MOST_TENSORS} of them and "
            f"{_MOST_BESIDES / 1e9:.0f} GB, {found['allowed_bytes'] / 1e6:,.0f} MB, are what it may take; "
            f"{_LEAST_RATE:g} of the copy's rate is what it must reach.",
        ),
        record=found,
        num_texts=1,
    )


def _copy(command: Command, source: Path, target: Path) -> int:
    del command
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", *map(str, sorted(target.iterdir())), str(target)], check=True)
    return 0


def _rewrite(command: Command, source: Path, target: Path) -> int:
    steps = [part for step in STEPS for part in ("--do", step)]
    return run_ours(command, "rewrite", str(source), "--out", str(target), *steps).peak_bytes


def _drop_caches() -> bool:
    """Have nothing of any file in memory; whether the system let us."""
    os.sync()
    with suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3\n", encoding="utf-8")
        return True
    return False


def _write(folder: Path, sizes: dict[str, int]) -> tuple[int, int]:
    """A checkpoint, a file a layer and one for the embeddings; its bytes, and those of its largest tensor."""
    folder.mkdir()
    d, words = sizes["d"], sizes["words"]
    config = {
        "model_type": "opt",
        "hidden_size": d,
        "num_attention_heads": sizes["heads"],
        "num_hidden_layers": sizes["layers"],
        "ffn_dim": sizes["ff"],
        "vocab_size": words,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    files: list[dict[str, tuple[int, ...]]] = [
        {"decoder.embed_tokens.weight": (words, d), "decoder.embed_positions.weight": (2050, d)}
    ]
    files[0] |= {f"decoder.final_layer_norm.{part}": (d,) for part in ("weight", "bias")}
    files += [dict(_shapes(layer, d, sizes["ff"])) for layer in range(sizes["layers"])]
    generator = torch.Generator().manual_seed(0)
    block = (torch.randn(1 << 24, generator=generator) * 0.02).half().numpy().tobytes()
    places: dict[str, str] = {}
    for number, shapes in enumerate(files):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        _write_file(folder / name, {f"model.{tensor}": shape for tensor, shape in shapes.items()}, block)
        places |= {f"model.{tensor}": name for tensor in shapes}
    sizes_of = [2 * prod(shape) for shapes in files for shape in shapes.values()]
    index = {"metadata": {"total_size": sum(sizes_of)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return sum(sizes_of), max(sizes_of)


def _shapes(layer: int, d: int, ff: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    at = f"decoder.layers.{layer}"
    for name in ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj"):
        yield from ((f"{at}.{name}.weight", (d, d)), (f"{at}.{name}.bias", (d,)))
    for name, shape in (("fc1", (ff, d)), ("fc2", (d, ff))):
        yield from ((f"{at}.{name}.weight", shape), (f"{at}.{name}.bias", shape[:1]))
    for name in ("self_attn_layer_norm", "final_layer_norm"):
        yield from ((f"{at}.{name}.weight", (d,)), (f"{at}.{name}.bias", (d,)))


def _write_file(path: Path, shapes: dict[str, tuple[int, ...]], block: bytes) -> None:
    """A safetensors file that is on the disk: one block of random numbers, again and again."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "F16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        while end:
            end -= file.write(memoryview(block)[:end])
        os.fsync(file.fileno())
