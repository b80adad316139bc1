"""Numbers, times of day, dates and sums of money in words, German and English side by side.

Cardinals, ordinals and years are spelled by num2words, of the extra `[demo]`.
"""

from datetime import date
from functools import lru_cache
from random import Random
from typing import NamedTuple

TextPair = tuple[str, str]
"""A German text and its English translation."""

# --- numbers -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _spell(number: int, language: str, form: str) -> str:
    from num2words import num2words

    return str(num2words(number, lang=language, to=form))


def spell_cardinal(number: int) -> TextPair:
    """Spell 0 ≤ number < 1,000,000 in both languages."""
    thousands, rest = divmod(number, 1000)
    german, english = _spell(rest, "de", "cardinal"), _spell(rest, "en", "cardinal")
    if not thousands:
        return german, english
    # num2words writes "einhunderteinstausend" for 101,000 and an English comma after the thousands that
    # would look like the end of a clause; joining the halves here settles both and keeps the cache small.
    german_head = _spell(thousands, "de", "cardinal")
    if german_head.endswith("eins"):
        german_head = german_head.removesuffix("s")
    german_head += "tausend"
    english_head = f"{_spell(thousands, 'en', 'cardinal')} thousand"
    if not rest:
        return german_head, english_head
    link = " " if rest >= 100 else " and "
    return german_head + german, english_head + link + english


def spell_year(year: int) -> TextPair:
    """A year as a date has it: 1984 is nineteen eighty-four."""
    return _spell(year, "de", "year"), _spell(year, "en", "year")


def spell_ordinal(number: int) -> TextPair:
    """Spell an ordinal; the German one in the nominative after an article ("dritte")."""
    return _spell(number, "de", "ordinal"), _spell(number, "en", "ordinal")


def draw_number(rng: Random, low: int = 1, max_digits: int = 6) -> int:
    """Draw a number whose length is drawn first: uniform numbers would nearly all have six digits."""
    (num_digits,) = rng.choices(range(1, max_digits + 1), (3, 6, 5, 3, 2, 2)[:max_digits])
    number = rng.randrange(10 ** (num_digits - 1), 10**num_digits)
    if num_digits >= 3 and rng.random() < 0.15:
        number -= number % 10 ** (num_digits - 2)
    return max(low, number)


def draw_amount(rng: Random, low: int = 1, max_digits: int = 6) -> int:
    """Draw a number before a noun; German is undecided about 101, 201 …, which are left out."""
    number = draw_number(rng, low, max_digits)
    return number + 1 if number > 1 and number % 100 == 1 else number


# --- times of day ------------------------------------------------------------------------------------


def spell_clock(hour: int, minute: int) -> TextPair:
    """The time as people say it. 1 ≤ hour ≤ 12; "Minuten" appears unless minute is a round one."""
    this_de, this_en = spell_cardinal(hour)
    next_de, next_en = spell_cardinal(hour % 12 + 1)
    if minute == 0:
        return f"{'ein' if hour == 1 else this_de} Uhr", f"{this_en} o'clock"
    fixed = {
        15: (f"Viertel nach {this_de}", f"quarter past {this_en}"),
        25: (f"fünf vor halb {next_de}", f"twenty-five past {this_en}"),
        30: (f"halb {next_de}", f"half past {this_en}"),
        35: (f"fünf nach halb {next_de}", f"twenty-five to {next_en}"),
        45: (f"Viertel vor {next_de}", f"quarter to {next_en}"),
    }
    if minute in fixed:
        return fixed[minute]
    count = minute if minute < 30 else 60 - minute
    count_de, count_en = spell_cardinal(count)
    if count == 1:
        count_de, count_en = "eine Minute", "one minute"
    elif count % 5:
        count_de, count_en = f"{count_de} Minuten", f"{count_en} minutes"
    if minute < 30:
        return f"{count_de} nach {this_de}", f"{count_en} past {this_en}"
    return f"{count_de} vor {next_de}", f"{count_en} to {next_en}"


def spell_timetable(hour: int, minute: int) -> TextPair:
    """The time as a timetable has it. 1 ≤ hour ≤ 23; a full hour only from 13, as below it is a clock's."""
    hour_de, hour_en = spell_cardinal(hour)
    if hour % 10 == 1 and hour != 11:
        hour_de = hour_de.removesuffix("s")
    if minute == 0:
        return f"{hour_de} Uhr", f"{hour_en} hundred hours"
    minute_de, minute_en = spell_cardinal(minute)
    return f"{hour_de} Uhr {minute_de}", f"{hour_en} {'oh-' if minute < 10 else ''}{minute_en}"


def draw_time(rng: Random) -> TextPair:
    """A time of day, in one of the ways people say it."""
    kind = rng.random()
    if kind < 0.35:
        return spell_clock(rng.randint(1, 12), rng.choice((0, 15, 25, 30, 30, 35, 45)))
    if kind < 0.55:
        return spell_clock(rng.randint(1, 12), rng.randrange(60))
    if kind < 0.65:
        hours, german, english = rng.choice(_TIMES_OF_DAY)
        clock_de, clock_en = spell_clock(rng.choice(hours), 0)
        return f"{clock_de} {german}", f"{clock_en} {english}"
    hour, minute = rng.randint(1, 23), rng.randrange(60)
    return spell_timetable(hour, minute) if hour > 12 or minute else spell_clock(hour, 0)


_TIMES_OF_DAY = (
    (range(5, 12), "morgens", "in the morning"),
    (range(1, 6), "nachmittags", "in the afternoon"),
    (range(6, 12), "abends", "in the evening"),
)

# --- dates -------------------------------------------------------------------------------------------


MONTHS: dict[int, TextPair] = {
    1: ("Januar", "January"),
    2: ("Februar", "February"),
    3: ("März", "March"),
    4: ("April", "April"),
    5: ("Mai", "May"),
    6: ("Juni", "June"),
    7: ("Juli", "July"),
    8: ("August", "August"),
    9: ("September", "September"),
    10: ("Oktober", "October"),
    11: ("November", "November"),
    12: ("Dezember", "December"),
}
# As in `date.weekday()`.
WEEKDAYS: tuple[TextPair, ...] = (
    ("Montag", "Monday"),
    ("Dienstag", "Tuesday"),
    ("Mittwoch", "Wednesday"),
    ("Donnerstag", "Thursday"),
    ("Freitag", "Friday"),
    ("Samstag", "Saturday"),
    ("Sonntag", "Sunday"),
)
_LEAP_YEAR = 2024


def spell_day(when: date, case: str) -> TextPair:
    """Day and month: ("dritte Mai", "third of May"); the German ordinal takes -n unless nominative."""
    ordinal_de, ordinal_en = spell_ordinal(when.day)
    month_de, month_en = MONTHS[when.month]
    ending = "" if case == "nominative" else "n"
    return f"{ordinal_de}{ending} {month_de}", f"{ordinal_en} of {month_en}"


def spell_on_day(when: date, *, weekday: int | None = None, year: bool = False) -> TextPair:
    """A day after its preposition; with a weekday an apposition, whose closing comma `_tidy` may drop."""
    day_de, day_en = spell_day(when, "dative")
    if year:
        year_de, year_en = spell_year(when.year)
        day_de, day_en = f"{day_de} {year_de}", f"{day_en} {year_en}"
    if weekday is None:
        return f"am {day_de}", f"on the {day_en}"
    weekday_de, weekday_en = WEEKDAYS[weekday]
    return f"am {weekday_de}, dem {day_de},", f"on {weekday_en}, the {day_en},"


def draw_day_of_year(rng: Random) -> date:
    """Any day of a leap year."""
    return date.fromordinal(date(_LEAP_YEAR, 1, 1).toordinal() + rng.randrange(366))


def draw_date(rng: Random, first_year: int = 1700, last_year: int = 2025) -> date:
    """Any day from the first year to the last."""
    return date.fromordinal(
        rng.randint(date(first_year, 1, 1).toordinal(), date(last_year, 12, 31).toordinal())
    )


def draw_past(rng: Random) -> TextPair:
    """A date with its year; the weekday, if any, is the true one."""
    when = draw_date(rng)
    kind = rng.random()
    if kind < 0.4:
        return spell_on_day(when, weekday=when.weekday() if kind < 0.2 else None, year=True)
    year_de, year_en = spell_year(when.year)
    if kind < 0.7:
        month_de, month_en = MONTHS[when.month]
        return f"im {month_de} {year_de}", f"in {month_en} {year_en}"
    return f"im Jahr {year_de}", f"in {year_en}"


def draw_when(rng: Random) -> TextPair:
    """A time, a day, or both: the German day comes first, the English one last."""
    time_de, time_en = draw_time(rng)
    day = draw_day_of_year(rng)
    weekday = rng.randrange(7)
    kind = rng.random()
    if kind < 0.5:
        return f"um {time_de}", f"at {time_en}"
    if kind < 0.65:
        return f"am {WEEKDAYS[weekday][0]} um {time_de}", f"at {time_en} on {WEEKDAYS[weekday][1]}"
    day_de, day_en = spell_on_day(day, weekday=weekday if kind > 0.9 else None)
    if kind < 0.8:
        return f"{day_de} um {time_de}", f"at {time_en} {day_en}"
    return day_de, day_en


# --- money -------------------------------------------------------------------------------------------


class Currency(NamedTuple):
    """A unit of money: one of it in German (nominative, accusative), several, and both in English."""

    one_de: str
    one_de_accusative: str
    many_de: str
    one_en: str
    many_en: str


# Written out since the libraries' names are not those people say: num2words has "two euro" and "one
# pound sterling", Babel "US-Dollar" and an undeclined "Britisches Pfund".
_CENT = Currency("ein Cent", "einen Cent", "Cent", "cent", "cents")
_PENNY = Currency("ein Penny", "einen Penny", "Pence", "penny", "pence")
_RAPPEN = Currency("ein Rappen", "einen Rappen", "Rappen", "centime", "centimes")
EURO = (Currency("ein Euro", "einen Euro", "Euro", "euro", "euros"), _CENT)
DOLLAR = (Currency("ein Dollar", "einen Dollar", "Dollar", "dollar", "dollars"), _CENT)
POUND = (Currency("ein Pfund", "ein Pfund", "Pfund", "pound", "pounds"), _PENNY)
FRANC = (Currency("ein Franken", "einen Franken", "Franken", "franc", "francs"), _RAPPEN)
_CURRENCIES = (EURO, DOLLAR, POUND, FRANC)


def _coins(number: int, unit: Currency, case: str) -> TextPair:
    if number == 1:
        return unit.one_de if case == "nominative" else unit.one_de_accusative, f"one {unit.one_en}"
    german, english = spell_cardinal(number)
    return f"{german} {unit.many_de}", f"{english} {unit.many_en}"


def spell_money(
    whole: int, hundredths: int, currency: tuple[Currency, Currency], case: str, *, short: bool = False
) -> TextPair:
    """Spell an amount; `short` gives "drei Euro fünfzig" (for 10 hundredths and more)."""
    whole_pair, rest_pair = _coins(whole, currency[0], case), _coins(hundredths, currency[1], case)
    if not hundredths:
        return whole_pair
    if not whole:
        return rest_pair
    english = f"{whole_pair[1]} and {rest_pair[1]}"
    if short:
        return f"{whole_pair[0]} {spell_cardinal(hundredths)[0]}", english
    return f"{whole_pair[0]} und {rest_pair[0]}", english


def draw_money(rng: Random, case: str) -> TextPair:
    """A sum of money, in the German case given: nominative or accusative."""
    currency = rng.choice(_CURRENCIES) if rng.random() < 0.6 else EURO
    kind = rng.random()
    if kind < 0.5:
        return spell_money(draw_amount(rng), 0, currency, case)
    if kind < 0.6:
        return spell_money(0, rng.randint(1, 99), currency, case)
    whole = draw_amount(rng, max_digits=4)
    if kind < 0.8:
        return spell_money(whole, rng.randint(10, 99), currency, case, short=True)
    return spell_money(whole, rng.randint(1, 99), currency, case)
