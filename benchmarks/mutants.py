"""Which small changes of the source does no test notice? `python benchmarks/mutants.py`, or `make mutants`.

First every test of the folders named is recorded: which lines it executes, how long it takes (again only
where a file of tests has changed since). Then a sample of changes is tried in a copy of the repository: an
operator or a constant replaced, a condition negated, a statement left out. For each, the tests that execute
its line run until one fails. What is recorded and found stays in `.cache/mutants`; a command that was stopped
goes on with its sample when it is given again.

    python benchmarks/mutants.py --mutants 200 --seed 1
    python benchmarks/mutants.py --only src/triptych/rewriting/functions/bounds.py:96
"""

# ruff: noqa: E402

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[0] = str(ROOT)  # as a script this folder would be there, and `benchmarks` no package

from benchmarks.mutation.changes import Change, changes_of, is_sound, span_of
from benchmarks.mutation.choosing import Recordings, chosen_for
from benchmarks.mutation.trials import Bench, Trial, found_before

ROOMS = tuple(f"src/triptych/{room}" for room in ("algebra", "attention", "decoding", "rewriting"))
TESTS = (
    *("tests/algebra", "tests/attention", "tests/decoding", "tests/rewriting", "tests/checkpoints"),
    *("tests/models", "tests/face", "tests/attending", "tests/inspection", "tests/converting"),
    *("tests/costing", "tests/training", "tests/storage"),
    *(f"tests/cli/test_{name}.py" for name in ("rewrite", "verify", "inspect", "translate", "generate")),
    *("tests/test_known_answers.py", "tests/test_questions.py", "tests/test_own_attention.py"),
)


def main() -> int:
    """Record, sample, try, report."""
    arguments = parse()
    cache: Path = arguments.cache.resolve()
    tree = cache / "tree"
    copy_tree(tree)
    recordings = Recordings(cache / "recorded", tree)
    bench = Bench(tree, cache / "trial.log")
    if not arguments.no_recording:
        record(bench, recordings, arguments.tests, arguments.processes)
    changes = (
        [*chosen(tree, arguments.only)] if arguments.only else sample(tree, arguments.mutants, arguments.seed)
    )
    target = arguments.json or cache / f"seed-{arguments.seed}.json"
    trials = [] if arguments.only else found_before(target, changes)
    for place, change in [*enumerate(changes)][len(trials) :]:
        within = span_of(change, (tree / change.file).read_text(encoding="utf-8"))
        tests = chosen_for(change, recordings.of_file(change.file), within, arguments.seconds)
        limit = 60 + 5 * sum(test.seconds for test in tests)
        trial = bench.try_(change, [test.name for test in tests], limit)
        trials.append(trial)
        target.write_text(json.dumps([asdict(trial) for trial in trials], indent=1, ensure_ascii=False))
        print(f"{place + 1}/{len(changes)} {described(trial)}", flush=True)
    report(trials)
    return 0


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mutants", type=int, default=200, help="changes tried, spread evenly over the rooms"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the sample")
    parser.add_argument(
        "--only", nargs="*", default=[], help="FILE:LINE: every change of these lines instead"
    )
    parser.add_argument("--seconds", type=float, default=60, help="of tests, as recorded, for each change")
    parser.add_argument("--tests", nargs="*", default=TESTS, help="files and folders of tests to record")
    parser.add_argument("--processes", type=int, default=1, help="that record tests")
    parser.add_argument("--no-recording", action="store_true", help="go by what is recorded already")
    parser.add_argument("--cache", type=Path, default=ROOT / ".cache" / "mutants", help="where to work")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    return parser.parse_args()


def sources(tree: Path) -> list[str]:
    """The files whose changes are tried."""
    return sorted(str(path.relative_to(tree)) for room in ROOMS for path in (tree / room).rglob("*.py"))


def copy_tree(tree: Path) -> None:
    """What git knows or would take up, as it stands; a file that has not changed keeps its time."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    names = {name for name in listed.split("\0") if name and (ROOT / name).is_file()}
    for path in [path for path in tree.rglob("*") if path.is_file()]:
        name = str(path.relative_to(tree))
        if name not in names and "__pycache__" not in name:
            path.unlink()
    for name in names:
        path, own = tree / name, ROOT / name
        if not path.exists() or path.read_bytes() != own.read_bytes():
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(own, path)


def record(bench: Bench, recordings: Recordings, tests: Sequence[str], processes: int) -> None:
    """Run the tests that are new or have changed, and note which lines they execute."""
    tree = recordings.root
    files = [
        str(path.relative_to(tree))
        for name in tests
        for path in ([tree / name] if name.endswith(".py") else sorted((tree / name).rglob("test_*.py")))
    ]
    waiting = [file for file in files if not recordings.is_fresh(file)]
    stored = recordings.keep_sources(sources(tree))
    running = dict[int, Path]()
    while waiting or running:
        if waiting and len(running) < processes:
            file = waiting.pop(0)
            target = tree.parent / "recording" / file.replace("/", ".")
            shutil.rmtree(target, ignore_errors=True)
            print(f"recording {file}", flush=True)
            running[bench.record(file, ROOMS, target)] = target
        else:
            child, _ = os.wait()
            for path in running.pop(child).glob("*.json"):
                recordings.add(path, stored)


def sample(tree: Path, count: int, seed: int) -> list[Change]:
    """Of every room as many changes, drawn by seed; in random order: the first ones are a sample too."""
    chance, found = random.Random(seed), list[Change]()
    for place, room in enumerate(ROOMS):
        texts = {
            file: (tree / file).read_text(encoding="utf-8")
            for file in sources(tree)
            if file.startswith(f"{room}/")
        }
        changes = [change for file, text in texts.items() for change in changes_of(file, text)]
        chance.shuffle(changes)
        wanted = (count + place) // len(ROOMS)
        sound = (change for change in changes if is_sound(change, texts[change.file]))
        found += [change for change, _ in zip(sound, range(wanted), strict=False)]
    chance.shuffle(found)
    return found


def chosen(tree: Path, places: Sequence[str]) -> Iterator[Change]:
    """Every change of the lines asked for."""
    for place in places:
        file, _, line = place.partition(":")
        text = (tree / file).read_text(encoding="utf-8")
        for change in changes_of(file, text):
            if (not line or change.line == int(line)) and is_sound(change, text):
                yield change


def described(trial: Trial) -> str:
    """In a line."""
    change = trial.change
    old, new = (" ".join(text.split()) for text in (change.old, change.new))
    said = f"{old[:60]} → {new[:60]}"
    by = f" by {trial.by}" if trial.by else ""
    return (
        f"{trial.outcome}: {change.file}:{change.line} {change.scope}: {said}"
        f"{by} ({trial.tests} tests, {trial.seconds:.0f} s)"
    )


def report(trials: Sequence[Trial]) -> None:
    """Shares by room, and all that was not noticed."""
    for room in (*ROOMS, ""):
        of_room = [trial for trial in trials if trial.change.file.startswith(room)]
        noticed = sum(trial.outcome == "noticed" for trial in of_room)
        if of_room:
            print(
                f"{room or 'all'}: {noticed} of {len(of_room)} noticed ({100 * noticed / len(of_room):.1f} %)"
            )
    for trial in trials:
        if trial.outcome != "noticed":
            print(described(trial))


if __name__ == "__main__":
    sys.exit(main())
