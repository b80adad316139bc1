"""The page of a run: how it learned, what it makes of unseen text, where its heads look."""

import json
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from triptych.attending.page import viewer_data
from triptych.errors import DataError, UsageError
from triptych.face import Model, load
from triptych.inspection.record import averages, summary
from triptych.reports import MetricPoint, Report, Table, TranslationSample, require_charts, write_report
from triptych.text.corpora import read_parallel
from triptych.training import AnyRecipe, Recipe, read_recipe
from triptych.training.folder import RECIPE, SUMMARY, holds_run
from triptych.training.language import TextOfRun
from triptych.training.metrics import read_metrics
from triptych.training.recipe import TextRecipe

_NUM_SAMPLES = 10
# Texts whose attention the page shows.
_NUM_VIEWED = 3
# Of the beginning of a text: characters that are read, and tokens that it is continued by.
_MOST_CHARACTERS, _NEW_TOKENS = 160, 40
_FIGURES = {
    "valid_loss": "Validation loss",
    "valid_perplexity": "Validation perplexity",
    "valid_bits_per_byte": "Bits per byte",
    "valid_bleu": "Validation BLEU",
}


def report(run: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a finished run: loss curve, samples, heads and attention.

    Samples are the first texts of the recipe's validation part. If they are no longer where the recipe says,
    from the current folder, the page has none.

    Args:
        run: the run folder.
        path: the page; `report.html` in the run folder if None.

    Returns:
        The path of the page.

    Raises:
        UsageError: the folder holds no run, or the extra for charts is missing.
        DataError: the run has no weights yet, or its files are damaged.
    """
    folder = Path(run)
    if not holds_run(folder):
        raise UsageError(f"{folder} holds no run of triptych: give the folder that `triptych train` made")
    require_charts()
    page = folder / "report.html" if path is None else Path(path)
    recipe, model = read_recipe(folder / RECIPE), load(folder)
    texts, why_none = _validation(recipe)
    sources = [source for source, _ in texts]
    seen = model.attend(sources[:_NUM_VIEWED]) if sources else None
    inspected = model.inspect()
    write_report(
        Report(
            title=recipe.name or folder.resolve().name,
            summary="\n\n".join([*summary(inspected)[:3], *why_none]),
            facts=_facts(folder, recipe, model),
            metrics=tuple(points(folder)),
            samples=_translated(model, texts) if isinstance(recipe, Recipe) else (),
            tables=(*_continued(model, texts), averages(inspected)),
            viewer=None if seen is None else viewer_data(seen.viewed()),
            commands=_commands(model, folder),
        ),
        page,
    )
    return page


def points(folder: Path) -> list[MetricPoint]:
    """What was measured while a run trained."""
    return [
        MetricPoint(
            step=record["step"],
            train_loss=record.get("loss"),
            valid_loss=record.get("valid_loss"),
            bleu=record.get("valid_bleu"),
            learning_rate=record.get("learning_rate"),
        )
        for record in read_metrics(folder / "metrics.jsonl")
    ]


def _validation(recipe: AnyRecipe) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """The first validation texts, each with its translation or what follows; else why there are none."""
    try:
        if isinstance(recipe, Recipe):
            data = recipe.data
            pairs = read_parallel(data.valid or data.train, max_line_chars=data.max_line_chars, base=Path())
            if data.valid is None:
                pairs = pairs.split(data.valid_share)[1]
            return list(islice(zip(pairs.source, pairs.target, strict=True), _NUM_SAMPLES)), ()
        parts = islice(TextOfRun(recipe, Path()).validation(), _NUM_SAMPLES)
        return [(part.text[:_MOST_CHARACTERS], part.text[_MOST_CHARACTERS:]) for part in parts], ()
    except (DataError, UsageError) as error:
        return [], (f"The validation text cannot be read, so there are no samples: {error}",)


def _translated(model: Model, texts: Sequence[tuple[str, str]]) -> tuple[TranslationSample, ...]:
    found = model.translate([source for source, _ in texts])
    return tuple(
        TranslationSample(source, translation.text, target)
        for (source, target), translation in zip(texts, found, strict=True)
    )


def _continued(model: Model, texts: Sequence[tuple[str, str]]) -> list[Table]:
    if "generate" not in model.can or not texts:
        return []
    found = model.generate([begin for begin, _ in texts], max_new_tokens=_NEW_TOKENS)
    rows = tuple(
        (begin, one.text, after[: len(one.text)]) for (begin, after), one in zip(texts, found, strict=True)
    )
    return [
        Table(
            "Validation texts, continued greedily",
            ("the text begins", "the model goes on", "the text goes on"),
            rows,
        )
    ]


def _facts(folder: Path, recipe: AnyRecipe, model: Model) -> tuple[tuple[str, str], ...]:
    found = [("Run", str(folder)), ("Model", repr(model).partition(": ")[2])]
    if isinstance(recipe, TextRecipe):
        found.append(("Task", recipe.task))
    try:
        ended: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return (*found, ("Training", "not finished"))
    found += [
        ("Training", f"{ended['steps']:,} steps, {ended['tokens']:,} tokens"),
        ("Time", f"{ended['seconds'] / 60:.1f} minutes, {ended['tokens_per_second']:,.0f} tokens a second"),
        ("Weights", f"{ended['chosen']}, step {ended['best_step']:,} by {ended['best_by']}"),
    ]
    if ended["chosen"] != "average":
        return (*found, (f"Validation {ended['best_by']}", f"{ended['best_score']:.4g}"))
    scores = ended.get("average_scores") or {}
    return (*found, *((_FIGURES[name], f"{value:.4g}") for name, value in scores.items() if name in _FIGURES))


def _commands(model: Model, folder: Path) -> tuple[str, ...]:
    uses = {
        "translate": f'triptych translate {folder} "…"',
        "generate": f'triptych generate {folder} "…"',
        "fill": f'triptych fill {folder} "… [MASK] …"',
    }
    return (
        *(command for name, command in uses.items() if name in model.can),
        f"triptych inspect {folder} --html heads.html",
        f'triptych attend {folder} "…" --html attention.html',
    )
