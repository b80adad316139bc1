import re
import unicodedata
from datetime import date
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triptych.training.corpora import generated, spelled
from triptych.training.corpora.generated import PARTS, example_pairs, generate_pairs, part_of

# Every function below is written without num2words: it is the second opinion.
TABLE = """
    null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf
    dreizehn vierzehn fünfzehn sechzehn siebzehn achtzehn neunzehn
    zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig
    zero one two three four five six seven eight nine ten eleven twelve
    thirteen fourteen fifteen sixteen seventeen eighteen nineteen
    twenty thirty forty fifty sixty seventy eighty ninety
"""
NAMES = TABLE.split()
UNITS_DE, TENS_DE, UNITS_EN, TENS_EN = NAMES[:20], NAMES[20:28], NAMES[28:48], NAMES[48:]
WORDS_EN = {word: value for value, word in enumerate(UNITS_EN)}
WORDS_EN |= {word: 10 * value for value, word in enumerate(TENS_EN, 2)}


def read_german(word: str) -> int:
    if "tausend" in word:
        head, tail = word.split("tausend")
        return 1000 * read_german(head) + (read_german(tail) if tail else 0)
    if "hundert" in word:
        head, tail = word.split("hundert")
        return 100 * read_german(head) + (read_german(tail) if tail else 0)
    for tens, name in enumerate(TENS_DE, 2):
        if word == name:
            return 10 * tens
        if word.endswith("und" + name):
            return 10 * tens + UNITS_DE.index(word.removesuffix("und" + name))
    return 1 if word == "eins" else UNITS_DE.index(word)


def read_english(words: str) -> int:
    total = group = 0
    for word in re.split("[ -]", words):
        if word == "thousand":
            total, group = 1000 * group, 0
        elif word == "hundred":
            group *= 100
        elif word != "and":
            group += WORDS_EN[word]
    return total + group


@given(st.integers(0, 999_999))
def test_both_languages_spell_the_same_number(number: int) -> None:
    german, english = spelled.spell_cardinal(number)
    assert (read_german(german), read_english(english)) == (number, number)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (spelled.spell_cardinal(21), ("einundzwanzig", "twenty-one")),
        (spelled.spell_cardinal(121), ("einhunderteinundzwanzig", "one hundred and twenty-one")),
        (spelled.spell_cardinal(345), ("dreihundertfünfundvierzig", "three hundred and forty-five")),
        (spelled.spell_cardinal(1001), ("eintausendeins", "one thousand and one")),
        (spelled.spell_cardinal(101_000), ("einhunderteintausend", "one hundred and one thousand")),
        (spelled.spell_cardinal(6_200), ("sechstausendzweihundert", "six thousand two hundred")),
        (spelled.spell_year(1984), ("neunzehnhundertvierundachtzig", "nineteen eighty-four")),
        (spelled.spell_year(1905), ("neunzehnhundertfünf", "nineteen oh-five")),
        (spelled.spell_year(2024), ("zweitausendvierundzwanzig", "twenty twenty-four")),
        (spelled.spell_ordinal(7), ("siebte", "seventh")),
        (spelled.spell_clock(1, 0), ("ein Uhr", "one o'clock")),
        (spelled.spell_clock(3, 10), ("zehn nach drei", "ten past three")),
        (spelled.spell_clock(3, 15), ("Viertel nach drei", "quarter past three")),
        (spelled.spell_clock(3, 17), ("siebzehn Minuten nach drei", "seventeen minutes past three")),
        (spelled.spell_clock(3, 25), ("fünf vor halb vier", "twenty-five past three")),
        (spelled.spell_clock(3, 30), ("halb vier", "half past three")),
        (spelled.spell_clock(12, 30), ("halb eins", "half past twelve")),
        (spelled.spell_clock(3, 35), ("fünf nach halb vier", "twenty-five to four")),
        (spelled.spell_clock(12, 45), ("Viertel vor eins", "quarter to one")),
        (spelled.spell_clock(3, 50), ("zehn vor vier", "ten to four")),
        (spelled.spell_clock(3, 59), ("eine Minute vor vier", "one minute to four")),
        (spelled.spell_timetable(21, 17), ("einundzwanzig Uhr siebzehn", "twenty-one seventeen")),
        (spelled.spell_timetable(21, 5), ("einundzwanzig Uhr fünf", "twenty-one oh-five")),
        (spelled.spell_timetable(1, 1), ("ein Uhr eins", "one oh-one")),
        (spelled.spell_timetable(21, 0), ("einundzwanzig Uhr", "twenty-one hundred hours")),
        (spelled.spell_day(date(2024, 5, 3), "nominative"), ("dritte Mai", "third of May")),
        (spelled.spell_on_day(date(2024, 8, 1)), ("am ersten August", "on the first of August")),
    ],
)
def test_spelling_is_as_worked_out_by_hand(made: tuple[str, str], expected: tuple[str, str]) -> None:
    assert made == expected


def test_full_date_is_inflected_in_the_dative() -> None:
    when = date(1984, 5, 3)
    assert spelled.spell_on_day(when, weekday=when.weekday(), year=True) == (
        "am Donnerstag, dem dritten Mai neunzehnhundertvierundachtzig,",
        "on Thursday, the third of May nineteen eighty-four,",
    )


@pytest.mark.parametrize(
    ("whole", "hundredths", "currency", "case", "german", "english"),
    [
        (1, 0, "EURO", "nominative", "ein Euro", "one euro"),
        (1, 0, "EURO", "accusative", "einen Euro", "one euro"),
        (
            23,
            1,
            "EURO",
            "accusative",
            "dreiundzwanzig Euro und einen Cent",
            "twenty-three euros and one cent",
        ),
        (2, 0, "DOLLAR", "nominative", "zwei Dollar", "two dollars"),
        (1, 0, "POUND", "accusative", "ein Pfund", "one pound"),
        (0, 1, "POUND", "nominative", "ein Penny", "one penny"),
        (5, 20, "POUND", "nominative", "fünf Pfund und zwanzig Pence", "five pounds and twenty pence"),
        (2, 5, "FRANC", "nominative", "zwei Franken und fünf Rappen", "two francs and five centimes"),
    ],
)
def test_money_agrees_in_number_and_case(
    whole: int, hundredths: int, currency: str, case: str, german: str, english: str
) -> None:
    made = spelled.spell_money(whole, hundredths, getattr(spelled, currency), case)
    assert made == (german, english)


def test_hundredths_may_be_said_without_their_name() -> None:
    made = spelled.spell_money(1, 50, spelled.EURO, "nominative", short=True)
    assert made == ("ein Euro fünfzig", "one euro and fifty cents")


def test_appositions_close_inside_a_sentence_and_not_at_its_end() -> None:
    when = {"when": spelled.spell_on_day(date(2024, 5, 3), weekday=4)}
    assert generated._fill_sentence(("es war {when} kalt.", "it was cold {when}."), when) == (
        "Es war am Freitag, dem dritten Mai, kalt.",
        "It was cold on Friday, the third of May.",
    )


@pytest.mark.parametrize("part", PARTS)
def test_equal_arguments_give_equal_pairs_and_a_larger_count_only_adds(part: str) -> None:
    pairs = generate_pairs(300, part, 7)
    assert pairs == generate_pairs(300, part, 7)
    assert pairs == generate_pairs(400, part, 7)[:300]
    assert pairs != generate_pairs(300, part, 8)


def test_parts_are_disjoint_whatever_the_seeds() -> None:
    sentences = {
        part: {german for seed in range(2) for german, _ in generate_pairs(400, part, seed)} for part in PARTS
    }
    assert not sentences["train"] & sentences["valid"]
    assert not sentences["train"] & sentences["test"]
    assert not sentences["valid"] & sentences["test"]


def test_parts_take_eight_one_and_one_tenth() -> None:
    rng = Random(0)
    drawn = {generated._draw_pair(rng)[0] for _ in range(8_000)}
    shares = {part: sum(part_of(german) == part for german in drawn) / len(drawn) for part in PARTS}
    assert shares == pytest.approx({"train": 0.8, "valid": 0.1, "test": 0.1}, abs=0.01)


@pytest.mark.parametrize("part", ["valid", "test"])
def test_evaluation_parts_hold_no_sentence_twice(part: str) -> None:
    germans = [german for german, _ in generate_pairs(800, part, 0)]
    assert len(set(germans)) == 800


@pytest.fixture(scope="module")
def many() -> list[tuple[str, str]]:
    return [pair for seed in range(3) for pair in generate_pairs(7_000, "train", seed)]


def test_a_german_sentence_has_one_translation(many: list[tuple[str, str]]) -> None:
    translations: dict[str, str] = {}
    for german, english in many:
        assert translations.setdefault(german, english) == english


def test_text_is_clean(many: list[tuple[str, str]]) -> None:
    for text in {text for pair in many for text in pair}:
        assert unicodedata.is_normalized("NFC", text)
        assert text == " ".join(text.split())
        assert not re.search(r"[{}\d|]|,[.,?]|,$| [.,?]", text), text


def test_sentences_are_short_and_varied(many: list[tuple[str, str]]) -> None:
    lengths = [len(german.split()) for german, _ in many]
    assert max(lengths) <= 16
    assert sum(3 <= length <= 14 for length in lengths) > 0.85 * len(lengths)
    assert len({german for german, _ in many}) > 0.75 * len(many)


def test_bare_numbers_and_counted_things_agree_across_the_languages(many: list[tuple[str, str]]) -> None:
    checked = 0
    for german, english in many:
        if found := re.fullmatch(r"In dieser Stadt wohnen (\S+) Menschen\.", german):
            spelled = english.removesuffix(" people live in this town.").lower()
        elif (found := re.fullmatch(r"([a-zäöüß]+)", german)) and "-" not in german:
            spelled = english
        else:
            continue
        assert read_german(found[1]) == read_english(spelled)
        checked += 1
    assert checked > 1000


def test_sums_are_true(many: list[tuple[str, str]]) -> None:
    sums = [re.fullmatch(r"(\S+) plus (\S+) ist (\S+)\.", german.lower()) for german, _ in many]
    found = [match for match in sums if match]
    assert found
    for match in found:
        first, second, total = map(read_german, match.groups())
        assert first + second == total


def test_weekdays_of_full_dates_are_the_true_ones() -> None:
    true = set()
    for number in range(date(1950, 1, 1).toordinal(), date(2050, 1, 1).toordinal()):
        when = date.fromordinal(number)
        day, year = spelled.spell_ordinal(when.day)[1], spelled.spell_year(when.year)[1]
        true.add(f"Today is {when:%A}, the {day} of {when:%B} {year}.")
    rng = Random(3)
    drawn = {generated._draw_calendar(rng)[1] for _ in range(500)}
    full = {english for english in drawn if re.match(r"Today is \w+day,", english)}
    assert len(full) > 100
    assert full <= true


def test_examples_are_unseen_in_training() -> None:
    assert 6 <= len(example_pairs()) <= 8
    assert {part_of(german) for german, _ in example_pairs()} == {"test"}


def test_an_unknown_part_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'dev' does not exist; choose one of train, valid, test"):
        generate_pairs(1, "dev", 0)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        generate_pairs(-1, "train", 0)


def test_no_pairs_are_no_pairs() -> None:
    assert generate_pairs(0, "valid", 0) == []


def test_asking_for_more_sentences_than_exist_ends_in_an_error_with_the_numbers() -> None:
    def draw(rng: Random) -> tuple[str, str]:
        return spelled.spell_cardinal(rng.randrange(100))

    num_test = sum(part_of(spelled.spell_cardinal(number)[0]) == "test" for number in range(100))
    assert len(generated._collect_pairs(draw, num_test, "test", 0)) == num_test
    with pytest.raises(ValueError, match=rf"50 distinct .*'test'.* 3000 draws gave only {num_test};"):
        generated._collect_pairs(draw, 50, "test", 0)
