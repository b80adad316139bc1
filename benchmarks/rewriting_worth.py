"""What rewriting is worth on weights that others trained: the tables of `docs/results/rewriting-worth.md`.

    python benchmarks/rewriting_worth.py MODEL --text test.txt --calibration valid.txt --tokens 2048

Every row is one call of `Model.rewrite` on the model as it lies there. Both models read the same beginning of
the text; a rewrite that uses a text uses the beginning of the other one. A model without a head that predicts
tokens is compared by its hidden states, and by the cosine of its mean-pooled vectors, line by line.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cosine_similarity

from triptych import Model, TriptychError, load
from triptych.rewriting.certificate import Certificate
from triptych.rewriting.outcome import outcome

# Steps in the notation of `triptych rewrite --do`.
STEPS = (
    "exact",
    "merge_kv_heads(num_kv_heads=1)",
    "truncate(budget=0.9)",
    "truncate(budget=0.7)",
    "truncate(budget=0.5)",
    "truncate(forms=['qk'], budget=0.5)",
    "truncate(forms=['ov'], budget=0.75)",
    "truncate(forms=['ov'], budget=0.5)",
    "truncate(forms=['ov'], budget=0.75, criterion='uncentred')",
    "truncate(forms=['ov'], budget=0.5, criterion='uncentred')",
    "prune_heads(number=1)",
    "prune_heads(number=1, on_text=True)",
    "to_latent()",
    "to_latent(rank=256)",
    "to_latent(format='deepseek_v3')",
)
_HEADER = ("rewrite", "tier", "attention parameters", "bytes cached a token")
# Lines whose vectors are compared: short enough for every model.
_LINES = 64
_MOST_WORDS = 150


def main() -> None:
    """Print the table of a model."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        model = load(arguments.model, device="cpu", dtype="float32")
        text, calibration = (
            beginning(model, path, arguments.tokens, Path(folder) / path.name)
            for path in (arguments.text, arguments.calibration)
        )
        predicts = model.reader.predicts
        ends = ("loss", "divergence") if predicts else ("change", "cosine: mean", "least")
        ends = (*ends, "outcome")
        print(row((*_HEADER, *ends)), row(["---"] * (len(_HEADER) + len(ends))), sep="\n", flush=True)
        for step in arguments.steps or STEPS:
            print(row((f"`{step}`", *measured(model, step, text, calibration))), flush=True)


def measured(model: Model, step: str, text: Path, calibration: Path) -> Sequence[str]:
    """Rewrite the model by one step; the cells of its row."""
    predicts = model.reader.predicts
    needs_text = "on_text" in step or "uncentred" in step
    try:
        rewritten = model.rewrite(
            step,
            calibration=calibration if needs_text else None,
            text=text,
        )
    except TriptychError as refused:
        return f"refused: {refused}", "", "", "", "", ""
    certificate = rewritten.certificate
    assert certificate is not None
    cells = [certificate.tier, *costs(certificate)]
    if not predicts:
        found = certificate.end_to_end
        assert found is not None
        cells.append(f"{found.relative:.2g}")
        return [*cells, *cosines(model, rewritten, text), outcome(found)]
    found = certificate.end_to_end
    if found is None or found.loss_before_nats is None or found.loss_after_nats is None:
        return [*cells, certificate.not_compared]
    rise = found.loss_after_nats - found.loss_before_nats
    loss = f"{found.loss_before_nats:.4f} → {found.loss_after_nats:.4f} ({rise:+.4f})"
    return [*cells, loss, f"{found.divergence_nats:.2g}", outcome(found)]


def costs(certificate: Certificate) -> tuple[str, str]:
    """Parameters and cache afterwards, as shares; without what a fixed format fills with zeros."""
    after = certificate.unpadded or certificate.after
    before = certificate.before
    cached = before.kv_bytes_per_token
    share = f"{after.kv_bytes_per_token / cached:.1%}" if cached else "–"
    return f"{after.parameters / before.parameters:.1%}", share


def cosines(model: Model, rewritten: Model, text: Path) -> tuple[str, str]:
    """Cosines of the vectors of lines, before and after."""
    lines = [
        line for line in text.read_text(encoding="utf-8").splitlines() if 3 < len(line.split()) <= _MOST_WORDS
    ]
    pairs = [(vector(model, line), vector(rewritten, line)) for line in lines[:_LINES]]
    found = [float(cosine_similarity(one, other, dim=0)) for one, other in pairs]
    return f"{statistics.fmean(found):.6f}", f"{min(found):.6f}"


@torch.no_grad()
def vector(model: Model, line: str) -> torch.Tensor:
    """The mean of the last hidden states of a line."""
    return model.run(line).logits.mean(dim=0)


def beginning(model: Model, path: Path, tokens: int, out: Path) -> Path:
    """Write the first tokens of a text, in whole lines."""
    kept = []
    left = tokens
    for line in path.read_text(encoding="utf-8").splitlines():
        left -= len(model.reader.tokenizer.encode([line])[0])
        if left < 0:
            break
        kept.append(line)
    out.write_text("\n".join(kept), encoding="utf-8")
    return out


def row(cells: Sequence[str]) -> str:
    """A row of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder, a file or a name, as for `triptych.load`")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=2048, help="of each text")
    parser.add_argument("--steps", nargs="*", default=[], help="in the place of the table's own")
    return parser.parse_args()


if __name__ == "__main__":
    main()
