"""The demo: train on the generated corpus, try unseen sentences, look at the attention, report."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych import recipes, runs
from triptych.decoding import Translator, measure_bleu
from triptych.errors import UsageError
from triptych.reports import (
    AttentionPicture,
    MetricPoint,
    RunReport,
    Table,
    TranslationSample,
    write_run_report,
)
from triptych.text.generated import example_pairs, generate_pairs
from triptych.training import Recipe, read_recipe
from triptych.training.metrics import read_metrics
from triptych.training.progress import Display

_REPORT = "report.html"
# These sentences come from the test part of the corpus, of which training sees nothing.
_TEST_SEED = 1
_NUM_MISTAKES_SHOWN = 10
# Of the examples, the one whose order crosses over most: the verb comes last, and "halb vier".
_PICTURED = 1


@dataclass(frozen=True)
class Demonstration:
    """What the demo found.

    Attributes:
        num_tested: unseen sentences tried.
        exact_match: share of them translated to the letter, 0 to 1.
        bleu: of the same sentences.
        seconds: of training.
        samples: sentences to look at.
        picture: the cross-attention of one of them.
        report: the HTML page.
    """

    num_tested: int
    exact_match: float
    bleu: float
    seconds: float
    samples: tuple[TranslationSample, ...]
    picture: AttentionPicture
    report: Path

    def figures(self) -> dict[str, Any]:
        """For a machine to read."""
        return {
            "exact_match": self.exact_match,
            "bleu": self.bleu,
            "sentences": self.num_tested,
            "training_seconds": self.seconds,
            "report": str(self.report),
        }


@dataclass(frozen=True)
class Interrupted:
    """The demo was stopped by a signal while it trained; the state is saved."""

    signal_number: int


def demonstrate(
    folder: Path, display: Display, overrides: tuple[str, ...] = (), num_tested: int = 1000
) -> Demonstration | Interrupted:
    """Run the demo in a folder, going on where an interrupted one stopped.

    Args:
        folder: made if need be; a finished demo in it is replaced.
        display: shows how training goes.
        overrides: changes of the demo's recipe, `section.key=value`.
        num_tested: unseen sentences to try.

    Raises:
        UsageError: the folder holds something else than a demo.
    """
    recipe = read_recipe(recipes.find("demo"), overrides)
    summary = _train(recipe, folder, display)
    if summary.outcome.signal_number is not None:
        return Interrupted(summary.outcome.signal_number)
    translator = runs.Run.open(folder).translator()
    pairs = generate_pairs(num_tested, "test", seed=_TEST_SEED)
    display.say(f"translating {len(pairs):,} unseen sentences")
    tried = _try(translator, pairs)
    exact = sum(sample.is_exact is True for sample in tried) / len(tried)
    bleu = measure_bleu([sample.hypothesis for sample in tried], [english for _, english in pairs])
    examples = _try(translator, example_pairs())
    pictures = tuple(_picture(translator, sample.source) for sample in examples[:3])
    report = folder / _REPORT
    result = Demonstration(
        len(pairs), exact, bleu, summary.outcome.counters.seconds, examples, pictures[_PICTURED], report
    )
    mistakes = tuple(sample for sample in tried if not sample.is_exact)[:_NUM_MISTAKES_SHOWN]
    write_run_report(_report(result, summary, folder, mistakes, pictures), report)
    return result


def _train(recipe: Recipe, folder: Path, display: Display) -> runs.Summary:
    if not (folder / "recipe.toml").exists():
        return runs.train(recipe, folder, display)
    if read_recipe(folder / "recipe.toml").name != recipe.name:
        raise UsageError(f"{folder} holds another run, which the demo must not touch: name another folder")
    if (folder / _REPORT).exists():
        runs.remove(folder)
        (folder / _REPORT).unlink()
        return runs.train(recipe, folder, display)
    return runs.resume(folder, (), display)


def _try(translator: Translator, pairs: list[tuple[str, str]]) -> tuple[TranslationSample, ...]:
    translations = translator.translate([german for german, _ in pairs])
    return tuple(
        TranslationSample(german, translation.text, english)
        for (german, english), translation in zip(pairs, translations, strict=True)
    )


def _picture(translator: Translator, source: str) -> AttentionPicture:
    seen = translator.attention(source)
    return AttentionPicture(
        title=source,
        source_tokens=tuple(piece.lstrip("▁") or piece for piece in seen.source_pieces),
        target_tokens=tuple(piece.lstrip("▁") or piece for piece in seen.target_pieces),
        weights=seen.cross(-1).float().cpu().numpy(),
        caption="Cross-attention of the last decoder layer: each row shows where the model looked in the "
        "German sentence while it wrote that English token.",
    )


def _report(
    result: Demonstration,
    summary: runs.Summary,
    folder: Path,
    mistakes: tuple[TranslationSample, ...],
    pictures: tuple[AttentionPicture, ...],
) -> RunReport:
    counters = summary.outcome.counters
    return RunReport(
        title="German to English: numbers, dates, times and money",
        summary=(
            f"A Transformer with {summary.num_parameters:,} parameters learned from generated sentence pairs "
            f"and was tried on {result.num_tested:,} sentences that it had never seen: it translated "
            f"{result.exact_match:.1%} of them to the letter.\n\n"
            "German says units before tens (einundzwanzig), the coming hour before the half (halb vier) and "
            "the verb at the end of a clause. The attention pictures show the model looking ahead and back "
            "to put these in English order."
        ),
        facts=(
            ("Exact match, unseen sentences", f"{result.exact_match:.1%} of {result.num_tested:,}"),
            ("BLEU, the same sentences", f"{result.bleu:.2f}"),
            ("Parameters", f"{summary.num_parameters:,}"),
            ("Training", f"{counters.step:,} steps, {counters.tokens:,} target tokens"),
            ("Time", f"{counters.seconds / 60:.1f} minutes"),
            ("Padding", f"{summary.padding_waste:.1%} of the batches"),
        ),
        metrics=tuple(_points(folder)),
        samples=result.samples,
        pictures=pictures,
        tables=(_table(mistakes),) if mistakes else (),
        commands=(
            f"echo 'Das Buch hat einundzwanzig Euro gekostet.' | triptych translate {folder}",
            f"echo 'Das Buch hat einundzwanzig Euro gekostet.' | "
            f"triptych translate {folder} --json --attention cross:1:all",
        ),
    )


def _table(mistakes: tuple[TranslationSample, ...]) -> Table:
    return Table(
        title="What it got wrong",
        columns=("source", "translation", "reference"),
        rows=tuple((sample.source, sample.hypothesis, sample.reference or "") for sample in mistakes),
        caption=f"The first {len(mistakes)} of the unseen sentences that were not translated to the letter.",
    )


def _points(folder: Path) -> list[MetricPoint]:
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
