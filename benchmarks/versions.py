"""Time two source trees in turns, through the command: did a change of design cost speed?

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before . --rounds 3 --only train decode

Each task is one `triptych` command in a process of its own, so the two trees need nothing in common but the
command line. Reports the whole command's time, and for training the median time per token. Needs the
checkpoints and texts of `../shared`.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHARED = Path("../shared")
LINES = 400


def tasks(source: Path, out: Path) -> dict[str, list[str]]:
    """The command line of each task."""
    marian, llama, gpt2 = (
        str(SHARED / "checkpoints" / name) for name in ("marian-multi30k", "llama-gqa", "gpt2")
    )
    changes = {
        "max_steps": 60,
        "warmup_steps": 20,
        "batch_tokens": 3500,
        "log_every_steps": 10,
    }
    train = ["train", "multi30k", "-o", str(out), "--set", "validation.every_steps=60"]
    for key, value in changes.items():
        train += ["--set", f"training.{key}={value}"]
    translate = ["translate", marian, str(source), "-o", str(out), "--workers", "1"]
    return {
        "help": ["--help"],
        "train fp32": [*train, "--set", "training.precision=fp32"],
        "train bf16": [*train, "--set", "training.precision=bf16"],
        "decode fp32": translate,
        "decode fp32 greedy": [*translate, "--beam", "1"],
        "decode int8": [*translate, "--precision", "int8"],
        "inspect": ["inspect", llama],
        "rewrite": ["rewrite", gpt2, "--exact", "-o", str(out)],
    }


def measure(tree: Path, task: str) -> float:
    """Seconds of one command; microseconds per token of a training."""
    with tempfile.TemporaryDirectory() as folder:
        source, out = Path(folder) / "source.txt", Path(folder) / "out"
        lines = (SHARED / "data/multi30k/val.en").read_text(encoding="utf-8").splitlines()[:LINES]
        source.write_text("\n".join(lines) + "\n", encoding="utf-8")
        run = "import sys; from triptych.cli.main import run; sys.argv[0] = 'triptych'; run()"
        command = [sys.executable, "-c", run, *tasks(source, out)[task]]
        environment = os.environ | {"PYTHONPATH": str(tree.resolve() / "src")}
        begin = time.perf_counter()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - begin
        if done.returncode:
            raise SystemExit(f"{task} in {tree}: exit code {done.returncode}\n{done.stderr}")
        if not task.startswith("train"):
            return seconds
        rows = map(json.loads, (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        speeds = [row["tokens_per_second"] for row in rows if "tokens_per_second" in row]
        return 1e6 / statistics.median(speeds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="+", metavar="TASK", help="tasks whose name begins so")
    asked = parser.parse_args()
    print(f"{'':20}{'before':>10}{'after':>10}   after / before: median, best")
    for task in tasks(Path(), Path()):
        if asked.only and not task.startswith(tuple(asked.only)):
            continue
        found: dict[Path, list[float]] = {asked.before: [], asked.after: []}
        for number in range(asked.rounds):
            for tree in list(found)[:: 1 if number % 2 else -1]:
                found[tree].append(measure(tree, task))
        before, after = found.values()
        medians = statistics.median(before), statistics.median(after)
        ratios = medians[1] / medians[0], min(after) / min(before)
        print(f"{task:20}{medians[0]:10.3f}{medians[1]:10.3f}   {ratios[0]:.3f}, {ratios[1]:.3f}", flush=True)


if __name__ == "__main__":
    main()
