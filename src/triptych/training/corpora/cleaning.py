"""Filters of a training text, with counts of the dropped pairs."""

import unicodedata
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from triptych.errors import DataError, UsageError
from triptych.extras import require_extra
from triptych.languages import find_language
from triptych.training.corpora.corpora import ParallelCorpus

# Least probability of another language. py3langid 0.4 then assigns three quarters of 2,000 short sentences in
# two languages to the right language, and 0 to a wrong language.
_CERTAIN = 0.9


class Filters(NamedTuple):
    """Filters of a recipe; see `DataConfig`."""

    max_length_ratio: float | None = None
    drop_duplicates: bool = False
    # Sources of the validation text to be left out; None to keep them.
    held_out: Sequence[str] | None = None
    # Codes of the languages of source and target; None for texts in any language.
    languages: tuple[str, str] | None = None


# Returns True for a pair to drop.
_Drops = Callable[[str, str], bool]


def filtered(text: ParallelCorpus, filters: Filters) -> tuple[ParallelCorpus, str]:
    """Drop pairs of a training text.

    Returns the remaining pairs, and a description of the dropped pairs; "" if no pair is dropped.
    """
    said = []
    # A pair counts for the first filter to drop it: later filters test remaining pairs only.
    for reason, drops in _rules(filters):
        pairs = zip(text.source, text.target, strict=True)
        keep = [not drops(source, target) for source, target in pairs]
        if all(keep):
            continue
        first = text.line_numbers[keep.index(False)]
        rest = text.where(keep)
        said.append(f"{len(text) - len(rest):,} {reason} (the first in line {first:,})")
        text = rest
        if not len(text):
            raise DataError(
                f"{text.name}: the filters in [data] leave no pair of the training text: {'; '.join(said)}"
            )
    return text, "; ".join(said)


def overlap(train: ParallelCorpus, valid: ParallelCorpus) -> tuple[int, int]:
    """Count the validation pairs whose source, and whose whole pair, is in the training text."""
    pairs = {*_comparable_pairs(train)}
    sources = {source for source, _ in pairs}
    judged = _comparable_pairs(valid)
    same_source = sum(source in sources for source, _ in judged)
    return same_source, sum(pair in pairs for pair in judged)


def _comparable_pairs(text: ParallelCorpus) -> list[tuple[str, str]]:
    sides = map(_comparable, text.source), map(_comparable, text.target)
    return list(zip(*sides, strict=True))


def _rules(filters: Filters) -> Iterator[tuple[str, _Drops]]:
    """Yield the reason and the test of each filter in use."""
    if (most := filters.max_length_ratio) is not None:
        yield (
            f"with one side more than {most:g} times as long as the other",
            _is_uneven(most),
        )
    if filters.drop_duplicates:
        yield "that repeat another pair", _repeats()
    if filters.held_out is not None:
        held_out = {*map(_comparable, filters.held_out)}
        yield (
            "with a source of the validation text",
            lambda source, _: _comparable(source) in held_out,
        )
    if filters.languages is not None:
        source, target = map(_detector, filters.languages)
        reason = f"in another language than {filters.languages[0]} and {filters.languages[1]}"
        yield reason, lambda one, other: source(one) or target(other)


def _is_uneven(most: float) -> _Drops:
    def drops(source: str, target: str) -> bool:
        shorter, longer = sorted((len(source), len(target)))
        return longer > most * shorter

    return drops


def _repeats() -> _Drops:
    seen = set[tuple[str, str]]()

    def drops(source: str, target: str) -> bool:
        pair = (_comparable(source), _comparable(target))
        is_seen = pair in seen
        seen.add(pair)
        return is_seen

    return drops


def _comparable(text: str) -> str:
    """Return a text in a form in which equal texts are equal strings."""
    return unicodedata.normalize("NFC", text)


def _detector(code: str) -> Callable[[str], bool]:
    """Return a test for texts in another language; doubtful texts pass."""
    require_extra("languages", "py3langid", what="data.drop_other_languages")
    language = find_language(code)
    assert language is not None, "codes of recipes are known"
    if language.language not in _identifier().labels:
        raise UsageError(
            f"data.drop_other_languages: py3langid does not know {language.name}"
        )
    return lambda text: _is_other(text, language.language)


def _is_other(text: str, language: str) -> bool:
    found, probability = _identifier().classify(text)
    return bool(found != language and probability >= _CERTAIN)


@cache
def _identifier() -> Any:
    from py3langid.langid import MODEL_FILE, LanguageIdentifier

    return LanguageIdentifier.from_model_file(MODEL_FILE, norm_probs=True)
