"""An endless German → English corpus of numbers, dates, times of day and sums of money in words.

It needs no download, is the same on every machine, and still asks for what attention is for: German
puts the units before the tens ("dreiundzwanzig", "twenty-three"), the coming hour before the half
("halb vier", "half past three") and the verb last ("…, dass der Zug um halb vier ankommt").

Every German sentence has exactly one English translation, so exact match is a fair measure. A hash of
the German sentence alone decides its part, so a test sentence can never be a training sentence.

Cardinals, ordinals and years are spelled by num2words; Babel names the days and months.
"""

import hashlib
from collections.abc import Callable, Mapping
from datetime import date
from functools import lru_cache
from random import Random
from typing import NamedTuple

from babel.dates import get_day_names, get_month_names
from num2words import num2words

Pair = tuple[str, str]
"""A German text and its English translation."""

PARTS = ("train", "valid", "test")

# Tenths of the hash space; the rest is train.
_VALID_TENTH, _TEST_TENTH = 8, 9

# A tenth of all draws belongs to each evaluation part. When forty draws for every sentence wanted do
# not suffice, the part is running out of new sentences.
_DRAWS_PER_SENTENCE = 40
_MIN_DRAWS = 1000

# All of these are test sentences (a test watches over it): no training run has seen them.
_EXAMPLES: tuple[Pair, ...] = (
    ("Das Buch hat dreiundfünfzig Euro gekostet.", "The book cost fifty-three euros."),
    (
        "Alle wissen, dass der Zug um halb vier ankommt.",
        "Everyone knows that the train arrives at half past three.",
    ),
    (
        "Sie wurde am Samstag, dem fünften Mai neunzehnhundertvierundachtzig, geboren.",
        "She was born on Saturday, the fifth of May nineteen eighty-four.",
    ),
    (
        "Für die Karte habe ich einen Euro fünfzig bezahlt.",
        "I paid one euro and fifty cents for the ticket.",
    ),
    (
        "In dieser Stadt wohnen sechstausendfünfhundert Menschen.",
        "Six thousand five hundred people live in this town.",
    ),
    (
        "Steht mein Bruder um fünf nach halb acht auf?",
        "Does my brother get up at twenty-five to eight?",
    ),
    (
        "Weißt du, ob der Zug am Mittwoch um einundzwanzig Uhr siebzehn abfährt?",
        "Do you know whether the train leaves at twenty-one seventeen on Wednesday?",
    ),
    ("Am dritten April kommt meine Schwester zurück.", "On the third of April my sister comes back."),
)


def generate_pairs(count: int, part: str, seed: int) -> list[Pair]:
    """Draw sentence pairs of one part of the corpus.

    Equal arguments give equal pairs, and a larger count only adds pairs at the end. The parts are
    disjoint whatever the seeds. "valid" and "test" hold no sentence twice; "train" may repeat short ones.

    Args:
        count: how many pairs, ≥ 0.
        part: "train" (80 % of all sentences), "valid" or "test" (10 % each).
        seed: any integer; each part has a random stream of its own.

    Returns:
        `count` pairs (German, English), NFC, single spaces, no line breaks.

    Raises:
        ValueError: unknown part, negative count, or more distinct sentences wanted than could be found.
    """
    return _collect_pairs(_draw_pair, count, part, seed)


def part_of(german: str) -> str:
    """The part a German sentence belongs to, whatever the seed."""
    digest = hashlib.blake2b(german.encode("utf-8"), digest_size=8).digest()
    tenth = int.from_bytes(digest, "big") % 10
    return {_VALID_TENTH: "valid", _TEST_TENTH: "test"}.get(tenth, "train")


def example_pairs() -> list[Pair]:
    """A few fixed test pairs, one for each thing that is hard about this corpus."""
    return list(_EXAMPLES)


def example_sentences() -> list[str]:
    """The German side of `example_pairs`."""
    return [german for german, _ in _EXAMPLES]


def _collect_pairs(draw: Callable[[Random], Pair], count: int, part: str, seed: int) -> list[Pair]:
    if part not in PARTS:
        raise ValueError(f"part {part!r} does not exist; choose one of {', '.join(PARTS)}")
    if count < 0:
        raise ValueError(f"count must not be negative; it is {count}")
    # A string seeds Random through SHA-512, the same on every machine.
    rng = Random(f"{part}/{seed}")
    pairs: list[Pair] = []
    seen: set[str] = set()
    max_draws = _MIN_DRAWS + _DRAWS_PER_SENTENCE * count
    for _ in range(max_draws):
        if len(pairs) == count:
            return pairs
        pair = draw(rng)
        if part_of(pair[0]) != part or pair[0] in seen:
            continue
        pairs.append(pair)
        if part != "train":
            seen.add(pair[0])
    if len(pairs) == count:
        return pairs
    raise ValueError(
        f"asked for {count} distinct sentences of part {part!r}, "
        f"but {max_draws} draws gave only {len(pairs)}; ask for fewer"
    )


# --- numbers -----------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def _spell(number: int, language: str, form: str) -> str:
    return str(num2words(number, lang=language, to=form))


def _cardinal(number: int) -> Pair:
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


def _year(year: int) -> Pair:
    return _spell(year, "de", "year"), _spell(year, "en", "year")


def _ordinal(number: int) -> Pair:
    """Spell an ordinal; the German one in the nominative after an article ("dritte")."""
    return _spell(number, "de", "ordinal"), _spell(number, "en", "ordinal")


def _draw_number(rng: Random, low: int = 1, max_digits: int = 6) -> int:
    """Draw a number whose length is drawn first: uniform numbers would nearly all have six digits."""
    (num_digits,) = rng.choices(range(1, max_digits + 1), (3, 6, 5, 3, 2, 2)[:max_digits])
    number = rng.randrange(10 ** (num_digits - 1), 10**num_digits)
    if num_digits >= 3 and rng.random() < 0.15:
        number -= number % 10 ** (num_digits - 2)
    return max(low, number)


def _draw_amount(rng: Random, low: int = 1, max_digits: int = 6) -> int:
    """Draw a number that may stand before a noun.

    German is at odds with itself about "einhundert(und)ein(s) Bücher", so 101, 201 … are left out.
    """
    number = _draw_number(rng, low, max_digits)
    return number + 1 if number > 1 and number % 100 == 1 else number


# --- times of day ------------------------------------------------------------------------------------


def _clock(hour: int, minute: int) -> Pair:
    """The time as people say it. 1 ≤ hour ≤ 12; "Minuten" appears unless minute is a round one."""
    this_de, this_en = _cardinal(hour)
    next_de, next_en = _cardinal(hour % 12 + 1)
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
    count_de, count_en = _cardinal(count)
    if count == 1:
        count_de, count_en = "eine Minute", "one minute"
    elif count % 5:
        count_de, count_en = f"{count_de} Minuten", f"{count_en} minutes"
    if minute < 30:
        return f"{count_de} nach {this_de}", f"{count_en} past {this_en}"
    return f"{count_de} vor {next_de}", f"{count_en} to {next_en}"


def _timetable(hour: int, minute: int) -> Pair:
    """The time as a timetable has it. 1 ≤ hour ≤ 23; a full hour only from 13, as below it is a clock's."""
    hour_de, hour_en = _cardinal(hour)
    if hour % 10 == 1 and hour != 11:
        hour_de = hour_de.removesuffix("s")
    if minute == 0:
        return f"{hour_de} Uhr", f"{hour_en} hundred hours"
    minute_de, minute_en = _cardinal(minute)
    return f"{hour_de} Uhr {minute_de}", f"{hour_en} {'oh-' if minute < 10 else ''}{minute_en}"


def _draw_time(rng: Random) -> Pair:
    kind = rng.random()
    if kind < 0.35:
        return _clock(rng.randint(1, 12), rng.choice((0, 15, 25, 30, 30, 35, 45)))
    if kind < 0.55:
        return _clock(rng.randint(1, 12), rng.randrange(60))
    if kind < 0.65:
        hours, german, english = rng.choice(_TIMES_OF_DAY)
        clock_de, clock_en = _clock(rng.choice(hours), 0)
        return f"{clock_de} {german}", f"{clock_en} {english}"
    hour, minute = rng.randint(1, 23), rng.randrange(60)
    return _timetable(hour, minute) if hour > 12 or minute else _clock(hour, 0)


_TIMES_OF_DAY = (
    (range(5, 12), "morgens", "in the morning"),
    (range(1, 6), "nachmittags", "in the afternoon"),
    (range(6, 12), "abends", "in the evening"),
)

# --- dates -------------------------------------------------------------------------------------------


def _names(german: Mapping[int, str], english: Mapping[int, str]) -> dict[int, Pair]:
    return {key: (german[key], english[key]) for key in german}


_MONTHS = _names(get_month_names(locale="de"), get_month_names(locale="en"))
_WEEKDAYS = _names(get_day_names(locale="de"), get_day_names(locale="en"))
_LEAP_YEAR = 2024


def _day(when: date, case: str) -> Pair:
    """Day and month: ("dritte Mai", "third of May"); the German ordinal takes -n unless nominative."""
    ordinal_de, ordinal_en = _ordinal(when.day)
    month_de, month_en = _MONTHS[when.month]
    ending = "" if case == "nominative" else "n"
    return f"{ordinal_de}{ending} {month_de}", f"{ordinal_en} of {month_en}"


def _on_day(when: date, *, weekday: int | None = None, year: bool = False) -> Pair:
    """A day after its preposition; with a weekday an apposition, whose closing comma `_tidy` may drop."""
    day_de, day_en = _day(when, "dative")
    if year:
        year_de, year_en = _year(when.year)
        day_de, day_en = f"{day_de} {year_de}", f"{day_en} {year_en}"
    if weekday is None:
        return f"am {day_de}", f"on the {day_en}"
    weekday_de, weekday_en = _WEEKDAYS[weekday]
    return f"am {weekday_de}, dem {day_de},", f"on {weekday_en}, the {day_en},"


def _draw_day_of_year(rng: Random) -> date:
    return date.fromordinal(date(_LEAP_YEAR, 1, 1).toordinal() + rng.randrange(366))


def _draw_date(rng: Random, first_year: int = 1700, last_year: int = 2025) -> date:
    return date.fromordinal(
        rng.randint(date(first_year, 1, 1).toordinal(), date(last_year, 12, 31).toordinal())
    )


def _draw_past(rng: Random) -> Pair:
    """A date with its year; the weekday, if any, is the true one."""
    when = _draw_date(rng)
    kind = rng.random()
    if kind < 0.4:
        return _on_day(when, weekday=when.weekday() if kind < 0.2 else None, year=True)
    year_de, year_en = _year(when.year)
    if kind < 0.7:
        month_de, month_en = _MONTHS[when.month]
        return f"im {month_de} {year_de}", f"in {month_en} {year_en}"
    return f"im Jahr {year_de}", f"in {year_en}"


def _draw_when(rng: Random) -> Pair:
    """A time, a day, or both: the German day comes first, the English one last."""
    time_de, time_en = _draw_time(rng)
    day = _draw_day_of_year(rng)
    weekday = rng.randrange(7)
    kind = rng.random()
    if kind < 0.5:
        return f"um {time_de}", f"at {time_en}"
    if kind < 0.65:
        return f"am {_WEEKDAYS[weekday][0]} um {time_de}", f"at {time_en} on {_WEEKDAYS[weekday][1]}"
    day_de, day_en = _on_day(day, weekday=weekday if kind > 0.9 else None)
    if kind < 0.8:
        return f"{day_de} um {time_de}", f"at {time_en} {day_en}"
    return day_de, day_en


# --- money -------------------------------------------------------------------------------------------


class _Currency(NamedTuple):
    one_de: str
    one_de_accusative: str
    many_de: str
    one_en: str
    many_en: str


# Written out since the libraries' names are not those people say: num2words has "two euro" and "one
# pound sterling", Babel "US-Dollar" and an undeclined "Britisches Pfund".
_CENT = _Currency("ein Cent", "einen Cent", "Cent", "cent", "cents")
_PENNY = _Currency("ein Penny", "einen Penny", "Pence", "penny", "pence")
_RAPPEN = _Currency("ein Rappen", "einen Rappen", "Rappen", "centime", "centimes")
_EURO = (_Currency("ein Euro", "einen Euro", "Euro", "euro", "euros"), _CENT)
_DOLLAR = (_Currency("ein Dollar", "einen Dollar", "Dollar", "dollar", "dollars"), _CENT)
_POUND = (_Currency("ein Pfund", "ein Pfund", "Pfund", "pound", "pounds"), _PENNY)
_FRANC = (_Currency("ein Franken", "einen Franken", "Franken", "franc", "francs"), _RAPPEN)
_CURRENCIES = (_EURO, _DOLLAR, _POUND, _FRANC)


def _coins(number: int, unit: _Currency, case: str) -> Pair:
    if number == 1:
        return unit.one_de if case == "nominative" else unit.one_de_accusative, f"one {unit.one_en}"
    german, english = _cardinal(number)
    return f"{german} {unit.many_de}", f"{english} {unit.many_en}"


def _sum_of_money(
    whole: int, hundredths: int, currency: tuple[_Currency, _Currency], case: str, *, short: bool = False
) -> Pair:
    """Spell an amount; `short` gives "drei Euro fünfzig" (for 10 hundredths and more)."""
    whole_pair, rest_pair = _coins(whole, currency[0], case), _coins(hundredths, currency[1], case)
    if not hundredths:
        return whole_pair
    if not whole:
        return rest_pair
    english = f"{whole_pair[1]} and {rest_pair[1]}"
    if short:
        return f"{whole_pair[0]} {_cardinal(hundredths)[0]}", english
    return f"{whole_pair[0]} und {rest_pair[0]}", english


def _draw_money(rng: Random, case: str) -> Pair:
    currency = rng.choice(_CURRENCIES) if rng.random() < 0.6 else _EURO
    kind = rng.random()
    if kind < 0.5:
        return _sum_of_money(_draw_amount(rng), 0, currency, case)
    if kind < 0.6:
        return _sum_of_money(0, rng.randint(1, 99), currency, case)
    whole = _draw_amount(rng, max_digits=4)
    if kind < 0.8:
        return _sum_of_money(whole, rng.randint(10, 99), currency, case, short=True)
    return _sum_of_money(whole, rng.randint(1, 99), currency, case)


# --- sentences ---------------------------------------------------------------------------------------


def _rows(table: str) -> tuple[tuple[str, ...], ...]:
    """The cells of a table, one row a line, cells parted by bars."""
    return tuple(tuple(cell.strip() for cell in line.split("|")) for line in table.strip().splitlines())


def _pairs(table: str) -> tuple[Pair, ...]:
    return tuple((german, english) for german, english in _rows(table))


def _fill(template: Pair, pieces: Mapping[str, Pair]) -> Pair:
    """Make a sentence of a template; both sides of it name their places alike."""
    german = template[0].format_map({name: piece[0] for name, piece in pieces.items()})
    english = template[1].format_map({name: piece[1] for name, piece in pieces.items()})
    return _tidy(german), _tidy(english)


def _tidy(text: str) -> str:
    """Begin with a capital, and end the apposition of a date where the clause ends anyway."""
    for doubled in (",.", ",?", ",,"):
        text = text.replace(doubled, doubled[1])
    return text[0].upper() + text[1:]


# Verbs with a separable prefix, in the third person singular: finite, prefix, infinitive, auxiliary and
# participle; the English finite form, infinitive and past.
_MOVES = _rows("""
    kommt | an     | ankommen     | ist | angekommen     | arrives    | arrive    | arrived
    kommt | zurück | zurückkommen | ist | zurückgekommen | comes back | come back | came back
    fährt | ab     | abfahren     | ist | abgefahren     | leaves     | leave     | left
""")
_COURSES = _rows("""
    fängt | an  | anfangen | hat | angefangen | starts | start | started
    hört  | auf | aufhören | hat | aufgehört  | ends   | end   | ended
""")
_OPENINGS = _rows("""
    macht | auf | aufmachen | hat | aufgemacht | opens  | open  | opened
    macht | zu  | zumachen  | hat | zugemacht  | closes | close | closed
""")
_HABITS = _rows("""
    kommt | zurück | zurückkommen | ist | zurückgekommen | comes back | come back | came back
    ruft  | an     | anrufen      | hat | angerufen      | calls      | call      | called
    steht | auf    | aufstehen    | ist | aufgestanden   | gets up    | get up    | got up
    wacht | auf    | aufwachen    | ist | aufgewacht     | wakes up   | wake up   | woke up
""")
_VEHICLES = _pairs("""
    der Zug    | the train
    der Bus    | the bus
    das Schiff | the ship
    die Fähre  | the ferry
""")
_SHOWS = _pairs("""
    das Konzert | the concert
    der Film    | the film
    die Prüfung | the exam
    das Spiel   | the game
""")
_HOUSES = _pairs("""
    das Geschäft | the shop
    die Bank     | the bank
    das Museum   | the museum
""")
_PERSONS = _pairs("""
    meine Schwester | my sister
    mein Bruder     | my brother
    die Lehrerin    | the teacher
    der Arzt        | the doctor
    das Kind        | the child
""")
_EVENTS = ((_VEHICLES, _MOVES), (_SHOWS, _COURSES), (_HOUSES, _OPENINGS), (_PERSONS, _HABITS))
_CLAIMS = _pairs("""
    ich weiß    | I know
    sie sagt    | she says
    wir hoffen  | we hope
    er glaubt   | he believes
    alle wissen | everyone knows
""")
_EVENT_TEMPLATES = _pairs("""
    {who} {finite} {when} {prefix}. | {who} {finite} {when}.
    {who} {auxiliary} {when} {participle}. | {who} {participle} {when}.
    {who} soll {when} {infinitive}. | {who} is supposed to {infinitive} {when}.
    {when} {finite} {who} {prefix}. | {when} {who} {finite}.
    {finite} {who} {when} {prefix}? | does {who} {infinitive} {when}?
    {claim}, dass {who} {when} {prefix}{finite}. | {claim} that {who} {finite} {when}.
    {claim}, dass {who} {when} {participle} {auxiliary}. | {claim} that {who} {participle} {when}.
    weißt du, ob {who} {when} {prefix}{finite}? | do you know whether {who} {finite} {when}?
    wir beeilen uns, weil {who} {when} {prefix}{finite}. | we are hurrying because {who} {finite} {when}.
""")


def _draw_event(rng: Random) -> Pair:
    subjects, verbs = rng.choice(_EVENTS)
    finite, prefix, infinitive, auxiliary, participle, finite_en, infinitive_en, past_en = rng.choice(verbs)
    pieces = {
        "who": rng.choice(subjects),
        "when": _draw_when(rng),
        "claim": rng.choice(_CLAIMS),
        "finite": (finite, finite_en),
        "infinitive": (infinitive, infinitive_en),
        "participle": (participle, past_en),
        "prefix": (prefix, ""),
        "auxiliary": (auxiliary, ""),
    }
    return _fill(rng.choice(_EVENT_TEMPLATES), pieces)


_HISTORIES = _pairs("""
    sie wurde {when} geboren. | she was born {when}.
    mein Großvater wurde {when} geboren. | my grandfather was born {when}.
    das Haus wurde {when} gebaut. | the house was built {when}.
    ich glaube, dass die Brücke {when} gebaut wurde. | I believe that the bridge was built {when}.
    {when} ist er nach Berlin gezogen. | {when} he moved to Berlin.
    weißt du, dass sie {when} geheiratet haben? | do you know that they got married {when}?
    der Brief wurde {when} in Wien geschrieben. | the letter was written in Vienna {when}.
""")


def _draw_history(rng: Random) -> Pair:
    return _fill(rng.choice(_HISTORIES), {"when": _draw_past(rng)})


_CALENDARS = _pairs("""
    heute ist der {day}. | today is the {day}.
    morgen ist der {day}. | tomorrow is the {day}.
    gestern war der {day}. | yesterday was the {day}.
    sie bleibt vom {first}n bis zum {last}n {month}. | she stays from the {first} to the {last} of {month}.
    heute ist {weekday}, der {day} {year}. | today is {weekday}, the {day} {year}.
""")


def _draw_calendar(rng: Random) -> Pair:
    when = _draw_date(rng, 1950, 2049)
    first, last = sorted(rng.sample(range(1, 29), 2))
    pieces = {
        "day": _day(when, "nominative"),
        "first": _ordinal(first),
        "last": _ordinal(last),
        "month": _MONTHS[when.month],
        "weekday": _WEEKDAYS[when.weekday()],
        "year": _year(when.year),
    }
    # The first three have few sentences to give, the last one very many.
    (template,) = rng.choices(_CALENDARS, (1, 1, 1, 3, 6))
    return _fill(template, pieces)


# One in the accusative, many; one and many in English.
_THINGS = _rows("""
    ein Buch    | Bücher | book    | books
    einen Apfel | Äpfel  | apple   | apples
    eine Katze  | Katzen | cat     | cats
    einen Stuhl | Stühle | chair   | chairs
    eine Blume  | Blumen | flower  | flowers
    ein Ei      | Eier   | egg     | eggs
    einen Brief | Briefe | letter  | letters
    ein Bild    | Bilder | picture | pictures
""")
_PEOPLE = _rows("""
    ich          | habe  | I
    er           | hat   | he
    sie          | hat   | she
    wir          | haben | we
    meine Mutter | hat   | my mother
    der Nachbar  | hat   | the neighbour
""")
_DEEDS = _pairs("""
    gekauft  | bought
    verkauft | sold
    gefunden | found
    gezählt  | counted
    gesehen  | saw
""")
_COUNT_TEMPLATES = _pairs("""
    {who} {have} {things} {done}. | {who} {done} {things}.
    {who} {have} gestern {things} {done}. | {who} {done} {things} yesterday.
    {things} {have} {who} am {weekday} {done}. | on {weekday} {who} {done} {things}.
    sie sagen, dass {who} {things} {done} {have}. | they say that {who} {done} {things}.
    wir müssen heute noch {things} finden. | we still have to find {things} today.
    kannst du mir bitte {things} bringen? | can you please bring me {things}?
""")


def _draw_count(rng: Random) -> Pair:
    one_de, many_de, one_en, many_en = rng.choice(_THINGS)
    number = _draw_amount(rng)
    number_de, number_en = _cardinal(number)
    who, have, who_en = rng.choice(_PEOPLE)
    pieces = {
        "who": (who, who_en),
        "have": (have, ""),
        "things": (one_de, f"one {one_en}")
        if number == 1
        else (f"{number_de} {many_de}", f"{number_en} {many_en}"),
        "done": rng.choice(_DEEDS),
        "weekday": _WEEKDAYS[rng.randrange(7)],
    }
    return _fill(rng.choice(_COUNT_TEMPLATES), pieces)


_MEASURES = _pairs("""
    in dieser Stadt wohnen {n} Menschen. | {n} people live in this town.
    der Berg ist {n} Meter hoch. | the mountain is {n} metres high.
    ich glaube, dass der Fluss {n} Kilometer lang ist. | I believe that the river is {n} kilometres long.
    das Haus ist {n} Jahre alt. | the house is {n} years old.
    das Paket, das gestern kam, wiegt {n} Gramm. | the parcel that came yesterday weighs {n} grams.
    bis zum Bahnhof sind es {n} Schritte. | it is {n} steps to the station.
""")
_NUMBERS = _pairs("""
    die Antwort steht auf Seite {n}. | the answer is on page {n}.
    dein Koffer ist in Zimmer {n}. | your suitcase is in room {n}.
    hast du die Zahl {n} gesehen? | did you see the number {n}?
    die gesuchte Zahl ist {n}. | the number we are looking for is {n}.
""")
_RANKS = _pairs("""
    er wohnt im {n}n Stock. | he lives on the {n} floor.
    sie sagt, dass er in der {n}n Reihe sitzt. | she says that he is sitting in the {n} row.
    das war schon mein {n}r Versuch. | that was already my {n} attempt.
""")


def _draw_number_sentence(rng: Random) -> Pair:
    kind = rng.random()
    if kind < 0.4:
        return _fill(rng.choice(_MEASURES), {"n": _cardinal(_draw_amount(rng, low=2))})
    if kind < 0.7:
        return _fill(rng.choice(_NUMBERS), {"n": _cardinal(_draw_number(rng))})
    return _fill(rng.choice(_RANKS), {"n": _ordinal(rng.randint(1, 99))})


_SUMS = _pairs("""
    {a} plus {b} ist {c}. | {a} plus {b} is {c}.
    {c} minus {b} ist {a}. | {c} minus {b} is {a}.
""")


def _draw_arithmetic(rng: Random) -> Pair:
    a, b = _draw_number(rng, max_digits=3), _draw_number(rng, max_digits=3)
    return _fill(rng.choice(_SUMS), {"a": _cardinal(a), "b": _cardinal(b), "c": _cardinal(a + b)})


# Nominative, accusative, pronoun in the accusative; English.
_WARES = _rows("""
    das Buch    | das Buch    | es  | the book
    der Kuchen  | den Kuchen  | ihn | the cake
    die Lampe   | die Lampe   | sie | the lamp
    das Fahrrad | das Fahrrad | es  | the bicycle
    der Mantel  | den Mantel  | ihn | the coat
    die Karte   | die Karte   | sie | the ticket
""")
_PRICE_TEMPLATES = _pairs("""
    {ware} kostet {money}. | {ware} costs {money}.
    {ware} hat {money} gekostet. | {ware} cost {money}.
    {claim}, dass {ware} {money} kostet. | {claim} that {ware} costs {money}.
    {claim}, dass {ware} {money} gekostet hat. | {claim} that {ware} cost {money}.
    wenn {ware} {money} kostet, kaufe ich {it}. | if {ware} costs {money}, I will buy it.
    für {object} {have} {who} {money} bezahlt. | {who} paid {money} for {object}.
    {who} {have} {money} für {object} bezahlt. | {who} paid {money} for {object}.
    wir müssen ihm noch {money} zahlen. | we still have to pay him {money}.
    kannst du mir bis {weekday} {money} leihen? | can you lend me {money} until {weekday}?
""")


def _draw_price(rng: Random) -> Pair:
    ware, ware_accusative, it, ware_en = rng.choice(_WARES)
    who, have, who_en = rng.choice(_PEOPLE)
    pieces = {
        "ware": (ware, ware_en),
        "object": (ware_accusative, ware_en),
        "it": (it, ""),
        "who": (who, who_en),
        "have": (have, ""),
        "money": _draw_money(rng, "accusative"),
        "claim": rng.choice(_CLAIMS),
        "weekday": _WEEKDAYS[rng.randrange(7)],
    }
    return _fill(rng.choice(_PRICE_TEMPLATES), pieces)


def _draw_phrase(rng: Random) -> Pair:
    """No sentence at all: the bare number, time, day or sum, in lower case and without a full stop."""
    kind = rng.random()
    if kind < 0.45:
        return _cardinal(_draw_number(rng))
    if kind < 0.65:
        return _draw_time(rng)
    if kind < 0.85:
        return _draw_money(rng, "nominative")
    day_de, day_en = _day(_draw_day_of_year(rng), "nominative")
    return f"der {day_de}", f"the {day_en}"


# How often each kind is drawn, in hundredths.
_FAMILIES: tuple[tuple[Callable[[Random], Pair], int], ...] = (
    (_draw_phrase, 14),
    (_draw_event, 28),
    (_draw_history, 10),
    (_draw_calendar, 8),
    (_draw_count, 12),
    (_draw_number_sentence, 10),
    (_draw_arithmetic, 3),
    (_draw_price, 15),
)
_DRAWS = tuple(draw for draw, _ in _FAMILIES)
_WEIGHTS = tuple(weight for _, weight in _FAMILIES)


def _draw_pair(rng: Random) -> Pair:
    """Draw from the whole corpus, whatever the part."""
    (draw,) = rng.choices(_DRAWS, _WEIGHTS)
    return draw(rng)
