"""Scores of translations: sacreBLEU's BLEU and chrF, with signatures and bootstrap intervals."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from triptych.errors import DataError
from triptych.literals import Precision
from triptych.running.decoding.translator import Translator
from triptych.running.decoding_options import SearchOptions
from triptych.running.text.given import as_lines


@dataclass(frozen=True)
class CorpusScore:
    """A corpus score with its 95 % bootstrap interval."""

    name: str  # "BLEU" or "chrF2"
    value: float  # score of the whole corpus, 0 to 100
    low: float  # lower end of the interval
    high: float  # upper end
    signature: str  # sacreBLEU's settings and version, to reproduce the score

    def line(self) -> str:
        """Return name, value, interval and signature in one line."""
        return f"{self.name} {self.value:.2f} [{self.low:.2f}, {self.high:.2f}]  {self.signature}"


def score_translations(
    hypotheses: str | Sequence[str],
    references: str | Sequence[str],
    num_resamples: int = 1000,
    seed: int = 12345,
) -> list[CorpusScore]:
    """Score translations with BLEU and chrF against single references; a string is one translation."""
    hypotheses = as_lines(hypotheses)
    references = as_lines(references)
    if len(hypotheses) != len(references):
        raise DataError(f"{len(hypotheses):,} translations but {len(references):,} references")
    if not hypotheses:
        raise DataError("there are no lines to score")
    # Both metrics resample the same lines, as both start from the seed.
    metrics = _metric("BLEU"), _metric("CHRF")
    return [_score(metric, hypotheses, references, num_resamples, seed) for metric in metrics]


def _metric(name: str) -> Any:
    import sacrebleu  # slow import, 0.2 s: only commands that score pay for it

    return getattr(sacrebleu, name)()


def _score(
    metric: Any, hypotheses: Sequence[str], references: Sequence[str], num_resamples: int, seed: int
) -> CorpusScore:
    whole = metric.corpus_score(list(hypotheses), [list(references)])
    statistics = np.array(
        metric._extract_corpus_statistics(list(hypotheses), [list(references)]), dtype=np.float64
    )
    # The bootstrap resamples sentences; BLEU and chrF are computed from summed sentence statistics.
    random = np.random.default_rng(seed)
    resampled = []
    for _ in range(num_resamples):
        rows = random.integers(0, len(statistics), len(statistics))
        resampled.append(metric._compute_score_from_stats(statistics[rows].sum(axis=0).tolist()).score)
    low, high = np.percentile(resampled, [2.5, 97.5])
    signature = str(metric.get_signature())
    return CorpusScore(whole.name, float(whole.score), float(low), float(high), signature)


def score_bleu(
    hypotheses: str | Sequence[str],
    references: str | Sequence[str],
    num_resamples: int = 1000,
    seed: int = 12345,
) -> CorpusScore:
    """Score translations with BLEU alone; see `score_translations`."""
    return _score(_metric("BLEU"), as_lines(hypotheses), as_lines(references), num_resamples, seed)


def measure_bleu(hypotheses: str | Sequence[str], references: str | Sequence[str]) -> float:
    """Return corpus BLEU without an interval, quickly; a string is one translation."""
    whole = _metric("BLEU").corpus_score(list(as_lines(hypotheses)), [list(as_lines(references))])
    return float(whole.score)


_LINES_AT_A_TIME = 256


@dataclass(frozen=True)
class Evaluation:
    """The translations of a test text and their scores."""

    translations: tuple[str, ...]  # translated lines, in the order of the text
    scores: tuple[CorpusScore, ...]  # corpus BLEU and chrF
    seconds: float  # translation time
    options: SearchOptions  # search options
    precision: Precision  # precision of the model's maps
    workers: int  # number of translating processes, or of CTranslate2's threads
    engine: Literal["triptych", "ctranslate2"]  # decoding library

    def figures(self) -> dict[str, Any]:
        return {
            "sentences": len(self.translations),
            "seconds": round(self.seconds, 3),
            "beam_size": self.options.beam_size,
            "alpha": self.options.alpha,
            "stop": self.options.stop,
            "precision": self.precision,
            "workers": self.workers,
            "engine": self.engine,
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


def evaluate_translations(
    translator: Translator,
    sources: Sequence[str],
    references: Sequence[str],
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Evaluation:
    """Translate a test text and score it with sacreBLEU's BLEU and chrF."""
    if len(sources) != len(references):
        raise DataError(f"{len(sources):,} lines to translate but {len(references):,} references")
    if not sources:
        raise DataError("there is nothing to evaluate")
    with translator:
        started = time.monotonic()
        # Lines of similar length share a batch, so that little of it is padding.
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        chunks = [order[i : i + _LINES_AT_A_TIME] for i in range(0, len(order), _LINES_AT_A_TIME)]
        texts = [""] * len(sources)
        found = translator.translate_stream([[sources[i] for i in chunk] for chunk in chunks])
        for done, (i, translation) in enumerate(zip(order, found, strict=True), start=1):
            texts[i] = translation.text
            progress(done, len(order))
        seconds = time.monotonic() - started
    scores = tuple(score_translations(texts, references))
    return Evaluation(
        tuple(texts),
        scores,
        seconds,
        translator.options,
        translator.precision,
        translator.workers,
        translator.engine,
    )
