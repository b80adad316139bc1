"""Filters of a training text, corpora joined with weights, and sentences in both texts."""

import sys
from types import SimpleNamespace

import pytest

from triptych.errors import DataError, UsageError
from triptych.training.corpora import cleaning
from triptych.training.corpora.cleaning import Filters, filtered, overlap
from triptych.training.corpora.corpora import CorpusCounts, ParallelCorpus, joined

PAIRS = [
    ("Ja.", "Yes."),
    ("Ein Hund läuft.", "A dog is running."),
    ("Ein Hund läuft.", "A dog is running."),
    ("Wie spät ist es?", "It."),
    ("Ein Hund la\u0308uft.", "A dog is running."),
    ("Ein Hund läuft.", "One dog runs."),
]


def corpus(pairs: list[tuple[str, str]], name: str = "toy", first: int = 1) -> ParallelCorpus:
    source, target = [[*side] for side in zip(*pairs, strict=True)]
    counts = CorpusCounts(len(pairs), 0, 0, 100)
    return ParallelCorpus(source, target, [*range(first, first + len(pairs))], name, counts)


@pytest.mark.parametrize(
    ("filters", "kept", "said"),
    [
        (Filters(), [1, 2, 3, 4, 5, 6], ""),
        (
            Filters(max_length_ratio=3.0),
            [1, 2, 3, 5, 6],
            "1 with one side more than 3 times as long as the other (the first in line 4)",
        ),
        (Filters(drop_duplicates=True), [1, 2, 4, 6], "2 that repeat another pair (the first in line 3)"),
        (
            Filters(held_out=["Wie spät ist es?", "Ja."]),
            [2, 3, 5, 6],
            "2 with a source of the validation text (the first in line 1)",
        ),
        (
            Filters(max_length_ratio=3.0, drop_duplicates=True),
            [1, 2, 6],
            "1 with one side more than 3 times as long as the other (the first in line 4); "
            "2 that repeat another pair (the first in line 3)",
        ),
    ],
)
def test_a_filter_leaves_out_its_pairs_and_says_how_many(
    filters: Filters, kept: list[int], said: str
) -> None:
    text, described = filtered(corpus(PAIRS), filters)
    assert text.line_numbers == kept
    assert [*zip(text.source, text.target, strict=True)] == [PAIRS[line - 1] for line in kept]
    assert described == said


def test_a_ratio_at_the_limit_is_kept() -> None:
    assert len(filtered(corpus([("aaaa", "aa")]), Filters(max_length_ratio=2.0))[0]) == 1


def test_filters_that_leave_no_pair_are_an_error() -> None:
    with pytest.raises(DataError, match=r"toy: the filters in \[data\] leave no pair .*1 with one side more"):
        filtered(corpus([("aaaa", "a")]), Filters(max_length_ratio=2.0))


class Identifier:
    """A detector that knows languages by a letter of the text, and is unsure of short texts."""

    labels = ("de", "en")

    def classify(self, text: str) -> tuple[str, float]:
        return "de" if "ä" in text else "en", 0.99 if len(text) > 5 else 0.5


def test_a_text_in_another_language_is_left_out_if_the_detector_is_sure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cleaning, "_identifier", Identifier)
    monkeypatch.setattr(cleaning, "require_extra", lambda *_, **__: None)
    pairs = [("Es ist spät.", "It is late."), ("Ja.", "Yes."), ("It is late.", "It is late.")]
    text, said = filtered(corpus(pairs), Filters(languages=("de", "en_XX")))
    assert text.line_numbers == [1, 2]
    assert said == "1 in another language than de and en_XX (the first in line 3)"
    with pytest.raises(UsageError, match="py3langid does not know French"):
        filtered(corpus(pairs), Filters(languages=("fr", "en")))


def test_the_detector_is_asked_for_by_name_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.extras.is_installed", lambda library: False)
    with pytest.raises(UsageError, match=r"drop_other_languages needs py3langid: pip install 'triptych"):
        filtered(corpus(PAIRS), Filters(languages=("de", "en")))


def test_the_detector_is_made_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Library:
        @staticmethod
        def from_model_file(path: str, *, norm_probs: bool) -> Identifier:
            made.append((path, norm_probs))
            return Identifier()

    library = SimpleNamespace(MODEL_FILE="a file", LanguageIdentifier=Library)
    monkeypatch.setitem(sys.modules, "py3langid", SimpleNamespace(langid=library))
    monkeypatch.setitem(sys.modules, "py3langid.langid", library)
    cleaning._identifier.cache_clear()
    assert isinstance(cleaning._identifier(), Identifier)
    assert made == [("a file", True)]
    cleaning._identifier.cache_clear()


def test_validation_sentences_in_the_training_text_are_counted() -> None:
    valid = corpus([("Ein Hund la\u0308uft.", "A dog is running."), ("Ja.", "Yes, sir."), ("Nein.", "No.")])
    assert overlap(corpus(PAIRS), valid) == (2, 1)
    assert overlap(corpus(PAIRS), corpus([("Nein.", "No.")])) == (0, 0)


def test_corpora_are_joined_with_a_weight_for_each_pair_and_lines_that_go_on() -> None:
    first, second = corpus(PAIRS[:2], "a"), corpus(PAIRS[3:], "b")
    both = joined([first, second], [1.0, 0.5])
    assert both.source == first.source + second.source
    assert both.target == first.target + second.target
    assert (both.line_numbers, both.name) == ([1, 2, 3, 4, 5], "a; b")
    assert both.weights == [1.0, 1.0, 0.5, 0.5, 0.5]
    assert both.where([False, True, True, False, False]).weights == [1.0, 0.5]
    assert joined([first, second], [1.0, 1.0]).weights is None
    assert joined([first], [1.0]) == first
