"""`triptych diff` on pairs of a model of 1 B parameters: verdict, seconds, memory."""

import json
import shutil
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.harness.command import Command
from benchmarks.harness.machine import cores
from benchmarks.harness.ours import run_ours
from benchmarks.harness.page import Page

# A Llama of 1 B parameters in bfloat16.
_SIZES = {"layers": 16, "d": 2048, "ff": 8192, "heads": 32, "key_heads": 8, "words": 32000}
_QUICK = {"layers": 2, "d": 256, "ff": 1024, "heads": 8, "key_heads": 2, "words": 2000}
PAIRS = ("a copy", "the exact rewrites", "hidden units in another order", "5 % of noise in all tensors")


def measure(command: Command) -> Page:
    """Make one pair after the other, and compare it."""
    place = command.work / "compared"
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    try:
        sizes = _QUICK if command.quick else _SIZES
        parameters = _write(place / "a", sizes)
        return _page(command, sizes, parameters, _measured(command, place))
    finally:
        shutil.rmtree(place)


def _measured(command: Command, place: Path) -> dict[str, list[dict[str, Any]]]:
    found = dict[str, list[dict[str, Any]]]()
    for pair in PAIRS:
        other = place / "b"
        _make(command, pair, place / "a", other)
        for _ in range(command.rounds):
            words = ("diff", str(place / "a"), str(other), "--json")
            ended = run_ours(command, *words, threads=command.threads, codes=(0, 1))
            one = {"verdict": json.loads(ended.said)["verdict"], "seconds": ended.seconds}
            found.setdefault(pair, []).append({**one, "peak_bytes": ended.peak_bytes})
        shutil.rmtree(other)
        last = found[pair][-1]
        command.tell(f"{pair}: {last['verdict']}, {last['seconds']:.1f} s")
    return found


def _page(
    command: Command, sizes: dict[str, int], parameters: int, found: dict[str, list[dict[str, Any]]]
) -> Page:
    rows = []
    for pair, answers in found.items():
        seconds = [answer["seconds"] for answer in answers]
        peak = max(answer["peak_bytes"] for answer in answers)
        middle = f"{statistics.median(seconds):.1f} ({min(seconds):.1f}–{max(seconds):.1f})"
        rows.append([pair, answers[0]["verdict"], middle, f"{peak / 1e6:,.0f}"])
    return Page(
        name="differences",
        title=f"triptych diff of a Llama of {parameters / 1e9:.2f} B parameters with another model",
        columns=("B is A with", "verdict", "seconds", "peak MB"),
        rows=rows,
        notes=(
            f"{sizes['layers']} layers, d {sizes['d']:,}, d_ff {sizes['ff']:,}, {sizes['heads']} heads, "
            f"{sizes['key_heads']} key-value heads, {sizes['words']:,} words, bfloat16, random weights; "
            f"a file for each layer. Whole commands, median of {command.rounds}, {cores()} processors.",
        ),
        record={"sizes": sizes, "parameters": parameters, "pairs": found},
    )


def _make(command: Command, pair: str, source: Path, target: Path) -> None:
    """Write the second model of a pair."""
    if pair == "the exact rewrites":
        words = ("rewrite", str(source), "--out", str(target), "--exact")
        run_ours(command, *words, threads=command.threads)
        return
    changes: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
        "a copy": lambda tensors: tensors,
        "hidden units in another order": _reordered,
        "5 % of noise in all tensors": _noisy,
    }
    target.mkdir()
    for file in sorted(source.iterdir()):
        if file.suffix != ".safetensors":
            shutil.copy(file, target)
            continue
        save_file(changes[pair](load_file(file)), target / file.name, {"format": "pt"})


def _reordered(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found = dict(tensors)
    for name, weight in tensors.items():
        if name.endswith("mlp.down_proj.weight"):
            at = name.removesuffix("down_proj.weight")
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(1))
            found[name] = weight[:, order].contiguous()
            for part in ("gate_proj.weight", "up_proj.weight"):
                found[f"{at}{part}"] = tensors[f"{at}{part}"][order]
    return found


def _noisy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    found = {}
    for name, weight in tensors.items():
        noise = torch.randn(weight.shape, generator=generator)
        found[name] = (weight.float() + 0.05 * weight.float().std() * noise).bfloat16()
    return found


def _write(folder: Path, sizes: dict[str, int]) -> int:
    """Write a Llama with random weights, a file for each layer; return the number of its parameters."""
    folder.mkdir()
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": sizes["d"],
        "intermediate_size": sizes["ff"],
        "num_hidden_layers": sizes["layers"],
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["key_heads"],
        "vocab_size": sizes["words"],
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    parameters = 0
    for number, shapes in enumerate(_shapes(sizes)):
        file = f"model-{number:05d}-of-{sizes['layers'] + 1:05d}.safetensors"
        tensors = {name: _random(shape, generator) for name, shape in shapes.items()}
        save_file(tensors, folder / file, {"format": "pt"})
        places |= dict.fromkeys(tensors, file)
        parameters += sum(tensor.numel() for tensor in tensors.values())
    index = {"metadata": {"total_size": 2 * parameters}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return parameters


def _random(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return a random matrix, or the gain of a norm."""
    numbers = torch.randn(shape, generator=generator)
    return (1 + 0.3 * numbers if len(shape) == 1 else 0.02 * numbers).bfloat16()


def _shapes(sizes: dict[str, int]) -> Iterator[dict[str, tuple[int, ...]]]:
    d, ff = sizes["d"], sizes["ff"]
    of_keys = d // sizes["heads"] * sizes["key_heads"]
    tables = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (sizes["words"], d))
    yield {**tables, "model.norm.weight": (d,)}
    for layer in range(sizes["layers"]):
        at = f"model.layers.{layer}"
        yield {
            f"{at}.self_attn.q_proj.weight": (d, d),
            f"{at}.self_attn.k_proj.weight": (of_keys, d),
            f"{at}.self_attn.v_proj.weight": (of_keys, d),
            f"{at}.self_attn.o_proj.weight": (d, d),
            f"{at}.mlp.gate_proj.weight": (ff, d),
            f"{at}.mlp.up_proj.weight": (ff, d),
            f"{at}.mlp.down_proj.weight": (d, ff),
            f"{at}.input_layernorm.weight": (d,),
            f"{at}.post_attention_layernorm.weight": (d,),
        }
