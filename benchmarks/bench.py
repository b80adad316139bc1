"""Ours and theirs, interleaved: `python benchmarks/bench.py [TABLE …]`, or `make bench TABLE=training`.

Runs in `.bench`, the environment with the peers (made by `make bench`), or in any environment with triptych
in it: the contenders run in processes of their own, in `.bench`.
"""
# ruff: noqa: E402

import argparse
import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # as a script this folder would be there, and `benchmarks` no package

from rich.console import Console

from benchmarks.harness.command import Command, NotHereError
from benchmarks.harness.machine import cores
from benchmarks.harness.page import show, write
from benchmarks.tables import (
    ablations,
    attention,
    busy,
    ceilings,
    compression,
    curves,
    decoding,
    differences,
    generation,
    gpu,
    inspection,
    parallel,
    parameterisations,
    real,
    rewriting,
    scaling,
    stream,
    training,
    training_lm,
    viewers,
)

TABLES = {
    "ceilings": ceilings.measure,
    "training": training.measure,
    "training-lm": training_lm.measure,
    "curves": curves.measure,
    "decoding": decoding.measure,
    "generation": generation.measure,
    "stream": stream.measure,
    "attention": attention.measure,
    "inspection": inspection.measure,
    "compression": compression.measure,
    "rewriting": rewriting.measure,
    "differences": differences.measure,
    "parameterisations": parameterisations.measure,
    "scaling": scaling.measure,
    "ablations": ablations.measure,
    "busy": busy.measure,
    "gpu": gpu.measure,
    "viewers": viewers.measure,
    "parallel": parallel.measure,
    "real": real.measure,
}


def main() -> int:
    """Measure the tables asked for."""
    arguments = parse()
    console = Console(width=None if sys.stdout.isatty() else 150)
    python = arguments.python
    if not python.exists():
        console.print(f"there is no {python}: make bench installs the peers there")
        return 2
    command = Command(
        root=ROOT,
        python=python,
        rounds=1 if arguments.quick else arguments.rounds,
        quick=arguments.quick,
        only=tuple(arguments.only),
        threads=arguments.threads or cores(),
        results=(arguments.json or _default_results(arguments.quick)).resolve(),
        compiled=not arguments.no_compile,
        steps=arguments.steps,
        lengths=tuple(arguments.lengths or (attention.QUICK if arguments.quick else attention.LENGTHS)),
        kinds=tuple(arguments.kinds),
        dtypes=tuple(arguments.dtypes),
        console=console,
    )
    with only_one(command.work) as alone:
        if not alone:
            console.print("another benchmark is running here: they would measure each other")
            return 2
        return run(command, arguments.tables)


def _default_results(quick: bool) -> Path:
    """A try must not overwrite figures that are worth something."""
    return ROOT / ".bench" / "work" / "tries" if quick else ROOT / "docs" / "results" / "benchmarks"


@contextmanager
def only_one(folder: Path) -> Iterator[bool]:
    """Whether no other benchmark runs on this folder; holds the place meanwhile."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def run(command: Command, tables: Sequence[str]) -> int:
    """Measure, show and write one table after the other."""
    console = command.console
    busy = os.getloadavg()[0]
    if busy > 0.3:
        console.print(f"the machine is busy (load {busy:.1f}): what is measured now is worth little")
    how = {
        "rounds": command.rounds,
        "quick": command.quick,
        "only": list(command.only),
        "compiled": command.compiled,
        "load_average_before": list(os.getloadavg()),
    }
    for name in tables:
        console.rule(name)
        try:
            page = TABLES[name](command)
        except NotHereError as missing:
            console.print(f"left out: {missing}")
            continue
        show(page, console)
        path = write(page, command.results, root=ROOT, python=command.python, how=how)
        console.print(f"{path.relative_to(ROOT) if path.is_relative_to(ROOT) else path} has every figure")
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"all, or any of {', '.join(TABLES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="contenders; ours always runs")
    parser.add_argument("--quick", action="store_true", help="a try: few steps, figures worth nothing")
    parser.add_argument("--json", type=Path, metavar="FOLDER", help="docs/results/benchmarks, unless --quick")
    parser.add_argument("--threads", type=int, help="all processors if not given")
    parser.add_argument(
        "--no-compile", action="store_true", help="training: do not try torch.compile for peers"
    )
    parser.add_argument("--steps", type=int, default=300, help="of the loss curves")
    parser.add_argument("--lengths", nargs="*", type=int, help="of the attention table")
    parser.add_argument("--kinds", nargs="*", choices=attention.KINDS, default=attention.KINDS)
    parser.add_argument("--dtypes", nargs="*", choices=attention.DTYPES, default=attention.DTYPES)
    parser.add_argument("--python", type=Path, default=ROOT / ".bench" / "bin" / "python")
    arguments = parser.parse_args()
    if unknown := set(arguments.tables) - {*TABLES, "all"}:
        parser.error(f"no table {', '.join(sorted(unknown))}: choose of {', '.join(TABLES)}")
    if not arguments.tables or "all" in arguments.tables:
        arguments.tables = list(TABLES)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
