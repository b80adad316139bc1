"""An endless German → English corpus of numbers, dates, times of day and sums of money in words.

It needs no download, is the same on every machine, and still asks for what attention is for: German
puts the units before the tens ("dreiundzwanzig", "twenty-three"), the coming hour before the half
("halb vier", "half past three") and the verb last ("…, dass der Zug um halb vier ankommt").

Every German sentence has exactly one English translation, so exact match is a fair measure. A hash of
the German sentence alone decides its part, so a test sentence can never be a training sentence.
"""

import hashlib
from collections.abc import Callable, Mapping
from random import Random

from triptych.extras import require_extra
from triptych.text.spelled import (
    MONTHS,
    WEEKDAYS,
    TextPair,
    draw_amount,
    draw_date,
    draw_day_of_year,
    draw_money,
    draw_number,
    draw_past,
    draw_time,
    draw_when,
    spell_cardinal,
    spell_day,
    spell_ordinal,
    spell_year,
)
from triptych.text.tasks import TASKS

PARTS = ("train", "valid", "test")
GERMAN_ENGLISH = "german-english"

# Tenths of the hash space; the rest is train.
_VALID_TENTH, _TEST_TENTH = 8, 9

# A tenth of all draws belongs to each evaluation part. When forty draws for every sentence wanted do
# not suffice, the part is running out of new sentences.
_DRAWS_PER_SENTENCE = 40
_MIN_DRAWS = 1000

# All of these are test sentences (a test watches over it): no training run has seen them.
_EXAMPLES: tuple[TextPair, ...] = (
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


def generate_pairs(count: int, part: str, seed: int, task: str = GERMAN_ENGLISH) -> list[TextPair]:
    """Draw sentence pairs of one part of a corpus."""
    if task == GERMAN_ENGLISH:
        require_extra("demo", "num2words", what="generated text")
        return _collect_pairs(_draw_pair, count, part, seed)
    if task not in TASKS:
        raise ValueError(f"task {task!r} does not exist; choose one of {', '.join((GERMAN_ENGLISH, *TASKS))}")
    return _collect_pairs(TASKS[task], count, part, seed)


def part_of(source: str) -> str:
    """The part a source sentence belongs to, whatever the seed."""
    digest = hashlib.blake2b(source.encode("utf-8"), digest_size=8).digest()
    tenth = int.from_bytes(digest, "big") % 10
    return {_VALID_TENTH: "valid", _TEST_TENTH: "test"}.get(tenth, "train")


def example_pairs() -> list[TextPair]:
    """A few fixed test pairs, one for each thing that is hard about this corpus."""
    return list(_EXAMPLES)


def _collect_pairs(draw: Callable[[Random], TextPair], count: int, part: str, seed: int) -> list[TextPair]:
    if part not in PARTS:
        raise ValueError(f"part {part!r} does not exist; choose one of {', '.join(PARTS)}")
    if count < 0:
        raise ValueError(f"count must not be negative; it is {count}")
    # A string seeds Random through SHA-512, the same on every machine.
    rng = Random(f"{part}/{seed}")
    pairs: list[TextPair] = []
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


# --- sentences ---------------------------------------------------------------------------------------


def _rows(table: str) -> tuple[tuple[str, ...], ...]:
    """The cells of a table, one row a line, cells parted by bars."""
    return tuple(tuple(cell.strip() for cell in line.split("|")) for line in table.strip().splitlines())


def _pairs(table: str) -> tuple[TextPair, ...]:
    return tuple((german, english) for german, english in _rows(table))


def _fill(template: TextPair, pieces: Mapping[str, TextPair]) -> TextPair:
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


def _draw_event(rng: Random) -> TextPair:
    subjects, verbs = rng.choice(_EVENTS)
    finite, prefix, infinitive, auxiliary, participle, finite_en, infinitive_en, past_en = rng.choice(verbs)
    pieces = {
        "who": rng.choice(subjects),
        "when": draw_when(rng),
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


_CALENDARS = _pairs("""
    heute ist der {day}. | today is the {day}.
    morgen ist der {day}. | tomorrow is the {day}.
    gestern war der {day}. | yesterday was the {day}.
    sie bleibt vom {first}n bis zum {last}n {month}. | she stays from the {first} to the {last} of {month}.
    heute ist {weekday}, der {day} {year}. | today is {weekday}, the {day} {year}.
""")


def _draw_calendar(rng: Random) -> TextPair:
    when = draw_date(rng, 1950, 2049)
    first, last = sorted(rng.sample(range(1, 29), 2))
    pieces = {
        "day": spell_day(when, "nominative"),
        "first": spell_ordinal(first),
        "last": spell_ordinal(last),
        "month": MONTHS[when.month],
        "weekday": WEEKDAYS[when.weekday()],
        "year": spell_year(when.year),
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


def _draw_count(rng: Random) -> TextPair:
    one_de, many_de, one_en, many_en = rng.choice(_THINGS)
    number = draw_amount(rng)
    number_de, number_en = spell_cardinal(number)
    who, have, who_en = rng.choice(_PEOPLE)
    pieces = {
        "who": (who, who_en),
        "have": (have, ""),
        "things": (one_de, f"one {one_en}")
        if number == 1
        else (f"{number_de} {many_de}", f"{number_en} {many_en}"),
        "done": rng.choice(_DEEDS),
        "weekday": WEEKDAYS[rng.randrange(7)],
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


def _draw_number_sentence(rng: Random) -> TextPair:
    kind = rng.random()
    if kind < 0.4:
        return _fill(rng.choice(_MEASURES), {"n": spell_cardinal(draw_amount(rng, low=2))})
    if kind < 0.7:
        return _fill(rng.choice(_NUMBERS), {"n": spell_cardinal(draw_number(rng))})
    return _fill(rng.choice(_RANKS), {"n": spell_ordinal(rng.randint(1, 99))})


_SUMS = _pairs("""
    {a} plus {b} ist {c}. | {a} plus {b} is {c}.
    {c} minus {b} ist {a}. | {c} minus {b} is {a}.
""")


def _draw_arithmetic(rng: Random) -> TextPair:
    a, b = draw_number(rng, max_digits=3), draw_number(rng, max_digits=3)
    return _fill(
        rng.choice(_SUMS), {"a": spell_cardinal(a), "b": spell_cardinal(b), "c": spell_cardinal(a + b)}
    )


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


def _draw_price(rng: Random) -> TextPair:
    ware, ware_accusative, it, ware_en = rng.choice(_WARES)
    who, have, who_en = rng.choice(_PEOPLE)
    pieces = {
        "ware": (ware, ware_en),
        "object": (ware_accusative, ware_en),
        "it": (it, ""),
        "who": (who, who_en),
        "have": (have, ""),
        "money": draw_money(rng, "accusative"),
        "claim": rng.choice(_CLAIMS),
        "weekday": WEEKDAYS[rng.randrange(7)],
    }
    return _fill(rng.choice(_PRICE_TEMPLATES), pieces)


def _draw_phrase(rng: Random) -> TextPair:
    """No sentence at all: the bare number, time, day or sum, in lower case and without a full stop."""
    kind = rng.random()
    if kind < 0.45:
        return spell_cardinal(draw_number(rng))
    if kind < 0.65:
        return draw_time(rng)
    if kind < 0.85:
        return draw_money(rng, "nominative")
    day_de, day_en = spell_day(draw_day_of_year(rng), "nominative")
    return f"der {day_de}", f"the {day_en}"


# How often each kind is drawn, in hundredths.
_FAMILIES: tuple[tuple[Callable[[Random], TextPair], int], ...] = (
    (_draw_phrase, 14),
    (_draw_event, 28),
    (lambda rng: _fill(rng.choice(_HISTORIES), {"when": draw_past(rng)}), 10),
    (_draw_calendar, 8),
    (_draw_count, 12),
    (_draw_number_sentence, 10),
    (_draw_arithmetic, 3),
    (_draw_price, 15),
)
_DRAWS = tuple(draw for draw, _ in _FAMILIES)
_WEIGHTS = tuple(weight for _, weight in _FAMILIES)


def _draw_pair(rng: Random) -> TextPair:
    """Draw from the whole corpus, whatever the part."""
    (draw,) = rng.choices(_DRAWS, _WEIGHTS)
    return draw(rng)
