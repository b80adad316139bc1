"""Endless German → English corpus of numbers, dates, times of day and sums of money in words.

The corpus is generated, the same on every machine, and requires attention: German puts the units before the
tens ("dreiundzwanzig", "twenty-three"), names the next hour with the half ("halb vier", "half past three"),
and puts the verb last ("…, dass der Zug um halb vier ankommt").

Every German sentence has exactly one English translation, so exact match is a fair measure. A hash of
the German sentence alone decides its part, so a test sentence is never a training sentence.
"""

import hashlib
from collections.abc import Callable, Mapping
from random import Random

from triptych.extras import require_extra
from triptych.training.corpora.spelled import (
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
    fill_in,
    month_of,
    pairs_of,
    rows_of,
    spell_cardinal,
    spell_day,
    spell_ordinal,
    spell_year,
)
from triptych.training.corpora.tasks import TASKS

PARTS = ("train", "valid", "test")
GERMAN_ENGLISH = "german-english"

# Tenths of the hash space; the other tenths are training pairs.
_VALID_TENTH = 8
_TEST_TENTH = 9

# A tenth of all draws belongs to each evaluation part. If forty draws per requested sentence are too few, the
# part is nearly exhausted.
_DRAWS_PER_SENTENCE = 40
_MIN_DRAWS = 1000


def generate_pairs(
    count: int, part: str, seed: int, task: str = GERMAN_ENGLISH
) -> list[TextPair]:
    """Draw sentence pairs of one part of a corpus; sentences of the evaluation parts are distinct."""
    if task == GERMAN_ENGLISH:
        require_extra("demo", "num2words", what="generated text")
        return _collect_pairs(_draw_pair, count, part, seed)
    if task not in TASKS:
        raise ValueError(
            f"task {task!r} does not exist; choose one of {', '.join((GERMAN_ENGLISH, *TASKS))}"
        )
    return _collect_pairs(TASKS[task], count, part, seed)


def part_of(source: str) -> str:
    """Return the part of a source sentence; it does not depend on the seed."""
    digest = hashlib.blake2b(source.encode("utf-8"), digest_size=8).digest()
    tenth = int.from_bytes(digest, "big") % 10
    return {_VALID_TENTH: "valid", _TEST_TENTH: "test"}.get(tenth, "train")


def example_pairs() -> list[TextPair]:
    """Return a few fixed test pairs, a pair per difficulty of this corpus."""
    return [*pairs_of("examples")]


def _collect_pairs(
    draw: Callable[[Random], TextPair], count: int, part: str, seed: int
) -> list[TextPair]:
    if part not in PARTS:
        raise ValueError(
            f"part {part!r} does not exist; choose one of {', '.join(PARTS)}"
        )
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

_VERBS_OF = {
    "vehicles": "moves",
    "shows": "courses",
    "houses": "openings",
    "persons": "habits",
}
_EVENTS = tuple(
    (pairs_of(subjects), rows_of(verbs)) for subjects, verbs in _VERBS_OF.items()
)
_CLAIMS = pairs_of("claims")
_PEOPLE = rows_of("people")
_DEEDS = pairs_of("deeds")
_THINGS = rows_of("things")
_WARES = rows_of("wares")


def _fill_sentence(template: TextPair, pieces: Mapping[str, TextPair]) -> TextPair:
    """Fill a template, and begin with a capital letter."""
    german, english = fill_in(template, pieces)
    return _tidy_sentence(german), _tidy_sentence(english)


def _tidy_sentence(text: str) -> str:
    """Begin with a capital letter, and drop an apposition's closing comma before other punctuation."""
    for doubled in (",.", ",?", ",,"):
        text = text.replace(doubled, doubled[1])
    return text[0].upper() + text[1:]


def _draw_event(rng: Random) -> TextPair:
    subjects, verbs = rng.choice(_EVENTS)
    (
        finite,
        prefix,
        infinitive,
        auxiliary,
        participle,
        finite_en,
        infinitive_en,
        past_en,
    ) = rng.choice(verbs)
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
    return _fill_sentence(rng.choice(pairs_of("events")), pieces)


def _draw_calendar(rng: Random) -> TextPair:
    when = draw_date(rng, 1950, 2049)
    first, last = sorted(rng.sample(range(1, 29), 2))
    pieces = {
        "day": spell_day(when, "nominative"),
        "first": spell_ordinal(first),
        "last": spell_ordinal(last),
        "month": month_of(when),
        "weekday": WEEKDAYS[when.weekday()],
        "year": spell_year(when.year),
    }
    # The first three templates have few sentences, the last template very many.
    (template,) = rng.choices(pairs_of("calendars"), (1, 1, 1, 3, 6))
    return _fill_sentence(template, pieces)


def _draw_count(rng: Random) -> TextPair:
    one_de, many_de, one_en, many_en = rng.choice(_THINGS)
    number = draw_amount(rng)
    number_de, number_en = spell_cardinal(number)
    who, have, who_en = rng.choice(_PEOPLE)
    many = f"{number_de} {many_de}", f"{number_en} {many_en}"
    pieces = {
        "who": (who, who_en),
        "have": (have, ""),
        "things": (one_de, f"one {one_en}") if number == 1 else many,
        "done": rng.choice(_DEEDS),
        "weekday": WEEKDAYS[rng.randrange(7)],
    }
    return _fill_sentence(rng.choice(pairs_of("counts")), pieces)


def _draw_number_sentence(rng: Random) -> TextPair:
    kind = rng.random()
    if kind < 0.4:
        return _fill_sentence(
            rng.choice(pairs_of("measures")),
            {"n": spell_cardinal(draw_amount(rng, low=2))},
        )
    if kind < 0.7:
        return _fill_sentence(
            rng.choice(pairs_of("numbers")), {"n": spell_cardinal(draw_number(rng))}
        )
    return _fill_sentence(
        rng.choice(pairs_of("ranks")), {"n": spell_ordinal(rng.randint(1, 99))}
    )


def _draw_arithmetic(rng: Random) -> TextPair:
    a = draw_number(rng, max_digits=3)
    b = draw_number(rng, max_digits=3)
    pieces = {
        name: spell_cardinal(number)
        for name, number in (("a", a), ("b", b), ("c", a + b))
    }
    return _fill_sentence(rng.choice(pairs_of("sums")), pieces)


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
    return _fill_sentence(rng.choice(pairs_of("prices")), pieces)


def _draw_phrase(rng: Random) -> TextPair:
    """Draw a phrase: a bare number, time, day or sum, in lower case and without a full stop."""
    kind = rng.random()
    if kind < 0.45:
        return spell_cardinal(draw_number(rng))
    if kind < 0.65:
        return draw_time(rng)
    if kind < 0.85:
        return draw_money(rng, "nominative")
    day_de, day_en = spell_day(draw_day_of_year(rng), "nominative")
    return f"der {day_de}", f"the {day_en}"


# Weight of each kind of sentence, in hundredths.
_KINDS: dict[Callable[[Random], TextPair], int] = {
    _draw_phrase: 14,
    _draw_event: 28,
    lambda rng: _fill_sentence(
        rng.choice(pairs_of("histories")), {"when": draw_past(rng)}
    ): 10,
    _draw_calendar: 8,
    _draw_count: 12,
    _draw_number_sentence: 10,
    _draw_arithmetic: 3,
    _draw_price: 15,
}


def _draw_pair(rng: Random) -> TextPair:
    """Draw a pair of any part of the corpus."""
    (draw,) = rng.choices(tuple(_KINDS), tuple(_KINDS.values()))
    return draw(rng)
