"""Inspection: bytes of attention a second beside a plain read and others' ways; memory on a large one."""

import json
import shutil
import statistics
import struct
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.harness.command import Command
from benchmarks.harness.ours import run_ours
from benchmarks.harness.page import Page
from benchmarks.harness.race import Contender, Race
from benchmarks.harness.turns import WorkerError

WAYS = ("triptych", "plain read", "WeightWatcher", "dense")
# A Llama of 1.5 GB of attention in bfloat16, written with random numbers.
LAYERS, HEADS, KEY_HEADS, D_K = 24, 16, 16, 128
# One whose files are holes: 20 GB that take no room.
_LARGE = {"layers": 80, "heads": 64, "key_heads": 8, "d_k": 128}


def measure(command: Command) -> Page:
    """Throughput, agreement, memory."""
    race = command.race({"threads": command.threads})
    layers = 1 if command.quick else LAYERS
    folder = command.work / "inspected"
    write_checkpoint(folder, layers)
    ways = [_way(race, way, folder, command.rounds) for way in WAYS]
    d = 512 if command.quick else 4096
    spectra = [
        _ask(race, {"spectra": d, "d_k": 128, "heads": 8, "dtype": dtype}) | {"dtype": dtype, "d": d}
        for dtype in ("fp64", "fp32")
    ]
    large = _before(command) or _large(command)
    shutil.rmtree(folder)
    ours = ways[0]
    return Page(
        name="inspection",
        title=f"Inspection of {layers} layers of {HEADS} heads of {D_K}, bfloat16",
        columns=("way", "seconds", "GB of attention a second", "times ours", "peak MB"),
        rows=[_cells(way, ours) for way in ways],
        notes=(
            f"Median of {command.rounds} processes each, files in the page cache. WeightWatcher takes whole "
            "matrices (other measures); dense is one head's two products as d × d matrices, times all heads.",
            *(
                f"d {s['d']:,}, d_k 128, {s['dtype']}: {1e3 * s['ours_seconds_a_head']:.1f} ms a head for "
                f"all measures, {s['dense_seconds_a_head']:.1f} s for the SVD of the d × d product, "
                f"{s['dense_seconds_a_head'] / s['ours_seconds_a_head']:,.0f} times; singular values differ "
                f"by {s['largest_relative_difference']:.1e}, relative, at most"
                for s in spectra
            ),
            f"{large['bytes'] / 1e9:.1f} GB in {large['shards']} files (holes, so all heads are zero), "
            f"{large['layers']} layers × {large['heads']} heads, d 8,192: {large['seconds']:.0f} s, "
            f"peak {large['peak_mb']:,.0f} MB{large.get('said', '')}",
        ),
        record={"ways": ways, "spectra": spectra, "large": large},
        num_texts=1,
    )


def _way(race: Race, way: str, folder: Path, rounds: int) -> dict[str, Any]:
    answers = []
    for _ in range(1 if way in ("WeightWatcher", "dense") else rounds):
        try:
            answers.append(_ask(race, {"way": way, "folder": str(folder)}))
        except WorkerError as failure:
            return {"way": way, "failed": str(failure)}
    seconds = statistics.median(answer["seconds"] for answer in answers)
    if "of_heads" in answers[0]:
        seconds *= answers[0]["of_heads"]
    return {"way": way, "seconds": seconds, "answers": answers, "peak_rss_mb": answers[0]["peak_rss_mb"]}


def _ask(race: Race, request: dict[str, Any]) -> dict[str, Any]:
    with race.start(Contender("inspection", "inspection"), {}) as worker:
        worker.ready(race.prepare_limit_seconds)
        return worker.go(request, 4 * race.answer_limit_seconds)


def _cells(way: dict[str, Any], ours: dict[str, Any]) -> list[str]:
    if "failed" in way:
        return [way["way"], f"failed: {way['failed']}", "–", "–", "–"]
    read = ours["answers"][0]["bytes"] / 1e9
    return [
        way["way"],
        f"{way['seconds']:.2f}",
        f"{read / way['seconds']:.3f}",
        f"{way['seconds'] / ours['seconds']:.2f}",
        f"{way['peak_rss_mb']:,.0f}",
    ]


def _config(layers: int, heads: int, key_heads: int, d_k: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": heads * d_k,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "num_hidden_layers": layers,
        "max_position_embeddings": 4096,
    }


def _shapes(layer: int, heads: int, key_heads: int, d_k: int) -> dict[str, tuple[int, ...]]:
    at, d = f"model.layers.{layer}", heads * d_k
    return {
        f"{at}.self_attn.q_proj.weight": (d, d),
        f"{at}.self_attn.k_proj.weight": (key_heads * d_k, d),
        f"{at}.self_attn.v_proj.weight": (key_heads * d_k, d),
        f"{at}.self_attn.o_proj.weight": (d, d),
        f"{at}.input_layernorm.weight": (d,),
    }


def write_checkpoint(folder: Path, layers: int) -> None:
    """A Llama with random weights, one file."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    tensors = {
        name: torch.randn(shape).bfloat16()
        for layer in range(layers)
        for name, shape in _shapes(layer, HEADS, KEY_HEADS, D_K).items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(_config(layers, HEADS, KEY_HEADS, D_K)), encoding="utf-8")


def _before(command: Command) -> dict[str, Any] | None:
    """What a run before found of the large one, if only `ways` were asked for."""
    path = command.results / "inspection.json"
    if command.only != ("ways",) or not path.exists():
        return None
    found = json.loads(path.read_text(encoding="utf-8"))["large"]
    return {**found, "said": " (of a run before)"} if "said" not in found else found


def _large(command: Command) -> dict[str, Any]:
    """A checkpoint of holes, a file a layer, through the whole command; its memory is looked at."""
    sizes = {**_LARGE, "layers": 2} if command.quick else _LARGE
    folder = command.work / "holes"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    places: dict[str, str] = {}
    total = 0
    for layer in range(sizes["layers"]):
        file = f"model-{layer:05d}.safetensors"
        shapes = _shapes(layer, sizes["heads"], sizes["key_heads"], sizes["d_k"])
        total += _write_holes(folder / file, shapes)
        places |= dict.fromkeys(shapes, file)
    index = {"weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = _config(sizes["layers"], sizes["heads"], sizes["key_heads"], sizes["d_k"])
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    ended = run_ours(command, "inspect", str(folder), "--json")
    shutil.rmtree(folder)
    peak = ended.peak_bytes / 2**20
    return {**sizes, "shards": sizes["layers"], "bytes": total, "seconds": ended.seconds, "peak_mb": peak}


def _write_holes(path: Path, shapes: dict[str, tuple[int, ...]]) -> int:
    """A safetensors file of zeros that nobody wrote; its size."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * int(torch.Size(shape).numel())
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)
    return end
