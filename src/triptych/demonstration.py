"""Demo: train on the generated corpus, translate unseen sentences, show attention, fold a layer, report."""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from triptych.core.models import EncoderDecoder, attention_sites
from triptych.errors import UsageError
from triptych.extras import require_extra
from triptych.files import cache_folder, hold_folder, move_files
from triptych.rewriting import rewrite
from triptych.rewriting.functions import fold
from triptych.run_page import points
from triptych.running.decoding import Translator, measure_bleu
from triptych.running.opening import Reader, open_translator
from triptych.seeing.attending import (
    Attention,
    AttentionBatch,
    attend_tokens,
    viewer_data,
)
from triptych.seeing.reports import (
    AttentionPicture,
    MetricPoint,
    Report,
    Table,
    TranslationSample,
    is_page,
    write_report,
)
from triptych.training import Recipe, read_recipe, require_translation, runs
from triptych.training.corpora.generated import example_pairs, generate_pairs
from triptych.training.folder import holds_run, own_files
from triptych.training.progress import Display, LineDisplay

_REPORT = "report.html"
# Subfolder of a finished demo in which a new demo is made.
_NEXT = ".next"
# Seed of the test sentences, from the test part of the corpus (unused in training).
_TEST_SEED = 1
_NUM_MISTAKES_SHOWN = 10
# Index of the example with the largest change of word order: a final verb and "halb vier".
_PICTURED = 1
# Number of sentences with attention in the report.
_NUM_VIEWED = 3
# Layer that the recipe parameterises with chains of two maps.
_STACKED_SITE = "encoder.0"
# Sizes of the batch for timing, as in a typical batch of sentences.
_TIMED_BATCH = 32
_TIMED_TOKENS = 24
_TIMED_ROUNDS = 60


@dataclass(frozen=True)
class Folding:
    """Result of folding the layer with chains of two maps.

    Attributes:
        site: name of the layer.
        parameters: parameters of the whole model, before and after.
        layer_parameters: parameters of the layer's attention, before and after.
        layer_seconds: median time of the layer's forward pass, before and after.
        num_same: number of unseen sentences with identical translations by both models.
        num_tested: number of unseen sentences.
        largest_difference: largest difference between logits of both models on the example sentences,
            relative to the largest logit.
        choice: the fold's report of its choices.
    """

    site: str
    parameters: tuple[int, int]
    layer_parameters: tuple[int, int]
    layer_seconds: tuple[float, float]
    num_same: int
    num_tested: int
    largest_difference: float
    choice: str

    @property
    def speedup(self) -> float:
        before, after = self.layer_seconds
        return before / after


@dataclass(frozen=True)
class Demonstration:
    """Results of the demo."""

    num_tested: int  # number of unseen sentences
    exact_match: float  # share of unseen sentences translated to the letter, 0 to 1
    bleu: float  # BLEU of the unseen sentences
    seconds: float  # training time
    samples: tuple[TranslationSample, ...]  # example sentences
    picture: AttentionPicture  # cross-attention of an example sentence
    folding: Folding  # result of folding the stacked layer
    report: Path  # path of the HTML page

    def figures(self) -> dict[str, Any]:
        return {
            "exact_match": self.exact_match,
            "bleu": self.bleu,
            "sentences": self.num_tested,
            "training_seconds": self.seconds,
            "folded_layer": self.folding.site,
            "parameters": list(self.folding.parameters),
            "same_translations_after_folding": self.folding.num_same,
            "layer_speedup": self.folding.speedup,
            "report": str(self.report),
        }


@dataclass(frozen=True)
class Interrupted:
    """Result of a demo stopped by a signal during training, with its state saved."""

    signal_number: int


def demo(
    folder: str | Path,
    display: Display | None = None,
    overrides: tuple[str, ...] = (),
    num_tested: int = 1000,
    *,
    force: bool = False,
) -> Demonstration | Interrupted:
    """Run the demo in a folder, resuming an interrupted demo.

    Args:
        folder: demo folder, created if necessary. A finished demo in it is replaced when the new demo is
            complete; other files stay.
        display: display of training progress; lines on standard error if None.
        overrides: changes of the demo's recipe, `section.key=value`.
        num_tested: number of unseen sentences to translate.
        force: allow a folder with other files; files with the name of a demo's file are replaced.

    Raises:
        UsageError: the folder has files other than a demo's, or another process is working in it.
    """
    require_extra("demo", "num2words", "vl_convert", what="the demo")
    folder = Path(folder)
    display = display or LineDisplay()
    kept = f"data.cache={json.dumps(str(cache_folder()))}"
    recipe = require_translation(read_recipe("demo", (kept, *overrides)), "the demo")
    place = _working_place(recipe, folder, force)
    summary = _train_or_resume(recipe, place, display, force)
    if summary.outcome.signal_number is not None:
        return Interrupted(summary.outcome.signal_number)
    with hold_folder(place, wait=False):
        # Test on unseen sentences, then record attention of the examples, fold a layer, and write the report.
        run = open_translator(place)
        translator = run.translator()
        pairs = generate_pairs(num_tested, "test", seed=_TEST_SEED)
        display.say(f"translating {len(pairs):,} unseen sentences")
        tried = _try(translator, pairs)
        exact = sum(sample.is_exact is True for sample in tried) / len(tried)
        bleu = measure_bleu(
            [sample.hypothesis for sample in tried], [english for _, english in pairs]
        )
        examples = _try(translator, example_pairs())
        viewed = run.encode([sample.source for sample in examples[:_NUM_VIEWED]])
        seen = AttentionBatch(attend_tokens(run, viewed))
        display.say(f"folding {_STACKED_SITE} and translating them again")
        folding = _fold(run, tried)
        report = folder / _REPORT
        result = Demonstration(
            num_tested=len(pairs),
            exact_match=exact,
            bleu=bleu,
            seconds=summary.outcome.counters.seconds,
            samples=examples,
            picture=_picture(seen[_PICTURED], examples[_PICTURED].source),
            folding=folding,
            report=report,
        )
        mistakes = tuple(sample for sample in tried if not sample.is_exact)[
            :_NUM_MISTAKES_SHOWN
        ]
        page = _demo_report(result, summary, folder, points(place), (mistakes, seen))
        write_report(page, place / _REPORT)
        if place != folder:
            _replace(place, folder)
        return result


def _train_or_resume(
    recipe: Recipe, place: Path, display: Display, force: bool
) -> runs.Summary:
    if holds_run(place):
        return runs.resume(place, (), display)
    return runs.train(recipe, place, display, force=force)


def _working_place(recipe: Recipe, folder: Path, force: bool) -> Path:
    """Return the folder to work in: the demo's folder, or a subfolder of a finished demo to be replaced."""
    new = folder / _NEXT
    if (
        new / _REPORT
    ).exists():  # the process was killed during the replacement: finish the replacement
        _require_demo(recipe, folder if holds_run(folder) else new)
        with hold_folder(new, wait=False):
            move_files(new, folder, last=_REPORT)
    if not holds_run(folder):
        return folder
    _require_demo(recipe, folder)
    if not (folder / _REPORT).exists():
        return folder
    if not is_page(folder / _REPORT):
        if force:
            return folder
        raise UsageError(
            f"{folder / _REPORT} is not a report of the demo: name another folder (--out)"
        )
    if holds_run(new):
        _require_demo(recipe, new)
    return new


def _require_demo(recipe: Recipe, folder: Path) -> None:
    found = read_recipe(folder / "recipe.toml")
    if not (
        isinstance(found, Recipe)
        and found.name == recipe.name
        and None
        not in (
            *(corpus.generated for corpus in found.data.corpora),
            found.data.valid and found.data.valid.generated,
        )
    ):
        raise UsageError(f"{folder} has another run: give another folder")


def _replace(new: Path, folder: Path) -> None:
    """Replace the surrounding demo by a finished new demo; other files stay."""
    fresh = {path.relative_to(new) for path in own_files(new)}
    move_files(new, folder, last=_REPORT)
    for path in own_files(folder):
        if path.relative_to(folder) not in fresh:
            path.unlink()


def _try(
    translator: Translator, pairs: list[tuple[str, str]]
) -> tuple[TranslationSample, ...]:
    translations = translator.translate([german for german, _ in pairs])
    return tuple(
        TranslationSample(german, translation.text, english)
        for (german, english), translation in zip(pairs, translations, strict=True)
    )


def _fold(run: Reader, tried: Sequence[TranslationSample]) -> Folding:
    """Fold the stacked layer, and compare the folded model with the trained model."""
    outcome = rewrite(run.encoder_decoder, fold, sites=[_STACKED_SITE])
    folded = outcome.result
    (record,) = outcome.records[_STACKED_SITE]
    translator = Translator(folded, run.tokenizers, run.search_options())
    again = translator.translate([sample.source for sample in tried])
    # Time the attention layer alone, before and after.
    before, after = (
        next(
            site.layer for site in attention_sites(model) if site.name == _STACKED_SITE
        ).eval()
        for model in (run.model, folded)
    )
    d_model = run.encoder_decoder.architecture.decoder.d_model
    x = torch.randn(_TIMED_BATCH, _TIMED_TOKENS, d_model, device=_device(folded))
    with torch.inference_mode():
        seconds = _median_seconds([lambda: before(x), lambda: after(x)])
    return Folding(
        site=_STACKED_SITE,
        parameters=(_size(run.encoder_decoder), _size(folded)),
        layer_parameters=(record.before.parameters, record.after.parameters),
        layer_seconds=(seconds[0], seconds[1]),
        num_same=sum(
            old.hypothesis == new.text for old, new in zip(tried, again, strict=True)
        ),
        num_tested=len(tried),
        largest_difference=_largest_difference(run, folded),
        choice=record.choice,
    )


def _largest_difference(run: Reader, folded: EncoderDecoder) -> float:
    """Compute the largest difference of logits on the example pairs, relative to the largest logit."""
    source = run.tokenizers.source
    target = run.tokenizers.target
    largest = scale = 0.0
    for german, english in example_pairs():
        src = torch.tensor(
            [[*source.encode([german])[0], source.eos_id]], device=_device(folded)
        )
        tgt_in = torch.tensor(
            [[target.bos_id, *target.encode([english])[0]]], device=_device(folded)
        )
        with torch.inference_mode():
            old = run.model.eval()(src, tgt_in)
            new = folded.eval()(src, tgt_in)
        largest = max(largest, float((new - old).abs().max()))
        scale = max(scale, float(old.abs().max()))
    return largest / scale


def _median_seconds(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Measure the median time of each call; calls alternate, so that slow moments affect all of them."""
    seconds: list[list[float]] = [[] for _ in calls]
    for round_number in range(_TIMED_ROUNDS):
        for call, found in zip(calls, seconds, strict=True):
            started = time.perf_counter()
            call()
            if round_number >= _TIMED_ROUNDS // 10:  # the first rounds warm up
                found.append(time.perf_counter() - started)
    return [statistics.median(found) for found in seconds]


def _size(model: EncoderDecoder) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _device(model: EncoderDecoder) -> torch.device:
    return next(model.parameters()).device


def _picture(seen: Attention, title: str) -> AttentionPicture:
    """Build a picture of the cross-attention of the last decoder layer, for the terminal."""
    cross = seen.of("cross")
    source, target = (
        tuple(token.lstrip("▁") or token for token in side)
        for side in (cross.keys, cross.queries)
    )
    return AttentionPicture(title, source, target, cross[-1].float().cpu().numpy())


def _demo_report(
    result: Demonstration,
    summary: runs.Summary,
    folder: Path,
    metrics: Sequence[MetricPoint],
    shown: tuple[tuple[TranslationSample, ...], AttentionBatch],
) -> Report:
    counters = summary.outcome.counters
    mistakes, seen = shown
    return Report(
        title="German to English: numbers, dates, times and money",
        summary=(
            f"A Transformer with {summary.num_parameters:,} parameters learned from generated sentence pairs "
            f"and was tested on {result.num_tested:,} sentences that it had never seen: it translated "
            f"{result.exact_match:.1%} of them to the letter.\n\n"
            "German has units before tens (einundzwanzig), names the coming hour with the half (halb vier) "
            "and ends a clause with the verb. The cross-attention shows how the model looks ahead and back "
            "to put these in English order."
        ),
        facts=(
            (
                "Exact match, unseen sentences",
                f"{result.exact_match:.1%} of {result.num_tested:,}",
            ),
            ("BLEU, the same sentences", f"{result.bleu:.2f}"),
            ("Parameters", f"{summary.num_parameters:,}"),
            ("Training", f"{counters.step:,} steps, {counters.tokens:,} target tokens"),
            ("Time", f"{counters.seconds / 60:.1f} minutes"),
            (
                "Same translations after folding a layer",
                f"{result.folding.num_same:,} of {result.folding.num_tested:,}",
            ),
            ("Padding", f"{summary.padding_waste:.1%} of the batches"),
        ),
        metrics=tuple(metrics),
        samples=result.samples,
        has_one_answer=True,
        viewer=viewer_data(seen.viewed()),
        tables=(
            _folding_table(result.folding),
            *((_mistakes_table(mistakes),) if mistakes else ()),
        ),
        commands=(
            f"echo 'Das Buch hat einundzwanzig Euro gekostet.' | triptych translate {folder}",
            f"echo 'Das Buch hat einundzwanzig Euro gekostet.' | "
            f"triptych translate {folder} --json --attention cross.1",
        ),
    )


def _folding_table(folding: Folding) -> Table:
    before, after = folding.layer_seconds
    return Table(
        title="Two maps folded into one",
        columns=("", "as trained", "folded"),
        rows=(
            (
                f"Parameters of the attention at {folding.site}",
                *(f"{number:,}" for number in folding.layer_parameters),
            ),
            (
                "Parameters of the model",
                *(f"{number:,}" for number in folding.parameters),
            ),
            (
                f"Forward pass of the layer, {_TIMED_BATCH} × {_TIMED_TOKENS} tokens, median",
                f"{before * 1e6:,.0f} µs",
                f"{after * 1e6:,.0f} µs ({folding.speedup:.2f} times as fast)",
            ),
            (
                "Unseen sentences translated to the same letters",
                f"{folding.num_tested:,}",
                f"{folding.num_same:,} of {folding.num_tested:,}",
            ),
            (
                "Largest difference of a logit, relative",
                "",
                f"{folding.largest_difference:.1e}",
            ),
        ),
        caption=(
            f"The recipe writes {folding.site} with two linear maps in a row, x W^Q W_i^Q, for queries, keys "
            "and values. Nothing is between the two, so their product is one map, and the layer computes "
            "the same up to rounding."
        ),
    )


def _mistakes_table(mistakes: tuple[TranslationSample, ...]) -> Table:
    return Table(
        title="What it got wrong",
        columns=("source", "translation", "reference"),
        rows=tuple(
            (sample.source, sample.hypothesis, sample.reference or "")
            for sample in mistakes
        ),
        caption=f"The first {len(mistakes)} of the unseen sentences that were not translated to the letter.",
    )
