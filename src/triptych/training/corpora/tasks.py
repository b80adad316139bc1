"""Small synthetic tasks as sentence pairs; each task tests one ability of attention.

Words are separated by spaces, and a large enough tokenizer has a token for every word. A source has exactly
one answer, so exact match is a fair measure.

| task | source | target |
|---|---|---|
| copy | letters | the same letters |
| reverse | letters | the letters in reverse order |
| sort | letters | the letters in alphabetical order |
| recall | six words of a key and a value, then the keys in another order | the value of each of these keys |
| ring | six names in two rings of three, each with a content | for each name, what its successor carries |
| modular-addition | two residues modulo 59 | their sum |

Recall is associative recall with several questions (Arora et al. 2023, arXiv 2312.04927). Modular addition is
from Power et al. 2022 (arXiv 2201.02177). The ring is from `docs/explanation/questions/one-matrix.md`.
"""

from collections.abc import Callable, Iterable, Mapping
from random import Random
from string import ascii_lowercase
from typing import Literal

from triptych.training.corpora.spelled import TextPair

_LETTERS = ascii_lowercase[:16]
_SHORTEST = 4
_LONGEST = 12
_KEYS = ascii_lowercase[:8]
_VALUES = ascii_lowercase[16:24]
_NUM_PAIRS = 6
_NAMES = ascii_lowercase[:6]
_CONTENTS = ascii_lowercase[12:18]
_RING = 3
_MODULUS = 59


def _of_letters(
    answer: Callable[[list[str]], Iterable[str]],
) -> Callable[[Random], TextPair]:
    def draw(rng: Random) -> TextPair:
        letters = rng.choices(_LETTERS, k=rng.randint(_SHORTEST, _LONGEST))
        return " ".join(letters), " ".join(answer(letters))

    return draw


def _draw_recall(rng: Random) -> TextPair:
    values = {key: rng.choice(_VALUES) for key in rng.sample(_KEYS, _NUM_PAIRS)}
    asked = rng.sample(sorted(values), _NUM_PAIRS)
    told = [key + value for key, value in values.items()]
    return " ".join([*told, "?", *asked]), " ".join(values[key] for key in asked)


def _draw_ring(rng: Random) -> TextPair:
    """Draw a ring with names in random order: a name's position is independent of its successor's."""
    names = rng.sample(range(len(_NAMES)), len(_NAMES))
    contents = dict(zip(names, rng.sample(_CONTENTS, len(names)), strict=True))
    successors = [name - name % _RING + (name + 1) % _RING for name in names]
    told = [_NAMES[name] + contents[name] for name in names]
    return " ".join(told), " ".join(contents[name] for name in successors)


def _draw_modular_addition(rng: Random) -> TextPair:
    one = rng.randrange(_MODULUS)
    other = rng.randrange(_MODULUS)
    return f"{one} {other}", str((one + other) % _MODULUS)


# Names of the tasks in a recipe; a test compares them with `TASKS`.
Task = Literal["copy", "reverse", "sort", "recall", "ring", "modular-addition"]
# Functions that draw a pair, by name of the task.
TASKS: Mapping[str, Callable[[Random], TextPair]] = {
    "copy": _of_letters(list),
    "reverse": _of_letters(reversed),
    "sort": _of_letters(sorted),
    "recall": _draw_recall,
    "ring": _draw_ring,
    "modular-addition": _draw_modular_addition,
}
