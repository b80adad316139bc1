"""Compression: perplexity or BLEU against the rank of W_QK or W_OV, for each way to choose what is kept."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import altair as alt
import sacrebleu
import torch

from benchmarks.harness.command import Command, NotHereError
from benchmarks.harness.page import Page
from triptych.core.algebra.rewritten import Rewritten, rewritten
from triptych.core.algebra.weights import AttentionWeights, Side
from triptych.core.checkpoints.checkpoint import open_checkpoint
from triptych.core.checkpoints.stored_layers import AttentionLayer
from triptych.rewriting.functions import LayerToRewrite, Rewrite, Truncate
from triptych.rewriting.recipe import RewriteRecipe
from triptych.rewriting.whole_checkpoint import rewrite_checkpoint
from triptych.running.opening import TransformersReader, Window, open_translator

_NAIVE = "each matrix by itself"
_WAYS = (_NAIVE, "free", "uncentred", "centred")
_Form = Literal["qk", "qk pairs", "ov"]
_SHARES = (0.75, 0.5, 0.25, 0.125)
_NAMES = {"qk": "W_QK", "qk pairs": "W_QK, rotary pairs", "ov": "W_OV"}
_BATCH = 32
_PAIRS = 400
_CALIBRATION_CHARACTERS = 50_000  # some 16,000 tokens


class Model(NamedTuple):
    """A checkpoint, the text it is calibrated on, how it is judged, and in what."""

    name: str
    calibration: Path
    judge: Callable[[Path], float]
    unit: str


def measure(command: Command) -> Page:
    """Every model, form, way and rank; the picture beside."""
    record = _of_others(command)
    for model in _models(command):
        folder = command.shared / "checkpoints" / model.name
        whole = model.judge(folder)
        record.append({"model": model.name, "unit": model.unit, "form": "", "way": "whole", "figure": whole})
        command.tell(f"{model.name}: {whole:.2f} {model.unit}")
        for form, way, rank, full in _settings(folder, command.quick):
            figure = _judged(command, folder, model, form, way, rank)
            record.append(
                {
                    "model": model.name,
                    "unit": model.unit,
                    "form": form,
                    "way": way,
                    "rank": rank,
                    "of": full,
                    "figure": figure,
                }
            )
            command.tell(f"{model.name}, {form} {rank} of {full}, {way}: {figure:.2f}")
    _draw(record, command.results / "compression.svg")
    return Page(
        name="compression",
        title="Compression of W_QK and W_OV: perplexity (lower is better) or BLEU by rank",
        columns=("model", "form", "rank", *_WAYS),
        rows=list(_rows(record)),
        notes=(
            "All layers at one rank, the other form whole. Rotary W_QK is that of the maps before they are "
            "turned, or as many channels in whole rotary pairs; means are taken off where the softmax or an "
            f"output bias lets it. Calibrated on {_CALIBRATION_CHARACTERS:,} characters of tinyshakespeare, "
            f"or {_PAIRS} Multi30k pairs; judged on the held-out part (as the checkpoints' own scores), or "
            "on test_2016_flickr, greedy.",
        ),
        record={"rows": record},
        num_texts=2,
    )


def _of_others(command: Command) -> list[dict[str, Any]]:
    """What was measured before of models that are not asked for now."""
    path = command.results / "compression.json"
    if not command.only or not path.exists():
        return []
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["model"] not in command.only]


def _models(command: Command) -> list[Model]:
    text = command.shared / "data" / "tinyshakespeare" / "input.txt"
    pairs = command.shared / "data" / "multi30k"
    if not text.exists() or not pairs.is_dir() or not (command.shared / "checkpoints" / "gpt2").is_dir():
        raise NotHereError(f"compression needs {text}, {pairs} and the checkpoints, which are not here")
    work = command.work / "compression"
    work.mkdir(parents=True, exist_ok=True)
    whole = text.read_text(encoding="utf-8")
    cut = int(len(whole) * 0.95)
    (work / "train.txt").write_text(whole[: min(cut, _CALIBRATION_CHARACTERS)], encoding="utf-8")
    (work / "held_out.txt").write_text(whole[cut:], encoding="utf-8")
    sides = [(pairs / f"train.{side}").read_text(encoding="utf-8").splitlines() for side in ("en", "de")]
    lines = [f"{one}\t{other}" for one, other in list(zip(*sides, strict=True))[:_PAIRS]]
    (work / "pairs.tsv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    tokens = 4_000 if command.quick else 1 << 30
    sentences = 50 if command.quick else 1_000

    def perplexity(folder: Path) -> float:
        return _perplexity(folder, work / "held_out.txt", tokens)

    def bleu(folder: Path) -> float:
        return _bleu(folder, pairs, sentences)

    models = [
        Model("gpt2", work / "train.txt", perplexity, "perplexity"),
        Model("llama-gqa", work / "train.txt", perplexity, "perplexity"),
        Model("marian-multi30k", work / "pairs.tsv", bleu, "BLEU"),
    ]
    return [model for model in models if not command.only or model.name in command.only]


def _settings(folder: Path, quick: bool) -> Iterator[tuple[_Form, str, int, int]]:
    source = open_checkpoint(folder)
    layer = source.read(source.sites[0])
    d_k, d_v = (layer.weights.chain(side)[-1].d_out for side in ("q", "v"))
    forms: list[tuple[_Form, int]] = [("qk", d_k), ("ov", d_v)]
    if layer.weights.semantics.rotary is not None:
        forms.insert(1, ("qk pairs", d_k))
    for form, full in forms:
        for share in _SHARES[1::2] if quick else _SHARES:
            for way in _WAYS:
                if form == "qk pairs" and way == _NAIVE:
                    continue
                if not (way == "centred" and _stays_uncentred(layer, form)):
                    yield form, way, max(2, int(full * share) // 2 * 2), full


def _stays_uncentred(layer: AttentionLayer, form: _Form) -> bool:
    """Whether no mean may be taken off: `centred` would be `uncentred`."""
    if form == "ov":
        return "o" not in layer.weights.bias_slots
    return layer.weights.semantics.rotary is not None


def _judged(command: Command, folder: Path, model: Model, form: _Form, way: str, rank: int) -> float:
    cut = {"forms": (form[:2],), "rank": rank}
    step: Rewrite = (
        EachMatrix.model_validate(cut)
        if way == _NAIVE
        else Truncate.model_validate(
            {**cut, "criterion": way, "rotary": "pairs" if form == "qk pairs" else "maps"}
        )
    )
    recipe = RewriteRecipe.model_construct(
        step=(step,), skip_refused=False, calibration=model.calibration if step.needs_text else None
    )
    out = command.work / "compression" / "rewritten"
    shutil.rmtree(out, ignore_errors=True)
    rewrite_checkpoint(str(folder), out, recipe, compare=False)
    return model.judge(out)


class EachMatrix(Rewrite):
    """The way that does not know of forms: W_Q and W_K (W_V and W_O) cut each by itself."""

    name = "each_matrix"
    tier = "bounded"
    place = 6

    forms: tuple[str, ...]
    rank: int

    def apply(self, layer: LayerToRewrite) -> Rewritten:
        sides: tuple[Side, ...] = ("q", "k") if self.forms == ("qk",) else ("v", "o")
        weights = layer.weights
        cut: dict[str, Any] = {side: (self._cut(weights, side),) for side in sides}
        new = replace(weights, **cut)
        return rewritten("each_matrix", "bounded", weights, new)

    def _cut(self, weights: AttentionWeights, side: Side) -> Any:
        (link,) = weights.chain(side)
        U, S, Vh = torch.linalg.svd(link.weight, full_matrices=False)
        near = (U[..., : self.rank] * S[..., None, : self.rank]) @ Vh[..., : self.rank, :]
        return type(link)(near, link.bias)


@torch.inference_mode()
def _perplexity(folder: Path, text: Path, most_tokens: int) -> float:
    model = TransformersReader(folder)
    total, tokens = 0.0, 0
    batch: list[Window] = []
    windows = list(model.windows(text, most_tokens))
    for window in windows:
        batch.append(window)
        if len(batch) < _BATCH and window is not windows[-1]:
            continue
        full = [w for w in batch if w.inputs["input_ids"].shape == batch[0].inputs["input_ids"].shape]
        for group in (full, *([w] for w in batch if w not in full)):
            ids = torch.cat([w.inputs["input_ids"] for w in group])
            targets = torch.stack([w.targets for w in group if w.targets is not None])
            logits = model.model(input_ids=ids).logits
            total += float(
                torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            )
            tokens += targets.numel()
        batch = []
    return float(torch.tensor(total / tokens).exp())


def _bleu(folder: Path, pairs: Path, sentences: int) -> float:
    lines = [
        (pairs / f"test_2016_flickr.{side}").read_text(encoding="utf-8").splitlines()[:sentences]
        for side in ("en", "de")
    ]
    run = open_translator(folder, "cpu")
    translated = run.translator(run.search_options(beam_size=1)).translate(lines[0])
    return float(sacrebleu.corpus_bleu([found.text for found in translated], [lines[1]]).score)


def _rows(record: list[dict[str, Any]]) -> Iterator[list[str]]:
    whole = {row["model"]: row["figure"] for row in record if row["way"] == "whole"}
    for model, figure in whole.items():
        yield [model, "whole", "", f"{figure:.2f}", "", "", ""]
        mine = [row for row in record if row["model"] == model and row["form"]]
        for form, rank in dict.fromkeys((row["form"], row["rank"]) for row in mine):
            found = {row["way"]: row for row in mine if (row["form"], row["rank"]) == (form, rank)}
            cells = [f"{found[way]['figure']:.2f}" if way in found else "–" for way in _WAYS]
            yield [model, _NAMES[form], f"{rank} of {next(iter(found.values()))['of']}", *cells]


def _draw(record: list[dict[str, Any]], path: Path) -> None:
    """A panel for each model and form: the figure against the rank, a line for each way."""
    rows = [{**row, "panel": f"{row['model']}, {_NAMES[row['form']]}"} for row in record if row["form"]]
    charts = []
    for panel in dict.fromkeys(row["panel"] for row in rows):
        mine = [row for row in rows if row["panel"] == panel]
        base = next(
            row["figure"] for row in record if row["way"] == "whole" and row["model"] == mine[0]["model"]
        )
        perplexity = mine[0]["unit"] == "perplexity"
        worst = 2.5 * base if perplexity else 0.0
        shown = [row for row in mine if not perplexity or row["figure"] <= worst]
        line = (
            alt.Chart(alt.Data(values=shown), title=panel)
            .mark_line(point=True)
            .encode(
                x=alt.X("rank:Q", title="rank"),
                y=alt.Y("figure:Q", title=mine[0]["unit"], scale=alt.Scale(zero=False)),
                color=alt.Color("way:N", title="kept by", sort=list(_WAYS)),
            )
            .properties(width=260, height=180)
        )
        rule = (
            alt.Chart(alt.Data(values=[{"figure": base}])).mark_rule(strokeDash=[4, 4]).encode(y="figure:Q")
        )
        charts.append(line + rule)
    path.parent.mkdir(parents=True, exist_ok=True)
    alt.concat(*charts, columns=2).save(path)
