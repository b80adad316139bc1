"""Translate with what a person gets by default, in turns with CTranslate2 at its best.

    python benchmarks/default_translation.py --rounds 5

Cases: greedy and a beam of 4, a sentence at a time and 32 sentences at a time, in float32 and int8, in a
process that has the model; and the whole command on 2,000 lines, with its start, next to a script of
CTranslate2 and SentencePiece that reads the same file. The model is the Marian checkpoint of `../shared`.
Each figure is the median of output tokens a second, and a ratio that of the same rounds. Nothing else should
run on the machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice, product
from pathlib import Path
from typing import Literal

sys.path[0] = str(Path(__file__).parents[1])  # as a script this folder would be there

SHARED = Path("../shared")
MARIAN = SHARED / "checkpoints" / "marian-multi30k"
LINES = 200
COMMAND_LINES = 2000
LONGEST = 200  # max_length of the checkpoint's generation_config.json
COMPUTE_TYPES = {"fp32": "float32", "int8": "int8_float32"}

Precision = Literal["fp32", "int8"]
PRECISIONS: tuple[Precision, ...] = ("fp32", "int8")

Translate = Callable[[Sequence[str]], list[str]]


def read_lines(count: int) -> list[str]:
    """Sentences of Multi30k."""
    lines = (SHARED / "data/multi30k/train.en").read_text(encoding="utf-8").splitlines()
    return [*islice(lines, count)]


def ours(precision: Precision, beam: int, threads: int) -> Translate:
    """What `triptych translate` makes for a text."""
    import torch

    from triptych import load

    torch.set_num_threads(threads)
    with warnings.catch_warnings(action="ignore"):  # the line about the engine
        translator = load(MARIAN, engine="auto", precision=precision).translator(
            beam_size=beam, workers=threads
        )
    assert translator.engine == "ctranslate2", translator.engine
    translator = translator.without_scores()
    return lambda lines: [found.text for found in translator.translate(lines)]


def theirs(converted: Path, precision: str, beam: int, threads: int) -> Translate:
    """CTranslate2 with the pieces of SentencePiece itself."""
    import ctranslate2

    from benchmarks.workers.pieces import Pieces

    translator = ctranslate2.Translator(
        str(converted),
        device="cpu",
        compute_type=COMPUTE_TYPES[precision],
        inter_threads=threads,
        intra_threads=1,
    )
    pieces = Pieces(MARIAN)

    def translate(lines: Sequence[str]) -> list[str]:
        found = translator.translate_batch(
            [pieces.split(line) for line in lines],
            beam_size=beam,
            max_batch_size=32,
            max_decoding_length=LONGEST,
        )
        return [pieces.join(result.hypotheses[0]) for result in found]

    return translate


def num_tokens(texts: Sequence[str]) -> int:
    """Output tokens, with the ends of sentences."""
    from benchmarks.workers.pieces import Pieces

    target = Pieces(MARIAN).target
    return sum(len(target.encode(text)) + 1 for text in texts)


def rate(translate: Translate, lines: Sequence[str], size: int) -> float:
    """Output tokens a second, `size` lines at a time."""
    parts = [lines[start : start + size] for start in range(0, len(lines), size)]
    started = time.perf_counter()
    texts = [text for part in parts for text in translate(part)]
    seconds = time.perf_counter() - started
    return num_tokens(texts) / seconds


def rate_of_command(command: Sequence[str], out: Path) -> float:
    """Output tokens a second of a whole command that writes a file."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    seconds = time.perf_counter() - started
    return num_tokens(out.read_text(encoding="utf-8").splitlines()) / seconds


def commands(folder: Path, precision: str, beam: int, threads: int) -> dict[str, list[str]]:
    """Both commands for the lines of a file; each writes its own file."""
    source = folder / "source.en"
    source.write_text("".join(f"{line}\n" for line in read_lines(COMMAND_LINES)), encoding="utf-8")
    peer = [
        sys.executable,
        "-m",
        "benchmarks.default_translation",
        "--peer",
        str(folder),
        precision,
        str(beam),
    ]
    own = [sys.executable, "-m", "triptych", "translate", str(MARIAN), str(source), "--force"]
    options = ["--beam", str(beam), "--precision", precision, "--workers", str(threads)]
    return {
        "triptych": [*own, *options, "--out", str(folder / "triptych")],
        "CTranslate2": [*peer, "--threads", str(threads)],
    }


def convert(folder: Path) -> Path:
    """Convert the checkpoint with CTranslate2's own converter."""
    converted = folder / "converted"
    converter = [sys.executable, "-m", "ctranslate2.converters.transformers"]
    subprocess.run(
        [*converter, "--model", str(MARIAN), "--output_dir", str(converted)], check=True, capture_output=True
    )
    return converted


def compare(rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Rates of both by case; the order changes from round to round."""
    found: dict[str, dict[str, float]] = {}
    lines = read_lines(LINES)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        converted = convert(folder)
        for precision, beam in product(PRECISIONS, (1, 4)):
            engines = {
                "triptych": ours(precision, beam, threads),
                "CTranslate2": theirs(converted, precision, beam, threads),
            }
            for size in (1, 32):
                measured: dict[str, Callable[[], float]] = {
                    engine: partial(rate, translate, lines, size) for engine, translate in engines.items()
                }
                found[f"{precision}, beam {beam}, {size} at a time"] = in_turns(measured, rounds)
            whole = commands(folder, precision, beam, threads)
            measured = {
                engine: partial(rate_of_command, command, folder / engine)
                for engine, command in whole.items()
            }
            found[f"{precision}, beam {beam}, command on {COMMAND_LINES:,} lines"] = in_turns(
                measured, rounds
            )
    return found


def in_turns(measured: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Median rates, and the median ratio of the same rounds, after a round to warm up."""
    taken: dict[str, list[float]] = {engine: [] for engine in measured}
    for number in range(rounds + 1):
        order = [*measured] if number % 2 else [*measured][::-1]
        for engine in order:
            value = measured[engine]()
            if number:
                taken[engine].append(value)
    ratios = [own / other for own, other in zip(taken["triptych"], taken["CTranslate2"], strict=True)]
    return {engine: statistics.median(values) for engine, values in taken.items()} | {
        "ratio": statistics.median(ratios)
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1, help="sentences searched in parallel")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--peer", nargs=3, help=argparse.SUPPRESS)  # the command of CTranslate2
    given = parser.parse_args()
    if given.peer:
        folder = Path(given.peer[0])
        translate = theirs(folder / "converted", given.peer[1], int(given.peer[2]), given.threads)
        lines = (folder / "source.en").read_text(encoding="utf-8").splitlines()
        (folder / "CTranslate2").write_text(
            "".join(f"{text}\n" for text in translate(lines)), encoding="utf-8"
        )
        return
    found = compare(given.rounds, given.threads)
    print("| case | triptych by default | CTranslate2 | ratio |\n|---|---:|---:|---:|")
    for case, row in found.items():
        print(f"| {case} | {row['triptych']:,.0f} | {row['CTranslate2']:,.0f} | {row['ratio']:.2f} |")
    if given.json:
        given.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
