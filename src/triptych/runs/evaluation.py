"""A model scored on a test text."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triptych.decoding import CorpusScore, Precision, SearchOptions, Stop, score_translations
from triptych.errors import DataError
from triptych.runs.folder import Run

_LINES_AT_A_TIME = 256


@dataclass(frozen=True)
class Evaluation:
    """The translations of a test text and their scores.

    Attributes:
        translations: in the order of the text.
        scores: BLEU and chrF of all of them.
        seconds: of translating.
        options: of the search.
        precision: of the model's maps.
        workers: processes that translated.
    """

    translations: tuple[str, ...]
    scores: tuple[CorpusScore, ...]
    seconds: float
    options: SearchOptions
    precision: Precision
    workers: int

    def figures(self) -> dict[str, Any]:
        return {
            "sentences": len(self.translations),
            "seconds": round(self.seconds, 3),
            "beam_size": self.options.beam_size,
            "alpha": self.options.alpha,
            "stop": self.options.stop,
            "precision": self.precision,
            "workers": self.workers,
            "scores": [
                {
                    "name": score.name,
                    "value": score.value,
                    "interval": [score.low, score.high],
                    "signature": score.signature,
                }
                for score in self.scores
            ],
        }


def evaluate(
    run: str | Path,
    sources: Sequence[str],
    references: Sequence[str],
    device: str = "auto",
    *,
    beam_size: int | None = None,
    alpha: float | None = None,
    stop: Stop | None = None,
    precision: Precision = "fp32",
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Translate a test text and score it with sacreBLEU's BLEU and chrF.

    Args:
        run: the folder of a run or of a Marian checkpoint.
        sources: a sentence each.
        references: their right translations.
        device: where the model goes; "auto" takes a GPU if there is one.
        beam_size: hypotheses kept; the recipe's or the checkpoint's if None, and likewise below.
        alpha: exponent of the length penalty.
        stop: when a sentence is done, as in `SearchOptions`.
        precision: of the model's maps, as in `Translator`.
        workers: processes that translate side by side on a CPU, as in `Translator`.
        progress: is told how many sentences of how many are done.

    Raises:
        DataError: the numbers of lines differ, or there are none; files missing or damaged.
        UsageError: no such folder or device, or options that do not go together.
    """
    if len(sources) != len(references):
        raise DataError(f"{len(sources):,} lines to translate but {len(references):,} references")
    if not sources:
        raise DataError("there is nothing to evaluate")
    opened = Run.open(Path(run), device)
    options = opened.search_options(beam_size, alpha, stop=stop)
    with opened.translator(options, precision=precision, workers=workers) as translator:
        started = time.monotonic()
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        chunks = [order[i : i + _LINES_AT_A_TIME] for i in range(0, len(order), _LINES_AT_A_TIME)]
        texts = [""] * len(sources)
        found = translator.translate_stream([[sources[i] for i in chunk] for chunk in chunks])
        for done, (i, translation) in enumerate(zip(order, found, strict=True), start=1):
            texts[i] = translation.text
            progress(done, len(order))
        seconds = time.monotonic() - started
    scores = tuple(score_translations(texts, references))
    return Evaluation(tuple(texts), scores, seconds, options, precision, workers)
