"""Where written-out attention beats the fused kernel on this machine, forward and backward.

    python benchmarks/attention_paths.py [--heads Q,K,V] [--widths D_K,D_V] [--query-len N] [--json FILE]

Both paths run in turn on the same tensors; the figures are medians of `REPEATS` rounds with the range.
The ratio is fused / written out: above 1 the written-out path is faster.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from triptych.core.attention import attention

REPEATS = 9
TOKENS = 4096
LENGTHS = (8, 16, 32, 64, 128, 256, 512)


def seconds(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def step(tensors: list[torch.Tensor], path: str, backward: bool) -> None:
    with torch.set_grad_enabled(backward):
        output = attention(*tensors, path=path).output  # type: ignore[arg-type]
        if backward:
            output.backward(torch.ones_like(output))


class Setting(NamedTuple):
    heads: tuple[int, int, int]
    widths: tuple[int, int]
    query_len: int | None

    def tensors(self, length: int, dtype: torch.dtype, backward: bool) -> list[torch.Tensor]:
        batch = max(1, TOKENS // length)
        (q_heads, k_heads, v_heads), (d_k, d_v) = self.heads, self.widths
        shapes = ((q_heads, self.query_len or length, d_k), (k_heads, length, d_k), (v_heads, length, d_v))
        return [torch.randn(batch, *shape, dtype=dtype, requires_grad=backward) for shape in shapes]


def numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def measure(setting: Setting, length: int, dtype: torch.dtype, backward: bool) -> dict[str, Any]:
    tensors = setting.tensors(length, dtype, backward)
    times: dict[str, list[float]] = {"reference": [], "fast": []}
    for repeat in range(REPEATS + 2):
        for path, found in times.items():
            spent = seconds(partial(step, tensors, path, backward))
            if repeat >= 2:
                found.append(spent)
    ratios = [fast / slow for fast, slow in zip(times["fast"], times["reference"], strict=True)]
    return {
        "length": length,
        "dtype": str(dtype).removeprefix("torch."),
        "pass": "forward + backward" if backward else "forward",
        "written_out_ms": statistics.median(times["reference"]) * 1e3,
        "fused_ms": statistics.median(times["fast"]) * 1e3,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--heads", type=numbers, default=(4, 4, 4), help="of queries, keys and values")
    parser.add_argument("--widths", type=numbers, default=(64, 64), help="d_k and d_v")
    parser.add_argument("--query-len", type=int, help="1 for a decoding step; as many as keys if left out")
    arguments = parser.parse_args()
    setting = Setting(arguments.heads, arguments.widths, arguments.query_len)
    rows = []
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {TOKENS} tokens, {setting}")
    print(f"{'pass':<20}{'dtype':<10}{'length':>7}{'written out':>13}{'fused':>10}  ratio (range)")
    for backward in (False, True):
        for dtype in (torch.float32, torch.bfloat16):
            for length in LENGTHS:
                row = measure(setting, length, dtype, backward)
                rows.append(row)
                low, high = row["ratio_range"]
                print(
                    f"{row['pass']:<20}{row['dtype']:<10}{length:>7}{row['written_out_ms']:>10.2f} ms"
                    f"{row['fused_ms']:>7.2f} ms  {row['ratio']:.2f} ({low:.2f} to {high:.2f})"
                )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
