"""HTML page of a run: end of its training, loss curve, outputs on unseen text, attention of its heads."""

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from triptych.errors import DataError, UsageError, near_path
from triptych.model import Model, load
from triptych.running.opening import RECIPE
from triptych.seeing.attending import (
    AttentionPage,
    join_pages,
    viewer_data,
)
from triptych.seeing.inspection import (
    averages,
    findings,
)
from triptych.seeing.reports import (
    MetricPoint,
    Report,
    Table,
    TranslationSample,
    require_charts,
    write_report,
)
from triptych.training import AnyRecipe, Recipe, read_recipe, task_of
from triptych.training.folder import SUMMARY, holds_run, read_metrics
from triptych.untrusted import read_json

_NUM_SAMPLES = 10
# Number of texts with attention on the page.
_NUM_VIEWED = 3
# Maximum number of characters of a prompt, and number of new tokens.
_MOST_CHARACTERS = 160
_NEW_TOKENS = 40
# A rise of the validation loss from its minimum to the end, as a share of the minimum, from which a run
# overfits if its training loss falls in the meantime.
_RISE = 0.02
# Number of records of the training loss in a mean: single batches vary.
_AVERAGED = 5
_FIGURES = {
    "valid_loss": "Validation loss",
    "valid_perplexity": "Validation perplexity",
    "valid_bits_per_byte": "Bits per byte",
    "valid_bleu": "Validation BLEU",
    "valid_chrf": "Validation chrF",
}


def report(run: str | Path, path: str | Path | None = None) -> Path:
    """Write the page of a run: loss curve, samples, heads and attention.

    Samples are the first texts of the recipe's validation part. If the validation files are not found,
    relative to the current folder, the page has no samples.

    Args:
        run: run folder.
        path: path of the page; `report.html` in the run folder if None.

    Returns:
        The path of the page.

    Raises:
        UsageError: the folder is not a run, or the extra for charts is missing.
        DataError: the run does not have weights yet, or its files are damaged.
    """
    folder = Path(run)
    if not holds_run(folder):
        raise UsageError(
            f"{folder} holds no run of triptych{near_path(folder)}: give a folder that `triptych train` made"
        )
    require_charts()
    page = folder / "report.html" if path is None else Path(path)
    recipe = read_recipe(folder / RECIPE)
    model = load(folder)
    texts, why_none = _validation_texts(recipe, model)
    seen = _attended(model, [source for source, _ in texts])
    inspected = model.inspect()
    metrics = points(folder)
    ended = read_json(folder / SUMMARY) if (folder / SUMMARY).exists() else None
    write_report(
        Report(
            title=recipe.name or folder.resolve().name,
            summary="\n\n".join([how_it_learned(metrics, ended), *why_none]),
            findings=findings(inspected)[:3],
            facts=_facts_of_run(folder, recipe, model, ended),
            metrics=tuple(metrics),
            samples=_translated(model, texts) if "translate" in model.can else (),
            has_one_answer=_has_one_answer(recipe),
            tables=(*_continued_table(model, texts), averages(inspected)),
            viewer=viewer_data(join_pages(seen)) if seen else None,
            commands=_commands(model, folder),
        ),
        page,
    )
    return page


def points(folder: Path) -> list[MetricPoint]:
    """Return the metrics recorded during the training of a run."""
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


def how_it_learned(
    metrics: Sequence[MetricPoint], ended: Mapping[str, Any] | None
) -> str:
    """Return the outcome of a training in a sentence or two: its best validation, and if it overfits.

    `ended` is the summary of a finished run; None for a run in progress.
    """
    validated = [
        (point.step, point.valid_loss)
        for point in metrics
        if point.valid_loss is not None
    ]
    steps = metrics[-1].step if metrics else 0
    unfinished = (
        ""
        if ended is not None
        else f" The training is at step {steps:,} and not finished."
    )
    if not validated:
        return f"The run has not been validated yet.{unfinished}"
    if lost := [step for step, loss in validated if not math.isfinite(loss)]:
        return f"The training diverged: the validation loss is not finite at step {lost[0]:,}.{unfinished}"
    best_step, best = min(validated, key=lambda one: one[1])
    last_step, last = validated[-1]
    at_best = _training_loss(metrics, best_step)
    at_end = _training_loss(metrics, last_step)
    if (
        last > (1 + _RISE) * best
        and at_best is not None
        and at_end is not None
        and at_end < at_best
    ):
        kept = (
            ""
            if ended is None
            else f" The stored weights are {_KEPT[ended['chosen']]}."
        )
        return (
            f"It overfits: after step {best_step:,} the validation loss rises from {best:.3f} to {last:.3f} "
            f"(step {last_step:,}), while the training loss falls from {at_best:.3f} to {at_end:.3f}.{kept}"
            f"{unfinished}"
        )
    if best_step == last_step:
        more = (
            "It was still falling at the last validation"
            if len(validated) > 1
            else "It is the only validation"
        )
        return f"The validation loss is {best:.3f} after {best_step:,} steps. {more}.{unfinished}"
    lowest = (
        f"The validation loss is {best:.3f} at its lowest, after {best_step:,} steps"
    )
    end = f"{last:.3f} at the end, after {last_step:,}"
    settled = ": the run does not overfit" if last <= (1 + _RISE) * best else ""
    return f"{lowest}, and {end}{settled}.{unfinished}"


def _training_loss(metrics: Sequence[MetricPoint], step: int) -> float | None:
    """Return the mean of the last training losses up to a step; None without a finite loss."""
    known = [
        point.train_loss
        for point in metrics
        if point.step <= step
        and point.train_loss is not None
        and math.isfinite(point.train_loss)
    ]
    return statistics.fmean(known[-_AVERAGED:]) if known else None


_KEPT = {
    "best": "from the best validation",
    "average": "an average of the last checkpoints",
}


def _has_one_answer(recipe: AnyRecipe) -> bool:
    """Return True if the validation text is generated: its references are the only right translations."""
    if not isinstance(recipe, Recipe):
        return False
    data = recipe.data
    validated = data.corpora if data.valid is None else (data.valid,)
    return all(corpus.generated is not None for corpus in validated)


def _validation_texts(
    recipe: AnyRecipe, model: Model
) -> tuple[list[tuple[str, str]], tuple[str, ...]]:
    """Return the first validation texts as pairs of input and reference, and messages about their absence.

    The reference is the translation, or the continuation of the input.
    """
    try:
        samples = islice(task_of(recipe).validation_samples(Path()), _NUM_SAMPLES)
        return [
            _beginning_and_rest(text, model)
            if translation is None
            else (text, translation)
            for text, translation in samples
        ], ()
    except (DataError, UsageError) as error:
        return [], (
            f"The validation text cannot be read, so there are no samples: {error}",
        )


def _beginning_and_rest(text: str, model: Model) -> tuple[str, str]:
    """Split a text into a prompt of at most half of the model's context and the following text."""
    tokenizer = model.reader.tokenizer
    most = (model.reader.language_model.context or 2 * _MOST_CHARACTERS) // 2
    (ids,) = tokenizer.encode([text[:_MOST_CHARACTERS]])
    begin = (
        text[:_MOST_CHARACTERS]
        if len(ids) <= most
        else tokenizer.decode([ids[:most]])[0]
    )
    return begin, text[len(begin) :]


def _attended(model: Model, texts: Sequence[str]) -> list[AttentionPage]:
    """Return attention pages of the first texts that fit into the model's context."""
    pages = list[AttentionPage]()
    for text in texts:
        with suppress(UsageError):  # too long
            pages.append(model.attend([text]).viewed())
        if len(pages) == _NUM_VIEWED:
            break
    return pages


def _translated(
    model: Model, texts: Sequence[tuple[str, str]]
) -> tuple[TranslationSample, ...]:
    found = model.translate([source for source, _ in texts])
    return tuple(
        TranslationSample(source, translation.text, target)
        for (source, target), translation in zip(texts, found, strict=True)
    )


def _continued_table(model: Model, texts: Sequence[tuple[str, str]]) -> list[Table]:
    if "generate" not in model.can or not texts:
        return []
    found = model.generate([begin for begin, _ in texts], max_new_tokens=_NEW_TOKENS)
    rows = tuple(
        (begin, one.text, after[: len(one.text)])
        for (begin, after), one in zip(texts, found, strict=True)
    )
    return [
        Table(
            "Validation texts, continued greedily",
            ("the text begins", "the model goes on", "the text goes on"),
            rows,
        )
    ]


def _facts_of_run(
    folder: Path, recipe: AnyRecipe, model: Model, ended: Mapping[str, Any] | None
) -> tuple[tuple[str, str], ...]:
    found = [("Run", str(folder)), ("Model", repr(model).partition(": ")[2])]
    if "translate" not in model.can:
        found.append(("Task", recipe.task))
    if ended is None:
        return (*found, ("Training", "not finished"))
    found += [
        ("Training", f"{ended['steps']:,} steps, {ended['tokens']:,} tokens"),
        (
            "Time",
            f"{ended['seconds'] / 60:.1f} minutes, {ended['tokens_per_second']:,.0f} tokens a second",
        ),
        ("Weights", ended["chosen"]),
    ]
    if ended["chosen"] == "best":
        best = f"{ended['best_score']:.4g}, step {ended['best_step']:,}"
        return (*found, (f"Validation {ended['best_by']}", best))
    scores = ended["average_scores"] or {}
    return (
        *found,
        *(
            (_FIGURES[name], f"{value:.4g}")
            for name, value in scores.items()
            if name in _FIGURES
        ),
    )


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
