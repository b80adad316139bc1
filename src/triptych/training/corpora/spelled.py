"""German and English words for numbers, times of day, dates and sums of money.

num2words, of the extra `[demo]`, spells cardinals, ordinals and years. Other words and the templates of
sentences are in `german_english.toml`.
"""

import tomllib
from collections.abc import Mapping
from datetime import date
from functools import cache, lru_cache
from pathlib import Path
from random import Random

TextPair = tuple[str, str]
"""German text and its English translation."""

_TABLES = tomllib.loads(
    Path(__file__).with_name("german_english.toml").read_text(encoding="utf-8")
)


@cache
def rows_of(table: str) -> tuple[tuple[str, ...], ...]:
    """Return the cells of a table by rows."""
    return tuple(
        tuple(map(str.strip, line.split("|")))
        for line in _TABLES[table].strip().splitlines()
    )


@cache
def pairs_of(table: str) -> tuple[TextPair, ...]:
    return tuple((german, english) for german, english in rows_of(table))


def fill_in(template: TextPair, pieces: Mapping[str, TextPair]) -> TextPair:
    """Fill a template; German and English use the same field names."""
    german = template[0].format_map({name: piece[0] for name, piece in pieces.items()})
    english = template[1].format_map({name: piece[1] for name, piece in pieces.items()})
    return german, english


# --- numbers -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _spell(number: int, form: str) -> TextPair:
    from num2words import num2words

    return str(num2words(number, lang="de", to=form)), str(
        num2words(number, lang="en", to=form)
    )


def spell_cardinal(number: int) -> TextPair:
    """Spell 0 ≤ number < 1,000,000 in both languages."""
    thousands, rest = divmod(number, 1000)
    if not thousands:
        return _spell(rest, "cardinal")
    # num2words writes "einhunderteinstausend" for 101,000, and in English a comma after the thousands, as at
    # the end of a clause. Joining the two halves here avoids these forms, and keeps the cache small.
    german, english = _spell(thousands, "cardinal")
    if german.endswith("eins"):
        german = german.removesuffix("s")
    if not rest:
        return f"{german}tausend", f"{english} thousand"
    rest_de, rest_en = _spell(rest, "cardinal")
    link = " " if rest >= 100 else " and "
    return f"{german}tausend{rest_de}", f"{english} thousand{link}{rest_en}"


def spell_year(year: int) -> TextPair:
    """Spell a year of a date: 1984 is nineteen eighty-four."""
    return _spell(year, "year")


def spell_ordinal(number: int) -> TextPair:
    """Spell an ordinal; the German ordinal is in the nominative after an article ("dritte")."""
    return _spell(number, "ordinal")


def draw_number(rng: Random, low: int = 1, max_digits: int = 6) -> int:
    """Draw a number, beginning with its length: nearly all uniform integers would have six digits."""
    (num_digits,) = rng.choices(
        range(1, max_digits + 1), (3, 6, 5, 3, 2, 2)[:max_digits]
    )
    number = rng.randrange(10 ** (num_digits - 1), 10**num_digits)
    if num_digits >= 3 and rng.random() < 0.15:
        number -= number % 10 ** (num_digits - 2)
    return max(low, number)


def draw_amount(rng: Random, low: int = 1, max_digits: int = 6) -> int:
    """Draw a number before a noun, without 101, 201 …: their German form varies."""
    number = draw_number(rng, low, max_digits)
    return number + 1 if number > 1 and number % 100 == 1 else number


# --- times of day ------------------------------------------------------------------------------------

# Templates of the minutes with special names: quarters, and minutes near the half hour.
_ROUND_TIMES = {
    int(minute): (german, english) for minute, german, english in rows_of("round_times")
}
_AFTER, _BEFORE = pairs_of("other_times")


def spell_clock(hour: int, minute: int) -> TextPair:
    """Spell a time in colloquial form, 1 ≤ hour ≤ 12; "Minuten" is left out for multiples of five."""
    # German counts from the half hour near it, and names the next hour: "fünf vor halb vier" is 3:25.
    this = spell_cardinal(hour)
    if minute == 0:
        return f"{'ein' if hour == 1 else this[0]} Uhr", f"{this[1]} o'clock"
    number = minute if minute < 30 else 60 - minute
    count = spell_cardinal(number)
    if number == 1:
        count = "eine Minute", "one minute"
    elif number % 5:
        count = f"{count[0]} Minuten", f"{count[1]} minutes"
    template = _ROUND_TIMES.get(minute, _AFTER if minute < 30 else _BEFORE)
    return fill_in(
        template, {"this": this, "next": spell_cardinal(hour % 12 + 1), "count": count}
    )


def spell_timetable(hour: int, minute: int) -> TextPair:
    """Spell a time in timetable form, 1 ≤ hour ≤ 23; full hours only from 13 (else `spell_clock`)."""
    hour_de, hour_en = spell_cardinal(hour)
    if hour % 10 == 1 and hour != 11:
        hour_de = hour_de.removesuffix("s")
    if minute == 0:
        return f"{hour_de} Uhr", f"{hour_en} hundred hours"
    minute_de, minute_en = spell_cardinal(minute)
    return (
        f"{hour_de} Uhr {minute_de}",
        f"{hour_en} {'oh-' if minute < 10 else ''}{minute_en}",
    )


def draw_time(rng: Random) -> TextPair:
    """Draw a time of day in a random form."""
    kind = rng.random()
    if kind < 0.35:
        return spell_clock(rng.randint(1, 12), rng.choice((0, 15, 25, 30, 30, 35, 45)))
    if kind < 0.55:
        return spell_clock(rng.randint(1, 12), rng.randrange(60))
    if kind < 0.65:
        hours, german, english = rng.choice(_TIMES_OF_DAY)
        clock_de, clock_en = spell_clock(rng.choice(hours), 0)
        return f"{clock_de} {german}", f"{clock_en} {english}"
    hour = rng.randint(1, 23)
    minute = rng.randrange(60)
    return (
        spell_timetable(hour, minute) if hour > 12 or minute else spell_clock(hour, 0)
    )


# Full hours, and the words after them.
_TIMES_OF_DAY = tuple(
    (range(int(first), int(last) + 1), german, english)
    for first, last, german, english in rows_of("times_of_day")
)

# --- dates -------------------------------------------------------------------------------------------

MONTHS = pairs_of("months")
WEEKDAYS = pairs_of("weekdays")
_LEAP_YEAR = 2024


def month_of(when: date) -> TextPair:
    return MONTHS[when.month - 1]


def spell_day(when: date, case: str) -> TextPair:
    """Spell day and month ("dritte Mai", "third of May"); the German ordinal ends in -n unless nominative."""
    german = "{day} {month}" if case == "nominative" else "{day}n {month}"
    return fill_in(
        (german, "{day} of {month}"),
        {"day": spell_ordinal(when.day), "month": month_of(when)},
    )


def spell_on_day(
    when: date, *, weekday: int | None = None, year: bool = False
) -> TextPair:
    """Spell a day after its preposition.

    With a weekday, the day is an apposition; `_tidy_sentence` may drop its closing comma.
    """
    day = spell_day(when, "dative")
    if year:
        day = fill_in(
            ("{day} {year}", "{day} {year}"),
            {"day": day, "year": spell_year(when.year)},
        )
    if weekday is None:
        return f"am {day[0]}", f"on the {day[1]}"
    template = "am {weekday}, dem {day},", "on {weekday}, the {day},"
    return fill_in(template, {"weekday": WEEKDAYS[weekday], "day": day})


def draw_day_of_year(rng: Random) -> date:
    """Draw a day of a leap year."""
    return date.fromordinal(date(_LEAP_YEAR, 1, 1).toordinal() + rng.randrange(366))


def draw_date(rng: Random, first_year: int = 1700, last_year: int = 2025) -> date:
    """Draw a day from the first year to the last."""
    first = date(first_year, 1, 1)
    last = date(last_year, 12, 31)
    return date.fromordinal(rng.randint(first.toordinal(), last.toordinal()))


def draw_past(rng: Random) -> TextPair:
    """Draw a past date with its year; a weekday is correct for the date."""
    when = draw_date(rng)
    kind = rng.random()
    if kind < 0.4:
        return spell_on_day(
            when, weekday=when.weekday() if kind < 0.2 else None, year=True
        )
    template = (
        ("im {month} {year}", "in {month} {year}")
        if kind < 0.7
        else ("im Jahr {year}", "in {year}")
    )
    return fill_in(template, {"month": month_of(when), "year": spell_year(when.year)})


def draw_when(rng: Random) -> TextPair:
    """Draw a time, a day, or a time and a day; the day is first in German and last in English."""
    time = draw_time(rng)
    when = draw_day_of_year(rng)
    weekday = rng.randrange(7)
    kind = rng.random()
    if kind < 0.5:
        return f"um {time[0]}", f"at {time[1]}"
    if kind < 0.65:
        day = f"am {WEEKDAYS[weekday][0]}", f"on {WEEKDAYS[weekday][1]}"
    else:
        day = spell_on_day(when, weekday=weekday if kind > 0.9 else None)
    return (
        fill_in(("{day} um {time}", "at {time} {day}"), {"day": day, "time": time})
        if kind < 0.8
        else day
    )


# --- money -------------------------------------------------------------------------------------------

Unit = tuple[str, ...]  # row of the table
_UNITS = rows_of("units")
# Pairs of a currency's unit and its hundredth.
EURO, DOLLAR, POUND, FRANC = _CURRENCIES = tuple(
    zip(_UNITS[::2], _UNITS[1::2], strict=True)
)


def _coins(number: int, unit: Unit, case: str) -> TextPair:
    one, one_accusative, many, one_en, many_en = unit
    if number == 1:
        return one if case == "nominative" else one_accusative, f"one {one_en}"
    german, english = spell_cardinal(number)
    return f"{german} {many}", f"{english} {many_en}"


def spell_money(
    whole: int,
    hundredths: int,
    currency: tuple[Unit, Unit],
    case: str,
    *,
    short: bool = False,
) -> TextPair:
    """Spell an amount; `short` gives "drei Euro fünfzig" (for 10 hundredths and more)."""
    units = _coins(whole, currency[0], case)
    cents = _coins(hundredths, currency[1], case)
    if not hundredths:
        return units
    if not whole:
        return cents
    german = (
        f"{units[0]} {spell_cardinal(hundredths)[0]}"
        if short
        else f"{units[0]} und {cents[0]}"
    )
    return german, f"{units[1]} and {cents[1]}"


def draw_money(rng: Random, case: str) -> TextPair:
    """Draw a sum of money in a German case, nominative or accusative."""
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
