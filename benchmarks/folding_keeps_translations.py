"""Folding stacked projections keeps the translations and costs fewer parameters and less time.

    python benchmarks/folding_keeps_translations.py runs/multi30k-stacked \
        ../shared/data/multi30k/test_2016_flickr.en --rounds 3

Translates a text with a run as it was trained and with its folded model, in turns; names the lines that
differ and by how much the two hypotheses are apart in the model that was trained.
"""

import argparse
import json
import platform
import statistics
import time
from importlib.metadata import version
from pathlib import Path

import torch

from triptych.core.models import EncoderDecoder
from triptych.rewriting import rewrite
from triptych.rewriting.functions import fold
from triptych.running.decoding import Translation, Translator, length_penalty
from triptych.running.opening import Reader, open_translator
from triptych.running.text import read_lines


def score(run: Reader, model: EncoderDecoder, source: str, pieces: list[int], alpha: float) -> float:
    """The search's score of a given output: log-probability over the length penalty."""
    src_tok, tgt_tok = run.tokenizers.source, run.tokenizers.target
    src = torch.tensor([[*src_tok.encode([source.strip()])[0], src_tok.eos_id]])
    ids = [*pieces, tgt_tok.eos_id]
    with torch.inference_mode():
        log_probs = model(src, torch.tensor([[tgt_tok.bos_id, *pieces]])).log_softmax(dim=-1)[0]
    total = float(log_probs[range(len(ids)), ids].sum())
    return total / length_penalty(len(ids), alpha)


def translate(run: Reader, model: EncoderDecoder, lines: list[str]) -> tuple[list[Translation], float]:
    translator = Translator(model, run.tokenizers, run.search_options())
    started = time.perf_counter()
    order = sorted(range(len(lines)), key=lambda i: len(lines[i]))
    found = translator.translate([lines[i] for i in order])
    seconds = time.perf_counter() - started
    by_line = dict(zip(order, found, strict=True))
    return [by_line[i] for i in range(len(lines))], seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("source", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    run = open_translator(arguments.run, "cpu")
    lines = read_lines(arguments.source)
    trained = run.encoder_decoder.eval()
    outcome = rewrite(trained, fold)
    folded = outcome.result.eval()
    for site, (record,) in outcome.records.items():
        print(f"{site}: {record.choice}")
    seconds: dict[str, list[float]] = {"trained": [], "folded": []}
    found: dict[str, list[Translation]] = {}
    for _ in range(arguments.rounds):
        for name, model in (("trained", trained), ("folded", folded)):
            found[name], taken = translate(run, model, lines)
            seconds[name].append(taken)
    tokens = sum(len(t.candidates[0].pieces) for t in found["trained"] if t.candidates)
    speeds = {name: [tokens / s for s in taken] for name, taken in seconds.items()}
    alpha = run.search_options().alpha
    differing = []
    for line, old, new in zip(lines, found["trained"], found["folded"], strict=True):
        if old.text == new.text:
            continue
        scores = [
            score(run, trained, line, run.tokenizers.target.encode([t.text])[0], alpha) for t in (old, new)
        ]
        differing.append(
            {"source": line, "trained": old.text, "folded": new.text, "score_gap": scores[0] - scores[1]}
        )
    sizes = {
        name: sum(p.numel() for p in model.parameters())
        for name, model in (("trained", trained), ("folded", folded))
    }
    figures = {
        "machine": f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triptych": version("triptych"),
        "lines": len(lines),
        "identical": len(lines) - len(differing),
        "parameters": sizes,
        "tokens_per_second": {name: statistics.median(values) for name, values in speeds.items()},
        "spread": {name: [min(values), max(values)] for name, values in speeds.items()},
        "differing": differing,
    }
    print(json.dumps(figures, indent=2, ensure_ascii=False))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
