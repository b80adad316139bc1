"""Scores: sacreBLEU's numbers, with an interval."""

import unicodedata

import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from triptych.errors import DataError, UsageError
from triptych.literals import BleuTokenizer
from triptych.running.decoding import measure_bleu, nearest_translation, score_translations
from triptych.running.decoding.evaluation import fitting_tokenizer

REFERENCES = [
    "a man in a red shirt walks along the street .",
    "two dogs are playing in the snow .",
    "a girl reads a book on a bench in the park .",
    "three people stand in front of a large house .",
    "the boy jumps into the water .",
    "a woman is selling fruit at a market .",
] * 3
HYPOTHESES = [
    "a man in a red shirt is walking along the street .",
    "two dogs play in the snow .",
    "a girl is reading a book on a bench in the park .",
    "three people are standing in front of a house .",
    "the boy jumps into the water .",
    "a woman sells fruit at the market .",
] * 3


def test_the_scores_are_sacrebleus_to_the_last_digit() -> None:
    bleu, chrf = score_translations(HYPOTHESES, REFERENCES, num_resamples=10)
    their_bleu, their_chrf = BLEU(), CHRF()
    assert bleu.value == their_bleu.corpus_score(HYPOTHESES, [REFERENCES]).score
    assert chrf.value == their_chrf.corpus_score(HYPOTHESES, [REFERENCES]).score
    assert 20 < bleu.value < 90
    assert (bleu.name, chrf.name) == ("BLEU", "chrF2")
    assert bleu.signature == str(their_bleu.get_signature())
    assert chrf.signature == str(their_chrf.get_signature())


def test_bleu_alone_is_the_same_bleu() -> None:
    assert measure_bleu(HYPOTHESES, REFERENCES) == score_translations(HYPOTHESES, REFERENCES, 2)[0].value


def test_a_string_is_one_translation() -> None:
    assert measure_bleu(REFERENCES[0], REFERENCES[0]) == measure_bleu(REFERENCES[:1], REFERENCES[:1])
    scores = score_translations(REFERENCES[0], REFERENCES[0], num_resamples=2)
    assert scores == score_translations(REFERENCES[:1], REFERENCES[:1], num_resamples=2)


def test_the_interval_holds_the_score_and_is_neither_empty_nor_everything() -> None:
    for score in score_translations(HYPOTHESES, REFERENCES, num_resamples=200):
        assert score.low < score.value < score.high
        assert 1 < score.high - score.low < 60


def test_the_interval_is_that_of_sacrebleus_own_bootstrap() -> None:
    for ours, metric in zip(score_translations(HYPOTHESES, REFERENCES), (BLEU(), CHRF()), strict=True):
        # sacreBLEU gives the middle and half the width of the same interval, from its own draws
        theirs = metric.corpus_score(HYPOTHESES, [REFERENCES], n_bootstrap=1000)
        assert (ours.high - ours.low) / 2 == pytest.approx(theirs._ci, rel=0.2)
        assert (ours.high + ours.low) / 2 == pytest.approx(theirs._mean, abs=3)


def test_the_interval_is_the_same_every_time_and_moves_with_the_seed() -> None:
    first = score_translations(HYPOTHESES, REFERENCES, num_resamples=100)
    assert score_translations(HYPOTHESES, REFERENCES, num_resamples=100) == first
    assert score_translations(HYPOTHESES, REFERENCES, num_resamples=100, seed=1) != first


def test_identical_text_scores_a_hundred() -> None:
    for score in score_translations(REFERENCES, REFERENCES, num_resamples=20):
        assert (score.low, score.value, score.high) == pytest.approx((100, 100, 100))


def test_text_without_a_word_in_common_scores_nothing() -> None:
    bleu, _ = score_translations(["xyz"] * 18, REFERENCES, num_resamples=5)
    assert bleu.value == 0


def test_a_score_shows_value_interval_and_signature_in_one_line() -> None:
    bleu, _ = score_translations(REFERENCES, REFERENCES, num_resamples=5)
    assert bleu.line().startswith("BLEU 100.00 [100.00, 100.00]  nrefs:1|case:mixed")
    assert "\n" not in bleu.line()


def test_different_numbers_of_lines_are_refused_with_both() -> None:
    with pytest.raises(DataError, match="17 translations but 18 references"):
        score_translations(HYPOTHESES[:-1], REFERENCES)


def test_a_score_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="there are no lines to score"):
        score_translations([], [])


# References of languages, and the tokenizer of BLEU that fits them where MeCab is not installed.
LANGUAGES = {
    "13a": [
        "The weather is good today.",
        "Сегодня хорошая погода.",
        "오늘은 날씨가 좋습니다.",
        "मुझे चाय पसंद है।",
    ],
    "zh": ["今天天气很好，我们去公园吧。", "iPhone 15 很贵，我不买。"],
    "char": ["今日は天気がいいです。", "วันนี้อากาศดี", "ມື້ນີ້ອາກາດດີ"],
}


@pytest.mark.parametrize(
    ("tokenize", "reference"), [(name, text) for name, texts in LANGUAGES.items() for text in texts]
)
def test_bleu_has_the_tokenizer_that_fits_the_language(
    tokenize: BleuTokenizer, reference: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triptych.running.decoding.evaluation.is_installed", lambda library: False)
    references = [reference] * 3
    hypotheses = [reference[:-3] + "x" + reference[-2:]] * 3
    bleu, _ = score_translations(hypotheses, references, num_resamples=2)
    assert f"tok:{tokenize}" in bleu.signature
    assert bleu.value == BLEU(tokenize=tokenize).corpus_score(hypotheses, [references]).score
    (given, _) = score_translations(hypotheses, references, num_resamples=2, tokenize="intl")
    assert "tok:intl" in given.signature


def test_a_tokenizer_whose_library_is_missing_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("triptych.running.decoding.evaluation.is_installed", lambda library: False)
    with pytest.raises(UsageError, match=r"needs MeCab and ipadic: pip install 'sacrebleu\[ja\]'"):
        score_translations(["a"], ["a"], tokenize="ja-mecab")
    monkeypatch.setattr("triptych.running.decoding.evaluation.is_installed", lambda library: True)
    assert fitting_tokenizer(["今日は天気がいいです。"]) == "ja-mecab"


def test_decomposed_letters_are_those_of_the_reference() -> None:
    references = ["Tôi thích uống trà mỗi ngày.", "나는 차 마시는 것을 좋아합니다."] * 3
    decomposed = [unicodedata.normalize("NFD", text) for text in references]
    for hypotheses, right in ((decomposed, references), (references, decomposed)):
        scores = score_translations(hypotheses, right, num_resamples=2)
        assert [score.value for score in scores] == pytest.approx([100, 100])
        assert measure_bleu(hypotheses, right) == pytest.approx(100)
    assert nearest_translation(["trà sữa", decomposed[0]], references[0]) == decomposed[0]


def test_the_nearest_translation_is_found_without_spaces_too() -> None:
    candidates = ["昨天下雨。", "今天天气很好，我们去公园。", "他在哪里工作？"]
    assert nearest_translation(candidates, "今天天气很好，我们去公园吧。") == candidates[1]
