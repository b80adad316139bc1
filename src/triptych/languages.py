"""Codes of languages, and their names: `de`, `pt-BR`, `zh-Hans`, NLLB's `eng_Latn`, mBART's `de_DE`.

A code has a language of ISO 639, and may have a script of ISO 15924 and a region of ISO 3166. `languages.tsv`
lists the languages by their shortest codes, with usual script, English name and alternative codes.
The names follow Unicode's CLDR.
"""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

# Names of the scripts.
_SCRIPTS = {
    **{
        "Arab": "Arabic",
        "Beng": "Bengali",
        "Cyrl": "Cyrillic",
        "Deva": "Devanagari",
        "Guru": "Gurmukhi",
    },
    **{
        "Hans": "Simplified",
        "Hant": "Traditional",
        "Hebr": "Hebrew",
        "Hira": "Hiragana",
        "Latn": "Latin",
    },
    **{
        "Mong": "Mongolian",
        "Mtei": "Meitei Mayek",
        "Olck": "Ol Chiki",
        "Tfng": "Tifinagh",
        "Tibt": "Tibetan",
    },
}
# Names of the regions with separate translators.
_REGIONS = {
    **{
        "AR": "Argentina",
        "AT": "Austria",
        "AU": "Australia",
        "BE": "Belgium",
        "BR": "Brazil",
        "CA": "Canada",
    },
    **{
        "CH": "Switzerland",
        "CL": "Chile",
        "CN": "China",
        "CO": "Colombia",
        "GB": "United Kingdom",
    },
    **{
        "HK": "Hong Kong",
        "IE": "Ireland",
        "IN": "India",
        "MO": "Macao",
        "MX": "Mexico",
        "NZ": "New Zealand",
    },
    **{
        "PE": "Peru",
        "PT": "Portugal",
        "SG": "Singapore",
        "TW": "Taiwan",
        "US": "United States",
    },
    **{"VE": "Venezuela", "ZA": "South Africa", "419": "Latin America"},
}
_REGIONS_OF = {
    "de": "AT CH BE",
    "en": "AU CA GB IE IN NZ US ZA",
    "es": "AR CL CO MX PE US VE 419",
    "fr": "BE CA CH",
    "it": "CH",
    "nl": "BE",
    "pt": "BR PT",
    "zh": "CN HK MO SG TW",
}
_SCRIPT_IN = {"CN": "Hans", "SG": "Hans", "HK": "Hant", "MO": "Hant", "TW": "Hant"}
# LibreTranslate's codes outside ISO 639.
_OTHERS = {"pb": "pt-BR", "zt": "zh-Hant"}
_SEVERAL_SCRIPTS = {"zh"}  # languages whose English name includes the script
_PARTS = re.compile(
    r"([a-z]{2,3})(?:[-_]([a-z]{4}))?(?:[-_]([a-z]{2}|\d{3}))?", re.IGNORECASE
)
_MOST_PARTS = 3


class Language(NamedTuple):
    """Language of a code, comparable however the code is written.

    Attributes:
        language: shortest code of ISO 639.
        script: script; the usual script of the language if the code does not name a script.
        region: region, or None. Chinese regions stand for scripts.
    """

    language: str
    script: str
    region: str | None = None

    @property
    def name(self) -> str:
        """English name, such as "Chinese (Traditional)"."""
        usual, name, _ = _languages()[self.language]
        notes = [_REGIONS.get(self.region, self.region)] if self.region else []
        if self.script != usual or self.language in _SEVERAL_SCRIPTS:
            notes.insert(0, _SCRIPTS.get(self.script, self.script))
        return f"{name} ({', '.join(notes)})" if notes else name

    def fits(self, other: "Language") -> bool:
        """Return True for the same language and script, unless both codes name different regions."""
        regions = {self.region, other.region} - {None}
        return self[:2] == other[:2] and len(regions) < 2


@cache
def _languages() -> dict[str, tuple[str, str, tuple[str, ...]]]:
    """Return script, name and other codes of each language."""
    table = Path(__file__).with_suffix(".tsv").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in table.splitlines())
    return {
        code: (script, name, tuple(others.split()))
        for code, script, name, others in rows
    }


@cache
def _shortest() -> dict[str, str]:
    """Return the shortest code of each code."""
    languages = _languages()
    shortest = dict[str, str]()
    for code, (_, _, others) in languages.items():
        shortest |= dict.fromkeys(others, code)
    return shortest | {code: code for code in languages}


@cache
def find_language(code: str) -> Language | None:
    """Return the language of a code in any case, with `-` or `_`; None if the code is unknown."""
    found = _PARTS.fullmatch(_OTHERS.get(code.lower(), code))
    if found is None or (language := _shortest().get(found[1].lower())) is None:
        return None
    script = found[2].title() if found[2] else ""
    region = found[3].upper() if found[3] else ""
    if language == "zh":
        script = script or _SCRIPT_IN.get(region, "")
        region = ""
    if region not in _REGIONS or (
        region == language.upper() and not _is_usual(language, region)
    ):
        region = ""  # de_DE, en_XX and ja_JP are only languages
    return Language(language, script or _languages()[language][0], region or None)


def closeness(code: str, offered: str) -> int:
    """Return how well an offered code fits a wanted code: 3 as written, 2 as a language, 1 roughly, 0 not."""
    if code == offered:
        return 3
    wanted = find_language(code)
    found = find_language(offered)
    if wanted is None or found is None or not wanted.fits(found):
        return 0
    return 2 if wanted == found else 1


def require_known(codes: tuple[str, str] | None) -> tuple[str, str] | None:
    """Return the codes; raise `ValueError` for an unknown code."""
    if unknown := next(
        (code for code in codes or () if find_language(code) is None), None
    ):
        raise ValueError(
            f"{unknown!r} is no code of a language: give one such as de, pt-BR or zh-Hans"
        )
    return codes


def name_of(code: str) -> str:
    """Return the English name of a code's language; the code itself if it is unknown."""
    language = find_language(code)
    return code if language is None else language.name


def languages_in(name: str) -> tuple[str, str] | None:
    """Return the two codes that a name ends in, as "opus-mt-en-pt-BR" does; None if it does not.

    A region belongs to the code before it if translators for that region are usual: "en-pt-br" is from
    English to Portuguese of Brazil, and "fr-de-en" from German to English.
    """
    ending = re.sub(r"^.*(?:[./]|opus-mt[-_])", "", name, flags=re.IGNORECASE)
    parts = re.split(r"([-_])", ending)
    words = parts[::2]
    # Try the longest codes at the end of the name first.
    for source_length in range(_MOST_PARTS, 0, -1):
        for target_length in range(_MOST_PARTS, 0, -1):
            start = len(words) - source_length - target_length
            if start < 0:
                continue
            middle = len(words) - target_length
            if parts[2 * middle - 1] != "-":
                continue
            source = _code(parts[2 * start : 2 * middle - 1])
            target = _code(parts[2 * middle :])
            if source and target:
                return source, target
    return None


def _code(parts: list[str]) -> str | None:
    """Return parts of a name as a code, if its script and region are usual."""
    code = "".join(parts)
    found = _PARTS.fullmatch(code)
    language = find_language(code)
    if found is None or language is None:
        return None
    script = found[2]
    region = (found[3] or "").upper()
    if script and script.title() not in (*_SCRIPTS, _languages()[language.language][0]):
        return None
    is_mbarts = found[3] is not None and found[3].isupper() and "_" in code  # de_DE
    if (
        region
        and not script
        and not is_mbarts
        and not _is_usual(language.language, region)
    ):
        return None
    return found[1].lower() + code[len(found[1]) :]


def _is_usual(language: str, region: str) -> bool:
    return region in _REGIONS_OF.get(language, "").split()
